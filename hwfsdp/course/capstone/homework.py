"""The homework itself: its manifest, and where its files are.

    exercises/capstone/capstone.toml    written by hand: title, points, hints, and the functions of each task
    exercises/capstone/hw_fsdp.py       the starter: our solution with those functions blank
    solutions/capstone/hw_fsdp.py       ours, one file that is read from top to bottom

Like the file of the stations it is not cut out of the package: it stands by itself.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from hwfsdp.course.manifest import Course, Exercise, flowed
from hwfsdp.course.refusals import misread

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
        tasks: in order.
    """

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

    @property
    def solution_path(self) -> Path:
        """The path of our file. A student's edition does not have it."""
        return self.folder.parents[1] / "solutions" / self.target


def read_homework(course: Course) -> Homework:
    """The homework of a course.

    Raises:
        UsageError: it has none, or something is missing in its manifest.
    """
    path = course.root / "exercises" / FOLDER / "capstone.toml"
    with misread("manifest.homework"):
        found = tomllib.loads(path.read_text())
        tasks = tuple(Task(str(task["label"]), tuple(map(str, task["holes"]))) for task in found["task"])
        hints = tuple(flowed(str(hint)) for hint in found["hints"])
        title, points, bonus = str(found["title"]), int(found["points"]), int(found["bonus"])
    return Homework(FOLDER, "hw_fsdp", title, points, (), hints, path.parent, bonus=bonus, tasks=tasks)
