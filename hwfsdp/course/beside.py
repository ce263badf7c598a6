"""A page of the step player that shows a failed run beside the reference's run, opened at the moment to look at.

Both runs are on a simulated machine (`stations.clocked`). The learner's run was recorded when it was judged. The reference's run is
the same on every computer. So `python -m hwfsdp.course logs` writes its log to the file `LOGS` once, and a check does not run the
reference.
The log has the times of the reference's events, but none of its code. The page shows only one file of code: the learner's.
"""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

from hwfsdp.course.manifest import PACKAGE
from hwfsdp.course.overlay import Overlay
from hwfsdp.course.run import Ranks, Run, Times
from hwfsdp.course.stations.clocked import MACHINES, probe_clock, probe_order
from hwfsdp.course.stations.stages import stage
from hwfsdp.course.submission import Source
from hwfsdp.course.verdict import Grade, Seen
from hwfsdp.observe.eventlog import EventLog
from hwfsdp.observe.places import INSIDE, path_of
from hwfsdp.observe.run_info import VIRTUAL

LOGS = PACKAGE / "course" / "stations" / "reference.json.gz"  # the reference's logs, by station and machine
STATIONS = {"03": ("forward",), **dict.fromkeys(("08", "09", "10"), ("order", "gpu", "host", "forward"))}
FOLDER = Path("runs", "check")
_TIMES = Times(60.0, 120.0)  # seconds, for the reference's runs


def write_page(grade: Grade, source: Source) -> Path | None:
    """Write the page of the first finding that says where to look, and return its path.

    Without such a finding there is no page, and this function removes an older one.

    Args:
        source: the file that was graded.
    """
    from hwfsdp.plot.player.packing import Start  # imported late, because it loads matplotlib
    from hwfsdp.plot.player.page import make_page

    path = FOLDER / f"{grade.exercise.number}.html"
    for result in grade.shown_results:
        if result.finding and result.finding.seen:
            seen, said = result.finding.seen, f"{result.check.id}: {result.finding.message}"
            mine, theirs = _own(seen, source), reference_log(seen.machine, grade.exercise.number)
            logs = [("yours", mine), ("the reference", theirs)]
            path.parent.mkdir(parents=True, exist_ok=True)
            make_page(logs, Start(said, 0, _peak(mine) if seen.us is None else seen.us)).save(path)
            return path
    path.unlink(missing_ok=True)
    return None


def _own(seen: Seen, source: Source) -> EventLog:
    """Return the learner's log. The page may show only the learner's file, in the version that was graded."""
    log = Run([{"log": seen.log}]).log()
    files = {place.partition(":")[0] for event in log.events for place in event.code.split(INSIDE)} - {""}
    own = [file for file in files if path_of(file).resolve() == source.path.resolve()] or [str(source.path)]
    code = dict.fromkeys(own, zlib.crc32((source.text or "").encode()))
    log.about = {**_virtual(seen.machine), "code": code}
    return log


def _peak(log: EventLog) -> float:
    return max(log.samples[0], key=lambda sample: sum(sample.bytes_by_kind.values())).us


def reference_log(machine: str, number: str) -> EventLog:
    """Return the reference's log on this machine after a station.

    If that station has no log, return the log of the last station before it. For the homework, return the log of the last station.
    """
    known = json.loads(gzip.decompress(LOGS.read_bytes()))
    stations = [station for station in sorted(known) if machine in known[station]]
    found = [station for station in stations if station <= number] or stations
    log = Run([{"log": known[found[-1]][machine]}]).log()
    log.about = _virtual(machine)
    return log


def _virtual(machine: str) -> dict[str, Any]:
    return {"device": f"{VIRTUAL}{MACHINES[machine]}"}


def record_reference() -> None:
    """Run the reference on the simulated machines and write `LOGS`: its events and their times, without places in its code."""
    logs: dict[str, dict[str, Any]] = {}
    for number, machines in STATIONS.items():
        text = stage(int(number))
        ranks = Ranks(Overlay.alone("my_fsdp", "<the reference>", text), times=_TIMES)
        clock, order = (ranks.run(probe, 1, seed=0).reports[0] for probe in (probe_clock, probe_order))
        runs = {**clock, **order}
        logs[number] = {machine: _bare(runs[machine]["shown"]) for machine in machines}
    text = json.dumps(logs, separators=(",", ":"))
    LOGS.write_bytes(gzip.compress(text.encode(), mtime=0))


def _bare(log: dict[str, Any]) -> dict[str, Any]:
    """Return a log without places in the code."""
    return {**log, "events": [{**event, "code": ""} for event in log["events"]]}
