"""Modules that call themselves, hand on or change their inputs, run backwards in forwards; and forwards that wait for their backwards.

The oracle is the plain model on the same rows: every rank has the same inputs.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from hwfsdp import FSDPModule, fully_shard, launch, record, register_fsdp_forward_method, share_comm_ctx
from oracles import other_gradients, ours
from together import Together


class Autoencoder(nn.Module):
    """Calls two of its own methods that are forward methods, too, and computes after them."""

    def __init__(self) -> None:
        super().__init__()
        self.coder, self.decoder, self.last = (nn.Linear(4, 4) for _ in range(3))

    def encode(self, x: Tensor) -> Tensor:
        return self.coder(x).tanh()

    def decode(self, code: Tensor) -> Tensor:
        return self.decoder(code).tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.decode(self.encode(x)))


class Tree(nn.Module):
    """Calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        x = self.first(x)
        return self.last(x + self(x, depth - 1) if depth else x)


class Force(nn.Module):
    """Runs a backward in its forward, and computes with its own parameter after it."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.scale = nn.Parameter(torch.full((4,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
        return force * self.scale


class Keeps(nn.Module):
    """Adds to each run what it kept of the runs before; some of what it kept has only frozen parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.last = nn.Linear(4, 4, bias=False).requires_grad_(False), nn.Linear(4, 4)
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.kept.append(self.frozen(x))
        return self.last(sum(self.kept, x))


class Around(nn.Module):
    def __init__(self, inner: nn.Module, runs: int = 1) -> None:
        super().__init__()
        self.first, self.inner, self.last, self.runs = nn.Linear(4, 4), inner, nn.Linear(4, 2), runs

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.runs):
            x = self.inner(x)
        return self.last(x)


class Hidden:
    """An object of a class that nobody knows."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Hides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Hidden:
        return Hidden(self.layers(x))


class AroundHides(Around):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x)).value)


def inputs(number: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(number))


def two_pending(model: Any) -> None:
    losses = [model(inputs(number)).square().sum() for number in range(2)]
    for loss in losses:
        loss.backward()


def one_after_the_other(model: Any) -> None:
    for number in range(2):
        for module in model.modules():
            if isinstance(module, Keeps):
                module.kept = []
        model(inputs(number)).square().sum().backward()


def ended_by_hand(model: Any) -> None:
    if isinstance(model, FSDPModule):
        model.set_manual_backward_finalization(True)
    one_after_the_other(model)
    if isinstance(model, FSDPModule):
        model.finalize_backward()


def of_all_kept(model: Any) -> None:
    model.inner.kept = []
    for number in range(8):
        model(inputs(number))
    sum(each.square().sum() for each in model.inner.kept).backward()


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], None]]] = {
    "forward methods in the root's forward": (Autoencoder, one_after_the_other),
    "forward methods in a forward": (lambda: Around(Autoencoder()), one_after_the_other),
    "a module that calls itself": (lambda: Around(Tree()), two_pending),
    "a backward in a forward": (lambda: Around(Force()), two_pending),
    "a backward in a forward, ended by hand": (lambda: Around(Force()), ended_by_hand),
    "two pending forwards through unknown objects": (lambda: AroundHides(Hides()), two_pending),
    "a module that runs twice": (lambda: Around(Keeps(), runs=2), one_after_the_other),
    "many pending forwards with frozen parameters": (lambda: Around(Keeps()), of_all_kept),
}


def wrong_gradients(case: str, layers: bool) -> list[str]:
    """Return the gradients that differ from the plain model's. `layers`: each layer is a group, too."""
    make, run = CASES[case]
    torch.manual_seed(0)
    plain = make()
    model: Any = copy.deepcopy(plain)
    inner = getattr(model, "inner", model)
    groups = [module for module in model.modules() if layers and isinstance(module, nn.Linear)]
    for module in dict.fromkeys([*groups, inner, model]):
        ours(module, reshard_after_forward=True)
    for name in ("encode", "decode") if isinstance(inner, Autoencoder) else ():
        register_fsdp_forward_method(inner, name)
    for each in (plain, model):
        run(each)
    return other_gradients(model, plain)


two = Together(2)
for _case in CASES:
    for _layers in (False, True):
        two.add(f"{_case}, {_layers}", functools.partial(wrong_gradients, _case, _layers), [])


# --- Modules that return their input, change it, or take several ---------------------------------------------


class HandingOn(nn.Module):
    """A block that returns its input and its result."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor, made: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return x, self.inner(x if made is None else x + made).tanh()


class ChangingInPlace(HandingOn):
    """A block that first changes its input in place."""

    def forward(self, x: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        return (self.inner(x.mul_(2.0)) * 0.5,)


class Chain(nn.Module):
    """Blocks in sequence. Each takes the outputs of the one before."""

    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(4, 4), nn.ModuleList([block() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        passed: tuple[Tensor, ...] = (self.first(x),)
        for block in self.blocks:
            passed = block(*passed)
        return sum(tensor.sum() for tensor in passed)


def wrong_turns(block: type[nn.Module]) -> list[Any]:
    """Return wrong gradients, and wrong orders of collectives: each group is gathered before it is reduced, once."""
    torch.manual_seed(0)
    plain = Chain(block)
    model: Any = copy.deepcopy(plain)
    for module in (*model.blocks, model):
        ours(module)
    for each in (plain, model):
        with record() as log:
            each(inputs(0)).backward()
    called = [(e.op, e.owner) for e in log.collectives() if e.phase == "backward"]
    gathers = [owner for op, owner in called if op == "all_gather"]
    reductions = [owner for op, owner in called if op == "reduce_scatter"]
    right = gathers == ["blocks.2", "blocks.1", "blocks.0"]
    if block is ChangingInPlace:  # reduced when the backward ends (`watch`, Note [Inputs changed in place])
        right &= sorted(reductions) == ["Chain", *sorted(gathers)]
    else:
        right &= reductions == [*gathers, "Chain"]
    right &= all(called.index(("all_gather", g)) < called.index(("reduce_scatter", g)) for g in gathers)
    return other_gradients(model, plain) + [called] * (not right)


for _block in (HandingOn, ChangingInPlace):
    two.add(_block.__name__, functools.partial(wrong_turns, _block), [])


# --- Meshes and contexts -------------------------------------------------------------------------------------


@two.finds([3, 3])
def a_shared_context_has_the_largest_limit_of_all_its_roots() -> list[int]:
    """It is shared before the first forwards, or after them."""
    found = []
    for ran in (False, True):
        pair = first, second = ours(nn.Linear(4, 4)), ours(nn.Linear(4, 4))
        first.set_reduce_scatter_max_input_buffers(2)
        second.set_reduce_scatter_max_input_buffers(3)
        for model in pair if ran else ():
            model(inputs(0))
        share_comm_ctx(pair)
        for model in pair:
            model(inputs(0))
        found.append(first._get_fsdp_state().comm_ctx.max_reductions)
    return found


test_on_two_ranks = two.test()


def gradients_over_a_slice() -> list[list[Tensor]]:
    """Train on a slice of a larger mesh, with two and with all four of its ranks after forward."""
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("stage", "data"))["data"]
    found = []
    for after_forward in (2, True):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(model[0], mesh=mesh, reshard_after_forward=after_forward)
        fully_shard(model, mesh=mesh)
        model(inputs(0)).square().sum().backward()
        found.append([param.grad.full_tensor() for param in model.parameters()])
    return found


@pytest.mark.long
def test_the_mesh_of_fewer_ranks_is_made_on_each_slice_of_a_larger_mesh() -> None:
    for fewer, all_four in launch(gradients_over_a_slice, 8, timeout=60):
        assert all(map(torch.equal, fewer, all_four))
