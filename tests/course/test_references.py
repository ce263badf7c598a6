"""Runs of the correct package are cached while they are needed. A large class drops them."""

from __future__ import annotations

from typing import Any

import pytest

from hwfsdp.course import run
from hwfsdp.course.overlay import Overlay
from hwfsdp.course.run import Ranks, Report, Run


def probe(report: Report, seed: int) -> None:
    report["seed"] = seed


def test_reference_runs_are_remembered_and_their_number_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []

    def launch(order: Any, *rest: Any) -> Run:
        launched.append(order.arguments["seed"])
        return Run([order.arguments])

    monkeypatch.setattr(run, "_launch", launch)
    monkeypatch.setattr(run, "_references", {})
    ask = Ranks(Overlay({}, ())).reference
    for seed in range(3 * run._REMEMBERED):
        assert ask(probe, 1, seed=seed)["seed"] == [seed]
        assert ask(probe, 1, seed=0)["seed"] == [0]  # every submission of the class asks for this one
    assert launched == [*range(3 * run._REMEMBERED)]
    assert len(run._references) == run._REMEMBERED
    ask(probe, 1, seed=1)
    assert launched[-1] == 1
