"""Grade in several processes at once.

Each process is a `worker` with its own server of ranks, because all processes of a server count as one run and are ended with it. Each
worker gets one order at a time. So if a worker dies, only its current order is lost, and a new worker takes its place.

Note [Lanes]
    A worker keeps the reports of ranks as long as its orders are about the same file with the same inputs. This is true for all
    stations of a submission, so they have one lane: one worker takes them, while other workers take the submission's electives,
    or the next submission.

Note [What a crowd may not cost]
    With several runs on one machine, a right answer may exceed its time limit. So the caller must repeat an order alone (`run` with
    one worker) if its outcome is provisional, or if its worker died.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

from hwfsdp.course.gradebook.hidden_inputs import ENVIRONMENT
from hwfsdp.course.manifest import PACKAGE
from hwfsdp.course.processes import end_all_below, running
from hwfsdp.course.run import PATIENCE, patience

CROWD = 2.0  # a factor for all time limits of workers that grade at the same time: a repeat would cost more
SILENCE = 240.0 * CROWD  # seconds, times patience: a worker that sends nothing for longer is ended
LOOK = 0.5  # seconds between two looks at the clock
Message = dict[str, Any]


class Order(NamedTuple):
    """An order to grade one exercise or extra.

    Attributes:
        name: the name of the submission. what: the number of an exercise, or the name of an extra.
        message: the message to the worker. again: the order is repeated alone.
        lane: orders with the same lane go to the same worker, one after the other (Note [Lanes]); "" for an order that any
            worker may take.
    """

    name: str
    what: str
    message: Message
    again: bool = False
    lane: str = ""


class Outcome(NamedTuple):
    """The outcome of an order.

    Attributes:
        graded: the grade of the exercise, as data; None if there is none.
        failed: why there is no grade. died: the worker died.
        provisional: the time ran out, perhaps because other runs were graded at the same time.
    """

    graded: Message | None
    failed: str = ""
    died: bool = False
    provisional: bool = False


OVERDUE = Outcome(None, "time for everything was over")


class Worker:
    """A process that grades.

    Args:
        root: the folder of the course. command: the command to start; empty: our own. in_crowd: others grade at the same time.
    """

    def __init__(self, root: Path, command: Sequence[str] = (), in_crowd: bool = False) -> None:
        paths = [str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        environ.pop(ENVIRONMENT, None)
        environ[PATIENCE] = f"{patience() * (CROWD if in_crowd else 1):g}"
        self.errors: IO[bytes] = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            command or [sys.executable, "-m", "hwfsdp.course.gradebook.worker", str(root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env=environ,
            start_new_session=True,  # so Ctrl-C reaches only the process that started it
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.input, self.output = self.process.stdin, self.process.stdout
        os.set_blocking(self.output.fileno(), False)
        self.order: Order | None = None
        self.lane = ""  # of its last order that had one
        self.heard, self._rest = time.monotonic(), b""

    def take(self, order: Order) -> None:
        """Send an order to the worker. If the worker is already dead, `messages` reports it."""
        self.order, self.heard = order, time.monotonic()
        self.lane = order.lane or self.lane
        with suppress(BrokenPipeError):
            self.input.write(json.dumps(order.message).encode() + b"\n")
            self.input.flush()

    def messages(self) -> Iterator[Message | None]:
        """Yield the worker's messages since the last call, and then None if the worker is dead."""
        try:
            data = os.read(self.output.fileno(), 1 << 20)
        except BlockingIOError:
            return
        self.heard = time.monotonic()
        *lines, self._rest = (self._rest + data).split(b"\n")
        yield from (json.loads(line) for line in lines)
        if not data:
            yield None

    def last_words(self) -> str:
        """Return the worker's exit status or signal, with its last line on standard error."""
        status = self.process.wait()
        how = signal.Signals(-status).name if status < 0 else f"status {status}"
        self.errors.seek(max(0, self.errors.seek(0, os.SEEK_END) - 2000))
        lines = self.errors.read().decode(errors="replace").split("\n")
        said = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"{how}; {said}" if said else how

    def end(self) -> None:
        """End the worker, and everything that it started."""
        with suppress(BrokenPipeError):
            self.input.close()
        with suppress(subprocess.TimeoutExpired):
            if self.order is None:  # it waits for orders, so it ends by itself
                self.process.wait(timeout=5.0)
        if self.process.poll() is None:
            end_all_below(self.process.pid)
            self.process.kill()
            self.process.wait()
        left = [each.pid for each in running() if each.group == self.process.pid]
        for pid in left:  # its server of ranks, if the worker died first
            end_all_below(pid)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.output.close()
        self.errors.close()


class Pool:
    """Workers, which start when there is something to do, and end with the `with` block.

    Args:
        root: the folder of the course. on_check: called with each check's result as soon as there is one.
        until: the end of grading, in seconds of the monotonic clock. Orders that are not finished by then fail.
        command: the command of a worker; empty: our own.
    """

    def __init__(
        self,
        root: Path,
        on_check: Callable[[Order, Message], None],
        until: float | None = None,
        command: Sequence[str] = (),
    ) -> None:
        self.root, self.on_check, self.until, self.command = root, on_check, until, command
        self.workers: list[Worker] = []
        self.silence = SILENCE * patience()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self.workers:
            self.workers.pop().end()

    def run(self, orders: Iterator[Order], size: int) -> Iterator[tuple[Order, Outcome]]:
        """Send the orders to `size` workers at once. Yield each order with its outcome when it ends."""
        postponed: deque[Order] = deque()
        while True:
            while sum(worker.order is not None for worker in self.workers) < size:
                order = self._next(postponed, orders)
                if order is None:
                    break
                if self._is_over():
                    yield order, OVERDUE
                else:
                    (self._owner(order) or self._idle(in_crowd=size > 1)).take(order)
            if not any(worker.order for worker in self.workers):
                return
            yield from self._ended()

    def _next(self, postponed: deque[Order], orders: Iterator[Order]) -> Order | None:
        """Return the first order that can begin, or None. Postpone the orders before it."""
        for order in postponed:
            if self._can_begin(order):
                postponed.remove(order)
                return order
        for order in orders:
            if self._can_begin(order):
                return order
            postponed.append(order)
        return None

    def _can_begin(self, order: Order) -> bool:
        owner = self._owner(order)
        return owner is None or owner.order is None

    def _owner(self, order: Order) -> Worker | None:
        """Return the worker that had the last order of this lane; None if there is none."""
        return next((worker for worker in self.workers if order.lane and worker.lane == order.lane), None)

    def _is_over(self) -> bool:
        return self.until is not None and time.monotonic() > self.until

    def _idle(self, in_crowd: bool) -> Worker:
        idle = next((worker for worker in self.workers if worker.order is None), None)
        if idle is None:
            idle = Worker(self.root, self.command, in_crowd)
            self.workers.append(idle)
        return idle

    def _ended(self) -> Iterator[tuple[Order, Outcome]]:
        """Wait for at most LOOK seconds, and yield the orders that have ended."""
        busy = [worker for worker in self.workers if worker.order]
        if busy:
            select.select([worker.output for worker in busy], [], [], LOOK)
        for worker in busy:
            order, outcome = worker.order, self._outcome(worker)
            if outcome is not None and order is not None:
                yield order, outcome

    def _outcome(self, worker: Worker) -> Outcome | None:
        order = worker.order
        assert order is not None, "a busy worker"
        for message in worker.messages():
            if message is None:
                outcome = Outcome(None, f"the process that graded it ended: {worker.last_words()}", died=True)
                self._drop(worker)
                return outcome
            if "check" in message:
                self.on_check(order, message["check"])
            else:
                worker.order = None
                provisional = bool(message.get("provisional"))
                return Outcome(message.get("done"), message.get("failed", ""), provisional=provisional)
        if self._is_over():
            self._drop(worker)
            return OVERDUE
        if time.monotonic() - worker.heard > self.silence:
            self._drop(worker)
            return Outcome(None, f"the process that graded it said nothing for {self.silence:g} s", died=True)
        return None

    def _drop(self, worker: Worker) -> None:
        self.workers.remove(worker)
        worker.end()
