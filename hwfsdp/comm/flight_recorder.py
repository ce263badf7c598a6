"""The last collectives of each rank: a ring of notes that is always on.

Ranks that call different collectives wait for each other until the timeout, or fail with an error that shows only one side.
So each rank notes its calls, and `desync_report` compares the notes of all ranks. A note names the collective, its parameter
group, its process group and its progress (`State`).

Three modules make notes: `transport` of FSDP's collectives, `shared_memory` of the ranks' search for each other, and `users_collectives` of
the user's own collectives, on ranks of `launch`. Messages between two ranks are not noted. Other collectives in which ranks of hwfsdp
agree on something are not noted either.

Note [A ring that outlives its rank]
    A killed rank cannot answer, and a rank that hangs may not answer. Under `launch`, the ring of each rank is in a file. The
    caller passes the path of this file in the environment, so it can read the ring even if the rank is gone. Without `launch`,
    the ring is in ordinary memory. If a collective fails, the ranks exchange copies through the store of the process group
    (`exchange`). Under torchrun, the store outlives the ranks, so a thread of each rank waits at the store for questions.

Note [What a note costs]
    A note costs about 2 µs. It writes a line of text into a slot of fixed size, over the oldest note, and later one byte at each
    change of its state. It synchronizes nothing and keeps no object alive. So the state is only what the host already knows. On
    an accelerator, the host does not wait for collectives, so they stay "open".
"""

from __future__ import annotations

import functools
import itertools
import mmap
import os
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from enum import IntEnum
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.distributed as dist

from hwfsdp import compat

SLOTS, SLOT = 96, 160  # number of notes, and bytes of each
SIZE = SLOTS * SLOT  # bytes
PATH = "HWFSDP_HISTORY"  # environment variable: the file that the caller of this rank reads
_LONGEST_RANKS = 40  # characters


class State(IntEnum):
    """The progress of a collective, as far as the host knows. The value is its byte in a note.

    Attributes:
        WAIT: the call has not returned to the host's program: the host prepares the collective, issues it, or waits for it.
        OPEN: the collective was issued, and the host does not wait for it yet.
        DONE, FAILED: the host knows that it ended, with a result or with an error.
    """

    WAIT = ord("w")
    OPEN = ord("o")
    DONE = ord("d")
    FAILED = ord("f")


class NotedCall(NamedTuple):
    """A call of a collective, as a note describes it.

    Attributes:
        serial: place among all collectives of the rank, from 1. number: place within the process group, from 1.
        is_users: True for a collective of the user, False for a collective of FSDP.
        group: a name of the process group that is the same on all its ranks (`members_of`).
        op, dtype: such as "all_gather" or "broadcast(src=0)", "float32". nbytes: bytes of the whole tensor, as in `events`.
        owner: fqn of the parameter group, "" for the user's own collectives.
    """

    serial: int
    number: int
    is_users: bool
    group: str
    op: str
    dtype: str
    nbytes: int
    owner: str
    state: State


class _Track:
    """A process group: its name, and the number of collectives that this rank has called in it. `apart`: see `begin`."""

    __slots__ = ("group", "label", "called")

    def __init__(self, group: dist.ProcessGroup, apart: bool) -> None:
        name = "".join(str(group.group_name).split())[:40] + "+" * apart
        self.group = ref(group)
        self.label = f"{name}:{_as_text(dist.get_process_group_ranks(group))}"
        self.called = 0


class Note:
    """The note of one collective. It updates the state of this collective."""

    __slots__ = ("_ring", "_serial")

    def __init__(self, ring: _Ring, serial: int) -> None:
        self._ring, self._serial = ring, serial

    def mark(self, state: State) -> None:
        """Set the state, unless a newer note has taken the slot."""
        if self._ring.serial - self._serial < SLOTS:
            self._ring.memory[self._serial % SLOTS * SLOT] = state

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Note the end of a collective that kept the host until it was done."""
        self.mark(State.DONE if error is None else State.FAILED)


class _Ring:
    """The last notes of this rank, in `SIZE` bytes of memory."""

    def __init__(self) -> None:
        self.memory: bytearray | mmap.mmap = bytearray(SIZE)
        self.is_collected = False
        self.serial, self._lock = 0, threading.Lock()
        # by id of the group, and `apart`; a later group may get the same id
        self._tracks: dict[tuple[int, bool], _Track] = {}
        with suppress(KeyError, OSError, ValueError), open(os.environ[PATH], "r+b") as file:
            self.memory, self.is_collected = mmap.mmap(file.fileno(), SIZE), True

    def add(self, what: str, is_users: bool, group: dist.ProcessGroup | None, apart: bool) -> Note:
        """Note a call: `what` is its op, dtype, bytes and owner. `begin` explains the other arguments."""
        group = group or dist.group.WORLD
        assert group is not None, "no process group"
        with self._lock:  # other threads may call in other process groups
            track = self._tracks.get((id(group), apart))
            if track is None or track.group() is not group:
                track = self._tracks[id(group), apart] = _Track(group, apart)
            track.called = called = track.called + 1
            self.serial = serial = self.serial + 1
        text = f"w{serial} {called} {int(is_users)} {track.label} {what}"
        at = serial % SLOTS * SLOT
        self.memory[at : at + SLOT] = text.encode()[:SLOT].ljust(SLOT, b"\0")
        return Note(self, serial)


# by thread: the collective that it issues or waits for now, of FSDP or of the user (`users_collectives`)
waiting: dict[int, object] = {}
_ring: _Ring | None = None
_starting = threading.Lock()
_dtype_name = functools.cache(lambda dtype: "-" if dtype is None else str(dtype).removeprefix("torch."))
# Logs nothing inside the block; for collectives of hwfsdp that belong to no step. `observe` puts its own here.
unlogged: Callable[[], AbstractContextManager[None]] = nullcontext


def begin(
    op: str,
    owner: str | None,
    group: dist.ProcessGroup | None,
    dtype: torch.dtype | None,
    nbytes: int,
    apart: bool = False,
) -> Note:
    """Note that this rank calls a collective now, even if it cannot issue it yet.

    Args:
        op: such as "all_gather". owner: fqn of the parameter group; None: it is the user's own collective.
        group: None for the group of all ranks.
        nbytes: bytes of the whole tensor: the output of an all-gather, or the input of a reduce-scatter.
        apart: True for a call that belongs to no step. It is not counted among the collectives of the group.
    """
    what = f"{op} {_dtype_name(dtype)} {nbytes} {owner or ''}"
    return (_ring or _start()).add(what, owner is None, group, apart)


def _start() -> _Ring:
    global _ring
    with _starting:
        if _ring is None:
            _ring = _Ring()
            _listen(_ring)
    return _ring


# --- Reading -----------------------------------------------------------------------------------------------


def read(memory: bytes) -> list[NotedCall]:
    """Return the notes of a ring, oldest first. Bytes that are not a note are left out: a faulty rank may have written them."""
    found = []
    for at in range(0, min(len(memory), SIZE), SLOT):
        with suppress(ValueError):
            found.append(_parse(memory[at : at + SLOT].rstrip(b"\0")))
    return sorted(found, key=lambda call: call.serial)


def _parse(note: bytes) -> NotedCall:
    text = note[1:].decode(errors="replace")
    if not note or not text.isprintable():
        raise ValueError("no note")
    serial, number, is_users, group, op, dtype, nbytes, owner = text.split(" ", 7)
    members_of(group)
    place = int(serial), int(number), bool(int(is_users))
    return NotedCall(*place, group, op, dtype, int(nbytes), owner, State(note[0]))


def _as_text(ranks: list[int]) -> str:
    """Write evenly spaced ranks as "first-last/step", and others as "a,b,c". Return "" if this gets too long."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if step > 0 and ranks == list(range(ranks[0], ranks[-1] + 1, step)):
        return f"{ranks[0]}-{ranks[-1]}/{step}"
    text = ",".join(map(str, ranks))
    return text if len(text) <= _LONGEST_RANKS else ""


def members_of(group: str) -> list[int]:
    """Return the ranks of a process group from its name in a note, or [] if the name does not contain them.

    Raises:
        ValueError: this is not such a name.
    """
    text = group.rpartition(":")[2]
    if "-" not in text:
        return [int(rank) for rank in text.split(",") if rank]
    first, last = text.partition("/")[0].split("-")
    found = range(int(first), int(last) + 1, int(text.partition("/")[2]))
    if len(found) > 1 << 20:
        raise ValueError("more ranks than there are")
    return list(found)


# --- Exchanging --------------------------------------------------------------------------------------------


class Told(NamedTuple):
    """A rank's own report: its last calls, and the stacks of its threads as text (`stacks`)."""

    calls: list[NotedCall]
    stack: str


_LENGTH = 4  # bytes for the length of a packed ring
_ANSWERS = "hwfsdp answers"  # name of a thread
_PAUSE = 0.02  # seconds between two checks of the store
_exchanges = 0


def exchange(patience: float = 3.0) -> dict[int, Told | None]:
    """Exchange the reports of all ranks through their store, after a collective has failed.

    Args:
        patience: seconds to wait for the other ranks. A rank that does not report in this time is None in the result.

    Returns:
        The reports by rank. The dict is empty if this rank has noted no collective, if there is no process group or no other
        rank, or under `launch`, where the caller reads the rings.
    """
    global _exchanges
    if _ring is None or _ring.is_collected or not dist.is_initialized() or dist.get_world_size() == 1:
        return {}
    _exchanges += 1
    told: dict[int, Told | None] = dict.fromkeys(range(dist.get_world_size()))
    own = _packed(_ring, stacks(last=threading.get_ident()))
    # the store may be gone; this must not replace the error of the failed collective
    with suppress(Exception):
        store = _store_of_the_run()
        store.set(_key(_exchanges, dist.get_rank()), own)
        store.set(_key(_exchanges, _ASKED), b"")
        until = time.monotonic() + patience
        while (silent := [rank for rank in told if told[rank] is None]) and time.monotonic() < until:
            for rank in silent:
                if store.check([_key(_exchanges, rank)]):
                    told[rank] = _unpacked(store.get(_key(_exchanges, rank)))
            time.sleep(_PAUSE)
    told[dist.get_rank()] = _unpacked(own)
    return told


_ASKED = -1  # in place of a rank in a key: a rank has asked for reports


def _key(exchange: int, rank: int) -> str:
    return f"hwfsdp/history/{exchange}/{rank}"


def stacks(last: int | None = None) -> str:
    """Return the stacks of all threads except the current one, as text. The last is of a thread that waits in a collective, if any.

    Args:
        last: the thread whose stack comes last, also if it is the current thread; by default those in `waiting`, or the main thread.
    """
    main = threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    unseen = {threading.get_ident(), *(thread for thread, name in names.items() if name == _ANSWERS)} - {last}
    frames = {thread: frame for thread, frame in sys._current_frames().items() if thread not in unseen}
    order = sorted(frames, key=lambda thread: (thread == last, thread in waiting, thread == main))
    texts = ["".join(traceback.format_stack(frames[thread])) for thread in order]
    if len(texts) == 1:
        return texts[0]
    return "".join(
        f"  thread {names.get(thread, thread)}:\n{text}" for thread, text in zip(order, texts, strict=True)
    )


def _packed(ring: _Ring, stack: str) -> bytes:
    memory = zlib.compress(bytes(ring.memory))
    return len(memory).to_bytes(_LENGTH) + memory + stack.encode()


def _unpacked(said: bytes) -> Told:
    end = _LENGTH + int.from_bytes(said[:_LENGTH])
    return Told(read(zlib.decompress(said[_LENGTH:end])), said[end:].decode(errors="replace"))


def _store_of_the_run() -> Any:
    """Return the ranks' store without the prefixes of the default process group: each call of `launch` has another one."""
    store = compat.default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def _answer(ring: _Ring, store: Any, rank: int) -> None:
    """Report this rank's calls and stacks when another rank asks. This rank may hang, or wait longer than the rank that asks."""
    with suppress(RuntimeError):  # the store is gone, so the run has ended
        for number in itertools.count(1):
            store.wait([_key(number, _ASKED)], timedelta(days=365))
            store.set(_key(number, rank), _packed(ring, stacks()))


def _listen(ring: _Ring) -> None:
    """Under torchrun, start to answer other ranks. Its store outlives the ranks, so the waiting thread disturbs no rank's exit."""
    if not ring.is_collected and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = compat.store_by_itself(_store_of_the_run())
        if store is not None:
            arguments = ring, store, dist.get_rank()
            threading.Thread(target=_answer, name=_ANSWERS, args=arguments, daemon=True).start()
