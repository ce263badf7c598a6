"""State dicts of sharded models: their contents, their cost, and the places that can load them.

A state dict holds the shards themselves, so it costs nothing and stays up to date. Everything that torch builds on it (state-dict
helpers, distributed checkpoints, optimizers) runs over hwfsdp and over FSDP2: the tensors, and training from them, are the same.
Each check runs over every layout of a model over the ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import io
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hwfsdp
import models
from hwfsdp import record
from oracles import BITS, ROWS, Promises, Trace, Training, differences, grid, local_part, unequal, wrap

LIBRARIES: tuple[ModuleType, ...] = (hwfsdp, fsdp)

State = dict[str, Any]


# --- Places ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Place:
    """A layout of a model over the ranks."""

    shape: tuple[int, ...]
    axes: tuple[str, ...] = ("shard",)
    build: Callable[[], models.Model] = models.uneven
    columns: bool = False

    @property
    def mesh(self) -> DeviceMesh:
        return grid(self.shape, self.axes)

    @property
    def copies(self) -> int:
        """Count the ranks that get the same rows of a batch."""
        return self.shape[-1] if "tp" in self.axes else 1

    def shard(self, library: ModuleType, model: models.Model, **options: Any) -> models.Model:
        axes, data = self.axes, self.mesh
        if "tp" in axes:
            plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
            for block in model.blocks:
                parallelize_module(block, self.mesh["tp"], plan)
            data = self.mesh[axes[:-1]]
        if self.columns:
            options["shard_placement_fn"] = lambda param: Shard(param.ndim - 1)
        return wrap(model, functools.partial(library.fully_shard, mesh=data, **options))


PLACES: dict[str, Place] = {  # of 2 ranks
    "rows": Place((2,)),
    "columns": Place((2,), build=models.even, columns=True),
    "one shard, two replicas": Place((2, 1), ("replicate", "shard")),
    "tensor parallel": Place((1, 2), ("shard", "tp"), models.even),
    "uneven tensor parallel": Place((1, 2), ("shard", "tp")),
    "buffers": Place((2,), build=models.Normalized),
    "tied": Place((2,), build=models.Transformer),
}
TWO = ("rows", "tensor parallel")
Make = Callable[[Any], torch.optim.Optimizer]
adam = functools.partial(torch.optim.AdamW, lr=0.02, eps=1e-3)


class PlacedTraining(Training):
    """A model in its place, with the same values everywhere. Another `seed` makes other values."""

    def __init__(
        self,
        place: Place,
        library: ModuleType,
        seed: int = 0,
        make: Make = functools.partial(adam, foreach=False),
        **options: Any,
    ) -> None:
        self.library, self.make, self.trace, self.copies = library, make, Trace(), place.copies
        torch.manual_seed(seed)
        self.model = place.shard(library, place.build(), **options)

    def new_optimizer(self) -> torch.optim.Optimizer:
        return self.make(self.model.parameters())


def copied(model: models.Model) -> State:
    """Return a state dict with its own memory."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def locals_of(state: State) -> dict[str, Tensor]:
    """Copy this rank's parts."""
    return {name: local_part(t).detach().clone() for name, t in state.items()}


PlaceCheck = Callable[..., list[str]]
PROMISES = Promises()


def over(runs: Iterable[Any]) -> Callable[[PlaceCheck], PlaceCheck]:
    """Register a function as a promise with the function's name. A run is the name of a place, perhaps with further arguments."""

    def remember(check: PlaceCheck) -> PlaceCheck:
        every = [run if isinstance(run, tuple) else (run,) for run in runs]
        checks = {", ".join(map(str, run)): functools.partial(named, check, *run) for run in every}
        PROMISES.add(check.__name__.replace("_", " "), checks)
        return check

    return remember


def named(check: PlaceCheck, place: str, *args: Any) -> dict[str, list[str]]:
    return {"": check(PLACES[place], *args)}


# --- A state dict holds the shards -------------------------------------------------------------------------


@over(TWO)
def it_equals_fsdp2s_also_between_forward_and_backward_and_keeps_variables(place: Place) -> list[str]:
    """With `keep_vars`, it has the sharded parameters themselves, also while unsharded ones are registered."""
    trainings = [PlacedTraining(place, library) for library in LIBRARIES]
    params = dict(trainings[0].model.named_parameters(remove_duplicate=False))
    for training in trainings:
        training.steps(1)
    wrong = unequal(*(training.model.blocks[0].state_dict(prefix="part.") for training in trainings))
    for training in trainings:
        training.loss(5)
    wrong += unequal(*(training.model.state_dict() for training in trainings))
    state = trainings[0].model.state_dict(keep_vars=True)
    return wrong + [name for name, param in params.items() if state[name] is not param]


@over(TWO)
def taken_early_it_shares_memory_with_the_parameters_and_sees_later_steps_and_loads(
    place: Place,
) -> list[str]:
    training = PlacedTraining(place, hwfsdp)
    state = training.model.state_dict()
    before = locals_of(state)
    loaded = copied(training.model)
    training.steps(1)
    wrong = unequal(locals_of(state), locals_of(training.model.state_dict()))
    moved = {name for name, tensor in locals_of(state).items() if not torch.equal(tensor, before[name])}
    wrong += [
        f"{name} did not move" for name, tensor in before.items() if tensor.numel() and name not in moved
    ]
    training.model.load_state_dict(loaded)
    return wrong + unequal(locals_of(state), before)


# --- Loading -----------------------------------------------------------------------------------------------


IN_USE, ASSIGNED, ASSIGNED_TO_META = (False, False, True), (True, False, True), (True, True, False)
LOADED = [
    *[(place, *IN_USE) for place in ("tensor parallel", "tied")],
    *[(place, *ASSIGNED) for place in ("columns", "uneven tensor parallel", "buffers")],
    ("one shard, two replicas", *ASSIGNED_TO_META),
]


@over(LOADED)
def a_model_takes_over_a_state(place: Place, assign: bool, on_meta: bool, ran: bool) -> list[str]:
    """Load one model's state into another, new or used, which trains on. Both libraries must agree."""
    traces, wrong = [], []
    for library in LIBRARIES:
        source = PlacedTraining(place, library)
        source.steps(1)
        state = copied(source.model)
        with torch.device("meta" if on_meta else "cpu"):
            target = PlacedTraining(place, library, seed=1)
        if ran:
            target.loss(3)  # leaves the root whole
        result = target.model.load_state_dict(state, assign=assign)
        wrong += [] if not any(result) else [str(result)]
        wrong += unequal(locals_of(target.model.state_dict()), locals_of(state))
        wrong += [f"{n} is no leaf that trains" for n, p in target.model.named_parameters() if not p.is_leaf]
        wrong += [f"{n} is not trained" for n, p in target.model.named_parameters() if not p.requires_grad]
        target.steps(1, first_seed=1)
        target.trace.keep("a whole output", target.model(*target.model.inputs(ROWS, 9)).detach())
        traces.append(target.trace)
    return wrong + differences(*traces, *BITS)


@over(["rows"])
def a_state_loaded_while_parameters_are_gathered_counts(place: Place) -> list[str]:
    """Load a state while gathers are in flight. They must run again."""
    source, target = PlacedTraining(place, hwfsdp, seed=1), PlacedTraining(place, hwfsdp)
    wrong = []
    for assign in (False, True):
        state = copied(source.model)
        for module in (target.model, *target.model.blocks):
            module.unshard(async_op=True)
        target.model.load_state_dict(state, assign=assign)
        wrong += unequal(*(training.loss(5).detach() for training in (target, source)))
        source.steps(1)
    return wrong


# --- Cost --------------------------------------------------------------------------------------------------


def collectives_of(action: Callable[[], Any]) -> tuple[list[str], Any]:
    """Return the collectives of an action, as seen by the event log and by torch, and its result."""
    with record() as log, CommDebugMode() as counted:
        result = action()
    logged = [f"{event.op} of {event.owner}" for event in log.collectives()]
    return logged + [f"{number} × {op}" for op, number in counted.get_comm_counts().items()], result


@over(TWO)
def taking_and_loading_communicate_nothing(place: Place) -> list[str]:
    """Check this at every turn of a training."""
    training = PlacedTraining(place, hwfsdp, reshard_after_forward=True)
    model, wrong = training.model, []

    def turn(when: str) -> None:
        issued, state = collectives_of(model.state_dict)
        names = [n for n, _ in model.named_parameters(remove_duplicate=False)]
        wrong.extend(f"{when}: {op}" for op in issued)
        wrong.extend(f"{when}: {n} is no DTensor" for n in names if not isinstance(state[n], DTensor))
        copy = copied(model)
        issued, _ = collectives_of(lambda: model.load_state_dict(copy))
        wrong.extend(f"{when}, loading: {op}" for op in issued)
        issued, _ = collectives_of(lambda: model.load_state_dict(copy, assign=True))
        wrong.extend(f"{when}, assigning: {op}" for op in issued)
        wrong.extend(f"{when}: {w}" for w in unequal(locals_of(model.state_dict()), locals_of(copy)))

    turn("before the first forward")
    training.loss(0)
    turn("after a forward")
    training.loss(0).backward()
    for block in model.blocks:
        block.unshard()
    turn("unsharded by hand")
    model.set_reshard_after_backward(False)
    training.loss(0).backward()
    turn("after a backward that keeps")
    with record() as log:  # alone: torch's CommDebugMode cannot follow every model into a backward
        training.loss(0).backward()
    return wrong if log.collectives() else ["not even a backward communicates"]


# --- Strictness --------------------------------------------------------------------------------------------


def spoil(state: State, how: str) -> State:
    """Return a state dict with a mistake."""
    state = dict(state)
    first, *_ = state
    if how == "missing and unexpected":
        state["blocks.0.nobody"] = state.pop(first)
    if how == "another shape":
        shard = state[first]
        wide = torch.cat([shard.to_local()] * 2, 1)
        state[first] = DTensor.from_local(wide, shard.device_mesh, shard.placements, run_check=False)
    if how == "plain tensors":
        state[first] = state[first].full_tensor()
    return state


@over([("rows", mistake) for mistake in ("missing and unexpected", "another shape", "plain tensors")])
def one_that_does_not_fit_is_refused_in_the_words_of_fsdp2(place: Place, how: str) -> list[str]:
    said = []
    for library in LIBRARIES:
        training = PlacedTraining(place, library)
        with pytest.raises(RuntimeError) as error:
            training.model.load_state_dict(spoil(training.model.state_dict(), how))
        said.append(str(error.value))
        training.steps(1)
    return [] if said[0] == said[1] else said


# --- A training goes on elsewhere --------------------------------------------------------------------------


def wholes(state: State) -> State:
    """Copy whole tensors."""
    return {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for n, t in state.items()}


@over([("rows", True), ("rows", False)])
def a_training_goes_on_from_its_states_with_helpers_of_torch_or_without(
    place: Place, helpers: bool
) -> list[str]:
    """Load model and optimizer state of one training into another with different values."""
    wrong, taken, traces = [], [], []
    make = functools.partial(adam, fused=not helpers, foreach=False)
    for library in LIBRARIES:
        source, target = (PlacedTraining(place, library, seed, make) for seed in (0, 1))
        source.steps(1)
        states = taken_from(source, helpers)
        taken.append(through_a_file(states))
        if helpers:
            wrong += unequal(states["model"], wholes(source.model.state_dict()))
        given_to(target, helpers, through_a_file(states))
        wrong += unequal(locals_of(target.model.state_dict()), locals_of(source.model.state_dict()))
        for training in (source, target):
            training.trace = Trace()
            training.steps(1, first_seed=2)
        wrong += differences(target.trace, source.trace, *BITS)
        traces.append(target.trace)
    return wrong + unequal(*taken) + differences(*traces, *BITS)


def through_a_file(states: State) -> State:
    """Save by torch.save and load by torch.load, so that the states have their own memory."""
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    loaded: State = torch.load(file, weights_only=False)
    return loaded


def taken_from(training: PlacedTraining, helpers: bool) -> State:
    """Return the states, whole from torch's helpers, or from the model and its optimizer themselves."""
    model, optimizer = training.model, training.optimizer
    if not helpers:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    whole = StateDictOptions(full_state_dict=True)
    return {
        "model": get_model_state_dict(model, options=whole),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=whole),
    }


def given_to(training: PlacedTraining, helpers: bool, states: State) -> None:
    """Give the states to torch's helpers, which send them from the first rank to all, or load them."""
    if not helpers:
        training.model.load_state_dict(states["model"])
        training.optimizer.load_state_dict(states["optimizer"])
        return
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    if dist.get_rank() != 0:
        states = {"model": {}, "optimizer": {}}
    set_model_state_dict(training.model, states["model"], options=options)
    set_optimizer_state_dict(training.model, training.optimizer, states["optimizer"], options=options)


test_a_promise_is_kept = PROMISES.test()
