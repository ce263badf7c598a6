"""The states of each parameter group over time, from the events of a log: sharded, gathering, full, freed.

| state     | from                                       | to                                            |
| --------- | ------------------------------------------ | --------------------------------------------- |
| sharded   | the beginning of the log                   | the first copy-in of a gather                 |
| gathering | the copy-in (without one: the all-gather)  | the end of the copy-out                       |
| full      | the end of the copy-out                    | the free of its last storage of whole memory  |
| freed     | that free                                  | the next copy-in                              |

An implementation without instruments (`module_hooks`) names no group when it allocates and frees, and logs no copy-outs. Then a
group's whole memory is the memory that its forward reads, and the group is full from its first allocation on.

A freed group is sharded, too. The name "freed" says that the group was whole before. If the log frees a group before it gathers
it, the group was full when the recording began.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from typing import NamedTuple

from hwfsdp.observe.events import Event
from hwfsdp.observe.races import by_rank

STATES = ("sharded", "gathering", "full", "freed")
# True if the log has copy-outs → the states in which a group allocates its whole memory.
_FILLING = {True: ("gathering",), False: ("gathering", "full")}


class Lifetime(NamedTuple):
    """One state of a group on one rank. `owner` is the group's fqn; times are in µs, as in events."""

    rank: int
    owner: str
    state: str
    start_us: float
    end_us: float


def find_lifetimes(events: Sequence[Event]) -> list[Lifetime]:
    """Find the states of all groups that the log gathers or frees, sorted by rank, by the group's first change, and by time.

    The states of one group cover the time from the rank's first event to its last without gaps. No state has length 0.
    """
    found: list[Lifetime] = []
    for rank, of_rank in by_rank(events).items():
        begin, end = min(e.start_us for e in of_rank), max(e.end_us for e in of_rank)
        for owner, changes in _changes(of_rank).items():
            found += _lifetimes(rank, owner, changes, begin, end)
    return found


class _Change(NamedTuple):
    state: str
    us: float


def _changes(events: Sequence[Event]) -> dict[str, list[_Change]]:
    """Return the changes of state by owner, in order of issue: each new state and its time."""
    changes: dict[str, list[_Change]] = {}
    read_by = {key: e.owner for e in events if e.op == "forward" for key in e.reads}
    copied = any(e.op == "copy_out" for e in events)
    owner_of: dict[int, str] = {}  # allocated whole memory: storage → group
    held: dict[str, set[int]] = {}
    for event in events:
        owner, keys = event.owner, event.writes
        if not copied and not owner and event.op in ("alloc", "free"):
            owner = next((read_by[key] for key in keys if key in read_by), "")
        state = _state(changes, owner)
        if event.op == "alloc" and event.stream == "compute" and state in _FILLING[copied]:
            owner_of.update(dict.fromkeys(keys, owner))
            held.setdefault(owner, set()).update(keys)
            if not copied and state == "gathering":
                changes[owner].append(_Change("full", event.end_us))
        elif event.op == "free" and owner and owner not in changes:
            changes[owner] = [_Change("full", -inf), _Change("freed", event.end_us)]
        elif event.op == "free":
            for owner in {owner_of.pop(key) for key in keys if key in owner_of}:
                held[owner] -= set(keys)
                if not held[owner] and _state(changes, owner) == "full":
                    changes[owner].append(_Change("freed", event.end_us))
        elif _begins_gather(event):
            if _state(changes, owner) in ("sharded", "freed") or event.op == "copy_in":
                changes.setdefault(owner, []).append(_Change("gathering", event.start_us))
        elif event.op == "copy_out" and owner in changes:
            changes[owner].append(_Change("full", event.end_us))
    return changes


def _state(changes: dict[str, list[_Change]], owner: str) -> str:
    return changes[owner][-1].state if owner in changes else "sharded"


def _begins_gather(event: Event) -> bool:
    is_copy = event.op == "copy_in" and event.stream == "copy"
    return bool(event.owner) and (is_copy or event.op == "all_gather")


def find_reductions(events: Sequence[Event]) -> list[Lifetime]:
    """Find the times in which each group's gradients were reduced. Their state is "reducing".

    A reduction lasts from the copy-in of the gradients to its end. If there is no copy-in, it lasts from its own start. An
    all-reduce over replicas counts separately. The result is sorted by rank and order of issue.
    """
    found: list[Lifetime] = []
    begun: dict[tuple[int, str], float] = {}
    for event in sorted(events, key=lambda e: (e.rank, e.seq)):
        place = event.rank, event.owner
        if event.owner and event.op == "copy_in" and event.stream == "compute":
            begun[place] = event.start_us
        elif event.owner and event.op in ("reduce_scatter", "all_reduce"):
            found.append(Lifetime(*place, "reducing", begun.pop(place, event.start_us), event.end_us))
    return found


def _lifetimes(
    rank: int, owner: str, changes: Sequence[_Change], begin: float, end: float
) -> Iterator[Lifetime]:
    state, since = "sharded", begin
    for change in changes:
        if change.us > since:
            yield Lifetime(rank, owner, state, since, min(change.us, end))
            since = min(change.us, end)
        state = change.state
    if end > since:
        yield Lifetime(rank, owner, state, since, end)
