"""Grade a folder with `pytest tests/exercises --submission DIR`: one test per check, and a line per exercise at the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hwfsdp.course.grade import Options, grade
from hwfsdp.course.manifest import Course, find_course
from hwfsdp.course.run import Runs
from hwfsdp.course.submission import check_folder
from hwfsdp.course.verdict import Grade

Grader = Callable[[str], Grade]
GRADER = pytest.StashKey[Grader]()
GRADES = pytest.StashKey[dict[str, Grade]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("hwfsdp")
    group.addoption(
        "--submission",
        metavar="DIR",
        help="folder to grade (default: solutions/, or exercises/ where there is none)",
    )
    group.addoption("--mine", action="store_true", help="earlier exercises come from the same folder")
    group.addoption("--input-seed", type=int, help="of the inputs (default: another one each time)")


def grader(config: pytest.Config) -> Grader:
    """Return a function that grades an exercise of the chosen folder, by number. It grades each exercise only once."""
    course = find_course(Path(__file__))
    folder = submission(config, course)
    mine, seed = config.getoption("--mine", False), config.getoption("--input-seed", None)
    grades = config.stash[GRADES] = {}
    runs: Runs = {}
    drawn = Options(seed=seed).draw_seed()

    def grade_of(number: str) -> Grade:
        if number not in grades:
            exercise = course.exercise(number)
            options = Options(mine=bool(mine) and not exercise.is_station, seed=drawn)
            grades[number] = grade(exercise, folder, course, options, runs=runs)
        return grades[number]

    return grade_of


def submission(config: pytest.Config, course: Course) -> Path:
    """Return the folder to grade. End the session if this folder is unusable."""
    chosen = config.getoption("--submission", None)
    if chosen is None:  # a student's edition has no solutions, but the student's own files
        solutions = course.root / "solutions"
        return solutions if solutions.is_dir() else course.root / "exercises"
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
    """Return the function that grades an exercise by its number."""
    stash = request.config.stash
    if GRADER not in stash:  # pytest came to this folder only while collecting
        stash[GRADER] = grader(request.config)
    return stash[GRADER]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print a line for each exercise that was graded here."""
    grades = config.stash.get(GRADES, {})
    if grades:
        terminalreporter.section("exercises")
        width = max(len(each.exercise.title) for each in grades.values())
    for number, each in sorted(grades.items()):
        status = each.status.replace("_", " ")
        terminalreporter.line(f"{number} {each.exercise.title:<{width}}  {status:<11}  {each.points}")
