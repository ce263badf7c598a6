"""The analysis of a log, and the comparison of two logs, as text and as JSON-ready values."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from hwfsdp.errors import printable
from hwfsdp.observe.analysis import Findings, LogComparison, Pair
from hwfsdp.observe.eventlog import Traffic, TrafficByOp
from hwfsdp.observe.events import COLLECTIVES, Event
from hwfsdp.observe.step_times import WAITS_AT_ONCE
from hwfsdp.observe.tables import lay_out, ms, number_of, signed

_NOTHING = Traffic(0, 0)
_RACES = 20  # the most races to show as text


def describe(findings: Findings, name: str) -> str:
    """Return the text that `hwfsdp trace show` prints."""
    parts = [[printable(_headline(findings, name))], _traffic(findings)]
    parts += [_times(findings), _memory(findings), _races(findings)]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _headline(findings: Findings, name: str) -> str:
    about = findings.about
    first, last = findings.steps[0], findings.steps[-1]
    numbers = f"{first} to {last}" if last > first else f"{first}"
    text = f"{name}: {number_of(len(findings.ranks), 'rank')}, {number_of(len(findings.steps), 'step')} ({numbers})"
    if about is None:
        return f"{text}. It does not describe its run, so there is no closed form to compare it with."
    if not about.groups:
        return (
            f"{text}, torch {about.torch}, {about.device}. hwfsdp's fully_shard sharded no module that ran."
        )
    grids = {(g.shards, g.replicas) for g in about.groups}
    over = " and ".join(
        f"over {shards}" + (f", {number_of(replicas, 'replica')}" if replicas > 1 else "")
        for shards, replicas in sorted(grids)
    )
    groups, again = number_of(len(about.groups), "parameter group"), [
        g.gathered_again_from for g in about.groups if g.shards > 1
    ]
    twice = f"{len(again) - again.count(0)} of them gathered again for the backward"
    return f"{text}, torch {about.torch}, {about.device}. {groups}, sharded {over}, {twice}."


def _traffic(findings: Findings) -> list[str]:
    if not findings.measured:
        return ["No step is in it."]
    if findings.about is not None and not findings.about.groups:
        return _ungrouped(findings)
    rows = [["", "calls", "closed form", "bytes", "closed form", ""]]
    step = findings.steps[-1]
    for op, moved, expected in _by_op(findings, step):
        calls, nbytes = (f"{n:,}" if findings.expected is not None else "?" for n in expected)
        verdict = _verdict(moved, expected, findings)
        rows.append([op, f"{moved.calls:,}", calls, f"{moved.bytes:,}", nbytes, verdict])
    if len(rows) == 1:
        rows.append(["nothing moved", "", "", "", "", ""])
    title = "What parameter groups moved in one step (bytes are those of whole tensors)"
    notes = _notes(findings)
    if findings.others:
        others = ", ".join(f"{t.calls} × {op} ({t.bytes:,} bytes)" for op, t in findings.others.items())
        notes.append(f"  Besides, in the whole log, collectives of no parameter group: {others}.")
    return [title, *lay_out(rows), *notes]


def _notes(findings: Findings) -> list[str]:
    """Say whether steps and ranks differ."""
    notes = [] if findings.same_every_step else _differing_steps(findings)
    notes += [] if findings.ranks_agree else ["  Ranks did not move the same; this is the first one."]
    return notes


def _ungrouped(findings: Findings) -> list[str]:
    """Say which collectives of a run without parameter groups of hwfsdp were seen, and what the recording cannot know."""
    title = "Collectives seen in one step (bytes are those of whole tensors)"
    moved = findings.measured[findings.steps[-1]]
    rows = [["", "calls", "bytes", "most of them issued at"]]
    rows += [
        [op, f"{t.calls:,}", f"{t.bytes:,}", printable(findings.issued.get(op, ""))]
        for op, t in moved.items()
    ]
    whose = "  Whose parameters they moved is not known, so there is no closed form."
    lines = [*lay_out(rows), *_notes(findings), whose] if moved else ["  none"]
    if findings.groups_unseen:
        lines.append(
            "  Collectives that C++ calls, as DistributedDataParallel does, are not seen: there may be more."
        )
    return [title, *lines]


def _by_op(findings: Findings, step: int) -> list[tuple[str, Traffic, Traffic]]:
    moved, expected = findings.measured[step], findings.expected or {}
    ops = dict.fromkeys([op for op, t in expected.items() if t.calls] + list(moved))
    return [(op, moved.get(op, _NOTHING), expected.get(op, _NOTHING)) for op in ops]


def _verdict(moved: Traffic, expected: Traffic, findings: Findings) -> str:
    if findings.expected is None:
        return ""
    if moved == expected:
        return "equal"
    return f"{moved.bytes / expected.bytes:.3g} ×" if expected.bytes else "not expected"


def _differing_steps(findings: Findings) -> list[str]:
    rows = [
        [f"step {step}", *(f"{op} {t.calls:,} × {t.bytes:,}" for op, t in moved.items())]
        for step, moved in findings.measured.items()
    ]
    width = max(map(len, rows))
    filled = [[*row, *[""] * (width - len(row))] for row in rows]
    return ["  Steps differ:", *lay_out(filled, left=width, indent="    ")]


def _times(findings: Findings) -> list[str]:
    rows = [["", "step", "exposed communication", "hidden"]]
    for rank, times in findings.summary["by_rank"].items():
        hidden = "–" if times["blocking"] else f"{times['overlap_fraction']:.0%}"
        shown = ["–", "–"] if rank in findings.silent else [ms(times["exposed_comm_us"]), hidden]
        rows.append([f"rank {rank}", ms(times["step_us"]), *shown])
    lines = ["Time of one step, mean", *lay_out(rows)]
    if findings.summary["blocking"]:
        lines.append(f"  Nothing can be hidden: {WAITS_AT_ONCE}.")
    if len(findings.ranks) > max(1, len(findings.silent)):
        lines.append(f"  {_skew(findings.summary)}")
    return lines


def _skew(summary: dict[str, Any]) -> str:
    mean, most, slowest = summary["skew_us"], summary["skew_max_us"], summary["slowest_rank"]
    if mean is None:
        return "How far ranks come apart is not known: their clocks are not on one axis."
    latest = f"\n  Rank {slowest} is late by the most." if slowest is not None else ""
    return f"The last rank begins a collective {ms(mean)} later than the first, at most {ms(most)}.{latest}"


def _memory(findings: Findings) -> list[str]:
    peaks = {kind: n for kind, n in findings.summary["peak_bytes_by_kind"].items() if n}
    if not peaks:
        return []
    rows = [[kind, f"{n:,}"] for kind, n in sorted(peaks.items(), key=lambda item: -item[1])]
    return ["Most bytes alive on any rank, by kind", *lay_out(rows)]


def _races(findings: Findings) -> list[str]:
    if findings.races is None:
        why = "no event says what memory it touches"
        why = "no collective was seen" if findings.accesses else why
        return [f"Whether there are races is not known: {why}."]
    if not findings.races:
        accesses = f"{findings.accesses:,} recorded access{'' if findings.accesses == 1 else 'es'}"
        return [f"No races among {accesses} to memory: each is ordered after the one that it needs."]
    shown = [f"  {printable(race)}" for race in findings.races[:_RACES]]
    if (more := len(findings.races) - _RACES) > 0:
        shown.append(f"  … and {more:,} more")
    return [f"{number_of(len(findings.races), 'race')}:", *shown]


def as_json(findings: Findings, name: str) -> dict[str, Any]:
    """Return the findings as JSON-ready values with stable keys. Bytes count whole tensors; times are in µs."""

    def plain(traffic: TrafficByOp) -> dict[str, dict[str, int]]:
        return {op: t._asdict() for op, t in traffic.items()}

    about = findings.about
    return {
        "file": name,
        "world_size": about.world_size if about else None,
        "torch": about.torch if about else None,
        "device": about.device if about else None,
        "parameter_groups": [g.fqn for g in about.groups] if about else None,
        "ranks": findings.ranks,
        "steps": findings.steps,
        "traffic_by_step": {str(step): plain(moved) for step, moved in findings.measured.items()},
        "other_traffic": plain(findings.others),
        "expected_per_step": None if findings.expected is None else plain(findings.expected),
        "as_expected": findings.as_expected,
        "same_every_step": findings.same_every_step,
        "ranks_agree": findings.ranks_agree,
        "summary": findings.summary,
        "races": findings.races,
        "accesses": findings.accesses,
    }


# --- Two logs ----------------------------------------------------------------------------------------------


def describe_difference(found: LogComparison, names: tuple[str, str]) -> str:
    """Return the text that `hwfsdp trace diff` prints."""
    parts = [[f"A: {names[0]}", f"B: {names[1]}"], [_same_or_not(found)]]
    parts += [_parting(found), _ops(found), _times_of_both(found), _peaks_of_both(found)]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _same_or_not(found: LogComparison) -> str:
    a, b = found.steps
    steps = f" (A has {number_of(a, 'step')}, B {b}: means of a step are compared)" if a != b else ""
    if found.same_traffic:
        return f"Both did the same: as many events of each kind, over as many bytes{steps}."
    if found.ranks.a != found.ranks.b:
        ranks_a, ranks_b = (", ".join(map(str, ranks)) for ranks in found.ranks)
        return f"They are of different ranks: {ranks_a} and {ranks_b}{steps}."
    return f"They did not do the same: {', '.join(found.differing_ops)} differ{steps}."


def _parting(found: LogComparison) -> list[str]:
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


def _ops(found: LogComparison) -> list[str]:
    rows = [["", "calls A", "B", "", "bytes A", "B", "", "time A", "B", "B − A"]]
    for op in sorted(found.ops, key=lambda op: (op not in COLLECTIVES, op)):
        a, b = found.ops[op]
        calls = [f"{a.calls:,.4g}", f"{b.calls:,.4g}", _mark(a.calls, b.calls)]
        sizes = [f"{a.bytes:,.0f}", f"{b.bytes:,.0f}", _mark(a.bytes, b.bytes)]
        rows.append([op, *calls, *sizes, ms(a.us), ms(b.us), signed(b.us - a.us, ms(b.us - a.us))])
    return ["What all ranks together did in one step (time: mean of the ranks)", *lay_out(rows)]


def _mark(a: float, b: float) -> str:
    return "" if a == b else "≠"


def _times_of_both(found: LogComparison) -> list[str]:
    rows = [["", "A", "B", "B / A"]]
    for label, name in (("step", "step_us"), ("exposed communication", "exposed_comm_us")):
        a, b = found.times[name]
        rows.append([label, ms(a), ms(b), f"{b / a:.2f}" if a else "–"])
    pairs = zip(found.times["overlap_fraction"], found.times["blocking"], strict=True)
    hidden = ["–" if blocking else f"{overlap:.0%}" for overlap, blocking in pairs]
    rows.append(["communication hidden", *hidden, ""])
    notes = [f"  Nothing can be hidden where {WAITS_AT_ONCE}."] if any(found.times["blocking"]) else []
    return ["Time of one step, mean", *lay_out(rows), *notes]


def _peaks_of_both(found: LogComparison) -> list[str]:
    rows = [["", "A", "B", ""]]
    for kind, (a, b) in sorted(found.peaks.items(), key=lambda item: -max(item[1])):
        rows.append([kind, f"{a:,}", f"{b:,}", _mark(a, b)])
    return ["Most bytes alive on any rank, by kind", *lay_out(rows)] if found.peaks else []


def difference_as_json(found: LogComparison, names: tuple[str, str]) -> dict[str, Any]:
    """Return the comparison as JSON-ready values with stable keys; times are in µs."""
    return {
        **Pair(*names)._asdict(),
        "same_traffic": found.same_traffic,
        "same_order": found.parting is None,
        "ranks": found.ranks._asdict(),
        "steps": found.steps._asdict(),
        "orders_part": found.parting and asdict(found.parting),
        "per_step": {op: Pair(a._asdict(), b._asdict())._asdict() for op, (a, b) in found.ops.items()},
        **{name: pair._asdict() for name, pair in found.times.items()},
        "peak_bytes_by_kind": {kind: pair._asdict() for kind, pair in found.peaks.items()},
    }
