"""The findings of judges: `findings.toml` has misconceptions and sentences, by exercise and name ("laws": all stations).

    [13]
    global = ["global-generator", "torch's default generator has another state than before."]

A judge writes `raise told("13.global", "Rank 0 of 2:")`. Or it passes the right value to `expect`, or right values by name to
`compare`. If an entry has two misconceptions, the first is for a value that is too large, the second for a value that is too small.
A sentence without a misconception belongs to a judge that several other judges call. The caller passes the misconception.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from hwfsdp.course.diagnose import largest_difference
from hwfsdp.course.verdict import Finding

FINDINGS: dict[str, dict[str, list[str]]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


def told(
    name: str, where: str, got: Any = None, right: Any = None, /, kind: str = "", **words: Any
) -> Finding:
    """Return the finding of this name.

    Args:
        where: the first words of the message.
        got, right: the value that came back, and the right value. The sentence may use them in braces. It may also use `words`,
            and {difference}: the largest difference of two tensors.
        kind: the misconception, if the name has none of its own.
    """
    exercise, _, key = name.partition(".")
    *own, sentence = FINDINGS[exercise][key]
    misconceptions = own or [kind]
    if "{difference}" in sentence:
        is_alike = (got.shape, got.dtype) == (right.shape, right.dtype)
        other = f"being {got.dtype}, {tuple(got.shape)}"
        words["difference"] = largest_difference(got, right) if is_alike else other
    is_less = len(misconceptions) > 1 and got < right
    message = f"{where} {sentence.format(got=got, right=right, **words)}"
    if isinstance(right, bool):  # the sentence is enough; "expected False" would not help a learner
        got = right = None
    return Finding(misconceptions[is_less], message, right, got)


def expect(name: str, where: str, got: Any, right: Any, /, **words: Any) -> None:
    """Raise the finding of this name if a value is not the right one."""
    if not is_same(got, right):
        raise told(name, where, got, right, **words)


def compare(where: str, facts: Mapping[str, Any], right: Mapping[str, Any], /, **words: Any) -> None:
    """Raise the finding of the first wrong fact. `right` has the right values; its key for the fact "global" is "13.global"."""
    for name, expected in right.items():
        expect(name, where, facts[name.partition(".")[2]], expected, **words)


def is_same(got: Any, right: Any) -> bool:
    """True if two facts are equal. Tensors must also have the same shape and dtype."""
    if isinstance(got, Tensor) and isinstance(right, Tensor):
        return got.dtype == right.dtype and got.shape == right.shape and bool((got == right).all())
    return not isinstance(got, Tensor) and bool(got == right)
