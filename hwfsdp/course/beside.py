"""A run that a check found fault with, beside the reference's: a page of the step player, opened where to look.

Both runs are on a virtual machine (`stations.clocked`). The learner's run was recorded when it was judged. The reference's run is the same
on every computer. So its log is in the file `LOGS`, which `python -m hwfsdp.course logs` writes, and a check does not run the reference.
The log has the times of the reference's events, and nothing of its code. Of the learner's code, the page shows their file only.
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
from hwfsdp.course.stations.clocked import probe_clock, probe_order
from hwfsdp.course.stations.stages import stage
from hwfsdp.course.submission import Source
from hwfsdp.course.verdict import Grade, Seen
from hwfsdp.observe.eventlog import EventLog
from hwfsdp.observe.places import INSIDE, path_of

LOGS = PACKAGE / "course" / "stations" / "reference.json.gz"  # by station and machine, the reference's log
STATIONS = {"03": ("forward",), **dict.fromkeys(("08", "09", "10"), ("order", "gpu", "host", "forward"))}
MACHINES = {"order": "GPU", "gpu": "GPU", "host": "host", "forward": "host"}  # what readers know them by
FOLDER = Path("runs", "check")
_TIMES = Times(60.0, 120.0)  # for the reference


def write_page(grade: Grade, source: Source) -> Path | None:
    """Write the page of the first finding that says where to look; return where.

    Without such a finding there is no page, and an older one is removed.

    Args:
        source: the file that was graded.
    """
    from hwfsdp.plot.player.packing import Start  # only now, for it loads matplotlib
    from hwfsdp.plot.player.page import make_page

    path = FOLDER / f"{grade.exercise.number}.html"
    for result in grade.shown_results:
        if result.finding and result.finding.seen:
            seen, said = result.finding.seen, f"{result.check.id}: {result.finding.message}"
            mine, theirs = _own(seen, source), reference_log(seen.machine, grade.exercise.number)
            logs = [(f"yours, virtual {MACHINES[seen.machine]}", mine), ("the reference", theirs)]
            path.parent.mkdir(parents=True, exist_ok=True)
            make_page(logs, Start(said, 0, _peak(mine) if seen.us is None else seen.us)).save(path)
            return path
    path.unlink(missing_ok=True)
    return None


def _own(seen: Seen, source: Source) -> EventLog:
    """The learner's log. Of the files in it, the page may show the learner's, as it was graded."""
    log = Run([{"log": seen.log}]).log()
    files = {place.partition(":")[0] for event in log.events for place in event.code.split(INSIDE)} - {""}
    own = [file for file in files if path_of(file).resolve() == source.path.resolve()] or [str(source.path)]
    log.about = {"code": dict.fromkeys(own, zlib.crc32((source.text or "").encode()))}
    return log


def _peak(log: EventLog) -> float:
    return max(log.samples[0], key=lambda sample: sum(sample.bytes_by_kind.values())).us


def reference_log(machine: str, number: str) -> EventLog:
    """The reference's log on this machine after a station, or after the last one before it; of the homework, after all of them."""
    known = json.loads(gzip.decompress(LOGS.read_bytes()))
    stations = [station for station in sorted(known) if machine in known[station]]
    found = [station for station in stations if station <= number] or stations
    return Run([{"log": known[found[-1]][machine]}]).log()


def record_reference() -> None:
    """Run the reference on the virtual machines, and write `LOGS`: what it did and when, without places in its code."""
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
    """A log without places."""
    return {**log, "events": [{**event, "code": ""} for event in log["events"]]}
