"""Exercises: their manifests, and the places of their files. There are two kinds.

A station is a chapter of one file, which grows, and which is the learner's own:

    exercises/my_fsdp.py      the starter; learners edit it in place
    exercises/03_naive_fsdp/
        exercise.toml         written by hand: title, points, file
        .hints.toml           written by hand: hints; out of sight of who lists the folder or prints its files
        README.md             written by hand: the idea, what to predict, what is asked

An elective is cut out of the package:

    exercises/12_strided_shards/
        exercise.toml         holes in place of file; calls, what of the package their docstrings name
        .hints.toml, README.md    as above
        picture.png           drawn by the package
        strided_shards.py     the starter, made from the package; learners edit it in place

`solutions/` has the same files, filled in, and a README for each elective.

The homework is one file by itself, `exercises/capstone/hw_fsdp.py`: a skeleton whose functions `capstone.toml` names, task by task. Like the file
of the stations it is not cut out of the package. Its starter is our solution with those functions blank.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import hwfsdp
from hwfsdp.course.provided import Definition
from hwfsdp.course.refusals import misread, refused, unusable

PACKAGE = Path(hwfsdp.__file__).parent
CARRIED = PACKAGE / "_course"  # of a package that was built and installed (setup.py)
OWN_FILE = "my_fsdp.py"  # of all stations
HINTS = ".hints.toml"
HOMEWORK = "capstone"  # number and folder of the homework


class Place(NamedTuple):
    """The place of a hole: a module of the package, and a function or method in it."""

    module: str
    name: str

    @classmethod
    def parse(cls, text: str) -> Place:
        """From `module:name`, as it stands in the manifest."""
        module, _, name = text.partition(":")
        return cls(module, name)

    def definition(self) -> Definition:
        """With the module's text, as it is on disk now."""
        return Definition(self.module, module_source(self.module), self.name)


class Task(NamedTuple):
    """A part of the homework: what the starter calls it, and the functions that it is about."""

    label: str
    holes: tuple[str, ...]


@dataclass(frozen=True)
class Exercise:
    """One exercise of the course.

    Attributes:
        number: two digits. topic: the folder's name without the number; for an elective also the name of the learner's file
            and of the module with the checks.
        points: without `bonus`, which only the homework has.
        places: of the holes, in the order in which they are to be filled; only an elective has any.
        hints: from a nudge to nearly the answer.
        calls: what of the package the docstrings of the holes name; starters have the signatures.
        tasks: of the homework, in order.
    """

    number: str
    topic: str
    title: str
    points: int
    places: tuple[Place, ...]
    hints: tuple[str, ...]
    folder: Path
    calls: tuple[Place, ...] = ()
    bonus: int = 0
    tasks: tuple[Task, ...] = ()

    @property
    def directory(self) -> str:
        """Name of the folder, below `exercises/`, `solutions/` or a submission."""
        return self.number if self.is_homework else f"{self.number}_{self.topic}"

    @property
    def is_homework(self) -> bool:
        return self.number == HOMEWORK

    @property
    def is_station(self) -> bool:
        """Whether it is about `my_fsdp.py`; else it is about a file of its own."""
        return not self.places and not self.is_homework

    @property
    def file_name(self) -> str:
        return OWN_FILE if self.is_station else f"{self.topic}.py"

    @property
    def target(self) -> str:
        """Place of the learner's file, below `exercises/`, `solutions/` or a submission."""
        return OWN_FILE if self.is_station else f"{self.directory}/{self.file_name}"

    @property
    def path(self) -> Path:
        """Path of the learner's file in the course."""
        return self.folder.parent / self.target

    @property
    def solution_path(self) -> Path:
        """Path of our file. A student's edition does not have it."""
        return self.folder.parents[1] / "solutions" / self.target

    @property
    def short_number(self) -> str:
        """The number as typed on a command line."""
        return self.number.lstrip("0")

    @property
    def hole_names(self) -> list[str]:
        return [place.name for place in self.places] + [name for task in self.tasks for name in task.holes]

    @cached_property
    def holes(self) -> list[Definition]:
        """With the package's source, as it is on disk now."""
        return [place.definition() for place in self.places]

    @cached_property
    def provided(self) -> list[Definition]:
        """The definitions that `calls` names, with the package's source as it is on disk now."""
        return [place.definition() for place in self.calls]


class Course(NamedTuple):
    """A folder with `exercises/`, and perhaps `solutions/`."""

    root: Path
    exercises: tuple[Exercise, ...]

    def exercise(self, number: int | str) -> Exercise:
        """Find an exercise by its number or its folder: 1, 01, 01_rows or exercises/01_rows.

        Raises:
            UsageError: there is none.
        """
        for exercise in self.exercises:
            if is_named(str(number), exercise.number, exercise.directory):
                return exercise
        known = f"{int(self.exercises[0].number)} to {int(self.exercises[-1].number)}"
        raise unusable("manifest.exercise", number=str(number), known=known)


def is_named(wanted: str, number: str, directory: str) -> bool:
    """Whether a word of the command line names the exercise of this number, or its folder."""
    is_number = wanted.isascii() and wanted.isdecimal()
    return int(wanted) == int(number) if is_number else Path(wanted).name == directory


def module_source(module: str, package: Path = PACKAGE) -> str:
    """The text of a module of the package, line endings untouched.

    Raises:
        UsageError: there is no such module.
    """
    path = package.joinpath(*module.split(".")[1:]).with_suffix(".py")
    with refused("manifest.module", module=module):
        with path.open(newline="") as file:
            return file.read()


def compiled_body(place: Place, package: Path = PACKAGE) -> Path:
    """The file with the compiled body of a hole in a student's edition; see `course.release`."""
    return package / "compiled" / f"{place.module}-{place.name}.body"


def find_course(start: Path | None = None) -> Course:
    """The course around a folder (by default the current one), or else the one that the package was installed from.

    Raises:
        UsageError: there is none, or a manifest is not one.
    """
    here = (start or Path.cwd()).resolve()
    for root in [here, *here.parents, PACKAGE.parent]:
        if (course := _course_in(root)) is not None:
            return course
    raise unusable("manifest.no_course", here=here)


def carried_course() -> Course | None:
    """The course as it is given, in an installed package; None in a checkout. To be read, not to be worked in."""
    return _course_in(CARRIED)


def _course_in(root: Path) -> Course | None:
    manifests = sorted((root / "exercises").glob("[0-9][0-9]_*/exercise.toml"))
    return Course(root, tuple(map(read_manifest, manifests))) if manifests else None


def read_manifest(path: Path) -> Exercise:
    """One `exercise.toml`, with the hints beside it.

    Raises:
        UsageError: something is missing in it, or of the wrong kind.
    """
    number, _, topic = path.parent.name.partition("_")
    with misread("manifest.file", folder=path.parent.name, file=path.name):
        found = tomllib.loads(path.read_text())
        is_station = found.get("file") == OWN_FILE
        places = () if is_station else tuple(map(Place.parse, _texts(found["holes"])))
        title, points = str(found["title"]), int(found["points"])
        texts = _texts(tomllib.loads((path.parent / HINTS).read_text())["hints"])
        hints = tuple(map(flowed, texts))
        calls = tuple(map(Place.parse, _texts(found["calls"]))) if "calls" in found else ()
    return Exercise(number, topic, title, points, places, hints, path.parent, calls)


def read_homework(course: Course) -> Exercise:
    """The homework of a course.

    Raises:
        UsageError: it has none, or something is missing in its manifest.
    """
    path = course.root / "exercises" / HOMEWORK / "capstone.toml"
    with misread("manifest.homework"):
        found = tomllib.loads(path.read_text())
        tasks = tuple(Task(str(task["label"]), tuple(map(str, task["holes"]))) for task in found["task"])
        hints = tuple(flowed(str(hint)) for hint in found["hints"])
        title, points, bonus = str(found["title"]), int(found["points"]), int(found["bonus"])
    return Exercise(HOMEWORK, "hw_fsdp", title, points, (), hints, path.parent, bonus=bonus, tasks=tasks)


def flowed(hint: str) -> str:
    """Join the lines of a hint. A numbered step keeps a line of its own."""
    return re.sub(r"\s*\n\s*(\d+\. )?", lambda step: f"\n{step[1]}" if step[1] else " ", hint.strip())


def _texts(value: Any) -> Sequence[str]:
    if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        raise TypeError(f"{value!r} is not a list of texts")
    return value
