"""Write starters and solutions from the package, or from the reference of all stations, and check them.

    python -m hwfsdp.course write     writes my_fsdp.py and */*.py of exercises/ and solutions/; for the homework, the starter
    python -m hwfsdp.course check     lists the conditions that do not hold; part of `make check`

These conditions must hold:

    restored     blank every hole of the package and put the solutions back: the result is the package, byte for byte
    unchanged    writing both folders again changes nothing
    one owner    no hole belongs to two exercises
    not started  every starter compiles, imports, and is graded as not started, with 0 points
    full marks   every solution gets all points
    needed       if one hole of the solution is blank, at least one check of its exercise fails

Several processes grade texts at the same time. Each has its own server of ranks, because all processes of a server count as part of one
run (`processes`). The processes share the machine, so the time limits are multiplied by the number of processes.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from hwfsdp.course import holes
from hwfsdp.course.commands import everything
from hwfsdp.course.grade import Options, grade
from hwfsdp.course.manifest import Course, Exercise, module_source
from hwfsdp.course.overlay import blanked
from hwfsdp.course.refusals import outdated, update
from hwfsdp.course.run import PATIENCE, warm_up
from hwfsdp.course.submission import solution, starter
from hwfsdp.course.verdict import Grade
from hwfsdp.errors import UsageError

SEED = 20
WORKERS = max(1, (os.cpu_count() or 2))


def files(course: Course) -> dict[Path, str]:
    """Return the right contents of both folders: every starter and solution, by path."""
    texts = {}
    for exercise in everything(course):
        texts[course.root / "exercises" / exercise.target] = starter(exercise)
        texts[course.root / "solutions" / exercise.target] = solution(exercise)
    return texts


def write(course: Course) -> list[Path]:
    """Write the files that differ, and return their paths."""
    return update(files(course))


def problems(course: Course) -> Iterator[str]:
    """Yield the problems, one line each. For problems of grading, see `grading_problems`."""
    try:
        yield from _owners(course)
        yield from _restored(course)
        for path in outdated(files(course)):
            what = "not what the package gives" if path.exists() else "missing"
            yield f"{path.relative_to(course.root)} is {what}. Run: make exercises"
    except (UsageError, SyntaxError) as error:
        yield str(error)


def _owners(course: Course) -> Iterator[str]:
    owners: dict[tuple[str, str], str] = {}
    for exercise in course.exercises:
        for place in exercise.places:
            if place in owners:
                yield f"{place.module}:{place.name} is a hole of {owners[place]} and of {exercise.number}."
            owners[place] = exercise.number


def _restored(course: Course) -> Iterator[str]:
    """Blank all holes in the package, put the solutions back, and yield a line for each module that differs."""
    texts = blanked(course.exercises)
    for exercise in course.exercises:
        path = course.root / "solutions" / exercise.target
        solved = path.read_text() if path.exists() else ""
        for place in exercise.places:
            try:
                body = holes.extract(solved, place.name)
            except UsageError as error:
                yield f"solutions/{exercise.directory}: {error}"
                continue
            texts[place.module] = holes.splice(texts[place.module], place.name, body)
    for module, text in texts.items():
        if text != module_source(module):
            yield f"{module} is not restored by the solutions. Run: make exercises"


def grading_problems(course: Course, exercise: Exercise) -> list[str]:
    """Return the problems with the grades of an exercise's starter and solution, one line each."""
    found = []
    started = graded(exercise, course, starter(exercise))
    if (started.status, started.score) != ("not_started", 0):
        found.append(f"the starter is {started.status} with {started.score} points, not not_started.")
    full = graded(exercise, course, solution(exercise))
    if not full.has_everything:
        found.append(f"the solution gets {full.score} of {exercise.points} points: {failures(full)}")
    for place in exercise.places:
        text = holes.blank(solution(exercise), place.name, exercise.number)
        if graded(exercise, course, text, Options(seed=SEED, thorough=False)).status == "passed":
            found.append(f"{place.name} can be left blank and every check passes.")
    return [f"{exercise.number}: {problem}" for problem in found]


def graded(exercise: Exercise, course: Course, text: str, options: Options = Options(seed=SEED)) -> Grade:
    """Grade a text as an answer to this exercise."""
    with tempfile.TemporaryDirectory(prefix="hwfsdp-submission-") as folder:
        (Path(folder) / exercise.file_name).write_text(text)
        return grade(exercise, Path(folder), course, options)


@contextmanager
def grading_pool(workers: int = WORKERS) -> Iterator[ProcessPoolExecutor]:
    """Start processes that run `graded` during the `with` block. Jobs that have not begun at its end are canceled."""
    executor = ProcessPoolExecutor(workers, mp.get_context("spawn"), _begin, (workers,))
    try:
        yield executor
    finally:
        executor.shutdown(cancel_futures=True)


def _begin(workers: int) -> None:
    os.environ.setdefault(PATIENCE, str(workers))
    warm_up()


def failures(result: Grade) -> str:
    """Describe the checks that failed, with their findings."""
    found = [r for r in result.results if r.passed is False and r.finding]
    return "; ".join(
        f"{r.check.id}: {r.finding.misconception}: {r.finding.message}" for r in found if r.finding
    )


def compiles_alone(exercise: Exercise) -> None:
    """Run the starter as a module of its own, next to the whole package. Raise whatever the starter raises."""
    exec(compile(starter(exercise), exercise.file_name, "exec"), {"__name__": exercise.file_name})
