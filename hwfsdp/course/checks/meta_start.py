"""Checks of 13: a start without weights on 1, 2, 3 and 4 ranks, and what is the same on all of them.

Each row is drawn from a generator, and the generators are checked first. The expected rows of every rank are then
`torch.chunk` of the rows that these generators draw. Memory is watched storage by storage, and its bound is arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from hwfsdp.course.checks import piece
from hwfsdp.course.checks.meta_start_held import HELD, Data, Held
from hwfsdp.course.checks.meta_start_runs import ALIASES, CUTS, RUNS, SHARDED_DIM, keys, probe_start, shapes
from hwfsdp.course.findings import compare, expect, is_same, told
from hwfsdp.course.run import Ranks

ANYWHERE = ("generators", "kinds", "expected")  # reports that do not depend on a mesh
BUFFERS = 4 * 4  # bytes
ROWS = 3  # rows that may be in memory besides the shards: one row and its copies


def _each(ranks: Ranks, seed: int, key: str) -> Iterator[tuple[int, int, Any]]:
    """Yield (world size, rank, the report of that rank) for all world sizes and ranks."""
    for processes, sizes in RUNS.items():
        run = ranks.run(probe_start, processes, seed=seed)
        for size in sizes:
            for rank, found in enumerate(run[key if key in ANYWHERE else f"{key} {size}"][:size]):
                yield size, rank, found


def _piece(whole: Tensor, name: str, size: int, rank: int) -> Tensor:
    """The oracle: the rank's part by `torch.chunk`."""
    dim = SHARDED_DIM.get(name, 0)
    return whole if dim is None else piece(whole, size, rank, dim)


# --- Generators --------------------------------------------------------------------------------------------


def judge_generator(ranks: Ranks, seed: int) -> None:
    """Check that a generator is the same everywhere and at any time, and differs if seed, name or row differ."""
    names = [f"row_generator({key[0]}, {key[1]!r}, {key[2]})" for key in keys(seed)]
    for size, rank, facts in _each(ranks, seed, "kinds"):
        where = f"Rank {rank} of {size}:"
        expect("13.kind", where, facts["kind"], "Generator on cpu")
        expect("13.global", f"{where} after row_generator,", facts["global"], False)
        expect("13.same_object", where, facts["same object"], False, first=names[0], second=names[1])
        for name, indices in (("13.repeated", facts["changed"]), ("13.hashed", facts["hashed"])):
            if indices:
                raise told(name, where, "other numbers", "the same numbers", key=names[indices[0]])
    by_rank = list(_each(ranks, seed, "generators"))
    first = by_rank[0][2].tolist()
    for size, rank, found in by_rank:
        for name, got, right in zip(names, found.tolist(), first, strict=True):
            if got != right:
                raise told("13.elsewhere", f"Rank {rank} of {size}: {name}", got[0], right[0])
    seen: dict[tuple[int, ...], str] = {}
    for name, numbers in zip(names, map(tuple, first), strict=True):
        if seen.setdefault(numbers, name) != name:
            raise told("13.collides", seen[numbers], numbers[0], "other numbers", other=name)


# --- Weights -----------------------------------------------------------------------------------------------


def judge_weights(ranks: Ranks, seed: int) -> None:
    """Check what init is called with, what parameters then hold, and that everything else stays as it is."""
    expected = {(size, rank): found for size, rank, found in _each(ranks, seed, "expected")}
    for size, rank, facts in _each(ranks, seed, "start"):
        where = f"Rank {rank} of {size}:"
        # a tied parameter is filled under the first of its names, and under no other name
        for name, first in ALIASES.items():
            if name in facts["calls"]:
                raise told("13.alias", where, len(facts["calls"][name]), first, name=name)
        for name, (shape, dtype) in shapes(seed).items():
            whole = expected[size, rank][name]
            at = f"{where} {name}, shape {tuple(shape)},"
            _check_calls(at, facts["calls"].get(name, []), whole, _piece(whole, name, size, rank), dtype)
            _check_kept(at, facts["local"][name], _piece(whole, name, size, rank))
        compare(f"{where} after init_shards,", facts, {"13.global": False})
        compare(where, facts, {"13.buffer": [4.0] * 4, "13.objects": True, "13.refused": "StateError"})
    for cut, facts in zip(CUTS, ranks.run(probe_start, 1, seed=seed)["cuts"][0], strict=True):
        where = f"fill_part of a part of shape {cut.local} at {cut.offset} of {cut.shape}"
        expect("13.part_calls", where, facts["calls"], _row_count(facts["right"]))
        expect("13.part", where, facts["local"], facts["right"])
    for size in RUNS:
        run = ranks.run(probe_start, size, seed=seed)
        for rank, facts in enumerate(run["again"]):
            for name, whole in expected[size, rank].items():
                where = f"Rank {rank} of {size}: {name}"
                _check_again(where, name, facts, _piece(whole, name, size, rank))


def _row_count(part: Tensor) -> int:
    """Return the number of rows of a part for which init is called."""
    return (len(part) if part.ndim else 1) if part.numel() else 0


def _there(where: str, tensor: Tensor | None) -> Tensor:
    """Return the copied tensor. Raise a Finding if there was no memory to copy from."""
    if tensor is None:
        raise told("13.no_memory", where, "meta", "cpu")
    return tensor


def _check_calls(where: str, calls: Sequence[Any], whole: Tensor, piece: Tensor, dtype: torch.dtype) -> None:
    """Check what `init` gets for each row, and what it draws. A call is [shape, dtype, class, seed, values]."""
    row_shape = list(whole.shape[1:])
    for shape, of, kind, *_ in calls:
        if shape != row_shape:
            several = whole.ndim > 0 and len(shape) == whole.ndim
            part = "part_of_row" if len(shape) == whole.ndim - 1 else "row_shape"
            raise told("13.several_rows" if several else f"13.{part}", where, shape, row_shape)
        expect("13.row_dtype", where, of, dtype)
        expect("13.row_kind", where, kind, "Tensor")
    expect("13.calls", where, len(calls), _row_count(piece))
    rows = whole if whole.ndim else whole.view(1)
    first = _first_row(rows, piece)
    for number, (*_, seed, value) in enumerate(calls):
        right, row = rows[first + number], first + number
        if torch.equal(value, right):
            continue
        if torch.equal(value, rows[number]):
            raise told("13.same_noise", where, value, right, first=first, number=number)
        for other, (*_, same, earlier) in enumerate(calls[:number]):
            if same == seed:
                name = "13.same_seed" if torch.equal(earlier, value) else "13.drawn_before"
                raise told(name, where, value, right, row=row, other=first + other)
        raise told("13.drawn", where, value, right, row=row)


def _check_kept(where: str, local: Tensor | None, piece: Tensor) -> None:
    local = _there(where, local)
    if not is_same(local, piece):
        left = local.shape == piece.shape and local.is_floating_point() and bool(local.isnan().any())
        raise told("13.left_out" if left else "13.elsewhere_kept", where, local, piece)


def _first_row(rows: Tensor, piece: Tensor) -> int:
    """Return the index in the whole tensor of the rank's first row; 0 if the part has no whole rows."""
    if piece.ndim != rows.ndim or piece.shape[1:] != rows.shape[1:] or not piece.numel():
        return 0
    return next(i for i, row in enumerate(rows) if torch.equal(row, piece[0]))


def _check_again(where: str, name: str, facts: Data, piece: Tensor) -> None:
    local = _there(where, facts["local"][name])
    expect("13.again_whole", where, list(local.shape), list(piece.shape))
    late = name in facts["drawn"] and name in facts["as before"]
    if not torch.equal(local, piece):
        raise told("13.again_late" if late else "13.again", where, local, piece)


# --- Shards ------------------------------------------------------------------------------------------------


def judge_shard(ranks: Ranks, seed: int) -> None:
    """Check `hold_rows` with new rows, and with rows that got their memory from `to_empty`."""
    for size, rank, found in _each(ranks, seed, "held"):
        for case, facts in zip(HELD, found, strict=True):
            _check_held(f"Rank {rank} of {size}, {case}:", case, facts, case.given(rank, size, seed))
    for size, rank, facts in _each(ranks, seed, "emptied"):
        for name, placed in facts.items():
            _check_placed(f"Rank {rank} of {size}, {name} after to_empty:", placed)


def _check_held(where: str, case: Held, facts: Data, given: Tensor) -> None:
    right = torch.zeros_like(given) if case.how == "the same" else given
    compare(where, facts, {"13.dtype": [right.dtype] * 2})
    if prod(facts["padded_shape"]) < facts["numel"]:
        raise told("13.short", where, prod(facts["padded_shape"]), facts["numel"])
    compare(where, facts, {"13.padded_shape": [facts["numel"]]})
    _there(where, facts["rows"])
    compare(where, facts, {"13.rows": right, "13.on_host": True})
    _check_placed(where, facts)
    fits = given.numel() == facts["numel"] and given.is_contiguous() and case.how != "kept on the host"
    expect("13.copied", where, not facts["untouched"] or (fits and facts["moved"]), False)
    compare(where, facts, {"13.kept": 0, "13.leaf": True})


def _check_placed(where: str, facts: Data) -> None:
    padded, numel = _there(where, facts["padded"]), facts["numel"]
    compare(where, facts, {"13.shape": True, "13.front": True})
    if padded.numel() < numel:
        raise told("13.short", where, padded.numel(), numel)
    padding = padded[facts["local numel"] :]
    if padding.any():
        raise told("13.padding", where, padding.tolist()[:8], 0)
    expect("13.bytes", where, facts["bytes"], numel * padded.element_size())


# --- Memory and communication ------------------------------------------------------------------------------


def padded_bytes(name: str, shape: list[int], dtype: torch.dtype, size: int) -> int:
    """Return the bytes of one parameter's padded shard."""
    dim = SHARDED_DIM.get(name, 0)
    if dim is None:
        return prod(shape) * dtype.itemsize
    return -(-shape[dim] // size) * (prod(shape) // shape[dim]) * dtype.itemsize


def judge_bytes(ranks: Ranks, seed: int) -> None:
    """Check that memory never exceeds the shards and a row, and that nothing is communicated."""
    params = shapes(seed)
    row = ROWS * max(prod(shape[1:]) * dtype.itemsize for shape, dtype in params.values())
    whole = max(prod(shape) * dtype.itemsize for shape, dtype in params.values())
    for size, rank, facts in reversed(list(_each(ranks, seed, "memory"))):
        where = f"Rank {rank} of {size}"
        expect("13.collectives", f"{where}:", facts["collectives"], [])
        shards = [padded_bytes(name, shape, dtype, size) for name, (shape, dtype) in params.items()]
        total, most = sum(shards) + BUFFERS, max(shards)
        for moment, one, peak in (("to_empty", most, "peak"), ("init_shards", row, "rows_kept")):
            largest, alive = facts[moment]
            if largest > one:
                name = "13.whole_allocated" if size > 1 and largest >= whole else "13.much_allocated"
                raise told(name, f"{where}, during {moment}:", largest, one, whole=whole)
            if alive > total + one:
                raise told(f"13.{peak}", f"{where}, during {moment}:", alive, total + one)
        for moment, nbytes in (("to_empty", facts["before"]), ("init_shards", facts["after"])):
            if nbytes > total:
                raise told("13.alive_after", f"{where}, after {moment}:", nbytes, total)
