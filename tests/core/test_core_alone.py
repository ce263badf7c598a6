"""The core alone is a working FSDP2: bit-equal to torch's, while no other part of the package can be imported."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import hwfsdp.core
from core import alone, programs

CORE = Path(hwfsdp.core.__file__).parent


@functools.cache
def launched(world_size: int) -> list[Any]:
    return alone.run(programs.everything, world_size)


@pytest.fixture(params=[2, pytest.param(3, marks=pytest.mark.long)])
def compared(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return [both for both, _ in launched(request.param)]


@pytest.mark.parametrize("case", programs.CASES)
def test_losses_gradients_and_weights_equal_fsdp2_in_every_bit(compared: list[Any], case: str) -> None:
    for found in compared:
        ours, theirs = found[case]
        assert ours.keys() == theirs.keys()
        different = [name for name in ours if not same(ours[name], theirs[name])]
        assert different == []


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return bool(a == b)


@pytest.fixture
def found() -> dict[str, Any]:
    """Return program → its result."""
    return launched(2)[0][1]


def test_nine_frames_at_most_lead_from_a_hook_of_torch_to_a_collective(found: Any) -> None:
    collectives = found["frames_to_collectives"]
    assert sorted(name.split("_")[0] for name in collectives) == ["all", "reduce"]
    for calls in collectives.values():
        assert "Transport" in calls[-3] and len(calls) <= 9, calls


def test_one_group_is_whole_and_one_on_its_way_while_a_module_computes_on_a_device(found: Any) -> None:
    """The first forward knows no order and gathers nothing ahead. The last block of a pass has no block after it."""
    assert found["groups_in_memory"] == {
        "forward": [1, 1, 1, 2, 2, 1, 2, 2, 1],
        "backward": [2, 2, 1, 2, 2, 1, 2, 2, 1],
    }


def test_a_load_adopts_each_parameter_once(found: Any) -> None:
    assert found["adoptions"] == [40, 40]


def test_a_second_call_for_a_module_or_a_parameter_is_refused_and_changes_nothing(found: Any) -> None:
    assert found["refuses"]


def test_station_ten_names_places_that_are_there() -> None:
    """The README of the station names the places in the core that match the learner's file."""
    (page,) = (CORE.parents[1] / "exercises").glob("10_*/README.md")
    cells = re.findall(r"^\| \d\d(?:, \d\d)? \| (.+) \|$", page.read_text(), re.MULTILINE)
    assert len(cells) == 9
    for chapter, rest in (part.split(".py`", 1) for cell in cells for part in cell.split("; ")):
        source = (CORE / f"{chapter.strip('`')}.py").read_text()
        for name in re.findall(r"`(?:\w+\.)?(\w+)`", rest):
            assert re.search(rf"(def|class) {name}\b", source), (chapter, name)
