"""Several processes that grade at once.

Each is a `worker` with a server of ranks of its own, as whatever that server starts is taken for its run's and ended with it.
Orders are handed out one by one, so nothing is lost but what was being graded when a worker dies; another takes its place.

Note [What a crowd may not cost]
    With several runs on one machine a right answer may take longer than it may. So orders whose outcome is provisional,
    and those whose worker died, are to be repeated by the caller with nothing beside them: `run` with one worker.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

from hwfsdp.course.gradebook.hidden_inputs import ENVIRONMENT
from hwfsdp.course.manifest import PACKAGE
from hwfsdp.course.processes import end_all_below, running
from hwfsdp.course.run import patience

SILENCE = 240.0  # seconds, times patience: a worker that says nothing for longer is ended
LOOK = 0.5  # seconds between two looks at the clock
Message = dict[str, Any]


class Order(NamedTuple):
    """Something to grade: of which submission, what (an exercise's number, an extra's name), and what a worker is told.

    Attributes:
        again: it is repeated, with nothing beside it.
    """

    name: str
    what: str
    message: Message
    again: bool = False


class Outcome(NamedTuple):
    """The outcome of an order.

    Attributes:
        graded: the exercise, as data; None if there is none.
        failed: why there is none. died: because its worker did.
        provisional: its time was over, which may be due to what ran beside it.
    """

    graded: Message | None
    failed: str = ""
    died: bool = False
    provisional: bool = False


OVERDUE = Outcome(None, "time for everything was over")


class Worker:
    """A process that grades.

    Args:
        root: of the course. command: what to start, if not ours.
    """

    def __init__(self, root: Path, command: Sequence[str] = ()) -> None:
        paths = [str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        environ.pop(ENVIRONMENT, None)
        self.errors: IO[bytes] = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            command or [sys.executable, "-m", "hwfsdp.course.gradebook.worker", str(root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env=environ,
            start_new_session=True,  # Ctrl-C is for the one that started it
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.input, self.output = self.process.stdin, self.process.stdout
        os.set_blocking(self.output.fileno(), False)
        self.order: Order | None = None
        self.heard, self._rest = time.monotonic(), b""

    def take(self, order: Order) -> None:
        """Begin with an order; if it is dead already, `messages` tells."""
        self.order, self.heard = order, time.monotonic()
        with suppress(BrokenPipeError):
            self.input.write(json.dumps(order.message).encode() + b"\n")
            self.input.flush()

    def messages(self) -> Iterator[Message | None]:
        """The worker's messages since the last call; None at the end if it is dead."""
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
        """The worker's exit, with its last line on standard error."""
        status = self.process.wait()
        how = signal.Signals(-status).name if status < 0 else f"status {status}"
        self.errors.seek(max(0, self.errors.seek(0, os.SEEK_END) - 2000))
        lines = self.errors.read().decode(errors="replace").split("\n")
        said = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"{how}; {said}" if said else how

    def end(self) -> None:
        """End it, and everything that it started."""
        with suppress(BrokenPipeError):
            self.input.close()
        with suppress(subprocess.TimeoutExpired):
            if self.order is None:  # it waits for orders, and leaves by itself
                self.process.wait(timeout=5.0)
        if self.process.poll() is None:
            end_all_below(self.process.pid)
            self.process.kill()
            self.process.wait()
        left = [each.pid for each in running() if each.group == self.process.pid]
        for pid in left:  # its server, if it died before that
            end_all_below(pid)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.output.close()
        self.errors.close()


class Pool:
    """Workers, started when there is something to do, and ended with the block.

    Args:
        root: of the course. on_check: called with each check's result as soon as there is one.
        until: by the monotonic clock: what is not graded by then is not graded. command: of a worker, if not ours.
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
        """Hand out orders to `size` workers at once; give each back with its outcome, in the order in which they end."""
        more = True
        while more or any(worker.order for worker in self.workers):
            while more and sum(worker.order is not None for worker in self.workers) < size:
                order = next(orders, None)
                if order is None:
                    more = False
                elif self._is_over():
                    yield order, OVERDUE
                else:
                    self._idle().take(order)
            yield from self._ended()

    def _is_over(self) -> bool:
        return self.until is not None and time.monotonic() > self.until

    def _idle(self) -> Worker:
        idle = next((worker for worker in self.workers if worker.order is None), None)
        if idle is None:
            idle = Worker(self.root, self.command)
            self.workers.append(idle)
        return idle

    def _ended(self) -> Iterator[tuple[Order, Outcome]]:
        """Wait a while; return what has ended."""
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
