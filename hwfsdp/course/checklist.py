"""The checks as data: `checks.toml` lists them by id, in the order in which they run.

Each misconception has its own question, and the learner gets this question. Some misconceptions are vague ("the result is not the right
one"). For these, the learner gets the question of the check.
"""

from __future__ import annotations

import importlib
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

from hwfsdp.course.manifest import Exercise
from hwfsdp.course.misconceptions import MISCONCEPTIONS
from hwfsdp.course.refusals import unusable
from hwfsdp.course.verdict import Check

ENTRIES: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("checks.toml").read_text())


def checks_of(exercise: Exercise) -> tuple[Check, ...]:
    """Return the checks of an exercise with their judges, in order; the bonuses of the homework come last.

    Raises:
        UsageError: their points do not add up to the points in the manifest.
    """
    groups = (exercise.number, *(("bonus", "ours") if exercise.bonus else ()))
    chosen = [check for group in groups for check in ENTRIES if check.startswith(f"{group}.")]
    checks = tuple(_check(check, ENTRIES[check]) for check in chosen)
    points, most = sum(check.points for check in checks), exercise.points + exercise.bonus
    if points != most:
        raise unusable("manifest.points", number=exercise.number, most=most, points=points)
    return checks


def _check(check: str, entry: dict[str, Any]) -> Check:
    judge = partial(_judge, entry["judge"], *entry.get("arguments", ()))
    return Check(check, entry["sentence"], entry["points"], judge, tuple(entry.get("needs", ())))


def _judge(place: str, *arguments: Any) -> None:
    """Call a judge. Its module is imported only now, because it imports torch."""
    module, _, name = place.partition(":")
    getattr(importlib.import_module(f"hwfsdp.course.{module}"), name)(*arguments)


def sentence_of(check: str) -> str:
    """Return the sentence of a check; its id, if there is no such check."""
    return str(ENTRIES.get(check, {}).get("sentence", check))


def question_of(check: str, misconception: str) -> str:
    """Return the question for a learner with this misconception."""
    found = MISCONCEPTIONS[misconception]
    return str(ENTRIES.get(check, {}).get("question", found.question)) if found.vague else found.question
