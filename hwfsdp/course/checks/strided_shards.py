"""Checks of 12: placements, orders of cuts and boxes against nested chunking; then a tensor-parallel model under FSDP.

The oracle is told the order of the cuts, and cuts ranges, or tensors with `torch.chunk`. The learner's functions have to find
this order themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Placement, Replicate, Shard

from hwfsdp import compat
from hwfsdp.course.checks import strided_shards_runs as runs
from hwfsdp.course.checks.strided_shards_runs import PADDING, REPLICA, Axes, Cuts, Sizes, Tensors, listed
from hwfsdp.course.checks.strided_shards_runs import shown
from hwfsdp.course.checks.strided_shards_theories import Box, Cut, explain_boxes, explain_orders, nested
from hwfsdp.course.findings import compare, expect, is_same, told
from hwfsdp.course.run import Ranks, Run

RANKS = prod(runs.GRID)


def _run(ranks: Ranks, seed: int) -> Run:
    return ranks.run(runs.probe_cuts, 1, seed=seed)


# --- Placements --------------------------------------------------------------------------------------------


def expected_cut(before: Axes, dim: int) -> Placement:
    """Return FSDP's own placement, by a closed form."""
    parts = _pieces(before, dim)
    return compat.strided_shard(dim, parts) if parts > 1 else Shard(dim)


def _pieces(before: Axes, dim: int | None = None) -> int:
    """Return the number of pieces into which axes cut a dim; without `dim`, into which they cut all dims."""
    return prod(size for p, size in before if compat.is_shard(p) and dim in (None, p.dim))


def judge_placement(ranks: Ranks, seed: int) -> None:
    """Check the placement of FSDP's axis, and the placements on both kinds of axes."""
    run, cases = _run(ranks, seed), runs.axes(seed)
    answers = run["cut after"][0]
    for (before, dim), actual in zip(cases, answers, strict=True):
        right = shown(expected_cut(before, dim))
        if actual != right:
            axes = ", ".join(f"{shown(p)} over {size} ranks" for p, size in before) or "none"
            where = f"FSDP cuts dim {dim}; axes on its right: {axes}."
            never = not any(answer.startswith("Strided") for answer in answers)
            raise told(_wrong_cut(before, dim, actual, never), where, actual, right)
    for (before, dim), found in zip(cases, run["joined"][0], strict=True):
        rest = [p for p, _ in before]
        for own, actual in zip(([], [Replicate()]), found, strict=True):
            expected = [*own, expected_cut(before, dim), *rest]
            if actual != [*map(shown, expected)]:
                where = f"FSDP cuts dim {dim}; own {'replicas and shards' if own else 'shards'}; before: {listed(rest)}."
                raise told(_wrong_joined(actual, expected), where, f"[{', '.join(actual)}]", listed(expected))


def _wrong_cut(before: Axes, dim: int, actual: str, never: bool) -> str:
    """Name the mistake. `never`: no answer is a strided shard."""
    right, too_many = _pieces(before, dim), (prod(size for _, size in before), _pieces(before))
    if actual == shown(Shard(dim)):
        return "12.plain_cut" if never else "12.cut_factor"
    if not actual.startswith(f"StridedShard({dim},") or actual == shown(compat.strided_shard(dim, right)):
        return "12.cut_placement"
    counted = any(actual == shown(compat.strided_shard(dim, number)) for number in too_many)
    return "12.cut_counted" if counted else "12.cut_factor"


def _wrong_joined(actual: Sequence[str], expected: Sequence[Any]) -> str:
    if sorted(actual) == sorted(map(shown, expected)):
        return "12.joined_order"
    plain = [Shard(p.dim) if isinstance(p, compat.StridedShard) else p for p in expected]
    return "12.joined_plain" if actual == [*map(shown, plain)] else "12.joined"


# --- Orders and boxes --------------------------------------------------------------------------------------


def judge_order(ranks: Ranks, seed: int) -> None:
    """Check every order of cuts on every small mesh, and split factors that no cuts can give."""
    run, cases = _run(ranks, seed), runs.all_cuts(seed)
    explain_orders(cases, run["orders"][0])
    for (mesh, placements), actual in zip(runs.REFUSED, run["refused"][0], strict=True):
        counted = any(not compat.is_shard(p) or p.dim != 0 for p in placements)
        name = "12.refused_counted" if counted else "12.refused_factor"
        if actual != "refused":
            raise told(name, f"mesh {mesh}, {listed(placements)}:", actual, "a UsageError")


def expected_box(shape: Sizes, cuts: Cuts, coordinate: Sizes) -> list[tuple[int, int]]:
    """Return (length, offset) in every tensor dim; empty boxes lie behind the tensor."""
    found = []
    for dim, n in enumerate(shape):
        order = cuts.orders[dim] if dim < len(cuts.orders) else ()
        length, offset = nested(n, [Cut(m, cuts.mesh[m], coordinate[m]) for m in order])
        found.append((length, offset if length else n))
    return found


def judge_box(ranks: Ranks, seed: int) -> None:
    """Check boxes against nested chunking, for every length and coordinate."""
    answer = _run(ranks, seed)["boxes"][0]
    if not isinstance(answer, Tensor):
        raise told("12.no_extent", f"{answer['case']}:", answer["shown"], "LocalExtent")
    numbers, found = iter(answer.tolist()), list[Box]()
    for cuts, shape in runs.boxes(seed):
        for coordinate in cuts.coordinates():
            lengths, offsets = ([next(numbers) for _ in shape] for _ in range(2))
            actual = list(zip(lengths, offsets, strict=True))
            found.append(Box(cuts, shape, coordinate, actual, expected_box(shape, cuts, coordinate)))
    explain_boxes(found)


# --- Tensors -----------------------------------------------------------------------------------------------


def judge_shards(ranks: Ranks, seed: int) -> None:
    """Check values, padding, and whether each shard has its own memory."""
    for case, facts in zip(runs.tensors(seed), _run(ranks, seed)["shards"][0], strict=True):
        _check_shards(case, facts)


def _check_shards(case: Tensors, facts: dict[str, Any]) -> None:
    coordinates, shards = list(case.cuts.coordinates()), case.shards()
    where = f"shard_strided of {case}{', pad=True' if case.pad else ''}"
    expect("12.number", f"{where}:", len(facts["shards"]), len(shards))
    compare(f"{where}:", facts, {"12.written": False})
    every_shard = zip(coordinates, facts["shards"], shards, case.pieces(), strict=True)
    for coordinate, actual, expected, right in every_shard:
        if not is_same(actual, expected):
            _explain_shard(f"{where}, coordinate {coordinate}:", actual, expected, right)
    compare(f"{where}:", facts, {"12.contiguous": True})
    if views := [str(c) for c, is_view in zip(coordinates, facts["views"], strict=True) if is_view]:
        raise told("12.views", f"{where}:", ", ".join(views))
    bytes_of = [shard.nbytes for shard in shards]
    if not facts["own"] or facts["bytes"] != bytes_of:
        raise told("12.bytes", f"{where}:", facts["bytes"], bytes_of)
    if case.dtype.is_floating_point:
        right = torch.zeros_like(case.whole())
        for number, coordinate in enumerate(coordinates):
            runs.box_of(right, case.cuts, coordinate).add_(number + 1)
        compare(f"{where}:", facts, {"12.grad": right})


def _explain_shard(where: str, actual: Tensor, expected: Tensor, right: Tensor) -> None:
    """Raise a Finding about a wrong shard. `right`: the shard without padding."""
    expect("12.dtype", where, str(actual.dtype), str(expected.dtype))
    longer = all(a >= b for a, b in zip(actual.shape, right.shape, strict=False))
    name = "12.padded" if expected.shape == right.shape and longer else "12.rows_shape"
    name = "12.unpadded" if actual.shape == right.shape else name
    expect(name, where, tuple(actual.shape), tuple(expected.shape))
    if torch.equal(actual[tuple(slice(n) for n in right.shape)], right):
        raise told("12.padding", where, actual, expected)
    shifted = actual.flatten().sort()[0].equal(expected.flatten().sort()[0]) and right.shape != expected.shape
    raise told("12.padding_first" if shifted else "12.rows", where, actual, expected)


def judge_whole(ranks: Ranks, seed: int) -> None:
    """Check the whole tensor, made from the oracle's shards. Their padding and replicas must not come back."""
    run = _run(ranks, seed)
    for case, facts in zip(runs.tensors(seed), run["whole"][0], strict=True):
        where = f"unshard_strided of {case}, {'padded' if case.pad else 'without padding'}:"
        _check_whole(where, case.whole(), case.pad, facts)
    names = ("one shard less than ranks", "a shard that is too small", "a shard that is too large")
    for what, actual in zip(names, run["misfits"][0], strict=True):
        if actual != "refused":
            raise told("12.misfit", f"Given {what},", actual, "a UsageError")


def _check_whole(where: str, expected: Tensor, pad: bool, facts: dict[str, Any]) -> None:
    actual = facts["whole"]
    name = "12.whole_padded" if pad and actual.numel() > expected.numel() else "12.whole_shape"
    expect(name, where, tuple(actual.shape), tuple(expected.shape))
    expect("12.dtype", where, str(actual.dtype), str(expected.dtype))
    name = _wrong_whole(actual, facts["laid out"])
    expect(name, where, actual, expected, padding=PADDING, replica=REPLICA)
    compare(where, facts, {"12.same": True, "12.own": True, "12.whole_grad": True})


def _wrong_whole(actual: Tensor, laid_out: Tensor) -> str:
    if (actual == PADDING).any():
        return "12.whole_leaked"
    if (actual == REPLICA).any():
        return "12.whole_replica"
    return "12.whole_laid_out" if torch.equal(actual.flatten(), laid_out[: actual.numel()]) else "12.whole"


# --- FSDP over tensor parallelism --------------------------------------------------------------------------


def _oracle_training(seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor], list[list[float]]]:
    """Train the same model without sharding: parameters before and after, losses by data-parallel index."""
    model = runs.build(seed)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses: list[list[float]] = [[] for _ in range(runs.GRID[0])]
    optimizer = torch.optim.SGD(model.parameters(), lr=runs.LR)
    for step in range(runs.STEPS):
        found = [runs.loss_of(model(runs.batch(seed, step, index))) for index in range(runs.GRID[0])]
        for index, loss in enumerate(found):
            losses[index].append(loss.item())
        torch.stack(found).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return before, {name: p.detach() for name, p in model.named_parameters()}, losses


CUT_BY_TP: dict[str, Cuts] = {  # FSDP cuts along dim 0 after it
    "up.weight": Cuts(runs.GRID, ((1, 0), ())),
    "up.bias": Cuts(runs.GRID, ((1, 0),)),
    "down.weight": Cuts(runs.GRID, ((0,), (1,))),
    "down.bias": Cuts(runs.GRID, ((0,),)),
}


def judge_training(ranks: Ranks, seed: int) -> None:
    """Check placements, the rows of every rank, and the numbers of two steps."""
    run = ranks.run(runs.probe_training, RANKS, seed=seed)
    before, after, losses = _oracle_training(seed)
    for rank, found in enumerate(run["placements"]):
        for name, cuts in CUT_BY_TP.items():
            expect("12.layout", f"Rank {rank}: {name}", found[name], listed(cuts.placements()))
    for key, expected in (("before", before), ("after", after)):
        for rank, found in enumerate(run[key]):
            for name, cuts in CUT_BY_TP.items():
                rows = runs.box_of(expected[name], cuts, divmod(rank, runs.GRID[1]))
                expect("12.local", f"Rank {rank}: {name}, {key} training,", found[name], rows)
    for rank, numbers in enumerate(run["losses"]):
        expect("12.losses", f"Rank {rank}:", numbers, losses[rank // runs.GRID[1]])
