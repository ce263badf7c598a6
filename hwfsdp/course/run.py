"""Run a learner's code on ranks: send them questions, and get their answers.

A *probe* is a function that uses the package and reports the results:

    def probe_gather(report: dict[str, Any], seed: int) -> None:
        report["whole"] = …

`Ranks.run` calls the probe on every rank, with the learner's functions in the package, and returns the report of each rank. If a rank
failed, its report holds everything up to the failure. `Ranks.reference` calls the probe with the unchanged package. The ranks send only
packed data; the caller makes verdicts from it.

If a rank dies, hangs, exits or leaves its peers waiting, the run ends with `Broken`. If a rank raises, it does not, because the reports
up to the exception are useful.

Note [Slow or stuck]
    On a crowded machine, a right answer may run out of time. So a late run is repeated with a longer limit, which grows with the load
    of the machine. Only if the run is late again does it count as failed, and the message gives the machine's load. If the ranks
    certainly wait for each other (`caller`, Note [Deadlocks]), the run is not repeated. If other runs are graded at the same time, a
    repeat at once would be slow, too. In that case the run ends with a `Broken` that is provisional, and the process that started
    all runs repeats this one later, alone.
"""

from __future__ import annotations

import importlib
import linecache
import os
import pickle
import re
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hwfsdp.course import NEEDED_BY_RANKS
from hwfsdp.course.confinement import HIDDEN, Confinement, confine, files_of
from hwfsdp.course.guard import BLOCKED, OWN, Guard, forget, forget_modules
from hwfsdp.course.manifest import compiled_body
from hwfsdp.course.oracles import keep_only
from hwfsdp.course.overlay import Overlay, install
from hwfsdp.course.packing import pack, unpack
from hwfsdp.course.processes import nothing_left_behind
from hwfsdp.course.refusals import unusable
from hwfsdp.errors import RankError, UsageError
from hwfsdp.launcher import caller, pickling, ranks, worker
from hwfsdp.launcher.fork_server import import_ahead
from hwfsdp.launcher.messages import read_message
from hwfsdp.observe import collectives
from hwfsdp.observe.eventlog import EventLog
from hwfsdp.observe.events import COLLECTIVES, Event, Sample

Probe = Callable[..., None]
Report = dict[str, Any]

RUN_SECONDS = 8.0  # limit of one run; a slower run is repeated (Note [Slow or stuck])
ALL_SECONDS = 17.0  # limit of all runs of an exercise
LONGER = 2.0  # the repeat's limit: RUN_SECONDS times this factor, times the processes per core
MOST_LOAD = 4.0  # largest value of that number of processes per core
PATIENCE = "HWFSDP_PATIENCE"  # environment: a factor for both limits, on a slow or crowded machine
WORLD_SIZE = 2  # number of ranks of runs for which it does not matter
FAILED = "parts that raised"  # key in a report: the exception of each part that raised, by the part's key
# environment variables that ranks keep
KEPT = """PATH LANG LANGUAGE TZ LD_LIBRARY_PATH DYLD_LIBRARY_PATH GLOO_SOCKET_IFNAME HWFSDP_SHARED_MEMORY OMP_NUM_THREADS
    MKL_NUM_THREADS PYTHONHASHSEED PYTHONPATH PYTHONWARNINGS""".split()
PRINTED = 4_000  # number of printed characters that are kept


@dataclass(frozen=True)
class Raised:
    """An exception of a rank.

    Attributes:
        kind: the exception's class; message: its text.
        frames: the frames of the traceback, the outermost first; each has file, line, function and text.
        lost_peer: the exception says that another rank was gone.
    """

    rank: int
    kind: str
    message: str
    frames: list[dict[str, Any]]
    lost_peer: bool = False


@dataclass(frozen=True)
class Run:
    """The reports of the ranks of one run.

    Attributes:
        reports: the reports, by rank. raised: the exceptions of the ranks that failed, the likely cause first.
    """

    reports: list[Report]
    raised: list[Raised] = field(default_factory=list)

    def __getitem__(self, key: str) -> list[Any]:
        """Return what every rank reported under this name, by rank.

        Raises:
            Unreported: a rank failed before it reported this.
        """
        if all(key in report for report in self.reports):
            return [report[key] for report in self.reports]
        of_part = [Raised(**r[FAILED][key]) for r in self.reports if key in r.get(FAILED, {})]
        raise Unreported(key, Run(self.reports, of_part or self.raised))

    def log(self, key: str = "log") -> EventLog:
        """Return the event log of all ranks, from the result of `log_data` that each rank reported under this name."""
        logs = []
        for rank, data in enumerate(self[key]):
            events = [_event(fields) for fields in data["events"]]
            samples = [Sample(us, by_kind) for us, by_kind in data["samples"]]
            logs.append(EventLog(events, {rank: samples}))
        return EventLog.merge(logs)


def _event(fields: dict[str, Any]) -> Event:
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    return Event(**values)


def log_data(log: EventLog) -> dict[str, Any]:
    """Return one rank's event log as data for a report."""
    samples = [[sample.us, sample.bytes_by_kind] for of_rank in log.samples.values() for sample in of_rank]
    return {"events": [event.as_dict() for event in log.events], "samples": samples}


class Unreported(Exception):
    """A judge asked for something that a rank did not report.

    Attributes:
        key: the name of the missing report. run: the run with the existing reports.
    """

    def __init__(self, key: str, run: Run) -> None:
        super().__init__(key)
        self.key, self.run = key, run


class Broken(Exception):
    """A run that ended in a forbidden way. Nothing of it counts.

    Attributes:
        reason: "died", "late", "exited", "processes", "files" or "blocked".
        rank: the first rank to which this happened. got: what happened.
        stacks: the stacks of the ranks, as text.
        unsure: the run was late, but may only be slow (Note [Slow or stuck]). provisional: the run must be repeated.
    """

    unsure = provisional = False

    def __init__(self, reason: str, rank: int, got: str, stacks: str = "") -> None:
        super().__init__(got)
        self.reason, self.rank, self.got, self.stacks = reason, rank, got, stacks


Runs = dict[str, Run | Broken]  # by probe, number of ranks and arguments


@dataclass(frozen=True)
class _Order:
    """An order to a rank.

    Attributes:
        module, name, arguments: of the probe.
        overlay: the learner's functions to load; None: the unchanged package. off_limits: paths that these functions may not use.
        folder: the folder for standard error. confinement: the rights that ranks with a learner's functions give up.
    """

    module: str
    name: str
    arguments: dict[str, Any]
    overlay: Overlay | None = None
    off_limits: tuple[Path, ...] = ()
    folder: str = ""
    confinement: Confinement | None = None


def load_per_core() -> float:
    """Return the number of processes per core that want to run on this machine, on average over the last minute."""
    return os.getloadavg()[0] / (os.cpu_count() or 1)


@dataclass(frozen=True)
class Times:
    """Time limits of runs, in seconds. `patience()` multiplies all of them.

    Attributes:
        run_seconds: the limit of one run. all_seconds: the limit of all runs together.
        repeat: repeat a late run; False if other runs are graded at the same time (Note [Slow or stuck]).
        clock, load: functions that return the time in seconds, and the machine's load per core.
    """

    run_seconds: float = RUN_SECONDS
    all_seconds: float = ALL_SECONDS
    repeat: bool = True
    clock: Callable[[], float] = time.monotonic
    load: Callable[[], float] = load_per_core


# runs with the unchanged package, which are the same for all learners; the most recently used one is last
_references: dict[str, Run] = {}
# number of remembered runs: more than one exercise needs, but few if each submission of a class has its own seed
_REMEMBERED = 32


class Ranks:
    """Ranks that run probes, each at most once with the same arguments.

    Args:
        overlay: the learner's functions.
        write: called with the first `PRINTED` characters that the learner's code prints.
        times: the time limits of the runs.
        world_size: number of ranks of runs for which it does not matter: 1 to 4. An answer has to be right for all of them.
        off_limits: paths that a learner's code may not use: solutions, tests, other submissions.

    Attributes:
        measured: figures for the learner, by name. Judges add them, also if a check fails.
        narrow: only one check is judged, so a run holds only what this check asks for, and nothing for other checks.
    """

    def __init__(
        self,
        overlay: Overlay,
        write: Callable[[str], None] = lambda text: None,
        times: Times = Times(),
        world_size: int = WORLD_SIZE,
        off_limits: Sequence[Path] = (),
    ) -> None:
        self.overlay, self.times, self.world_size = overlay, times, world_size
        answers = [compiled_body(place) for submitted in overlay.submitted for place in submitted.places]
        self.off_limits = (*off_limits, *answers)
        self.run_seconds, self.all_seconds = times.run_seconds * patience(), times.all_seconds * patience()
        self.measured: dict[str, str] = {}
        self.narrow = False
        self._write, self._left = write, PRINTED
        self._deadline, self._extended = times.clock() + self.all_seconds, False
        self.runs: Runs = {}
        self._late: Runs = {}

    def run(self, probe: Probe, world_size: int, **arguments: Any) -> Run:
        """Call `probe(report, **arguments)` on `world_size` ranks that have the learner's functions.

        Raises:
            Broken: a rank died, hung or exited.
        """
        key = _name_of(probe, world_size, arguments)
        found = self._late.get(key) or self.runs.get(key)
        if found is None:
            found = self._attempt(probe, world_size, arguments)
            is_late = isinstance(found, Broken) and found.reason == "late"  # a larger limit may suffice
            (self._late if is_late else self.runs)[key] = found
        if isinstance(found, Broken):
            raise found
        return found

    def reference(self, probe: Probe, world_size: int, **arguments: Any) -> Run:
        """Do the same with the unchanged package, as an oracle. The last `_REMEMBERED` runs are kept."""
        key = _name_of(probe, world_size, arguments)
        found = _references.pop(key, None)
        order = _Order(probe.__module__, probe.__name__, arguments)
        _references[key] = found or _launch(order, world_size, 60.0, lambda text: None)
        while len(_references) > _REMEMBERED:
            del _references[next(iter(_references))]
        return _references[key]

    def _attempt(self, probe: Probe, world_size: int, arguments: dict[str, Any]) -> Run | Broken:
        """Make a run, and repeat it if it was late. See Note [Slow or stuck]."""
        found = self.attempt_once(probe, world_size, arguments, self.run_seconds)
        if not isinstance(found, Broken) or not found.unsure:
            return found
        if not self.times.repeat:
            found.provisional = True
            return found
        slow = min(MOST_LOAD, max(1.0, self.times.load()))
        if not self._extended:
            self._extended = True
            self._deadline = self.times.clock() + slow * (LONGER * self.run_seconds + self.all_seconds)
        found = self.attempt_once(probe, world_size, arguments, slow * LONGER * self.run_seconds)
        if isinstance(found, Broken) and found.unsure:
            load = f"the machine's load average is {self.times.load():.1f} per core"
            got = f"{found.got}, repeated with nothing beside it that is graded; {load}"
            return Broken("late", found.rank, got, found.stacks)
        return found

    def attempt_once(
        self, probe: Probe, world_size: int, arguments: dict[str, Any], seconds: float
    ) -> Run | Broken:
        """Make one run, limited to this many seconds, or to the seconds that are left for all runs."""
        seconds = min(seconds, self._deadline - self.times.clock())
        if seconds <= 0.5:
            late = Broken("late", 0, f"no end within {self.all_seconds:g} s for all runs of the exercise")
            late.unsure = True
            return late
        try:
            order = _Order(probe.__module__, probe.__name__, arguments, self.overlay, self.off_limits)
            return _launch(order, world_size, seconds, self._keep)
        except Broken as broken:
            return broken

    def _keep(self, text: str) -> None:
        """Pass on printed text, up to a limit."""
        kept, self._left = text[: self._left], max(0, self._left - len(text))
        if kept:
            self._write(kept)


def _name_of(probe: Probe, world_size: int, arguments: dict[str, Any]) -> str:
    return f"{probe.__module__}:{probe.__name__} {world_size} {arguments!r}"


def patience() -> float:
    """Return the factor of all time limits.

    Raises:
        UsageError: the environment variable is not a number of at least 1.
    """
    text = os.environ.get(PATIENCE, "1")
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 1 <= factor < float("inf"):
        raise unusable("run.patience", text=text)
    return factor


def warm_up() -> None:
    """Return when ranks can be started without delay."""
    import_ahead(NEEDED_BY_RANKS)
    ranks.launch(os.getpid, 1)  # any function


def _launch(order: _Order, world_size: int, seconds: float, write: Callable[[str], None]) -> Run:
    with tempfile.TemporaryDirectory(prefix="hwfsdp-run-") as name:
        folder, prepare = Path(name), None
        order = replace(order, folder=name)
        if order.overlay is not None:
            confinement = confine(folder, order.overlay.modules, order.off_limits)
            prepare = confinement.enter
            order = replace(order, confinement=confinement)
        try:
            with nothing_left_behind(folder) as watch:
                call = pickling.dumps((_run_on_rank, (order,), {}))
                more: dict[str, Any] = {"environ": _environment(folder), "prepare": prepare}
                packed = ranks.run_ranks(call, world_size, seconds, "cpu", write=write, unpickle=None, **more)
        except RankError as error:
            if watch.exceeded:
                raise Broken(watch.exceeded, error.rank, f"too many {watch.exceeded}") from None
            raise _broken(error, folder) from None
    try:
        return _run_of([_result(data) for data in packed])
    except (UsageError, TypeError, KeyError, ValueError, pickle.UnpicklingError) as error:
        raise Broken("exited", 0, f"something else than a report came back ({error})") from None


def _run_of(results: list[Report]) -> Run:
    """Return the reports and the exceptions of the ranks. The likely cause comes first."""
    raised = [Raised(**result["raised"]) for result in results if result["raised"] is not None]
    if not all(isinstance(r.rank, int) and isinstance(r.kind + r.message, str) for r in raised):
        raise TypeError("an exception of another form")
    if not all(isinstance(frame["file"] + frame["text"], str) for r in raised for frame in r.frames):
        raise TypeError("a traceback of another form")
    for rank, result in enumerate(results):
        if result["blocked"]:
            raise Broken("blocked", rank, str(result["blocked"][0]))
    raised.sort(key=lambda r: (r.lost_peer, r.rank))
    return Run([dict(result["report"]) for result in results], raised)


def _environment(folder: Path) -> dict[str, str]:
    """Return this process's environment without private variables and without variables that change how ranks behave.

    Ranks of the course see no GPU, because they compute on the CPU.
    """
    ours = {name: value for name, value in os.environ.items() if name in KEPT or name.startswith("LC_")}
    ours |= {"HOME": str(folder), "TMPDIR": str(folder)}
    return ours | {"CUDA_VISIBLE_DEVICES": "", "TORCH_DISTRIBUTED_DEBUG": "OFF"}


def _result(pickled: bytes) -> Any:
    """Unpack the result of `_run_on_rank`. The pickle may contain only bytes."""
    found = read_message(pickled)
    if not isinstance(found, bytes):
        raise TypeError("not bytes")
    return unpack(found)


def _broken(error: RankError, folder: Path) -> Broken:
    """Explain why a run was ended. `folder` holds the standard error of the ranks."""
    got, reason, stacks = error.got, error.reason, error.traceback
    if got.startswith(BLOCKED):
        return Broken("blocked", error.rank, got.removeprefix(BLOCKED), stacks)
    if reason == "raised":
        reason = "exited" if got.startswith(("SystemExit", "KeyboardInterrupt")) else "died"
    elif "exit with status" in got:
        reason = "exited"
    elif reason == "died":
        stacks = _tail(folder / str(error.rank))
    broken = Broken(reason, error.rank, got, stacks)
    broken.unsure = reason == "late" and not error.deadlock
    return broken


def _tail(path: Path) -> str:
    """Return the end of a file as text."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 64_000))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


# --- On the rank -------------------------------------------------------------------------------------------


def attempt(report: Report, key: str, part: Callable[[], Any]) -> None:
    """Report the result of `part()`, or its exception, and go on with the probe. Use it only for parts without collectives."""
    try:
        report[key] = part()
    except Exception as error:
        report.setdefault(FAILED, {})[key] = _described(error)


def _run_on_rank(order: _Order) -> bytes:
    """Load the package, call the probe, and pack its report."""
    report: Report = {}
    raised: dict[str, Any] | None = None
    finish: Callable[[], list[str]] = list
    sealed, described = pack, _described  # kept before the learner's code could replace them
    redirect_errors(Path(order.folder) / str(dist.get_rank()))
    torch.set_num_threads(1)  # models are tiny; threads of several runs would only compete for cores
    try:
        if order.overlay is None:
            probe = _probe_of(order)
        else:
            worker.describe_wait = describe_wait
            guard = _guard_for(order, order.overlay)
            finish = guard.finish
            probe = _let_in(order, order.overlay, guard)
        probe(report, **order.arguments)
    except Exception as error:
        raised = described(error)
    blocked = finish()
    try:
        return sealed({"report": report, "raised": raised, "blocked": blocked})
    except Exception as error:  # a learner's function returned something that is not data
        return sealed({"report": {}, "raised": raised or described(error), "blocked": blocked})


def _probe_of(order: _Order) -> Probe:
    probe: Probe = getattr(importlib.import_module(order.module), order.name)
    return probe


def _guard_for(order: _Order, overlay: Overlay) -> Guard:
    texts = [path for module in overlay.modules for path in files_of(module)]
    by_itself = not overlay.modules  # a station, or the homework
    return Guard([str(path) for path in (*order.off_limits, *HIDDEN, *texts)], by_itself)


def _let_in(order: _Order, overlay: Overlay, guard: Guard) -> Probe:
    """Load the probe, delete all other parts of the checks, and then load the learner's functions while a guard watches."""
    found: list[Probe] = []
    forget([place for submitted in overlay.submitted for place in submitted.places])

    def close_the_door() -> None:
        found.append(_probe_of(order))
        if not overlay.modules:
            forget_modules(OWN, "the package's own")
        keep_only(found[0])
        if order.confinement is not None:
            order.confinement.close_files(order.folder)
        guard.arm()

    install(overlay, when_loaded=close_the_door, run=guard.doors.run)
    return found[0]


def redirect_errors(path: Path) -> None:
    """Send errors of native code to a file, and print Python's standard error like the rest."""
    file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)  # Python's own prints do not go there
    os.dup2(file, 2)
    os.close(file)
    sys.stderr = sys.stdout
    warnings.simplefilter("ignore")  # torch warns about wrong code; the verdict says more


def _described(error: Exception) -> dict[str, Any]:
    """Return the parts of an exception that `Raised` keeps."""
    frames = [
        {"file": frame.filename, "line": frame.lineno or 0, "function": frame.name, "text": frame.line or ""}
        for frame in traceback.extract_tb(error.__traceback__)
    ]
    notes = [note for note in getattr(error, "__notes__", ()) if isinstance(note, str)]
    message = ", ".join([str(error), *notes])
    return {
        "rank": int(os.environ["RANK"]),  # the process group may no longer exist
        "kind": type(error).__name__,
        "message": message,
        "frames": frames[-40:],
        "lost_peer": any(sign in message for sign in caller.LOST_PEER),
    }


def describe_wait() -> str:
    """Describe the collective in which this rank waits, with its number among this rank's collectives; "" if there is none."""
    history, events = sys.modules.get("hwfsdp.comm.history"), sys.modules.get("hwfsdp.observe.events")
    waiting = getattr(history, "waiting", {}).get(threading.main_thread().ident)
    pending = str(waiting or _collective_called())
    recorder = events.active() if events else None
    if not pending or recorder is None:
        return pending
    issued = [draft for draft in recorder.drafts if draft.op in COLLECTIVES]
    if not issued:
        return pending
    last = issued[-1]
    name = f"{last.op} of {last.owner!r}" if last.owner else str(last.op)
    if pending not in (WAIT, last.op):
        return f"{pending}, after {name}, its collective number {len(issued)}"
    return f"{name}, its collective number {len(issued)}"


WAIT = "wait"  # the rank waits for a collective that it issued before
BLOCKING = re.compile(r"(all_|barrier|broadcast|gather|monitored_barrier|recv|reduce|scatter|send|wait)")


def _collective_called() -> str:
    """Return the function of torch.distributed that is on this rank's stack; "" if there is none."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    found = ""
    for inner, line in traceback.walk_stack(frame) if frame else ():
        path, name = inner.f_code.co_filename, inner.f_code.co_name
        if "/torch/distributed/" in path:
            found = name if BLOCKING.match(name) else found
        elif path != collectives.__file__:  # this module stands between a call and torch
            return found or (WAIT if ".wait(" in linecache.getline(path, line) else "")
    return found
