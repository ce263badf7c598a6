"""Starters and solutions come from the package. A line names each difference."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hwfsdp import UsageError
from hwfsdp.course import manifest, workbook
from hwfsdp.course.manifest import HINTS, Course, Exercise, find_course, read_homework, read_manifest

COURSE = find_course(Path(__file__))


@pytest.fixture
def course(tmp_path: Path) -> Course:
    """Make a copy that can be damaged."""
    for folder in ("exercises", "solutions"):
        shutil.copytree(COURSE.root / folder, tmp_path / folder, ignore=shutil.ignore_patterns("*.png"))
    return find_course(tmp_path)


def test_the_files_of_the_course_match_the_package() -> None:
    assert list(workbook.problems(COURSE)) == []
    assert workbook.write(COURSE) == []


@pytest.mark.parametrize("exercise", COURSE.exercises, ids=lambda exercise: exercise.directory)
def test_every_exercise_has_all_that_belongs_to_it(exercise: Exercise) -> None:
    readme = (exercise.folder / "README.md").read_text()
    assert "## Predict" in readme if exercise.is_station else "two numbers" in readme.lower()
    assert re.search(rf"hwfsdp check 0?{int(exercise.number)}\b", readme)
    assert len(exercise.hints) == 3 and len(set(exercise.hints)) == 3
    if not exercise.is_station:
        assert "picture.png" in readme and (exercise.folder / "picture.png").stat().st_size > 5_000
        assert len((COURSE.root / "solutions" / exercise.directory / "README.md").read_text()) > 500


def test_the_homework_has_its_hints_where_listing_the_folder_does_not_show_them() -> None:
    homework = read_homework(COURSE)
    assert len(set(homework.hints)) == 3 and (homework.folder / HINTS).exists()
    assert not [path for path in homework.folder.glob("[!.]*.toml") if "hint" in path.read_text()]


def test_starters_show_no_other_bodies() -> None:
    for exercise in COURSE.exercises:
        text = exercise.path.read_text()
        if not exercise.is_station:
            assert text.count("raise NotImplementedError") == text.count(f"# TODO({exercise.number})")
            assert text.count(f"# TODO({exercise.number})") == len(exercise.places)


def damaged(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize("number", [1, 12])
def test_a_starter_that_was_changed_is_named(course: Course, number: int) -> None:
    exercise = course.exercise(number)
    damaged(exercise.path, "TODO", "DONE")
    assert list(workbook.problems(course)) == [
        f"exercises/{exercise.target} is not what the package gives. Run: make exercises"
    ]
    assert workbook.write(course) == [exercise.path]
    assert list(workbook.problems(course)) == []


@pytest.mark.long
def test_a_solution_that_does_not_restore_the_package_is_named(course: Course) -> None:
    path = course.root / "solutions" / course.exercise(12).target
    damaged(path, "    return whole", "    return  whole")
    found = list(workbook.problems(course))
    assert found[0] == "hwfsdp.layout.extents is not restored by the solutions. Run: make exercises"
    path.unlink()
    assert any("is missing" in line for line in workbook.problems(course))


@pytest.mark.long
def test_a_hole_of_two_exercises_is_named(course: Course) -> None:
    hole = "hwfsdp.features.layouts:cut_after"
    damaged(
        course.exercise(13).folder / "exercise.toml", 'holes = [\n    "', f'holes = [\n    "{hole}",\n    "'
    )
    found = list(workbook.problems(find_course(course.root)))
    assert found[0] == f"{hole} is a hole of 12 and of 13."


def test_a_hole_that_is_not_in_the_package_is_named(course: Course) -> None:
    damaged(course.exercise(12).folder / "exercise.toml", ":cut_after", ":cut_aftre")
    found, *_ = workbook.problems(find_course(course.root))
    assert "cut_aftre" in found and "Did you mean: cut_after" in found


def test_a_name_in_calls_that_is_not_in_the_package_is_named(course: Course) -> None:
    damaged(course.exercise(12).folder / "exercise.toml", ":largest_shape", ":largets_shape")
    found = [line for line in workbook.problems(find_course(course.root)) if "largets_shape" in line]
    assert len(found) == 1 and found[0].startswith("calls: hwfsdp.layout.extents:largets_shape: expected ")
    assert "Did you mean: largest_shape" in found[0]


@pytest.mark.long
def test_a_module_in_calls_that_is_not_in_the_package_is_named(course: Course) -> None:
    damaged(course.exercise(12).folder / "exercise.toml", "hwfsdp.core.sharding:", "hwfsdp.core.shardnig:")
    assert any("hwfsdp.core.shardnig" in line for line in workbook.problems(find_course(course.root)))


@pytest.mark.long
def test_grading_problems_are_named(course: Course, monkeypatch: pytest.MonkeyPatch) -> None:
    exercise = course.exercise(1)
    wrong = workbook.solution(exercise).replace("-(-n // world_size)", "n // world_size")
    monkeypatch.setattr(workbook, "solution", lambda _: wrong)
    monkeypatch.setattr(workbook, "starter", lambda _: wrong)
    first, second, *_ = workbook.grading_problems(course, exercise)
    assert first == "01: the starter is failed with 0 points, not not_started."
    assert "the solution gets 0 of 5 points: 01.padded: floor-instead-of-ceil" in second


MANIFESTS: dict[str, Callable[[str], str]] = {
    "no TOML": lambda text: text + "\n= 3",
    "no title": lambda text: text.replace("title", "name"),
    "holes are no list": lambda text: text.replace("holes = [", "holes = 3\nothers = ["),
    "points are no number": lambda text: text.replace("points = ", 'points = "many" # '),
    "calls are no list": lambda text: text.replace("calls = [", "calls = 3\nothers = [", 1),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_an_invalid_manifest_is_refused(name: str, course: Course) -> None:
    path = course.exercise(12).folder / "exercise.toml"
    path.write_text(MANIFESTS[name](path.read_text()))
    with pytest.raises(UsageError, match="manifest 12_strided_shards/exercise.toml"):
        read_manifest(path)


@pytest.mark.parametrize("hints", [None, "hints = []", "tips = ['look again']"])
def test_missing_or_invalid_hints_are_refused(hints: str | None, course: Course) -> None:
    path = course.exercise(12).folder / HINTS
    path.unlink() if hints is None else path.write_text(hints)
    with pytest.raises(UsageError, match="manifest 12_strided_shards/exercise.toml"):
        read_manifest(path.with_name("exercise.toml"))


def test_a_course_is_found_from_inside_and_missed_nowhere(
    course: Course, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_course(course.exercise(2).folder).root == course.root
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    assert find_course(elsewhere).root == COURSE.root  # the package's own course
    monkeypatch.setattr(manifest, "PACKAGE", elsewhere / "hwfsdp")
    with pytest.raises(UsageError, match="the course"):
        find_course(elsewhere)


@pytest.mark.parametrize("number", [1, "1", "01", "001"])
def test_an_exercise_is_found_by_its_number(number: int | str) -> None:
    assert COURSE.exercise(number).number == "01"


@pytest.mark.parametrize("number", ["0", "99", "-1", "one", "", "1.0", "²"])
def test_another_number_is_refused(number: str) -> None:
    with pytest.raises(UsageError, match="exercise"):
        COURSE.exercise(number)
