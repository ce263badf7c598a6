"""The side of a rank: load the student's file, call probes, and write down their reports.

A *probe* is a function `probe(report, **arguments)` of an imported module. It uses the student's file (`submitted()`), and puts data
under keys of the dict `report`: numbers, text, lists, dicts with text keys, tensors, dtypes (`packing`).

Note [Ranks begin a question together]
    A question may make new process groups, for which ranks wait for minutes in no collective. So no rank begins a question before all
    others do. If a rank has failed in the question before, the others lose the connection to it, and end, too. Ranks sleep in this
    barrier, so it is told at once that another one never comes (`launcher.supervisor`, Note [Ranks that stand still]).
"""

from __future__ import annotations

import importlib
import linecache
import os
import re
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hwfsdp.comm import flight_recorder
from hwfsdp.course.failures import SECONDS
from hwfsdp.course.packing import pack
from hwfsdp.course.walls import Walls, limit_processor
from hwfsdp.launcher import supervisor, worker
from hwfsdp.observe import call_sites, collective_calls, events
from hwfsdp.observe.events import COLLECTIVES

PRINTED = 4_000  # characters of what a rank prints in one question that are shown
FAILED = "parts that raised"  # key in a report: the exception of each part that raised, by the part's key
SUBMITTED = "submitted"  # the name of the student's file as a module
# what a student's file must leave as it is, besides the course's own modules
FIXED: tuple[Any, ...] = (
    *(torch, torch.Tensor, torch.nn.Module, torch.UntypedStorage, torch.autograd),
    *(dist, dist.distributed_c10d, dist.ProcessGroup, collective_calls, events, events.Recorder),
)

Report = dict[str, Any]
Probe = Callable[..., None]


class Question(NamedTuple):
    """A probe and its arguments. `simulated`: the probe has a simulated machine, and ends the process group (`simulates`)."""

    module: str
    name: str
    arguments: dict[str, Any]
    simulated: bool = False


def simulates(probe: Probe) -> Probe:
    """Mark a probe that ends the process group of its rank: others that need it come first."""
    setattr(probe, "simulated", True)
    return probe


@dataclass(frozen=True)
class Order:
    """What a rank does: load the file at `path`, whose text is `text`, and answer questions, one after the other."""

    questions: tuple[Question, ...]
    path: str
    text: str
    folder: str
    walls: Walls


def submitted() -> Any:
    """Return the student's file, on a rank."""
    return sys.modules[SUBMITTED]


def on_rank(order: Order) -> bytes:
    """Close the files, load the student's file, and answer. Each answer goes to a file of its own in the run's folder.

    So a later question that hangs or raises does not take an answer away. The result says what was raised, and what was changed.
    """
    raised, number, report = None, 0, Report()
    # kept before the student's code could replace them
    sealed, described, changed = pack, _described, _changed
    rank, folder = os.environ["RANK"], Path(order.folder)
    _redirect_errors(folder / rank)
    out = sys.stdout = sys.stderr = Prefixed(sys.stdout, rank)
    torch.set_num_threads(1)  # models are tiny; threads of several ranks would only compete for cores
    worker.describe_wait = describe_wait
    call_sites.MOST = 0  # no fact has lines of the program, and to find them takes a tenth of a rank's time
    probes = [getattr(importlib.import_module(each.module), each.name) for each in order.questions]
    order.walls.close_files(order.folder)
    fixed = _fixed()
    try:
        limit_processor(SECONDS)
        _load(order.path, order.text)
        (folder / f"loaded {rank}").touch()
        for number, (probe, question) in enumerate(zip(probes, order.questions, strict=True)):
            limit_processor(SECONDS)
            out.begin(number)
            report = Report()
            if question.simulated and number:  # streams that the file keeps belong to the machine before
                load_again()
            elif not question.simulated:
                begin_together()
            probe(report, **question.arguments)
            _write(folder / f"answer {number} {rank}", sealed(report))
    except Exception as error:
        raised = described(error)
        with suppress(Exception):  # what it reported before still counts
            _write(folder / f"part {number} {rank}", sealed(report))
    return sealed({"raised": raised, "changed": changed(fixed)})


def begin_together() -> None:
    """Wait for all ranks (Note [Ranks begin a question together]). Raises RuntimeError: one of them is gone."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        assert dist.group.WORLD is not None
        dist.group.WORLD.barrier().wait()  # no collective of the file


def load_again() -> None:
    """Load the student's file once more, as a new process would."""
    path = submitted().__file__
    _load(path, "".join(linecache.getlines(path)))


def _load(path: str, text: str) -> None:
    module = types.ModuleType(SUBMITTED)
    module.__file__ = path
    sys.modules[SUBMITTED] = sys.modules["submitted_my_fsdp"] = module
    linecache.cache[path] = (len(text), None, text.splitlines(True), path)
    exec(compile(text, path, "exec", dont_inherit=True), vars(module))


def _write(path: Path, data: bytes) -> None:
    new = path.with_suffix(".new")
    new.write_bytes(data)
    new.rename(path)


def _fixed() -> list[tuple[Any, str, Any, Any]]:
    """Return functions and classes that a student's file must leave as they are: their owner, name, value and code."""
    course = [module for name, module in list(sys.modules.items()) if name.startswith("hwfsdp.course.")]
    classes = [
        each
        for of in course
        for each in vars(of).values()
        if isinstance(each, type) and each.__module__.startswith("hwfsdp.course.")
    ]
    return [
        (of, name, value, getattr(value, "__code__", None))
        for of in (*FIXED, *course, *classes)
        for name, value in _values(of).items()
        if callable(value)
    ]


def _values(of: Any) -> dict[str, Any]:
    """Return what the names of a module or a class mean, without binding them."""
    owners = reversed(of.__mro__) if isinstance(of, type) else (of,)
    return {name: value for owner in owners for name, value in vars(owner).items()}


def _changed(fixed: list[tuple[Any, str, Any, Any]]) -> list[str]:
    owners = {id(of): of for of, *_ in fixed}
    values = {key: _values(of) for key, of in owners.items()}
    return [
        f"{of.__name__}.{name}"
        for of, name, value, code in fixed
        if values[id(of)].get(name) is not value or getattr(value, "__code__", None) is not code
    ][:3]


class Prefixed:
    """A rank's standard output. Each line begins with the number of the question and the rank."""

    def __init__(self, stream: Any, rank: str) -> None:
        self.stream, self.rank, self.line = stream, rank, ""
        self.begin(0)

    def begin(self, question: int) -> None:
        self.prefix, self.left = f"{question} rank {self.rank} | ", PRINTED

    def write(self, text: str) -> int:
        *lines, self.line = (self.line + text).split("\n")
        for line in lines:
            if self.left > 0:
                self.stream.write(f"{self.prefix}{line[:self.left]}\n")
            self.left -= len(line) + 1
        return len(text)

    def flush(self) -> None:
        if self.line:
            self.write("\n")
        self.stream.flush()

    def isatty(self) -> bool:
        return False


def _redirect_errors(path: Path) -> None:
    """Send errors of native code to a file."""
    file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)  # Python's own prints do not go there
    os.dup2(file, 2)
    os.close(file)
    warnings.simplefilter("ignore")  # torch warns about wrong code; the page says more


def attempt(report: Report, key: str, part: Callable[[], Any]) -> None:
    """Report the result of `part()`, or its exception, and go on with the probe. Use it only for parts without collectives."""
    try:
        report[key] = part()
    except Exception as error:
        report.setdefault(FAILED, {})[key] = _described(error)


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
        "lost_peer": any(sign in message for sign in supervisor.LOST_PEER),
    }


def describe_wait() -> str:
    """Describe the collective in which this rank waits, with its number among this rank's collectives; "" if there is none."""
    waiting = flight_recorder.waiting.get(threading.main_thread().ident or 0)
    pending, recorder = str(waiting or _collective_called()), events.active()
    issued = [draft for draft in recorder.drafts if draft.op in COLLECTIVES] if recorder else []
    if not pending or not issued:
        return pending
    last = issued[-1]
    name = f"{last.op} of {last.owner!r}" if last.owner else str(last.op)
    if pending not in ("wait", last.op):
        return f"{pending}, after {name}, its collective number {len(issued)}"
    return f"{name}, its collective number {len(issued)}"


BLOCKING = re.compile(r"(all_|barrier|broadcast|gather|monitored_barrier|recv|reduce|scatter|send|wait)")


def _collective_called() -> str:
    """Return the function of torch.distributed that is on this rank's stack, "wait" for one issued before; "" if there is none."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    found = ""
    for inner, line in traceback.walk_stack(frame) if frame else ():
        path, name = inner.f_code.co_filename, inner.f_code.co_name
        if "/torch/distributed/" in path:
            found = name if BLOCKING.match(name) else found
        elif path != collective_calls.__file__:  # this module stands between a call and torch
            return found or ("wait" if ".wait(" in linecache.getline(path, line) else "")
    return found
