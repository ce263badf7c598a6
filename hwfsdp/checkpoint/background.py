"""Saving while training goes on.

The copy is all that training waits for; a thread does the rest, exactly as `save` would. One save is under way at a time:
a call waits until the one before has ended, so that memory holds one copy and saves come in their order.

Note [Failures find a listener]
    A save that fails in the background fails on all ranks, and somebody has to hear of it. `wait` raises its error. If
    nobody waited, the next save does, and if there is none, whoever ends the process: `finish_saves`, which `launch`
    calls on its ranks, and at the exit of any other interpreter a message on standard error and the exit status 1, so that
    whoever started the job knows.
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
    """A save that is under way."""

    def __init__(self, agreement: Agreement, state_dict: Any, target: Target) -> None:
        self._agreement, self._state_dict, self._target = agreement, state_dict, target
        self._save_id = ""
        self._error: BaseException | None = None
        self._heard = False
        self._thread = threading.Thread(target=self._run, name=f"save into {target.path}")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._save_id = save_agreed(self._agreement, self._state_dict, self._target)
        except BaseException as error:
            self._error = error
        finally:
            self._state_dict = None  # its buffers are free for the next

    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> str:
        """Waits for the end of the save; returns its id.

        Raises:
            What `store.save` does, each time it is called.
        """
        self._thread.join()
        self._heard = True
        if self._error is not None:
            raise self._error
        return self._save_id

    def failed(self) -> bool:
        """Waits for the end; whether it was an error."""
        self._thread.join()
        return self._error is not None

    def unheard_error(self) -> BaseException | None:
        """Waits for the end; the error that no `wait` has raised so far, if there is one."""
        self._thread.join()
        return None if self._heard else self._error


_last: SaveHandle | None = None
_stager: StateDictStager | None = None


def start_save(state_dict: Any, group: dist.ProcessGroup | None, target: Target) -> SaveHandle:
    """`store.async_save`."""
    agreement = Agreement(group, "save")
    end_save_before(agreement)
    global _last
    _last = SaveHandle(agreement, _stage(state_dict), target)
    return _last


def _stage(state_dict: Any) -> Any:
    """A copy on the CPU; if there can be none, something that tells the other ranks why."""
    global _stager
    try:
        if _stager is None:
            _stager = StateDictStager()
        return _stager.stage(state_dict)
    except Exception as error:
        return Unstaged(error)


def end_save_before(agreement: Agreement) -> None:
    """Waits for the save that is under way, and raises its error, on all ranks, if any of them has not heard of it.

    A save has failed on all ranks or on none, so that only after a failure they need to ask each other.
    """
    if _last is not None and _last.failed():
        agreement.step("ending the save before", finish_saves)


def finish_saves() -> None:
    """Waits for the save that is under way.

    Raises:
        Its error, if nobody waited for it.
    """
    if _last is not None and _last.unheard_error() is not None:
        _last.wait()


def _report_at_exit() -> None:
    try:
        finish_saves()
    except BaseException as error:
        print(f"hwfsdp: a save that nobody waited for has failed: {error}", file=sys.stderr)
        _exit_with(1)


def _exit_with(status: int) -> None:
    """Ends the process with this status, which a handler of `atexit` cannot set, after all other handlers have run."""
    atexit.unregister(_report_at_exit)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


atexit.register(_report_at_exit)
