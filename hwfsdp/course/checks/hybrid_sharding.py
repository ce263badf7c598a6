"""11: axes and placements against the arrangement of ranks in a grid; gradients against the model without sharding; collectives,
each with the ranks that it went over, against closed forms.

Graded on a mesh of two replicas of two shards, and on meshes that have one axis of one rank. The gradients of the model without
sharding are bit for bit those of torch's FSDP2 (`tests/course/test_hybrid_oracle.py`), but where the last micro-batch skips a
layer: there FSDP2 leaves what was reduced in part until the layer runs again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hwfsdp.core.sharding import chunk_extent, padded_local_numel
from hwfsdp.course.checks.hybrid_sharding_gradients import Mesh, compare_gradients
from hwfsdp.course.checks.hybrid_sharding_models import Model, groups_of
from hwfsdp.course.checks.hybrid_sharding_runs import (
    CHOSEN,
    FINISHES,
    Finish,
    ONE,
    Setting,
    probe_meshes,
    reduced,
    settings_of,
    shapes_of,
)
from hwfsdp.course.diagnose import compare_order, first_difference
from hwfsdp.course.run import Ranks
from hwfsdp.course.verdict import Finding
from hwfsdp.observe import accounting
from hwfsdp.observe.accounting import GroupSizes, Strategy
from hwfsdp.observe.events import Event
from hwfsdp.observe.races import Order

SCATTERS, REPLICATES = ("all_gather", "reduce_scatter"), ("all_reduce",)


def meshes(ranks: Ranks, seed: int) -> Iterator[Mesh]:
    """2 × 2, and of as many ranks as are asked for, 1 × W and W × 1."""
    yield Mesh(ranks.run(probe_meshes, 4, seed=seed, replicas=(2,)), 2, 2)
    number = ranks.world_size
    replicas = tuple(dict.fromkeys((1, number)))
    run = ranks.run(probe_meshes, number, seed=seed, replicas=replicas)
    for each in replicas:
        yield Mesh(run, each, number // each)


# --- Axes and placements -----------------------------------------------------------------------------------


def judge_axes(ranks: Ranks, seed: int) -> None:
    """Of the mesh, and of the 1D mesh of its second axis."""
    for mesh in meshes(ranks, seed):
        for rank, found in enumerate(mesh["axes"]):
            inner, outer = mesh.shard_ranks(rank), mesh.replicate_ranks(rank)
            shard = [inner, mesh.shards, rank % mesh.shards]
            replicate = [outer, mesh.replicas, rank // mesh.shards]
            _compare_axes(found["2D"], [shard, replicate], f"{mesh}, rank {rank}")
            _compare_axes(found["1D"], [shard, [None, 1, 0]], f"1D mesh of {mesh.shards}, rank {rank}")
        _compare_placements(mesh)


def _compare_axes(found: Sequence[Any], expected: Sequence[Any], where: str) -> None:
    words = [f"{name}: {_axis(each)}" for name, each in zip(("shard", "replicate"), found, strict=True)]
    right = [f"{name}: {_axis(each)}" for name, each in zip(("shard", "replicate"), expected, strict=True)]
    for index, (axis, wanted) in enumerate(zip(found, expected, strict=True)):
        if axis == wanted:
            continue
        text = f"{where}: the axes are not those of this rank."
        if axis[0] == wanted[0] and axis[1] == wanted[1]:
            text = f"{where}: this rank's number in the axis is not {axis[2]}."
            raise Finding("wrong-group", text, right[index], words[index])
        swapped = axis[0] == expected[1 - index][0]
        raise Finding("axes-swapped" if swapped else "wrong-group", text, right, words)


def _axis(described: Sequence[Any]) -> str:
    members, size, rank = described
    return "none" if members is None and size == 1 else f"ranks {members}, number {rank} of {size}"


def _compare_placements(mesh: Mesh) -> None:
    """With both axes, with that to shard over, with that of replicas; whatever their sizes."""
    for found in mesh["placements"]:
        expected: list[list[str]] = []
        for kind in ("both", "shard", "replicate"):
            for dim in (0, 1):
                replicate = ["Replicate()"] if kind != "shard" else []
                expected.append(replicate + ([f"Shard(dim={dim})"] if kind != "replicate" else []))
        for one, right in zip(found, expected, strict=True):
            if one != right:
                swapped = len(one) > 1 and sorted(one) == sorted(right)
                text = f"{mesh}: placements are ({', '.join(one)}); expected ({', '.join(right)})."
                raise Finding("axes-swapped" if swapped else "wrong-placement", text)


# --- Partial gradients -------------------------------------------------------------------------------------


def judge_partials(ranks: Ranks, seed: int) -> None:
    """What is kept, taken and finished by a group alone; then steps with several micro-batches."""
    for mesh in meshes(ranks, seed):
        for rank in range(mesh.world_size):
            _compare_kept(mesh, mesh["partials"][rank], seed, rank)
    for mesh in meshes(ranks, seed):
        for setting in settings_of(mesh.replicas, mesh.shards):
            if any("s" in pattern for pattern in setting.reduces):
                _compare_reductions(mesh, setting)
                compare_gradients(mesh, setting, seed)


def _local_shapes(seed: int, mesh: Mesh, rank: int) -> list[tuple[int, ...]]:
    return [
        (chunk_extent(shape[0], mesh.shards, rank % mesh.shards).length, *shape[1:])
        for shape in shapes_of(seed, mesh.shards)
    ]


def _pieces(seed: int, mesh: Mesh, rank: int, chosen: Sequence[int], result: Tensor) -> dict[int, Tensor]:
    """By parameter, its rows of a result."""
    shapes, local = shapes_of(seed, mesh.shards), _local_shapes(seed, mesh, rank)
    sizes = [padded_local_numel(shapes[i], mesh.shards) for i in chosen]
    chunks = result.split(sizes)
    return {
        i: chunk[: torch.Size(local[i]).numel()].view(local[i])
        for i, chunk in zip(chosen, chunks, strict=True)
    }


def _result(seed: int, mesh: Mesh, chosen: Sequence[int], number: int) -> Tensor:
    shapes = shapes_of(seed, mesh.shards)
    return reduced([padded_local_numel(shapes[i], mesh.shards) for i in chosen], number)


def _compare_kept(mesh: Mesh, found: Mapping[str, Any], seed: int, rank: int) -> None:
    """After reductions in part of some parameters, and then of others."""
    sums: dict[int, Tensor] = {}
    where = f"{mesh}, rank {rank}"
    for number, chosen in enumerate(CHOSEN[:3]):
        for index, piece in _pieces(seed, mesh, rank, chosen, _result(seed, mesh, chosen, number)).items():
            sums[index] = sums[index] + piece if index in sums else piece
        for index, kept in enumerate(found["kept"][number]):
            _compare_sum(
                f"{where}: after {number + 1} reductions, the partial gradient of p{index}",
                kept,
                sums.get(index),
            )
        if mesh.shards == 1 and found["shared"][number]:
            text = f"{where}: a partial gradient is a view of the reduction's buffer, which compute may overwrite before it is read."
            raise Finding("freed-too-early", text, "a copy", "a view of the buffer")
    for chosen, taken in zip(((0, 1, 3), CHOSEN[3]), found["taken"], strict=True):
        pieces = _pieces(seed, mesh, rank, chosen, taken["result"])
        for index in chosen:
            name = f"{where}: what all-reduces of p{index}"
            _compare_sum(name, pieces[index], sums.pop(index, torch.zeros(pieces[index].shape)), "grad-kept")
        if left := [f"p{i}" for i, there in enumerate(taken["left"]) if there and i not in sums]:
            raise Finding(
                "grad-kept", f"{where}: partial gradients that were taken are still there: {left[0]}."
            )
        if gone := [f"p{i}" for i in sums if not taken["left"][i]]:
            raise Finding(
                "partial-forgotten",
                f"{where}: {gone[0]} is not being reduced, and its partial gradient is gone.",
            )


def _compare_sum(what: str, found: Tensor | None, right: Tensor | None, more: str = "grad-kept") -> None:
    if right is None or found is None:
        if right is not None:
            raise Finding("partial-forgotten", f"{what} is missing.", right, "none")
        if found is not None:
            raise Finding(more, f"{what} is there, and nothing was reduced.", "none", found)
        return
    if found.numel() != right.numel() or found.shape != right.shape:
        raise Finding("wrong-rows", f"{what} has another shape.", tuple(right.shape), tuple(found.shape))
    if not torch.equal(found, right):
        misconception = "partial-forgotten" if float(found.sum()) < float(right.sum()) else more
        raise Finding(misconception, f"{what} is wrong, {first_difference(found, right)}.", right, found)


def judge_finish(ranks: Ranks, seed: int) -> None:
    """One reduction that is not over yet, on a rank without other replicas; nothing may touch the result before."""
    for mesh in meshes(ranks, seed):
        for rank, found in enumerate(mesh["finishes"]):
            for case, one in zip(FINISHES, found, strict=True):
                _compare_finish(mesh, case, one, seed, rank)


def _compare_finish(mesh: Mesh, case: Finish, found: Mapping[str, Any], seed: int, rank: int) -> None:
    partial = ", a partial gradient before" if case.partial else ""
    where = f"{mesh}, rank {rank}, all_reduce_grads={case.all_reduce}{partial}"
    chosen = range(len(shapes_of(seed, mesh.shards)))
    pieces = _pieces(seed, mesh, rank, chosen, _result(seed, mesh, chosen, 0))
    before, after = found["before"], found["after"]
    earlier = torch.full(pieces[0].shape, 512.0)
    if any(grad is not None for grad in before["grads"]) or any(
        p is not None for p in before["partials"][1:]
    ):
        text = (
            f"{where}: gradients are set before the reduction is over; its result is anything at that time."
        )
        raise Finding("used-before-wait", text, "after it", "before it")
    if found["early"]:
        raise Finding("no-overlap", f"{where}: the host waits for the reduction.", "returns at once", "waits")
    in_part = not case.all_reduce
    for index in chosen:
        total = pieces[index] + earlier if case.partial and index == 0 else pieces[index]
        grad, kept = after["grads"][index], after["partials"][index]
        if in_part and grad is not None:
            text = f"{where}: p{index} has a gradient, that of a part of the replicas."
            raise Finding("reduced-too-often", text, "none", grad)
        if in_part:
            _compare_divided(f"{where}: the partial gradient of p{index}", kept, pieces[index], total)
        _compare_sum(f"{where}: the partial gradient of p{index}", kept, total if in_part else None)
        if in_part:
            continue
        if grad is None:
            raise Finding("grad-lost", f"{where}: p{index} has no gradient.", total / 4, "none")
        if total.numel() and torch.equal(grad, total):
            text = f"{where}: the gradient of p{index} is not divided by reducing.mean.after, 4."
            raise Finding("summed-not-averaged", text, total / 4, grad)
        _compare_sum(f"{where}: the gradient of p{index}", grad, total / 4)


def _compare_divided(what: str, kept: Tensor | None, piece: Tensor, total: Tensor) -> None:
    """Raises if a partial gradient, or what was just added to it, was divided, as all of it will be in the end."""
    too_early = total - piece + piece / 4, total / 4
    if kept is None or not kept.numel() or kept.shape != total.shape or torch.equal(kept, total):
        return
    if any(torch.equal(kept, each) for each in too_early):
        text = (
            f"{what} is divided by reducing.mean.after, 4, and its sum over the replicas will be once more."
        )
        raise Finding("averaged-twice", text, total, kept)


# --- Traffic -----------------------------------------------------------------------------------------------


def judge_traffic(ranks: Ranks, seed: int) -> None:
    """One step: which ranks each collective goes over, how many there are, and their bytes."""
    for mesh in meshes(ranks, seed):
        log = mesh.run.log(f"{mesh.replicas} {ONE.name} log")
        compare_order(log_by_rank := {r: log.select(rank=r) for r in range(mesh.world_size)})
        for rank, events in log_by_rank.items():
            _compare_members(mesh, rank)
            _compare_bytes(mesh, rank, [e for e in events if e.op in (*SCATTERS, *REPLICATES)])


def _compare_members(mesh: Mesh, rank: int) -> None:
    inner, outer = mesh.shard_ranks(rank), mesh.replicate_ranks(rank)
    for op, owner, members, _ in mesh[f"{ONE.name} calls"][rank]:
        right, other = (inner, outer) if op in SCATTERS else (outer, inner)
        if members != right:
            misconception = "axes-swapped" if members == other else "wrong-group"
            text = f"{mesh}, rank {rank}: {op} of {owner or 'no group'} goes over ranks {members}."
            raise Finding(misconception, text, right, members)


def _compare_bytes(mesh: Mesh, rank: int, events: Sequence[Event]) -> None:
    """Per group, and the sum of all against `strategy_traffic`."""
    for group, params in groups_of(Model()).items():
        for op, right in _traffic([params], mesh).items():
            found = [e.bytes for e in events if e.op == op and e.owner == group]
            count = (2 if op == "all_gather" else 1) if right else 0
            where = f"{mesh}, rank {rank}: {op} of {group}"
            if len(found) != count:
                text = f"{where}: {len(found)} in a step, expected {count}."
                raise Finding(_miscounted(op, len(found), count), text, count, len(found))
            if sum(found) != right:
                whole = op == "all_reduce" and sum(found) == mesh.shards * right
                text = f"{where}: {sum(found):,} B, expected {right:,} B."
                more = "too-much-traffic" if sum(found) > right else "too-little-traffic"
                raise Finding("reduced-whole" if whole else more, text, right, sum(found))
    if strangers := [e for e in events if e.owner not in groups_of(Model())]:
        text = f"{mesh}, rank {rank}: {strangers[0].op} of no group, {strangers[0].bytes:,} B."
        raise Finding("too-much-traffic", text, 0, len(strangers))


def _miscounted(op: str, found: int, expected: int) -> str:
    if found > expected:
        return "too-much-traffic" if expected else "nobody-to-send-to"
    return {"all_gather": "not-gathered", "reduce_scatter": "not-reduced"}.get(op, "drifted")


def _traffic(groups: Sequence[Sequence[torch.nn.Parameter]], mesh: Mesh) -> dict[str, int]:
    """Closed forms: all parameters are gathered, those that are trained reduced."""
    everything = [GroupSizes([tuple(p.shape) for p in group]) for group in groups]
    trained = [GroupSizes([tuple(p.shape) for p in group if p.requires_grad]) for group in groups]
    gathers = accounting.strategy_traffic(everything, Strategy.HSDP, mesh.world_size, mesh.shards)
    reductions = accounting.strategy_traffic(trained, Strategy.HSDP, mesh.world_size, mesh.shards)
    return {**reductions, "all_gather": gathers["all_gather"]}


# --- Order and memory --------------------------------------------------------------------------------------


def judge_order(ranks: Ranks, seed: int) -> None:
    """An all-reduce follows the reduce-scatter of its group, on a stream of its own, and nothing in backward waits for it."""
    for mesh in meshes(ranks, seed):
        log = mesh.run.log(f"{mesh.replicas} {ONE.name} log")
        for rank in range(mesh.world_size):
            _compare_schedule(log.select(rank=rank), f"{mesh}, rank {rank}")
            _compare_seen(mesh, rank)


def _compare_seen(mesh: Mesh, rank: int) -> None:
    """Streams that collectives were issued on, the one that a reduction ends on, and memory that was kept."""
    seen, where = mesh[f"{ONE.name} seen"][rank], f"{mesh}, rank {rank}"
    for stream, current in seen["issued"]:
        if stream != current:
            text = f"{where}: a collective of the {stream} stream is issued while {current or 'no stream'} is current."
            raise Finding("wrong-stream", text, stream, current)
    last = "all_reduce" if mesh.replicas > 1 else "reduce_scatter"
    if wrong := [stream for stream in seen["goes_on"] if stream != last]:
        text = f"{where}: a reduction ends on the {last} stream, and the end of the backward waits for the {wrong[0]} stream only"
        text += ", as if the result were ready there (`comm_ctx.hold`)."
        raise Finding("used-before-wait", text, last, wrong[0])
    if any(seen["kept"]):
        text = f"{where}: the input of a reduce-scatter is still in memory when the next one starts."
        raise Finding("kept-alive", text, 0, max(seen["kept"]))


def _compare_schedule(events: Sequence[Event], where: str) -> None:
    order = Order(events)
    copies = [e for e in events if e.op == "copy_in" and e.stream == "compute"]
    for event in (e for e in events if e.op == "all_reduce"):
        if event.stream != "all_reduce":
            text = f"{where}: the all-reduce of {event.owner} is on the {event.stream} stream."
            raise Finding("wrong-stream", text, "all_reduce", event.stream)
        scatters = [e for e in events if e.op == "reduce_scatter" and e.owner == event.owner]
        for before in scatters or [e for e in copies if e.owner == event.owner]:
            if not order.happens_before(before, event):
                text = f"{where}: the all-reduce of {event.owner} does not wait for its {before.op}."
                raise Finding("used-before-wait", text)
        for copy in copies:
            if copy.seq > event.seq and order.happens_before(event, copy):
                text = (
                    f"{where}: compute goes on with {copy.owner} only after the all-reduce of {event.owner}."
                )
                raise Finding("no-overlap", text)


# --- Numbers -----------------------------------------------------------------------------------------------


def judge_numbers(ranks: Ranks, seed: int) -> None:
    """Steps of one micro-batch."""
    for mesh in meshes(ranks, seed):
        for setting in settings_of(mesh.replicas, mesh.shards):
            if not any("s" in pattern for pattern in setting.reduces):
                compare_gradients(mesh, setting, seed)


def _compare_reductions(mesh: Mesh, setting: Setting) -> None:
    """Nothing crosses to the replicas before the micro-batch that all-reduces."""
    expected = sum(pattern.count("a") for pattern in setting.reduces) if mesh.replicas > 1 else 0
    log = mesh.run.log(f"{mesh.replicas} {setting.name} log")
    for rank in range(mesh.world_size):
        owners = [event.owner for event in log.select(rank=rank) if event.op == "all_reduce"]
        for group in groups_of(Model()):
            found = owners.count(group)
            if found != expected:
                text = f"{mesh}, {setting.name}, rank {rank}: {found} all-reduces of {group}, expected {expected}."
                misconception = "reduced-too-often" if found > expected else "partial-forgotten"
                raise Finding(misconception, text, expected, found)
