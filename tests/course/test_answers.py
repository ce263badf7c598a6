"""A wrong answer fails its test with its misconception, and a right one passes all tests, however it is written.

An answer edits the reference of its exercise (`answers.shapes`). The tests of an exercise are called as the plugin calls them, but in one
process, for one test of one answer: `python tests/course/test_answers.py 04 frozen` prints what each answer of 04 got with this word
in its check or name.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
import tempfile
from collections.abc import Collection, Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from hwfsdp.course.exercises import find_course
from hwfsdp.course.findings import MISCONCEPTIONS, Finding
from hwfsdp.course.ranks import NotYet, StudentFile, askers
from hwfsdp.course.stages import END, stage
from hwfsdp.launcher.fork_server import start_server

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]
from answers.shapes import RIGHT, Answer, of_another_make, read  # noqa: E402
from suites import long  # noqa: E402

SEED = 7
COURSE = find_course(Path(__file__))
JUDGED = {each.number: each for each in COURSE.exercises if each.number != "lab"}
ANSWERS = [each for path in sorted(Path(__file__).parent.glob("answers/*.txt")) for each in read(path.name)]
WRONG = [each for each in ANSWERS if each.misconception != RIGHT]
OTHER_MAKES = sorted(Path(__file__).parent.glob("answers/right/*.py"))
POINTS = {check.name: check.points for each in JUDGED.values() for check in each.checks}
STATIONS = [each.number for each in COURSE.stations]
RACE = "16"  # against FSDP2's time, which a right file may not reach


def reference(number: str) -> str:
    """Return the solution after an exercise. After the last station, `my_fsdp.py` stays as it is."""
    exercise = JUDGED[number]
    marked = (COURSE.root / "solutions" / exercise.target).read_text()
    return stage(marked, number if exercise.is_station else END)


def checks_of(number: str) -> dict[str, Any]:
    """Return the test functions of an exercise, by name. Other files of tests may have the same name as an exercise's."""
    [path] = JUDGED[number].folder.glob("test_*.py")
    spec = importlib.util.spec_from_file_location(f"exercise_{number}", path)
    assert spec is not None and spec.loader is not None
    if spec.name not in sys.modules:
        # For its probes. Last: ranks import a file of our tests before an exercise's file of the same name.
        sys.path.append(str(path.parent))
        sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[spec.name])
    found = vars(sys.modules[spec.name])
    return {name.removeprefix("test_"): each for name, each in found.items() if name.startswith("test_")}


def variants(function: Any) -> list[dict[str, Any]]:
    """Return the arguments of each variant of a test that is parametrized."""
    found: list[dict[str, Any]] = [{}]
    for mark in (mark for mark in getattr(function, "pytestmark", ()) if mark.name == "parametrize"):
        names, values = mark.args[:2]
        given = [
            dict(zip(names, v, strict=True)) if isinstance(names, tuple | list) else {names: v}
            for v in values
        ]
        found = [one | other for one, other in product(found, given)]
    return found


def verdicts(text: str, number: str, only: Collection[str] = (), seed: int = SEED) -> dict[str, Finding]:
    """Run the tests of an exercise, or only some, on a file. Return why they failed, by name."""
    start_server("hwfsdp.course.machines")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / JUDGED[number].file
        path.write_text(text)
        course, found = StudentFile(path), dict[str, Finding]()
        known = askers(course, seed) | {
            "seed": seed,
            "submission": course,
            "measured": lambda of, figures: None,
        }
        try:
            for course.asking in (True, False):
                for name, test in checks_of(number).items():
                    for given in variants(test) if name in (only or [name]) else []:
                        wanted = inspect.signature(test).parameters
                        try:
                            test(**{each: (known | given)[each] for each in wanted})
                        except (NotYet, pytest.skip.Exception):
                            pass
                        except Finding as finding:
                            found.setdefault(name, finding)
                if course.asking:
                    course.begin()
        finally:
            course.end()
    return found


def failed(answer: Answer) -> dict[str, tuple[str, str]]:
    name = answer.check.partition(".")[2]
    found = verdicts(answer.text(reference(answer.exercise)), answer.exercise, [name] if name else [])
    return {name: (why.misconception, why.message) for name, why in found.items()}


def one_for_each_exercise(answers: Iterable[Answer]) -> list[Any]:
    """Return the answers as cases; all but the first of each exercise are long."""
    seen, cases = set[str](), []
    for each in answers:
        cases.append(long(each) if each.exercise in seen else each)
        seen.add(each.exercise)
    return cases


def named(answer: Any) -> str:
    return f"{answer.check}: {answer.name}"


def test_every_answer_is_an_edit_of_the_reference_as_it_is() -> None:
    for each in ANSWERS:
        each.text(reference(each.exercise))


@pytest.mark.parametrize("wrong", one_for_each_exercise(WRONG), ids=named)
def test_a_wrong_answer_gets_its_misconception(wrong: Answer) -> None:
    found = failed(wrong)
    assert [kind for kind, _ in found.values()] == [wrong.misconception], found


def test_each_test_has_points_and_calls_no_other() -> None:
    assert all(POINTS.values()), POINTS
    for number in JUDGED:
        [path] = JUDGED[number].folder.glob("test_*.py")
        assert re.findall(r"(?<!def )\btest_\w+\(", path.read_text()) == [], path


@pytest.mark.long
@pytest.mark.parametrize("right", [each for each in ANSWERS if each.misconception == RIGHT], ids=named)
def test_a_right_answer_passes_all_tests(right: Answer) -> None:
    assert failed(right) == {}


@pytest.mark.long
@pytest.mark.parametrize("number", [each for each in STATIONS if each != RACE])
@pytest.mark.parametrize("path", OTHER_MAKES, ids=lambda path: path.stem)
def test_a_file_of_another_make_passes_all_tests(path: Path, number: str) -> None:
    assert {name: why.message for name, why in verdicts(of_another_make(path), number).items()} == {}


@pytest.mark.long
@pytest.mark.parametrize("number", JUDGED)
def test_the_reference_passes_its_tests_and_those_of_earlier_stations(number: str) -> None:
    """The solution of the last station runs the tests of all stations. Each other one runs its own tests and the station before it."""
    earlier = STATIONS[: STATIONS.index(number) + 1] if number in STATIONS else [number]
    for each in earlier if number == STATIONS[-1] else earlier[-2:]:
        found = verdicts(reference(number), each)
        assert {name: why.message for name, why in found.items()} == {}


def test_every_exercise_is_judged_on_enough_answers() -> None:
    for number in JUDGED:
        wrong = [each for each in WRONG if each.exercise == number]
        assert all(each.misconception in MISCONCEPTIONS for each in wrong)
        assert len(wrong) >= (3 if number == "16" else 8)
        if number != "homework":  # its tasks share tests
            assert {each.check for each in wrong} >= {
                each.name for each in JUDGED[number].checks if each.points
            }


if __name__ == "__main__":
    for each in ANSWERS:
        if each.exercise == sys.argv[1] and all(word in f"{each.check} {each.name}" for word in sys.argv[2:]):
            got = failed(each)
            wanted = [] if each.misconception == RIGHT else [each.misconception]
            sign = "same   " if [kind for kind, _ in got.values()] == wanted else "DIFFERS"
            print(sign, each.check, each.misconception, each.name, got, flush=True)
