"""15, on ranks: states of all kinds, and saves whose threads are held back.

Note [Races without a clock]
    A thread that a save starts is held until every tensor of the state has changed, and `write` until the next call waits for something,
    or the test does: then everything has changed once more. So a copy that is made late, or shares memory, always shows. If the call
    that has begun a save waits although all earlier gates are open, it waits for its own save: this is noted, and its gate opens, too.
    A lock of the file (`Lock`) counts as such a wait only while its holder cannot go on by itself: a thread that is held back, or the
    main thread, which holds the lock until a thread releases it.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hwfsdp import fully_shard
from hwfsdp.compat import DispatchMode, local_of, storage_key
from hwfsdp.course.probing import Report, attempt, submitted

State = dict[str, Any]


class Ended(BaseException):
    """No Exception, like what ends a program."""


class Settings:
    """An object of a user."""

    def __init__(self) -> None:
        self.lr = 0.0


def state_of(seed: int, size: int = 1) -> State:
    """Return parameters of a sharded model, moments, views of one memory, and settings. On two ranks, one parameter has rows on one only."""
    model = nn.Sequential(nn.Linear(4, 3 + 2 * (seed % 3)), nn.Linear(4 * size, 1))
    fully_shard(model)
    params = {name: param.detach() for name, param in model.named_parameters()}
    flat, tied = torch.zeros(size * 4096), torch.zeros(40 * size, dtype=torch.bfloat16)
    return {
        "model": params,
        "optim": {
            name: {"exp_avg": torch.zeros_like(param), "step": torch.zeros(())}
            for name, param in params.items()
        },
        "views": [flat[:1024], flat[512:].view(-1, 64), flat[512:].view(-1, 64).t()],
        "tied": (tied, tied),
        "counts": torch.zeros(5, dtype=torch.int64),
        "empty": torch.zeros(0, 3),
        "numbers": {"lr": 0.0, "history": [0.0], "settings": Settings()},
    }


def leaves(state: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(state, dict | list | tuple):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from leaves(value, f"{path}.{key}".strip("."))
    else:
        yield path, state


@torch.no_grad()
def update(state: State, turn: int) -> None:
    """Change everything in place, as a step does. The numbers of two views differ, also within a view."""
    for _, leaf in leaves(state):
        if isinstance(leaf, Tensor):
            local = local_of(leaf)
            local.copy_(torch.arange(local.numel()).view(local.shape).remainder(50) + turn)
    state["numbers"]["lr"], state["numbers"]["settings"].lr = float(turn), float(turn)
    state["numbers"]["history"][:] = [float(turn)]


def described(state: State) -> dict[str, Any]:
    """Return, by path, what a leaf is, its values on this rank, and where it lies: the first leaf in its storage, distance and strides."""
    found, first = dict[str, Any](), dict[int, tuple[str, int]]()
    for path, leaf in leaves(state):
        if isinstance(leaf, Tensor):
            local = local_of(leaf).detach()
            kind = f"{'DTensor' if isinstance(leaf, DTensor) else 'Tensor'} {leaf.dtype} {tuple(leaf.shape)}"
            at, begin = first.setdefault(storage_key(local), (path, local.data_ptr()))
            place = [at, local.data_ptr() - begin, list(local.stride())] if local.numel() else []
            found[path] = {"kind": kind, "values": local.clone(), "place": place}
        else:
            found[path] = {"kind": type(leaf).__name__, "values": getattr(leaf, "lr", leaf), "place": []}
    return found


def storages_of(state: State) -> dict[int, torch.UntypedStorage]:
    """Return the storages of all tensors, by address."""
    found = [local_of(leaf).untyped_storage() for _, leaf in leaves(state) if isinstance(leaf, Tensor)]
    return {each.data_ptr(): each for each in found if each.nbytes()}


class Allocations(DispatchMode):
    """The bytes of new storages that operators of this thread make."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = 0

    def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        given = {storage_key(local_of(each)) for each in args if isinstance(each, Tensor)}
        for tensor in found if isinstance(found, tuple | list) else [found]:
            if isinstance(tensor, Tensor) and storage_key(local_of(tensor)) not in given:
                self.nbytes += local_of(tensor).untyped_storage().nbytes()
        return found


MOST = 32  # calls of `save` or `write`


class Stage:
    """Threads and waits under control (Note [Races without a clock]). Calls of `save` have the numbers 1, 2, 3.

    Attributes:
        notes: what happened, in order: "call 1", "waits 1", "returns 1", "write 1", "written 1". seen: what each `write` got.
        staged: the storages of each copy, by address. alive: weak references to them. fails: by number, what `write` raises.
    """

    def __init__(self) -> None:
        self.main, self.call, self.written, self.is_starting = threading.current_thread(), 0, 0, False
        # of `write`, of threads, and set when a thread has come to `write`, or to its end
        self.gates, self.begins, self.came = (
            [threading.Event() for _ in range(MOST)]
            for _ in range(3)  # made before any thread could make two of one
        )
        self.notes, self.seen = list[str](), list[Any]()
        self.staged, self.alive = list[dict[int, int]](), list[Any]()
        self.fails = dict[int, BaseException]()
        self.is_inside = False
        self.held = {self.main}  # threads that cannot release a lock for which the main thread waits

    def write(self, copy: State) -> None:
        self.written += 1
        number = min(self.written, MOST - 1)
        self.notes.append(f"write {number}")
        self.came[number].set()
        if threading.current_thread() is self.main:
            self.notes.append(f"waits {self.call}")
        else:
            self.hold(self.gates[number])
        self.seen.append(described(copy))
        self.staged.append({address: each.nbytes() for address, each in storages_of(copy).items()})
        self.alive += [weakref.ref(each) for each in storages_of(copy).values()]
        self.notes.append(f"written {number}")
        del copy
        if number in self.fails:
            raise self.fails[number]

    def hold(self, gate: threading.Event) -> None:
        """Hold this thread back until a gate is open."""
        self.held.add(threading.current_thread())
        gate.wait()
        self.held.discard(threading.current_thread())

    def save(self, saver: Any, state: State) -> Any:
        self.call += 1
        self.notes.append(f"call {self.call}")
        self.is_inside = True
        try:
            return saver.save(state)
        finally:
            self.is_inside = False
            self.notes.append(f"returns {self.call}")

    def begin(self) -> None:
        """Let the threads of the last call begin, and wait until one comes to `write`."""
        self.begins[self.call].set()
        self.is_starting = True
        self.came[self.call].wait(timeout=2)  # less than the time after which ranks are ended that do nothing
        self.is_starting = False

    def waits(self) -> None:
        """Open gates if the main thread is about to wait."""
        if threading.current_thread() is not self.main or self.is_starting:
            return
        earlier = [
            number for number in range(1, self.call + (not self.is_inside)) if not self.gates[number].is_set()
        ]
        if self.is_inside and not earlier and not self.gates[self.call].is_set():
            self.notes.append(f"waits {self.call}")
            earlier = [self.call]
        for number in earlier:
            self.begins[number].set()
            self.gates[number].set()

    @contextmanager
    def set_up(self) -> Iterator[None]:
        def at_the_gate(thread: threading.Thread) -> None:
            number = getattr(thread, "begun_by", 0)
            if number:
                self.hold(self.begins[number])
            run(thread)
            self.came[number].set()

        def started(thread: threading.Thread) -> None:
            setattr(thread, "begun_by", self.call if self.is_inside else 0)
            before, self.is_starting = self.is_starting, True
            start(thread)
            self.is_starting = before

        run, start = threading.Thread.run, threading.Thread.start
        waiting = [
            (threading.Thread, "join"),
            (threading.Thread, "is_alive"),
            (threading.Condition, "wait"),
            (time, "sleep"),
        ]
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(threading.Thread, "run", at_the_gate))
            stack.enter_context(mock.patch.object(threading.Thread, "start", started))
            stack.enter_context(mock.patch.object(threading, "excepthook", lambda args: None))
            for owner, name in waiting:
                stack.enter_context(mock.patch.object(owner, name, self._before(getattr(owner, name))))
            stack.enter_context(self._locks_seen())
            try:
                yield
            finally:
                for gate in (*self.gates, *self.begins):
                    gate.set()

    @contextmanager
    def _locks_seen(self) -> Iterator[None]:
        """Give the student's file locks that are seen (`Lock`)."""
        names, make = vars(submitted()), threading.Lock

        def lock() -> Any:
            return Lock(self) if sys._getframe(1).f_globals is names else make()

        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(threading, "Lock", lock))
            for name in [name for name, value in names.items() if value is make]:  # from threading import Lock
                stack.enter_context(mock.patch.dict(names, {name: lock}))
            yield

    def _before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("timeout", args[-1]) != 0:  # of a semaphore that is only asked
                self.waits()
            return function(*args, **kwargs)

        return wait


class Lock:
    """A lock that opens gates if the main thread waits for a thread that is held back (Note [Races without a clock])."""

    def __init__(self, stage: Stage) -> None:
        self.stage, self.lock = stage, threading._allocate_lock()  # type: ignore[attr-defined]
        self.holder: threading.Thread | None = None

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        found: bool = self.lock.acquire(False)
        while not found and blocking:
            if self.holder in self.stage.held:
                self.stage.waits()
            found = self.lock.acquire(True, 0.05 if timeout < 0 else timeout)
            blocking = timeout < 0
        if found:
            self.holder = threading.current_thread()
        return found

    def release(self) -> None:
        self.lock.release()

    def locked(self) -> bool:
        return bool(self.lock.locked())

    __enter__ = acquire

    def __exit__(self, *error: object) -> None:
        self.release()


def probe_saves(report: Report, seed: int) -> None:
    """Save three times, with an update right after each call; then a smaller state. Report what happened, and what was written."""
    stage = Stage()
    with stage.set_up():
        state, handles, rights, allocated = state_of(seed), list[Any](), list[Any](), list[int]()
        saver, plugs = submitted().Saver(stage.write), list[Any]()
        for turn in (1, 2, 3):
            update(state, turn)
            rights.append(described(state))
            # what was freed goes to somebody else
            plugs += [torch.UntypedStorage(each.nbytes()) for each in storages_of(state).values()]
            with Allocations() as counted:
                handles.append(stage.save(saver, state))
            allocated.append(counted.nbytes)
            update(state, 100 * turn)
            stage.begin()
        for turn, handle in enumerate(handles, 1):
            handle.wait()
            stage.notes.append(f"waited {turn}")
        source = storages_of(state)
        found: dict[str, Any] = {
            "notes": list(stage.notes),
            "seen": stage.seen,
            "rights": rights,
            "allocated": allocated,
        }
        found |= {
            "staged": [{str(at): n for at, n in each.items()} for each in stage.staged],
            "source": [str(at) for at in source],
        }
        found["nbytes"] = sum(each.nbytes() for each in source.values())
        sources = [weakref.ref(each) for each in source.values()]
        del state, source
        found["kept source"] = alive(sources)
        stage.save(saver, {"small": torch.ones(3)}).wait()
        found["kept buffers"] = alive(stage.alive)
        del saver
        found["kept by handles"] = alive(stage.alive)
    report["saves"] = found


def alive(references: list[Any]) -> int:
    """Return the bytes of storages that are alive. The thread of a pool drops its task a moment after the task has ended."""
    nbytes = 0
    for _ in range(20):
        gc.collect()
        found = {id(each): each.nbytes() for reference in references if (each := reference()) is not None}
        nbytes = sum(found.values())
        if not nbytes:
            break
        threading.Event().wait(0.01)
    return nbytes


def raised_by(call: Callable[[], Any]) -> str:
    """Return what a call raises; "" if it returns."""
    try:
        call()
    except NotImplementedError:
        raise
    except BaseException as error:
        error.__traceback__ = None  # its frames refer to the copy
        return f"{type(error).__name__}: {error}"[:100]
    return ""


class Uncopied:
    """No copy of it can be made."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise ValueError("no copy")


def probe_errors(report: Report, seed: int) -> None:
    """Save with a `write` that raises, and a state that cannot be copied. Report, by name, what the calls raise."""
    attempt(report, "errors", lambda: errors(seed))


def errors(seed: int) -> dict[str, Any]:
    stage, state, found = Stage(), {"a": torch.ones(3), "b": [torch.zeros(2)]}, dict[str, Any]()
    for gate in stage.gates:
        gate.set()
    stage.fails = {1: ValueError("disk 1"), 3: OSError("disk 3"), 5: Ended("disk 5")}
    with mock.patch.object(threading, "excepthook", lambda args: None):
        saver = submitted().Saver(stage.write)
        first = saver.save(state)
        found["wait"], found["wait again"] = raised_by(first.wait), raised_by(first.wait)
        found["kept"] = alive(stage.alive) - sum(map(sum, [each.values() for each in stage.staged]))
        found["save after wait"] = raised_by(lambda: saver.save(state).wait())
        saver.save(state)
        found["next save"] = raised_by(lambda: saver.save(state))
        found["writes"] = stage.written
        found["save after that"] = raised_by(lambda: saver.save(state).wait())
        found["wait, no Exception"] = raised_by(lambda: saver.save(state).wait())
        written, handles = stage.written, list[Any]()
        found["copy"] = raised_by(lambda: handles.append(saver.save({**state, "c": Uncopied()})))
        found["copy"] = found["copy"] or raised_by(handles[0].wait)
        found["written anyway"] = stage.written - written
        found["save after copy"] = raised_by(lambda: saver.save(state).wait())
        saver = None
        found["kept by a failed save"] = alive(stage.alive)
    return found
