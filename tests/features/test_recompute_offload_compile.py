"""Sharded models whose blocks are recomputed, offloaded, compiled, evaluated, called by other methods, or share streams with other roots.

The oracle is FSDP2 under the same feature, in the same processes: two ranks must give the same bits. Where sharding must not show
at all, the unsharded model on the whole batch is a second oracle.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.tensor import DTensor

import hwfsdp
import models
from oracles import (
    BF16_FP32,
    BITS,
    Case,
    Promises,
    Training,
    accumulate,
    case,
    differences,
    made,
    ours,
    shard,
    theirs,
    two_steps,
    wrap,
)
from together import Together

accumulated = functools.partial(accumulate, pattern="nbb")


def changed(training: Training, change: Callable[[models.Model], None]) -> None:
    """Change the model after it is sharded."""
    change(training.model)
    two_steps(training)


PROMISES = Promises()
two = Together(2)


# --- Activation checkpointing ------------------------------------------------------------------------------


def wrapped(model: models.Model, impl: CheckpointImpl) -> None:
    """Wrap each block in a checkpoint wrapper."""
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block, checkpoint_impl=impl)


wrapped_once = functools.partial(wrapped, impl=CheckpointImpl.NO_REENTRANT)
wrapped_reentrant = functools.partial(wrapped, impl=CheckpointImpl.REENTRANT)
# without torch's wrapper: `test_parity`, `test_schedule` and `core/test_core_alone`
PROMISES.trains(
    "activations are recomputed with gathered parameters",
    {
        "wrapper, then sharded, reentrant; replicas": case(
            made(models.stem, wrapped_reentrant), shape=(2, 1)
        ),
        "sharded, then wrapper; a list": case(
            scenario=functools.partial(changed, change=wrapped_once), how="lists"
        ),
    },
)

# --- Methods besides forward -------------------------------------------------------------------------------


class Encoder(nn.Module):
    """A module with two methods besides `forward`. The blocks call both."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 6), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x), scale=1.0)

    def encode(self, x: Tensor) -> Tensor:
        """Its own words."""
        return torch.tanh(self.up(x))

    def decode(self, code: Tensor, *, scale: float) -> Tensor:
        return self.down(code) * scale


class Methodical(models.Stem):
    """A model that calls methods of its blocks. `path` chooses them in each step."""

    path = ("forward", "encode and decode")

    def __init__(self) -> None:
        super().__init__([Encoder() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block, path in zip(self.blocks, self.path, strict=True):
            x = x + (block(x) if path == "forward" else block.decode(block.encode(x), scale=0.5))
        return self.head(x)


def register(training: Training) -> None:
    """Register the methods. The call works with and without sharding."""
    for block in training.model.blocks:
        for method in ("encode", "decode"):
            training.package.register_fsdp_forward_method(block, method)


def by_methods(training: Training) -> None:
    """Call the methods of one block, of the other, of both, of none."""
    register(training)
    both = ("encode and decode",) * 2
    for seed, path in enumerate([Methodical.path, Methodical.path[::-1], both, ("forward",) * 2]):
        training.model.path = path
        training.steps(1, first_seed=seed)


PROMISES.trains(
    "a registered method gathers like forward",
    {"bf16": case(Methodical, by_methods, policy=BF16_FP32), "blocks": case(Methodical, by_methods)},
)


@two.finds(["Its own words.", True])
def a_registered_method_keeps_its_docstring_and_reshards_after_itself_and_has_to_be_there() -> list[Any]:
    training = Training(Methodical, ours)
    register(training)
    block = training.model.blocks[0]
    training.loss(0)
    with torch.no_grad():
        block.encode(torch.zeros(2, 8))
    with pytest.raises(ValueError, match="embed.*Encoder|Encoder.*embed"):
        hwfsdp.register_fsdp_forward_method(block, "embed")
    return [block.encode.__doc__, isinstance(block.up.weight, DTensor)]


# --- Several roots, one set of streams ---------------------------------------------------------------------


def contexts_of(model: models.Model) -> list[Any]:
    """Return the communication contexts of all sharded modules and their groups, for which there is no public API."""
    states = [module._state() for module in (model, *model.blocks)]
    return [each.comm_ctx for state in states for each in (state, *state.groups)]


@two.finds([True, True])
def roots_that_share_a_context_have_the_very_same_streams() -> list[bool]:
    """All sharded modules below the roots share them, too, whether they had run before or not. `test_recovery` trains two roots."""
    found = []
    for ran in (False, True):
        pair = [wrap(build(), ours) for build in (models.stem, models.wandering)]
        if ran:
            for model in pair:
                model(*model.inputs(4, 0)).sum().backward()
        hwfsdp.share_comm_ctx(pair)
        for model in pair:
            model(*model.inputs(4, 0)).sum().backward()
        contexts = [context for model in pair for context in contexts_of(model)]
        found.append(all(context is contexts[0] for context in contexts))
    return found


@two.finds(None)
def sharing_with_a_module_that_is_not_sharded_is_an_error() -> None:
    assert hwfsdp.share_comm_ctx([]) is None
    model = wrap(models.stem(), ours)
    for modules in ([model, nn.Linear(2, 2)], [nn.Linear(2, 2)]):
        with pytest.raises(ValueError, match="Linear|FSDPModule"):
            hwfsdp.share_comm_ctx(modules)


# --- Without gradients -------------------------------------------------------------------------------------


def evaluate(training: Training, mode: Callable[[], Any]) -> None:
    """Evaluate before each training step."""
    for seed in range(2):
        with mode():
            training.loss(10 + seed)
        training.steps(1, first_seed=seed)


PROMISES.trains(
    "evaluation between steps gives the outputs of FSDP2 and changes no step",
    {
        "no_grad": case(scenario=functools.partial(evaluate, mode=torch.no_grad), how="lists"),
        "inference_mode": case(scenario=functools.partial(evaluate, mode=torch.inference_mode)),
    },
    not_fsdp2=["inference_mode"],  # it cannot train then
)


# --- Offloading --------------------------------------------------------------------------------------------


def offloaded(package: ModuleType, module: nn.Module, **options: Any) -> nn.Module:
    """Offload parameters. Without an accelerator, FSDP2 can do so only without pinned memory."""
    return shard(package, module, offload_policy=package.CPUOffloadPolicy(package is hwfsdp), **options)


PROMISES.trains(
    "offloading from the CPU to the CPU changes nothing",
    {
        "accumulated, bf16": Case(
            models.uneven, accumulated, options={"policy": BF16_FP32}, sharding=offloaded
        ),
    },
)


# --- Compilation -------------------------------------------------------------------------------------------


def compile_in_place(model: models.Model, backend: str) -> None:
    for block in model.blocks:
        block.compile(backend=backend)


in_place = functools.partial(compile_in_place, backend="aot_eager")
COMPILED: dict[str, Case] = {
    "block.compile(), then sharded": case(made(models.stem, in_place)),
    "sharded, then model.compile()": case(
        scenario=functools.partial(changed, change=lambda model: model.compile(backend="aot_eager"))
    ),
}


def check_compiled(one: Case) -> dict[str, list[str]]:
    """Compare with FSDP2 under the same compiler. There must be graphs: hooks that break every graph would pass, too."""
    traces, graphs = [], []
    for library in (ours, theirs):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        traces.append(one.run(library))
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return {"FSDP2": differences(*traces, *BITS), "graphs": [] if all(graphs) else [f"{graphs}"]}


PROMISES.add(
    "compiled blocks compute what they compute under FSDP2",
    {name: functools.partial(check_compiled, one) for name, one in COMPILED.items()},
)


test_a_promise_is_kept = PROMISES.test()
test_on_two_ranks = two.test()
