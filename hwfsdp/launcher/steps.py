"""Which optimizer steps of a run to record; integers only.

A step reaches from the first forward after an optimizer's step to the first forward after its next one. So what a script
does between them, such as averaging the loss, belongs to the step before. The first steps of a run are not like the
others: they learn the order of the forwards, and allocate.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from hwfsdp.errors import UsageError

WARM_UP, RECORDED = 2, 2  # steps that are left out, and recorded, where nobody says


class Steps(NamedTuple):
    """Steps first … last, counted from 0, both included; `last` None: to the end of the run."""

    first: int = WARM_UP
    last: int | None = WARM_UP + RECORDED - 1

    def __str__(self) -> str:
        return f"{self.first}..{'' if self.last is None else self.last}"


def read_steps(text: str) -> Steps:
    """Parse `--steps`. "5": five steps after the warm-up; "3..7": those, counted from 0; "3..": all from there.

    Raises:
        UsageError: anything else, or no step at all.
    """
    if re.fullmatch(r"\d{1,9}", text) and int(text) > 0:
        return Steps(WARM_UP, WARM_UP + int(text) - 1)
    found = re.fullmatch(r"(\d{1,9})\.\.(\d{0,9})", text)
    if found:
        steps = Steps(int(found[1]), int(found[2]) if found[2] else None)
        if steps.last is None or steps.first <= steps.last:
            return steps
    raise UsageError(
        "--steps",
        expected="a number of steps (2), a range (3..7), or a first step (3..)",
        got=repr(text),
        remedy="Count the optimizer's steps from 0.",
    )
