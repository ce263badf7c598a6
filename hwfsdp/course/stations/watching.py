"""A step on a simulated machine, seen from outside the learner's file: when each unit computes, and how many bytes are alive.

The log of such a step has the learner's collectives and waits, but no forwards and backwards, as the file has no instruments. So
every compute kernel is noted with its unit. `log_of` adds the kernels to the log that a player shows. The log that is judged
stays unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor, nn

from hwfsdp.observe import events
from hwfsdp.observe.eventlog import EventLog
from hwfsdp.observe.events import COLLECTIVES, Event, Sample
from hwfsdp.observe.intervals import Interval
from hwfsdp.train.models.gpt import Block
from hwfsdp.virtual.allocator import Allocator
from hwfsdp.virtual.clock import Clock

_KEPT = (*COLLECTIVES, "wait", "alloc", "free", "optimizer")  # ops to keep; a witness logs every operator
ALIVE = "all memory"  # the only kind of memory: the purpose of a learner's tensors is unknown


class Watch:
    """Watch the block of `looking`. Only the last step is kept: the code that starts a step calls `begin`.

    Attributes:
        kernels: when compute was busy, in µs.
        spans: an event for consecutive kernels of one unit, or between units, numbered from 0.
        samples: bytes alive after each kernel, in the order of issue, where they differ. Their times are those at which the
            compute stream gets there, as in every log of virtual streams: the host of a GPU runs far ahead.
        marks: (number of the first event, op, unit) of each span, also of those without kernels.
    """

    def __init__(self) -> None:
        self.kernels: list[Interval] = []
        self.spans: list[Event] = []
        self.samples: list[Sample] = []
        self.marks: list[tuple[int, str, str]] = []
        self._names: dict[nn.Module, str] = {}
        self._allocator: Allocator | None = None
        self._now = "forward", "", ()  # type: tuple[str, str, tuple[int, ...]]

    def begin(self, names: dict[nn.Module, str]) -> None:
        """Begin a step. `names`: the names of the units in the learner's file."""
        self._names = names
        for seen in (self.kernels, self.spans, self.samples, self.marks):
            seen.clear()
        self.enter("forward")

    def enter(self, op: str, module: nn.Module | None = None) -> None:
        """Assign the next kernels to a forward or a backward, of a unit or of none. op "": an operation that has its own event."""
        recorder = events.active()
        unit = self._names.get(module, "") if module else ""
        reads = recorder.identify(list(module.parameters())) if recorder and module else ()
        self._now = op, unit, reads
        if recorder:
            self.marks.append((len(recorder.drafts), op, unit))

    @contextmanager
    def looking(self) -> Iterator[None]:
        run, see, forward = Clock.run, Allocator.see, Block.forward

        def watched_run(clock: Clock, us: float) -> None:
            run(clock, us)
            if us and clock.current == "compute":
                self._note(clock.ends["compute"] - us, clock.ends["compute"])
            if self._allocator is not None:
                self._sample(clock.now("compute"), self._allocator.allocated)

        def watched_see(allocator: Allocator, *args: Any, **kwargs: Any) -> None:
            self._allocator = allocator
            see(allocator, *args, **kwargs)

        def watched_forward(block: Block, x: Tensor) -> Tensor:
            self.enter("forward", block)
            out = forward(block, x)
            self.enter("forward")
            if out.requires_grad:
                out.register_hook(lambda grad: self.enter("backward", block))
            return out

        with (
            mock.patch.object(Clock, "run", watched_run),
            mock.patch.object(Allocator, "see", watched_see),
            mock.patch.object(Block, "forward", watched_forward),
        ):
            yield

    def _note(self, begin: float, end: float) -> None:
        self.kernels.append((begin, end))
        if not self._now[0]:
            return
        op, unit, reads = self._now
        last = self.spans[-1] if self.spans else None
        if last is None or (last.op, last.owner) != (op, unit):
            last = Event(0, len(self.spans), op, "compute", unit, op, start_us=begin, reads=reads)
            self.spans.append(last)
        self.spans[-1] = last.changed(dur_us=end - last.start_us)

    def _sample(self, us: float, allocated: int) -> None:
        if not self.samples or self.samples[-1].bytes_by_kind[ALIVE] != allocated:
            self.samples.append(Sample(us, {ALIVE: allocated}))

    def log_of(self, log: EventLog, begins: list[tuple[str, int]]) -> EventLog:
        """Return the log of a step with spans and samples, its events in the order in which they begin.

        Args:
            begins: (phase, number of the first event) for each part of the step.
        """
        found = [
            e.changed(phase=e.phase or [phase for phase, first in begins if first <= e.seq][-1])
            for e in log.events
            if e.op in _KEPT
        ]
        free = max((e.seq for e in log.events), default=-1) + 1  # the first unused event number
        ends = sorted((e.end_us, e.step) for e in log.events if e.op == "optimizer")
        for each in self.spans:
            step = next((step for end, step in ends if each.start_us < end), ends[-1][1] + 1 if ends else 0)
            found.append(each.changed(seq=free + each.seq, step=step))
        found.sort(key=lambda e: (e.start_us, e.seq))
        numbers = {e.seq: number for number, e in enumerate(found)}
        return EventLog([_renumbered(e, numbers) for e in found], {0: list(self.samples)})


def _renumbered(event: Event, numbers: dict[int, int]) -> Event:
    after = tuple(numbers[seq] for seq in event.after if seq in numbers)
    return event.changed(seq=numbers[event.seq], after=after)
