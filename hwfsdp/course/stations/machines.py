"""Stations 08 to 10, judged on the simulated machines of `clocked`: waits first, then content, then times and bytes.

Each target leaves the reference some room. The file of the previous station misses it by far.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hwfsdp.course.findings import told
from hwfsdp.course.run import Ranks, Run
from hwfsdp.course.stations.clocked import MACHINES, NARROW, WIDE, exposed_of, probe_clock, probe_nested
from hwfsdp.course.stations.clocked import probe_order
from hwfsdp.course.stations.flow import Flow
from hwfsdp.course.stations.laws import too_often
from hwfsdp.course.verdict import Finding, Seen, Undecided
from hwfsdp.observe.events import COLLECTIVES, Event
from hwfsdp.observe.races import Race, find_races
from hwfsdp.train.models.gpt import Block, GPTConfig

GPU_FORWARD_US = 350.0  # exposed gathers in a forward on the GPU: the first unit's
UNITS = WIDE.layers
HOST_FORWARD_US = 15_500.0  # the same on the host
HOST_BACKWARD_US = 15_500.0  # exposed gathers in a backward on the host: the last unit's
HOST_REDUCTIONS_US = 16_000.0  # exposed reductions in a step on the host: the first unit's
# Bytes alive at once in a forward, with one unit ahead. A unit is 50 MB, whole and in a buffer.
FORWARD_PEAK = 190_000_000
BOARD = {  # way to gather ahead → exposed ms of a forward's gathers on the host, and MB alive at once
    "on demand": (69, 136),
    "one ahead": (14, 155),
    "two ahead": (14, 206),
    "all at once": (14, 336),
}
NOTHING = {  # part of a step → the misconception if nothing travels, what does not happen, and what should
    "forward": ("not-gathered", "gathers", "an all-gather"),
    "backward": ("never-resharded", "gathers", "an all-gather"),
    "reductions": ("not-reduced", "reduces", "a reduction"),
}
PEAK = 390_000_000  # bytes alive in a step on the host, with one gather ahead and one reduction behind


# --- Races -------------------------------------------------------------------------------------------------


def refuse_races(ranks: Ranks, seed: int, part: str = "") -> None:
    """Check that each operator waits for operators that wrote or read its memory before, in two steps on the virtual GPU.

    When Python frees memory, the next allocation on its stream writes there.

    Args:
        part: "forward", "backward" or "reduction"; without one, all of them.
    """
    _refuse_races_of("order", ranks.run(probe_order, 1, seed=seed)["order"][0], part)


def refuse_shortcuts(ranks: Ranks, seed: int, part: str = "") -> None:
    """Refuse races in the steps above, and in the steps that are timed. Refuse steps that do not compute with what travelled (`flow`)."""
    refuse_races(ranks, seed, part)
    timed = ranks.run(probe_clock, 1, seed=seed).reports[0]
    steps = {**ranks.run(probe_order, 1, seed=seed).reports[0], **timed}
    for machine in (each for each in MACHINES if each in steps):
        _refuse_races_of(machine, found := {**steps[machine], "machine": machine}, part)
        refuse_loose_ends(
            f"The virtual {MACHINES[machine]}", found, NARROW if machine == "order" else WIDE, part
        )


def _refuse_races_of(machine: str, found: dict[str, Any], part: str) -> None:
    log = Run([found]).log()
    names = _names_of_memory(log.events)
    for race in find_races(log):
        if part in ("", _part(race, found["ends"], names)):
            sentence = race.sentence
            if name := names.get(race.storage):
                sentence = sentence.replace(f"memory {race.storage}:", f"memory {race.storage}, {name}:", 1)
            seen = Seen(machine, found["shown"], race.second.start_us)
            raise Finding(_misconception(race), sentence).at(seen)


def refuse_loose_ends(where: str, found: dict[str, Any], config: GPTConfig, part: str = "") -> None:
    """Check that a step computes with what travelled. `found`: a `Runner.witnessed_log`. where: the first words of a finding."""
    with torch.device("meta"):
        unit_bytes = sum(p.numel() * p.element_size() for p in Block(config).parameters())
    for loose in Flow(Run([found]).log().events, found["marks"], where, unit_bytes).loose_ends():
        if part in ("", loose.part):
            raise loose.finding.at(_seen(found, loose.event.start_us)) if "shown" in found else loose.finding


def _names_of_memory(events: Sequence[Event]) -> dict[int, str]:
    """Return the names of memory that a collective reads or writes, by the number of the memory."""
    names: dict[int, str] = {}
    for event in events:
        of = f" of {event.owner!r}" if event.owner else ""
        for storage in (*event.reads, *event.writes) if event.op in COLLECTIVES else ():
            what = "buffer of the gather"
            if event.op != "all_gather":
                what = "input of the reduction" if storage in event.reads else "result of the reduction"
            names.setdefault(storage, f"the {what}{of}")
    return names


def _part(race: Race, ends: Sequence[tuple[str, int]], names: dict[int, str]) -> str:
    """Return the part of the step that a race belongs to. `ends`: number of events at the end of each forward and backward."""
    streams = [each.stream.partition(" ")[0] for each in (race.first, race.second)]  # without a set's number
    if "reduce_scatter" in streams or "reduction" in names.get(race.storage, ""):
        return "reduction"
    return next((part for part, end in ends if race.second.seq < end), "forward")


def _misconception(race: Race) -> str:
    if race.second.op == "optimizer":
        return "left-in-flight"
    return "used-before-wait" if race.storage in race.second.reads else "freed-too-early"


# --- Times and bytes ---------------------------------------------------------------------------------------


def figures(ranks: Ranks, seed: int, machine: str) -> dict[str, Any]:
    """Return figures of a step on "gpu" or "host", or of its "forward" alone on the host; see `clocked.timed`. "machine": its name."""
    found: dict[str, Any] = {**ranks.run(probe_clock, 1, seed=seed)[machine][0], "machine": machine}
    if machine != "forward":
        alone = ", ".join(f"{part} {us / 1e3:.1f}" for part, us in exposed_of(found).items())
        ranks.measured[f"virtual {MACHINES[machine]}"] = (
            f"step {found['step_us'] / 1e3:.1f} ms, in which bytes travel alone for ms: {alone}; "
            f"peak {found['peak_bytes'] / 1e6:.0f} MB"
        )
    return found


def where_is(found: dict[str, Any], part: str) -> str:
    """Return the beginning of a sentence about a part, a key of `exposed_of`: "A forward on the virtual GPU"."""
    what = "forward without gradients" if found["machine"] == "forward" else part
    return f"A {'step' if part == 'reductions' else what} on the virtual {MACHINES[found['machine']]}"


def travels_of(found: dict[str, Any], part: str) -> list[list[Any]]:
    """Return the gathers of a forward or a backward, or the reductions of a step. `part`: a key of `exposed_of`.

    Raises:
        Finding: there are none.
    """
    gathers = [each for each in found["gathers"] if each[3] is (part == "backward")]
    travels: list[list[Any]] = found["reductions"] if part == "reductions" else gathers
    if not travels:
        kind, what, one = NOTHING[part]
        where, right = where_is(found, part), f"{one} for each of {UNITS} units"
        raise told("laws.nothing", where, "none", right, kind=kind, what=what).at(_seen(found, 0.0))
    return travels


def compare_exposed(found: dict[str, Any], part: str, target: float, misconception: str) -> None:
    """Check that something travels in a part, and compare its exposed time with the target. `part`: a key of `exposed_of`."""
    travels, exposed = travels_of(found, part), exposed_of(found)[part]
    if exposed > target:
        bare = [each for each in travels if each[2] > 0.5 * (each[1] - each[0])]
        first = part == "reductions"  # the first gather cannot hide behind compute, but a reduction can
        shown = [each for each in bare if first or each is not travels[0]] or travels
        where = f"{where_is(found, part)}: {'gradients' if first else 'gathers'}"
        words: dict[str, Any] = {"kind": misconception, "bare": len(bare), "number": len(travels)}
        raise told("laws.exposed", where, round(exposed), target, **words).at(_seen(found, shown[0][0]))


def _seen(found: dict[str, Any], us: float | None) -> Seen:
    return Seen(found["machine"], found["shown"], us)


def compare_peak(where: str, found: dict[str, Any], limit: int, misconception: str) -> None:
    if (peak := found["peak_bytes"]) > limit:
        raise told("laws.peak", f"{where}:", peak, limit, kind=misconception).at(_seen(found, None))


# --- 08 Streams --------------------------------------------------------------------------------------------


def judge_races(ranks: Ranks, seed: int) -> None:
    """Report races first: they explain why a file is fast. A file without overlap has none, which is no merit."""
    refuse_shortcuts(ranks, seed)
    try:
        compare_overlap(ranks, seed)
    except Finding:
        raise Undecided("08.overlap") from None


def judge_overlap(ranks: Ranks, seed: int) -> None:
    """Check the overlap. A file that waits for nothing is fast; `judge_races` reports its races."""
    try:
        refuse_shortcuts(ranks, seed, "forward")
    except Finding:
        raise Undecided("08.races") from None
    compare_overlap(ranks, seed)


def compare_overlap(ranks: Ranks, seed: int) -> None:
    compare_exposed(figures(ranks, seed, "gpu"), "forward", GPU_FORWARD_US, "no-overlap")


def judge_forward_peak(misconception: str, ranks: Ranks, seed: int, limit: int = FORWARD_PEAK) -> None:
    """Check that few units are whole at once in a forward: the one that computes, in its memory and in a buffer, and one ahead."""
    compare_peak("A forward on the virtual host", figures(ranks, seed, "forward"), limit, misconception)


# --- 09 Forward prefetch -----------------------------------------------------------------------------------


def judge_forward_prefetch(ranks: Ranks, seed: int) -> None:
    refuse_shortcuts(ranks, seed, "forward")
    ranks.measured["board of gathers ahead"] = _board(*board_figures(figures(ranks, seed, "forward")))
    for machine in ("host", "forward"):
        compare_exposed(figures(ranks, seed, machine), "forward", HOST_FORWARD_US, "not-prefetched")


def board_figures(found: dict[str, Any]) -> tuple[int, int]:
    """Return, for a forward alone, the ms in which gathers travel and nothing is computed, and the MB alive at once."""
    return round(sum(each[2] for each in found["gathers"]) / 1e3), round(found["peak_bytes"] / 1e6)


def _board(alone: int, peak: int) -> str:
    """Place a file among the ways to gather ahead. A way is better if one figure is smaller, and the other is not larger."""
    rows = "; ".join(f"{way} {ms} ms at {mb} MB" for way, (ms, mb) in BOARD.items())
    better = [
        repr(way) for way, at in BOARD.items() if at != (alone, peak) and at[0] <= alone and at[1] <= peak
    ]
    place = f"better than yours: {', '.join(better)}" if better else "none is better than yours"
    return f"yours {alone} ms at {peak} MB; {rows}; {place}"


def judge_forward_order(ranks: Ranks, seed: int) -> None:
    _gathered_once(figures(ranks, seed, "host"), "forward")


def _gathered_once(found: dict[str, Any], part: str) -> None:
    """Check that each unit is gathered in a part, and none twice."""
    gathers = travels_of(found, part)
    if len(gathers) != UNITS:
        owners = [each[4] for each in gathers]
        again = (each for place, each in enumerate(gathers) if each[4] in owners[:place])
        moment = next(again, gathers[-1])[0]
        words = {"owners": ", ".join(owners), "too_often": too_often(owners)}
        where = where_is(found, part)
        raise told("laws.gathers", where, len(gathers), UNITS, **words).at(_seen(found, moment))


# --- 10 Backward prefetch, reductions behind ---------------------------------------------------------------


def judge_backward_prefetch(ranks: Ranks, seed: int) -> None:
    refuse_shortcuts(ranks, seed, "backward")
    found = figures(ranks, seed, "host")
    _gathered_once(found, "backward")
    compare_exposed(found, "backward", HOST_BACKWARD_US, "not-prefetched")
    nested = {**ranks.run(probe_nested, 1, seed=seed)["nested"][0], "machine": "host"}
    try:
        compare_exposed(nested, "backward", HOST_BACKWARD_US, "guessed-wrong")
    except Finding as finding:
        finding.seen = None  # the reference has no such run beside it
        finding.message = f"With units inside units: {finding.message}"
        raise


def judge_reductions(ranks: Ranks, seed: int) -> None:
    refuse_shortcuts(ranks, seed, "reduction")
    compare_exposed(figures(ranks, seed, "host"), "reductions", HOST_REDUCTIONS_US, "no-overlap")


def judge_bound(ranks: Ranks, seed: int) -> None:
    found = figures(ranks, seed, "host")
    if (most := max(found["flying"], default=0)) > 2:
        third = next(place for place, flying in enumerate(found["flying"]) if flying > 2)
        moment, where = found["reductions"][third][0], "A step on the virtual host:"
        raise told("laws.flying", where, most, "at most 2").at(_seen(found, moment))


def judge_peak(ranks: Ranks, seed: int) -> None:
    compare_peak("A step on the virtual host", figures(ranks, seed, "host"), PEAK, "unbounded-reductions")
