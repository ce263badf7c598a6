"""15 Asynchronous staging: what must hold.

Your file has a class `Saver`. The tests give it a function `write`, which notes what it gets instead of writing it:

    saver = Saver(write)
    handle = saver.save(state)     returns when the values are copied; `write(copy)` runs in another thread
    handle.wait()                  returns when `write` has returned, or raises its error

There is no clock: `write` is held back until the call has returned and every tensor of the state has another value, and so are all
threads that the call starts (`facts.Stage`).

    pytest exercises/15_async_staging -k snapshot     one test
"""

import facts_async_staging as facts
import pytest
import torch

from hwfsdp.course.findings import Finding
from hwfsdp.course.laws import equal

pytestmark = pytest.mark.exercise(
    "15", title="Asynchronous staging", file="async_staging.py", may="threading concurrent"
)

SAVES = (1, 2, 3)


def saved(ranks, seed):
    """Return what each rank reports of three saves, with its number. Each save calls `write` once, and no two calls overlap."""
    by_rank = list(enumerate(ranks(2).ask(facts.probe_saves, "saves", seed=seed)))
    for rank, found in by_rank:
        if (count := min(len(found["seen"]), len(found["staged"]))) < len(SAVES):
            waited_for_writes(found, f"Rank {rank} of 2:")  # a write that nobody waits for may still come
            where = f"Rank {rank} of 2: `write` got a whole copy {count} times in {len(SAVES)} saves."
            raise Finding("wrong-value", where, len(SAVES), count)
        order = order_of(found["notes"])
        for turn in SAVES[1:]:
            if order[f"write {turn}"] < order[f"written {turn - 1}"]:
                where = f"Rank {rank} of 2: the write of save {turn} begins while that of save {turn - 1} still writes."
                raise Finding("saves-overlap", where)
    return by_rank


def in_background(found, where):
    """`save` returns before `write` has ended; the next save begins after that; `wait` returns when it has."""
    notes, order = found["notes"], order_of(found["notes"])
    for turn in SAVES:
        if f"waits {turn}" in order and order[f"waits {turn}"] < order[f"returns {turn}"]:
            raise Finding("waits-for-write", f"{where} call {turn} of save waits for its own write.")
    waited_for_writes(found, where)
    for turn in SAVES[1:]:
        if order[f"returns {turn}"] < order[f"written {turn - 1}"]:
            words = f"{where} save {turn} has returned while save {turn - 1} still writes."
            raise Finding("saves-overlap", words)
    writes = sum(note.startswith("write ") for note in notes)
    equal("saves-overlap", f"{where} calls of write", writes, len(SAVES))


def waited_for_writes(found, where):
    order = order_of(found["notes"])
    for turn in SAVES:
        if f"written {turn}" not in order or order[f"waited {turn}"] < order[f"written {turn}"]:
            raise Finding("error-swallowed", f"{where} wait of save {turn} returns before write has ended.")


def order_of(notes):
    return {note: place for place, note in reversed(list(enumerate(notes)))}


@pytest.mark.points(1, ask="Which part of a save must be over before the next step may change anything?")
def test_snapshot(ranks, seed):
    """`save` returns before `write` has ended. `write` gets the values that the state had when `save` was called; tied tensors stay tied."""
    for rank, found in saved(ranks, seed):
        in_background(found, f"Rank {rank} of 2:")
        for turn in SAVES:
            where = f"Rank {rank} of 2, save {turn}:"
            shared = set(found["source"]) & set(found["staged"][turn - 1])
            for path, right in found["rights"][turn - 1].items():
                got = found["seen"][turn - 1].get(path, {"kind": "nothing", "values": None, "place": []})
                equal(
                    "wrong-placement" if right["kind"][:7] == "DTensor" else "wrong-value",
                    f"{where} {path} is",
                    got["kind"],
                    right["kind"],
                )
                if not same(got["values"], right["values"]):
                    kind = "snapshot-aliased" if shared else "wrong-value"
                    words = f"{where} {path} has other values than the state had when save was called."
                    raise Finding(kind, words, right["values"], got["values"])
            if shared:
                words = "a tensor of the copy has the memory of the state."
                raise Finding("snapshot-aliased", f"{where} {words}")
            places = {path: got["place"] for path, got in found["seen"][turn - 1].items()}
            for path, right in found["rights"][turn - 1].items():
                if right["place"] and right["place"][0] == path != places[path][0]:
                    raise Finding("buffer-in-use", f"{where} {path} has the memory of {places[path][0]}.")
                words = "the first tensor in its memory, the distance in bytes, and the strides are"
                equal("untied", f"{where} {path}: {words}", places[path], right["place"])


@pytest.mark.points(1, ask="What still refers to this buffer?")
def test_buffers(ranks, seed):
    """Memory for a copy is allocated by the first save only, and what nobody needs is released."""
    for rank, found in saved(ranks, seed):
        where = f"Rank {rank} of 2:"
        first, *others = found["staged"]
        used = sum(first.values())
        if used > found["nbytes"]:
            raise Finding(
                "untied",
                f"{where} a copy takes {used:,} B, the state has {found['nbytes']:,} B.",
                found["nbytes"],
                used,
            )
        for turn, (staged, allocated) in enumerate(zip(others, found["allocated"][1:]), 2):
            new = max(allocated, sum(n for address, n in staged.items() if address not in first))
            equal("buffers-not-reused", f"{where} save {turn} allocates bytes:", new, 0)
        for what, words in (
            ("kept source", "all saves have ended, and the state is deleted, but bytes of it are alive:"),
            ("kept by handles", "the saver is deleted, but bytes of copies are alive:"),
        ):
            equal("kept-alive", f"{where} {words}", found[what], 0)
        small = "after a save of 12 B, bytes of copies that are alive:"
        if found["kept buffers"] > 12:
            raise Finding(
                "kept-alive", f"{where} {small} {found['kept buffers']:,}.", 12, found["kept buffers"]
            )


@pytest.mark.points(1, ask="Which code waits for this save, and which code has seen its failure?")
def test_errors(ranks, seed):
    """`wait` raises what `write` raised, of any kind, in each call. If nobody waits, the next save raises it, once, and begins nothing."""
    for rank, found in enumerate(ranks(2).ask(facts.probe_errors, "errors", seed=seed)):
        for what, right, words in (
            ("wait", "ValueError: disk 1", "write raises; wait raises"),
            ("wait again", "ValueError: disk 1", "write raises; the second call of wait raises"),
            ("save after wait", "", "the error was raised by wait; the next save raises"),
            ("next save", "OSError: disk 3", "write raises, and nobody waits; the next save raises"),
            ("writes", 3, "the next save has raised the error; calls of write:"),
            ("save after that", "", "the error was raised by a save; the save after it raises"),
            ("wait, no Exception", "Ended: disk 5", "write raises a BaseException; wait raises"),
            ("copy", "ValueError: no copy", "the state cannot be copied; save and wait raise"),
            ("written anyway", 0, "the state cannot be copied; calls of write:"),
            ("save after copy", "", "the error of a copy was raised; the next save raises"),
            ("kept by a failed save", 0, "saves have failed, and the saver is deleted; bytes of copies:"),
        ):
            kind = {"writes": "saves-overlap", "kept by a failed save": "kept-alive"}.get(
                what, "error-swallowed"
            )
            kind = (
                "raised-again"
                if right == ""
                else "crashed" if right and found[what] and what != "writes" else kind
            )
            equal(kind, f"Rank {rank} of 2: {words}", found[what] or "nothing", right or "nothing")


# --- Laws --------------------------------------------------------------------------------------------------


def same(got, right):
    return (
        torch.equal(got, right)
        if isinstance(right, torch.Tensor) and isinstance(got, torch.Tensor)
        else got == right
    )
