"""08: numbers against the unsharded model, and collectives and bytes against a count by hand: which gathers and reductions
there are in each micro-batch follows from the settings alone.

The unsharded model gives each rank's gradient of each micro-batch; added up as the policy says, they are bit for bit what
torch's FSDP2 gives for the same settings (`tests/learn/test_oracles.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hwfsdp import accounting
from hwfsdp.events import Event
from hwfsdp.learn.checks.accumulation_runs import (
    COARSE,
    FEWER,
    FORWARD_ONLY,
    FP32,
    FREED,
    KEPT,
    Model,
    PATHS,
    PRECISE,
    PRECISE_PATHS,
    ROUGH,
    SILENT,
    SUMS,
    Setting,
    USUAL,
    WATCHED,
    WHOLE,
    build,
    groups_of,
    loss_of,
    probe_fewer,
    probe_settings,
)
from hwfsdp.learn.checks.gradients import compare_shards
from hwfsdp.learn.diagnose import compare_order
from hwfsdp.learn.run import Ranks, Run
from hwfsdp.learn.verdict import Check, Finding
from hwfsdp.sharding import chunk_extent

REDUCING = tuple(op for op in WATCHED if op != "all_gather")


# --- The count by hand -------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """What a setting asks of one group: per micro-batch, gathers in forward and in backward, and whether the parameters
    are whole after each; reductions in the whole step.
    """

    forward_gathers: list[int]
    backward_gathers: list[int]
    whole_after_forward: list[bool]
    whole_after_backward: list[bool]
    reductions: int


def plan(setting: Setting, group: str) -> Plan:
    """From the settings alone."""
    stays = setting.reshard is False or (setting.reshard is None and group == "Model")
    found, whole, last = Plan([], [], [], [], 0), False, len(setting.paths) - 1
    runs = [group == "Model" or int(group[-1]) in path for path in setting.paths]
    for micro, run in enumerate(runs):
        found.forward_gathers.append(int(run and not whole))
        whole = stays if run else whole
        found.whole_after_forward.append(whole)
        found.backward_gathers.append(int(run and not whole))
        whole = (whole or run) and setting.keep and micro < last
        found.whole_after_backward.append(whole)
    return found._replace(reductions=int(any(runs)))


def sizes(setting: Setting, group: str) -> accounting.GroupSizes:
    shapes = [tuple(param.shape) for param in groups_of(Model())[group]]
    return accounting.GroupSizes(
        shapes, (setting.dtypes[0] or FP32).itemsize, (setting.dtypes[1] or FP32).itemsize
    )


def parts_of(setting: Setting, seed: int, world_size: int) -> list[list[dict[str, Tensor | None]]]:
    """By rank and micro-batch, the gradients of the unsharded model, in the param dtype."""
    dtype = setting.dtypes[0] or FP32
    model = build(seed).to(dtype)
    found: list[list[dict[str, Tensor | None]]] = [[] for _ in range(world_size)]
    for rank, micro in itertools.product(range(world_size), range(len(setting.paths))):
        model.zero_grad()
        loss_of(model, setting, seed, rank, micro, dtype).backward()
        found[rank].append({name: p.grad for name, p in model.named_parameters()})
    return found


def oracle(
    parts: Sequence[Sequence[Mapping[str, Tensor | None]]], setting: Setting
) -> list[dict[str, Tensor | None]]:
    """By rank, its rows of the mean of what each rank summed in the reduce dtype; what FSDP2 gives, bit for bit."""
    world_size = len(parts)
    shards: list[dict[str, Tensor | None]] = [{} for _ in parts]
    for name in parts[0][0]:
        sums = [_sum([micro[name] for micro in of_rank], setting.dtypes[1]) for of_rank in parts]
        there = [total for total in sums if total is not None]
        mean = sum(there[1:], there[0]) / world_size if there else None
        for rank, shard in enumerate(shards):
            shard[name] = None if mean is None else _rows(mean.float(), world_size, rank)
    return shards


def _sum(grads: Sequence[Tensor | None], dtype: torch.dtype | None) -> Tensor | None:
    """One after the other, every sum rounded to the dtype, but no summand other than the first."""
    found = [grad for grad in grads if grad is not None]
    if not found:
        return None
    total = found[0].to(dtype or found[0].dtype, copy=True)
    for grad in found[1:]:
        total.add_(grad)
    return total


def _rows(whole: Tensor, world_size: int, rank: int) -> Tensor:
    extent = chunk_extent(len(whole), world_size, rank)
    return whole.narrow(0, extent.start, extent.length)


# --- Judges ------------------------------------------------------------------------------------------------


class Found(NamedTuple):
    """What one rank reported of a setting.

    Attributes:
        spans: the events of forward, backward, forward, …; moments: what there was after each.
    """

    rank: int
    world_size: int
    setting: Setting
    spans: list[list[Event]]
    moments: list[dict[str, Any]]


def found_of(run: Run, setting: Setting) -> list[Found]:
    log, moments = run.log(f"log: {setting.name}"), run[f"moments: {setting.name}"]
    found = []
    for rank, of_rank in enumerate(moments):
        ends = [moment["events"] for moment in of_rank]
        events_of_rank = log.select(rank=rank)
        spans = [
            [event for event in events_of_rank if start <= event.seq < end]
            for start, end in itertools.pairwise([0, *ends])
        ]
        found.append(Found(rank, len(moments), setting, spans, of_rank))
    return found


def judge_forward(ranks: Ranks, seed: int) -> None:
    """True frees, False does not, None frees all but the root; what is whole is not gathered for backward."""
    run = ranks.run(probe_settings, ranks.world_size, seed=seed)
    for setting in (FREED, WHOLE, USUAL):
        for found in found_of(run, setting):
            _compare_moment(found, 0, "forward")
            _compare_gathers(found, 0, "forward")
            _compare_gathers(found, 1, "backward")


def judge_backward(ranks: Ranks, seed: int) -> None:
    """Freed, before the reduction; or kept, and not gathered by later micro-batches."""
    run = ranks.run(probe_settings, ranks.world_size, seed=seed)
    for setting in (FREED, WHOLE, SUMS, KEPT, FORWARD_ONLY):
        for found in found_of(run, setting):
            for index in range(len(found.moments)):
                _compare_moment(found, index, "backward" if index % 2 else "forward")
                _compare_gathers(found, index, "backward" if index % 2 else "forward")
            _compare_order_of_freeing(found)


def _compare_moment(found: Found, index: int, phase: str) -> None:
    """Which groups are whole after the forward or backward of a micro-batch."""
    micro, setting, moment = index // 2, found.setting, found.moments[index]
    alive = {group: moment[group][0] for group in groups_of(Model()) if moment[group][0]}
    for group in groups_of(Model()):
        of_group = plan(setting, group)
        whole = (of_group.whole_after_backward if index % 2 else of_group.whole_after_forward)[micro]
        nbytes, form = moment[group]
        expected = accounting.unsharded_bytes(sizes(setting, group), found.world_size) if whole else 0
        where = f"{setting.name}, rank {found.rank}, after the {phase} of micro-batch {micro}"
        if whole and (nbytes != expected or form != "whole"):
            message = f"{where}: {group} is {form}, {nbytes:,} B; expected whole, {expected:,} B."
            raise Finding("resharded-anyway", message, expected, nbytes)
        if not whole and (nbytes or form == "whole"):
            wanted = [g for g in alive if plan(setting, g).whole_after_forward[micro] and not index % 2]
            misconception = "never-resharded" if form == "whole" and not index % 2 else "not-freed"
            message = (
                f"{where}: not freed: {group}. {sum(alive.values()):,} B of whole parameters are alive = "
                f"{len(alive)} groups; expected {len(wanted)}."
            )
            raise Finding(misconception, message, expected, nbytes)
        if not whole and form != f"sharded over {found.world_size}":
            raise Finding(
                "not-registered", f"{where}: {group} is {form}.", f"sharded over {found.world_size}", form
            )


def _compare_gathers(found: Found, index: int, phase: str) -> None:
    """How often each group was gathered in the forward or backward of a micro-batch."""
    gathers = [event.owner for event in found.spans[index] if event.op == "all_gather"]
    for group in groups_of(Model()):
        of_group = plan(found.setting, group)
        expected = (of_group.backward_gathers if index % 2 else of_group.forward_gathers)[index // 2]
        if gathers.count(group) != expected:
            misconception = "gathered-again" if gathers.count(group) > expected else "not-gathered"
            message = (
                f"{found.setting.name}, rank {found.rank}, {phase} of micro-batch {index // 2}: {group} is gathered "
                f"{gathers.count(group)} times, expected {expected}. Gathers: {', '.join(gathers) or 'none'}."
            )
            raise Finding(misconception, message, expected, gathers.count(group))


def _compare_order_of_freeing(found: Found) -> None:
    """The buffer of a reduction is filled when the memory of the parameters is free."""
    freed: dict[str, int] = {}
    for event in found.spans[-1]:
        if event.op == "free":
            freed[event.owner] = freed.get(event.owner, 0) + event.bytes
        if event.op == "copy_in" and event.stream == "compute":
            expected = accounting.unsharded_bytes(sizes(found.setting, event.owner), found.world_size)
            if freed.get(event.owner, 0) != expected:
                message = (
                    f"{found.setting.name}, rank {found.rank}: when the gradients of {event.owner} are copied for the "
                    f"reduction ({event.bytes:,} B), {freed.get(event.owner, 0):,} B of its whole parameters have been freed."
                )
                raise Finding("not-freed", message, expected, freed.get(event.owner, 0))


def judge_fewer(ranks: Ranks, seed: int) -> None:
    """Sharded over two of four ranks after forward; gathered from these two for backward."""
    run = ranks.run(probe_fewer, 4, seed=seed)
    for found in found_of(run, FEWER):
        for index, moment in enumerate(found.moments):
            for group in groups_of(Model()):
                _compare_fewer(found, index, group, *moment[group])
    _compare_numbers(run, FEWER, seed)


def _compare_fewer(found: Found, index: int, group: str, nbytes: int, form: str) -> None:
    """Of one group: the form that is registered, and the bytes of the gathers."""
    phase, ranks_after = ("backward", 4) if index % 2 else ("forward", 2)
    where = f"{FEWER.name}, rank {found.rank}, micro-batch {index // 2}"
    if nbytes or form == "whole":
        misconception = "not-freed" if index % 2 else "never-resharded"
        raise Finding(misconception, f"{where}: {group} is {form} after {phase}, {nbytes:,} B.", 0, nbytes)
    if form != f"sharded over {ranks_after}":
        message = f"{where}: after {phase}, {group} is {form}; expected over {ranks_after}."
        raise Finding("wrong-mesh", message, f"sharded over {ranks_after}", form)
    gathers = [e.bytes for e in found.spans[index] if e.op == "all_gather" and e.owner == group]
    from_ranks = 2 if index % 2 else 4
    expected = [accounting.unsharded_bytes(sizes(FEWER, group), from_ranks)]
    if gathers != expected:
        message = f"{where}, {phase}: the gathers of {group} are of {gathers} B; expected {expected}, of {from_ranks} ranks."
        raise Finding("wrong-mesh" if len(gathers) == 1 else "gathered-again", message, expected, gathers)


def judge_silent(ranks: Ranks, seed: int) -> None:
    """Micro-batches before the last gather at most; a step that comes too early warns."""
    run = ranks.run(probe_settings, ranks.world_size, seed=seed)
    for setting in (SUMS, KEPT, PRECISE, COARSE):
        for found in found_of(run, setting):
            early = [event for span in found.spans[:-2] for event in span if event.op in REDUCING]
            if early:
                listed = ", ".join(f"{event.op} {event.owner}" for event in early[:4])
                message = (
                    f"{setting.name}, rank {found.rank}: {len(early)} collectives with gradients before the last "
                    f"micro-batch, expected none: {listed}."
                )
                raise Finding("reduced-too-often", message, 0, len(early))
            _compare_sharded_grads(found)
            _compare_reductions(found)
    for rank, warned in enumerate(run[f"warned: {SUMS.name}"]):
        if warned != [1, 0]:
            message = (
                f"{SUMS.name}, rank {rank}: an optimizer step after the first micro-batch warned {warned[0]} times of "
                f"gradients that were not reduced, one after the last {warned[1]} times."
            )
            raise Finding("not-announced", message, [1, 0], warned)


def _compare_sharded_grads(found: Found) -> None:
    for index, moment in enumerate(found.moments[:-1]):
        if moment["reduced"]:
            message = (
                f"{found.setting.name}, rank {found.rank}: after micro-batch {index // 2}, {moment['reduced']} sharded "
                "parameters have a gradient; nothing was to be reduced yet."
            )
            raise Finding("reduced-too-often", message, 0, moment["reduced"])


def _compare_reductions(found: Found) -> None:
    """In the last backward: one for every group that got a gradient, in the reduce dtype."""
    reductions = [event for event in found.spans[-1] if event.op in REDUCING]
    for group in groups_of(Model()):
        of_group = [event for event in reductions if event.owner == group]
        expected = plan(found.setting, group).reductions
        where = f"{found.setting.name}, rank {found.rank}"
        if len(of_group) != expected:
            skipped = group != "Model" and int(group[-1]) not in found.setting.paths[-1]
            fewer = "grad-lost" if skipped else "not-reduced"  # it comes from an earlier micro-batch
            misconception = "reduced-too-often" if len(of_group) > expected else fewer
            message = f"{where}: {group} is reduced {len(of_group)} times in the last micro-batch, expected {expected}."
            raise Finding(misconception, message, expected, len(of_group))
        dtype = str(found.setting.dtypes[1] or FP32).removeprefix("torch.")
        if of_group and of_group[0].dtype not in (dtype, ""):  # none: one rank sends nothing
            message = f"{where}: {group} is reduced in {of_group[0].dtype}; expected {dtype}."
            raise Finding("reduced-in-wrong-dtype", message, dtype, of_group[0].dtype)


def judge_sums(ranks: Ranks, seed: int) -> None:
    """fp32, whatever the settings."""
    run = ranks.run(probe_settings, ranks.world_size, seed=seed)
    for setting in (FREED, WHOLE, USUAL, SUMS, KEPT, FORWARD_ONLY):
        _compare_numbers(run, setting, seed)
        _compare_left(run, setting)


def judge_precision(ranks: Ranks, seed: int) -> None:
    """Gradients add up in what they are to be reduced in, be it wider than the parameters or narrower."""
    run = ranks.run(probe_settings, ranks.world_size, seed=seed)
    for setting in (PRECISE, COARSE, ROUGH):
        for found in found_of(run, setting):
            _compare_accumulated(found)
        _compare_numbers(run, setting, seed)
        _compare_left(run, setting)


def _compare_accumulated(found: Found) -> None:
    """The dtypes of `accumulated_grad`, where there are any."""
    expected = str(found.setting.dtypes[1])
    for index, moment in enumerate(found.moments):
        if wrong := [dtype for dtype in moment["accumulated"] if dtype != expected]:
            message = (
                f"{found.setting.name}, rank {found.rank}: after micro-batch {index // 2}, accumulated gradients are "
                f"{wrong[0]}; expected {expected}, the reduce dtype."
            )
            raise Finding("reduced-in-wrong-dtype", message, expected, wrong[0])


def _compare_left(run: Run, setting: Setting) -> None:
    """No whole gradient is alive after the last micro-batch."""
    for rank, left in enumerate(run[f"left: {setting.name}"]):
        if left:
            message = (
                f"{setting.name}, rank {rank}: {left:,} B of whole gradients are alive after the last micro-batch, "
                "expected 0 B."
            )
            raise Finding("grad-not-freed", message, 0, left)


def judge_skipped(ranks: Ranks, seed: int) -> None:
    """Layers without a gradient in some micro-batches, or in all; and a gradient of zeros on one rank."""
    run = ranks.run(probe_settings, ranks.world_size, seed=seed)
    for setting in (PATHS, PRECISE_PATHS, SILENT):
        everyone = found_of(run, setting)
        compare_order({f.rank: [e for span in f.spans for e in span if e.op in WATCHED] for f in everyone})
        for found in everyone:
            _compare_reductions(found)
        _compare_numbers(run, setting, seed)


def _compare_numbers(run: Run, setting: Setting, seed: int) -> None:
    parts = parts_of(setting, seed, len(run.reports))
    compare_shards(run[f"grads: {setting.name}"], oracle(parts, setting), parts, setting.name)


CHECKS = (
    Check("08.forward", "after forward, parameters are freed or stay whole, as asked", 1, judge_forward),
    Check("08.fewer", "with a number, they are sharded over so many ranks until backward", 1, judge_fewer),
    Check("08.backward", "after backward, they are freed before the reduction, or kept", 1, judge_backward),
    Check("08.silent", "before the last micro-batch no gradient travels", 1, judge_silent),
    Check("08.sums", "the gradients of all micro-batches add up, equal to FSDP2's", 1, judge_sums),
    Check("08.precision", "they add up in the reduce dtype", 1, judge_precision, ("08.sums",)),
    Check(
        "08.skipped",
        "a group adds what it has, and nothing if it has nothing",
        1,
        judge_skipped,
        ("08.sums",),
    ),
)
