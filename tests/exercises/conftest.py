"""`pytest tests/exercises --submission DIR` grades a folder: one test per check."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from hwfsdp.learn.grade import Options, grade
from hwfsdp.learn.manifest import Course, find_course
from hwfsdp.learn.submission import check_folder
from hwfsdp.learn.verdict import Grade

Grader = Callable[[str], Grade]
GRADER = pytest.StashKey[Grader]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("hwfsdp")
    group.addoption("--submission", metavar="DIR", help="folder to grade (default: the course's solutions)")
    group.addoption("--mine", action="store_true", help="earlier exercises come from the same folder")
    group.addoption("--input-seed", type=int, help="of the inputs (default: another one each time)")


def grader(config: pytest.Config) -> Grader:
    """Grades an exercise of the folder that was asked for, by number, once."""
    course = find_course(Path(__file__))
    folder = submission(config, course)
    mine, seed = config.getoption("--mine", False), config.getoption("--input-seed", None)
    return functools.cache(
        lambda number: grade(course.exercise(number), folder, course, Options(mine=bool(mine), seed=seed))
    )


def submission(config: pytest.Config, course: Course) -> Path:
    """The folder to grade; an unusable one ends the session."""
    chosen = config.getoption("--submission", None)
    if chosen is None:
        return course.root / "solutions"
    folder = Path(config.invocation_params.dir, chosen)
    try:
        check_folder(folder, course.exercises)
    except ValueError as error:
        pytest.exit(f"hwfsdp: {error}", 2)
    return folder


def pytest_configure(config: pytest.Config) -> None:
    config.stash[GRADER] = grader(config)


@pytest.fixture
def grade_of(request: pytest.FixtureRequest) -> Grader:
    """The grade of an exercise, by its number."""
    stash = request.config.stash
    if GRADER not in stash:  # pytest came to this folder only while collecting
        stash[GRADER] = grader(request.config)
    return stash[GRADER]
