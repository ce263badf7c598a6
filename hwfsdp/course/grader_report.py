"""Measure the quality of the grader and write docs/grading.md.

    python -m hwfsdp.course mutants [NN …]

kill rate         machine-made mistakes in every hole: how many of them get less than full marks
false failures    right answers that do not get full marks, over several numbers of ranks and seeds
answers           wrong answers with the verdict that they must get, and other right answers; the tests grade them all

Every mutant of every hole is graded as an answer. A mutant that gets full marks has survived: either the checks are too weak, or the
mutant does the same as the reference. `tests/course/survivors/<topic>.toml` lists the mutants of the second kind, with the reason:

    [[survivor]]
    hole = "chunk_extent"
    before = "…"
    after = "…"
    reason = "…"

Stations share one file, so the mistakes are made in the file after the last station. A mistake belongs to the station that adds the
function. The checks of that station run first, then the checks of all stations, until one check notices the mistake.
"""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, product
from typing import Any, NamedTuple

import torch.version

from hwfsdp.course import holes
from hwfsdp.course.grade import Options
from hwfsdp.course.manifest import Course, Exercise
from hwfsdp.course.mutants import Mutant, mutants
from hwfsdp.course.pages import filled
from hwfsdp.course.run import WORLD_SIZE
from hwfsdp.course.stations.stages import LAST, stage
from hwfsdp.course.submission import solution
from hwfsdp.course.workbook import SEED, graded, grading_pool

WORLD_SIZES, SEEDS = range(1, 5), range(20)
SECONDS = 6.0  # limit of one run; a slower mutant counts as killed. Stations train and keep their own limit


class HoleMutant(NamedTuple):
    """A mutant of one hole."""

    hole: str
    mutant: Mutant

    def __str__(self) -> str:
        return f"{self.hole}, {self.mutant}"


@dataclass
class KillRate:
    """The mutants of an exercise, by outcome."""

    exercise: Exercise
    killed: list[HoleMutant] = field(default_factory=list)
    survived: list[HoleMutant] = field(default_factory=list)  # got full marks and are not listed
    equivalent: list[HoleMutant] = field(default_factory=list)  # listed, with a reason

    def __str__(self) -> str:
        graded_ones = len(self.killed) + len(self.survived)
        rate = len(self.killed) / graded_ones if graded_ones else 1.0
        return (
            f"{self.exercise.number} {self.exercise.title}: {len(self.killed)} of {graded_ones} killed ({rate:.0%}), "
            f"{len(self.equivalent)} equivalent"
        )


# a statement that only opens a range for a profiler; to drop it changes no number
RANGE = re.compile(r"\s*with [\w.]*(profiled|profiler_range|record_function)\([^()]*\):.*")


def function_names(exercise: Exercise) -> list[str]:
    """Return the functions to mutate: an elective's holes, or the functions that a station adds to the file."""
    if not exercise.is_station:
        return exercise.hole_names
    if int(exercise.number) > LAST:
        return []  # later stations add no function
    stages = [_functions_at(number) for number in range(LAST + 1)]
    begun = [name for name in stages[LAST] if stages[int(exercise.number)].get(name) != stages[0].get(name)]
    before = stages[int(exercise.number) - 1]
    return [name for name in begun if before.get(name) == stages[0].get(name)]


def _functions_at(station: int) -> dict[str, str]:
    """Return the text of each function and method after a station, by name; station 0 is the starter."""
    text = stage(station)
    return {name: holes.extract(text, name) for name in holes.functions(text)}


def hole_mutants(exercise: Exercise) -> list[HoleMutant]:
    """List all mutants of an exercise's functions, in order. Leave out mutants that only drop a profiler's range."""
    text = solution(exercise)
    found = []
    for name in function_names(exercise):
        hole = holes.extract(text, name)
        lines = hole.splitlines()
        for mutant in mutants(hole):
            if mutant.operator != "drop context" or not RANGE.fullmatch(lines[mutant.line - 1]):
                found.append(HoleMutant(name, mutant))
    return found


def known_equivalents(course: Course, exercise: Exercise) -> set[tuple[str, str, str]]:
    """Return (hole, before, after) of each listed mutant. Every one of them has a reason."""
    path = course.root / "tests" / "course" / "survivors" / f"{exercise.topic}.toml"
    if not path.exists():
        return set()
    entries = tomllib.loads(path.read_text())["survivor"]
    assert all(entry["reason"].strip() for entry in entries), f"{path} has a survivor without a reason"
    return {(entry["hole"], entry["before"], entry["after"]) for entry in entries}


def kill(course: Course, exercise: Exercise, chosen: Sequence[HoleMutant]) -> KillRate:
    """Grade mutants of an exercise, several at once. A mutant counts as killed if it gets less than full marks."""
    rate, known, text = KillRate(exercise), known_equivalents(course, exercise), solution(exercise)
    judges = [exercise]  # exercises whose checks run, in this order: the first notices most mistakes
    if exercise.is_station and exercise.number != "02":  # nothing needs 02
        judges.append(course.exercise(LAST))
    seconds = None if exercise.is_station else SECONDS
    for each in chosen:
        listed = (each.hole, each.mutant.before, each.mutant.after) in known
        (rate.equivalent if listed else rate.survived).append(each)
    with grading_pool() as pool:
        for judge in judges:
            options = Options(judge is not exercise, SEED, seconds, repeat=False, thorough=False)
            texts = [holes.splice(text, each.hole, each.mutant.text) for each in rate.survived]
            grades = [pool.submit(graded, judge, course, mutated, options) for mutated in texts]
            tried, rate.survived = rate.survived, []
            for each, grade in zip(tried, grades, strict=True):
                (rate.survived if grade.result().has_everything else rate.killed).append(each)
    return rate


# --- The report ----------------------------------------------------------------------------------------------


class Answers(NamedTuple):
    """The number of handwritten wrong answers for an exercise, and the texts of its right answers."""

    wrong: int
    right: list[str]


@dataclass
class ExerciseReport:
    """The report on one exercise.

    Attributes:
        runs: number of gradings of right answers. false_failures: the names of those that did not get full marks.
    """

    exercise: Exercise
    answers: Answers
    rate: KillRate
    runs: int = 0
    false_failures: list[str] = field(default_factory=list)


def examine(course: Course, exercises: Sequence[Exercise]) -> Iterator[ExerciseReport]:
    """Grade all mutants of each exercise, and its right answers over several numbers of ranks and seeds. This is slow."""
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
    """Return the answers in `tests/course/answers`. The file after a later station is also a right answer to a station."""
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
    """Return the text of docs/grading.md."""
    sizes = f"{WORLD_SIZES[0]} to {WORLD_SIZES[-1]}"
    names = {"torch": torch.version.__version__, "sizes": sizes, "seeds": len(SEEDS)}
    return filled("grading.md", reports=reports, **names)
