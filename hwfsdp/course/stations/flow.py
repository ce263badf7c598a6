"""Does a step compute with what travelled? The log of a step on a simulated machine shows it, if a witness was there.

A simulated machine has no values. So a file that gathers, but computes with whatever is in memory, has the times of a right file and
no races. Each event of the log names the memory that it reads and writes. This module follows the content of memory from event to
event, and checks every link of this chain:

    optimizer → gather → kernels of the unit's forward and backward → reduction → optimizer

Other operators, such as copies and casts, pass content on. Memory that was just taken has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from hwfsdp.course.findings import told
from hwfsdp.course.stations.clocked import REDUCTIONS
from hwfsdp.course.verdict import Finding
from hwfsdp.observe.events import COLLECTIVES, Event

PRODUCTS = ("mm", "addmm")  # kernels that read a weight matrix
KERNELS = (*PRODUCTS, "native_layer_norm", "native_layer_norm_backward")  # all kernels that read parameters
Marks = Sequence[Sequence[Any]]  # see `Watch.marks`


class Loose(NamedTuple):
    """An event at which the chain is broken, its part of the step ("forward", "backward" or "reduction"), and the finding."""

    part: str
    event: Event
    finding: Finding


class Section(NamedTuple):
    """The events of one unit's forward or backward, and the kernels among them. Between units, `unit` is ""."""

    op: str
    unit: str
    events: list[Event]
    kernels: list[Event]


class Flow:
    """The way of the content of memory through a step.

    Args:
        events: all events of the step. marks: see `Watch.marks`.
        where: the first words of findings. unit_bytes: the bytes of the parameters of one unit.
    """

    def __init__(self, events: Sequence[Event], marks: Marks, where: str, unit_bytes: int) -> None:
        self.events, self.where, self.unit_bytes = events, where, unit_bytes
        self.sections = list(_sections(events, marks))
        self._makers = _makers(events)
        # by number of the gather: the section that reads it first
        self._reader: dict[int, Section] = {}
        for section in self.sections:
            for gather in self.read_by(section.kernels, "all_gather"):
                self._reader.setdefault(gather.seq, section)

    def read_by(self, events: Sequence[Event], *ops: str) -> list[Event]:
        """Return the events with one of these ops whose content these events read."""
        makers = set[int]().union(*(self._makers[e.seq] for e in events))
        return [e for e in self.events if e.seq in makers and e.op in ops]

    def loose_ends(self) -> Iterator[Loose]:
        """Yield the places where the chain is broken."""
        products: dict[str, int] = {}  # of a unit's forward
        for section in self.sections:
            if section.kernels:
                yield from self._unread_weights(section, products)
            if section.kernels and section.op == "backward":
                yield from self._lost_gradients(section)
        steps = [e for e in self.events if e.op == "optimizer"]
        for section in self.sections:
            for each in section.events:
                is_later = each.op == "all_gather" and steps and each.seq > steps[0].seq
                if is_later and not self.read_by([each], "optimizer"):
                    yield self._loose("laws.sends_old", section.op, each)
        for begin, step in zip([-1, *(e.seq for e in steps)], steps, strict=False):
            read = self.read_by([step], *REDUCTIONS)
            for each in self.events:
                if begin < each.seq < step.seq and each.op in REDUCTIONS and each not in read:
                    yield self._loose("laws.not_taken", "reduction", each)

    def _unread_weights(self, section: Section, products: dict[str, int]) -> Iterator[Loose]:
        """Check that a section's kernels read what gathers for this unit brought. A forward needs new gathers."""
        gathers = self.read_by(section.kernels, "all_gather")
        new = [each for each in gathers if self._reader[each.seq] is section]
        own = [each for each in gathers if self._reader[each.seq].unit == section.unit]
        needed = new if section.op == "forward" else own
        found = [e for e in section.kernels if e.op in PRODUCTS]
        got = sum(any(each in needed for each in self.read_by([e], "all_gather")) for e in found)
        # a backward has two products for each weight, and one of them reads it
        right = products.setdefault(section.unit, len(found))
        if got < right:
            yield self._loose("laws.not_read", section.op, section.kernels[0], got, right, unit=section.unit)
        elif new and (nbytes := sum(each.bytes for each in new)) < self.unit_bytes:
            words = {"unit": section.unit, "what": "gathers"}
            yield self._loose(
                "laws.too_few", section.op, section.kernels[0], nbytes, self.unit_bytes, **words
            )

    def _lost_gradients(self, section: Section) -> Iterator[Loose]:
        """Check that reductions read all gradients of a backward."""
        own, last = {e.seq for e in section.kernels}, section.kernels[-1]
        sent = [e.bytes for e in self.events if e.op in REDUCTIONS and self._makers[e.seq] & own]
        if not sent:
            yield self._loose("laws.not_sent", "reduction", last, unit=section.unit)
        elif sum(sent) < self.unit_bytes:
            words = {"unit": section.unit, "what": "reductions"}
            yield self._loose("laws.too_few", "reduction", last, sum(sent), self.unit_bytes, **words)

    def _loose(
        self, name: str, part: str, event: Event, got: Any = None, right: Any = None, **words: Any
    ) -> Loose:
        where = f"{self.where}, event {event.seq}:"
        return Loose(part, event, told(name, where, got, right, owner=event.owner, part=part, **words))


def _sections(events: Sequence[Event], marks: Marks) -> Iterator[Section]:
    ends = [*(first for first, _, _ in marks[1:]), len(events)]
    for (first, op, unit), end in zip(marks, ends, strict=True):
        inside = [e for e in events if first <= e.seq < end]
        yield Section(op, unit, inside, [e for e in inside if e.op in KERNELS] if unit else [])


def _makers(events: Sequence[Event]) -> dict[int, set[int]]:
    """Return, by event, the numbers of the kernels, collectives and optimizer's steps that made what it reads."""
    content: dict[int, set[int]] = {}
    found: dict[int, set[int]] = {}
    for e in events:
        read = found[e.seq] = set[int]().union(*(content.get(storage, ()) for storage in e.reads))
        for storage in e.writes:
            if e.op in KERNELS:
                content[storage] = {e.seq}
            elif e.op in ("alloc", "free"):
                content[storage] = set()
            else:  # it may write only a part of the memory
                own = {e.seq} if e.op in (*COLLECTIVES, "optimizer") else read
                content[storage] = content.get(storage, set()) | own
    return found
