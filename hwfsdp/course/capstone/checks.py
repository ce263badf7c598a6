"""The checks of the homework: three tasks, 10 points, the bonuses of its skeleton, and bonuses of our own.

A step of task 1 needs those before it that it is made of, and no others. So who is half through has half of the points.
"""

from __future__ import annotations

from pathlib import Path

from hwfsdp.course.capstone.rules import check_rules
from hwfsdp.course.checklist import checks_of
from hwfsdp.course.run import Ranks
from hwfsdp.course.submission import Source


def judge_file(ranks: Ranks, seed: int) -> None:
    """By its text alone."""
    submitted = ranks.overlay.submitted[0]
    check_rules(Source(Path(submitted.path), submitted.text))


TASKS = checks_of("capstone")
BONUSES = checks_of("bonus", "ours")
