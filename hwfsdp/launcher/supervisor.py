"""The ranks of one call, as their caller sees them: start them, read their messages, report a failure, end them.

Note [Which rank failed first]
    When a rank dies, its connections break. So its neighbors fail a moment later, with errors about the connection. After
    the first failure, the caller gives the other ranks a moment to fail, too. Then it reports the first failure that is not
    about a lost connection.

Note [Ranks that stand still]
    A caller that knows that its ranks never sleep on purpose need not wait for its timeout (`RankOptions.still`). It ends the call as
    soon as all ranks sleep, and none of them has woken for so many seconds. A rank that computes, that waits for a processor or
    for a disk, does not sleep, so a crowded machine makes nothing late. Ranks that wake now and then, and sleep at each of many
    looks, wait in a loop for something that does not come. The caller looks `_TIMES_AS_LONG` times as long to be sure. On macOS,
    nothing tells whether a rank has woken between two looks, so the caller always looks so long.

Note [Messages]
    Reading a rank's message runs no code, and never waits for the rest of it. A pickle can run any code when it is unpickled. So
    messages consist of text and bytes only, and their unpickler accepts no other objects. Results and exceptions of ranks are
    pickled bytes inside messages. Only a caller that trusts its ranks unpickles them.

        ("print", text)
        ("return", pickled)
        ("raise", (what happened, traceback, pickled exception or None))
        ("where", (the collective in which it waits or "", stack))
"""

from __future__ import annotations

import io
import math
import multiprocessing as mp
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from hwfsdp.comm import flight_recorder
from hwfsdp.comm.desync_report import Report, describe_divergence, place_in
from hwfsdp.errors import TRACEBACK_BELOW, RankError, in_one_line
from hwfsdp.launcher.fork_server import start_method, start_server
from hwfsdp.launcher.pickling import Script
from hwfsdp.launcher.worker import Task, run_rank

_SILENT, _GONE = "does not answer", "gone"
_LONGEST_GOT = 80  # characters of an error in a line about a rank
_ANSWER = 2.0  # seconds in which ranks have to say where they stand
_LOOK = 0.5  # seconds between two looks at ranks that may be still
_TIMES_AS_LONG = 4  # Note [Ranks that stand still]
# seconds of a processor that threads of gloo, or looks at a store, take in `still` seconds while nothing happens
_IDLE_CPU_SECONDS = 0.1
_GRACE = 0.5  # seconds that the other ranks get to fail after the first failure
LOST_PEER = (
    "Connection reset by peer",
    "Connection closed by peer",
    "Broken pipe",
    "monitoredBarrier",
    "a broken connection",
)
LARGEST_MESSAGE = 8 << 30  # bytes of a message
LARGEST_REPORT = 64 << 20  # bytes of a message, if the caller does not trust its ranks


class Inbox:
    """The bytes of a rank's messages so far. An incomplete message must not block its reader, as `Connection.recv_bytes` does.

    A message begins with its length in 4 bytes. If this is -1, the length follows in 8 bytes. Then come the bytes of the message
    (`multiprocessing.connection`).
    """

    def __init__(self) -> None:
        self._data, self.largest = bytearray(), LARGEST_MESSAGE

    def take(self, connection: Connection) -> Iterator[tuple[str, Any]]:
        """Read the bytes that have arrived, and yield the messages that are complete. Some bytes must have arrived.

        Raises:
            EOFError: the rank is gone. ValueError, UnpicklingError: the bytes are no message.
        """
        piece = os.read(connection.fileno(), 1 << 20)
        if not piece:
            raise EOFError
        self._data += piece
        while (message := self._next()) is not None:
            yield _checked(read_message(message))

    def _next(self) -> bytes | None:
        start, length = 4, int.from_bytes(self._data[:4], "big", signed=True)
        if length == -1:
            start, length = 12, int.from_bytes(self._data[4:12], "big")
        if not 0 <= length <= self.largest:
            raise ValueError(f"a message of {length:,} bytes")
        if len(self._data) < start + length:
            return None
        message = bytes(self._data[start : start + length])
        del self._data[: start + length]
        return message


@dataclass
class Rank:
    """A rank as its caller sees it.

    Attributes:
        history: the file in which the rank notes its calls (`flight_recorder`). failure: how it failed; None if it did not.
    """

    number: int
    process: BaseProcess
    connection: Connection
    history: BinaryIO
    finished: bool = False
    result: Any = None
    failure: RankError | None = None
    inbox: Inbox = field(default_factory=Inbox)

    @property
    def is_running(self) -> bool:
        return not self.finished and self.failure is None

    def fail(self, reason: str, got: str, traceback: str = "", cause: BaseException | None = None) -> None:
        """Note how the rank failed (see `RankError`). `cause`: its exception, if it could be pickled."""
        remedy = TRACEBACK_BELOW if traceback else "Its standard error may say more."
        self.failure = RankError(self.number, got, traceback, remedy, reason)
        self.failure.__cause__ = cause


def start_ranks(task: Task) -> list[Rank]:
    start_server()
    context: Any = mp.get_context(start_method())  # declared without `Process`
    ranks = []
    for rank in range(task.world_size):
        ours, theirs = context.Pipe()
        notes = open(task.history_of(rank), "xb+", buffering=0)
        notes.write(bytes(flight_recorder.SIZE))
        process = context.Process(target=run_rank, args=(rank, task, theirs), name=f"rank {rank}")
        with _hidden_main():
            process.start()
        theirs.close()
        ranks.append(Rank(rank, process, ours, notes))
    return ranks


_main_lock = threading.Lock()  # two threads may start ranks


@contextmanager
def _hidden_main() -> Iterator[None]:
    """Hide the caller's script in the block: multiprocessing would run it again in each child. The function is pickled by value."""
    with _main_lock:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


@dataclass(frozen=True)
class RankOptions:
    """How ranks run, and what their caller does with what they say.

    Attributes:
        timeout, device: as for `launch.launch`.
        write: called with the text that ranks print.
        unpickle: called with the pickled results of ranks; their exceptions are unpickled, too. None: nothing from a rank is
            unpickled. Then results stay pickled bytes, and errors are text.
        script: the caller's `__main__`. Ranks get it, too (`pickling`). None: they do not.
        environ: environment of the ranks. None: the caller's. The ranks meet in a folder below its TMPDIR.
        prepare: called in each rank's process before anything else, with the folder where the ranks meet. If it raises an error,
            the rank ends.
        still: seconds after which the call ends if no rank computes or wakes (Note [Ranks that stand still]). None: it does not end
            for this reason.
        started: called with the process ids of the ranks.
    """

    timeout: float | None
    write: Callable[[str], None]
    unpickle: Callable[[bytes], Any] | None
    device: str = "cpu"
    script: Script | None = None
    environ: Mapping[str, str] | None = None
    prepare: Callable[[str], object] | None = None
    still: float | None = None
    started: Callable[[list[int]], object] = lambda pids: None


class Caller:
    """The reader of the ranks' messages. It reads until all ranks have returned, one has failed, or time is up."""

    def __init__(self, ranks: list[Rank], options: RankOptions) -> None:
        self.ranks, self.options, self.still = ranks, options, options.still
        self.deadline = time.monotonic() + options.timeout if options.timeout else None
        self.was_still = False
        for rank in ranks if options.unpickle is None else ():
            rank.inbox.largest = LARGEST_REPORT

    def collect(self) -> list[Any]:
        """Return the values that the ranks returned. Raise RankError for the first rank that failed."""
        while not all(rank.finished for rank in self.ranks):
            if any(rank.failure for rank in self.ranks):
                grace = time.monotonic() + _GRACE
                while self.read_messages(grace):
                    pass
                raise _first_failure(self.ranks)
            if not self.read_until_still():
                waited = (
                    f"nothing has happened for {self.still:g} s"
                    if self.was_still
                    else f"no return within {self.options.timeout:g} s"
                )
                raise _time_out(self.ranks, waited)
        return [rank.result for rank in self.ranks]

    def read_until_still(self) -> bool:
        """Wait for messages, and handle them. Return False if time is up, or if all ranks are still for too long."""
        if self.still is None:
            return self.read_messages(self.deadline)
        began = dozed = time.monotonic()
        before = _asleep(self.ranks)
        while not self.read_messages(min(time.monotonic() + _LOOK, self.deadline or math.inf)):
            now, asleep = time.monotonic(), _asleep(self.ranks)
            little = _IDLE_CPU_SECONDS * max(1.0, (now - dozed) / self.still)
            if not asleep or not before or asleep[1] > before[1] + little:
                began, dozed, before = now, now, asleep
            elif asleep[0] != before[0]:
                began, before = now, (asleep[0], before[1])
            self.was_still = now - began > self.still or now - dozed > _TIMES_AS_LONG * self.still
            if self.was_still or now > (self.deadline or math.inf):
                return False
        return True

    def read_messages(self, deadline: float | None) -> bool:
        """Wait for messages of ranks that still run, and handle them. Return False if no message came in time."""
        running = [rank for rank in self.ranks if rank.is_running]
        remaining = None if deadline is None else deadline - time.monotonic()
        is_late = remaining is not None and remaining < 0  # also if a rank never stops sending
        if not running or is_late:
            return False
        ready = wait([rank.connection for rank in running], remaining)
        for rank in running:
            if rank.connection in ready:
                self.read_messages_of(rank)
        return bool(ready)

    def read_messages_of(self, rank: Rank) -> None:
        try:
            for kind, content in rank.inbox.take(rank.connection):
                self.take_in(rank, kind, content)
        except (EOFError, OSError):
            if rank.is_running:
                rank.fail("died", _how_it_died(rank.process))
        except Exception as error:
            rank.fail("died", f"a message that cannot be read: {error!r}")

    def take_in(self, rank: Rank, kind: str, content: Any) -> None:
        """Handle a message by its kind."""
        unpickle = self.options.unpickle
        if kind == "print":
            self.options.write(content)
        elif kind == "return":
            try:
                rank.finished, rank.result = True, unpickle(content) if unpickle else content
            except Exception as error:
                rank.fail("raised", f"a result that cannot be unpickled: {error!r}", cause=error)
        elif kind == "raise":
            got, traceback, exception = content
            rank.fail("raised", got, traceback, _unpickled(exception) if unpickle else None)


def _checked(message: Any) -> tuple[str, Any]:
    """Return the message if its parts have the right types."""
    kind, content = message
    types = {"print": (str,), "return": (bytes,), "raise": (str, str, bytes | None), "where": (str, str)}
    parts = content if isinstance(content, tuple) else (content,)
    if not all(isinstance(part, type_) for part, type_ in zip(parts, types[kind], strict=True)):
        raise ValueError(f"a message {kind!r} of other parts")
    return kind, content


class _Primitives(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} in a message")


def read_message(data: bytes) -> Any:
    """Unpickle a rank's message. It may contain only text, bytes, numbers, tuples and None."""
    return _Primitives(io.BytesIO(data)).load()


def _unpickled(exception: bytes | None) -> BaseException | None:
    try:
        found = pickle.loads(exception) if exception else None
    except Exception:
        return None  # it cannot be unpickled; the caller has its traceback as text
    return found if isinstance(found, BaseException) else None


def _how_it_died(process: BaseProcess) -> str:
    process.join(5)
    code = process.exitcode
    if code is not None and code < 0:
        return f"death by signal {signal.Signals(-code).name}"
    return f"exit with status {code} before the function returned"


def _lost_peer(failure: RankError) -> bool:
    return any(sign in failure.got for sign in LOST_PEER)


def _is_consequence(failure: RankError) -> bool:
    """True if a rank failed in a collective, perhaps because another rank had ended."""
    return _lost_peer(failure) or failure.got.startswith("CollectiveError: ")


def _first_failure(ranks: list[Rank]) -> RankError:
    """See Note [Which rank failed first]."""
    failed = [rank.failure for rank in ranks if rank.failure]
    own = [failure for failure in failed if not _lost_peer(failure)]
    first = (own or failed)[0]
    first.table = _describe_divergence(ranks, _ask_where(ranks))
    return first


class _Stand(NamedTuple):
    """A rank's own report: the collective in which it waits, or "", and its stack."""

    waiting: str
    stack: str


def _ask_where(ranks: list[Rank]) -> dict[int, _Stand]:
    """Ask every rank that still runs where it stands (see `worker`, Note [Time runs out])."""
    running = [rank for rank in ranks if rank.is_running]
    stands: dict[int, _Stand] = {}
    for rank in running:
        try:
            rank.connection.send("where")
        except OSError:
            stands[rank.number] = _Stand(_GONE, "")
    until = time.monotonic() + _ANSWER
    for rank in running:
        number, connection = rank.number, rank.connection
        while number not in stands and (left := until - time.monotonic()) > 0 and connection.poll(left):
            try:
                heard = dict(rank.inbox.take(connection))
            except Exception:
                break
            if "where" in heard:
                stands[number] = _Stand(*heard["where"])
        stands.setdefault(number, _Stand(_SILENT, ""))
    return stands


def _time_out(ranks: list[Rank], waited: str) -> RankError:
    stands = _ask_where(ranks)
    in_python = [n for n, stand in stands.items() if not stand.waiting]
    first = (in_python or list(stands))[0]
    places = "; ".join(f"rank {n} {_where(stand)}" for n, stand in stands.items())
    error = RankError(
        first,
        f"{waited} ({places})",
        "\n".join(f"--- rank {n} ---\n{stand.stack}" for n, stand in stands.items()),
        "Ranks that wait in a collective wait for one that does not come; see its stack below.",
        "late",
    )
    error.table = _describe_divergence(ranks, stands)
    return error


def _where(stand: _Stand) -> str:
    place = place_in(stand.stack)
    return (stand.waiting or "in no collective") + (f", at {place}" if place else "")


def _asleep(ranks: Sequence[Rank]) -> tuple[list[str], float] | None:
    """Return the context switches of each rank that runs, and the seconds of a processor that all ranks took.

    None if a rank does not sleep, or if the system does not tell.
    """
    pids = [rank.process.pid for rank in ranks if rank.is_running]
    if not Path("/proc/self/stat").exists():
        return _asleep_by_ps(pids)
    try:
        fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    except OSError:
        return None
    switches = [_context_switches(pid) or "" for pid in pids]
    if not all(switches) or any(state != "S" for state, *_ in fields):
        return None
    return switches, sum(int(of[11]) + int(of[12]) for of in fields) / os.sysconf("SC_CLK_TCK")


def _asleep_by_ps(pids: Sequence[int | None]) -> tuple[list[str], float] | None:
    """Do as `_asleep` where a process is no file, as on macOS. `ps` tells no context switches, so they count as new at each look."""
    try:
        command = ["ps", "-o", "state=,time=", "-p", ",".join(map(str, pids))]
        said = subprocess.run(command, capture_output=True, text=True, timeout=_LOOK * 10).stdout
        rows = [line.split() for line in said.splitlines()]
        if len(rows) != len(pids) or any(
            state[0] not in "SI" for state, _ in rows
        ):  # asleep, or idle for long
            return None
        return [str(time.monotonic())], sum(_seconds(took) for _, took in rows)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


def _seconds(took: str) -> float:
    """Return the seconds in a time of `ps`, such as 1-02:03:04 or 3:04.05."""
    days, _, rest = took.rpartition("-")
    seconds = 0.0
    for part in rest.split(":"):
        seconds = 60 * seconds + float(part)
    return 86_400 * int(days or 0) + seconds


def _context_switches(pid: int | None) -> str | None:
    """Return how often the main thread of a process has left a processor, as text. None if the system does not tell."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    return "".join(re.findall(r"^\w*ctxt_switches:.*\n", status, re.MULTILINE)) or None


def _describe_divergence(ranks: list[Rank], stands: Mapping[int, _Stand]) -> str:
    """Describe the last calls of the ranks, side by side. Return "" if they agree."""
    reports = []
    for rank in ranks:
        calls = flight_recorder.read(os.pread(rank.history.fileno(), flight_recorder.SIZE, 0))
        stand = stands.get(rank.number, _Stand("", ""))
        left, stack = _SILENT if stand.waiting == _SILENT else "", stand.stack
        if rank.failure is not None:
            stack = rank.failure.traceback
        if rank.finished:
            left = "has returned"
        elif rank.failure is not None and not _is_consequence(rank.failure):
            left = f"{'raised' if stack else 'is gone:'} {_shortened(rank.failure.got)}"
        place = place_in(stack)
        if place and stand.waiting and "parameter group" not in stand.waiting:  # the table shows FSDP's
            place += f", {stand.waiting}"
        reports.append(Report(rank.number, calls, left, place))
    return describe_divergence(reports)


def _shortened(got: str) -> str:
    text = in_one_line(got)
    return text if len(text) <= _LONGEST_GOT else f"{text[: _LONGEST_GOT - 1].rstrip()}…"


def end_ranks(ranks: list[Rank]) -> None:
    """End all ranks, so that none outlives the call."""
    for rank in ranks:
        if not rank.finished and rank.process.is_alive():
            rank.process.kill()
    for rank in ranks:
        rank.connection.close()
        rank.history.close()
        rank.process.join(10)
        if rank.process.is_alive():
            rank.process.kill()
            rank.process.join()
        rank.process.close()
