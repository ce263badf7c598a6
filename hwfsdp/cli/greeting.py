"""`hwfsdp` without a verb: it says what hwfsdp is, and names the next thing to do.

    no course here or in the package     the demo
    the course, nothing checked yet      the demo, then the exercises
    no exercise passed                   the page on how the course works, then the first exercise
    some exercises passed                the first exercise that is not passed
    all passed                           the homework, then the lab

It answers at once, because nothing here imports torch. An exercise is passed if `hwfsdp status` says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hwfsdp import __version__
from hwfsdp.course.exercises import Course, Exercise, find_course, read_course
from hwfsdp.course.progress import Progress
from hwfsdp.course.stages import CARRIED
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
    progress = Progress.load(course)
    if not progress.outcomes and not any((place / _DEMO).exists() for place in (Path.cwd(), course.root)):
        yield from _demo(
            f"Then the course, exercises {course.exercises[0].short_number} to {_numbered(course)[-1].short_number}:\n  hwfsdp list"
        )
        return
    standings = [progress.standing(exercise) for exercise in _numbered(course)]
    passed = sum(s.status == "passed" for s in standings)
    yield f"{passed} of {len(standings)} exercises passed."
    left = [s.exercise for s in standings if not s.is_over]
    if not left:
        yield from _after_the_exercises(course)
        return
    following = left[0]
    if not passed:
        yield f"First, how the course works:\n  read   {_shown(course.root / 'exercises' / 'README.md')}"
    yield f"Next, exercise {following.short_number}, {following.title.lower()}:"
    yield f"  read   {_shown(following.folder / 'README.md')}"
    yield f"  edit   {_shown(following.path)}"
    yield f"  check  hwfsdp check {following.short_number}"


def _numbered(course: Course) -> list[Exercise]:
    return [each for each in course.exercises if each.has_number]


def _without_course() -> Iterator[str]:
    """Propose the demo, then a copy of the course if the package carries one."""
    course = read_course(CARRIED.parent)
    if course is None:
        yield from _demo("")
        return
    if not _DEMO.exists():
        yield from _demo(f"Then write the course, {len(_numbered(course))} exercises, to a folder:")
    else:
        yield "Next, write the course to a folder to work in:"
    yield "  hwfsdp course fsdp-course"


def _demo(then: str) -> Iterator[str]:
    yield "Next, see it train a small GPT on two processes, beside torch's FSDP2:"
    yield "  hwfsdp demo"
    if then:
        yield then


def _after_the_exercises(course: Course) -> Iterator[str]:
    homework = course.root / "exercises" / "homework"
    if homework.is_dir():
        yield "Next, the homework, FSDP in one file:"
        yield f"  read   {_shown(homework / 'README.md')}"
        yield "  check  hwfsdp check homework"
    if (course.root / "exercises" / "lab").is_dir():
        yield "Then the lab, scripts that train wrongly: hwfsdp lab"


def _shown(path: Path) -> Path:
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
