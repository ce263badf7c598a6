"""The quality of the grader, measured and written down: docs/grading.md.

kill rate         mistakes made by a machine in every hole, and how many of them get less than full marks
false failures    right answers that do not get full marks, over numbers of ranks and seeds
answers           wrong ones with the verdict they must get, right ones written differently; the tests grade them all
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, product
from typing import Any, NamedTuple

import torch.version

from hwfsdp.course.grade import Options
from hwfsdp.course.killrate import KillRate, hole_mutants, kill
from hwfsdp.course.manifest import Course, Exercise
from hwfsdp.course.pages import filled
from hwfsdp.course.run import WORLD_SIZE
from hwfsdp.course.stations.stages import LAST, stage
from hwfsdp.course.submission import solution
from hwfsdp.course.workbook import graded, grading_pool

WORLD_SIZES, SEEDS = range(1, 5), range(20)


class Answers(NamedTuple):
    """The number of written wrong answers for an exercise, and the texts of its right ones."""

    wrong: int
    right: list[str]


@dataclass
class ExerciseReport:
    """The report on one exercise. `false_failures` names the failed ones among `runs` gradings of right answers."""

    exercise: Exercise
    answers: Answers
    rate: KillRate
    runs: int = 0
    false_failures: list[str] = field(default_factory=list)


def examine(course: Course, exercises: Sequence[Exercise]) -> Iterator[ExerciseReport]:
    """Grade all mutants of each exercise, and its right answers over numbers of ranks and seeds. This takes long."""
    for exercise in exercises:
        rate = kill(course, exercise, hole_mutants(exercise))
        report = ExerciseReport(exercise, answers_to(course, exercise), rate)
        _find_false_failures(course, report)
        yield report


def _find_false_failures(course: Course, report: ExerciseReport) -> None:
    texts = {"the reference": solution(report.exercise)}
    texts |= {f"right answer {number}": text for number, text in enumerate(report.answers.right)}
    in_turn = cycle(texts.items())
    sizes = [WORLD_SIZE] if report.exercise.is_station else WORLD_SIZES
    with grading_pool() as pool:
        grades = {}
        for world_size, seed in product(sizes, SEEDS):
            name, text = next(in_turn)
            options = Options(seed=seed, world_size=world_size, thorough=False)
            where = f"{name}, {world_size} ranks, seed {seed}"
            grades[where] = pool.submit(graded, report.exercise, course, text, options)
        report.runs = len(grades)
        report.false_failures = [w for w, grade in grades.items() if not grade.result().has_everything]


def answers_to(course: Course, exercise: Exercise) -> Answers:
    """The answers in `tests/course/answers`. A station's file after a later station is a right answer, too."""
    folder = str(course.root / "tests" / "course")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    shapes: Any = importlib.import_module("answers.shapes")
    if exercise.is_homework:
        found = shapes.read("homework.txt")
    else:
        name = "stations" if exercise.is_station else "electives"
        found = [each for each in shapes.read(f"{name}.txt") if each.exercise == exercise.number]
    wrong = [each for each in found if each.misconception != shapes.RIGHT]
    if exercise.is_station:
        return Answers(len(wrong), [stage(each) for each in range(int(exercise.number), LAST)])
    text = solution(exercise)
    return Answers(len(wrong), [each.text(text) for each in found if each not in wrong])


def written(reports: Sequence[ExerciseReport]) -> str:
    """The page."""
    sizes = f"{WORLD_SIZES[0]} to {WORLD_SIZES[-1]}"
    names = {"torch": torch.version.__version__, "sizes": sizes, "seeds": len(SEEDS)}
    return filled("grading.md", reports=reports, **names)
