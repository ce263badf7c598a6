"""The exercises of a course, read from their folders without importing pytest, torch or a test file.

    exercises/03_naive_fsdp/README.md             the page; its hints are `<details>` with the summary "Hint 1" and so on
    exercises/03_naive_fsdp/test_naive_fsdp.py    the markers say the number, the title, the file, and the points of each test
    exercises/my_fsdp.py                          the file that the student writes

    pytestmark = pytest.mark.exercise("03", title="Naive FSDP", file="my_fsdp.py")

    @pytest.mark.points(4, ask="…")
    def test_trains(…): …

A station is an exercise about `my_fsdp.py`. An elective has a number and a file of its own. The homework and the lab have no number.

Note [Hints are in the page]
    An exercise is a page, a file and its tests, so hints need no file and no format of their own. A page that is shown as a page
    folds them, and `hwfsdp hint` shows one more each time. Whoever reads the page's text can see them, as they can see the answers
    to its predictions.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hwfsdp.course.stages import CARRIED, OWN_FILE
from hwfsdp.errors import UsageError, did_you_mean

_HINT = re.compile(r"<details><summary>Hint \d+[^<]*</summary>\n(.*?)\n</details>", re.DOTALL)


class Check(NamedTuple):
    """A test: its name, such as "03.trains", the first line of its docstring, and its points. A bonus adds nothing to the most."""

    name: str
    sentence: str
    points: int
    bonus: bool = False


@dataclass(frozen=True)
class Exercise:
    """One exercise.

    Attributes:
        number: "03", "homework" or "lab", as its marker says. file: the name of the student's file. folder: the exercise's.
    """

    number: str
    title: str
    file: str
    folder: Path
    checks: tuple[Check, ...]

    @property
    def is_station(self) -> bool:
        return self.file == OWN_FILE

    @property
    def has_number(self) -> bool:
        return self.number.isdecimal()

    @property
    def short_number(self) -> str:
        """The number as a student types it."""
        return self.number.lstrip("0")

    @property
    def target(self) -> Path:
        """The path of the student's file below `exercises/`, `solutions/` or a submission."""
        return Path(self.file) if self.is_station else Path(self.folder.name, self.file)

    @property
    def path(self) -> Path:
        """The student's file."""
        return self.folder.parent / self.target

    @property
    def page(self) -> Path:
        return self.folder / "README.md"

    @property
    def points(self) -> int:
        return sum(check.points for check in self.checks if not check.bonus)

    @property
    def hints(self) -> list[str]:
        """From a question to numbered steps; none if the page has none."""
        text = self.page.read_text(encoding="utf-8") if self.page.is_file() else ""
        return [flowed(hint) for hint in _HINT.findall(text)]


class Course(NamedTuple):
    """A folder with `exercises/`: stations and electives by number, then the homework and the lab."""

    root: Path
    exercises: tuple[Exercise, ...]

    def exercise(self, name: str, verb: str = "check") -> Exercise:
        """Find an exercise by its number or folder: 3, 03, 03_naive_fsdp or exercises/03_naive_fsdp. `verb`: for the remedy.

        Raises:
            UsageError: there is no such exercise.
        """
        for each in self.exercises:
            wanted = name.zfill(2) if name.isascii() and name.isdecimal() else Path(name).name
            if wanted in (each.number, each.folder.name):
                return each
        known = [each.folder.name for each in self.exercises]
        remedy = did_you_mean(Path(name).name, known, "See: hwfsdp list", f"hwfsdp {verb} {{}}")
        numbers = ", ".join(each.short_number for each in self.exercises)
        raise UsageError(
            f"exercise {name[:40]}", expected=f"one of {numbers}", got=repr(name[:40]), remedy=remedy
        )

    @property
    def stations(self) -> list[Exercise]:
        return [each for each in self.exercises if each.is_station]


def find_course(start: Path | None = None) -> Course:
    """Find the course around a folder (by default the current one), or else the checkout that the package is installed from.

    Raises:
        UsageError: there is no course, or a test file cannot be read.
    """
    here = (start or Path.cwd()).resolve()
    for root in (here, *here.parents, CARRIED.parents[2]):
        if (course := read_course(root)) is not None:
            return course
    raise UsageError(
        "hwfsdp",
        expected=f"a folder exercises/ in {here} or above",
        got="none",
        remedy="Write one: hwfsdp course DIR",
    )


def read_course(root: Path) -> Course | None:
    """Read the course in a folder; None if it has no exercise."""
    tests = (root / "exercises").glob("*/test_*.py")
    found = [exercise for path in sorted(tests) if (exercise := _read(path)) is not None]
    return Course(root, tuple(sorted(found, key=lambda each: each.number))) if found else None


def _read(path: Path) -> Exercise | None:
    """Read one test file; None if it has no marker of an exercise."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
        markers = [each.value for each in assigned if ast.unparse(each.targets[0]) == "pytestmark"]
        for marker in _marks(markers, "exercise"):
            (number,), named = _arguments(marker)
            checks = tuple(_checks(tree, number))
            return Exercise(number, str(named["title"]), str(named["file"]), path.parent, checks)
    except (OSError, SyntaxError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"exercises/{path.parent.name}/{path.name}",
            expected='pytest.mark.exercise("NN", title="…", file="….py") and pytest.mark.points(n, ask="…"), with plain values',
            got=f"{type(error).__name__}: {error}",
            remedy="Write them as the other exercises do.",
        ) from None
    return None


def _checks(tree: ast.Module, number: str) -> Iterator[Check]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            marks = [_arguments(mark) for mark in _marks(node.decorator_list, "points")]
            sentence = (ast.get_docstring(node) or "").partition("\n")[0]
            points = sum(given[0] for given, _ in marks)
            is_bonus = any(named.get("bonus") for _, named in marks)
            yield Check(f"{number}.{node.name.removeprefix('test_')}", sentence, int(points), is_bonus)


def _marks(nodes: list[ast.expr], name: str) -> Iterator[ast.Call]:
    """Yield the calls of `pytest.mark.<name>`, also those in lists."""
    for node in nodes:
        if isinstance(node, ast.List | ast.Tuple):
            yield from _marks(node.elts, name)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == f"pytest.mark.{name}":
            yield node


def _arguments(call: ast.Call) -> tuple[list[Any], dict[str, Any]]:
    named = {each.arg: ast.literal_eval(each.value) for each in call.keywords if each.arg}
    return [ast.literal_eval(each) for each in call.args], named


def flowed(hint: str) -> str:
    """Join the lines of a hint. Each numbered step stays on its own line."""
    return re.sub(r"\s*\n\s*(\d+\. )?", lambda step: f"\n{step[1]}" if step[1] else " ", hint.strip())


def read_text(path: Path) -> str | None:
    """Return the text of a student's file; None if there is none, or if it cannot be read."""
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="utf-8-sig")
    return None
