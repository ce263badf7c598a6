"""Check the rules of Chrome trace JSON that ui.perfetto.dev relies on. Each rule is a function that yields violations.

The rules were tested with the viewer itself (v52). It accepts a file that keeps them, and shows as many slices, arrows and tracks as
the file has. Each docstring says how the viewer treats a file that breaks the rule.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

Entry = dict[str, Any]
Track = tuple[int, int]

TIMED = "XsfCbe"


def track(entry: Entry) -> Track:
    return entry["pid"], entry["tid"]


def of_phase(trace: dict[str, Any], *phases: str) -> list[Entry]:
    return [e for e in trace["traceEvents"] if e["ph"] in phases]


def document(trace: dict[str, Any]) -> Iterator[str]:
    """Require one object with a list of events and a unit, in strict JSON. Else the viewer does not open the file."""
    if not isinstance(trace.get("traceEvents"), list) or trace.get("displayTimeUnit") not in ("ms", "ns"):
        yield "no traceEvents, or no displayTimeUnit"
    try:
        json.dumps(trace, allow_nan=False)
    except (ValueError, TypeError) as error:
        yield f"not strict JSON: {error}"


def fields(trace: dict[str, Any]) -> Iterator[str]:
    """Require a phase, a name, a process number of 1 or more, a thread number, and finite times. The viewer drops other entries."""
    for e in trace["traceEvents"]:
        if e.get("ph") not in (*"MXsfCbe",) or not isinstance(e.get("name"), str):
            yield f"phase or name: {e}"
        elif not (type(e.get("pid")) is type(e.get("tid")) is int and e["pid"] >= 1 and e["tid"] >= 0):
            yield f"pid or tid: {e}"
        elif e["ph"] in TIMED and not (type(e.get("ts")) in (int, float) and 0 <= e["ts"] < math.inf):
            yield f"time: {e}"
        elif e["ph"] == "X" and not (type(e.get("dur")) in (int, float) and 0 <= e["dur"] < math.inf):
            yield f"duration: {e}"


def threads(trace: dict[str, Any]) -> Iterator[str]:
    """Require a thread number of 1 or more for slices, because thread 0 is the process itself."""
    yield from (f"slice on thread 0: {e['name']}" for e in of_phase(trace, "X") if e["tid"] < 1)


def names(trace: dict[str, Any]) -> Iterator[str]:
    """Require one name and one place for each process and each track, unique in its process. Else the viewer shows numbers."""
    slices = of_phase(trace, "X")
    for kind, key in (("process", lambda e: e["pid"]), ("thread", track)):
        for what, argument in (("name", "name"), ("sort_index", "sort_index")):
            described = [e for e in of_phase(trace, "M") if e["name"] == f"{kind}_{what}"]
            if sorted(map(key, described)) != sorted({key(e) for e in slices}):
                yield f"{kind}_{what}: not one for each {kind}"
            values = Counter(
                (e["pid"] if kind == "thread" else 0, e["args"].get(argument)) for e in described
            )
            yield from (f"{kind}_{what} {v} twice" for v, n in values.items() if n > 1)


def nesting(trace: dict[str, Any]) -> Iterator[str]:
    """Require slices of one track to be nested or apart, in whole ns. The viewer drops a slice that partly overlaps another one."""
    tracks: dict[Track, list[tuple[int, int]]] = {}
    for e in of_phase(trace, "X"):
        begin, length = int(e["ts"] * 1000), int(e["dur"] * 1000)
        tracks.setdefault(track(e), []).append((begin, begin + length))
    for place, spans in tracks.items():
        open_ones: list[int] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_ones and open_ones[-1] <= start:
                open_ones.pop()
            if open_ones and end > open_ones[-1]:
                yield f"overlap on {place} at {start}"
            open_ones.append(end)


def arrows(trace: dict[str, Any]) -> Iterator[str]:
    """Require that an arrow has one begin and a later end, each inside a slice, and that the end is bound to the slice around it.

    Else the viewer does not draw the arrow, or ties it to another slice.
    """
    slices: dict[Track, list[tuple[float, float]]] = {}
    for e in of_phase(trace, "X"):
        slices.setdefault(track(e), []).append((e["ts"], e["ts"] + e["dur"]))
    ends: dict[Any, dict[str, Entry]] = {}
    for e in of_phase(trace, "s", "f"):
        if ends.setdefault((e["cat"], e["name"], e["id"]), {}).setdefault(e["ph"], e) is not e:
            yield f"arrow {e['id']}: two of {e['ph']}"
        if not any(start <= e["ts"] <= end for start, end in slices.get(track(e), [])):
            yield f"arrow {e['id']}: {e['ph']} is in no slice"
        if e["ph"] == "f" and e.get("bp") != "e":
            yield f"arrow {e['id']}: not bound to the slice around its end"
    for (_, _, number), both in ends.items():
        if set(both) != {"s", "f"}:
            yield f"arrow {number}: only {set(both)}"
        elif both["f"]["ts"] < both["s"]["ts"]:
            yield f"arrow {number}: ends before it begins"


def lifetimes(trace: dict[str, Any]) -> Iterator[str]:
    """Require that an `e` with the same name and id closes each `b`, innermost first, in order of time. Ids are local to a process."""
    stacks: dict[Any, list[Entry]] = {}
    last: dict[Any, float] = {}
    for e in of_phase(trace, "b", "e"):
        local = e.get("id2", {}).get("local")
        if not isinstance(local, str) or "id" in e or not e.get("cat"):
            yield f"no local id, or no category: {e}"
            continue
        key = (e["pid"], e["cat"], local)
        if e["ts"] < last.get(key, 0.0):
            yield f"{e['name']} goes back in time"
        last[key] = e["ts"]
        stack = stacks.setdefault(key, [])
        if e["ph"] == "b":
            stack.append(e)
        elif not stack or stack.pop()["name"] != e["name"]:
            yield f"{e['name']} ends what did not begin"
    yield from (f"{stack[-1]['name']} does not end" for stack in stacks.values() if stack)


def counters(trace: dict[str, Any]) -> Iterator[str]:
    """Require one number per counter. The viewer makes a separate track of each further number, and never a stack."""
    for e in of_phase(trace, "C"):
        values = list(e.get("args", {}).values())
        if len(values) != 1 or type(values[0]) not in (int, float):
            yield f"{e['name']}: {values}"


RULES: tuple[Callable[[dict[str, Any]], Iterator[str]], ...] = (
    document,
    fields,
    threads,
    names,
    nesting,
    arrows,
    lifetimes,
    counters,
)


def broken_rules(trace: dict[str, Any]) -> dict[str, list[str]]:
    """Return rule → violations; empty for a good trace. Check the other rules only if the trace keeps the first two."""
    for rules in (RULES[:2], RULES[2:]):
        found = {rule.__name__: complaints for rule in rules if (complaints := list(rule(trace)))}
        if found:
            return found
    return {}
