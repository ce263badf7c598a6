"""Each feature can be taken out of the list: the heart and the other features work without it."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import models
from hwfsdp import features, fully_shard, launch
from oracles import fresh, wrap


def weights_after_two_steps(without: str) -> list[Tensor]:
    """This rank's rows of all weights, with one feature out of the list; "": with all."""
    every = features.FEATURES
    features.FEATURES = tuple(name for name in every if name != without)  # type: ignore[assignment]
    try:
        model: Any = wrap(fresh(models.uneven), fully_shard, "blocks")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            model(*model.inputs(4, step)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [param.to_local().detach().clone() for param in model.parameters()]
    finally:
        features.FEATURES = every


def all_of_them() -> dict[str, list[Tensor]]:
    return {name: weights_after_two_steps(name) for name in ("", *features.FEATURES)}


@functools.cache
def trained() -> list[dict[str, list[Tensor]]]:
    found: list[dict[str, list[Tensor]]] = launch(all_of_them, 2, timeout=120)
    return found


@pytest.mark.parametrize("name", features.FEATURES)
def test_a_model_trains_to_the_same_bits_without_a_feature_that_it_does_not_use(name: str) -> None:
    for found in trained():
        assert all(map(torch.equal, found[name], found[""]))
