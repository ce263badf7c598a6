"""The findings of judges: `findings.toml` has misconceptions and sentences, by exercise and name ("laws": all stations).

    [13]
    global = ["global-generator", "torch's default generator has another state than before."]

A judge says `raise told("13.global", "Rank 0 of 2:")`, or says what it expects, of one value or of facts by name. Of two
misconceptions, the first is for more than what is right, the second for less. A sentence without a misconception is for
judges that are asked by several others: who asks says what is wrong.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from hwfsdp.course.diagnose import first_difference
from hwfsdp.course.verdict import Finding

FINDINGS: dict[str, dict[str, list[str]]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


def told(
    name: str, where: str, got: Any = None, right: Any = None, /, kind: str = "", **words: Any
) -> Finding:
    """The finding of this name.

    Args:
        kind: the misconception, if the name has none of its own.
        where: what the sentence begins with. got, right: what came back, and what should have, which places in the sentence may
            show; so may `words`, and {difference}, the first one of two tensors.
    """
    exercise, _, key = name.partition(".")
    *own, sentence = FINDINGS[exercise][key]
    misconceptions = own or [kind]
    if "{difference}" in sentence:
        is_alike = (got.shape, got.dtype) == (right.shape, right.dtype)
        words["difference"] = (
            first_difference(got, right) if is_alike else f"being {got.dtype}, {tuple(got.shape)}"
        )
    is_less = len(misconceptions) > 1 and got < right
    message = f"{where} {sentence.format(got=got, right=right, **words)}"
    if isinstance(right, bool):  # the sentence says it; "expected False" would say nothing to a learner
        got = right = None
    return Finding(misconceptions[is_less], message, right, got)


def expect(name: str, where: str, got: Any, right: Any, /, **words: Any) -> None:
    """Raise the finding of this name if a value is not the right one."""
    if not is_same(got, right):
        raise told(name, where, got, right, **words)


def compare(where: str, facts: Mapping[str, Any], right: Mapping[str, Any], /, **words: Any) -> None:
    """Raise the finding of the first fact that is wrong. `right` has the right value of the fact "global" as "13.global"."""
    for name, expected in right.items():
        expect(name, where, facts[name.partition(".")[2]], expected, **words)


def is_same(got: Any, right: Any) -> bool:
    """Whether two facts are equal; tensors are of one shape and dtype, too."""
    if isinstance(got, Tensor) and isinstance(right, Tensor):
        return got.dtype == right.dtype and got.shape == right.shape and bool((got == right).all())
    return not isinstance(got, Tensor) and bool(got == right)
