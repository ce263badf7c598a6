"""How good the grader is, measured and written down: docs/grading.md.

kill rate         mistakes made by a machine in every hole, and how many of them get less than full marks
false failures    right answers that do not get full marks, over numbers of ranks and seeds
answers           wrong ones with the verdict they must get, right ones written differently; the tests grade them all
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import cycle, product
from typing import Any, NamedTuple

import torch.version

from hwfsdp.course.capstone.homework import Homework, read_homework
from hwfsdp.course.grade import Options
from hwfsdp.course.killrate import KillRate, hole_mutants, kill, solved
from hwfsdp.course.manifest import Course, Exercise
from hwfsdp.course.pool import grading_pool
from hwfsdp.course.run import WORLD_SIZE
from hwfsdp.course.stations.stages import LAST, stage
from hwfsdp.course.verdict import Grade

WORLD_SIZES, SEEDS = range(1, 5), range(20)
_HEAD = """# How the grader is graded

Written by `make mutants`, with torch {torch}.

| exercise | wrong answers | right answers | mutants | noticed | same as the reference | right answers graded | that failed |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""
_FOOT = """
- *Wrong answers* are plausible ones, written by hand. Each names the check that has to fail and the misconception that has to be
  named. *Right answers* are written differently from the package's, and have to get all points. The tests grade all of both.
- *Mutants* are mistakes made by a machine, in every hole: an operator swapped, a statement dropped, a condition negated. One is
  *noticed* if it gets less than everything. Those that do the *same as the reference* are listed, with the reason, in
  `tests/course/survivors/`.
- Mistakes in `my_fsdp.py` are made in the file as it is after the last station, and counted where the function begins. The checks of
  all stations are run until one notices. Right answers to a station are the file as it is after later ones.
- *Right answers graded*: the reference and the right answers in turn, with {sizes} ranks and {seeds} seeds for each number of ranks;
  of a station, whose checks say themselves on how many ranks they run, with {seeds} seeds.
- The lab has letters to choose and numbers to measure, no code to change. For each of its scripts the tests
  (`tests/course/test_lab.py`) try the key, every wrong letter, right letters without evidence, and the mended script's numbers.
"""


class Answers(NamedTuple):
    """How many wrong answers are written for an exercise, and the texts of the right ones."""

    wrong: int
    right: list[str]


@dataclass
class ExerciseReport:
    """What was found of one exercise; `false_failures` says which of `runs` gradings of right answers failed."""

    exercise: Exercise
    answers: Answers
    rate: KillRate
    runs: int = 0
    false_failures: list[str] = field(default_factory=list)

    def row(self) -> str:
        rate, answers = self.rate, self.answers
        noticed, of = len(rate.killed), len(rate.killed) + len(rate.survived)
        cells = [
            f"{self.exercise.number} {self.exercise.title}",
            str(answers.wrong),
            str(len(answers.right)),
            str(of + len(rate.equivalent)),
            f"{noticed} of {of}",
            str(len(rate.equivalent)),
            str(self.runs),
            str(len(self.false_failures)),
        ]
        return f"| {' | '.join(cells)} |"


def examine(course: Course, exercises: Sequence[Exercise]) -> Iterator[ExerciseReport]:
    """Grades all mutants of each exercise, and its right answers over numbers of ranks and seeds; takes long."""
    for exercise in exercises:
        rate = kill(course, exercise, hole_mutants(course, exercise))
        report = ExerciseReport(exercise, answers_to(course, exercise), rate)
        _find_false_failures(course, report)
        yield report


def _find_false_failures(course: Course, report: ExerciseReport) -> None:
    texts = {"the reference": solved(course, report.exercise)}
    texts |= {f"right answer {number}": text for number, text in enumerate(report.answers.right)}
    in_turn = cycle(texts.items())
    sizes = [WORLD_SIZE] if report.exercise.is_station else WORLD_SIZES
    with grading_pool(course) as pool:
        grades: list[tuple[str, Future[Grade]]] = []
        for world_size, seed in product(sizes, SEEDS):
            name, text = next(in_turn)
            options = Options(seed=seed, world_size=world_size, thorough=False)
            where = f"{name}, {world_size} ranks, seed {seed}"
            grades.append((where, pool.submit(report.exercise, text, options)))
        report.runs = len(grades)
        report.false_failures = [where for where, grade in grades if not grade.result().has_everything]


def answers_to(course: Course, exercise: Exercise) -> Answers:
    """Those in `tests/course/answers`; right ones to a station are the file as it is after later ones, too."""
    folder = str(course.root / "tests" / "course")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    shapes: Any = importlib.import_module("answers.shapes")
    if isinstance(exercise, Homework):
        found = shapes.read("homework.txt")
    else:
        name = "stations" if exercise.is_station else "electives"
        found = [each for each in shapes.read(f"{name}.txt") if each.exercise == exercise.number]
    wrong = [each for each in found if each.misconception != shapes.RIGHT]
    if exercise.is_station:
        return Answers(len(wrong), [stage(each) for each in range(int(exercise.number), LAST)])
    text = solved(course, exercise)
    return Answers(len(wrong), [each.text(text) for each in found if each not in wrong])


def everything(course: Course) -> list[Exercise]:
    """All that is graded by running it: the exercises and the homework."""
    return [*course.exercises, read_homework(course)]


def written(reports: Sequence[ExerciseReport]) -> str:
    """The page."""
    killed = sum(len(report.rate.killed) for report in reports)
    survived = sum(len(report.rate.survived) for report in reports)
    failed, runs = sum(len(r.false_failures) for r in reports), sum(report.runs for report in reports)
    total = (
        f"| **all** | {sum(r.answers.wrong for r in reports)} | {sum(len(r.answers.right) for r in reports)} | "
        f"{killed + survived + sum(len(r.rate.equivalent) for r in reports)} | "
        f"**{killed} of {killed + survived}, {killed / max(1, killed + survived):.1%}** | "
        f"{sum(len(r.rate.equivalent) for r in reports)} | {runs} | **{failed}** |"
    )
    survivors = [f"- {r.exercise.number}: {each}" for r in reports for each in r.rate.survived]
    left = (
        ["", "Not noticed, and not known to do the same as the reference:", "", *survivors]
        if survivors
        else []
    )
    rows = [*(report.row() for report in reports), total, *left]
    foot = _FOOT.format(sizes=f"{WORLD_SIZES[0]} to {WORLD_SIZES[-1]}", seeds=len(SEEDS))
    return _HEAD.format(torch=torch.version.__version__) + "\n".join(rows) + "\n" + foot
