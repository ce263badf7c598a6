"""06: gradients against PyTorch without sharding and FSDP2, bit for bit; bytes in closed form; and all checks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hwfsdp.accounting import GroupSizes, peak_unsharded_bytes
from hwfsdp.learn.checks import backward_parts
from hwfsdp.learn.checks.backward_models import HIDDEN, WIDTH, batch, build, loss_of
from hwfsdp.learn.checks.backward_runs import probe_fsdp2, run_of, runs_of
from hwfsdp.learn.checks.backward_schedule import check_gathered, judge_schedule
from hwfsdp.learn.checks.gradients import compare_shards
from hwfsdp.learn.run import Ranks, Run
from hwfsdp.learn.verdict import Check, Finding

Grads = dict[str, Tensor]


# --- Oracles -----------------------------------------------------------------------------------------------


@functools.cache
def parts_of(
    name: str, seed: int, world_size: int, steps: tuple[int, ...], kind: str = "integers"
) -> list[list[Grads]]:
    """By rank and step, each parameter's gradient without sharding; only those that have one."""
    found = []
    for rank in range(world_size):
        of_rank = []
        for step in steps:
            model = build(name, seed, kind).double()
            given = tuple(
                t.double() if t.is_floating_point() else t for t in batch(name, seed, step, rank, kind)
            )
            loss_of(model, (given[0], given[1]), world_size).backward()
            of_rank.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        found.append(of_rank)
    return found


def names_of(name: str, seed: int) -> list[str]:
    return [fqn for fqn, _ in build(name, seed).named_parameters()]


def rows_of(whole: Tensor, world_size: int) -> list[Tensor]:
    """Each rank's, as torch.chunk cuts them."""
    pieces = whole.chunk(world_size)
    return [*pieces, *[whole[:0]] * (world_size - len(pieces))]


def means(names: Sequence[str], parts: Sequence[Sequence[Grads]]) -> list[dict[str, Tensor | None]]:
    """By rank, its rows of each mean over the ranks, micro-batches added up; None where nobody has a gradient."""
    world_size = len(parts)
    shards: list[dict[str, Tensor | None]] = [dict.fromkeys(names) for _ in parts]
    for name in names:
        found = [grads[name] for of_rank in parts for grads in of_rank if name in grads]
        if found:
            mean = (torch.stack(found).sum(0) / world_size).float()
            for shard, rows in zip(shards, rows_of(mean, world_size), strict=True):
                shard[name] = rows.contiguous()
    return shards


# --- Gradients ---------------------------------------------------------------------------------------------


def judge_gradients(ranks: Ranks, seed: int) -> None:
    """All models, at both world sizes, against the oracles of `means`; then against FSDP2."""
    for run in runs_of(ranks, seed):
        _check_in_flight(run)
        for model, keys in (
            ("Chain", ("Chain grads", "recomputed grads", "listed grads")),
            ("Tied", ("Tied grads",)),
            ("Untied", ("Untied grads",)),
        ):
            for key in keys:
                _check_grads(run, key, model, seed, (0,))
        _check_range(run, seed)
        if len(run.reports) == ranks.world_size:
            _check_replicated(run, seed)
            _check_fsdp2(run, ranks.reference(probe_fsdp2, ranks.world_size, seed=seed), seed)
        check_gathered(run)


def _check_in_flight(run: Run) -> None:
    """The end of a backward is what its root is called for; it leaves every state idle."""
    for rank, phases in enumerate(run["phases"]):
        busy = [f"{name} {phase}" for name, phase in phases.items() if phase != "IDLE"]
        if busy:
            text = f"When backward returns, rank {rank} is in the middle of it ({', '.join(busy)})"
            raise Finding("left-in-flight", f"{text}: the root was not told that the backward is over.")


def _check_grads(run: Run, key: str, model: str, seed: int, steps: tuple[int, ...]) -> None:
    parts = parts_of(model, seed, len(run.reports), steps)
    names = names_of(model, seed)
    _check_layouts(run[key], key)
    where = f"{key.split()[0]} at world size {len(run.reports)}"
    _compare(run[key], means(names, parts), parts, where)


def _check_layouts(reported: Sequence[Mapping[str, Any]], key: str) -> None:
    for rank, grads in enumerate(reported):
        for name, grad in grads.items():
            if grad is not None and grad["layout"] != grad.get("param"):
                text = f"{key}: the gradient of {name} on rank {rank} is {grad['layout']}, the parameter {grad.get('param')}."
                raise Finding("wrong-placement", text, grad.get("param"), grad["layout"])


def _compare(
    reported: Sequence[Mapping[str, Any]],
    oracle: Sequence[dict[str, Tensor | None]],
    parts: Sequence[Sequence[Grads]],
    where: str,
) -> None:
    """With `compare_shards`, which explains by parts; a parameter that nobody used has none there."""
    actual = [{n: None if g is None else g["rows"] for n, g in grads.items()} for grads in reported]
    _check_reduced(actual, oracle, parts, where)
    names = set().union(*({*grads} for grads in oracle))
    shapes = {n: g for of_rank in parts for grads in of_rank for n, g in grads.items()}
    filled = [
        [
            {n: grads.get(n, torch.zeros_like(shapes.get(n, torch.zeros(1)))) for n in names}
            for grads in of_rank
        ]
        for of_rank in parts
    ]
    compare_shards(actual, oracle, filled, where)


def _check_reduced(
    actual: Sequence[Mapping[str, Tensor | None]],
    oracle: Sequence[Mapping[str, Tensor | None]],
    parts: Sequence[Sequence[Grads]],
    where: str,
) -> None:
    """Whether a rank's rows are those of its own gradient."""
    for rank, grads in enumerate(actual):
        for name, rows in grads.items():
            right, own = oracle[rank].get(name), [g[name] for g in parts[rank] if name in g]
            if rows is None or right is None or not own or not rows.any() or torch.equal(rows, right):
                continue
            alone = rows_of(torch.stack(own).sum(0).float(), len(parts))[rank]
            if torch.equal(rows, alone):
                text = f"{where}: the gradient of {name} on rank {rank} is that of this rank's own batch"
                raise Finding("not-reduced", f"{text}.", right, rows)


def _check_range(run: Run, seed: int) -> None:
    """Each rank's gradient is within the range of fp16, their sum is not, their mean is."""
    world_size = len(run.reports)
    for rank, grads in enumerate(run["Vector grads"]):
        found = grads.get("weight")
        if found is not None and not found["rows"].isfinite().all():
            largest = max(float(batch("Vector", seed, 0, r)[0].max()) for r in range(world_size))
            text = f"Reduced in fp16, {world_size} gradients of up to {largest:,.0f} gave {found['rows'].tolist()} on rank {rank}"
            raise Finding("overflowed", f"{text}; their sum exceeds 65,504, their mean does not.")
    _check_grads(run, "Vector grads", "Vector", seed, (0,))


def _check_replicated(run: Run, seed: int) -> None:
    """One shard, as many replicas as ranks: everyone has all rows of the mean."""
    names, parts = names_of("Chain", seed), parts_of("Chain", seed, len(run.reports), (0,))
    cut = means(names, parts)
    whole = {n: torch.cat([_required(shard[n]) for shard in cut]) for n in names}
    actual = [
        {n: None if g is None else g["rows"] for n, g in grads.items()} for grads in run["replicated grads"]
    ]
    for rank, grads in enumerate(actual):
        for name, expected in whole.items():
            grad = grads.get(name)
            if grad is None or not torch.equal(grad, expected):
                _raise_replicated(name, rank, len(run.reports), grad, expected)


def _raise_replicated(name: str, rank: int, replicas: int, grad: Tensor | None, expected: Tensor) -> None:
    text = f"On a mesh of {replicas} replicas and 1 shard, the gradient of {name} on rank {rank}"
    if grad is None:
        raise Finding("grad-lost", f"{text} is missing.", expected, None)
    doubled = grad.shape == expected.shape and torch.equal(grad, replicas * expected)
    words = "is the sum over the replicas" if doubled else "is not the mean over the replicas"
    raise Finding("summed-not-averaged" if doubled else "wrong-value", f"{text} {words}.", expected, grad)


def _required(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def _check_fsdp2(run: Run, theirs: Run, seed: int) -> None:
    for key in ("floats Chain", "floats Tied", "floats Chain in bf16"):
        _check_layouts(run[key], key)
        oracle = [{n: None if g is None else g["rows"] for n, g in grads.items()} for grads in theirs[key]]
        parts = parts_of(key.split()[1], seed, len(run.reports), (0,), "floats")
        _compare(run[key], oracle, parts, f"{key.removeprefix('floats ')} against FSDP2")


# --- Memory ------------------------------------------------------------------------------------------------


def judge_memory(ranks: Ranks, seed: int) -> None:
    """One group is whole at a time, one group's gradients; at the end, nothing is."""
    shapes = [[(h, WIDTH), (h,), (WIDTH, h), (WIDTH,)] for h in HIDDEN]
    most_grads = max(sum(torch.Size(shape).numel() for shape in group) for group in shapes) * 4
    for run in runs_of(ranks, seed):
        world_size = len(run.reports)
        most = peak_unsharded_bytes([], [GroupSizes(group) for group in shapes], world_size)
        for rank in range(world_size):
            log = run.log("Chain log").of_rank(rank)
            where, peaks = f"on rank {rank} of {world_size}", log.peak_bytes_by_kind()
            whole = {name: nbytes for name, nbytes in run["whole"][rank].items() if nbytes}
            _check_whole(whole, peaks["unsharded_param"], most, where)
            left = log.samples[rank][-1].bytes_by_kind["unsharded_grad"]
            _check_whole_grads(left, peaks["unsharded_grad"], most_grads, where)


def _check_whole(left: Mapping[str, int], peak: int, expected: int, where: str) -> None:
    told = f"Peak of whole parameters {where}: {peak:,} B; expected {expected:,} B, the largest group"
    if left:
        text = f"Not freed after backward: {', '.join(left)} ({sum(left.values()):,} B). {told}."
        raise Finding("not-freed", text, expected, peak)
    if peak != expected:
        raise Finding("not-freed" if peak > expected else "freed-too-early", f"{told}.", expected, peak)


def _check_whole_grads(left: int, peak: int, expected: int, where: str) -> None:
    if not left and peak == expected:
        return
    text = f"Whole gradients {where}: {left:,} B after backward, expected 0; peak {peak:,} B"
    kind = "grad-not-freed" if left or peak > expected else "grad-lost"
    raise Finding(kind, f"{text}, expected {expected:,} B, those of the largest group.", expected, peak)


# --- More than one backward --------------------------------------------------------------------------------


def judge_again(ranks: Ranks, seed: int) -> None:
    """Backwards add up until the user clears the gradients."""
    for run in runs_of(ranks, seed):
        _check_grads(run, "again grads", "Chain", seed, (0, 1))
        _check_grads(run, "cleared grads", "Chain", seed, (2,))


def judge_alone(ranks: Ranks, seed: int) -> None:
    """The gradients of a module that is called by itself are there when its backward returns."""
    for run in runs_of(ranks, seed):
        world_size = len(run.reports)
        micro = _parts_of_head(seed, world_size)
        names = names_of("Headed", seed)
        for number in range(2):
            parts = [of_rank[: number + 1] for of_rank in micro]
            for rank, grads in enumerate(run[f"alone {number}"]):
                if grads.get("head.weight") is None:
                    text = f"head, called by itself, has no gradient on rank {rank} when backward number {number + 1} returns."
                    raise Finding("left-in-flight", text, "a gradient", "none")
            _check_late(run, number, means(names, parts), means(names, [p[:number] for p in parts]))
            _compare(
                run[f"alone {number}"],
                means(names, parts),
                parts,
                f"head, by itself, world size {world_size}",
            )


def _check_late(
    run: Run,
    number: int,
    oracle: Sequence[dict[str, Tensor | None]],
    before: Sequence[dict[str, Tensor | None]],
) -> None:
    """Whether what is there is what was there before this backward."""
    if not number:
        return
    for rank, (right, old) in enumerate(zip(oracle, before, strict=True)):
        rows = run[f"alone {number}"][rank]["head.weight"]["rows"]
        expected, stale = right["head.weight"], old["head.weight"]
        if (
            stale is not None
            and expected is not None
            and not torch.equal(rows, expected)
            and torch.equal(rows, stale)
        ):
            text = f"head, called by itself: on rank {rank}, backward number {number + 1} returns without having added anything."
            raise Finding("left-in-flight", text, expected, rows)


def _parts_of_head(seed: int, world_size: int) -> list[list[Grads]]:
    """By rank and part of the rows, the gradients of the head without sharding."""
    found = []
    for rank in range(world_size):
        model: Any = build("Headed", seed)
        x, counts = batch("Headed", seed, 0, rank)
        of_rank = []
        for part, c in zip(model(x).detach().split(2), counts.split(2), strict=True):
            model.zero_grad()
            loss_of(model.head, (part, c), world_size).backward()
            of_rank.append({n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None})
        found.append(of_rank)
    return found


def judge_part(check: Callable[[Run, int], None], ranks: Ranks, seed: int) -> None:
    """One of the functions by themselves."""
    check(run_of(ranks, seed), seed)


JUDGES = {name: partial(judge_part, check) for name, check in backward_parts.CHECKED.items()}

CHECKS = (
    Check("06.copied", "row r of the buffer is what rank r shall get, then zeros", 1, JUDGES["copied"]),
    Check("06.scaling", "means are made where it is cheap, and stay in range", 1, JUDGES["scaling"]),
    Check("06.taken", "nobody else refers to a gradient that was taken", 1, JUDGES["taken"]),
    Check("06.added", "what was reduced is added to the shard's gradient", 1, JUDGES["added"]),
    Check(
        "06.gradients",
        "gradients are those of the whole batch, bit for bit",
        1,
        judge_gradients,
        ("06.scaling",),  # a wrong mean has been told of; what it does to a gradient would mislead
    ),
    Check("06.schedule", "backward gathers one group ahead, reduces each group once", 1, judge_schedule),
    Check("06.freed", "one group at a time is whole, and none afterwards", 1, judge_memory),
    Check("06.again", "gradients of several backwards add up", 1, judge_again, ("06.gradients",)),
    Check("06.alone", "a module called by itself has its gradients when backward returns", 1, judge_alone),
)
