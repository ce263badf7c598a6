"""A comparison as text and as JSON-ready values."""

from __future__ import annotations

from typing import Any

from hwfsdp.observe.comparison import Comparison, Pair, PerStep
from hwfsdp.observe.events import COLLECTIVES, Event
from hwfsdp.observe.tables import lay_out, ms, number_of, signed


def describe(found: Comparison, names: tuple[str, str]) -> str:
    """What `hwfsdp trace diff` prints."""
    parts = [
        [f"A: {names[0]}", f"B: {names[1]}"],
        [_verdict(found)],
        _order(found),
        _ops(found),
        _times(found),
    ]
    return "\n\n".join("\n".join(part) for part in [*parts, _peaks(found)] if part)


def _verdict(found: Comparison) -> str:
    a, b = found.steps
    steps = f" (A has {number_of(a, 'step')}, B {b}: means of a step are compared)" if a != b else ""
    if found.same_traffic:
        return f"Both did the same: as many events of each kind, over as many bytes{steps}."
    if found.ranks[0] != found.ranks[1]:
        ranks_a, ranks_b = (", ".join(map(str, ranks)) for ranks in found.ranks)
        return f"They are of different ranks: {ranks_a} and {ranks_b}{steps}."
    return f"They did not do the same: {', '.join(found.differing_ops)} differ{steps}."


def _order(found: Comparison) -> list[str]:
    parting = found.parting
    if parting is None:
        return ["In the same order, on every rank."]
    rows = [["A", _said(parting.a)], ["B", _said(parting.b)]]
    return [
        f"Orders part at event {parting.number} of rank {parting.rank} (waits not counted):",
        *lay_out(rows, left=2),
    ]


def _said(event: Event | None) -> str:
    if event is None:
        return "nothing more"
    of = f" of {event.owner}" if event.owner else ""
    size = f", {event.bytes:,} bytes" if event.bytes else ""
    when = f", {event.phase}" if event.phase and event.phase != event.op else ""
    return f"{event.op}{of}{when}, step {event.step}, on {event.stream}{size}"


def _ops(found: Comparison) -> list[str]:
    rows = [["", "calls A", "B", "", "bytes A", "B", "", "time A", "B", "B − A"]]
    for op in sorted(found.ops, key=lambda op: (op not in COLLECTIVES, op)):
        a, b = found.ops[op]
        calls = [f"{a.calls:,.4g}", f"{b.calls:,.4g}", _mark(a.calls, b.calls)]
        sizes = [f"{a.bytes:,.0f}", f"{b.bytes:,.0f}", _mark(a.bytes, b.bytes)]
        rows.append([op, *calls, *sizes, ms(a.us), ms(b.us), signed(b.us - a.us, ms(b.us - a.us))])
    return ["What all ranks together did in one step (time: mean of the ranks)", *lay_out(rows)]


def _mark(a: float, b: float) -> str:
    return "" if a == b else "≠"


def _times(found: Comparison) -> list[str]:
    rows = [["", "A", "B", "B / A"]]
    for label, (a, b) in (("step", found.step_us), ("exposed communication", found.exposed_comm_us)):
        rows.append([label, ms(a), ms(b), f"{b / a:.2f}" if a else "–"])
    rows.append(["communication hidden", f"{found.overlap.a:.0%}", f"{found.overlap.b:.0%}", ""])
    return ["Time of one step, mean", *lay_out(rows)]


def _peaks(found: Comparison) -> list[str]:
    rows = [["", "A", "B", ""]]
    for kind, (a, b) in sorted(found.peaks.items(), key=lambda item: -max(item[1])):
        rows.append([kind, f"{a:,}", f"{b:,}", _mark(a, b)])
    return ["Most bytes alive on any rank, by kind", *lay_out(rows)] if found.peaks else []


def as_json(found: Comparison, names: tuple[str, str]) -> dict[str, Any]:
    """The same with stable keys; times in µs."""

    def both(pair: tuple[PerStep, PerStep] | Pair) -> dict[str, Any]:
        return {
            side: value._asdict() if isinstance(value, PerStep) else value
            for side, value in zip("ab", pair, strict=True)
        }

    parting = found.parting
    return {
        "a": names[0],
        "b": names[1],
        "same_traffic": found.same_traffic,
        "same_order": parting is None,
        "ranks": {"a": found.ranks[0], "b": found.ranks[1]},
        "steps": {"a": found.steps[0], "b": found.steps[1]},
        "orders_part": parting
        and {
            "rank": parting.rank,
            "number": parting.number,
            "a": parting.a and parting.a.as_dict(),
            "b": parting.b and parting.b.as_dict(),
        },
        "per_step": {op: both(pair) for op, pair in found.ops.items()},
        "step_us": both(found.step_us),
        "exposed_comm_us": both(found.exposed_comm_us),
        "overlap_fraction": both(found.overlap),
        "peak_bytes_by_kind": {kind: both(pair) for kind, pair in found.peaks.items()},
    }
