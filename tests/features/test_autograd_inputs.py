"""The points where autograd calls hwfsdp: modules that return their input, change it, or take several."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed.fsdp
from torch import Tensor, nn

import hwfsdp
from hwfsdp import record
from together import Together


class HandingOn(nn.Module):
    """A block that returns its input and its result."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor, made: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return x, self.inner(x if made is None else x + made).tanh()


class Identity(nn.Module):
    """A block that returns its input unchanged, and a result of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 2.0))

    def forward(self, x: Tensor, made: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return x, (x if made is None else made) * self.scale.sum()


class ChangingInPlace(nn.Module):
    """A block that first changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        return (self.inner(x.mul_(2.0)) * 0.5,)


class Chain(nn.Module):
    """Blocks in sequence. Each takes the outputs of the one before."""

    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList([block() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        passed: tuple[Tensor, ...] = (self.first(x),)
        for block in self.blocks:
            passed = block(*passed)
        return sum(tensor.sum() for tensor in passed)


def trained(block: type[nn.Module], library: Any) -> tuple[list[Tensor], list[tuple[str, str]]]:
    """Return the gradients after two steps, and the collectives of the second backward, with their groups if known."""
    torch.manual_seed(0)
    model = Chain(block)
    if library is not None:
        for module in (*model.blocks, model):
            library.fully_shard(module)
    for _ in range(2):
        model.zero_grad()
        with record() as log:
            loss = model(torch.ones(2, 6) * 0.1)
            loss.backward()
    called = [
        (e.op, e.owner) for e in log.events if e.phase == "backward" and e.op.startswith(("all_", "red"))
    ]
    grads = [getattr(p.grad, "full_tensor", lambda p=p: p.grad)().clone() for p in model.parameters()]
    return grads, called


def check(block: type[nn.Module]) -> None:
    """Check that the gradients are right, and that each group is gathered before it is reduced, once."""
    plain, _ = trained(block, None)
    ours, called = trained(block, hwfsdp)
    assert all(torch.allclose(a, b) for a, b in zip(ours, plain, strict=True))
    gathers = [owner for op, owner in called if op == "all_gather"]
    reductions = [owner for op, owner in called if op == "reduce_scatter"]
    assert gathers == ["blocks.2", "blocks.1", "blocks.0"], gathers
    if block is ChangingInPlace:  # reduced when the backward ends (`watch`, Note [Inputs changed in place])
        assert sorted(reductions) == ["Chain", *sorted(gathers)], reductions
    else:
        assert reductions == [*gathers, "Chain"], reductions
    for group in gathers:
        assert called.index(("all_gather", group)) < called.index(("reduce_scatter", group)), called


two = Together(2)
for _block in (HandingOn, Identity, ChangingInPlace):
    two.add(_block.__name__, functools.partial(check, _block), None)

test_a_module_is_gathered_and_reduced_once_in_that_order_whatever_it_does_with_its_input = two.test()
