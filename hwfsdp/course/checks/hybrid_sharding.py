"""11: axes and placements against the arrangement of ranks in a grid; gradients against the model without sharding; collectives,
each with the ranks of its group, against closed forms.

It is graded on a mesh of two replicas with two shards each, and on meshes that have one axis of one rank. The gradients of the
model without sharding equal torch's FSDP2 bit for bit (`tests/course/test_hybrid_oracle.py`), except where the last micro-batch
skips a layer: there FSDP2 leaves the partially reduced gradients until the layer runs again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hwfsdp.core.sharding import padded_local_numel
from hwfsdp.course.checks import piece
from hwfsdp.course.checks.hybrid_sharding_gradients import Mesh, compare_gradients
from hwfsdp.course.checks.hybrid_sharding_models import Model, groups_of
from hwfsdp.course.checks.hybrid_sharding_runs import CHOSEN, FINISHES, Finish, ONE, Setting, probe_meshes
from hwfsdp.course.checks.hybrid_sharding_runs import reduced, settings_of, shapes_of
from hwfsdp.course.findings import expect, is_same, told
from hwfsdp.course.diagnose import compare_order
from hwfsdp.course.run import Ranks
from hwfsdp.observe import accounting
from hwfsdp.observe.accounting import GroupSizes, Strategy
from hwfsdp.observe.events import Event
from hwfsdp.observe.races import Order

SCATTERS, REPLICATES = ("all_gather", "reduce_scatter"), ("all_reduce",)


def meshes(ranks: Ranks, seed: int) -> Iterator[Mesh]:
    """Yield the mesh 2 × 2, and with the requested number of ranks W the meshes 1 × W and W × 1."""
    yield Mesh(ranks.run(probe_meshes, 4, seed=seed, replicas=(2,)), 2, 2)
    number = ranks.world_size
    replicas = tuple(dict.fromkeys((1, number)))
    run = ranks.run(probe_meshes, number, seed=seed, replicas=replicas)
    for each in replicas:
        yield Mesh(run, each, number // each)


# --- Axes and placements -----------------------------------------------------------------------------------


def judge_axes(ranks: Ranks, seed: int) -> None:
    """Check the axes of the mesh, and of the 1D mesh of its second axis."""
    for mesh in meshes(ranks, seed):
        for where, rank, (of_both, of_shards) in mesh.reported("axes"):
            shard = [mesh.shard_ranks(rank), mesh.shards, rank % mesh.shards]
            replicate = [mesh.replicate_ranks(rank), mesh.replicas, rank // mesh.shards]
            _compare_axes(of_both, [shard, replicate], where)
            _compare_axes(of_shards, [shard, [None, 1, 0]], f"1D mesh of {mesh.shards}, rank {rank}:")
        for _, _, found in mesh.reported("placements"):
            _compare_placements(mesh, found)


def _compare_axes(found: Sequence[Any], expected: Sequence[Any], where: str) -> None:
    """Compare axes. An axis is [its ranks or None, its size, this rank's number in it]."""
    for name, axis, right, other in zip(("shard", "replicate"), found, expected, expected[::-1], strict=True):
        if axis == right:
            continue
        if axis[:2] == right[:2]:
            raise told("11.number", where, axis[2], right[2], axis=name)
        kind = "11.swapped" if axis[0] == other[0] else "11.other_ranks"
        raise told(kind, where, _shown(found), _shown(expected))


def _shown(axes: Sequence[Any]) -> str:
    shard, replicate = (
        "none" if members is None and size == 1 else f"ranks {members}, number {rank} of {size}"
        for members, size, rank in axes
    )
    return f"shard: {shard}; replicate: {replicate}"


def _compare_placements(mesh: Mesh, found: Sequence[list[str]]) -> None:
    """Compare placements on meshes with both axes, with only the shard axis, and with only the replica axis."""
    replicate, shards = ["Replicate()"], [["Shard(dim=0)"], ["Shard(dim=1)"]]
    kinds = [replicate + shards[0], replicate + shards[1], *shards, replicate, replicate]
    for one, right in zip(found, kinds, strict=True):
        if one != right:
            swapped = len(one) > 1 and sorted(one) == sorted(right)
            shown = [f"({', '.join(each)})" for each in (one, right)]
            raise told("11.placed_swapped" if swapped else "11.placed", f"{mesh}:", *shown)


# --- Partial gradients -------------------------------------------------------------------------------------


def judge_partials(ranks: Ranks, seed: int) -> None:
    """Check what a group alone keeps, takes and finishes; then steps with several micro-batches."""
    for mesh in meshes(ranks, seed):
        for where, rank, found in mesh.reported("partials"):
            _compare_kept(where, found, partial(_pieces, seed, mesh, rank), mesh.shards == 1)
    for mesh in meshes(ranks, seed):
        for setting in settings_of(mesh.replicas, mesh.shards):
            if any("s" in pattern for pattern in setting.reduces):
                _compare_reductions(mesh, setting)
                compare_gradients(mesh, setting, seed)


Rows = dict[int, Tensor]  # by parameter, this rank's rows


def _pieces(seed: int, mesh: Mesh, rank: int, chosen: Sequence[int], result: Tensor | int) -> Rows:
    """Return the rows in the result of a reduction of the chosen parameters. `result`: the tensor, or the number of the reduction."""
    shapes = shapes_of(seed, mesh.shards)
    sizes = [padded_local_numel(shapes[i], mesh.shards) for i in chosen]
    flat = reduced(sizes, result) if isinstance(result, int) else result
    rows = [piece(torch.empty(shape), mesh.shards, rank % mesh.shards) for shape in shapes]
    return {
        i: chunk[: rows[i].numel()].view_as(rows[i])
        for i, chunk in zip(chosen, flat.split(sizes), strict=True)
    }


def _compare_kept(where: str, found: Mapping[str, Any], pieces: Callable[..., Rows], is_whole: bool) -> None:
    """Compare the partial gradients after partial reductions of different parameters. `is_whole`: a rank has all rows."""
    sums: Rows = {}
    for number, chosen in enumerate(CHOSEN[:3]):
        for index, rows in pieces(chosen, number).items():
            sums[index] = sums[index] + rows if index in sums else rows
        after = f"{where} after {number + 1} reductions, the partial gradient of"
        for index, kept in enumerate(found["kept"][number]):
            _compare_sum(f"{after} p{index}", kept, sums.get(index))
        if is_whole and found["shared"][number]:
            raise told("11.view", where, "a view of the buffer", "a copy")
    for chosen, taken in zip(((0, 1, 3), CHOSEN[3]), found["taken"], strict=True):
        for index, rows in pieces(chosen, taken["result"]).items():
            name = f"{where} what all-reduces of p{index}"
            _compare_sum(name, rows, sums.pop(index, torch.zeros_like(rows)))
        for index, is_left in enumerate(taken["left"]):
            if is_left != (index in sums):
                raise told("11.left" if is_left else "11.gone", where, index)


def _compare_sum(where: str, found: Tensor | None, right: Tensor | None) -> None:
    if found is None or right is None:
        expect("11.missing" if found is None else "11.there", where, found, right)
        return
    expect("11.other_shape", where, tuple(found.shape), tuple(right.shape))
    if not torch.equal(found, right):
        raise told("11.too_small" if found.sum() < right.sum() else "11.too_large", where, found, right)


def judge_finish(ranks: Ranks, seed: int) -> None:
    """Check a reduction that is not over yet, on a rank without other replicas. Nothing may touch the result before it is over."""
    for mesh in meshes(ranks, seed):
        for where, rank, found in mesh.reported("finishes"):
            pieces = _pieces(seed, mesh, rank, range(len(shapes_of(seed, mesh.shards))), 0)
            for case, one in zip(FINISHES, found, strict=True):
                earlier = ", a partial gradient before" if case.partial else ""
                at = f"{where[:-1]}, a group with one replica, all_reduce_grads={case.all_reduce}{earlier}:"
                _compare_finish(at, case, one, pieces)


def _compare_finish(where: str, case: Finish, found: Mapping[str, Any], pieces: Rows) -> None:
    before, after = found["before"], found["after"]
    if any(grad is not None for grad in (*before["grads"], *before["partials"][1:])):
        raise told("11.before", where, "before it", "after it")
    expect("11.early", where, found["early"], False)
    for index, new in pieces.items():
        total = new + 512.0 if case.partial and index == 0 else new
        grad, kept = after["grads"][index], after["partials"][index]
        if case.all_reduce:
            if grad is not None and total is not new and new.numel() and is_same(grad, new / 4):
                raise told("11.not_added", where, grad, total / 4, index=index)
            _compare_sum(f"{where} the partial gradient of p{index}", kept, None)
            if grad is None:
                raise told("11.no_gradient", where, "none", total / 4, index=index)
            if total.numel() and is_same(grad, total):
                raise told("11.undivided", where, grad, total / 4, index=index)
            _compare_sum(f"{where} the gradient of p{index}", grad, total / 4)
            continue
        if grad is not None:
            raise told("11.in_part", where, grad, "none", index=index)
        # wrong: only the new gradient was divided, or the whole sum, as it will be at the end
        too_early = total - new + new / 4, total / 4
        if total.numel() and not is_same(kept, total) and any(is_same(kept, each) for each in too_early):
            raise told("11.divided_early", where, kept, total, index=index)
        _compare_sum(f"{where} the partial gradient of p{index}", kept, total)


# --- Traffic -----------------------------------------------------------------------------------------------


def judge_traffic(ranks: Ranks, seed: int) -> None:
    """Check one step: the ranks of each collective, the number of collectives, and their bytes."""
    for mesh in meshes(ranks, seed):
        log = mesh.run.log(f"{mesh.replicas} {ONE.name} log")
        compare_order(log_by_rank := {r: log.select(rank=r) for r in range(mesh.world_size)})
        calls = [found for _, _, found in mesh.reported(f"{ONE.name} calls")]
        for rank, events in log_by_rank.items():
            _compare_members(mesh, rank, calls[rank])
            _compare_bytes(mesh, rank, [e for e in events if e.op in (*SCATTERS, *REPLICATES)])


def _compare_members(mesh: Mesh, rank: int, calls: Sequence[Any]) -> None:
    inner, outer = mesh.shard_ranks(rank), mesh.replicate_ranks(rank)
    for op, owner, members, _ in calls:
        right, other = (inner, outer) if op in SCATTERS else (outer, inner)
        if members != right:
            name = "11.over_swapped" if members == other else "11.over"
            raise told(name, f"{mesh}, rank {rank}:", members, right, op=op, owner=owner or "no group")


def _compare_bytes(mesh: Mesh, rank: int, events: Sequence[Event]) -> None:
    """Compare bytes of each group with `strategy_traffic`, and refuse collectives without a group."""
    for group, params in groups_of(Model()).items():
        for op, right in _traffic([params], mesh).items():
            found = [e.bytes for e in events if e.op == op and e.owner == group]
            count = (2 if op == "all_gather" else 1) if right else 0
            where = f"{mesh}, rank {rank}: {op} of {group}:"
            expect(f"11.{op}" if count else "11.nobody", where, len(found), count)
            whole = op == "all_reduce" and sum(found) == mesh.shards * right
            expect("11.whole" if whole else "11.bytes", where, sum(found), right)
    for stranger in (e for e in events if e.owner not in groups_of(Model())):
        raise told("11.strangers", f"{mesh}, rank {rank}:", op=stranger.op, nbytes=stranger.bytes)


def _traffic(groups: Sequence[Sequence[torch.nn.Parameter]], mesh: Mesh) -> dict[str, int]:
    """Return closed forms: all parameters are gathered, and trainable ones are reduced."""
    everything = [GroupSizes([tuple(p.shape) for p in group]) for group in groups]
    trained = [GroupSizes([tuple(p.shape) for p in group if p.requires_grad]) for group in groups]
    gathers = accounting.strategy_traffic(everything, Strategy.HSDP, mesh.world_size, mesh.shards)
    reductions = accounting.strategy_traffic(trained, Strategy.HSDP, mesh.world_size, mesh.shards)
    return {**reductions, "all_gather": gathers["all_gather"]}


# --- Order and memory -------------------------------------------------------------------------------------------------


def judge_order(ranks: Ranks, seed: int) -> None:
    """Check that an all-reduce follows its group's reduce-scatter, on its own stream, and nothing in backward waits for it."""
    for mesh in meshes(ranks, seed):
        log = mesh.run.log(f"{mesh.replicas} {ONE.name} log")
        for where, rank, seen in mesh.reported(f"{ONE.name} seen"):
            _compare_schedule(log.select(rank=rank), where)
            _compare_seen(mesh, seen, where)
        for setting in settings_of(mesh.replicas, mesh.shards):
            for where, _, seen in mesh.reported(f"{setting.name} seen"):
                for stream, current in seen["queued"]:
                    expect("11.queued", where, current or "no stream", stream)


def _compare_seen(mesh: Mesh, seen: Mapping[str, Any], where: str) -> None:
    """Compare the streams on which collectives were issued, the stream on which a reduction ends, and the memory that was kept."""
    for stream, current in seen["issued"]:
        expect("11.current", where, current or "no stream", stream)
    for stream in seen["goes_on"]:
        expect("11.goes_on", where, stream, "all_reduce" if mesh.replicas > 1 else "reduce_scatter")
    if any(seen["kept"]):
        raise told("11.kept", where, max(seen["kept"]), 0)


def _compare_schedule(events: Sequence[Event], where: str) -> None:
    order = Order(events)
    copies = [e for e in events if e.op == "copy_in" and e.stream == "compute"]
    for event in (e for e in events if e.op == "all_reduce"):
        owner = event.owner
        expect("11.stream", where, event.stream, "all_reduce", owner=owner)
        scatters = [e for e in events if e.op == "reduce_scatter" and e.owner == owner]
        for before in scatters or [e for e in copies if e.owner == owner]:
            if not order.happens_before(before, event):
                raise told("11.no_wait", where, owner=owner, before=before.op)
        for copy in copies:
            if copy.seq > event.seq and order.happens_before(event, copy):
                raise told("11.compute_waits", where, owner=owner, copy=copy.owner)


# --- Numbers -----------------------------------------------------------------------------------------------


def judge_numbers(ranks: Ranks, seed: int) -> None:
    """Check steps of one micro-batch."""
    for mesh in meshes(ranks, seed):
        for setting in settings_of(mesh.replicas, mesh.shards):
            if not any("s" in pattern for pattern in setting.reduces):
                compare_gradients(mesh, setting, seed)


def _compare_reductions(mesh: Mesh, setting: Setting) -> None:
    """Check that nothing goes to other replicas before the micro-batch that all-reduces."""
    expected = sum(pattern.count("a") for pattern in setting.reduces) if mesh.replicas > 1 else 0
    log = mesh.run.log(f"{mesh.replicas} {setting.name} log")
    for rank in range(mesh.world_size):
        owners = [event.owner for event in log.select(rank=rank) if event.op == "all_reduce"]
        for group in groups_of(Model()):
            where = f"{mesh}, {setting.name}, rank {rank}:"
            expect("11.reductions", where, owners.count(group), expected, group=group)
