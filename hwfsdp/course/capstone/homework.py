"""The homework itself: its manifest, its file, and the starter that is made from our solution.

    exercises/capstone/capstone.toml    written by hand: title, points, hints, and the functions of each task
    exercises/capstone/hw_fsdp.py       the starter: our solution with those functions blank
    solutions/capstone/hw_fsdp.py       ours, one file that is read from top to bottom

Like the file of the stations it is not cut out of the package: it stands by itself.
"""

from __future__ import annotations

import ast
import tomllib
from dataclasses import dataclass
from pathlib import Path

from hwfsdp.course import holes
from hwfsdp.course.manifest import Course, Exercise, flowed
from hwfsdp.course.submission import NOT_PYTHON, Source, find_source
from hwfsdp.errors import UsageError

FOLDER, FILE = "capstone", "hw_fsdp.py"


@dataclass(frozen=True)
class Task:
    """A part of the homework: what the starter calls it, and the functions that it is about."""

    label: str
    holes: tuple[str, ...]


@dataclass(frozen=True)
class Homework(Exercise):
    """The capstone, as an exercise whose file is not made from the package.

    Attributes:
        bonus: points beyond `points`. tasks: in order.
    """

    bonus: int = 0
    tasks: tuple[Task, ...] = ()

    @property
    def directory(self) -> str:
        return FOLDER

    @property
    def is_station(self) -> bool:
        return False

    @property
    def file_name(self) -> str:
        return FILE

    @property
    def hole_names(self) -> list[str]:
        return [name for task in self.tasks for name in task.holes]


def read_homework(course: Course) -> Homework:
    """The homework of a course.

    Raises:
        UsageError: it has none, or something is missing in its manifest.
    """
    path = course.root / "exercises" / FOLDER / "capstone.toml"
    try:
        found = tomllib.loads(path.read_text())
        tasks = tuple(Task(str(task["label"]), tuple(map(str, task["holes"]))) for task in found["task"])
        hints = tuple(flowed(str(hint)) for hint in found["hints"])
        title, points, bonus = str(found["title"]), int(found["points"]), int(found["bonus"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"manifest {FOLDER}/{path.name}",
            expected="title, points, bonus, hints, and tasks with label and holes",
            got=f"{type(error).__name__}: {error}",
            remedy="Take the original exercises/capstone/ again.",
        ) from None
    return Homework(FOLDER, "hw_fsdp", title, points, (), hints, path.parent, bonus=bonus, tasks=tasks)


def solution_path(course: Course) -> Path:
    """The path of our file. A student's edition does not have it."""
    return course.root / "solutions" / FOLDER / FILE


def starter_of(homework: Homework, solution: str) -> str:
    """The learner's starter: the solution's text with the functions of all tasks blank."""
    for task in homework.tasks:
        for name in task.holes:
            solution = holes.blank(solution, name, task.label)
    return solution


def handed_in(homework: Homework, folder: Path) -> Source:
    """The learner's file, in `capstone/` below the folder or in the folder itself.

    Raises:
        UsageError: it cannot be read as text.
    """
    return find_source(homework, folder)


def has_begun(homework: Homework, text: str) -> bool:
    """Whether any function of a task is more than its docstring; a file that is not Python has been worked on."""
    try:
        found = dict(holes.definitions(text))
    except NOT_PYTHON:
        return True
    named = [found[name] for name in homework.hole_names if name in found]
    return not named or any(not _is_blank(node) for node in named)


def _is_blank(node: holes.Function) -> bool:
    body = [s for s in node.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
    return all(
        isinstance(s, ast.Pass)
        or (isinstance(s, ast.Raise) and s.exc is not None and "NotImplementedError" in ast.unparse(s.exc))
        for s in body
    )
