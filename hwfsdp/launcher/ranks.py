"""Processes to run on: `launch` calls a function once per rank.

    losses = launch(train, 2, steps=100)

Ranks are forked from a server process that has imported torch already, so that starting them takes a tenth of a
second instead of three. Each is fresh: nothing of an earlier call is left in it. The function may be defined
anywhere, in a notebook cell too, since it travels by value.

Under torchrun the ranks exist already: there `launch` initializes the process group and calls the function in
this process.

Note [Which rank failed first]
    When a rank dies, its neighbours fail a moment later, because the connection to it breaks, and their errors are
    about the connection. So after the first failure the others get a moment to fail too, and the one reported is
    the first that is not about a lost peer.

Note [Deadlocks]
    When time runs out, ranks may hang or may only be slow, on a crowded machine for example. They are sure to hang if all that
    run wait in collectives, not all in the same one (or for a rank that has returned), and none of them wakes for a while:
    a collective ends when all its ranks have called it, and its end wakes them. Linux counts how often a thread was
    given a processor and left it. Elsewhere nothing is sure.

Note [Asked to stop]
    SIGTERM ends a process where it stands. Who has something to bring to an end first, wraps `launch` in `stoppable`, and
    on the ranks the function in it, too: then the signal sets `stop_requested` instead, in the caller's process for all
    its ranks, under torchrun for the rank that got it. What follows from it, the function decides.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import re
import signal
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import cloudpickle
import torch.distributed as dist

from hwfsdp.comm import history
from hwfsdp.comm.divergence import Report, describe_divergence, place_in
from hwfsdp.errors import TRACEBACK_BELOW, RankError, UsageError, in_one_line
from hwfsdp.launcher.fork_server import start_server
from hwfsdp.launcher.messages import LARGEST_REPORT, Inbox
from hwfsdp.launcher.worker import (
    Task,
    destroy_process_group,
    finish_saves,
    init_process_group,
    run_rank,
    stop_requested,
)

COLLECTIVE_TIMEOUT = 300.0  # seconds, where `launch` is given no timeout; gloo's own default is half an hour
_SILENT, _GONE = "does not answer", "gone"
_LONGEST_GOT = 80  # characters of an error in a line about a rank
_ANSWER = 2.0  # seconds in which ranks have to say where they stand
_STILL = 1.0  # seconds without a turn on a processor: a rank that waits is not about to go on
_GRACE = 0.5  # seconds that the other ranks get to fail after the first did
LOST_PEER = (
    "Connection reset by peer",
    "Connection closed by peer",
    "Broken pipe",
    "monitoredBarrier",
    "a broken connection",
)


def launch(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float | None = None,
    device: str = "cpu",
    **kwargs: Any,
) -> list[Any]:
    """Calls `fn(*args, **kwargs)` on each of `world_size` ranks, in a process of its own each.

    Args:
        fn: finds an initialized process group (`torch.distributed.get_rank()` …). It, its arguments and what it
            returns must be picklable; functions and classes of the caller's own script or notebook are.
        timeout: seconds for the whole call, collectives included. None: no limit, but 300 s for each collective.
        device: "cpu" uses gloo; "cuda" uses NCCL, and rank i runs on GPU i of the machine.

    Returns:
        What each rank returned, in rank order. What ranks print appears in the caller's `sys.stdout`.

    Raises:
        RankError: a rank raised, died, or did not finish in time; the first one that failed is named, and its
            exception is the cause. No rank runs on after the call, however it ends.
        UsageError: the world size is below 1, or not that of torchrun.
    """
    if world_size < 1:
        raise UsageError(
            "launch", expected="a world size of 1 or more", got=str(world_size), remedy="Ask for one rank."
        )
    if timeout is not None and timeout <= 0:
        raise UsageError(
            "launch",
            expected="a timeout above 0 seconds",
            got=str(timeout),
            remedy="Leave it out for no limit.",
        )
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return _run_under_torchrun(fn, world_size, args, kwargs, timeout, device)
    call = cloudpickle.dumps((fn, args, kwargs))
    return run_ranks(call, world_size, timeout, device, write=_show, unpickle=pickle.loads)


def run_ranks(
    call: bytes,
    world_size: int,
    timeout: float | None,
    device: str,
    *,
    write: Callable[[str], None],
    unpickle: Callable[[bytes], Any] | None,
    environ: Mapping[str, str] | None = None,
    prepare: Callable[[str], object] | None = None,
) -> list[Any]:
    """What `launch` does, for callers that must not trust their ranks (see `messages`).

    Args:
        call: what `cloudpickle.dumps` makes of the function, its arguments and keywords.
        write: gets what the ranks print.
        unpickle: for what ranks return and raise. None: nothing of theirs is unpickled. What each returned stays the bytes
            that it pickled, and errors are text.
        environ: of the ranks; None: that of the caller. They meet in a folder below its TMPDIR.
        prepare: called in each rank's process before anything else, with the folder where the ranks meet; an error of it
            ends the rank.
    """
    environ = dict(os.environ if environ is None else environ)
    with tempfile.TemporaryDirectory(prefix="hwfsdp-", dir=environ.get("TMPDIR")) as rendezvous:
        task = Task(
            call,
            world_size,
            device,
            timeout or COLLECTIVE_TIMEOUT,
            rendezvous,
            environ,
            max(1, (os.cpu_count() or 1) // world_size),
            sys.stdout.isatty(),
            None if prepare is None else cloudpickle.dumps(prepare),
        )
        ranks = _start(task)
        _running.append(ranks)
        if stop_requested.is_set():
            _ask_to_stop(ranks)
        try:
            caller = _Caller(ranks, time.monotonic() + timeout if timeout else None, timeout, write, unpickle)
            return caller.collect()
        finally:
            _running.remove(ranks)
            _end(ranks)


@contextmanager
def stoppable() -> Iterator[None]:
    """In the block, SIGTERM asks this process and its ranks to stop (Note [Asked to stop]).

    Only the main thread can take signals; in another one the block changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(*_: Any) -> None:
        stop_requested.set()
        for ranks in _running:
            _ask_to_stop(ranks)

    before = signal.signal(signal.SIGTERM, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        stop_requested.clear()


def _ask_to_stop(ranks: list[_Rank]) -> None:
    for rank in ranks:
        with suppress(OSError):  # it has ended
            rank.connection.send("stop")


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


# --- The caller's side -------------------------------------------------------------------------------------


class _Failure(NamedTuple):
    """How a rank failed: `RankError.reason`, what happened, its traceback, and the exception if it travels."""

    reason: str
    got: str
    traceback: str = ""
    exception: BaseException | None = None


@dataclass
class _Rank:
    """A rank as its caller sees it.

    Attributes:
        history: the file in which it notes what it calls (`history`).
    """

    process: BaseProcess
    connection: Connection
    history: BinaryIO
    finished: bool = False
    result: Any = None
    failure: _Failure | None = None
    inbox: Inbox = field(default_factory=Inbox)


_running: list[list[_Rank]] = []  # of the calls under way


def _start(task: Task) -> list[_Rank]:
    start_server()
    context = mp.get_context("forkserver")
    ranks = []
    for rank in range(task.world_size):
        ours, theirs = context.Pipe()
        notes = open(task.history_of(rank), "xb+", buffering=0)
        notes.write(bytes(history.SIZE))
        process = context.Process(target=run_rank, args=(rank, task, theirs), name=f"rank {rank}")
        with _hidden_main():
            process.start()
        theirs.close()
        ranks.append(_Rank(process, ours, notes))
    return ranks


@contextmanager
def _hidden_main() -> Iterator[None]:
    """multiprocessing runs the caller's script again in each child; the function travels by value instead."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


class _Caller:
    """Reads what the ranks say until all have returned, one has failed, or time is up."""

    def __init__(
        self,
        ranks: list[_Rank],
        deadline: float | None,
        timeout: float | None,
        write: Callable[[str], None],
        unpickle: Callable[[bytes], Any] | None,
    ) -> None:
        self.ranks, self.deadline, self.timeout = ranks, deadline, timeout
        self.write, self.unpickle = write, unpickle
        for rank in ranks if unpickle is None else ():
            rank.inbox.largest = LARGEST_REPORT

    def collect(self) -> list[Any]:
        """What each rank returned; raises RankError for the first that failed."""
        while not all(rank.finished for rank in self.ranks):
            if any(rank.failure for rank in self.ranks):
                grace = time.monotonic() + _GRACE
                while self.read_messages(grace):
                    pass
                raise _first_failure(self.ranks)
            if not self.read_messages(self.deadline):
                raise _time_out(self.ranks, self.timeout or 0.0)
        return [rank.result for rank in self.ranks]

    def read_messages(self, deadline: float | None) -> bool:
        """Waits for news of any rank that is still running, and takes it in; False if none came in time."""
        running = [rank for rank in self.ranks if not rank.finished and not rank.failure]
        remaining = None if deadline is None else deadline - time.monotonic()
        if not running or (
            remaining is not None and remaining < 0
        ):  # also for a rank that never stops talking
            return False
        ready = wait([rank.connection for rank in running], remaining)
        for rank in running:
            if rank.connection in ready:
                self.read_messages_of(rank)
        return bool(ready)

    def read_messages_of(self, rank: _Rank) -> None:
        try:
            for kind, content in rank.inbox.take(rank.connection):
                self.take_in(rank, kind, content)
        except (EOFError, OSError):
            if not rank.finished and not rank.failure:
                rank.failure = _Failure("died", _how_it_died(rank.process))
        except Exception as error:
            rank.failure = _Failure("died", f"a message that cannot be read: {error!r}")

    def take_in(self, rank: _Rank, kind: str, content: Any) -> None:
        """Does with a message what it is for."""
        if kind == "print":
            self.write(content)
        elif kind == "return":
            try:
                rank.finished, rank.result = True, self.unpickle(content) if self.unpickle else content
            except Exception as error:
                rank.finished = False
                got = f"a result that cannot be unpickled: {error!r}"
                rank.failure = _Failure("raised", got, exception=error)
        elif kind == "raise":
            exception = _unpickled(content[2]) if self.unpickle else None
            rank.failure = _Failure("raised", content[0], content[1], exception)


def _unpickled(exception: bytes | None) -> BaseException | None:
    try:
        found = pickle.loads(exception) if exception else None
    except Exception:
        return None  # an exception that pickles, but does not come back; its traceback has been told as text
    return found if isinstance(found, BaseException) else None


def _how_it_died(process: BaseProcess) -> str:
    process.join(5)
    code = process.exitcode
    if code is not None and code < 0:
        return f"death by signal {signal.Signals(-code).name}"
    return f"exit with status {code} before the function returned"


def _lost_peer(failure: _Failure) -> bool:
    return any(sign in failure.got for sign in LOST_PEER)


def _is_consequence(failure: _Failure) -> bool:
    """Whether a rank failed in a collective, be it because another had left."""
    return _lost_peer(failure) or failure.got.startswith("CollectiveError: ")


def _first_failure(ranks: list[_Rank]) -> RankError:
    """See Note [Which rank failed first]."""
    failed = [(number, rank.failure) for number, rank in enumerate(ranks) if rank.failure]
    own = [(n, f) for n, f in failed if not _lost_peer(f)]
    number, failure = (own or failed)[0]
    remedy = TRACEBACK_BELOW if failure.traceback else "Its standard error may say more."
    error = RankError(number, failure.got, failure.traceback, remedy, failure.reason)
    error.__cause__ = failure.exception
    error.table = _describe_divergence(ranks, _ask_where(ranks))
    return error


class _Stand(NamedTuple):
    """Where a rank says that it stands: the collective that it waits in, or ""; and its stack."""

    waiting: str
    stack: str


def _ask_where(ranks: list[_Rank]) -> dict[int, _Stand]:
    """Asks every rank that still runs where it stands (see `worker`, Note [Time runs out])."""
    running = [n for n, rank in enumerate(ranks) if not rank.finished and not rank.failure]
    stands: dict[int, _Stand] = {}
    for number in running:
        try:
            ranks[number].connection.send("where")
        except OSError:
            stands[number] = _Stand(_GONE, "")
    until = time.monotonic() + _ANSWER
    for number in running:
        rank = ranks[number]
        while number not in stands and (left := until - time.monotonic()) > 0 and rank.connection.poll(left):
            try:
                heard = dict(rank.inbox.take(rank.connection))
            except Exception:
                break
            if "where" in heard:
                stands[number] = _Stand(*heard["where"])
        stands.setdefault(number, _Stand(_SILENT, ""))
    return stands


def _time_out(ranks: list[_Rank], timeout: float) -> RankError:
    stands = _ask_where(ranks)
    in_python = [n for n, stand in stands.items() if not stand.waiting]
    first = (in_python or list(stands))[0]
    places = "; ".join(f"rank {n} {stand.waiting or 'in no collective'}" for n, stand in stands.items())
    error = RankError(
        first,
        f"no return within {timeout:g} s ({places})",
        "\n".join(f"--- rank {n} ---\n{stand.stack}" for n, stand in stands.items()),
        "Ranks that wait in a collective wait for one that does not come; see its stack below.",
        "late",
    )
    error.table = _describe_divergence(ranks, stands)
    error.deadlock = _is_deadlock(ranks, stands)
    return error


def _is_deadlock(ranks: Sequence[_Rank], stands: Mapping[int, _Stand]) -> bool:
    """Whether the ranks wait for each other for sure (Note [Deadlocks])."""
    waiting = {stand.waiting for stand in stands.values()}
    apart = len(waiting) > 1 or any(rank.finished for rank in ranks)
    if not apart or waiting & {"", _GONE, _SILENT}:
        return False
    before = [_turns(ranks[number].process.pid) for number in stands]
    time.sleep(_STILL)
    return None not in before and before == [_turns(ranks[number].process.pid) for number in stands]


def _turns(pid: int | None) -> str | None:
    """How often the main thread of a process has left a processor; None where the system does not tell."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    return "".join(re.findall(r"^\w*ctxt_switches:.*\n", status, re.MULTILINE)) or None


def _describe_divergence(ranks: list[_Rank], stands: Mapping[int, _Stand]) -> str:
    """What the ranks called last, side by side; "" if they agree."""
    reports = []
    for number, rank in enumerate(ranks):
        calls = history.read(os.pread(rank.history.fileno(), history.SIZE, 0))
        stand = stands.get(number, _Stand("", ""))
        left, stack = _SILENT if stand.waiting == _SILENT else "", stand.stack
        if rank.failure is not None:
            stack = rank.failure.traceback
        if rank.finished:
            left = "has returned"
        elif rank.failure is not None and not _is_consequence(rank.failure):
            left = f"{'raised' if stack else 'is gone:'} {_shortened(rank.failure.got)}"
        reports.append(Report(number, calls, left, place_in(stack)))
    return describe_divergence(reports)


def _shortened(got: str) -> str:
    text = in_one_line(got)
    return text if len(text) <= _LONGEST_GOT else f"{text[: _LONGEST_GOT - 1].rstrip()}…"


def _end(ranks: list[_Rank]) -> None:
    """No rank outlives the call."""
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


def _run_under_torchrun(
    fn: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    timeout: float | None,
    device: str,
) -> list[Any]:
    """The ranks are there; this process is one of them."""
    started = int(os.environ["WORLD_SIZE"])
    if started != world_size:
        raise UsageError(
            "launch under torchrun",
            expected=f"as many ranks as torchrun started, {started}",
            got=f"world_size={world_size}",
            remedy="Take the world size from the environment variable WORLD_SIZE.",
        )
    ours = not dist.is_initialized()
    if ours:
        init_process_group(device, timeout or COLLECTIVE_TIMEOUT, "env://")
    try:
        results: list[Any] = [None] * world_size
        result = fn(*args, **kwargs)
        finish_saves()
        dist.all_gather_object(results, result)
        return results
    finally:
        if ours:
            destroy_process_group()
