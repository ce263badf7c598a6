"""Checks of 12: placements, orders of cuts and boxes against nested chunking; then a tensor-parallel model under FSDP.

The oracle is told who cuts first, and cuts ranges, or tensors with `torch.chunk`. It knows what the learner's functions have to find out.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from hwfsdp import compat
from hwfsdp.course.checks import strided_shards_runs as runs
from hwfsdp.course.checks.strided_shards_runs import PADDING, REPLICA, Axes, Cuts, Sizes, Tensors, described
from hwfsdp.course.checks.strided_shards_theories import Box, explain_boxes, explain_orders
from hwfsdp.course.diagnose import first_difference
from hwfsdp.course.run import Ranks, Run
from hwfsdp.course.verdict import Finding

RANKS = prod(runs.GRID)


def _run(ranks: Ranks, seed: int) -> Run:
    return ranks.run(runs.probe_cuts, 1, seed=seed)


# --- Placements --------------------------------------------------------------------------------------------


def expected_cut(before: Axes, dim: int) -> list[Any]:
    """FSDP's own placement: closed form."""
    parts = prod(size for p, size in before if compat.is_shard(p) and described(p)[1] == dim)
    return ["strided", dim, parts] if parts > 1 else ["shard", dim, None]


def judge_placement(ranks: Ranks, seed: int) -> None:
    """What FSDP's axis says, and the placements on both kinds of axes."""
    run, cases = _run(ranks, seed), runs.axes(seed)
    answers = run["cut after"][0]
    for (before, dim), actual in zip(cases, answers, strict=True):
        if actual != expected_cut(before, dim):
            axes = ", ".join(f"{runs.shown([p])[1:-1]} over {size} ranks" for p, size in before) or "none"
            text = f"FSDP cuts dim {dim}; axes on its right: {axes}. cut_after is {_say(actual)}, "
            text += f"expected {_say(expected_cut(before, dim))}."
            name = _cut_misconception(before, dim, actual, all(a[0] != "strided" for a in answers))
            raise Finding(name, text, _say(expected_cut(before, dim)), _say(actual))
    for (before, dim), found in zip(cases, run["joined"][0], strict=True):
        cut, rest = expected_cut(before, dim), [described(p) for p, _ in before]
        for own, actual in zip(([], [["replicate", None, None]]), found, strict=True):
            expected = [*own, cut, *rest]
            if actual != expected:
                shown = f"[{', '.join(map(_say, actual))}]"
                wanted = f"[{', '.join(map(_say, expected))}]"
                text = f"FSDP cuts dim {dim}; own {'replicas and shards' if own else 'shards'}; before: "
                text += (
                    f"{runs.shown([p for p, _ in before])}. joined_placements is {shown}, expected {wanted}."
                )
                raise Finding(_joined_misconception(actual, expected), text, wanted, shown)


def _say(found: Sequence[Any]) -> str:
    kind, dim, factor = found
    if kind == "strided":
        return f"StridedShard({dim}, split_factor={factor})"
    return f"Shard({dim})" if kind == "shard" else f"{kind.capitalize()}()"


def _cut_misconception(before: Axes, dim: int, actual: Sequence[Any], never: bool) -> str:
    kind, of, factor = actual
    if kind not in ("strided", "shard") or of != dim:
        return "wrong-placement"
    if expected_cut(before, dim)[0] == "shard" and kind == "strided" and factor == 1:
        return "wrong-placement"
    if kind == "shard":
        return "wrong-order-of-cuts" if never else "wrong-split-factor"
    right = prod(size for p, size in before if compat.is_shard(p) and described(p)[1] == dim)
    every = [size for _, size in before]
    shards = [size for p, size in before if compat.is_shard(p)]
    too_many = factor in (prod(every), prod(shards)) and factor != right
    return "counted-as-cut" if too_many else "wrong-split-factor"


def _joined_misconception(actual: Sequence[Any], expected: Sequence[Any]) -> str:
    same = sorted(map(repr, actual)) == sorted(map(repr, expected))
    plain = [["shard", p[1], None] if p[0] == "strided" else p for p in expected]
    if same:
        return "wrong-axis-order"
    return "wrong-order-of-cuts" if list(actual) == plain else "wrong-placement"


# --- Orders and boxes --------------------------------------------------------------------------------------


def judge_order(ranks: Ranks, seed: int) -> None:
    """Every order of cuts on every small mesh; and factors that no cuts make."""
    run, cases = _run(ranks, seed), runs.all_cuts(seed)
    explain_orders(cases, run["orders"][0])
    for (mesh, placements), actual in zip(runs.REFUSED, run["refused"][0], strict=True):
        if actual != "refused":
            text = f"mesh {mesh}, {runs.shown(placements)}: no cuts on the right make so many pieces, yet orders_of_cuts {actual}."
            counted = any(not compat.is_shard(p) or described(p)[1] != 0 for p in placements)
            raise Finding("counted-as-cut" if counted else "wrong-split-factor", text, "a UsageError", actual)


@cache
def oracle(n: int, mesh: Sizes, order: Sizes) -> dict[Sizes, tuple[int, int]]:
    """(length, offset) of what is left of n rows, by the ranks' indices in the order of cuts."""
    pieces: dict[Sizes, range] = {(): range(n)}
    for mesh_dim in order:
        finer: dict[Sizes, range] = {}
        for where, rows in pieces.items():
            quotient, rest = divmod(len(rows), mesh[mesh_dim])
            length = quotient + (rest > 0)
            finer |= {(*where, i): rows[i * length : (i + 1) * length] for i in range(mesh[mesh_dim])}
        pieces = finer
    return {where: (len(rows), rows[0]) if rows else (0, n) for where, rows in pieces.items()}


def expected_box(shape: Sizes, cuts: Cuts, coordinate: Sizes) -> list[tuple[int, int]]:
    """(length, offset) in every tensor dim."""
    found = []
    for dim, n in enumerate(shape):
        order = cuts.orders[dim] if dim < len(cuts.orders) else ()
        found.append(oracle(n, cuts.mesh, order)[tuple(coordinate[m] for m in order)] if order else (n, 0))
    return found


def judge_box(ranks: Ranks, seed: int) -> None:
    """Nested chunking, every length and coordinate; empty boxes lie behind the tensor."""
    answer = _run(ranks, seed)["boxes"][0]
    if not isinstance(answer, Tensor):
        text = f"{answer['case']}: nested_extent returned {answer['shown']}; an extent has a shape and an offset, "
        raise Finding("wrong-value", text + "two tuples of integers.", "LocalExtent", answer["shown"])
    numbers, found = answer.tolist(), list[Box]()
    at = 0
    for cuts, shape in runs.boxes(seed):
        for coordinate in cuts.coordinates():
            lengths, offsets = numbers[at : at + len(shape)], numbers[at + len(shape) : at + 2 * len(shape)]
            at += 2 * len(shape)
            actual = list(zip(lengths, offsets, strict=True))
            found.append(Box(cuts, shape, coordinate, actual, expected_box(shape, cuts, coordinate)))
    explain_boxes(found)


# --- Tensors -----------------------------------------------------------------------------------------------


def judge_shards(ranks: Ranks, seed: int) -> None:
    """Values, padding, and whose memory it is."""
    answers = iter(_run(ranks, seed)["shards"][0])
    for case in runs.tensors(seed):
        for pad in (False, True):
            _check_shards(case, pad, next(answers))


def _check_shards(case: Tensors, pad: bool, facts: dict[str, Any]) -> None:
    whole, cuts = case.whole(), case.cuts
    pieces = [runs.box_of(whole, cuts, c) for c in cuts.coordinates()]
    where, shards = f"shard_strided of {case}{', pad=True' if pad else ''}", facts["shards"]
    if len(shards) != len(pieces):
        raise Finding("block-missing", f"{where} gives {len(shards)} shards.", len(pieces), len(shards))
    if not facts["same"]:
        raise Finding("input-changed", f"{where} writes to the tensor that it cuts.")
    largest = [max(p.shape[d] for p in pieces) for d in range(whole.ndim)]
    for coordinate, actual, right in zip(cuts.coordinates(), shards, pieces, strict=True):
        expected = right.new_zeros(largest if pad else right.shape)
        expected[tuple(slice(n) for n in right.shape)] = right
        _check_shard(f"{where}, coordinate {coordinate}:", actual, expected, right, whole)
    if not facts["contiguous"]:
        raise Finding("wrong-value", f"{where}: a shard is not contiguous; a collective takes no other.")
    if any(facts["views"]):
        views = [c for c, is_view in zip(cuts.coordinates(), facts["views"], strict=True) if is_view]
        text = f"{where}: the shards at {', '.join(map(str, views))} are views of the tensor that is cut: they keep all of it "
        text += "alive, and whoever writes to a shard changes it."
        raise Finding("aliased", text, "memory of its own", "the memory of the tensor")
    bytes_of = [prod(largest if pad else p.shape) * p.element_size() for p in pieces]
    if not facts["own"] or facts["bytes"] != bytes_of:
        text = f"{where}: the shards keep {facts['bytes']} B alive, expected {bytes_of} B in memory of their own."
        raise Finding("replicated", text, bytes_of, facts["bytes"])
    if case.dtype.is_floating_point:
        _check_grad(where, case, facts["grad"])


def _check_shard(where: str, actual: Tensor, expected: Tensor, right: Tensor, whole: Tensor) -> None:
    if actual.dtype != whole.dtype:
        raise Finding("wrong-value", f"{where} it has another dtype.", str(whole.dtype), str(actual.dtype))
    if actual.shape != expected.shape:
        text = f"{where} the shard has shape {tuple(actual.shape)}, expected {tuple(expected.shape)}."
        name = "wrong-rows"
        if actual.shape == right.shape:
            name = "padding-dropped"
        elif expected.shape == right.shape and all(
            a >= b for a, b in zip(actual.shape, right.shape, strict=False)
        ):
            name = "padding-leaked"
        raise Finding(name, text, list(expected.shape), list(actual.shape))
    if torch.equal(actual, expected):
        return
    inner = tuple(slice(n) for n in right.shape)
    if torch.equal(actual[inner], right):
        text = f"{where} padding is not zero, {first_difference(actual, expected)}."
        raise Finding("padding-not-zero", text, expected, actual)
    name, text = (
        "wrong-rows",
        f"{where} the shard is not that of nested chunking, {first_difference(actual, expected)}.",
    )
    if (
        sorted(actual.flatten().tolist()) == sorted(expected.flatten().tolist())
        and right.shape != expected.shape
    ):
        name, text = (
            "padding-leaked",
            f"{where} padding is not behind the rows, {first_difference(actual, expected)}.",
        )
    raise Finding(name, text, expected, actual)


def _check_grad(where: str, case: Tensors, grad: Tensor | None) -> None:
    expected = case.whole().zero_()
    for number, coordinate in enumerate(case.cuts.coordinates()):
        runs.box_of(expected, case.cuts, coordinate).add_(number + 1)
    if grad is None or not torch.equal(grad, expected):
        text = f"{where}: a gradient of the shards does not come back to the tensor that was cut."
        raise Finding("grad-lost", text, expected, grad)


def judge_whole(ranks: Ranks, seed: int) -> None:
    """From shards of the oracle, with padding and replicas that must not come back."""
    run = _run(ranks, seed)
    answers = iter(run["whole"][0])
    for case in runs.tensors(seed):
        for pad in (False, True):
            _check_whole(case, pad, next(answers))
    names = ("one shard less than ranks", "a shard that is too small", "a shard that is too large")
    for what, actual in zip(names, run["misfits"][0], strict=True):
        if actual != "refused":
            text = f"unshard_strided was given {what}, and {actual}; check_shards refuses it."
            raise Finding("wrong-value", text, "a UsageError", actual)


def _check_whole(case: Tensors, pad: bool, facts: dict[str, Any]) -> None:
    expected, actual = case.whole(), facts["whole"]
    where = f"unshard_strided of {case}, {'padded' if pad else 'without padding'}:"
    if actual.shape != expected.shape:
        text = f"{where} the whole has shape {tuple(actual.shape)}, expected {tuple(expected.shape)}."
        name = "padding-leaked" if pad and actual.numel() > expected.numel() else "wrong-rows"
        raise Finding(name, text, list(expected.shape), list(actual.shape))
    if actual.dtype != expected.dtype:
        raise Finding("wrong-value", f"{where} it has another dtype.", str(expected.dtype), str(actual.dtype))
    if not torch.equal(actual, expected):
        raise Finding(*_whole_misconception(where, expected, actual, facts["laid out"]))
    if not facts["same"]:
        raise Finding("input-changed", f"{where} a shard was written to.")
    if not facts["own"] and expected.numel():
        raise Finding(
            "input-changed", f"{where} the whole is in a shard's memory: whoever writes to it changes that."
        )
    if not facts["grad"]:
        text = f"{where} autograd does not know that the whole comes from the shards."
        raise Finding("grad-lost", text, "requires_grad", "no requires_grad")


def _whole_misconception(
    where: str, expected: Tensor, actual: Tensor, laid_out: Tensor
) -> tuple[str, str, Any, Any]:
    difference = first_difference(actual, expected)
    name, text = "wrong-rows", f"{where} the whole is another, {difference}."
    if (actual == PADDING).any():
        name, text = (
            "padding-leaked",
            f"{where} padding, which is {PADDING:g} here, is in the whole, {difference}.",
        )
    elif (actual == REPLICA).any():
        name = "wrong-replica"
        text = f"{where} the first replica counts; others, which are {REPLICA:g} here, are in the whole, {difference}."
    elif torch.equal(actual.flatten(), laid_out[: actual.numel()]):
        name, text = (
            "wrong-order-of-cuts",
            f"{where} shards are laid end to end in the order of ranks, {difference}.",
        )
    return name, text, expected, actual


# --- FSDP over tensor parallelism --------------------------------------------------------------------------


def _oracle_training(seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor], list[list[float]]]:
    """The same model in one piece: parameters before and after, losses by data-parallel index."""
    model = runs.Model(seed)
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


CUT_BY_TP: dict[str, Cuts] = {  # and by FSDP along dim 0 after it
    "up.weight": Cuts(runs.GRID, ((1, 0), ())),
    "up.bias": Cuts(runs.GRID, ((1, 0),)),
    "down.weight": Cuts(runs.GRID, ((0,), (1,))),
    "down.bias": Cuts(runs.GRID, ((0,),)),
}


def judge_training(ranks: Ranks, seed: int) -> None:
    """Placements, shards, the whole put together by them, and the numbers of two steps."""
    run = ranks.run(runs.probe_training, RANKS, seed=seed)
    before, after, losses = _oracle_training(seed)
    for rank in range(RANKS):
        _check_layout(rank, run["placements"][rank], run["local"][rank], before)
    for key, expected in (("before", before), ("after", after)):
        for rank, found in enumerate(run[key]):
            for name, right in expected.items():
                actual = found[name]
                if actual.shape != right.shape or not torch.equal(actual, right):
                    where = f"Rank {rank}: {name}, put together from all shards {key} training, "
                    raise Finding(
                        "wrong-rows", f"{where}is not that of the model in one piece.", right, actual
                    )
    for rank, numbers in enumerate(run["losses"]):
        if numbers != losses[rank // runs.GRID[1]]:
            text = f"Rank {rank}: losses differ from those of the model in one piece."
            raise Finding("wrong-value", text, losses[rank // runs.GRID[1]], numbers)


def _check_layout(
    rank: int, placements: dict[str, Any], local: dict[str, Tensor], whole: dict[str, Tensor]
) -> None:
    coordinate = divmod(rank, runs.GRID[1])
    for name, cuts in CUT_BY_TP.items():
        expected = [described(p) for p in cuts.placements()]
        if placements[name] != expected:
            shown, wanted = (f"[{', '.join(map(_say, p))}]" for p in (placements[name], expected))
            text = f"{name} under FSDP over tensor parallelism has placements {shown}, expected {wanted}."
            raise Finding("wrong-placement", text, wanted, shown)
        right = runs.box_of(whole[name], cuts, coordinate)
        if local[name].shape != right.shape or not torch.equal(local[name], right):
            raise Finding("wrong-rows", f"Rank {rank} has other rows of {name}.", right, local[name])
