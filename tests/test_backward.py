"""Backwards of every kind: accumulated, partial, repeated; and every switch of how their gradients are reduced.

The oracle is torch's FSDP2 in the same processes; besides, PyTorch without sharding wherever the same thing can be
said without sharding, and closed forms where FSDP2 has no answer on gloo.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import models
import suites
from hwfsdp import EventLog, launch, record
from hwfsdp.errors import UsageError
from oracles import (
    BF16_FP32,
    REGROUPING,
    Case,
    Check,
    Library,
    Policy,
    Promises,
    Scenario,
    Shape,
    Tolerance,
    Training,
    accumulate,
    against_fsdp2,
    compare,
    configure,
    ours,
    sharded_modules,
    theirs,
)

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def mixed(build: Callable[[], models.Model], scenario: Scenario) -> Case:
    """In the policy of every day."""
    return Case(build, scenario, "blocks", {"policy": BF16_FP32})


def section(name: str, cases: dict[str, Case]) -> dict[str, Case]:
    return {f"{name}: {case_name}": case for case_name, case in cases.items()}


# --- Accumulation ------------------------------------------------------------------------------------------


def accumulate_in_parts(training: Training) -> None:
    """One block is reduced in every micro-batch, the others in the last."""
    for step in range(2):
        for micro in range(3):
            training.call("set_requires_gradient_sync", micro == 2)
            if training.is_sharded:
                training.model.blocks[1].set_requires_gradient_sync(True, recurse=False)
            training.loss(10 * step + micro).backward()
            training.keep_local_grads()
        training.update()
    training.keep_params()


def wander(training: Training, paths: tuple[tuple[int, ...], ...], pattern: str) -> None:
    """Every micro-batch takes another path through the blocks."""
    for step in range(2):
        for micro, (training.model.path, bit) in enumerate(zip(paths, pattern, strict=True)):
            training.call("set_requires_gradient_sync", bit == "b")
            training.loss(10 * step + micro).backward()
            training.keep_local_grads()
        training.update()
    training.keep_params()


POLICIES: dict[str, Policy | None] = {
    "fp32": None,
    "bf16, reduce fp32": BF16_FP32,
    "reduce bf16": {"reduce_dtype": BF16},
}
PATHS = {
    "a block in the first micro-batch only": (((0, 1, 2), (0, 1), (0, 1)), "nnb"),
    "a block in a micro-batch that is reduced, then not": (((0, 1), (1, 2), (0,)), "bnb"),
}


ACCUMULATED: dict[int, tuple[tuple[str, str], ...]] = {  # what micro-batches reduce, and the policy
    2: (
        *(("nnb", "fp32"), ("bbn", "fp32"), ("bnb", "reduce bf16")),
        *(("nbb", "bf16, reduce fp32"), ("bnn", "bf16, reduce fp32")),
    ),
    3: (("bnb", "fp32"), ("nnb", "bf16, reduce fp32")),
}


def accumulations(world_size: int) -> dict[str, Case]:
    """All kinds at two ranks, at three what can differ there."""
    found = {
        f"{pattern}, {name}": Case(
            models.uneven,
            functools.partial(accumulate, pattern=pattern),
            "blocks",
            {"policy": POLICIES[name]},
        )
        for pattern, name in ACCUMULATED[world_size]
    }
    if world_size != 2:
        return found
    for pattern, option in (("nnb", "stay_whole"), ("bnb", "say_last")):
        scenario = functools.partial(accumulate, pattern=pattern, **{option: True})
        found[f"{pattern}, {option}"] = Case(models.stem, scenario)
    scenario = functools.partial(accumulate, pattern="nbb", stay_whole=True, say_last=True)
    found["nbb, stay_whole, say_last, bf16, reduce fp32"] = mixed(models.stem, scenario)
    found["in parts"] = Case(models.stem, accumulate_in_parts)
    for name, (paths, pattern) in PATHS.items():
        wandering = functools.partial(wander, paths=paths, pattern=pattern)
        found[name] = Case(models.wandering, wandering)
        if paths[0] == (0, 1, 2):  # FSDP2 cannot accumulate in another dtype before a module's first forward
            found[f"{name}, bf16, reduce fp32"] = mixed(models.wandering, wandering)
    return found


def reduces_in_the_end(case: Case) -> bool:
    """Whether every optimizer step sees all gradients so far, in full precision: as without sharding."""
    pattern = getattr(case.scenario, "keywords", {}).get("pattern", "b")
    return pattern.endswith("b") and not case.options.get("policy")


# --- Other orders of forward and backward ------------------------------------------------------------------


def two_forwards_two_backwards(training: Training) -> None:
    """Micro-batches whose backwards come in the order of their forwards, the first unreduced."""
    for seed in range(2):
        losses = training.loss(seed), training.loss(10 + seed)
        for loss, sync in zip(losses, (False, True), strict=True):
            training.call("set_requires_gradient_sync", sync)
            loss.backward()
        training.update()
    training.keep_params()


def one_forward_two_backwards(training: Training, first_is_reduced: bool) -> None:
    for seed in range(2):
        loss = training.loss(seed)
        training.call("set_requires_gradient_sync", first_is_reduced)
        loss.backward(retain_graph=True)
        training.keep_local_grads()
        training.call("set_requires_gradient_sync", True)
        loss.backward()
        training.update()
    training.keep_params()


first_is_reduced = functools.partial(one_forward_two_backwards, first_is_reduced=True)
first_is_unreduced = functools.partial(one_forward_two_backwards, first_is_reduced=False)
STAY_WHOLE = {"reshard_after_forward": False}
ORDERS: dict[str, Case] = {
    "two forwards, two backwards, bf16": mixed(models.twice, two_forwards_two_backwards),
    "one forward, two backwards, stay whole": Case(models.twice, first_is_reduced, "blocks", STAY_WHOLE),
    "one forward, two backwards, the first unreduced": Case(models.twice, first_is_unreduced),
}


# --- Freezing ----------------------------------------------------------------------------------------------


def freeze(training: Training, frozen: tuple[tuple[str, ...], ...]) -> None:
    """In every step the parameters whose names begin with one of these are frozen."""
    for seed, prefixes in enumerate(frozen):
        for name, param in training.model.named_parameters():
            param.requires_grad_(not name.startswith(prefixes))
        training.loss(seed).backward()
        training.update()
    training.keep_params()


def freeze_while_accumulating(training: Training) -> None:
    """A block's gradients are not reduced yet when it is frozen."""
    for step in range(2):
        for micro in range(2):
            training.call("set_requires_gradient_sync", micro == 1)
            training.model.blocks[1].requires_grad_(micro == 0)
            training.loss(10 * step + micro).backward()
        training.update()
    training.keep_params()


def freezing(policy: str, *frozen: tuple[str, ...]) -> Case:
    options = {"policy": POLICIES[policy]}
    return Case(models.stem, functools.partial(freeze, frozen=frozen), "blocks", options)


FREEZING: dict[str, Case] = {
    "a block in the second step, reduce bf16": freezing("reduce bf16", (), ("blocks.1",), ()),
    "a bias, then its block, bf16": freezing("bf16, reduce fp32", ("blocks.0.up.bias",), ("blocks.0",), ()),
    "what the input needs": freezing("fp32", (), ("stem",), ("stem", "blocks.0"), ()),
    "a whole group from the start": freezing("fp32", ("blocks.1", "stem"), ("blocks.1",), ()),
    "while accumulating": Case(models.stem, freeze_while_accumulating),
}


# --- Hooks on parameters -----------------------------------------------------------------------------------


def optimizer_in_backward(training: Training, pattern: str = "11") -> None:
    """Every parameter has an optimizer of its own, which a hook runs as soon as the gradient is there."""
    optimizers = {p: torch.optim.AdamW([p], lr=0.02, eps=1e-3) for p in training.model.parameters()}
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
    "uneven": Case(models.uneven, optimizer_in_backward),
    "bf16, reduce fp32": mixed(models.stem, optimizer_in_backward),
    "accumulate": Case(models.stem, functools.partial(optimizer_in_backward, pattern="001011")),
}


# --- One launch per world size -----------------------------------------------------------------------------

ELSEWHERE = {  # what is run on three ranks, besides accumulations
    "order: one forward, two backwards, the first unreduced",
    "hooks: uneven",
}


def backward_cases(world_size: int) -> dict[str, Case]:
    found = section("order", ORDERS) | section("freeze", FREEZING) | section("hooks", HOOKED)
    chosen = {name: case for name, case in found.items() if world_size == 2 or name in ELSEWHERE}
    return section("accumulate", accumulations(world_size)) | chosen


FAST = (
    *("accumulate: nnb, fp32", "accumulate: nbb, bf16, reduce fp32", "accumulate: nnb, stay_whole"),
    *("accumulate: a block in the first micro-batch only", "order: two forwards, two backwards, bf16"),
    *("freeze: a bias, then its block, bf16", "freeze: while accumulating", "hooks: accumulate"),
)
PROMISES = Promises()
for _ranks in (2, 3):
    PROMISES.add(
        "backwards go as under FSDP2 and, where all is reduced in the end, as without sharding",
        {
            name: functools.partial(
                compare, case, against_fsdp2(_ranks), REGROUPING if reduces_in_the_end(case) else None
            )
            for name, case in backward_cases(_ranks).items()
        },
        _ranks,
        FAST if _ranks == 2 else (),
    )


# --- Parameters that only some ranks use -------------------------------------------------------------------


class Fork(nn.Module):
    """Two branches in one group; each part of the rows takes the one chosen for it."""

    choices = ("left",)

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = models.Block(8, 5, 8), models.Block(8, 7, 8)

    def forward(self, x: Tensor) -> Tensor:
        parts = zip(self.choices, x.chunk(len(self.choices)), strict=True)
        return torch.cat([getattr(self, choice)(part) for choice, part in parts])


def forks() -> models.Stem:
    return models.Stem([Fork() for _ in range(3)])


def choose(training: Training, step: int) -> None:
    """Even ranks go left in the first block, odd ones right; then the other way round, and so on."""
    for depth, fork in enumerate(training.model.blocks):
        choices = [("left", "right")[(rank + depth + step) % 2] for rank in range(dist.get_world_size())]
        fork.choices = (choices[dist.get_rank()],) if training.is_sharded else tuple(choices)


def with_spares() -> models.Stem:
    """A layer of a block, and a parameter of the root, that no forward uses."""
    model = models.stem()
    model.blocks[0].spare = nn.Linear(3, 3)
    model.spare = nn.Parameter(torch.ones(5))
    return model


def choose_and_train(training: Training, pattern: str = "11") -> None:
    training.call("set_reduce_scatter_unused_params", True)
    for step, bit in enumerate(pattern):
        choose(training, step)
        training.call("set_requires_gradient_sync", bit == "1")
        training.loss(step).backward()
        if bit == "1":
            training.update()
    training.keep_params()


def reduce_unused(training: Training, recurse: bool = True) -> None:
    """What no rank uses gets zeros instead of nothing, where that was asked for."""
    if training.is_sharded:
        where = training.model if recurse else training.model.blocks[0]
        where.set_reduce_scatter_unused_params(True, recurse=recurse)
    training.steps(2)
    training.call("set_reduce_scatter_unused_params", False)
    training.steps(1, first_seed=2)


UNUSED: dict[str, Case] = {
    "ranks choose": Case(forks, choose_and_train),
    "ranks choose, accumulate": Case(forks, functools.partial(choose_and_train, pattern="0101")),
    "ranks choose, bf16, reduce fp32": mixed(forks, choose_and_train),
    "nobody uses, in one block": Case(with_spares, functools.partial(reduce_unused, recurse=False)),
    "nobody runs": Case(models.Unused, reduce_unused),
}


# --- Divide factor -----------------------------------------------------------------------------------------


def divided(training: Training, factor: float | None, sums_only: bool, pattern: str) -> None:
    """Gradients of micro-batches, times what they were divided by in place of the number of ranks."""
    for module in sharded_modules(training.model):
        if factor is not None:
            module.set_gradient_divide_factor(factor)
        module.set_force_sum_reduction_for_comms(sums_only)
    for seed, reduces in enumerate(pattern):
        configure(training, reduces)
        training.loss(seed).backward()
    multiple = (factor or dist.get_world_size()) / dist.get_world_size() if training.is_sharded else 1.0
    for name, param in training.model.named_parameters():
        training.trace.keep(f"grad {name}", param.grad * multiple)


def division(
    factor: float | None,
    sums_only: bool = False,
    reduce_dtype: torch.dtype | None = None,
    pattern: str = "a",
    **options: Any,
) -> tuple[str, Check]:
    """Against the model without sharding; that the operations are those of FSDP2, `test_collectives` tests."""
    told = {"factor": factor, "sums_only": sums_only, "pattern": pattern}
    case = Case(
        models.uneven,
        functools.partial(divided, **told),
        options={"policy": {"reduce_dtype": reduce_dtype}, **options},
    )
    rounding = Tolerance(4e-3, 2e-4) if reduce_dtype else REGROUPING
    return str(told | {"dtype": reduce_dtype} | options), functools.partial(compare, case, None, rounding)


PAIRS, SQUARE = {"shape": (2, 1)}, {"shape": (2, 2)}
DIVISIONS: dict[int, list[tuple[str, Check]]] = {
    2: [
        *(division(None, True), division(3.0), division(8.0, reduce_dtype=FP16), division(6.0, True, FP16)),
        *(division(3.0, **PAIRS), division(3.0, pattern="nsa", **PAIRS)),
        division(3.0, True, pattern="ssa", **PAIRS),
    ],
    3: [division(0.5, True)],
    4: [division(6.0, **SQUARE), division(3.0, True, pattern="ssa", **SQUARE)],
}


def divide_in_one_group(training: Training) -> None:
    """Each call is for one group only."""
    if training.is_sharded:
        training.model.blocks[1].set_gradient_divide_factor(3.0)
        training.model.blocks[1].set_force_sum_reduction_for_comms(True)
        training.model.set_gradient_divide_factor(5.0)
        training.model.set_force_sum_reduction_for_comms(True)
    training.steps(2)


for _ranks, _divisions in DIVISIONS.items():
    PROMISES.add("sums are divided by the factor", dict(_divisions), _ranks, None if _ranks == 2 else ())


def divide_by_the_older_name(training: Training) -> None:
    if training.is_sharded:
        training.model.set_force_sum_reduction_for_comms(True)
        with pytest.warns(DeprecationWarning, match="set_gradient_divide_factor"):
            training.model.set_reduce_scatter_divide_factor(3.0)
    training.steps(1)


# --- Where reductions run ----------------------------------------------------------------------------------


def separate(training: Training) -> None:
    """Reductions in a group of their own, then back in the one of the gathers."""
    training.call("set_separate_reduce_scatter_group")
    training.steps(2)
    training.call("set_separate_reduce_scatter_group", False)
    training.steps(1, first_seed=2)


def groups_of_a_step(training: Training) -> tuple[set[Any], set[Any], set[tuple[int, ...]]]:
    """The process groups of gathers and of reduce-scatters in a step, and the ranks of the latter."""
    found: dict[str, list[dist.ProcessGroup]] = {"all": [], "reduce": []}

    def watched(name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found[name.split("_")[0]].append(kwargs["group"])
        return original(*args, **kwargs)

    names = ("all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor")
    watching = {n: functools.partial(watched, n, getattr(dist, n)) for n in names if hasattr(dist, n)}
    with mock.patch.multiple(dist, **watching):
        training.loss(0).backward()
    ranks = {tuple(dist.get_process_group_ranks(group)) for group in found["reduce"]}
    return *({group.group_name for group in groups} for groups in found.values()), ranks


def separated_groups(shape: Shape | None) -> list[Any]:
    training = Training(models.stem, ours, shape=shape)
    found = [groups_of_a_step(training)]
    for arguments in ((True,), (), (False,)):
        training.model.set_separate_reduce_scatter_group(*arguments)
        found.append(groups_of_a_step(training))
    training.model.blocks[0].set_separate_reduce_scatter_group(True, recurse=False)
    return [*found, groups_of_a_step(training)]


@pytest.mark.parametrize("shape, world_size", [(None, 2), suites.long((2, 2), 4)], ids=str)
def test_reduce_scatters_run_in_a_group_of_their_own_if_told_to(shape, world_size):
    for rank, steps in enumerate(launch(separated_groups, world_size, shape, timeout=60)):
        together, separated, again, back, in_part = steps
        first = rank - rank % 2
        for gathers, scatters, ranks in steps:
            assert (len(gathers), ranks) == (1, {(first, first + 1)})
        assert together[0] == together[1]
        assert len(separated[1]) == 1
        assert separated[0] == together[0] != separated[1]
        assert again[1] == separated[1], "a second call made a second group"
        assert back[1] == together[1]
        assert len(in_part[1]) == 2


# --- Reductions in flight ----------------------------------------------------------------------------------


def deep() -> models.Stem:
    return models.Stem([models.Block(8, 12, 8) for _ in range(5)])


def buffers(training: Training, number: int, recurse: bool = True) -> None:
    """The number is given to all groups, or to that of one block."""
    if training.is_sharded:
        where = training.model if recurse else training.model.blocks[0]
        where.set_reduce_scatter_max_input_buffers(number, recurse=recurse)
    training.steps(2)
    for micro in range(3):
        training.call("set_requires_gradient_sync", micro != 1)
        training.call("set_is_last_backward", micro == 2)
        training.loss(10 + micro).backward()
    training.update()
    training.keep_params()


def log_with_buffers(number: int | None, recurse: bool) -> EventLog:
    training = Training(deep, ours)
    if number is not None:
        where = training.model if recurse else training.model.blocks[3]
        where.set_reduce_scatter_max_input_buffers(number, recurse=recurse)
    with record() as log:
        for seed in range(2):
            training.loss(seed).backward()
            training.model.zero_grad()
    return log


IN_FLIGHT = {(None, True): 1, (2, True): 2, (2, False): 2, (100, True): 6}


@functools.cache
def logs_with_buffers() -> Any:
    """By rank, by (number of buffers, whether for all groups at once)."""
    return launch(lambda: {kind: log_with_buffers(*kind) for kind in IN_FLIGHT}, 2, timeout=60)


@pytest.mark.parametrize("kind, in_flight", IN_FLIGHT.items(), ids=str)
def test_as_many_reductions_are_in_flight_as_there_may_be_input_buffers(kind, in_flight):
    """A buffer is packed when the reduction that used it is over, and not later; the last given to any group counts."""
    for log in (found[kind] for found in logs_with_buffers()):
        reductions = log.select("reduce_scatter")
        packings = log.select("copy_in", stream="compute")
        assert len(reductions) == len(packings) == 12
        for step in (0, 6):
            for i, j in itertools.combinations(range(step, step + 6), 2):
                waited = log.happens_before(reductions[i], packings[j])
                assert waited == (j - i >= in_flight), (i, j)


def test_numbers_that_are_none_are_refused_a_number_of_buffers_as_in_fsdp2():
    def refuse() -> None:
        mine, reference = ours(models.stem()), theirs(models.stem())
        for factor in (0, "2", None, float("nan")):
            with pytest.raises(UsageError, match="set_gradient_divide_factor: expected a finite number"):
                mine.set_gradient_divide_factor(factor)
        for number in (True, 1.5, "2", None, 0, -1):
            with pytest.raises((TypeError, ValueError)) as caught:
                reference.set_reduce_scatter_max_input_buffers(number)
            with pytest.raises(type(caught.value)) as refused:
                mine.set_reduce_scatter_max_input_buffers(number)
            assert isinstance(refused.value, UsageError)

    launch(refuse, 1, timeout=60)


# --- After the optimizer -----------------------------------------------------------------------------------


def give_event(training: Training, make_event: Callable[[], Any]) -> None:
    """The model is told each time when the optimizer is done, or at least in the steps with an even number."""
    for seed in range(4):
        training.loss(seed).backward()
        training.update()
        if seed % 2 == 0:
            training.call("set_post_optim_event", make_event())
    training.keep_params()


def give_event_to_a_part(training: Training) -> None:
    """The event is the root's, whichever module it is given to."""
    for seed in range(3):
        training.loss(seed).backward()
        training.update()
        if training.is_sharded:
            training.model.blocks[0].set_post_optim_event(torch.Event("cpu"))
    training.keep_params()


# --- One launch for all these switches ---------------------------------------------------------------------

EVENTS: dict[str, Callable[[], Any]] = {
    "an event": lambda: torch.Event("cpu"),
    "what recording on a CPU stream returns": lambda: torch.cpu.current_stream().record_event(),
}


def switch_cases(world_size: int) -> dict[str, Case]:
    found = section("unused", UNUSED)
    found["separate group"] = Case(models.uneven, separate)
    found["buffers: 2"] = Case(deep, functools.partial(buffers, number=2))
    if world_size == 3:
        return {name: found[name] for name in ("unused: ranks choose, accumulate", "separate group")}
    found["separate group, bf16, reduce fp32"] = mixed(models.uneven, separate)
    found["buffers: 3 in a block"] = Case(deep, functools.partial(buffers, number=3, recurse=False))
    for name, make_event in EVENTS.items():
        found[f"event: {name}"] = Case(models.stem, functools.partial(give_event, make_event=make_event))
    found["event: given to a part"] = Case(models.stem, give_event_to_a_part)
    found["divided: by a factor of one group"] = Case(models.stem, divide_in_one_group)
    found["divided: by the older name"] = Case(models.stem, divide_by_the_older_name)
    return found


def same_without_sharding(name: str) -> bool:
    """Zeros for what nobody uses are no gradients there, and nothing is divided."""
    return "bf16" not in name and "nobody" not in name and "divided" not in name


FAST_SWITCHES = (
    *("unused: ranks choose", "separate group", "buffers: 2", "event: an event"),
    "divided: by a factor of one group",
)
for _ranks in (2, 3):
    PROMISES.add(
        "a switch works as in FSDP2 and changes no number but those it is for",
        {
            name: functools.partial(
                compare, case, against_fsdp2(_ranks), REGROUPING if same_without_sharding(name) else None
            )
            for name, case in switch_cases(_ranks).items()
        },
        _ranks,
        FAST_SWITCHES if _ranks == 2 else (),
    )


test_a_promise_is_kept = PROMISES.test()


# --- Frozen parameters are not reduced ---------------------------------------------------------------------


def traffic_while_freezing(library: Library) -> list[list[tuple[int, str]]]:
    """What is reduced in steps with nothing, something, everything in a group, and nothing again frozen."""
    training = Training(models.stem, library, policy=BF16_FP32)
    reduced = []
    for frozen in FROZEN_STEPS:
        for name, param in training.model.named_parameters():
            param.requires_grad_(not name.startswith(frozen))
        with record() as log:
            training.loss(0).backward()
        training.model.zero_grad()
        reduced.append([(event.bytes, event.dtype) for event in log.select("reduce_scatter")])
    return reduced


FROZEN_STEPS: tuple[tuple[str, ...], ...] = (
    (),
    ("blocks.0.up", "stem.bias", "blocks.2.down"),
    ("blocks.1",),
    (),
)


def test_reductions_carry_the_parameters_that_train_as_in_fsdp2():
    for mine, reference in launch(
        lambda: [traffic_while_freezing(lib) for lib in (ours, theirs)], 3, timeout=60
    ):
        assert mine == reference
        assert [len(step) for step in mine] == [4, 4, 3, 4]
