"""Runs of the lab's scripts: on two ranks under the recorder, however they end, and one value that says what a script did.

The scripts belong to the course. They run unchanged, except for how they start their ranks: this module calls `main`, so that the
recording up to an exception is kept. Debugging switches of the caller's environment are removed, because they would add
collectives. A script that hangs is ended as soon as no rank has done anything for `STILL` seconds. Then each rank is asked where it
waits, and leaves what it has recorded. A crowded machine makes a run late, but not still, so no run is ended too early.

`bugs.toml` names a measure and its arguments:

    peak       the most bytes of one kind of `memory` that a `rank` held at once
    bytes      the bytes of all events with these attributes (op, phase, step, owner, rank) together
    largest    the bytes of the largest of these events
    count      the number of these events
    dtype      the dtype of all these events
    printed    the number that a pattern finds in the output
    quotient   the quotient of the numbers that two patterns find, `above` and `below`
    parting    the number of the first collective at which the ranks differ

A value is text: digits, a ratio to two decimals, or a name in lower case. It depends on neither clock nor machine nor student.
"""

from __future__ import annotations

import os
import pickle
import re
import runpy
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from hwfsdp.comm import flight_recorder
from hwfsdp.comm.desync_report import Report, describe_divergence
from hwfsdp.course.lab import Bug, find_bug
from hwfsdp.course.text import answer
from hwfsdp.errors import RankError, StateError, UsageError, in_one_line, printable
from hwfsdp.launcher import pickling, worker
from hwfsdp.launcher.launch import run_ranks
from hwfsdp.launcher.supervisor import RankOptions
from hwfsdp.observe.eventlog import EventLog
from hwfsdp.observe.events import Event
from hwfsdp.observe.recording import record, recorded_so_far

WORLD_SIZE = 2
STILL = 3.0  # seconds in which no rank does anything: the run hangs
SECONDS = 120.0  # of a clock: the last resort
_SWITCHES = ("TORCH_DISTRIBUTED_DEBUG", "HWFSDP_SHARED_MEMORY", "TORCHELASTIC_RUN_ID")


class _OfRank(NamedTuple):
    """What one rank brings back: what it recorded, its exception in one line or "", the notes of its collectives."""

    log: EventLog
    raised: str
    calls: list[flight_recorder.NotedCall]


@dataclass(frozen=True)
class Run:
    """A run of a script.

    Attributes:
        log: of all ranks, up to the end of the run; None if a rank that hung did not answer. printed: by all ranks.
        raised: by rank, one line, "" for a rank that returned. parted: where ranks differ (`desync_report`), "" if nowhere.
        hung: it did not end by itself.
    """

    log: EventLog | None
    printed: str
    raised: tuple[str, ...]
    parted: str
    hung: bool = False


def run_script(script: Path) -> Run:
    """Run `main` of a script on `WORLD_SIZE` new ranks, until it ends or hangs.

    Raises:
        RankError: a rank died, or the script cannot be loaded.
    """
    with tempfile.TemporaryDirectory(prefix="hwfsdp-lab-") as folder:
        return _run(script, Path(folder))


def _run(script: Path, folder: Path) -> Run:
    printed: list[str] = []
    call = pickling.dumps((run_on_rank, (str(script), str(folder)), {}))
    environ = {name: value for name, value in os.environ.items() if name not in _SWITCHES}
    options = RankOptions(SECONDS, printed.append, pickle.loads, environ=environ, still=STILL)
    try:
        found: list[_OfRank] = run_ranks(call, WORLD_SIZE, options)
    except RankError as error:
        if error.reason != "late":
            raise
        logs = [EventLog.load(path) for path in sorted(folder.glob("*.json"))]
        merged = EventLog.merge(logs) if len(logs) == WORLD_SIZE else None
        return Run(merged, "".join(printed), (error.headline,), error.table, hung=True)
    raised = tuple(each.raised for each in found)
    ends = [f"raised {said}" if said else "has returned" for said in raised]
    reports = [Report(rank, each.calls, ends[rank]) for rank, each in enumerate(found)]
    parted = describe_divergence(reports) if any(raised) else ""
    return Run(EventLog.merge(each.log for each in found), "".join(printed), raised, parted)


def run_on_rank(script: str, folder: str) -> _OfRank:
    """Run `main` of a script on this rank, recorded. If it hangs, write the recording to a file in `folder`."""
    raised = ""
    worker.describe_wait = partial(_leave_log, worker.describe_wait, Path(folder))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        main = runpy.run_path(script, run_name="lab")["main"]
        with record() as log:
            try:
                main()
            except Exception as error:  # the script's own error: it belongs to the bug
                raised = in_one_line(f"{type(error).__name__}: {error}")
    with open(os.environ[flight_recorder.PATH], "rb") as file:
        return _OfRank(log, raised, flight_recorder.read(file.read()))


def _leave_log(describe_wait: Callable[[], str], folder: Path) -> str:
    """Answer where this rank waits, and write its recording: a rank that hangs cannot do so later."""
    with suppress(StateError):  # it has not started recording, or has finished
        recorded_so_far().save(folder / f"{dist.get_rank()}.json")
    return describe_wait()


# --- A run to look at ----------------------------------------------------------------------------------------


def run(number: str, out: Path | None, as_json: bool) -> int:
    """Run the script of a bug under the recorder. Print what it did, and write its trace, a player, and pictures."""
    bug = find_bug(number)
    target = out or Path("runs") / "lab" / bug.name
    target.mkdir(parents=True, exist_ok=True)  # raises here, before the work is done
    found = run_script(bug.script)
    files = _write(found.log, target) if found.log else []
    said = {
        "printed": found.printed,
        "raised": found.raised,
        "parted": found.parted,
        "files": list(map(str, files)),
    }
    until = " The run did not end; its trace does where the ranks hang." if found.hung else ""
    names = ", ".join(file.name for file in files)
    written = f"Written to {target}/: {names}.{until}" if files else "The run did not end, and left no trace."
    opens = ["player.html plays the run in any browser. The trace opens in https://ui.perfetto.dev"] * bool(
        files
    )
    return answer(as_json, {"bug": bug.name, **said}, [*_described(found), "", written, *opens])


def _write(log: EventLog, target: Path) -> list[Path]:
    """Write the trace, its player, and each picture for which the run has data."""
    from hwfsdp.plot.export import export

    logs = [(target.name, log)]
    log.save(target / "trace.json")
    with suppress(UsageError):
        export(logs, target / "player.html", "html")
    for picture in ("timeline", "memory"):
        with suppress(UsageError):
            export(logs, target / f"{picture}.png", "png", picture)
    return sorted(target.iterdir())


def _described(run: Run) -> list[str]:
    """Return what a run printed, what ended it, and what rank 0 moved and held."""
    lines = ["Output:", *(f"    {printable(line)}" for line in run.printed.splitlines()), ""]
    lines += [
        said if run.hung else f"rank {rank}: {said}"
        for rank, said in enumerate(map(printable, run.raised))
        if said
    ]
    lines += ["", *run.parted.splitlines(), ""] if run.parted else [""] * any(run.raised)
    if run.log is None or run.hung:  # the reason for its end says more
        return lines
    moved: dict[tuple[str, ...], list[int]] = {}  # by step, phase, op and dtype: bytes of each collective
    for event in (log := run.log.of_rank(0)).collectives():
        moved.setdefault((str(event.step), event.phase or "-", event.op, event.dtype), []).append(event.bytes)
    lines += [
        "Collectives of rank 0:",
        "    step  phase     op              dtype     count    largest B    together B",
    ]
    for (step, phase, op, dtype), sizes in moved.items():
        row = f"    {step:>4}  {phase:<9} {op:<15} {dtype:<9} {len(sizes):>5} {max(sizes):>12,} {sum(sizes):>13,}"
        lines.append(row)
    lines += ["", "Most bytes that rank 0 held at once:"]
    return lines + [f"    {kind:<22} {nbytes:>12,}" for kind, nbytes in log.peak_bytes_by_kind().items()]


# --- Evidence ------------------------------------------------------------------------------------------------


@cache
def measured(bug: Bug, script: Path | None = None) -> str:
    """Return the evidence of a script, by default the bug's, on this machine; "" if there is none. It runs once per process."""
    with suppress(UsageError, RankError):
        return measure(bug, run_script(script or bug.script))
    return ""


def measure(bug: Bug, run: Run) -> str:
    """Return the evidence of a bug in a run.

    Raises:
        UsageError: the run has nothing to measure.
    """
    arguments = dict(bug.measure)
    name = arguments.pop("measure")
    try:
        return _MEASURES[name](run, arguments)
    except (ValueError, KeyError, ZeroDivisionError) as error:
        raise UsageError(
            bug.name, expected=f"something to measure by {name}", got=str(error), remedy=""
        ) from None


def _peak(run: Run, arguments: dict[str, Any]) -> str:
    samples = run.log.samples.get(arguments["rank"], []) if run.log else []
    return str(max(sample.bytes_by_kind[arguments["memory"]] for sample in samples))


def _selected(run: Run, arguments: dict[str, Any]) -> list[Event]:
    attributes = {"rank": 0, **arguments}
    found = run.log.select(attributes.pop("op"), **attributes) if run.log else []
    if not found:
        raise ValueError(f"no event with {arguments}")
    return found


def _found(text: str, pattern: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"no line with {pattern!r}")
    return found[1].replace(",", "")


def _quotient(run: Run, arguments: dict[str, Any]) -> str:
    above, below = (float(_found(run.printed, arguments[part])) for part in ("above", "below"))
    return f"{above / below:.2f}"


_MEASURES: dict[str, Callable[[Run, dict[str, Any]], str]] = {
    "peak": _peak,
    "bytes": lambda run, arguments: str(sum(event.bytes for event in _selected(run, arguments))),
    "largest": lambda run, arguments: str(max(event.bytes for event in _selected(run, arguments))),
    "count": lambda run, arguments: str(len(_selected(run, arguments))),
    "dtype": lambda run, arguments: ", ".join(sorted({event.dtype for event in _selected(run, arguments)})),
    "printed": lambda run, arguments: _found(run.printed, arguments["pattern"]),
    "quotient": _quotient,
    "parting": lambda run, arguments: _found(run.parted, r"\bcollective (\d+) of\b"),
}
