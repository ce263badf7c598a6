"""The parts of 15 that ranks do together: saves whose background threads are held back where it matters.

Note [Races without a clock]
    A race shows when one side is held back. Threads of saves begin only when the gate is open. The gate opens when the main
    thread has gone on, or is about to wait for one of them. So updates always come before anything that the thread does, and
    no thread waits forever. Each wait, staging and write is noted with its thread, in the order in which it happened.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from hwfsdp import compat
from hwfsdp.checkpoint import background, blocks, saving, store
from hwfsdp.checkpoint.staging import StateDictStager
from hwfsdp.checkpoint.traverse import leaves_of
from hwfsdp.compat import local_of
from hwfsdp.course.checks import Ended, raised_by, shared_folder
from hwfsdp.course.checks.async_staging_runs import Data, make_dtensor, sizes
from hwfsdp.course.checks.lifetimes import Allocations
from hwfsdp.course.run import Report, attempt

Replaced = tuple[Any, str, Callable[..., Any]]  # its owner, its name, the function that replaces it


class Stage:
    """The gate, and notes of what happened (Note [Races without a clock])."""

    def __init__(self) -> None:
        self.gate, self.main = threading.Event(), threading.current_thread()
        self.gate.set()
        self.notes: list[list[Any]] = []
        self.escaped: list[BaseException] = []  # exceptions of threads that nothing caught
        self._starting = False

    def note(self, what: str, of: str = "") -> None:
        """Add a note; it also says whether this is the main thread."""
        self.notes.append([what, threading.current_thread() is self.main, of])

    @contextmanager
    def set_up(self) -> Iterator[None]:
        """Watch everything in the block."""
        with ExitStack() as stack:
            for owner, name, replaced in (*self._threads(), *self._saves()):
                stack.enter_context(mock.patch.object(owner, name, replaced))
            try:
                yield
            finally:
                self.gate.set()

    def _threads(self) -> list[Replaced]:
        thread_class, wait = threading.Thread, threading.Condition.wait
        run, start, join, is_alive = (getattr(thread_class, n) for n in ("run", "start", "join", "is_alive"))

        def run_at_the_gate(thread: threading.Thread) -> None:
            if not thread.daemon:
                self.gate.wait()
            run(thread)

        def started(thread: threading.Thread) -> None:
            before, self._starting = self._starting, True
            start(thread)
            self._starting = before

        def joined(thread: threading.Thread, timeout: float | None = None) -> None:
            closed = self._about_to_wait(thread.name)
            join(thread, timeout)
            if closed:
                self.note("joined", thread.name)
                self.gate.clear()

        def asked(thread: threading.Thread) -> bool:
            self._about_to_wait(thread.name)
            return bool(is_alive(thread))

        def waited(condition: threading.Condition, timeout: float | None = None) -> bool:
            if not self._starting:
                self._about_to_wait("something")
            return wait(condition, timeout)

        def escape(args: threading.ExceptHookArgs) -> None:
            if args.exc_value is not None:
                self.escaped.append(args.exc_value)

        return [
            (thread_class, "run", run_at_the_gate),
            (thread_class, "start", started),
            (thread_class, "join", joined),
            (thread_class, "is_alive", asked),
            (threading.Condition, "wait", waited),
            (threading, "excepthook", escape),
        ]

    def _saves(self) -> list[Replaced]:
        stage, write_file, stagers = StateDictStager.stage, blocks.write_file, list[StateDictStager]()

        def staged(stager: StateDictStager, state_dict: Any) -> Any:
            if stager not in stagers:
                stagers.append(stager)
            self.note("stage", f"by stager {stagers.index(stager)}")
            return stage(stager, state_dict)

        def written(path: Path, *rest: Any) -> Any:
            if path.suffix == ".bin":
                self.note("write", path.parent.parent.name)
            return write_file(path, *rest)

        return [(StateDictStager, "stage", staged), (blocks, "write_file", written)]

    def _about_to_wait(self, name: str) -> bool:
        """Open the gate if the main thread is about to wait for a thread behind it. Return whether the gate was closed."""
        if threading.current_thread() is not self.main or self.gate.is_set():
            return False
        self.note("waits", name)
        self.gate.set()
        return True


def probe_saves(report: Report, seed: int) -> None:
    """Make three saves with updates in between, then saves that fail. All ranks do the same, so none waits for another."""
    stage = Stage()
    with shared_folder() as folder, stage.set_up():
        try:
            attempt(report, "saves", lambda: _saves(seed, folder, stage))
            stage.gate.set()
            attempt(report, "errors", lambda: _errors(seed, folder))
        finally:
            stage.gate.set()
            background.queue.last = None  # the end of this process must not report the last save


def _state(seed: int) -> Data:
    rows = sizes(seed)[0]
    weight = torch.zeros(rows, 2)
    return {
        "sharded": make_dtensor(seed),
        "weight": weight,
        "tied": weight,
        "optim": {"lr": 0.5, "moment": weight + 1},
    }


@torch.no_grad()
def _update(state: Data, turn: int) -> None:
    """Update in place, as optimizers do."""
    for tensor in (compat.local_of(state["sharded"]), state["weight"], state["optim"]["moment"]):
        tensor.fill_(turn)
    state["optim"]["lr"] = float(turn)


def _saves(seed: int, folder: Path, stage: Stage) -> Data:
    """Make three saves; updates follow at once. Keep the handles, as users do."""
    state, handles, allocated = _state(seed), [], []
    stage.gate.clear()
    for turn in (1, 2, 3):
        _update(state, turn)
        stage.note("call", str(turn))
        with Allocations() as counted:
            handles.append(store.async_save(state, folder / str(turn)))
        stage.note("returned", str(turn))
        allocated.append(counted.nbytes)
    _update(state, 4)
    stage.gate.set()
    ids = [handle.wait() for handle in handles]
    if stage.escaped:
        raise stage.escaped[0]
    notes, loaded = list(stage.notes), list[Any]()
    for turn in (1, 2, 3):
        target = _state(seed)
        _update(target, 99)
        raised = raised_by(lambda: store.load(target, folder / str(turn)))
        loaded.append(raised or [_values(target), target["optim"]["lr"]])
    return {"notes": notes, "allocated": allocated, "ids": ids, "loaded": loaded}


def _values(state: Data) -> list[list[float]]:
    """Return the distinct values of each tensor that has elements on this rank."""
    parts = [local_of(leaf) for _, leaf in leaves_of(state) if isinstance(leaf, Tensor)]
    return [sorted(set(part.flatten().tolist())) for part in parts if part.numel()]


def _errors(seed: int, folder: Path) -> Data:
    """Make saves that fail, each followed by one that can succeed. Report which calls raise the errors."""
    state, taken = _state(seed), folder / "1"
    found: Data = {}
    handle = store.async_save(state, taken)  # a checkpoint exists here, and a save may not overwrite it
    found["a target that is there"] = [raised_by(handle.wait), raised_by(handle.wait)]
    found["kept by the handle"] = type(handle._state_dict).__name__
    found["after it was heard"] = raised_by(lambda: store.async_save(state, folder / "a").wait())
    raised_by(lambda: store.async_save(state, taken))
    found["nobody waits"] = raised_by(lambda: store.async_save(state, folder / "b"))
    found["after that"] = raised_by(lambda: store.async_save(state, folder / "c").wait())
    broken = {**state, "broken": torch.zeros(3, device="meta")}
    handles: list[background.SaveHandle] = []
    at_once = raised_by(lambda: handles.append(store.async_save(broken, folder / "d")))
    found["a copy that cannot be made"] = [at_once, *(raised_by(handle.wait) for handle in handles)]
    with mock.patch.object(saving._Saving, "run", _ended):
        found["a save that is ended"] = raised_by(lambda: store.async_save(state, folder / "e").wait())
    found["at the end"] = raised_by(background.finish_saves)
    return found


def _ended(*_: Any) -> str:
    raise Ended("by a signal")
