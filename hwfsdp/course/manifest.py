"""Exercises: their manifests, and the paths of their files. There are two kinds.

A station is a chapter of the learner's own file, which grows from station to station:

    exercises/my_fsdp.py      the starter; learners edit it in place
    exercises/03_naive_fsdp/
        exercise.toml         written by hand: title, points, file
        .hints.toml           written by hand: hints; the dot hides them when a learner lists the folder or prints its files
        README.md             written by hand: the idea, the prediction, the task

An elective is cut out of the package:

    exercises/12_strided_shards/
        exercise.toml         holes in place of file; calls: the names of the package that may help
        .hints.toml, README.md    as above
        picture.png           drawn by the package
        strided_shards.py     the starter, made from the package; learners edit it in place

`solutions/` has the same files, filled in, and a README for each elective.

The homework is one file by itself, `exercises/capstone/hw_fsdp.py`. `capstone.toml` names its functions, task by task, and `.hints.toml`
has the hints. Like the file of the stations, the homework is not cut out of the package. Its starter is our solution with those functions
blank.
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
from hwfsdp.errors import did_you_mean

PACKAGE = Path(hwfsdp.__file__).parent
CARRIED = PACKAGE / "_course"  # the course in an installed package (setup.py)
OWN_FILE = "my_fsdp.py"  # the learner's file for all stations
HINTS = ".hints.toml"
HOMEWORK = "capstone"  # number and folder of the homework


class Place(NamedTuple):
    """The place of a hole: a module of the package, and a function or method in it."""

    module: str
    name: str

    @classmethod
    def parse(cls, text: str) -> Place:
        """Parse `module:name`, the form in the manifest."""
        module, _, name = text.partition(":")
        return cls(module, name)

    def definition(self) -> Definition:
        """Return the definition, with the module's text as it is on disk now."""
        return Definition(self.module, module_source(self.module), self.name)


class Task(NamedTuple):
    """A part of the homework: its label in the starter, and its functions."""

    label: str
    holes: tuple[str, ...]


@dataclass(frozen=True)
class Exercise:
    """One exercise of the course.

    Attributes:
        number: two digits. topic: the folder's name without the number; for an elective also the name of the learner's file
            and of the module with the checks.
        points: without `bonus`, which only the homework has.
        places: the places of the holes, in the order in which learners fill them; only an elective has holes.
        hints: in order, from a small hint to nearly the answer.
        calls: names of the package that the docstrings of the holes mention; starters show their signatures.
        tasks: the tasks of the homework, in order.
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
        """The name of the folder, below `exercises/`, `solutions/` or a submission."""
        return self.number if self.is_homework else f"{self.number}_{self.topic}"

    @property
    def is_homework(self) -> bool:
        return self.number == HOMEWORK

    @property
    def is_station(self) -> bool:
        """True if the exercise is about `my_fsdp.py`. Other exercises have a file of their own."""
        return not self.places and not self.is_homework

    @property
    def file_name(self) -> str:
        return OWN_FILE if self.is_station else f"{self.topic}.py"

    @property
    def target(self) -> str:
        """The path of the learner's file, below `exercises/`, `solutions/` or a submission."""
        return OWN_FILE if self.is_station else f"{self.directory}/{self.file_name}"

    @property
    def path(self) -> Path:
        """The path of the learner's file in the course."""
        return self.folder.parent / self.target

    @property
    def solution_path(self) -> Path:
        """The path of our solution. A student's edition does not have it."""
        return self.folder.parents[1] / "solutions" / self.target

    @property
    def short_number(self) -> str:
        """The number as a learner types it on a command line."""
        return self.number.lstrip("0")

    @property
    def hole_names(self) -> list[str]:
        return [place.name for place in self.places] + [name for task in self.tasks for name in task.holes]

    @cached_property
    def holes(self) -> list[Definition]:
        """The definitions of the holes, with the package's source as it is on disk now."""
        return [place.definition() for place in self.places]

    @cached_property
    def provided(self) -> list[Definition]:
        """The definitions that `calls` names, with the package's source as it is on disk now."""
        return [place.definition() for place in self.calls]


class Course(NamedTuple):
    """A folder with `exercises/`, and perhaps `solutions/`."""

    root: Path
    exercises: tuple[Exercise, ...]

    def exercise(self, number: int | str, verb: str = "check") -> Exercise:
        """Find an exercise by its number or its folder: 1, 01, 01_rows or exercises/01_rows. `verb`: the verb that the remedy names.

        Raises:
            UsageError: there is no such exercise.
        """
        for exercise in self.exercises:
            if is_named(str(number), exercise.number, exercise.directory):
                return exercise
        known = f"{int(self.exercises[0].number)} to {int(self.exercises[-1].number)}"
        directories = [exercise.directory for exercise in self.exercises]
        otherwise = "See: hwfsdp list. For the homework: hwfsdp check capstone."
        remedy = did_you_mean(Path(str(number)).name, directories, otherwise, f"hwfsdp {verb} {{}}")
        raise unusable("manifest.exercise", number=str(number), known=known, remedy=remedy)


def is_named(wanted: str, number: str, directory: str) -> bool:
    """True if a word of the command line is the number or the folder of this exercise."""
    is_number = wanted.isascii() and wanted.isdecimal()
    return int(wanted) == int(number) if is_number else Path(wanted).name == directory


def module_source(module: str, package: Path = PACKAGE) -> str:
    """Return the text of a module of the package, with its line endings unchanged.

    Raises:
        UsageError: there is no such module.
    """
    path = package.joinpath(*module.split(".")[1:]).with_suffix(".py")
    with refused("manifest.module", module=module):
        with path.open(newline="") as file:
            return file.read()


def compiled_body(place: Place, package: Path = PACKAGE) -> Path:
    """Return the path of the compiled body of a hole in a student's edition. See `course.release`."""
    return package / "compiled" / f"{place.module}-{place.name}.body"


def find_course(start: Path | None = None) -> Course:
    """Find the course around a folder (by default the current one), or else the course that the package was installed from.

    Raises:
        UsageError: there is no course, or a manifest is not valid.
    """
    here = (start or Path.cwd()).resolve()
    for root in [here, *here.parents, PACKAGE.parent]:
        if (course := _course_in(root)) is not None:
            return course
    raise unusable("manifest.no_course", here=here)


def carried_course() -> Course | None:
    """Return the unchanged course in an installed package; None in a checkout. Learners read it and do not work in it."""
    return _course_in(CARRIED)


def _course_in(root: Path) -> Course | None:
    manifests = sorted((root / "exercises").glob("[0-9][0-9]_*/exercise.toml"))
    return Course(root, tuple(map(read_manifest, manifests))) if manifests else None


def read_manifest(path: Path) -> Exercise:
    """Read one `exercise.toml`, with the hints beside it.

    Raises:
        UsageError: a value is missing, or has the wrong type.
    """
    number, _, topic = path.parent.name.partition("_")
    with misread("manifest.file", folder=path.parent.name, file=path.name):
        found = tomllib.loads(path.read_text())
        holes = () if found.get("file") == OWN_FILE else _texts(found["holes"])
        calls = _texts(found["calls"]) if "calls" in found else ()
        places, named = (tuple(map(Place.parse, each)) for each in (holes, calls))
        hints = _read_hints(path.parent)
        title, points = str(found["title"]), int(found["points"])
    return Exercise(number, topic, title, points, places, hints, path.parent, named)


def read_homework(course: Course) -> Exercise:
    """Read the homework of a course.

    Raises:
        UsageError: the course has no homework, or a value is missing in its manifest.
    """
    path = course.root / "exercises" / HOMEWORK / "capstone.toml"
    with misread("manifest.homework"):
        found = tomllib.loads(path.read_text())
        tasks = tuple(Task(str(task["label"]), tuple(map(str, task["holes"]))) for task in found["task"])
        hints = _read_hints(path.parent)
        title, points, bonus = str(found["title"]), int(found["points"]), int(found["bonus"])
    return Exercise(HOMEWORK, "hw_fsdp", title, points, (), hints, path.parent, bonus=bonus, tasks=tasks)


def _read_hints(folder: Path) -> tuple[str, ...]:
    return tuple(map(flowed, _texts(tomllib.loads((folder / HINTS).read_text())["hints"])))


def flowed(hint: str) -> str:
    """Join the lines of a hint. Each numbered step stays on its own line."""
    return re.sub(r"\s*\n\s*(\d+\. )?", lambda step: f"\n{step[1]}" if step[1] else " ", hint.strip())


def _texts(value: Any) -> Sequence[str]:
    if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        raise TypeError(f"{value!r} is not a list of texts")
    return value
