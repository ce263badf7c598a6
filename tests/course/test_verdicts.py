"""The page of a run asks one question, about the cause, and says the same thing once."""

from __future__ import annotations

import io

import torch

from hwfsdp.course.findings import KINDS, MISCONCEPTIONS, Finding, Outcome, cause_of, folded
from hwfsdp.course.pages import Style, verdict


def failed(
    test: str,
    misconception: str,
    own: bool = True,
    expected: float | None = None,
) -> Outcome:
    outcome = Outcome(test, "It holds.", 2, "The test's own question?", own)
    outcome.add("failed", Finding(misconception, "It was 1.", expected))
    return outcome


def names(outcomes: list[Outcome]) -> list[list[str]]:
    return [[each.test for each in of] for of in folded(outcomes)]


def test_the_cause_is_of_the_first_kind_then_the_exercises_own_test() -> None:
    assert {each.kind for each in MISCONCEPTIONS.values()} == {*KINDS}
    value, wait = failed("05.step", "wrong-value"), failed("05.bytes", "used-before-wait")
    assert cause_of([failed("03.trains", "used-before-wait", own=False), value, wait]) is wait
    assert cause_of([]) is None


def test_findings_of_one_misconception_are_shown_once_with_one_question() -> None:
    outcomes = [
        failed("03.trains", "not-freed"),
        failed("03.memory", "not-freed"),
        failed("03.rows", "wrong-value"),
    ]
    assert names(outcomes) == [["03.trains", "03.memory"], ["03.rows"]]
    page = verdict(outcomes, Style(io.StringIO()))
    assert page.count("not-freed: ") == 1 and "same cause: 03.memory" in page and page.count("→") == 1


def test_wrong_numbers_of_earlier_exercises_follow_from_a_race_of_the_exercise() -> None:
    earlier = [
        failed("05.travels", "not-gathered", own=False, expected=8.5),
        failed("08.step", "wrong-value"),
        failed("05.memory", "not-freed", own=False, expected=4),
        failed("03.rows", "replicated", own=False),
    ]
    race = failed("08.races", "used-before-wait")
    assert names([*earlier, race]) == [["08.races", "05.travels"], ["03.rows"], ["05.memory"], ["08.step"]]
    assert len(folded([*earlier, failed("08.races", "not-freed")])) == 4


def test_a_value_that_nobody_has_written_is_a_missing_wait() -> None:
    assert Finding("wrong-value", "the loss is nan").misconception == "used-before-wait"
    assert Finding("wrong-value", "at [0]: 1.3e+38 instead of 2").misconception == "used-before-wait"
    assert Finding("wrong-value", "at [0]: 1.5 instead of 2e-05").misconception == "wrong-value"


def test_a_short_tensor_is_shown_whole_and_a_long_one_by_its_first_numbers_and_its_shape() -> None:
    finding = Finding("wrong-value", "It was other.", torch.arange(2), torch.arange(20))
    assert (finding.expected, finding.actual) == ("[0, 1]", "[0, 1, 2, 3, 4, 5, 6, 7]… (20,)")


def test_a_vague_misconception_asks_the_tests_own_question() -> None:
    assert failed("01.rows", "wrong-rows").question == "The test's own question?"
    assert failed("01.rows", "spread-evenly").question.startswith("How does torch.chunk")


def test_a_test_whose_first_variant_ended_the_run_is_not_said_to_have_not_run() -> None:
    outcome = failed("02.gather", "stuck-in")
    outcome.add("skipped", note="not run: 02.gather ended the run of my_fsdp.py")
    assert "not run" not in verdict([outcome], Style(io.StringIO()))


def test_earlier_exercises_that_still_hold_are_one_line() -> None:
    own, earlier = Outcome("03.rows", "Rows.", 2), Outcome("01.rows", "Rows.", 3, own=False)
    own.add("passed"), earlier.add("passed")
    page = verdict([own, earlier], Style(io.StringIO()))
    assert "01 : still right" in page and "2 of 2 points" in page


def test_the_own_exercise_ends_the_page_and_earlier_ones_show_causes_of_their_own() -> None:
    tests = [
        failed("05.step", "not-freed"),
        failed("04.memory", "not-freed", own=False),
        failed("03.trains", "wrong-value", own=False),
        failed("03.memory", "not-freed", own=False),
    ]
    page = verdict([*tests, Outcome("01.rows", "Rows.", 3, own=False)], Style(io.StringIO()))
    places = [page.index(part) for part in ("01 : 0 of 3 points, not all tests ran", "03.trains", "05.step")]
    assert places == sorted(places) and "04 : 0 of 2 points, for the same cause" in page
    assert page.count("03.memory") == 1 and "0 of 4 points. A hint: hwfsdp hint 3" in page
