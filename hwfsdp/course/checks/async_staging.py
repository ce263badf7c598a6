"""15: copies against the values at the time of the copy, allocated bytes against a count by hand, and the order of events
against the order that a snapshot needs. No clock is read: see `async_staging_saves`, Note [Races without a clock].

Tensors of a copy must share memory exactly as they did in the source, at the same distance from each other.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from hwfsdp.course.checks import piece
from hwfsdp.course.checks.async_staging_runs import HOLDS, TURNS, probe_staging, shared_memory
from hwfsdp.course.checks.async_staging_runs import sharded_whole, sizes, tensors, values_before
from hwfsdp.course.checks.async_staging_saves import probe_saves
from hwfsdp.course.findings import compare, expect, told
from hwfsdp.course.run import Ranks

ITEM = 4  # bytes of one element
SETTINGS = [0.5, [0.9, 0.99], 3, "text"]


# --- The copy ----------------------------------------------------------------------------------------------


def judge_snapshot(ranks: Ranks, seed: int) -> None:
    """Check values, memory and containers of one copy, after everything in the source has changed."""
    run = ranks.run(probe_staging, ranks.world_size, seed=seed)
    for rank, found in enumerate(run["snapshot"]):
        where = f"rank {rank}"
        _compare_memory_of(where, found, seed)
        _compare_values(where, found, seed)
        _compare_sharded(f"{where}, the DTensor:", found, rank, seed, ranks.world_size)
        right = {"15.settings": SETTINGS, "15.one_thing": True, "15.kinds": ["dict", "dict", "list"]}
        compare(f"{where}:", found, {**right, "15.storage": [0, 0], "15.tied": True})


def _compare_values(where: str, found: dict[str, Any], seed: int) -> None:
    for name, value in zip(tensors(seed), values_before(seed), strict=True):
        facts, form = found["tensors"][name], f"{list(value.shape)}, {value.dtype}"
        facts["form"] = f"{list(facts['values'].shape)}, {facts['values'].dtype}"
        right = {"15.aliased": False, "15.form": form, "15.values": value, "15.plain": True}
        compare(f"{where}, the tensor {name!r}:", facts, right)


def _compare_sharded(where: str, found: dict[str, Any], rank: int, seed: int, world_size: int) -> None:
    right = {"15.is_dtensor": "DTensor", "15.sharded_aliased": False}
    compare(where, found, {**right, "15.sharded": piece(sharded_whole(seed), world_size, rank)})


APART = ("column, other column", "other column, column")  # same storage, but no common element


def _compare_memory_of(where: str, found: dict[str, Any], seed: int) -> None:
    """Compare which tensors of the copy share memory, and their distances in bytes, with the source."""
    wanted = shared_memory(tensors(seed))
    for pair in sorted({*wanted, *found["shared"]}):
        expected, got = wanted.get(pair), found["shared"].get(pair)
        if expected == got or (pair in APART and got != 0):
            continue
        name = "begins_together" if pair in APART else "apart" if got is None else "distance"
        name = "together" if expected is None else name
        raise told(f"15.{name}", f"{where}: {pair}", got, expected)


# --- Buffers -----------------------------------------------------------------------------------------------


def judge_buffers(ranks: Ranks, seed: int) -> None:
    """Check which memory the stager reuses from turn to turn."""
    run = ranks.run(probe_staging, ranks.world_size, seed=seed)
    for rank, twins in enumerate(run["twins"]):
        _compare_twins(rank, twins)
    for rank, turns in enumerate(run["turns"]):
        for hold in HOLDS:
            _compare_turns(f"rank {rank}, {hold} of the copy before is kept:", turns[hold], hold, seed)
    for rank, (elements, allocated) in enumerate(run["blocks"]):
        where = f"rank {rank}, parts of {elements[0]} and {elements[1]} elements of one large tensor, each copy dropped before the next:"
        _compare_allocated(where, allocated, [sum(elements) * ITEM, 0, 0])
    for rank, untold in enumerate(run["untold"]):
        if not all(untold):
            raise told("15.untold", f"rank {rank}:", "the memory of the copy before", "memory of its own")
    for rank, bound in enumerate(run["bound"]):
        _compare_bound(rank, bound)
    for rank, released in enumerate(run["released"]):
        expect("15.released", f"rank {rank}:", released, [0, 0])


def _compare_twins(rank: int, twins: dict[str, Any]) -> None:
    where = f"rank {rank}, two parts of {twins['elements']} elements of one large tensor:"
    if not all(twins["right"]):
        times = ("first", "second", "third")
        at = twins["right"].index(False)
        what = f"in the {times[at // 2]} copy" if at < 6 else "of the second copy, once the third is made"
        raise told("15.twins", where, part=("first", "last")[at % 2], what=what)
    _compare_allocated(where, twins["allocated"], [2 * twins["elements"] * ITEM, 0])


def _compare_turns(where: str, found: dict[str, Any], hold: str, seed: int) -> None:
    elements = sizes(seed)
    again = {"nothing": 0, "the dict": sum(elements)}.get(hold, elements[1])
    for name, facts in (("15.held_changed", found["kept"]), ("15.turn_wrong", found["right"])):
        if not all(facts):
            raise told(name, where, turn=facts.index(False) + 1)
    _compare_allocated(where, found["allocated"], [sum(elements) * ITEM, again * ITEM, *[0] * (TURNS - 2)])


def _compare_allocated(where: str, got: Sequence[int], expected: Sequence[int]) -> None:
    """Compare the bytes that each copy allocates."""
    if got != expected:
        late = any(a > b for a, b in zip(got[1:], expected[1:], strict=True))
        raise told("15.allocated_late" if late else "15.allocated", where, got, expected)


def _compare_bound(rank: int, bound: dict[str, Any]) -> None:
    one, (full, after) = bound["one"], bound["kept"]
    where = f"rank {rank}: after six copies of {one:,} B at a time, and one more when these were dropped,"
    expect("15.six_held", f"rank {rank}:", full, 6 * one, one=one)
    if after > 2 * one:
        raise told("15.unbounded", where, after, 2 * one)
    if after < 2 * one or bound["allocated"]:
        raise told("15.too_few", where, after, 2 * one, allocated=bound["allocated"])


# --- In the background -------------------------------------------------------------------------------------


def judge_background(ranks: Ranks, seed: int) -> None:
    """Check what training waits for, in which order, and what the saves contain."""
    run = ranks.run(probe_saves, ranks.world_size, seed=seed)
    for rank, found in enumerate(run["saves"]):
        for turn in (1, 2, 3):
            _compare_order(f"rank {rank}, save {turn}:", turn, found["notes"])
        for turn, loaded in enumerate(found["loaded"], 1):
            _compare_loaded(f"rank {rank}, save {turn}:", turn, loaded)
        for save_id in found["ids"]:
            if not isinstance(save_id, str) or not re.fullmatch(r"\d{6}-[0-9a-f]{8}", save_id):
                raise told("15.id", f"rank {rank}:", repr(save_id), "000001-…")
    for rank, found in enumerate(run["saves"]):
        first, *more = found["allocated"]
        if any(more):
            stagers = {note[2] for note in found["notes"] if note[0] == "stage"}
            name = "15.handles" if len(stagers) == 1 else "15.stagers"
            raise told(name, f"rank {rank}:", [first, *more], [first, 0, 0], stagers=len(stagers))


def _compare_order(where: str, turn: int, notes: list[list[Any]]) -> None:
    """Check the events between the call of `async_save` and its return. A note is [what, in the main thread?, of what]."""
    begin, end = notes.index(["call", True, str(turn)]), notes.index(["returned", True, str(turn)])
    during = notes[begin + 1 : end]
    for what, is_main, of in during:
        if what in ("waits", "write") and is_main and _is_of(of, turn):
            how = "writes the file itself" if what == "write" else "waits for the thread of the save"
            raise told("15.waits", where, how, "a return when the copy is made")
    copies = [index for index, note in enumerate(during) if note[0] == "stage"]
    if not copies and any(note[0] == "stage" and not note[1] for note in notes[begin:]):
        raise told("15.staged_later", where, "none", "a copy before the return")
    waits = [index for index, note in enumerate(during) if note[0] == "waits"]
    if turn > 1 and (not waits or (copies and waits[0] > copies[0])):
        how = "does not wait for it" if not waits else "waits for it only after the copy is made"
        raise told("15.overlap", where, how, "the end of the save before, then the copy", before=turn - 1)


def _is_of(name: object, turn: int) -> bool:
    """True if a thread or folder belongs to this turn by its name, or to no turn."""
    other = re.fullmatch(r"(?:save into .*/)?(\d)", str(name))
    return other is None or int(other[1]) == turn


def _compare_loaded(where: str, turn: int, loaded: Any) -> None:
    if isinstance(loaded, str):
        raise told("15.not_loaded", where, loaded)
    values, lr = loaded
    for got in sorted({value for of_tensor in values for value in of_tensor}) + [lr]:
        if got != turn:
            raise told("15.later" if got > turn else "15.loaded", where, got, turn)


# --- Errors ------------------------------------------------------------------------------------------------

TAKEN = "expected no checkpoint"


def judge_errors(ranks: Ranks, seed: int) -> None:
    """Check who receives the error of a failed save: every `wait` of its handle, or, if nobody waits, the next save, once."""
    run = ranks.run(probe_saves, ranks.world_size, seed=seed)
    for rank, found in enumerate(run["errors"]):
        where = f"rank {rank}:"
        for time, got in zip(("first", "second"), found["a target that is there"], strict=True):
            _expect_error(f"{where} a save to a place that is taken, wait for the {time} time:", got, TAKEN)
        expect("15.copy_kept", where, found["kept by the handle"], "NoneType")
        then = f"{where} a save has failed"
        _expect_none(f"{then}, and wait has raised its error. The next save:", found["after it was heard"])
        _expect_error(f"{then}, and nobody has called wait. The next save:", found["nobody waits"], TAKEN)
        _expect_none(
            f"{then}, and the next save has raised its error. The save after it:", found["after that"]
        )
        at_once, *waited = found["a copy that cannot be made"]
        broken = f"{where} a state with a tensor on the meta device:"
        expect("15.at_once", broken, at_once, None)
        _expect_error(f"{broken} wait:", waited[0], "'broken'")
        ended = f"{where} save_agreed raises an error that is no Exception, such as SystemExit. wait:"
        _expect_error(ended, found["a save that is ended"], "signal", "Ended")
        _expect_none(f"{where} finish_saves, when every error was heard:", found["at the end"])


def _expect_error(where: str, got: str | None, part: str, kind: str = "UsageError") -> None:
    if got is None:
        raise told("15.silent", where, "nothing", kind)
    if not got.startswith(kind) or part not in got:
        raise told("15.other_error", where, got, f"{kind}: … {part} …")


def _expect_none(where: str, got: str | None) -> None:
    if got is not None:
        raise told("15.again", where, got, "no error")
