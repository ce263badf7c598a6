"""Laws of a step on a simulated machine (`machines`): waits first, then content, then times and bytes.

    step = Step(WIDE, "gpu", facts)
    no_races(step)
    computes_with_what_travels(step)
    exposed(step, "forward", at_most=1.1 * step.gather_us)

A law raises a `Finding`. `part` is "forward", "backward" or "reduction" in all laws; without one, a law looks at all of them.

Note [What hides a gather]
    A gather or a reduction is *exposed* while it travels and no unit computes. Only kernels that run in a unit's own forward or
    backward hide it, and only if the step needs their results: matrix products whose results nobody reads hide nothing. A file can
    still make useless work look useful. So the laws also compare the time of a forward and of a backward with the time in which the
    same model computes without sharding. Work that hides nothing real makes a step longer, and this is what counts.

Note [What a step computes with]
    On a simulated machine, collectives bring no values. So a file that gathers, but computes with whatever is in memory, has the times
    of a right file and no races. Each event of the log names the memory that it reads and writes. `Flow` follows the content of memory
    from event to event, and checks every link of this chain:

        optimizer → gather → kernels of the unit's forward and backward → reduction → optimizer

    Other operators, such as copies and casts, pass content on. Memory that was just taken has none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from hwfsdp.course.findings import Finding
from hwfsdp.course.machines import KERNELS, MACHINES, PRODUCTS, REDUCTIONS, Section, Step
from hwfsdp.observe.events import COLLECTIVES, Event
from hwfsdp.observe.races import Race, find_races
from hwfsdp.observe.step_times import length, subtract, union

# --- Races -------------------------------------------------------------------------------------------------


def no_races(step: Step, part: str = "") -> None:
    """Check that each operator waits for operators that wrote or read its memory before.

    When Python frees memory, the next allocation on its stream writes there. So a release counts as a write.
    """
    names = _names_of_memory(step.events)
    for race in races_of(step):
        if part not in ("", _part_of(race, step, names)):
            continue
        sentence = race.sentence
        if name := names.get(race.storage):
            sentence = sentence.replace(f"memory {race.storage}:", f"memory {race.storage}, {name}:", 1)
        numbers = [re.sub(r"\D", "", each.stream) for each in (race.first, race.second)]
        if step.stream_sets and any(numbers):
            sentence += (
                f" They are different streams each time: the file makes {step.stream_sets} new sets of streams in this step,"
                " and streams of two sets have no order."
            )
        raise Finding(_misconception(race), f"{step.name}: {sentence}")


@lru_cache(maxsize=16)  # several tests look at a step
def races_of(step: Step) -> list[Race]:
    return find_races(step.log)


def _names_of_memory(log: Sequence[Event]) -> dict[int, str]:
    """Return the names of memory that a collective reads or writes, by the number of the memory."""
    names: dict[int, str] = {}
    for event in log:
        of = f" of {event.owner!r}" if event.owner else ""
        for storage in (*event.reads, *event.writes) if event.op in COLLECTIVES else ():
            what = "buffer of the gather"
            if event.op != "all_gather":
                what = "input of the reduction" if storage in event.reads else "result of the reduction"
            names.setdefault(storage, f"the {what}{of}")
    return names


def _part_of(race: Race, step: Step, names: dict[int, str]) -> str:
    streams = [each.stream.partition(" ")[0] for each in (race.first, race.second)]  # without a set's number
    is_reduction = "reduce_scatter" in streams or "reduction" in names.get(race.storage, "")
    return "reduction" if is_reduction else step.part_of(race.second)


def _misconception(race: Race) -> str:
    if race.second.op == "optimizer":
        return "left-in-flight"
    return "used-before-wait" if race.storage in race.second.reads else "freed-too-early"


# --- What a step computes with -------------------------------------------------------------------------------


def computes_with_what_travels(step: Step, part: str = "") -> None:
    """Check that a step computes with what gathers bring, and that reductions bring what the optimizer reads."""
    for of, finding in flow_of(step).loose_ends():
        if part in ("", of):
            raise finding


@lru_cache(maxsize=16)
def flow_of(step: Step) -> Flow:
    return Flow(step)


class Flow:
    """The way of the content of memory through a step (Note [What a step computes with])."""

    def __init__(self, step: Step) -> None:
        self.step, self.events, self.sections = step, step.events, step.sections
        self._makers = _makers(self.events)
        # by number of the gather: the section that reads it first
        self._reader: dict[int, Section] = {}
        for section in self.sections:
            for gather in self.read_by(section.kernels, "all_gather"):
                self._reader.setdefault(gather.seq, section)

    def read_by(self, log: Sequence[Event], *ops: str) -> list[Event]:
        """Return the events with one of these ops whose content these events read."""
        makers = set[int]().union(*(self._makers[e.seq] for e in log))
        return [e for e in self.events if e.seq in makers and e.op in ops]

    def loose_ends(self) -> Iterator[tuple[str, Finding]]:
        """Yield the places where the chain is broken: the part of the step, and the finding."""
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
                    words = f"the gather of {each.owner!r} sends memory that the optimizer has not written."
                    yield section.op, self._finding("update-not-seen", each, words)
        for begin, step in zip([-1, *(e.seq for e in steps)], steps, strict=False):
            read = self.read_by([step], *REDUCTIONS)
            for each in self.events:
                if begin < each.seq < step.seq and each.op in REDUCTIONS and each not in read:
                    words = f"the optimizer does not read the result of the reduction of {each.owner!r}."
                    yield "reduction", self._finding("not-reduced", each, words)

    def _unread_weights(self, section: Section, products: dict[str, int]) -> Iterator[tuple[str, Finding]]:
        """Check that a section's kernels read what gathers for this unit brought. A forward needs new gathers."""
        gathers, unit, first = self.read_by(section.kernels, "all_gather"), section.unit, section.kernels[0]
        new = [each for each in gathers if self._reader[each.seq] is section]
        own = [each for each in gathers if self._reader[each.seq].unit == unit]
        needed = new if section.op == "forward" else own
        read = [self.read_by([e], "all_gather") for e in section.kernels if e.op in PRODUCTS]
        got = sum(any(each in needed for each in of_product) for of_product in read)
        kept = sum(any(each in own and each not in new for each in of_product) for of_product in read)
        # a backward has two products for each weight, and one of them reads it
        right = products.setdefault(unit, len(read))
        if got < right:
            words = f"in a {section.op} of {unit!r}, {got} of {right} matrix products read a weight that a gather for this unit brought."
            yield section.op, self._finding("not-gathered", first, words, right, got)
        elif new and kept < right and (nbytes := sum(each.bytes for each in new)) < self.step.unit_bytes:
            yield section.op, self._too_few("gathers", unit, first, nbytes)

    def _lost_gradients(self, section: Section) -> Iterator[tuple[str, Finding]]:
        """Check that reductions read all gradients of a backward."""
        own, last = {e.seq for e in section.kernels}, section.kernels[-1]
        sent = [e.bytes for e in self.events if e.op in REDUCTIONS and self._makers[e.seq] & own]
        if not sent:
            words = f"no reduction reads the gradients of {section.unit!r}."
            yield "reduction", self._finding("not-reduced", last, words)
        elif sum(sent) < self.step.unit_bytes:
            yield "reduction", self._too_few("reductions", section.unit, last, sum(sent))

    def _too_few(self, what: str, unit: str, event: Event, nbytes: int) -> Finding:
        right = self.step.unit_bytes
        words = f"the {what} for {unit!r} bring {nbytes:,} B; its parameters have {right:,} B."
        return self._finding("too-little-traffic", event, words, right, nbytes)

    def _finding(
        self, misconception: str, event: Event, words: str, expected: Any = None, got: Any = None
    ) -> Finding:
        return Finding(misconception, f"{self.step.name}, event {event.seq}: {words}", expected, got)


def _makers(log: Sequence[Event]) -> dict[int, set[int]]:
    """Return, by event, the numbers of the kernels, collectives and optimizer's steps that made what it reads."""
    content: dict[int, set[int]] = {}
    found: dict[int, set[int]] = {}
    for e in log:
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


# --- Times and bytes ---------------------------------------------------------------------------------------

_NOTHING = {  # part → the misconception if nothing travels, and what does not happen
    "forward": ("not-gathered", "a forward gathers nothing."),
    "backward": ("never-resharded", "a backward gathers nothing."),
    "reduction": ("not-reduced", "a step reduces nothing."),
}


def exposed(step: Step, part: str, at_most: float, misconception: str = "no-overlap") -> None:
    """Check that something travels in a part, and for how many µs it travels while no unit computes."""
    travels, exposed = _travels(step, part), step.exposed_us(part)
    if (alone := sum(exposed)) > at_most:
        bare = sum(us > 0.5 * e.dur_us for e, us in zip(travels, exposed, strict=True))
        what = "reductions of a step" if part == "reduction" else f"gathers of a {part}"
        raise Finding(
            misconception,
            f"{step.name}: the {what} travel for {alone:,.0f} µs while no unit computes; limit {at_most:,.0f} µs. "
            f"{bare} of {len(travels)} travel mostly without compute.",
            round(at_most),
            round(alone),
        )


def duration(step: Step, part: str, at_most: float, misconception: str = "no-overlap") -> None:
    """Check how long a forward or a backward takes, in µs."""
    if (took := step.duration_us(part)) > at_most:
        raise Finding(
            misconception,
            f"{step.name}: a {part} takes {took:,.0f} µs; limit {at_most:,.0f} µs. "
            f"Without sharding, the same model computes for {step.compute_us(part):,.0f} µs.",
            round(at_most),
            round(took),
        )


def gathered_once(step: Step, part: str) -> None:
    """Check that each unit is gathered in a part, and none twice."""
    gathers = _travels(step, part)
    if len(gathers) != step.units:
        owners = [each.owner for each in gathers]
        twice = sorted({each for each in owners if owners.count(each) > 1})
        again = f" More than once: {', '.join(map(repr, twice))}." if twice else ""
        raise Finding(
            "gathered-again" if len(gathers) > step.units else "not-gathered",
            f"{step.name}: a {part} has {len(gathers)} all-gathers for {step.units} units ({', '.join(owners)}).{again}",
            step.units,
            len(gathers),
        )


def _travels(step: Step, part: str) -> list[Event]:
    travels = step.travels(part)
    if not travels:
        misconception, words = _NOTHING[part]
        one = "a reduction" if part == "reduction" else "an all-gather"
        raise Finding(misconception, f"{step.name}: {words}", f"{one} for each of {step.units} units", "none")
    return travels


def in_flight(step: Step, at_most: int) -> None:
    """Check how many reductions are started that compute has not waited for."""
    if (most := max(step.in_flight(), default=0)) > at_most:
        words = f"{most} reductions are started that compute has not waited for."
        raise Finding("unbounded-reductions", f"{step.name}: {words}", f"at most {at_most}", most)


def board(step: Step, ways: dict[str, tuple[int, float]]) -> str:
    """Place a file among ways to gather ahead: ms in which the gathers of a forward are exposed, and MB alive at once.

    A way is better if one of its figures is smaller, and the other is not larger.
    """
    ms, mb = round(sum(step.exposed_us("forward")) / 1e3), round(step.peak_bytes / 1e6, 1)
    rows = "; ".join(f"{way} {at[0]} ms at {at[1]} MB" for way, at in ways.items())
    better = [repr(way) for way, at in ways.items() if at != (ms, mb) and at[0] <= ms and at[1] <= mb]
    place = f"better than yours: {', '.join(better)}" if better else "none is better than yours"
    return f"yours {ms} ms at {mb} MB; {rows}; {place}"


# --- The race ------------------------------------------------------------------------------------------------

_BUSY = 0.8  # of a step: a host that issues operators for so long has no time to wait for anything


class Pace(NamedTuple):
    """FSDP2's figures of a step. They are taken from hwfsdp, whose steps have the same collectives in the same order.

    Attributes:
        step_us: until everything is done. peak_bytes: most bytes alive at once.
        computes_us: kernels run on the compute stream. alone_us: bytes travel meanwhile, and no kernel runs there.
        operators: that the host issues.
    """

    step_us: float
    peak_bytes: int
    computes_us: float
    alone_us: float
    operators: int


def as_fast(step: Step, theirs: Pace, times: float) -> None:
    """Compare the time of a step with FSDP2's, and name what costs the additional time.

    A file that copies parameters one by one can still be fast enough. So where waits cost half as much as operators, they are named.
    """
    if step.step_us <= times * theirs.step_us:
        return
    computes, alone, idle = _spent(step)
    waits = alone - theirs.alone_us
    works = computes - theirs.computes_us
    if len(step.operators) * MACHINES[step.machine].device.launch_us > _BUSY * step.step_us:
        works += idle
    else:
        waits += idle
    words = (
        f"{_times(step, 'step takes', step.step_us, theirs.step_us, 'µs', times)} "
        f"Kernels run on compute for {computes:,.0f} µs (FSDP2's: {theirs.computes_us:,.0f}), bytes travel alone for {alone:,.0f} "
        f"({theirs.alone_us:,.0f}), and for {idle:,.0f} the GPU waits for the host. "
        f"The host issues {len(step.operators):,} operators (FSDP2's: {theirs.operators:,})."
    )
    kind = "too-many-operators" if works > 2 * waits else "no-overlap"
    raise Finding(kind, words, round(times * theirs.step_us), round(step.step_us))


def as_small(step: Step, theirs: Pace, times: float) -> None:
    """Compare the peak of a step with FSDP2's. Buffers of several collectives at once are the cause, if there are any."""
    if step.peak_bytes <= times * theirs.peak_bytes:
        return
    words = _times(step, "peak is", step.peak_bytes, theirs.peak_bytes, "B", times)
    kind = "not-freed"
    for op, misconception in (
        ("all_gather", "unbounded-prefetch"),
        ("reduce_scatter", "unbounded-reductions"),
    ):
        most = _most_alive(step, op)
        if most > 2 * step.unit_bytes:
            words += f" Buffers of {op.replace('_', '-')}s have {most:,} B at once: {most / step.unit_bytes:.1f} times a block's parameters."
            kind = misconception
            break
    raise Finding(kind, words, round(times * theirs.peak_bytes), step.peak_bytes)


def _times(step: Step, what: str, mine: float, theirs: float, unit: str, times: float) -> str:
    return f"{step.name}: the {what} {mine:,.0f} {unit}, {mine / theirs:.2f} times FSDP2's {theirs:,.0f}; bound {times:g} times."


def _spent(step: Step) -> tuple[float, float, float]:
    """Return for how many µs of a step kernels run on compute, bytes travel and none runs, and nothing happens."""
    travels = union((e.start_us, e.end_us) for e in step.log.select(*COLLECTIVES))
    on_compute = union((e.start_us, e.end_us) for e in step.log.select(*COLLECTIVES, stream="compute"))
    computes = subtract(union((begin, end) for begin, end, _ in step.facts["kernels"]), on_compute)
    both = union([*computes, *travels, *((e.start_us, e.end_us) for e in step.operators)])
    return length(computes), length(subtract(travels, computes)), step.step_us - length(both)


def _most_alive(step: Step, op: str) -> int:
    """Return the most bytes that buffers of gathers, or inputs of reductions, have at once."""
    alive, most = dict[int, int](), 0
    for e in step.events:
        if e.op == op:
            alive |= dict.fromkeys(e.writes if op == "all_gather" else e.reads, e.bytes)
            most = max(most, sum(alive.values()))
        for storage in e.writes if e.op == "free" else ():
            alive.pop(storage, None)
    return most
