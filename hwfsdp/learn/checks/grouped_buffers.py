"""11: what a group is made of, against torch's own walk over modules; what its buffers hold, against nested chunking; counts
and bytes of its collectives, against closed forms; and numbers, against the model without sharding.

The gradients of the model without sharding are bit for bit those of torch's FSDP2 (`tests/learn/test_buffer_oracles.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hwfsdp import accounting
from hwfsdp.events import COLLECTIVES, Event
from hwfsdp.learn.checks.grouped_buffers_runs import (
    BF16,
    CASES,
    COLUMNS,
    Case,
    FLAGS,
    FP32,
    GATHERS,
    Model,
    RATE,
    TAKEN_SHAPE,
    gather_of,
    groups_of,
    loss_of,
    probe_groups,
    probe_step,
    shapes_of,
    travelling,
)
from hwfsdp.learn.checks.grouped_buffers_trees import compare_modules, compare_parameters
from hwfsdp.learn.diagnose import first_difference
from hwfsdp.learn.run import Ranks, Run
from hwfsdp.learn.verdict import Check, Finding
from hwfsdp.sharding import chunk_extent, padded_local_numel


def _run(ranks: Ranks, seed: int) -> Run:
    """On two ranks at least: one has nothing to gather."""
    return ranks.run(probe_groups, max(2, ranks.world_size), seed=seed)


def judge_modules(ranks: Ranks, seed: int) -> None:
    """Random trees of modules, parts of them sharded before."""
    compare_modules(_run(ranks, seed), seed)


def judge_claims(ranks: Ranks, seed: int) -> None:
    """Parameters of the same trees, tied, frozen, or to be ignored."""
    compare_parameters(_run(ranks, seed), seed)


# --- Gathers -----------------------------------------------------------------------------------------------


def judge_gather(ranks: Ranks, seed: int) -> None:
    """Of stand-ins for parameters: how many collectives, over whom, in which dtype, with what in the buffer."""
    run = _run(ranks, seed)
    world_size = len(run.reports)
    for rank, found in enumerate(run["gathers"]):
        for kind in GATHERS:
            _compare_gather(found[kind], kind, seed, rank, 1 if kind == "from fewer ranks" else world_size)


def _compare_gather(found: Mapping[str, Any], kind: str, seed: int, rank: int, world_size: int) -> None:
    where = f"A gather {kind}, rank {rank}"
    gathers = [e for e in found["log"]["events"] if e["op"] in COLLECTIVES]
    rows, dtype = _rows(seed, kind, range(world_size) if world_size > 1 else [rank])
    _compare_calls(where, gathers, world_size, len(travelling(seed, kind, rank)))
    flat = found["flat"]
    if flat.dtype != dtype:
        text = f"{where}: the buffer is {flat.dtype}; expected {dtype}."
        raise Finding("gathered-in-wrong-dtype", text, dtype, flat.dtype)
    if list(flat.shape) != list(rows.shape):
        text = f"{where}: the buffer is {tuple(flat.shape)}; expected {tuple(rows.shape)}: ranks, elements of all."
        misconception = "left-out" if flat.numel() < rows.numel() else "wrong-value"
        raise Finding(misconception, text, tuple(rows.shape), tuple(flat.shape))
    if not torch.equal(flat, rows):
        alike = torch.equal(flat.sort(dim=1).values, rows.sort(dim=1).values)
        text = f"{where}: the buffer differs from the parts of all ranks in the order of params, {first_difference(flat, rows)}."
        raise Finding("wrong-order" if alike else "wrong-value", text, rows, flat)
    if found["sizes"] != (sizes := _sizes(seed, kind, rank)):
        raise Finding("elements-for-bytes", f"{where}: sizes do not fit the buffer.", sizes, found["sizes"])
    if found["asked"] != [["copy"]] * len(found["asked"]):
        text = (
            f"{where}: parameters were asked for what travels on these streams, expected once each, on copy."
        )
        raise Finding("wrong-stream", text, [["copy"]] * len(found["asked"]), found["asked"])
    if found["released"] != [0]:
        text = f"{where}: release_gather_buffer is called {len(found['released'])} times before the collective, expected once."
        raise Finding("kept-alive", text, 1, len([each for each in found["released"] if each == 0]))


def _compare_calls(where: str, gathers: Sequence[Mapping[str, Any]], world_size: int, params: int) -> None:
    expected = int(world_size > 1)
    if len(gathers) > expected and not expected:
        text = f"{where}: {len(gathers)} collectives, although this rank has all there is to gather."
        raise Finding("wrong-mesh", text, 0, len(gathers))
    if len(gathers) > expected:
        text = f"{where}: {len(gathers)} collectives for a group of {params} parameters, expected 1."
        raise Finding("one-by-one", text, 1, len(gathers))
    if len(gathers) < expected:
        raise Finding("not-gathered", f"{where}: no collective, expected 1.", 1, 0)


def _rows(seed: int, kind: str, ranks: Sequence[int]) -> tuple[Tensor, torch.dtype]:
    """The buffer: what each rank contributes, end to end; bytes if the dtypes differ."""
    rows = []
    for rank in ranks:
        pairs = [
            (t, d)
            for tensors, dtypes in travelling(seed, kind, rank)
            for t, d in zip(tensors, dtypes, strict=True)
        ]
        mixed = len({dtype for _, dtype in pairs}) > 1
        rows.append(torch.cat([t.to(d).view(torch.uint8) if mixed else t.to(d) for t, d in pairs]))
    return torch.stack(rows), rows[0].dtype


def _sizes(seed: int, kind: str, rank: int) -> list[int]:
    pairs = [p for tensors, dtypes in travelling(seed, kind, rank) for p in zip(tensors, dtypes, strict=True)]
    mixed = len({dtype for _, dtype in pairs}) > 1
    return [t.numel() * (d.itemsize if mixed else 1) for t, d in pairs]


def judge_columns(ranks: Ranks, seed: int) -> None:
    """Buffers of 1 to 4 ranks, whatever the number of ranks here."""
    for found in _run(ranks, seed)["columns"]:
        for number, case in enumerate(found):
            _compare_columns(case, seed, number)


def _compare_columns(case: Mapping[str, Any], seed: int, number: int) -> None:
    gather, expected = gather_of(seed, number)
    ranks, columns = COLUMNS[number]
    shapes = ", ".join(f"{c.dtype} {(ranks, *c.shape)}".removeprefix("torch.") for c in columns)
    where = f"A buffer of {ranks} ranks, copied out to {shapes}"
    if not case["read only"]:
        raise Finding("input-changed", f"{where}: the buffer itself is changed.")
    for index, (whole, right) in enumerate(zip(case["wholes"], expected, strict=True)):
        if not torch.equal(whole, right):
            text = f"{where}: number {index + 1} is wrong, {first_difference(whole, right)}."
            raise Finding(_wrong_columns(gather.flat, gather.sizes, index, whole, right), text, right, whole)


def _wrong_columns(flat: Tensor, sizes: Sequence[int], index: int, whole: Tensor, right: Tensor) -> str:
    """By which reading of the buffer the elements are what they are."""
    if not whole.any():
        return "left-unwritten"
    start, size, ranks = sum(sizes[:index]), sizes[index], len(flat)
    end_to_end = flat.reshape(-1)[ranks * start :][: ranks * size]
    if flat.dtype != whole.dtype:
        read = flat[:, start : start + size][:, : whole[0].numel()].to(whole.dtype)
        if torch.equal(whole.reshape(ranks, -1), read):
            return "bytes-for-numbers"
        end_to_end = end_to_end.view(whole.dtype) if size % whole.element_size() == 0 else end_to_end
    if torch.equal(whole.reshape(-1), end_to_end.to(whole.dtype)):
        return "not-transposed"
    alike = sorted(map(tuple, whole.flatten(1).tolist())) == sorted(map(tuple, right.flatten(1).tolist()))
    return "wrong-order" if alike else "wrong-value"


# --- Gradients ---------------------------------------------------------------------------------------------


def judge_grads(ranks: Ranks, seed: int) -> None:
    """What is taken from parameters before a reduction, and what they get of its result."""
    _judge_taken(ranks, seed)
    _judge_pieces(ranks, seed)


def _judge_taken(ranks: Ranks, seed: int) -> None:
    """Every kind of parameter under all settings."""
    for rank, found in enumerate(_run(ranks, seed)["taken"]):
        for flags, case in zip(FLAGS, found, strict=True):
            where = f"reduce_unused={flags[0]}, all_reduce_grads={flags[1]}, rank {rank}"
            _compare_taken(case, flags[0], flags[1], where)


def _compare_taken(found: Mapping[str, Any], unused: bool, all_reduce: bool, where: str) -> None:
    names: list[str] = found["names"]
    expected = [case.name for case in CASES if _is_taken(case, unused, all_reduce)]
    for case in CASES:
        if (case.name in names) == (case.name in expected):
            continue
        if case.name in expected:
            raise Finding(
                "grad-lost", f"{where}: a parameter ({case.name}) is left out.", "taken", "left out"
            )
        misconception = "zeros-for-nothing" if case.trained else "frozen-reduced"
        raise Finding(misconception, f"{where}: a parameter ({case.name}) is reduced.", "left out", "taken")
    if names != expected:
        raise Finding("wrong-order", f"{where}: not in the order of params.", expected, names)
    if found["left"]:
        raise Finding(
            "grad-kept", f"{where}: a parameter ({found['left'][0]}) still has the gradient that was taken."
        )
    if len(found["grads"]) != len(names):
        raise Finding(
            "wrong-value", f"{where}: as many gradients as parameters.", len(names), len(found["grads"])
        )
    for name, grad in zip(names, found["grads"], strict=True):
        number = next(i for i, case in enumerate(CASES) if case.name == name)
        _compare_grad(grad, CASES[number], float(number + 1), f"{where}: a parameter ({name})")


def _is_taken(case: Case, unused: bool, all_reduce: bool) -> bool:
    there = case.grad or case.accumulated
    return there or (unused and case.gathered and case.trained) or (case.partial and all_reduce)


def _compare_grad(grad: Tensor, case: Case, value: float, where: str) -> None:
    right = value * (case.grad + 100 * case.accumulated)
    dtype = FP32 if case.accumulated else BF16
    if tuple(grad.shape) != TAKEN_SHAPE:
        raise Finding("wrong-rows", f"{where}: the gradient's shape.", TAKEN_SHAPE, tuple(grad.shape))
    if not torch.equal(grad.float(), torch.full(TAKEN_SHAPE, right)):
        raise Finding("wrong-value", f"{where}: the gradient is not what was there.", right, grad)
    if grad.dtype != dtype:
        raise Finding("wrong-dtype", f"{where}: the gradient is {grad.dtype}.", dtype, grad.dtype)


def _judge_pieces(ranks: Ranks, seed: int) -> None:
    """Rows that divide, that do not, and fewer than ranks; of all parameters and of some."""
    run = _run(ranks, seed)
    for rank, found in enumerate(run["pieces"]):
        for case, chosen in zip(found, ((0, 1, 2, 3, 4), (3, 0, 2)), strict=True):
            _compare_pieces(case, chosen, shapes_of(seed, len(run.reports)), rank, len(run.reports))


def _compare_pieces(
    found: Mapping[str, Any],
    chosen: Sequence[int],
    shapes: Sequence[tuple[int, ...]],
    rank: int,
    world_size: int,
) -> None:
    names = [name for name, _ in found["pieces"]]
    where = f"Rank {rank} of {world_size}, parameters {', '.join(str(shapes[i]) for i in chosen)}"
    if names != [f"p{i}" for i in chosen]:
        text = f"{where}: pieces belong to other parameters than those given."
        raise Finding("wrong-order", text, [f"p{i}" for i in chosen], names)
    start = 0
    for index, (_, piece) in zip(chosen, found["pieces"], strict=True):
        shape, padded = shapes[index], padded_local_numel(shapes[index], world_size)
        local = (chunk_extent(shape[0], world_size, rank).length, *shape[1:])
        numel = torch.Size(local).numel()
        right = torch.arange(1.0 + start, 1.0 + start + numel).view(local)
        text = f"{where}: the piece of {shape}"
        if tuple(piece.shape) != local:
            leaked = piece.numel() == padded
            text += f" is {tuple(piece.shape)}, expected {local}, this rank's rows."
            raise Finding("padding-leaked" if leaked else "wrong-rows", text, local, tuple(piece.shape))
        if not torch.equal(piece, right):
            text += f" begins at element {int(piece.reshape(-1)[0]) - 1} of the result, expected {start}."
            raise Finding("padding-leaked", text, right, piece)
        start += padded
    if not all(found["views"]):
        raise Finding("copied", f"{where}: pieces are copies of the result, not views.", "views", "copies")


# --- The model ---------------------------------------------------------------------------------------------


def judge_step(ranks: Ranks, seed: int) -> None:
    """One training step: counts, bytes, gradients, parameters, and whether ties hold."""
    world_size = max(2, ranks.world_size)
    run = ranks.run(probe_step, world_size, seed=seed)
    log = run.log()
    for rank in range(world_size):
        _compare_ties(run["tied"][rank], run["params"][rank], rank)
        events = log.select(rank=rank)
        for group in groups_of(Model(seed, world_size)):
            _compare_traffic([e for e in events if e.owner == group], group, seed, rank, world_size)
    _compare_numbers(run, seed)


def _compare_traffic(events: Sequence[Event], group: str, seed: int, rank: int, world_size: int) -> None:
    """Two gathers of all parameters, one reduction of those that are trained."""
    params = groups_of(Model(seed, world_size))[group]
    trained = accounting.GroupSizes([tuple(p.shape) for p in params if p.requires_grad])
    gathered = world_size * sum(
        padded_local_numel(tuple(p.shape), world_size) * p.element_size() for p in params
    )
    expected = {
        "all_gather": [gathered] * 2,
        "reduce_scatter": [trained.padded_numel(world_size) * 4],
    }
    for op, right in expected.items():
        found = [event.bytes for event in events if event.op == op]
        if found == right:
            continue
        text = f"A step, rank {rank}: {op} of {group}, {len(params)} parameters, bytes {found}; expected {right}."
        if len(found) > len(right):
            raise Finding("one-by-one", text, right, found)
        if len(found) < len(right):
            raise Finding("not-gathered" if op == "all_gather" else "not-reduced", text, right, found)
        reduced = accounting.GroupSizes([tuple(p.shape) for p in params]).padded_numel(world_size) * 4
        if op == "reduce_scatter" and found == [reduced]:
            raise Finding("frozen-reduced", text, right, found)
        more = sum(found) > sum(right)
        raise Finding("too-much-traffic" if more else "left-out", text, right, found)


def _compare_ties(tied: Sequence[bool], params: Mapping[str, Tensor], rank: int) -> None:
    one_whole, whole, one_sharded, still_whole = tied
    where = f"Rank {rank}: embed.weight and head.weight are tied"
    if still_whole or not one_sharded:
        text = f"{where}; after the step they are two parameters."
        if not torch.equal(params["embed.weight"], params["head.weight"]):
            text += " They differ."
        raise Finding("untied", text, "one parameter", "two")
    if not (one_whole and whole):
        raise Finding("untied", f"{where}; in forward they are not one whole parameter.", True, tied[:2])


def _compare_numbers(run: Run, seed: int) -> None:
    world_size = len(run.reports)
    model = Model(seed, world_size)
    for rank in range(world_size):
        (loss_of(model, seed, rank, world_size) / world_size).backward()
    for name, param in model.named_parameters(remove_duplicate=False):
        for rank in range(world_size):
            where = f"{name} on rank {rank}"
            extent = chunk_extent(param.shape[0], world_size, rank)
            grad, after = run["grads"][rank][name], run["params"][rank][name]
            before = param.detach().narrow(0, extent.start, extent.length)
            if param.grad is None:
                if grad is not None:
                    raise Finding("frozen-reduced", f"{where} is frozen, and has a gradient.", "none", grad)
                right = before
            else:
                rows = param.grad.narrow(0, extent.start, extent.length)
                _compare_rows("The gradient of " + where, grad, rows)
                right = before - RATE * rows
            _compare_rows(f"After a step, {where}", after, right)


def _compare_rows(what: str, found: Tensor | None, right: Tensor) -> None:
    if found is None:
        raise Finding("grad-lost", f"{what} is missing.", right, "none")
    if found.shape != right.shape:
        raise Finding("wrong-rows", f"{what} has another shape.", tuple(right.shape), tuple(found.shape))
    if not torch.equal(found, right):
        text = f"{what} is not that of the model without sharding, {first_difference(found, right)}."
        raise Finding("wrong-value", text, right, found)


CHECKS = (
    Check("11.modules", "a call is about the modules that no earlier call has sharded", 1, judge_modules),
    Check(
        "11.claims",
        "each of their parameters is claimed once, with all its places",
        1,
        judge_claims,
        ("11.modules",),
    ),
    Check("11.gather", "a group travels in one collective, all of it", 1, judge_gather),
    Check("11.columns", "each parameter gets its columns of the buffer, of every rank", 1, judge_columns),
    Check("11.grads", "what is reduced are the gradients there are, and each has its rows", 1, judge_grads),
    Check(
        "11.step",
        "a step is that of the model in one piece; tied weights stay tied",
        1,
        judge_step,
        ("11.modules", "11.gather", "11.columns", "11.grads"),
    ),
)
