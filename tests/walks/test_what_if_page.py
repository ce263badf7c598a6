"""docs/what_if.py: the page holds the predictions of `simulate`, and shows them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import suites
import torch
from browser import browser, find_browser

from hwfsdp.virtual import simulate

DOCS = Path(__file__).parents[2] / "docs"
sys.path.insert(0, str(DOCS))

import what_if  # noqa: E402

PLACES = list(what_if.positions())


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    """Return the data in the page."""
    (found,) = re.findall(r'id="data">(.*?)</script>', what_if.PAGE.read_text(), re.DOTALL)
    return dict(json.loads(found))


def test_the_page_is_small_asks_for_nothing_and_has_an_answer_for_each_position(data: dict[str, Any]) -> None:
    text = what_if.PAGE.read_text()
    assert len(text) < 2e6 and not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    values = [list(values) for _, values in what_if.CONTROLS.values()]
    assert [each["values"] for each in data["controls"]] == values
    assert len(data["answers"]) == len(PLACES) > 100


@pytest.mark.parametrize("number", [0, suites.long(len(PLACES) // 2 + 9), suites.long(len(PLACES) - 4)])
def test_the_page_has_the_numbers_of_simulate(number: int, data: dict[str, Any]) -> None:
    at, shown = PLACES[number], data["answers"][number]
    assert at.prefetch
    found = simulate(
        what_if.MODELS[at.model],
        at.gpus,
        "h100",
        batch=at.batch,
        seq=1024,
        param_dtype={"bfloat16": torch.bfloat16, "float32": torch.float32}[at.dtype],
        reshard_after_forward=at.reshard_after_forward,
        checkpoint=at.checkpoint,
    )
    assert shown["step"] == round(1e6 * found.step_seconds)
    assert shown["exposed"] == round(found.log.summary()["exposed_comm_us"])
    assert shown["peak"] == {kind: nbytes for kind, nbytes in found.peak_by_kind.items() if nbytes}
    gathers = [(what_if.OPS.index("all_gather"), round(e.dur_us)) for e in found.log.select("all_gather")]
    ops = [tuple(shown["events"][i + 1 : i + 4 : 2]) for i in range(0, len(shown["events"]), 4)]
    assert [each for each in ops if what_if.OPS[each[0]] == "all_gather"] == gathers


@pytest.mark.long
@pytest.mark.skipif(find_browser() is None, reason="no Chromium")
def test_a_choice_shows_its_numbers_beside_the_choice_before(data: dict[str, Any], tmp_path: Path) -> None:
    with browser(tmp_path) as tab:
        for width in (1280, 390):
            tab.look(width, 900)
            tab.open(what_if.PAGE.as_uri())
            tab.run("document.querySelector('input[name=gpus][value=\"1\"]').click()")
            now, before = (next(i for i, at in enumerate(PLACES) if at.gpus == gpus) for gpus in (512, 8))
            said = tab.text("#numbers")
            for number in (now, before):
                answer = data["answers"][number]
                for shown in (f"ms({answer['step']})", f"gib({sum(answer['peak'].values())})"):
                    assert tab.run(shown) in said
            assert tab.run("document.documentElement.scrollWidth") == width
            assert tab.run("location.hash") == "#0-1-0-0-0-0-0"
        assert tab.complaints == []
