"""Tasks 2 and 3, judged: what travels while something is computed, and whether everyone waits for what it reads.

Targets are stated in the homework's README; a test holds both together. They are what our file needs and a tenth more.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

from hwfsdp.events import COLLECTIVES, Event
from hwfsdp.learn.capstone.clock import Exposed, exposed_of, probe_clock
from hwfsdp.learn.run import Ranks, Run
from hwfsdp.learn.verdict import Finding
from hwfsdp.order import Race, find_races

GPU_FORWARD_US = 600.0  # of gathers in a forward on the GPU, not hidden; one for each parameter will do
HOST_GATHERS_US = 15_000.0  # of gathers in a backward on the host
HOST_REDUCTIONS_US = 16_000.0  # of reductions there
HOST_PEAK = 400_000_000  # bytes alive at once in a step there


class Figures(NamedTuple):
    """What a run on the virtual clock came to."""

    gathers: Sequence[Sequence[Any]]
    reductions: Sequence[Sequence[Any]]
    exposed: Exposed
    peak_bytes: int
    flying: int


def figures(ranks: Ranks, seed: int, name: str) -> Figures:
    """Of "forward on a GPU" or "step on a host", with the learner's file."""
    found = ranks.run(probe_clock, 1, seed=seed)[name][0]
    named = (found["gathers"], found["reductions"], exposed_of(found), found["peak_bytes"], found["flying"])
    return Figures(*named)


def judge_forward_prefetch(ranks: Ranks, seed: int) -> None:
    """Task 2: gathers on a stream of their own, which only those wait for who read what was gathered."""
    judge_order(ranks, seed, "forward")
    found = figures(ranks, seed, "forward on a GPU")
    exposed = found.exposed.forward + found.exposed.backward
    if not found.gathers:
        raise Finding(
            "not-gathered", "A second forward on the virtual GPU gathers nothing.", "5 all-gathers", 0
        )
    if exposed > GPU_FORWARD_US:
        first = [index for index, each in enumerate(found.gathers) if each[2] > 0.5 * (each[1] - each[0])]
        message = (
            f"A forward on the virtual GPU: gathers travel for {exposed:,.0f} µs while nothing is computed; target "
            f"{GPU_FORWARD_US:,.0f} µs. {len(first)} of {len(found.gathers)} gathers are not hidden by anything."
        )
        raise Finding("no-overlap", message, GPU_FORWARD_US, round(exposed))


def judge_backward_prefetch(ranks: Ranks, seed: int) -> None:
    """Task 3: the next gather of a backward is started before this module's backward."""
    found = figures(ranks, seed, "step on a host")
    gathers = [each for each in found.gathers if each[3]]
    if not gathers:
        raise Finding(
            "never-resharded", "A backward on the virtual host gathers nothing.", "5 all-gathers", 0
        )
    order = [owner for owner, _ in groupby(each[4] for each in gathers)]
    if twice := sorted({name for name in order if order.count(name) > 1}):
        message = f"A backward on the virtual host gathers {', '.join(order)}, in this order: {', '.join(twice)} more than once."
        raise Finding("guessed-wrong", message, "each once, the last first", ", ".join(order))
    judge_order(ranks, seed, "backward")
    if found.exposed.backward > HOST_GATHERS_US:
        exposed = [each for each in gathers if each[2] > 0.5 * (each[1] - each[0])]
        message = (
            f"A backward on the virtual host: gathers travel for {found.exposed.backward:,.0f} µs while nothing is computed; "
            f"target {HOST_GATHERS_US:,.0f} µs. {len(exposed)} of {len(gathers)} are not hidden by anything."
        )
        raise Finding("not-prefetched", message, HOST_GATHERS_US, round(found.exposed.backward))
    if found.flying <= 2:
        _compare_peak(found, "unbounded-prefetch")


def judge_reduce_overlap(ranks: Ranks, seed: int) -> None:
    """Task 3: gradients of one module travel while the next one computes its own."""
    judge_order(ranks, seed, "reduction")
    found = figures(ranks, seed, "step on a host")
    if not found.reductions:
        raise Finding("not-reduced", "A step on the virtual host reduces nothing.", "5 reductions", 0)
    if found.exposed.reductions > HOST_REDUCTIONS_US:
        exposed = [each for each in found.reductions if each[2] > 0.5 * (each[1] - each[0])]
        message = (
            f"A backward on the virtual host: gradients travel for {found.exposed.reductions:,.0f} µs while nothing is "
            f"computed; target {HOST_REDUCTIONS_US:,.0f} µs. {len(exposed)} of {len(found.reductions)} reductions are not "
            "hidden by anything."
        )
        raise Finding("no-overlap", message, HOST_REDUCTIONS_US, round(found.exposed.reductions))
    if found.flying > 2:
        _compare_peak(found, "unbounded-reductions")


def _compare_peak(found: Figures, misconception: str) -> None:
    """Memory is for one gather ahead, and for two reductions."""
    if found.peak_bytes > HOST_PEAK:
        message = (
            f"A step on the virtual host: {found.peak_bytes:,} B are alive at once; bound {HOST_PEAK:,} B. "
            f"Reductions started that compute had not waited for: {found.flying}."
        )
        raise Finding(misconception, message, HOST_PEAK, found.peak_bytes)


def judge_order(ranks: Ranks, seed: int, part: str = "") -> None:
    """Whoever reads or writes memory waits for those that wrote or read it: two steps on the virtual GPU, every operator.

    Memory that Python lets go is written next by whoever allocates on its stream.

    Args:
        part: "forward", "backward" or "reduction"; without one, all of them.
    """
    refuse_races(ranks.run(probe_clock, 1, seed=seed)["order"][0], part)


def refuse_races(reported: dict[str, Any], part: str = "") -> None:
    """Raise a Finding for the first race of what `clock.ordered` reported.

    Args:
        part: as for `judge_order`.
    """
    log = Run([{"log": reported["log"]}]).log()
    names = _names_of_memory(log.events)
    for race in find_races(log):
        if part in ("", _part(race, reported["ends"], names)):
            sentence = race.sentence
            if name := names.get(race.storage):
                sentence = sentence.replace(f"memory {race.storage}:", f"memory {race.storage}, {name}:", 1)
            raise Finding(_misconception(race), sentence)


def _names_of_memory(events: Sequence[Event]) -> dict[int, str]:
    """What memory that a collective reads or writes is, by number."""
    names: dict[int, str] = {}
    for event in events:
        of = f" of {event.owner!r}" if event.owner else ""
        for storage in (*event.reads, *event.writes) if event.op in COLLECTIVES else ():
            what = "buffer of the gather"
            if event.op != "all_gather":
                what = "input of the reduction" if storage in event.reads else "result of the reduction"
            names.setdefault(storage, f"the {what}{of}")
    return names


def _part(race: Race, ends: Sequence[int], names: dict[int, str]) -> str:
    """What it belongs to; the optimizer reads what the backward left, so it counts as a part of that."""
    if "reduce_scatter" in (race.first.stream, race.second.stream) or "reduction" in names.get(
        race.storage, ""
    ):
        return "reduction"
    over = sum(race.second.seq >= end for end in ends)  # forwards, backwards and optimizer steps, in turn
    return "backward" if over % 3 else "forward"


def _misconception(race: Race) -> str:
    if race.second.op == "optimizer":
        return "left-in-flight"
    return "used-before-wait" if race.storage in race.second.reads else "freed-too-early"
