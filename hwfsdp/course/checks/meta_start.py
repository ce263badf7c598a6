"""Checks of 13: a start without weights on 1, 2, 3 and 4 ranks, and what is the same on all of them.

Each row is drawn from a generator, and that is checked first. What every rank should hold is then known: `torch.chunk` of
the rows drawn from these. Memory is seen storage by storage, and its bound is arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from hwfsdp.course.checks import piece
from hwfsdp.course.checks.meta_start_held import HELD, Data, Held
from hwfsdp.course.checks.meta_start_runs import (
    ALIASES,
    CUTS,
    RUNS,
    SHARDED_DIM,
    Cut,
    keys,
    probe_start,
    shapes,
)
from hwfsdp.course.diagnose import first_difference
from hwfsdp.course.run import Ranks
from hwfsdp.course.verdict import Finding

ANYWHERE = ("generators", "kinds", "expected")  # what does not depend on a mesh
BUFFERS = 4 * 4  # bytes
ROWS = 3  # that may be in memory besides the shards: one, and what is copied of it


def _each(ranks: Ranks, seed: int, key: str) -> Iterator[tuple[int, int, Any]]:
    """World size, rank and what that rank reported, for all of them."""
    for processes, sizes in RUNS.items():
        run = ranks.run(probe_start, processes, seed=seed)
        for size in sizes:
            for rank, found in enumerate(run[key if key in ANYWHERE else f"{key} {size}"][:size]):
                yield size, rank, found


def _at(size: int, rank: int) -> str:
    return f"Rank {rank} of {size}"


def _piece(whole: Tensor, name: str, size: int, rank: int) -> Tensor:
    """The oracle: what torch.chunk gives the rank."""
    dim = SHARDED_DIM.get(name, 0)
    return whole if dim is None else piece(whole, size, rank, dim)


# --- Generators --------------------------------------------------------------------------------------------


def judge_generator(ranks: Ranks, seed: int) -> None:
    """The same everywhere and at any time; another one if anything that it depends on is another."""
    for size, rank, facts in _each(ranks, seed, "kinds"):
        _check_kind(_at(size, rank), facts, seed)
    first: Tensor | None = None
    for size, rank, found in _each(ranks, seed, "generators"):
        first = found if first is None else first
        if torch.equal(found, first):
            continue
        at = int((found != first).any(1).nonzero()[0])
        text = f"{_key(keys(seed)[at])} starts with {found[at, 0]} on rank {rank} of {size}, with {first[at, 0]} on rank 0 of 1."
        raise Finding("seed-per-rank", text, int(first[at, 0]), int(found[at, 0]))
    assert first is not None, "a run"
    seen: dict[tuple[int, ...], int] = {}
    for index, numbers in enumerate(first.tolist()):
        other = seen.setdefault(tuple(numbers), index)
        if other != index:
            text = f"{_key(keys(seed)[other])} and {_key(keys(seed)[index])} give the same numbers."
            raise Finding("seeds-collide", text, "other numbers", numbers[0])


def _key(key: Sequence[Any]) -> str:
    return f"row_generator({key[0]}, {key[1]!r}, {key[2]})"


def _check_kind(where: str, facts: Data, seed: int) -> None:
    if (facts["type"], facts["device"]) != ("Generator", "cpu"):
        text = f"{where}: row_generator returned a {facts['type']} on {facts['device']}."
        raise Finding("wrong-value", text, "Generator on cpu", f"{facts['type']} on {facts['device']}")
    if facts["global"]:
        text = f"{where}: after row_generator, torch's default generator has another state than before."
        raise Finding("global-generator", text, "the same state", "another state")
    if facts["same object"]:
        text = f"{where}: {_key(keys(seed)[0])} and {_key(keys(seed)[1])} are one object: who draws from one changes the other."
        raise Finding("one-sequence", text, "two generators", "one")
    for name, word in (
        ("changed", "asked a second time, in another order"),
        ("hashed", "where hash() of texts is another"),
    ):
        if facts[name]:
            text = f"{where}: {_key(keys(seed)[facts[name][0]])} gives other numbers {word}."
            raise Finding("hash-differs", text, "the same numbers", "other numbers")


# --- Weights -----------------------------------------------------------------------------------------------


def judge_weights(ranks: Ranks, seed: int) -> None:
    """What init is called with, and what parameters hold then; everything else stays as it is."""
    expected = dict[tuple[int, int], dict[str, Tensor]]()
    for size, rank, found in _each(ranks, seed, "expected"):
        expected[size, rank] = found
    for size, rank, facts in _each(ranks, seed, "start"):
        _check_names(_at(size, rank), facts)
        for name, (shape, dtype) in shapes(seed).items():
            _check_calls(
                _Row(_at(size, rank), name, shape, dtype), facts, expected[size, rank][name], size, rank
            )
        _check_rest(_at(size, rank), facts)
    for cut, facts in zip(CUTS, ranks.run(probe_start, 1, seed=seed)["cuts"][0], strict=True):
        _check_cut(cut, facts)
    for size in RUNS:
        run = ranks.run(probe_start, size, seed=seed)
        assert run["filled"] is not None, "what kept a rank from it is raised first"
        for rank, facts in enumerate(run["again"]):
            for name, whole in expected[size, rank].items():
                _check_again(_at(size, rank), name, facts, _piece(whole, name, size, rank))


def _there(where: str, tensor: Tensor | None) -> Tensor:
    """What was copied, if there was memory to copy from."""
    if tensor is None:
        text = f"{where} there is no memory, it is still on the meta device."
        raise Finding("not-allocated", text, "cpu", "meta")
    return tensor


class _Row:
    """Rows of one parameter on one rank, and what may be wrong with them."""

    def __init__(self, where: str, name: str, shape: list[int], dtype: torch.dtype) -> None:
        self.name, self.shape, self.dtype = name, shape, dtype
        self.where = f"{where}: {name}, shape {tuple(shape)},"

    def check(self, row_shape: list[int], dtype: torch.dtype, kind: str) -> None:
        """What `init` was given."""
        if row_shape != self.shape[1:]:
            text = f"{self.where} init is called with a tensor of shape {tuple(row_shape)}, expected {tuple(self.shape[1:])}."
            several = len(row_shape) == len(self.shape) and bool(self.shape)
            name = (
                "one-sequence"
                if several
                else "row-in-part" if len(row_shape) == len(self.shape) - 1 else "wrong-value"
            )
            raise Finding(name, text, self.shape[1:], row_shape)
        if dtype != self.dtype:
            text = f"{self.where} init is called with a row in {dtype}, expected {self.dtype}."
            raise Finding("drawn-in-wrong-dtype", text, str(self.dtype), str(dtype))
        if kind != "Tensor":
            raise Finding("wrong-value", f"{self.where} init is called with a {kind}.", "Tensor", kind)


def _check_names(where: str, facts: Data) -> None:
    """A tied parameter goes by the first of its names, and by no other."""
    for name, first in ALIASES.items():
        if name in facts["calls"]:
            text = f"{where}: init is called for {len(facts['calls'][name])} rows of {name}, which is {first}, the same parameter "
            text += "under another name: its rows are drawn again, from another generator."
            raise Finding("initialized-twice", text, first, name)


def _check_calls(row: _Row, facts: Data, whole: Tensor, size: int, rank: int) -> None:
    calls, local = facts["calls"].get(row.name, []), _there(row.where, facts["local"][row.name])
    piece = _piece(whole, row.name, size, rank)
    for shape, dtype, kind, _, _, _ in calls:
        row.check(shape, dtype, kind)
    wanted = (len(piece) if piece.ndim else 1) if piece.numel() else 0
    if len(calls) != wanted:
        more = len(calls) > wanted
        text = f"{row.where} init is called for {len(calls)} rows; this rank has {wanted}."
        raise Finding("rows-of-others" if more else "not-initialized", text, wanted, len(calls))
    drawn = [value for *_, value in calls]
    _check_values(row, drawn, whole, piece, [number for *_, number, _ in calls])
    if local.shape != piece.shape or not torch.equal(local, piece):
        left = local.shape == piece.shape and local.is_floating_point() and bool(local.isnan().any())
        text = f"{row.where} was drawn as it should be, but holds something else"
        text += f", {first_difference(local, piece)}." if local.shape == piece.shape else "."
        raise Finding("not-initialized" if left else "wrong-rows", text, piece, local)


def _check_values(row: _Row, drawn: list[Tensor], whole: Tensor, piece: Tensor, seeds: list[int]) -> None:
    rows = whole if whole.ndim else whole.view(1)
    at = _first_row(rows, piece)
    for number, value in enumerate(drawn):
        if torch.equal(value, rows[at + number]):
            continue
        if torch.equal(value, rows[number]):
            text = f"{row.where} the first row of this rank is {at}, and it is given the numbers of row {number}: "
            raise Finding("seed-per-rank", f"{text}the same noise on every rank.", rows[at + number], value)
        again = [other for other in range(number) if seeds[other] == seeds[number]]
        name, why = "wrong-value", "not from row_generator of the seed, this name and this number"
        if again and not torch.equal(drawn[again[0]], value):
            name, why = (
                "one-sequence",
                f"from the generator of row {at + again[0]}, which was drawn from before",
            )
        elif again:
            name, why = "seeds-collide", f"as row {at + again[0]} was, from the same seed"
        text = f"{row.where} row {at + number} is drawn {why}."
        raise Finding(name, text, rows[at + number], value)


def _first_row(rows: Tensor, piece: Tensor) -> int:
    """Which row of the whole the rank's first row is; a column of it, if the parameter is cut that way."""
    if piece.ndim != rows.ndim or piece.shape[1:] != rows.shape[1:] or not piece.numel():
        return 0
    return next(i for i, row in enumerate(rows) if torch.equal(row, piece[0]))


def _check_cut(cut: Cut, facts: Data) -> None:
    where = f"fill_part of a part of shape {cut.local} at {cut.offset} of {cut.shape}"
    local, right = facts["local"], facts["right"]
    wanted = (cut.local[0] if cut.local else 1) if right.numel() else 0
    if facts["calls"] != wanted:
        more = facts["calls"] > wanted
        text = f"{where} calls init for {facts['calls']} rows; the part has elements of {wanted}."
        raise Finding("rows-of-others" if more else "not-initialized", text, wanted, facts["calls"])
    if not torch.equal(local, right):
        text = f"{where} leaves other numbers, {first_difference(local, right)}."
        raise Finding("wrong-rows", text, right, local)


def _check_rest(where: str, facts: Data) -> None:
    if facts["global"]:
        text = f"{where}: after init_shards, torch's default generator has another state than before."
        raise Finding("global-generator", text, "the same state", "another state")
    if facts["buffer"] != [4.0] * 4:
        raise Finding("input-changed", f"{where}: init_shards wrote to a buffer.", [4.0] * 4, facts["buffer"])
    if not facts["objects"]:
        raise Finding(
            "not-registered", f"{where}: the modules have other parameters than before init_shards."
        )
    if facts["refused"] != "StateError":
        text = f"{where}: parameters were on the meta device, and init_shards raised {facts['refused']}."
        raise Finding("not-allocated", text, "StateError, by require_memory", facts["refused"])


def _check_again(where: str, name: str, facts: Data, piece: Tensor) -> None:
    local = _there(f"{where}: {name}", facts["local"][name])
    if local.shape == piece.shape and torch.equal(local, piece):
        return
    text = f"{where}: {name}, started a second time after a forward and an unshard, "
    if local.shape != piece.shape:
        text += f"has shape {tuple(local.shape)}, expected {tuple(piece.shape)}: whole parameters were filled, not shards."
        raise Finding("not-initialized", text, list(piece.shape), list(local.shape))
    text += f"is not what the seed says, {first_difference(local, piece)}"
    if name in facts["drawn"] and name in facts["as before"]:
        text += ": init was called for its rows, and they were written to the whole parameter, not to the shard, which is "
        text += "registered again now and holds what it held before."
        raise Finding("resharded-too-late", text, piece, local)
    raise Finding("not-initialized", f"{text}.", piece, local)


# --- Shards ------------------------------------------------------------------------------------------------


def judge_shard(ranks: Ranks, seed: int) -> None:
    """What `hold_rows` makes of rows that came from elsewhere, and of those that `to_empty` gave memory to."""
    for size, rank, found in _each(ranks, seed, "held"):
        for case, facts in zip(HELD, found, strict=True):
            _check_held(f"{_at(size, rank)}, {case}:", case, facts, case.given(rank, size, seed))
    for size, rank, facts in _each(ranks, seed, "emptied"):
        for name, placed in facts.items():
            _check_placed(f"{_at(size, rank)}, {name} after to_empty:", placed)


def _check_held(where: str, case: Held, facts: Data, given: Tensor) -> None:
    right = torch.zeros_like(given) if case.how == "the same" else given
    if facts["dtype"] != [right.dtype] * 2:
        text = f"{where} padded_shard and the rows are {facts['dtype']}, expected {right.dtype}."
        raise Finding("wrong-value", text, str(right.dtype), str(facts["dtype"]))
    if facts["padded shape"] != [facts["numel"]]:
        short = prod(facts["padded shape"]) < facts["numel"]
        text = f"{where} padded_shard has shape {tuple(facts['padded shape'])}, expected ({facts['numel']},)."
        raise Finding(
            "padding-dropped" if short else "wrong-value", text, [facts["numel"]], facts["padded shape"]
        )
    rows = _there(where, facts["rows"])
    if rows.shape != right.shape or not torch.equal(rows, right):
        raise Finding("wrong-rows", f"{where} the rows are not those that were given.", right, rows)
    if not facts["on host"]:
        raise Finding("wrong-device", f"{where} padded_shard is not where home.keep puts it.")
    _check_placed(where, facts)
    fits = given.numel() == facts["numel"] and given.is_contiguous() and case.how != "kept on the host"
    if not facts["untouched"] or (fits and facts["moved"]):
        text = f"{where} the rows lie as padded_shard has to, and are copied to new memory."
        raise Finding("copied-anyway", text, "the same memory", "new memory")
    if facts["kept"]:
        text = f"{where} {facts['kept']} B of memory that nobody needs any more are still alive."
        raise Finding("kept-alive", text, 0, facts["kept"])
    if not facts["leaf"]:
        raise Finding("not-registered", f"{where} the parameter is no leaf any more, or needs no gradient.")


def _check_placed(where: str, facts: Data) -> None:
    padded, own = _there(where, facts["padded"]), facts["local numel"]
    if not facts["shape"]:
        raise Finding("padding-leaked", f"{where} the local part has another shape than this rank's rows.")
    if not facts["front"]:
        text = f"{where} the local part is not the front of padded_shard's memory: an optimizer updates what no gather sends."
        raise Finding("not-a-view", text)
    if padded.numel() < facts["numel"]:
        text = f"{where} padded_shard has {padded.numel()} elements, expected {facts['numel']}."
        raise Finding("padding-dropped", text, facts["numel"], padded.numel())
    if padded[own:].ne(0).any():
        text = f"{where} {padded.numel() - own} elements of padding are {padded[own:].tolist()[:8]}, expected zeros."
        raise Finding("padding-not-zero", text, 0, padded[own:])
    nbytes = facts["numel"] * padded.element_size()
    if facts["bytes"] != nbytes:
        text = f"{where} padded_shard keeps {facts['bytes']} B alive, its own elements are {nbytes} B."
        raise Finding("kept-alive", text, nbytes, facts["bytes"])


# --- Memory and communication ------------------------------------------------------------------------------


def padded_bytes(name: str, shape: list[int], dtype: torch.dtype, size: int) -> int:
    """Of one parameter's shard."""
    dim = SHARDED_DIM.get(name, 0)
    if dim is None:
        return prod(shape) * dtype.itemsize
    return -(-shape[dim] // size) * (prod(shape) // shape[dim]) * dtype.itemsize


def judge_bytes(ranks: Ranks, seed: int) -> None:
    """Never more than the shards, and a row; nothing travels."""
    for size, rank, facts in reversed(list(_each(ranks, seed, "memory"))):
        where = _at(size, rank)
        if facts["collectives"]:
            text = f"{where}: the start runs {len(facts['collectives'])} collectives, {facts['collectives'][0]} first."
            raise Finding("too-much-traffic", text, 0, len(facts["collectives"]))
        shards = [padded_bytes(name, shape, dtype, size) for name, (shape, dtype) in shapes(seed).items()]
        row = max(prod(shape[1:]) * dtype.itemsize for shape, dtype in shapes(seed).values())
        total, whole = sum(shards) + BUFFERS, _largest_whole(seed) if size > 1 else 0
        _check_peak(f"{where}, during to_empty:", facts["to_empty"], max(shards), total + max(shards), whole)
        _check_peak(
            f"{where}, during init_shards:", facts["init_shards"], ROWS * row, total + ROWS * row, whole
        )
        for moment, nbytes in (("to_empty", facts["before"]), ("init_shards", facts["after"])):
            if nbytes > total:
                text = f"{where}: after {moment} {nbytes:,} B are alive; padded shards and buffers are {total:,} B."
                raise Finding("kept-alive", text, total, nbytes)


def _largest_whole(seed: int) -> int:
    return max(prod(shape) * dtype.itemsize for shape, dtype in shapes(seed).values())


def _check_peak(where: str, facts: list[int], one: int, most: int, whole: int) -> None:
    largest, peak = facts
    if largest > one:
        text = f"{where} {largest:,} B are allocated at once; expected {one:,} B at most"
        text += f". The largest whole parameter is {whole:,} B." if whole else "."
        raise Finding("replicated" if largest >= whole > 0 else "more-than-a-row", text, one, largest)
    if peak > most:
        text = f"{where} {peak:,} B are alive at once; shards, buffers and what they are filled from are {most:,} B."
        raise Finding("more-than-a-row" if "init" in where else "kept-alive", text, most, peak)
