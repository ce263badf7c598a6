"""All ranks, or none.

Many ranks write a checkpoint, and any of them may fail, die or hang at any moment. All other ranks must learn this soon, with
the name of the rank. So ranks work in *steps*. In a step, each rank does its part and reports to the leader, the first rank of
the group. The leader decides and answers each rank. If a part failed, the answer is its error, and every rank raises it. No
rank goes on to the next step.

    agreement = Agreement(group, "save")
    share = agreement.step("plan", work=describe_mine, decide=divide)      # on every rank
    agreement.step("write", work=lambda: write(share), decide=commit)

Messages are JSON. They go point to point over gloo, with a tag that belongs to this step alone, so that they never
meet the collectives that training runs at the same time in another thread.

Note [A star, not a ring]
    When a rank dies, its connections break, and every rank that waits for it learns this at once. In a collective, most ranks
    wait for a neighbor that is alive. They would learn of the death by a timeout, minutes later, without the name of the dead
    rank. Here the leader listens to each rank on a connection of its own, so a broken connection names the dead rank. The
    leader then answers the other ranks. They listen to the leader from the beginning of the step, and can stop in the middle
    of their work (`check`).

Note [Who is late]
    A timeout of gloo closes every connection of the process. Then no other rank can be told. So threads wait in gloo,
    and the time limit is on waiting for these threads. The leader waits only four fifths of the others' time limit; otherwise
    they would blame the leader for its waiting. A leader that was away for longer than the others wait finds all reports, but
    the others are gone. Then it must not decide.

Note [A tag for each step]
    Each message is sent as two: its size, then its bytes. After a step has failed, ranks go on to the next step while messages
    of the failed step still travel. So each step has a tag of its own: nobody takes a late message for one of the next step.

Note [Sends that never end]
    A send may be the first to notice that a rank has died. gloo then marks the connection as broken, but does not end this
    send, which waits forever. So if the leader's answer does not go out, the leader tests the connection. Otherwise it would
    wait for a dead rank as long as the others wait for the leader.
"""

from __future__ import annotations

import json
import math
import os
import queue
import re
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from itertools import count, cycle
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hwfsdp import errors
from hwfsdp.checkpoint.error_messages import of_disk, refusal, refuse, told
from hwfsdp.compat import collectives_are_checked, cpu_backend, gloo_beside, is_disconnected, receive_bytes
from hwfsdp.compat import send_bytes, timeout_of
from hwfsdp.errors import CheckpointError, FSDPError, UnsupportedError, in_one_line

Decide = Callable[[list[Any]], Sequence[Any] | None]  # the reports of all ranks → an answer for each

_FIRST_TAG, _TAGS, _STEPS = 1 << 30, 1 << 20, 8  # far from the tags that users choose; tags of each agreement
_NO_MESSAGE = _FIRST_TAG - 1  # no message has this tag
_SOON = 0.2  # seconds that the leader waits for an answer to go out before it tests the connection
_FAREWELL = 2.0  # seconds that the leader waits for ranks that may not listen
_KNOWN: dict[str, type[FSDPError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, FSDPError)
}


ALONE: Any = object()  # in place of a process group


class Abandoned(Exception):
    """Another rank has failed, so this rank can stop its work."""


class Agreement:
    """One call of a function that all ranks of a group call. `what` names the function in errors.

    Attributes:
        rank: the rank of this process in the group; 0 without a process group.
        size: the number of ranks in the group; 1 without a process group.
        alone: True if there is no process group, or this process does not ask it.

    Raises:
        UsageError: this process is not in the group. UnsupportedError: the group is torch's fake one.
    """

    def __init__(self, group: dist.ProcessGroup | None, what: str) -> None:
        """Take the next tag of the group. Every rank must create its agreements in the same order.

        Args:
            group: the ranks that agree. None: all ranks, or this process alone if there is no process group. ALONE: this process
                agrees only with itself, whatever process groups there are.
            what: the name of the call in error messages, for example "save".
        """
        self.what = what
        self.rank, self.size, self.alone = 0, 1, group is ALONE or not dist.is_initialized()
        if not self.alone:
            group = group if group is not None else dist.group.WORLD
            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            expected, got = "a process group that this rank is in", f"one without rank {dist.get_rank()}"
            refuse(what, expected, got, "Call it on the ranks of the group only.")
        if self.size > 1:
            assert group is not None
            link = link_of(group)
            self._carrier = link.carrier or group
            first = _FIRST_TAG + next(link.numbers) % _TAGS * _STEPS
            self._tags = cycle(range(first, first + _STEPS))
            self._patience = timeout_of(group)

    def step(self, phase: str, work: Callable[[], Any], decide: Decide | None = None) -> Any:
        """Call `work` on every rank, then `decide` on the leader. Every rank returns its answer, or every rank raises.

        Args:
            phase: the name of the step in error messages, for example "writing".
            work: returns a value that JSON can hold. If it takes long, it should call `check` now and then.
            decide: gets the values that the ranks returned, in the order of ranks. Returns one answer for each rank, which JSON
                can hold, or None: the answer of every rank is None. Without `decide`, this is so, too.

        Raises:
            FSDPError: the error of the first rank that failed, the same on all ranks. It is a `CheckpointError` if a rank died,
                if a rank did not report in time, or if the rank's error is not an error of this package.
        """
        self._place = f"{self.what}, {phase}"
        # new for each step: a late listener still has the old ones
        self._failed = threading.Event()
        self._inbox: queue.SimpleQueue[tuple[int, Any, float]] = queue.SimpleQueue()  # rank, message, when

        def choose(reports: list[Any]) -> Sequence[Any]:
            return (decide(reports) if decide else None) or [None] * self.size

        if self.size == 1:
            answer = self._attempt(lambda: choose([_as_sent(work())])[0])
        else:
            self._tag = next(self._tags)  # Note [A tag for each step]
            answer = self._lead(work, choose) if self.rank == 0 else self._follow(work)
        if "error" in answer:
            raise _restored(answer["error"]) from answer.get("cause")
        return answer["result"]

    def check(self) -> None:
        """Raise `Abandoned` if this rank knows that another rank has failed."""
        if self._failed.is_set():
            raise Abandoned

    def _attempt(self, work: Callable[[], Any]) -> dict[str, Any]:
        try:
            return {"result": work()}
        except Abandoned:
            return {"error": None}
        except Exception as error:
            return {"error": self._described(error), "cause": error}

    def _described(self, error: Exception) -> dict[str, Any]:
        """Describe an error as JSON. An error that is not of this package becomes a `CheckpointError`."""
        where = f", rank {self.rank}" if self.size > 1 else ""
        if not isinstance(error, FSDPError):
            what, expected, file = f"{self._place}{where}", "every rank to do its part", None
            got, remedy = told(error), "What was there before is as it was; mend this, and try again."
            if isinstance(error, OSError):
                (got, remedy), file = of_disk(error), error.filename
            error = CheckpointError(what, expected=expected, got=got, remedy=remedy).at(file)
        kind = next(k.__name__ for k in type(error).__mro__ if k.__name__ in _KNOWN)
        # Any rank may meet an error of rank 0; an earlier save may have added a rank.
        named = not self.rank or re.search(r", rank \d+$", error.subject)
        subject = error.subject + ("" if named else where)
        return {"kind": kind, "attributes": vars(error) | {"subject": subject}}

    # --- The leader ------------------------------------------------------------------------------------------

    def _lead(self, work: Callable[[], Any], choose: Callable[[list[Any]], Sequence[Any]]) -> dict[str, Any]:
        self._waiting_since = math.inf
        for rank in range(1, self.size):
            self._listen(rank)
        reports = {0: self._attempt(lambda: _as_sent(work()))}
        failure = reports[0] if reports[0].get("error") else self._collect(reports)
        if failure is None and time.monotonic() - self._waiting_since > 0.8 * self._patience:
            failure = self._lost([0], 0.8 * self._patience)  # other ranks may have stopped waiting
        if failure is None:
            results = [reports[rank]["result"] for rank in range(self.size)]
            decided = self._attempt(lambda: [_as_sent(a) for a in choose(results)])
            failure = decided if "error" in decided else None
        if failure is None:
            answers = [{"result": answer} for answer in decided["result"]]
        else:
            answers = [{"error": failure["error"]}] * self.size
        self._answer(answers, hurry=failure is not None)
        return failure or answers[0]

    def _collect(self, reports: dict[int, Any]) -> dict[str, Any] | None:
        """Add the report of every rank to `reports`. Return the first report of a failure; None if there is no failure."""
        until = time.monotonic() + 0.8 * self._patience
        while len(reports) < self.size:
            try:
                rank, report, at = self._inbox.get(timeout=max(0.0, until - time.monotonic()))
                self._waiting_since = min(self._waiting_since, at)
            except queue.Empty:
                late = [rank for rank in range(self.size) if rank not in reports]
                return self._lost(late, 0.8 * self._patience)
            if isinstance(report, Exception):
                return self._lost([rank])
            reports[rank] = report
            if report["in"] != self._place:
                expected, got = f"rank {rank} to be there, too", repr(report["in"])
                remedy = "Call the same functions in the same order on all ranks."
                return {"error": self._described(refusal(self._place, expected, got, remedy))}
            if report.get("error"):
                return dict(report)
        return None

    def _answer(self, answers: Sequence[Any], hurry: bool) -> None:
        """Send its answer to each rank. With `hurry`, do not wait for ranks that do not listen."""
        senders = [self._send(rank, answers[rank]) for rank in range(1, self.size)]
        until = time.monotonic() + (_FAREWELL if hurry else self._patience)
        for rank, sender in enumerate(senders, 1):
            sender.join(min(_SOON, max(0.0, until - time.monotonic())))
            if sender.is_alive() and not is_disconnected(self._carrier, rank, _NO_MESSAGE):
                sender.join(max(0.0, until - time.monotonic()))  # Note [Sends that never end]

    # --- The others ------------------------------------------------------------------------------------------

    def _follow(self, work: Callable[[], Any]) -> dict[str, Any]:
        self._listen(0)
        report = self._attempt(lambda: _as_sent(work()))
        self._send(0, report)
        try:
            answer = self._inbox.get(timeout=self._patience)[1]
        except queue.Empty:
            return self._lost([0], self._patience)
        if isinstance(answer, Exception):
            return self._lost([0])
        if answer.get("error") == report.get("error"):
            return {**answer, "cause": report.get("cause")}
        return dict(answer)

    # --- Messages --------------------------------------------------------------------------------------------

    def _lost(self, ranks: list[int], seconds: float | None = None) -> dict[str, Any]:
        """Report ranks that have not answered for so many seconds, or whose connections are broken (None)."""
        named = ", ".join(map(str, ranks))
        who, got = f"rank {named} to do its part", "a broken connection: its process is gone"
        if len(ranks) > 1:
            who, got = f"ranks {named} to do their part", "broken connections: their processes are gone"
        if seconds is not None:
            got = f"no word for {seconds:g} s"
        remedy = "The last complete checkpoint counts; start all ranks again."
        error = refusal(self._place, who, got, remedy, CheckpointError)
        return {"error": {"kind": "CheckpointError", "attributes": vars(error)}}

    def _listen(self, rank: int) -> None:
        """Start a thread that puts the next message of a rank into the inbox, or the exception that reports its death."""
        args = (self._carrier, rank, self._tag, self._inbox, self._failed)
        threading.Thread(target=hear, args=args, daemon=True).start()

    def _send(self, rank: int, message: dict[str, Any]) -> threading.Thread:
        """Start a thread that sends a message to a rank; return the thread."""
        message = {key: value for key, value in message.items() if key != "cause"} | {"in": self._place}
        args = (self._carrier, rank, self._tag, bytearray(json.dumps(message).encode()))
        sender = threading.Thread(target=tell, args=args, daemon=True)
        sender.start()
        return sender


def check_alike(listings: list[Any], remedy: str) -> None:
    """Raise an error for the first entry that is not the same on all ranks, or is not in the same place of the list.

    Args:
        listings: of each rank, in order, a pair for each entry: its name, and a description of all that must be the same.
    """
    mine = dict(listings[0])
    for rank, listing in enumerate(listings):
        theirs = dict(listing)
        for name in (*mine, *theirs):
            here, there = (entries.get(name, "no such entry") for entries in (mine, theirs))
            if here != there:
                same = max(0, len(os.path.commonprefix([here, there])) - 40)
                here, there = (t if len(t) < 100 else f"…{t[same:same + 60]}…" for t in (here, there))
                refuse(f"{name}, rank {rank}", f"{here}, as on rank 0", there, remedy)
        for here, there in zip(mine, theirs):
            if here != there:
                expected = "the same order of entries on all ranks"
                refuse(f"{here}, rank {rank}", expected, f"{there} in its place", remedy)


def _as_sent(result: Any) -> Any:
    """Return the result as JSON delivers it. So the leader's own result has lists instead of tuples, as the other results have."""
    return json.loads(json.dumps(result))


def _restored(description: dict[str, Any]) -> FSDPError:
    fields, kind = description["attributes"], _KNOWN[description["kind"]]
    error = kind.__new__(kind)
    vars(error).update(fields)
    FSDPError.__init__(error, **{name: fields[name] for name in ("subject", "expected", "got", "remedy")})
    return error


# --- The connection between two ranks ----------------------------------------------------------------------


def tell(group: dist.ProcessGroup, rank: int, tag: int, message: bytearray) -> None:
    try:
        send_bytes(group, torch.tensor([len(message)]).view(torch.uint8), rank, tag)
        send_bytes(group, torch.frombuffer(message, dtype=torch.uint8), rank, tag)
    except RuntimeError:
        pass  # that rank has died; the next thread that waits for it reports this


def hear(
    group: dist.ProcessGroup, rank: int, tag: int, inbox: queue.SimpleQueue[Any], failed: threading.Event
) -> None:
    message: Any
    try:
        size = torch.zeros(1, dtype=torch.int64)
        receive_bytes(group, size.view(torch.uint8), rank, tag)
        data = torch.empty(int(size), dtype=torch.uint8)
        receive_bytes(group, data, rank, tag)
        message = json.loads(data.numpy().tobytes())
    except Exception as error:
        message = error
    if isinstance(message, Exception) or "error" in message:
        failed.set()
    inbox.put((rank, message, time.monotonic()))


class Link(NamedTuple):
    """The group that carries the messages of a group (None: the group itself), and the numbers for the tags of its agreements."""

    carrier: dist.ProcessGroup | None
    numbers: count[int]


_links: weakref.WeakKeyDictionary[dist.ProcessGroup, Link] = weakref.WeakKeyDictionary()


def link_of(group: dist.ProcessGroup) -> Link:
    """Return the link of a group. A group that cannot move bytes of the CPU gets a gloo group of the same ranks, made once.

    A group whose collectives are checked against each other (TORCH_DISTRIBUTED_DEBUG=DETAIL) also gets a gloo group. This check
    counts messages as collectives, and ranks send different numbers of messages.
    """
    if group not in _links:
        carrier = None
        if dist.get_backend(group) == "fake":
            expected, remedy = "a process group that moves messages", "Use real ranks, or no process group."
            refuse("a checkpoint of pretended ranks", expected, "the fake one", remedy, UnsupportedError)
        if cpu_backend(group) != "gloo" or collectives_are_checked():
            try:
                carrier = gloo_beside(group)
            except RuntimeError as error:
                what, expected = "the first checkpoint of these ranks", "all ranks to connect to each other"
                got = f"a rank that is gone or did not connect: {in_one_line(str(error))}"
                remedy = "The last complete checkpoint counts; start all ranks again."
                raise refusal(what, expected, got, remedy, CheckpointError) from error
        _links[group] = Link(carrier, count())
    return _links[group]
