"""Backwards of every kind: accumulated, partial, repeated; and every switch for the reduction of gradients.

The oracle is torch's FSDP2 in the same processes, and unsharded PyTorch wherever it can do the same. Closed forms stand in where
FSDP2 has no answer on gloo.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hwfsdp.optim
import models
from hwfsdp import EventLog, launch
from hwfsdp.errors import UsageError
from oracles import (
    BF16_FP32,
    Case,
    Policy,
    Promises,
    Training,
    accumulate,
    compare_traffic,
    fresh,
    ours,
    recorded_steps,
    sharded_modules,
    theirs,
    walk,
    wrap,
)


def section(name: str, cases: dict[str, Case]) -> dict[str, Case]:
    return {f"{name}: {case_name}": case for case_name, case in cases.items()}


# --- Accumulation ------------------------------------------------------------------------------------------


def accumulated(pattern: str, policy: Policy | None = None, **options: bool) -> Case:
    scenario = functools.partial(accumulate, pattern=pattern, **options)
    return Case(models.uneven, scenario, options={"policy": policy})


FIRST_ONLY = functools.partial(walk, paths=((0, 1, 2), (0, 1), (0, 1)), pattern="nnb")
ACCUMULATED: dict[str, Case] = {
    "nbb, bf16, reduce fp32": accumulated("nbb", BF16_FP32),
    "nnb, stay whole": accumulated("nnb", stay_whole=True),
    "a block in the first micro-batch only": Case(models.wandering, FIRST_ONLY),
}


# --- Freezing ----------------------------------------------------------------------------------------------


def freeze(training: Training, frozen: tuple[tuple[str, ...], ...]) -> None:
    """In each step, freeze the parameters whose names begin with one of these prefixes."""
    for seed, prefixes in enumerate(frozen):
        for name, param in training.model.named_parameters():
            param.requires_grad_(not name.startswith(prefixes))
        training.loss(seed).backward()
        training.update()
    training.keep_params()


A_BIAS_THEN_ITS_BLOCK = functools.partial(freeze, frozen=(("blocks.0.up.bias",), ("blocks.0",), ()))
FREEZING: dict[str, Case] = {
    "a bias, then its block, bf16": Case(models.stem, A_BIAS_THEN_ITS_BLOCK, options={"policy": BF16_FP32}),
}


# --- Hooks on parameters -----------------------------------------------------------------------------------


def optimizer_in_backward(training: Training, pattern: str) -> None:
    """Give each parameter its own optimizer. A hook runs it as soon as the gradient is ready."""
    optimizers = {p: hwfsdp.optim.AdamW([p], lr=0.02, eps=1e-3) for p in training.model.parameters()}
    calls: Counter[nn.Parameter] = Counter()

    def step(param: nn.Parameter) -> None:
        calls[param] += 1
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in training.model.parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(step)
    params = dict(training.model.named_parameters())
    for seed, bit in enumerate(pattern):
        training.call("set_requires_gradient_sync", bit == "1")
        training.loss(seed).backward()
        for name, param in params.items():
            training.trace.keep(f"calls {name}", torch.tensor(calls[param]))
            assert param.grad is None
    training.keep_params()


HOOKED: dict[str, Case] = {
    "accumulate": Case(models.stem, functools.partial(optimizer_in_backward, pattern="001011")),
}


# --- One launch per world size -----------------------------------------------------------------------------

PROMISES = Promises()
PROMISES.trains(
    "backwards go as under FSDP2 and, where all is reduced in the end, as without sharding",
    {
        **section("accumulate", ACCUMULATED),
        **section("freeze", FREEZING),
        **section("hooks", HOOKED),
    },
    not_plain=["hooks: accumulate"],
)


# --- Parameters that only some ranks use -------------------------------------------------------------------


class Fork(models.Branches):
    """A module in which each part of the rows takes its own branch."""

    choices = ("left",)

    def forward(self, x: Tensor) -> Tensor:
        parts = zip(self.choices, x.chunk(len(self.choices)), strict=True)
        return torch.cat([getattr(self, choice)(part) for choice, part in parts])


def forks() -> models.Stem:
    return models.Stem([Fork() for _ in range(3)])


def choose(training: Training, step: int) -> None:
    """Send even ranks left in the first block and odd ranks right, then the other way round, and so on."""
    for depth, fork in enumerate(training.model.blocks):
        choices = [("left", "right")[(rank + depth + step) % 2] for rank in range(dist.get_world_size())]
        fork.choices = (choices[dist.get_rank()],) if training.is_sharded else tuple(choices)


def choose_and_train(training: Training, pattern: str = "11") -> None:
    training.call("set_reduce_scatter_unused_params", True)
    for step, bit in enumerate(pattern):
        choose(training, step)
        training.call("set_requires_gradient_sync", bit == "1")
        training.loss(step).backward()
        if bit == "1":
            training.update()
    training.keep_params()


def reduce_unused(training: Training) -> None:
    """Ask for zeros as the gradients of parameters that no rank uses, and then no longer."""
    training.call("set_reduce_scatter_unused_params", True)
    training.steps(2)
    training.call("set_reduce_scatter_unused_params", False)
    training.steps(1, first_seed=2)


# --- Divide factor -----------------------------------------------------------------------------------------


def divide_in_one_group(training: Training) -> None:
    """Set factors of single groups."""
    if training.is_sharded:
        training.model.blocks[1].set_gradient_divide_factor(3.0)
        training.model.blocks[1].set_force_sum_reduction_for_comms(True)
        training.model.set_gradient_divide_factor(5.0)
        training.model.set_force_sum_reduction_for_comms(True)
    training.steps(2)


def divide_by_the_older_name(training: Training) -> None:
    if training.is_sharded:
        training.model.set_force_sum_reduction_for_comms(True)
        with pytest.warns(DeprecationWarning, match="set_gradient_divide_factor"):
            training.model.set_reduce_scatter_divide_factor(3.0)
    training.steps(1)


# --- Where reductions run ----------------------------------------------------------------------------------


class Noting(hwfsdp.collectives.DefaultReduceScatter):
    """A reduce-scatter that notes the names of its process groups."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: set[str] = set()

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self.groups.add(group.group_name)
        return super().__call__(output_tensor, input_tensor, group, *args, **kwargs)


def separated_groups() -> dict[str, list[str]]:
    """Reduce in the group of the gathers, twice in a group of its own, and in the group of the gathers again."""
    training, found = Training(models.stem, ours), []
    for separate in (False, True, True, False):
        noting = Noting()
        for module in sharded_modules(training.model):
            module.set_custom_reduce_scatter(noting)
        training.model.set_separate_reduce_scatter_group(separate)
        training.loss(0).backward()
        found.append(noting.groups)
    together, separated, again, back = found
    right = together == back and separated == again != together and len(separated) == 1
    return {"groups": [] if right else [str(found)]}


# --- Reductions in flight ----------------------------------------------------------------------------------


def deep() -> models.Stem:
    return models.Stem([models.Block(8, 12, 8) for _ in range(5)])


def log_with_buffers(number: int | None, recurse: bool) -> EventLog:
    training = Training(deep, ours)
    if number is not None:
        where = training.model if recurse else training.model.blocks[3]
        where.set_reduce_scatter_max_input_buffers(number, recurse=recurse)
    return recorded_steps(training)


IN_FLIGHT = {(None, True): 1, (2, False): 2, (100, True): 6}


@functools.cache
def logs_with_buffers() -> Any:
    """Return for each rank: (number of buffers, whether for all groups at once) → log."""
    return launch(lambda: {kind: log_with_buffers(*kind) for kind in IN_FLIGHT}, 2, timeout=60)


@pytest.mark.parametrize("kind, in_flight", IN_FLIGHT.items(), ids=str)
def test_the_number_of_input_buffers_limits_the_reductions_in_flight(kind, in_flight):
    """A buffer is packed when the reduction that used it has finished, and not later. The last number given to any group counts."""
    for log in (found[kind] for found in logs_with_buffers()):
        reductions = log.select("reduce_scatter")
        packings = log.select("copy_in", stream="compute")
        assert len(reductions) == len(packings) == 12
        for step in (0, 6):
            for i, j in itertools.combinations(range(step, step + 6), 2):
                waited = log.happens_before(reductions[i], packings[j])
                assert waited == (j - i >= in_flight), (i, j)


def refused() -> dict[str, list[str]]:
    """Check that invalid factors are refused, and invalid numbers of buffers as in FSDP2."""
    mine, reference = ours(models.stem()), theirs(models.stem())
    for factor in (0, float("nan")):
        with pytest.raises(UsageError, match="set_gradient_divide_factor: expected a finite number"):
            mine.set_gradient_divide_factor(factor)
    for number in (True, "2", 0):
        with pytest.raises((TypeError, ValueError)) as caught:
            reference.set_reduce_scatter_max_input_buffers(number)
        with pytest.raises(type(caught.value)) as refused:
            mine.set_reduce_scatter_max_input_buffers(number)
        assert isinstance(refused.value, UsageError)
    return {"refused": []}


PROMISES.add(
    "switches of reductions have their own group and their own errors",
    {"a group of their own": separated_groups, "invalid factors and numbers of buffers": refused},
)


# --- After the optimizer -----------------------------------------------------------------------------------


def give_event(training: Training, make_event: Callable[[], Any]) -> None:
    """After some steps, give the model or a part of it an event of the optimizer's end."""
    for seed in range(4):
        training.loss(seed).backward()
        training.update()
        if seed % 2 == 0 and training.is_sharded:
            (training.model, training.model.blocks[0])[seed // 2].set_post_optim_event(make_event())
    training.keep_params()


def given_to_a_part() -> dict[str, list[str]]:
    """Check that the next forward uses an event that a part of a model got after the first forward, as in FSDP2."""
    used = []
    for library in (theirs, ours):
        model = wrap(fresh(models.stem), library)
        state = model._get_fsdp_state()
        shared = state._state_ctx if library is theirs else state.root
        for event in (None, torch.Event("cpu")):
            if event:
                model.blocks[0].set_post_optim_event(event)
            before = shared.post_optim_event
            model(*model.inputs(4, 0)).sum().backward()
            used.append((before is event, shared.post_optim_event is None))
    return {"used": [f"{used}"] * (used != [(True, True)] * 4)}


PROMISES.add("an event given to a part of a model counts for the model", {"to a block": given_to_a_part})

# --- One launch for all these switches ---------------------------------------------------------------------

SWITCHES: dict[str, Case] = {
    "unused: ranks choose": Case(forks, choose_and_train),
    "unused: no rank runs them": Case(models.Unused, reduce_unused),
    "event: an event": Case(
        models.stem, functools.partial(give_event, make_event=lambda: torch.Event("cpu"))
    ),
    "divided: by a factor of one group": Case(models.stem, divide_in_one_group),
    "divided: by the older name": Case(models.stem, divide_by_the_older_name),
}
PROMISES.trains(
    "a switch works as in FSDP2 and changes no number but those it is for",
    SWITCHES,
    # PyTorch gives no zeros for unused parameters, and divides nothing
    not_plain=[name for name in SWITCHES if "no rank" in name or "divided" in name],
)


# --- Frozen parameters are not reduced ---------------------------------------------------------------------

FROZEN_STEPS: list[tuple[str, ...]] = [(), ("blocks.0.up", "stem.bias", "blocks.2.down"), ("blocks.1",), ()]


def step_with_some_frozen(training: Training, seed: int) -> None:
    """Freeze nothing, something, everything in a group, and nothing again."""
    for name, param in training.model.named_parameters():
        param.requires_grad_(not name.startswith(FROZEN_STEPS[seed]))
    training.loss(seed).backward()
    training.model.zero_grad()


FROZEN = Case(models.stem, options={"policy": BF16_FP32})
PROMISES.add(
    "reductions carry the parameters that train as in FSDP2",
    {"bf16": functools.partial(compare_traffic, FROZEN, step_with_some_frozen, (0, 1, 2, 3))},
)


test_a_promise_is_kept = PROMISES.test()
