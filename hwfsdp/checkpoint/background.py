"""Saving while training goes on.

Training waits only for the copy. A thread does the rest, exactly as `save` would. Only one save runs at a time: a call
waits until the previous save has ended. So memory holds one copy, and saves end in the order in which they began.

Note [Failures find a listener]
    A save that fails in the background fails on all ranks, and the program must learn of it. `wait` raises the error. Without
    a call of `wait`, the next save raises it. Without a next save, the end of the process reports it: `launch` calls
    `finish_saves` on its ranks. Any other interpreter prints a message on standard error and exits with status 1.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import Any

import torch.distributed as dist

from hwfsdp.checkpoint.agreement import Agreement
from hwfsdp.checkpoint.saving import Target, Unstaged, save_agreed
from hwfsdp.checkpoint.staging import StateDictStager


class SaveHandle:
    """A save that is under way.

    Attributes:
        _state_dict: the staged copy, or `Unstaged`; None when it is not needed any more.
        _save_id: the id of the save once it has succeeded, "" before. _error: the reason if it has failed. _heard: whether
            `wait` was called.
        _thread: runs `_run`; not a daemon, so that the interpreter waits for it.
    """

    def __init__(self, agreement: Agreement, state_dict: Any, target: Target) -> None:
        self._agreement, self._state_dict, self._target = agreement, state_dict, target
        self._save_id = ""
        self._error: BaseException | None = None
        self._heard = False
        self._thread = threading.Thread(target=self._run, name=f"save into {target.path}")
        self._thread.start()

    def _run(self) -> None:
        """Do the work of the save, in its own thread; keep its id, or its error of any kind. Then refer to the staged copy no more."""
        try:
            self._save_id = save_agreed(self._agreement, self._state_dict, self._target)
        except BaseException as error:
            self._error = error
        finally:
            self._state_dict = None  # its buffers are free for the next save

    def done(self) -> bool:
        """True once the save has ended, with or without an error."""
        return not self._thread.is_alive()

    def wait(self) -> str:
        """Wait for the end of the save; return its id. The next save does not raise this save's error again.

        Raises:
            The error of the save, as `store.save` raises it, at each call.
        """
        self._thread.join()
        self._heard = True
        if self._error is not None:
            raise self._error
        return self._save_id

    def failed(self) -> bool:
        """Wait for the end of the save. Return True if it failed."""
        self._thread.join()
        return self._error is not None

    def unheard_error(self) -> BaseException | None:
        """Wait for the end of the save. Return its error if no call of `wait` has raised it, else None."""
        self._thread.join()
        return None if self._heard else self._error


class SaveQueue:
    """The saves of this process, one under way at a time.

    Attributes:
        stager: makes all copies, because it owns the memory for them. last: the save that was started last, if there was one;
            it may have ended long ago.
    """

    def __init__(self) -> None:
        self.stager = StateDictStager()
        self.last: SaveHandle | None = None

    def start(self, state_dict: Any, group: dist.ProcessGroup | None, target: Target) -> SaveHandle:
        """Start a "save"; return its handle as soon as changes to the tensors can no longer change what is saved.

        Saves end in the order in which they began, and memory has room for one copy. The handle is kept as `last`.

        Raises:
            The error of the previous save, if no call has raised it yet. Then nothing was started.
        """
        agreement = Agreement(group, "save")
        self.end_before(agreement)
        self.last = self.begin(agreement, self.stage(state_dict), target)
        return self.last

    def stage(self, state_dict: Any) -> Any:
        """Return a copy on the CPU. If that fails, return `Unstaged`: it tells the other ranks, which would otherwise wait."""
        try:
            return self.stager.stage(state_dict)
        except Exception as error:
            return Unstaged(error)

    def begin(self, agreement: Agreement, staged: Any, target: Target) -> SaveHandle:
        """Start the thread of a save; `staged` is the result of `stage`."""
        return SaveHandle(agreement, staged, target)

    def end_before(self, agreement: Agreement) -> None:
        """Wait for the previous save. If it failed, and a rank has not raised its error yet, raise the error on all ranks.

        A save fails on all ranks or on none. So the ranks need to ask each other only after a failure.
        """
        if self.last is not None and self.last.failed():
            agreement.step("ending the save before", self.finish)

    def finish(self) -> None:
        """Wait for the last save. Raise its error if no call of `wait` has raised it."""
        if self.last is not None and self.last.unheard_error() is not None:
            self.last.wait()


queue = SaveQueue()


def finish_saves() -> None:
    """Wait for the last save of this process.

    Raises:
        The error of this save, if no call of `wait` has raised it.
    """
    queue.finish()


def _report_at_exit() -> None:
    try:
        finish_saves()
    except BaseException as error:
        print(f"hwfsdp: a save that nobody waited for has failed: {error}", file=sys.stderr)
        # A handler of `atexit` cannot set the status otherwise. First, all other handlers run.
        atexit.unregister(_report_at_exit)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


atexit.register(_report_at_exit)
