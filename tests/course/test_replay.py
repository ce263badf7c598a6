"""A learner's exercise beside the reference: differences are named, and a learner's code that hangs does not hang the caller."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hwfsdp.course.manifest import Course, find_course
from hwfsdp.course.replay import Replay, is_same, replay
from hwfsdp.course.submission import solution

COURSE = find_course(Path(__file__))
SEED = 7


def replayed(number: int, folder: Path, line: str = "return -(-n // world_size)") -> Replay:
    """Replay a course whose learner has submitted the solution with this line in `padded_rows`."""
    exercise = COURSE.exercise(number)
    own = folder / "exercises" / exercise.target
    own.parent.mkdir(parents=True)
    own.write_text(solution(exercise).replace("return -(-n // world_size)", line))
    return replay(number, SEED, Course(folder, COURSE.exercises))


@pytest.mark.long
def test_an_answer_that_is_not_the_references_is_named(tmp_path: Path) -> None:
    found = replayed(1, tmp_path, "return n // world_size")
    assert found.begun and found.whose == "yours" and found.introduction.startswith("Yours: ")
    [run] = found.runs
    assert str(run).startswith("parts.probe_rows on 1 rank: 2 answers, of which 2 differ")
    assert run.answers["padded"] is False and "    'padded' differs" in str(run)
    assert found.logs() == {}


def test_a_question_that_raises_has_no_answer_and_says_why(tmp_path: Path) -> None:
    [run] = replayed(1, tmp_path, "raise ValueError('no idea')").runs
    assert "'padded' was not given" in str(run) and "no idea" in str(run)


@pytest.mark.long
def test_a_rank_that_dies_is_reported_and_there_is_nothing_to_draw(tmp_path: Path) -> None:
    found = replayed(1, tmp_path, "import os\n    os._exit(1)")
    assert all(run.broken and "had to be ended" in str(run) for run in found.runs)
    assert found.logs() == {}


@pytest.mark.long
@pytest.mark.parametrize("number", [8, 11])
def test_recorded_answers_are_laid_beside_each_other(number: int, tmp_path: Path) -> None:
    found = replayed(number, tmp_path)
    assert all(all(run.answers.values()) for run in found.runs), list(map(str, found.runs))
    logs = found.logs()
    assert list(logs) == ["yours", "the reference"]
    gathers = [[event.owner for event in log.select("all_gather", rank=0)] for log in logs.values()]
    assert gathers[0] == gathers[1] != []
    with_code = {whose for whose, log in logs.items() if any(event.code for event in log.events)}
    assert with_code == {"yours"}  # the reference's places would tell its answer


@pytest.mark.long
def test_an_exercise_that_is_not_begun_is_replayed_with_its_solution(tmp_path: Path) -> None:
    found = replay(1, SEED, Course(tmp_path, COURSE.exercises))
    assert found.whose == "the solution" and found.verdict.status == "passed"
    assert (
        "is not begun, so what follows is the solution in its place. Fill the first TODO"
        in found.introduction
    )


@pytest.mark.parametrize(
    ("mine", "theirs", "same"),
    [
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]), True),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64), False),
        (torch.tensor([0.1]), torch.tensor([0.1]).nextafter(torch.tensor([1.0])), False),
        (1, True, False),
        ("/tmp/x-12 is gone", "/tmp/x-345 is gone", True),
        ([1, 2], [1, 2, 3], False),
        ({"a": 1}, {"a": 1, "b": None}, False),
    ],
)
def test_answers_are_compared_to_the_bit(mine: object, theirs: object, same: bool) -> None:
    assert is_same(mine, theirs) is same
