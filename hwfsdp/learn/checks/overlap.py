"""What the log of a step on virtual GPUs proves: what was waited for, what travels under compute, and how much is ahead."""

from __future__ import annotations

from typing import Any, NamedTuple

from hwfsdp.eventlog import EventLog
from hwfsdp.events import Event
from hwfsdp.learn.run import Run
from hwfsdp.learn.verdict import Finding
from hwfsdp.order import Race, find_races

GIB = 1 << 30


class Targets(NamedTuple):
    """What a step may take: µs of collectives beside which nothing is computed, ms in all, GiB alive at once."""

    exposed_us: float
    step_ms: float
    peak_gib: float


def log_of(facts: dict[str, Any]) -> EventLog:
    """The log in what was reported under one name."""
    return Run([{"log": facts["log"]}]).log()


def check_ordered(log: EventLog, where: str) -> None:
    """Whatever reads or overwrites memory comes after those that write or read it."""
    for race in find_races(log):
        raise Finding(_misconception(race), f"{where}. {race.sentence}")


def _misconception(race: Race) -> str:
    if race.second.op == "optimizer":  # it reads gradients, and writes what a gather may still read
        return "left-in-flight" if race.storage in race.second.reads else "stale-gather"
    return "used-before-wait" if race.storage in race.second.reads else "freed-too-early"


def check_ahead(log: EventLog, phase: str, facts: dict[str, Any], targets: Targets) -> None:
    """While a block computes, the next one's gather is under way, and no other.

    Args:
        phase: "forward" or "backward". facts: `figures_of` the simulation.
    """
    spans = [e for e in log.select(phase) if e.owner.startswith("blocks.")]
    gathers = log.select("all_gather", phase=phase)
    copies = {e.owner: e.seq for e in log.select("copy_out", phase=phase)}
    exposed = f"Exposed communication of the step: {facts['exposed_us']:,.0f} µs; target {targets.exposed_us:,.0f} µs."
    for span, following in zip(spans, spans[1:], strict=False):
        gather = next((e for e in gathers if e.owner == following.owner), None)
        if gather is None or gather.seq > span.seq:
            text = f"The {phase} of {span.owner} begins (event {span.seq}), and the gather of {following.owner} is not started"
            raise Finding("not-prefetched", f"{text}{_event(gather)}. {exposed}", "one ahead", "none")
    for span in spans:
        ahead = [e for e in gathers if e.seq < span.seq < copies.get(e.owner, len(log.events))]
        if len(ahead) > 1:
            names, nbytes = ", ".join(e.owner for e in ahead), sum(e.bytes for e in ahead)
            text = f"When the {phase} of {span.owner} begins, {len(ahead)} groups are gathered ahead ({names}): {nbytes:,} B"
            bound = f"Peak {facts['peak_bytes'] / GIB:.2f} GiB; bound {targets.peak_gib:g} GiB."
            raise Finding("unbounded-prefetch", f"{text}, expected 1. {bound}", 1, len(ahead))


def _event(gather: Event | None) -> str:
    return "" if gather is None else f" before event {gather.seq}"


def check_figures(facts: dict[str, Any], targets: Targets, what: str) -> None:
    """Exposed communication, time and memory of a step against the targets."""
    exposed, step_ms, peak = facts["exposed_us"], facts["step_us"] / 1e3, facts["peak_bytes"] / GIB
    where = f"{what} on virtual GPUs"
    if exposed > targets.exposed_us:
        text = (
            f"{where}: {exposed:,.0f} µs of communication are exposed; target {targets.exposed_us:,.0f} µs."
        )
        raise Finding("no-overlap", text, targets.exposed_us, round(exposed, 1))
    if step_ms > targets.step_ms:
        text = f"{where}: it takes {step_ms:.2f} ms; target {targets.step_ms:g} ms."
        raise Finding("no-overlap", text, targets.step_ms, round(step_ms, 3))
    if peak > targets.peak_gib:
        by_kind = ", ".join(
            f"{kind} {nbytes / GIB:.2f}" for kind, nbytes in facts["peak_by_kind"].items() if nbytes
        )
        text = f"{where}: peak {peak:.2f} GiB ({by_kind}); bound {targets.peak_gib:g} GiB."
        raise Finding("kept-alive", text, targets.peak_gib, round(peak, 3))


def check_reductions(log: EventLog, limit: int, what: str) -> None:
    """A reduction runs under the next block's backward, and no more than `limit` are in flight."""
    spans = [e for e in log.select("backward") if e.owner.startswith("blocks.")]
    reductions = log.select("reduce_scatter")
    waited: dict[int, int] = {}
    for wait in log.select("wait", stream="compute"):
        for seq in wait.after:
            waited.setdefault(seq, wait.seq)
    for reduction in reductions:
        over = waited.get(reduction.seq, len(log.events))
        following = next((span for span in spans if span.seq > reduction.seq), None)
        if following is not None and over < following.seq:
            text = f"{what}: compute waits for the reduction of {reduction.owner} (event {over})"
            raise Finding(
                "no-overlap", f"{text} before the backward of {following.owner} (event {following.seq})."
            )
    for packing in log.select("copy_in", stream="compute"):
        flying = [e for e in reductions if e.seq < packing.seq < waited.get(e.seq, len(log.events))]
        if len(flying) > limit - 1:
            nbytes = sum(e.bytes for e in flying) + packing.bytes
            text = (
                f"{what}: when the gradients of {packing.owner} are packed, the reductions of "
                f"{', '.join(e.owner for e in flying)} have not been waited for: {len(flying) + 1} in flight, {nbytes:,} B of "
                f"buffers; max_reductions is {limit}."
            )
            raise Finding("unbounded-reductions", text, limit, len(flying) + 1)
