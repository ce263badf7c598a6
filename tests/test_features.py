"""Each feature can be taken out of the list: the heart and the other features work without it."""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import models
from hwfsdp import features, fully_shard, launch
from hwfsdp.errors import UnsupportedError
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


PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"


def with_clipping(**options: Any) -> Any:
    """A sharded model, with the feature that the page writes."""
    text = re.search(r"`features/clipping.py`:\n\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert text is not None
    module = ModuleType("hwfsdp.features.clipping")
    exec(text[1], vars(module))
    sys.modules[module.__name__] = module
    place = features.FEATURES.index("reductions") + 1
    features.FEATURES = (*features.FEATURES[:place], "clipping", *features.FEATURES[place:])  # type: ignore[assignment]
    return wrap(fresh(models.uneven), functools.partial(fully_shard, **options), "blocks")


def gradients_with_clipping() -> list[tuple[Tensor, Tensor]]:
    """Gradients with the feature that the page writes, beside gradients of both ranks' batches without sharding."""
    model = with_clipping()
    model(*model.inputs(4, dist.get_rank())).sum().backward()
    plain = fresh(models.uneven)
    for rank in range(2):
        (plain(*plain.inputs(4, rank)).sum() / 2).backward()
    return [
        (p.grad.full_tensor(), q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True)
    ]


def test_the_feature_written_in_the_page_of_architecture_does_what_the_page_says() -> None:
    for found in launch(gradients_with_clipping, 2):
        assert any((expected.abs() > 1).any() for _, expected in found)
        for grad, expected in found:
            torch.testing.assert_close(grad, expected.clamp(-1, 1))


def refusal_under_hybrid_sharding() -> str:
    with pytest.raises(UnsupportedError) as refused:
        with_clipping(mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    return str(refused.value)


def test_the_feature_of_the_page_does_not_take_the_all_reduce_of_hybrid_sharding_away() -> None:
    assert all("HybridReducer" in text for text in launch(refusal_under_hybrid_sharding, 2))
