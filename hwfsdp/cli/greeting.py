"""`hwfsdp` without a verb: what this is, and the one thing to do next.

    no course here or in the package     the demo
    the course, nothing checked yet      the demo, then the first exercise
    some exercises passed                the first exercise that is not
    all passed                           the homework, then the lab

It answers at once: nothing here imports torch. So it reads the verdicts in the file of `course.progress` without the rest of
that module. An exercise whose file has a TODO again counts as not passed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hwfsdp import __version__
from hwfsdp.course.manifest import Course, Exercise, carried_course, find_course
from hwfsdp.course.stations.stages import is_given
from hwfsdp.errors import UsageError

_DEMO = Path("runs", "demo", "summary.json")


def greet() -> int:
    """Print the greeting; return the exit status."""
    print(f"hwfsdp {__version__}: a small, readable FSDP, and a drop-in for PyTorch's fully_shard.\n")
    print("\n".join(_proposal()))
    print("\nhwfsdp --help lists all verbs. hwfsdp doctor checks this machine.")
    return 0


def _proposal() -> Iterator[str]:
    try:
        course = find_course()
    except UsageError:
        yield from _without_course()
        return
    grades = _grades(course)
    if not grades and not any((place / _DEMO).exists() for place in (Path.cwd(), course.root)):
        yield from _demo(f"Then the course, exercises 1 to {len(course.exercises)}:\n  hwfsdp list")
        return
    done = [exercise for exercise in course.exercises if _is_passed(exercise, grades)]
    following = next((each for each in course.exercises if each not in done and not _is_forgone(each)), None)
    yield f"{len(done)} of {len(course.exercises)} exercises passed."
    if following is None:
        yield from _after_the_exercises(course)
        return
    yield f"Next, exercise {following.short_number}, {following.title.lower()}:"
    yield f"  read   {_shown(following.folder / 'README.md')}"
    yield f"  edit   {_shown(following.path)}"
    yield f"  check  hwfsdp check {following.short_number}"


def _without_course() -> Iterator[str]:
    """Propose the demo, then a copy of the course if the package carries one."""
    course = carried_course()
    if course is None or not _DEMO.exists():
        exercises = (
            f"Then write the course, {len(course.exercises)} exercises, to a folder:" if course else ""
        )
        yield from _demo(f"{exercises}\n  hwfsdp course fsdp-course" if exercises else "")
        return
    yield "Next, write the course to a folder to work in:"
    yield "  hwfsdp course fsdp-course"


def _demo(then: str) -> Iterator[str]:
    yield "Next, see it train a small GPT on two processes, beside torch's FSDP2:"
    yield "  hwfsdp demo"
    if then:
        yield then


def _after_the_exercises(course: Course) -> Iterator[str]:
    homework = course.root / "exercises" / "capstone"
    if homework.is_dir():
        yield "Next, the homework, FSDP in one file:"
        yield f"  read   {_shown(homework / 'README.md')}"
        yield "  check  hwfsdp check capstone"
    if (course.root / "exercises" / "lab").is_dir():
        yield "Then the lab, scripts that train wrongly: hwfsdp lab"


def _grades(course: Course) -> dict[str, Any]:
    """The verdicts so far, by number. None if there is no readable file."""
    try:
        found = json.loads((course.root / ".hwfsdp" / "progress.json").read_text())["grades"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_passed(exercise: Exercise, grades: dict[str, Any]) -> bool:
    known = grades.get(exercise.number)
    if not isinstance(known, dict) or known.get("status") != "passed":
        return False
    try:
        text = exercise.path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError):
        return False
    is_same = known.get("digest") == hashlib.sha256(text.encode()).hexdigest()
    return is_same or f"TODO({exercise.number})" not in text


def _is_forgone(exercise: Exercise) -> bool:
    """Whether its points went to `hwfsdp catchup`."""
    try:
        return exercise.is_station and is_given(exercise.number, exercise.path.read_text(errors="replace"))
    except OSError:
        return False


def _shown(path: Path) -> Path:
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
