"""15: copies against the values at the time of the copy, bytes allocated against a count by hand, and the order in which
things happen against the order that a snapshot needs. No clock is read: see `async_staging_saves`, Note [Races without a
clock].

Which tensors of a copy share memory, and how far they are from each other, is what they did in the source.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from hwfsdp.course.checks import piece
from hwfsdp.course.checks.async_staging_runs import (
    HOLDS,
    TURNS,
    probe_staging,
    shared_memory,
    sharded_whole,
    sizes,
    tensors,
    values_before,
)
from hwfsdp.course.checks.async_staging_saves import probe_saves
from hwfsdp.course.diagnose import first_difference
from hwfsdp.course.run import Ranks
from hwfsdp.course.verdict import Finding

ITEM = 4  # bytes of an element
SETTINGS = [0.5, [0.9, 0.99], 3, "text"]


# --- The copy ----------------------------------------------------------------------------------------------


def judge_snapshot(ranks: Ranks, seed: int) -> None:
    """Values, memory and containers of one copy, after the source has changed."""
    run = ranks.run(probe_staging, ranks.world_size, seed=seed)
    for rank, found in enumerate(run["snapshot"]):
        _compare_memory_of(rank, found, seed)
        _compare_values(rank, found, seed)
        _compare_sharded(rank, found, seed, ranks.world_size)
        _compare_settings(rank, found)
        if found["nothing"] != [0, 0]:
            message = f"rank {rank}: the copy of a tensor without elements has a storage of {found['nothing'][0]} B, expected 0."
            raise Finding("wrong-value", message, [0, 0], found["nothing"])
        if not found["tied"]:
            message = f"rank {rank}: one tensor at two paths is two tensors in the copy."
            raise Finding("untied", message, "one object", "two")


def _compare_values(rank: int, found: dict[str, Any], seed: int) -> None:
    names, before = list(tensors(seed)), values_before(seed)
    for index, (name, value) in enumerate(zip(names, before, strict=True)):
        got = found["values"][index]
        where = f"rank {rank}, the tensor {name!r}"
        if found["aliased"][index]:
            message = f"{where}: the copy has the memory of the source; when that became 77, so did the copy."
            raise Finding("snapshot-aliased", message, value, got)
        if got.shape != value.shape or got.dtype != value.dtype:
            expected, actual = f"{list(value.shape)}, {value.dtype}", f"{list(got.shape)}, {got.dtype}"
            raise Finding(
                "wrong-value", f"{where}: the copy is {actual}, expected {expected}.", expected, actual
            )
        if not torch.equal(got, value):
            message = f"{where}: the copy is not what was copied, {first_difference(got, value)}."
            raise Finding("wrong-value", message, value, got)
        if not found["plain"][index]:
            raise Finding("wrong-value", f"{where}: the copy is no plain tensor without gradient.")


def _compare_sharded(rank: int, found: dict[str, Any], seed: int, world_size: int) -> None:
    expected = piece(sharded_whole(seed), world_size, rank)
    got, (kind, placements, shape) = found["sharded"], found["sharded is"]
    where = f"rank {rank}, the DTensor"
    if kind != "DTensor" or not placements or not shape:
        message = f"{where}: the copy is a {kind}" + (
            "" if kind != "DTensor" else " of another shape or placement"
        )
        raise Finding("wrong-placement", f"{message}.", "a DTensor, placed as the source", kind)
    if found["sharded aliased"]:
        message = f"{where}: the local part of the copy has the memory of the source."
        raise Finding("snapshot-aliased", message, expected, got)
    if got.shape != expected.shape or not torch.equal(got, expected):
        raise Finding("wrong-value", f"{where}: the local part is not what was copied.", expected, got)


def _compare_settings(rank: int, found: dict[str, Any]) -> None:
    if found["settings"] != SETTINGS:
        message = (
            f"rank {rank}: lr, betas and an object of the state are {found['settings'][:3]} in the copy, after the source has "
            f"changed; expected {SETTINGS[:3]}."
        )
        raise Finding("snapshot-aliased", message, SETTINGS[:3], found["settings"][:3])
    if not found["one thing"]:
        message = f"rank {rank}: one object that two leaves of the state hold is two objects in the copy."
        raise Finding("untied", message)
    if found["kinds"] != ["dict", "dict", "list"]:
        raise Finding("wrong-value", f"rank {rank}: the containers of the copy are {found['kinds']}.")


APART = ("column, other column", "other column, column")  # of one storage, but they share no element


def _compare_memory_of(rank: int, found: dict[str, Any], seed: int) -> None:
    """Who shares memory with whom in the copy, and how far they are from each other."""
    wanted = shared_memory(tensors(seed))
    for pair in sorted({*wanted, *found["shared"]}):
        expected, got = wanted.get(pair), found["shared"].get(pair)
        if expected == got or (pair in APART and got != 0):
            continue
        if pair in APART:
            message = (
                f"rank {rank}: {pair} share no element in the source, and begin at the same byte in the copy."
            )
            raise Finding("buffer-in-use", message, "memory of their own", "0 B apart")
        if got is None:
            message = f"rank {rank}: {pair} share memory in the source, and not in the copy."
            raise Finding("untied", message, f"{expected} B apart", "memory of their own")
        if expected is None:
            message = f"rank {rank}: {pair} share memory in the copy, and not in the source."
            raise Finding("buffer-in-use", message, "memory of their own", f"{got} B apart")
        message = f"rank {rank}: {pair} begin {expected} B apart in the source, {got} B in the copy."
        raise Finding("wrong-value", message, expected, got)


# --- Buffers -----------------------------------------------------------------------------------------------


def judge_buffers(ranks: Ranks, seed: int) -> None:
    """Who lends what, from turn to turn."""
    run = ranks.run(probe_staging, ranks.world_size, seed=seed)
    for rank, twins in enumerate(run["twins"]):
        _compare_twins(rank, twins)
    for rank, turns in enumerate(run["turns"]):
        for hold in ("nothing", *HOLDS):
            _compare_turns(f"rank {rank}, {hold} of the copy before is kept", turns[hold], hold, seed)
    for rank, untold in enumerate(run["untold"]):
        if not all(untold):
            message = (
                f"rank {rank}: is_referred_to_elsewhere is None for a buffer that a copy still refers to, and it is lent to the "
                "next copy."
            )
            raise Finding("buffer-in-use", message, "memory of its own", "that of the copy before")
    for rank, bound in enumerate(run["bound"]):
        _compare_bound(rank, bound)
    for rank, (alive, counted) in enumerate(run["released"]):
        if alive or counted:
            message = (
                f"rank {rank}: copy and source are gone, and {alive:,} B of buffers are alive, {counted:,} B of them in the "
                "pools; expected 0."
            )
            raise Finding("kept-alive", message, 0, alive)


def _compare_twins(rank: int, twins: dict[str, Any]) -> None:
    where = f"rank {rank}, two parts of {twins['elements']} elements of one large tensor"
    if not all(twins["right"]):
        times = ("first", "second", "third")
        at = twins["right"].index(False)
        what = f"in the {times[at // 2]} copy" if at < 6 else "of the second copy, once the third is made"
        message = f"{where}: the values of the {('first', 'last')[at % 2]} part are wrong {what}."
        raise Finding("buffer-in-use", message)
    expected = [2 * twins["elements"] * ITEM, 0]
    _compare_allocated(where, twins["allocated"], expected)


def _compare_turns(where: str, found: dict[str, Any], hold: str, seed: int) -> None:
    elements = sizes(seed)
    again = {"nothing": 0, HOLDS[0]: sum(elements)}.get(hold, elements[1])
    if not all(found["kept"]):
        turn = found["kept"].index(False) + 1
        message = f"{where}: copy {turn} is made into memory that somebody still reads."
        raise Finding("buffer-in-use", message, "memory of its own", "that of the copy before")
    if not all(found["right"]):
        turn = found["right"].index(False) + 1
        raise Finding("wrong-value", f"{where}: the values of copy {turn} are not those of its time.")
    expected = [sum(elements) * ITEM, again * ITEM, *[0] * (TURNS - 2)]
    _compare_allocated(where, found["allocated"], expected)


def _compare_allocated(where: str, got: Sequence[int], expected: Sequence[int]) -> None:
    """Bytes allocated by copy after copy."""
    if list(got) == list(expected):
        return
    message = f"{where}: the copies allocate {list(got)} B, expected {list(expected)} B."
    late = any(a > b for a, b in zip(got[1:], expected[1:], strict=True))
    raise Finding("buffers-not-reused" if late else "wrong-value", message, list(expected), list(got))


def _compare_bound(rank: int, bound: dict[str, Any]) -> None:
    one, (full, after) = bound["one"], bound["kept"]
    where = f"rank {rank}: after six copies of {one:,} B at a time, and one more when these were dropped"
    if full != 6 * one:
        message = f"rank {rank}: six copies of {one:,} B are held, and the stager keeps {full:,} B."
        raise Finding("buffers-not-reused" if full < 6 * one else "kept-alive", message, 6 * one, full)
    if after > 2 * one:
        message = f"{where}, {after:,} B are kept; expected {2 * one:,} B: what is lent, and as much again."
        raise Finding("kept-alive", message, 2 * one, after)
    if after < 2 * one or bound["allocated"]:
        message = f"{where}, {after:,} B are kept, and the next copy allocates {bound['allocated']:,} B."
        raise Finding("buffers-not-reused", message, 2 * one, after)


# --- In the background -------------------------------------------------------------------------------------


def judge_background(ranks: Ranks, seed: int) -> None:
    """What training waits for, in which order, and what the saves hold."""
    run = ranks.run(probe_saves, ranks.world_size, seed=seed)
    for rank, found in enumerate(run["saves"]):
        for turn in (1, 2, 3):
            _compare_order(f"rank {rank}, save {turn}", turn, found["notes"])
        for turn, loaded in enumerate(found["loaded"], 1):
            _compare_loaded(f"rank {rank}, save {turn}", turn, loaded, found["nbytes"] > 0)
        for save_id in found["ids"]:
            if not isinstance(save_id, str) or not re.fullmatch(r"\d{6}-[0-9a-f]{8}", save_id):
                message = f"rank {rank}: wait returns {save_id!r}, expected the id of the save."
                raise Finding("wrong-value", message, "000001-…", repr(save_id))
    for rank, found in enumerate(run["saves"]):
        _compare_memory(rank, found)


def _compare_order(where: str, turn: int, notes: list[list[Any]]) -> None:
    """What happened between the call of `async_save` and its return. A note: what, in the main thread?, of what."""
    begin, end = notes.index(["call", True, str(turn)]), notes.index(["returned", True, str(turn)])
    during = notes[begin + 1 : end]
    own = [note for note in during if note[0] in ("waits", "write") and note[1] and _is_of(note, turn)]
    if own:
        what = "writes the file itself" if own[0][0] == "write" else "waits for the thread of the save"
        message = f"{where}: async_save {what} before it returns."
        raise Finding("waits-for-write", message, "a return when the copy is made", what)
    copies = [index for index, note in enumerate(during) if note[0] == "stage"]
    if not copies and any(note[0] == "stage" and not note[1] for note in notes[begin:]):
        message = f"{where}: async_save has returned before the copy is made, which the thread does."
        raise Finding("staged-in-background", message, "a copy before the return", "none")
    waits = [index for index, note in enumerate(during) if note[0] == "waits"]
    if turn > 1 and (not waits or (copies and waits[0] > copies[0])):
        how = "is not waited for" if not waits else "is waited for after the copy is made"
        message = f"{where}: save {turn - 1} is still under way, and {how}."
        raise Finding("saves-overlap", message, "the end of the save before, then the copy", how)


def _is_of(note: list[Any], turn: int) -> bool:
    """Whether it is about the save of this turn, by the name of thread or folder; or of nobody that we know."""
    other = re.fullmatch(r"(?:save into .*/)?(\d)", str(note[2]))
    return other is None or int(other[1]) == turn


def _compare_loaded(where: str, turn: int, loaded: Any, has_elements: bool) -> None:
    if isinstance(loaded, str):
        raise Finding("not-committed", f"{where}: when it was waited for, it cannot be loaded: {loaded}.")
    values, lr = loaded
    wrong = sorted({value for of_tensor in values for value in of_tensor} - {float(turn)})
    if wrong or lr != float(turn):
        got = wrong[0] if wrong else lr
        later = "values of a later step" if got > turn else "other values"
        message = f"{where}: it holds {later}: {got:g}, where {turn} was saved."
        raise Finding("snapshot-aliased" if got > turn else "wrong-value", message, turn, got)


def _compare_memory(rank: int, found: dict[str, Any]) -> None:
    first, *more = found["allocated"]
    if not any(more):
        return
    stagers = {note[2] for note in found["notes"] if note[0] == "stage"}
    message = f"rank {rank}: three saves, one after the other, allocate {[first, *more]} B for copies, expected {[first, 0, 0]} B"
    if len(stagers) != 1:
        raise Finding("buffers-not-reused", f"{message}; {len(stagers)} stagers are used.", 0, max(more))
    message += ": whoever has kept the handles keeps the buffers as well."
    raise Finding("kept-alive", message, 0, max(more))


# --- Errors ------------------------------------------------------------------------------------------------

TAKEN = "expected no checkpoint"


def judge_errors(ranks: Ranks, seed: int) -> None:
    """Who hears of a save that has failed: who waits, each time; else the next save, once."""
    run = ranks.run(probe_saves, ranks.world_size, seed=seed)
    for rank, found in enumerate(run["errors"]):
        for time, got in zip(("first", "second"), found["a target that is there"], strict=True):
            where = f"rank {rank}: a save to a place that is taken, wait for the {time} time"
            _expect_error(where, got, TAKEN)
        if found["kept by the handle"] != "NoneType":
            message = f"rank {rank}: a save has failed, and its handle still refers to the copy: _state_dict is a {found['kept by the handle']}."
            raise Finding("kept-alive", message, "None", found["kept by the handle"])
        _expect_none(
            f"rank {rank}: the save after one whose error wait has raised", found["after it was heard"][0]
        )
        _expect_error(
            f"rank {rank}: the save after one that has failed, unheard", found["nobody waits"][0], TAKEN
        )
        _expect_none(f"rank {rank}: the save after one that has raised that error", found["after that"][0])
        at_once, *waited = found["a copy that cannot be made"]
        where = f"rank {rank}: a state with a tensor on the meta device"
        if at_once is not None:
            message = f"{where}: async_save raises at once: {at_once}"
            raise Finding("raised-alone", message, "a handle whose wait raises", "an error at once")
        _expect_error(f"{where}, wait", waited[0], "'broken'")
        [got] = found["a save that is ended"]
        _expect_error(f"rank {rank}: save_agreed raises what is no Exception, wait", got, "signal", "Ended")
        _expect_none(f"rank {rank}: finish_saves, when every error was heard", found["at the end"][0])


def _expect_error(where: str, got: str | None, part: str, kind: str = "UsageError") -> None:
    if got is None:
        raise Finding("error-swallowed", f"{where}: nothing is raised.", kind, "nothing")
    if not got.startswith(kind) or part not in got:
        raise Finding("error-swallowed", f"{where}: it raises {got}, and not why the save failed.", part, got)


def _expect_none(where: str, got: str | None) -> None:
    if got is not None:
        raise Finding("raised-again", f"{where}: it raises {got}", "no error", got)
