"""How long parameters stay unsharded: resharding over fewer ranks, flags that change at run time, gathers by hand.

The oracle is torch's FSDP2 in the same processes: numbers, the registered form at every turn, collectives. There is one exception:
the local part of a parameter resharded over fewer ranks whose rows do not divide evenly. torch 2.13 is wrong there, so `torch.chunk` is
the oracle.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor, Replicate, Shard

import hwfsdp
import models
from hwfsdp import launch, record
from hwfsdp.compat import fake_process_group
from hwfsdp.core.sharding import padded_local_numel
from oracles import (
    BF16_FP32,
    Case,
    Library,
    Promises,
    Training,
    accumulate,
    by_columns,
    ours,
    theirs,
    train,
    unequal,
)

LIBRARIES = (ours, theirs)
FSDP_MODULES = (hwfsdp.FSDPModule, fsdp.FSDPModule)


def kind(param: nn.Parameter) -> str:
    """Return the registered form of a parameter, and the number of ranks over which it is sharded."""
    if not isinstance(param, DTensor):
        return "whole"
    return f"{param.device_mesh.ndim}D, sharded over {param.device_mesh.size(-1)}"


def kinds(model: nn.Module) -> dict[str, str]:
    return {name: kind(param) for name, param in model.named_parameters()}


def sharded_modules(model: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if isinstance(module, FSDP_MODULES)}


# --- Over fewer ranks: numbers -----------------------------------------------------------------------------


def change_between_forward_and_backward(training: Training) -> None:
    """Change the value for the next step. The backward finds the parameters as the forward left them."""
    for seed, reshard in enumerate([True, False, True]):
        loss = training.loss(seed)
        training.call("set_reshard_after_forward", reshard)
        loss.backward()
        training.update()
    training.keep_params()


accumulated = functools.partial(accumulate, pattern="nnb", stay_whole=True, say_last=True)


def over_two(build: Any, scenario: Any = train, **options: Any) -> Case:
    return Case(build, scenario, options={"reshard_after_forward": 2, **options})


FEWER: dict[str, Case] = {
    "uneven, accumulated, stay whole": over_two(models.uneven, accumulated),
    "uneven, changed between forward and backward": over_two(
        models.uneven, change_between_forward_and_backward
    ),
    "cut by columns": over_two(models.even, shard_placement_fn=by_columns),
}
PROMISES = Promises()
PROMISES.trains(
    "parameters resharded over fewer ranks train as under FSDP2 and as without sharding",
    FEWER,
    ranks=4,
    not_fsdp2=["cut by columns"],  # torch 2.13 cannot gather columns from the smaller mesh
)
PROMISES.trains(
    "larger shards are in the param dtype",
    {"even": over_two(models.even, policy=BF16_FP32)},
    ranks=4,
)


# --- Over fewer ranks: registered forms --------------------------------------------------------------------


def check_registered() -> dict[str, list[str]]:
    """Check the registered parameters after a step and another forward, so that the values differ from the initial ones.

    Their rows are the chunk of the updated whole. torch 2.13 keeps other rows where they do not divide evenly.
    """
    training, wrong = Training(models.uneven, ours, reshard_after_forward=2), []
    training.loss(0).backward()
    training.optimizer.step()
    wholes = {name: p.detach().full_tensor() for name, p in training.model.named_parameters()}
    training.loss(1)
    for name, param in training.model.named_parameters():
        rows = [*wholes[name].chunk(2), wholes[name][:0]][dist.get_rank() % 2]
        facts = {
            "kind": isinstance(param, nn.Parameter) and param.requires_grad,
            "mesh": param.device_mesh.mesh.tolist() == [[0, 1], [2, 3]],
            "placements": param.placements == (Replicate(), Shard(0)),
            "rows": param.to_local().shape == rows.shape and torch.equal(param.to_local(), rows),
            "whole": torch.equal(param.full_tensor(), wholes[name]),
        }
        wrong += [f"{what} of {name}" for what, holds in facts.items() if not holds]
    return {"facts": wrong}


PROMISES.add(
    "after forward a parameter is a DTensor on the smaller mesh", {"uneven": check_registered}, ranks=4
)


# --- Over fewer ranks: traffic -----------------------------------------------------------------------------


def gathers() -> list[list[int]]:
    """Return the bytes that the first block gathers in the forward and in the backward of the second step."""
    training = Training(models.Branching, ours, reshard_after_forward=2)
    training.loss(0).backward()
    with record() as log:
        training.loss(1).backward()
    phases = ("forward", "backward")
    return [[e.bytes for e in log.select("all_gather", owner="blocks.0", phase=phase)] for phase in phases]


def larger_shard_is_freed_when_the_parameter_is_whole() -> bool:
    training = Training(models.even, ours, reshard_after_forward=2)
    training.loss(0)
    block = training.model.blocks[0]
    storage = weakref.ref(block.up.weight.to_local().untyped_storage())
    assert storage() is not None
    block.unshard()
    return storage() is None


def gathered_after_the_setting_changed() -> list[int]:
    """Bytes of a forward's gathers over all ranks: the larger shards of the forward before are not mistaken for shards."""
    model = Training(models.even, ours, reshard_after_forward=2).model
    with record() as log, torch.no_grad():
        for _ in range(2):
            model(*model.inputs(4, 0))
            model.set_reshard_after_forward(False)
    return [event.bytes for event in log.select("all_gather", owner="blocks.0")]


def whole_block(ranks: int) -> list[int]:
    """Return the bytes of a gather of the first block over this many ranks."""
    shapes = [param.shape for param in models.Branching().blocks[0].parameters()]
    return [4 * ranks * sum(padded_local_numel(shape, ranks) for shape in shapes)]


def traffic() -> dict[str, list[str]]:
    first, second = gathered_after_the_setting_changed()
    facts = {
        "forward over all ranks, backward over the smaller group": gathers()
        == [whole_block(4), whole_block(2)],
        "over all ranks again after a change": first == second,
        "larger shards are freed": larger_shard_is_freed_when_the_parameter_is_whole(),
    }
    return {"facts": [what for what, holds in facts.items() if not holds]}


PROMISES.add("gathers go over the ranks that have the shards", {"bytes": traffic}, ranks=4)


# --- Which form is registered at every turn ----------------------------------------------------------------


def forms(library: Library, how: str, reshard: Any) -> dict[str, dict[str, str]]:
    """Return the registered forms after each possible action, and whether a part's unsharded parameters have memory."""
    build, how = (models.Grouped, "blocks") if how == "lists" else (models.stem, how)
    training = Training(build, library, how, reshard_after_forward=reshard)
    model, turns = training.model, {}
    parts = sharded_modules(model)
    part = parts["layers.0"] if build is models.Grouped else [*parts.values()][-1]
    part.unshard()
    whole = [param for param in part.parameters() if not isinstance(param, DTensor)]
    part.reshard()

    def see(turn: str) -> None:
        with_memory = {param.untyped_storage().nbytes() > 0 for param in whole}
        turns[turn] = kinds(model) | {"memory": str(with_memory)}

    see("wrapped")
    with torch.no_grad():
        training.loss(0)
    see("after a forward without gradients")
    loss = training.loss(1)
    see("after a forward")
    part.unshard()
    see("after one was unsharded by hand")
    loss.backward()
    see("after a backward")
    model.set_reshard_after_backward(False)
    training.loss(5).backward()
    see("after a backward that keeps")
    # before flags change: FSDP2 cannot leave a smaller mesh it was told to forget
    for each in parts.values():
        each.reshard()
    see("all resharded by hand")
    model.set_reshard_after_backward(True)
    part.set_reshard_after_forward(False, recurse=False)
    training.loss(7)
    see("after a forward that one was told to keep in")
    for each in parts.values():
        each.reshard()
    model.set_reshard_after_forward(False)
    training.loss(8)
    see("after a forward told to keep")
    model.set_reshard_after_forward(True, recurse=False)
    training.loss(9)
    see("after a forward that the root was told to reshard in")
    model.set_reshard_after_forward(True)
    training.loss(10).backward()
    training.loss(11)
    see("after a forward told to reshard")
    model.zero_grad()
    part.set_requires_gradient_sync(False, recurse=False)
    training.loss(12).backward()
    turns["without a gradient"] = {name: str(p.grad is None) for name, p in model.named_parameters()}
    return turns


@functools.cache
def all_forms(world_size: int) -> Any:
    """Return (wrap, reshard_after_forward as text, since 1 equals True) → the turns of both libraries on each rank."""

    def on_a_rank() -> Any:
        return {
            (how, repr(value)): [forms(library, how, value) for library in LIBRARIES]
            for size, how, value in FORM_CASES
            if size == world_size
        }

    ranks = launch(on_a_rank, world_size, timeout=200)
    return {key: [rank[key] for rank in ranks] for key in ranks[0]}


FORM_CASES = [
    *[(2, "blocks", value) for value in (None, False, 1)],
    *[(2, "lists", None), (2, "nested", True), (4, "blocks", 2), (4, "blocks", 4)],
]


@pytest.mark.parametrize("world_size, how, reshard_after_forward", FORM_CASES)
def test_registered_parameters_have_fsdp2s_form_after_any_sequence_of_calls(
    world_size, how, reshard_after_forward
):
    for mine, reference in all_forms(world_size)[how, repr(reshard_after_forward)]:
        for turn in reference:
            assert list(mine[turn]) == list(reference[turn]), "the order of names"
            # FSDP2 leaves the root whole after a forward that no backward can follow
            is_root_whole = reshard_after_forward is None and turn == "after a forward without gradients"
            assert mine[turn] == reference["wrapped" if is_root_whole else turn], turn


def test_after_forward_each_block_of_consecutive_ranks_holds_the_parameters() -> None:
    with fake_process_group(3, 6):
        module = hwfsdp.fully_shard(nn.Linear(4, 6), reshard_after_forward=2)
        module(torch.ones(1, 4))
        assert module.weight.device_mesh.mesh.tolist() == [[0, 1], [2, 3], [4, 5]]


# --- By hand, in any order ---------------------------------------------------------------------------------

OPERATIONS = ("unshard", "start", "wait", "reshard")


def act(module: Any, operation: str, handles: list[Any]) -> None:
    """Apply an operation to a module. `wait` waits for every handle so far, again and again."""
    if operation == "start":
        handles.append(module.unshard(async_op=True))
    elif operation == "wait":
        for handle in handles:
            handle.wait()
    else:
        assert getattr(module, operation)() is None


def by_hand(training: Training, sequence: Iterable[str], in_between: bool = False) -> list[Any]:
    """Return the registered forms after each operation on a block and after a forward and backward, and the gradients.

    The operations come before the forward, or `in_between` forward and backward. Each unsharded parameter is compared with the full
    tensor of its shards.
    """
    block, handles, found = training.model.blocks[1], [], []
    values = [param.detach().full_tensor() for param in block.parameters()]
    loss = training.loss(1) if in_between else None
    for operation in sequence:
        act(block, operation, handles)
        found.append(kinds(training.model))
        for param, value in zip(block.parameters(), values, strict=True):
            assert isinstance(param, DTensor) or torch.equal(param, value), f"{operation} in {sequence}"
    (training.loss(1) if loss is None else loss).backward()
    found.append(kinds(training.model))
    found.append({name: param.grad.to_local() for name, param in training.model.named_parameters()})
    training.model.zero_grad()
    return found


def sequences(longest: int) -> list[tuple[str, ...]]:
    return [s for n in range(1, longest + 1) for s in itertools.product(OPERATIONS, repeat=n)]


def as_fsdp2_by_hand(in_between: bool) -> dict[str, list[str]]:
    """Compare registered forms and gradients. The operations come before the first forward, or between a forward and its backward."""

    def new() -> list[Training]:
        build = models.even if in_between else models.uneven
        return [Training(build, library, reshard_after_forward=True) for library in LIBRARIES]

    trainings, wrong = new(), []
    for sequence in sequences(2):
        trainings = trainings if in_between else new()
        mine, reference = (by_hand(training, sequence, in_between) for training in trainings)
        if mine[:-1] != reference[:-1] or unequal(mine[-1], reference[-1]):
            wrong.append(str(sequence))
    return {"FSDP2": wrong}


PROMISES.add(
    "gathering and freeing by hand works as in FSDP2",
    {
        "before the first forward": functools.partial(as_fsdp2_by_hand, False),
        "between forward and backward": functools.partial(as_fsdp2_by_hand, True),
    },
)


def put_back() -> dict[str, list[str]]:
    """Put shards back while a gather is in flight. torch 2.13 fails there, so the oracle is a step without operations by hand."""
    training = Training(models.even, ours, reshard_after_forward=2, shard_placement_fn=by_columns)
    plain = by_hand(training, (), in_between=True)[-1]
    in_flight = [s for s in sequences(3) if "start" in s and "reshard" in s[s.index("start") :]]
    wrong = [s for s in in_flight if unequal(by_hand(training, s, in_between=True)[-1], plain)]
    return {"plain": [str(s) for s in wrong]}


PROMISES.add(
    "shards may be put back while a gather is in flight", {"over the smaller mesh": put_back}, ranks=4
)


def gathered_once() -> dict[str, list[str]]:
    """Check that a group that is whole or being gathered is not gathered again. The forward finishes a gather that has only started."""
    counts = []
    for library in LIBRARIES:
        training = Training(models.uneven, library, "blocks")
        training.loss(0).backward()
        _, second, third = training.model.blocks
        handles: list[Any] = []
        with record() as log:
            third.unshard(async_op=True)
            for operation in ("start", "start", "unshard", "unshard", "start", "wait"):
                act(second, operation, handles)
            training.loss(1).backward()
        counts.append(Counter(event.op for event in log.collectives()))
    as_usual = {"all_gather": 6, "reduce_scatter": 3}
    return {"counts": [] if counts == [as_usual] * 2 else [str(counts)]}


PROMISES.add("a group is gathered once", {"by hand": gathered_once})


# --- Objects that stay the same ------------------------------------------------------------------------------


def watch_a_training(reshard_after_forward: bool | None) -> dict[str, list[str]]:
    """Return the problems with parameter objects, seen at every turn of three training steps.

    Autograd must not take a gather for a write.
    """
    training = Training(models.stem, ours, reshard_after_forward=reshard_after_forward)
    sharded: list[list[nn.Parameter]] = []
    whole: dict[str, list[nn.Parameter]] = {}
    versions: dict[str, list[int]] = {}

    def see(name: str, module: nn.Linear, *_: Any) -> None:
        assert isinstance(module.weight, nn.Parameter) and not isinstance(module.weight, DTensor), name
        whole.setdefault(name, []).append(module.weight)
        versions.setdefault(name, []).append(module.weight._version)

    for name, module in training.model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(functools.partial(see, name))
    for seed in range(3):
        sharded.append(list(training.model.parameters()))
        training.loss(seed).backward()
        sharded.append(list(training.model.parameters()))
        training.update()
        training.model.state_dict()
        training.model.unshard()
        training.model.reshard()
    sharded.append(list(training.model.parameters()))
    wrong = [f"{name}: {len(seen)} times" for name, seen in whole.items() if len(seen) != 3]
    wrong += [f"{name}: several whole objects" for name, seen in whole.items() if len({*map(id, seen)}) != 1]
    wrong += [f"{name}: versions {seen}" for name, seen in versions.items() if len({*seen}) != 1]
    wrong += ["several shards" for turns in zip(*sharded, strict=True) if len({*map(id, turns)}) != 1]
    return {"objects": wrong if whole else ["nothing seen"]}


def names_and_classes() -> dict[str, list[str]]:
    """Check that both names of a tied parameter show one object, and that the class of a sharded module is derived from both."""
    model = Training(models.Transformer, ours).model
    facts = {"sharded": model.head.weight is model.embed.weight}
    model.unshard()
    facts["whole"] = model.head.weight is model.embed.weight
    module = models.Block(2, 2, 2)
    facts["the same module"] = ours(module) is module
    facts["both classes"] = isinstance(module, hwfsdp.FSDPModule) and isinstance(module, models.Block)
    facts["one class"] = type(ours(models.Block(3, 3, 3))) is type(module)
    facts["its layers"] = type(module.up) is nn.Linear
    return {"facts": [what for what, holds in facts.items() if not holds]}


PROMISES.add(
    "modules and parameters stay the same objects",
    {
        **{f"reshard {value}": functools.partial(watch_a_training, value) for value in (None, True, False)},
        "tied names, classes": names_and_classes,
    },
)
test_a_promise_is_kept = PROMISES.test()
