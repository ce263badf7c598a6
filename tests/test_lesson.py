"""What notebooks need beyond the package: sliders that leave pictures on paper, and errors for whoever is not in a notebook."""

from __future__ import annotations

from typing import Any

import pytest

from hwfsdp.course import lesson
from hwfsdp.errors import UsageError


def test_outside_of_a_notebook_one_is_told_to_open_it() -> None:
    with pytest.raises(
        UsageError, match="expected a notebook or IPython; got plain Python. Open the notebook"
    ):
        lesson.begin()


@pytest.mark.parametrize(("choices", "got"), [({}, "no name at all"), ({"rank": ()}, "none for 'rank'")])
def test_a_slider_without_choices_is_refused(choices: dict[str, Any], got: str) -> None:
    with pytest.raises(UsageError, match=f"lesson.explore: expected values to choose from; got {got}"):
        lesson.explore(print, **choices)


@pytest.mark.parametrize(
    ("choices", "drawn"),
    [
        ({"rank": range(2), "step": "ab"}, ["0 a", "1 b"]),
        ({"rank": [7]}, ["7 -"]),
    ],
)
def test_on_paper_the_first_and_the_last_choice_are_drawn(
    choices: dict[str, Any], drawn: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(lesson.STATIC, "1")
    pages = lesson.explore(lambda rank, step="-": f"{rank} {step}", **choices)
    assert pages.pictures == drawn


def test_without_widgets_a_slider_is_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(lesson.STATIC, raising=False)
    monkeypatch.setattr(lesson.importlib.util, "find_spec", lambda name: None)
    assert isinstance(lesson.explore(str, object=[1, 2]), lesson.Pages)


def test_at_a_living_kernel_the_choice_is_the_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(lesson.STATIC, raising=False)
    controls = lesson.explore(lambda rank: rank * 10, rank=range(3))
    [slider] = [child for child in controls.children if getattr(child, "description", "") == "rank"]
    slider.value = 2
    controls.update()
    assert controls.result == 20
