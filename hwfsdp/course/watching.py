"""What a rank computes and sends, watched below every function that a student's file may call.

    Watcher     every operator: it must not read free memory; events for `races.find_races`
    Wire        every message, and the names of all other communicating calls

A file packs, copies and frees in its own way, and no instrument of the package is in it. So the watcher works where every operator
passes. During a recording, operators become events of the log. The memory that they allocate counts as a buffer
(`Recorder.buffer_made`): once it is released, the stream that allocated it may write there again.

Note [Threads let go late]
    A gloo thread reports that a collective is done, and drops its tensors a moment later. So `bytes_alive` looks again for a while:
    by then, tensors that only the thread held are gone.
"""

from __future__ import annotations

import functools
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor

from hwfsdp.comm.users_collectives import tensors_in
from hwfsdp.compat import DispatchMode, arguments_of, local_of, storage_key
from hwfsdp.core.device_streams import HostStream
from hwfsdp.observe import events
from hwfsdp.observe.recording import after_each_resize
from hwfsdp.virtual.allocator import Allocator

Watched = weakref.ref[torch.UntypedStorage]


# --- Memory and operators ----------------------------------------------------------------------------------


class WeightGone(Exception):
    """An operator read a tensor whose memory was free."""


class Watcher(DispatchMode):
    """A mode that sees the operators called in its block, including autograd's.

    Args:
        about: what is unusual about the model; `WeightGone` says it.
        refuses: refuse operators on free memory, which would read from address 0. logs: make events of operators.

    Attributes:
        phase: "forward" or "backward"; began: number of recorded events when it began.
    """

    def __init__(self, about: str = "", refuses: bool = False, logs: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.about, self.refuses, self.logs = about, refuses, logs
        self.began, self.phase, self._is_quiet = 0, "forward", False

    def begin(self, phase: str) -> int:
        """Begin a phase, and return the number of events so far."""
        self.phase, self.began = phase, count_of_events()
        return self.began

    def __torch_dispatch__(
        self, op: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # a DTensor's operator calls operators on local parts, which are seen
        if op is torch.ops.prim.device.default:
            return args[0].device  # C++ asks fake tensors very often; the modes below need not see it
        kwargs = kwargs or {}
        if self.refuses and _has_free(args) and not _looks_only(_name(op)):
            if op.is_view:
                with suppress(RuntimeError):  # a slice works and reads nothing; a transpose fails
                    return op(*args, **kwargs)
            raise WeightGone(self._said(_name(op)))
        out = op(*args, **kwargs)
        if self.logs and not self._is_quiet and op.namespace == "aten":
            recorder = events.active()
            if recorder is not None and not recorder.inside_collective:
                given = {storage_key(t) for t in tensors_in((*args, *kwargs.values()))}
                fresh = [t for t in tensors_in(out) if storage_key(t) not in given and not t.is_meta]
                self._log(recorder, op, _name(op), args, kwargs, fresh)
        return out

    def _said(self, name: str) -> str:
        recorder = events.active()
        drafts = recorder.drafts[self.began :] if recorder else []
        gathers = sum(draft.op == "all_gather" for draft in drafts)
        so_far = f"; all-gathers of this {self.phase} so far: {gathers}" if recorder else ""
        kind = "read-while-freed" if gathers or not recorder else "not-gathered"
        where = f"in a {self.phase}, the operator {name} reads memory that is free{so_far}."
        return f"{kind}: {where} {self.about}".rstrip()

    def _log(
        self,
        recorder: events.Recorder,
        op: Any,
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        fresh: Sequence[Tensor],
    ) -> None:
        """Log one event, unless the operator only makes a view."""
        given = {a.name: value for a, value in zip(arguments_of(op), args, strict=False)} | dict(kwargs)
        written = [t for a in arguments_of(op) if a.is_written for t in tensors_in(given.get(a.name))]
        read = [] if name.startswith("new_") or name.endswith("_like") else tensors_in(given)
        if not written and not fresh:
            return
        own = {id(t) for t in written}
        for tensor in fresh:
            recorder.buffer_made(tensor)
        reads = [t for t in read if id(t) not in own]
        recorder.instant(name, recorder.stream or "compute", reads=reads, writes=[*written, *fresh])

    def unseen(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `function` so that its operators are not events: it waits, and its order follows from its waits."""

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            outer, self._is_quiet = self._is_quiet, True
            try:
                return function(*args, **kwargs)
            finally:
                self._is_quiet = outer

        return wrapped


class _Storages(DispatchMode):
    def __init__(self, memory: Allocator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory = memory

    def __torch_dispatch__(
        self, op: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented
        out = op(*args, **kwargs or {})
        for tensor in tensors_in(out):
            if not tensor.is_meta:
                self.memory.see(tensor.untyped_storage())
        return out


@contextmanager
def bytes_counted() -> Iterator[Allocator]:
    """Count the bytes of every storage that an operator makes in the block, or that is resized there."""
    memory = Allocator()
    with after_each_resize(lambda storage, by: memory.see(storage)), _Storages(memory):
        yield memory


@contextmanager
def logged() -> Iterator[Watcher]:
    """Log every operator of the block. What a wait does is no event."""
    watcher = Watcher(logs=True)
    with ExitStack() as stack:
        for owner, name in ((HostStream, "finish"), (dist.Work, "wait")):
            stack.enter_context(mock.patch.object(owner, name, watcher.unseen(getattr(owner, name))))
        stack.enter_context(watcher)
        yield watcher


def _name(op: Any) -> str:
    name: str = op.name()
    return name.partition("::")[2].partition(".")[0]


def _has_free(values: Sequence[Any]) -> bool:
    """True if one of these arguments, or a tensor in one of these lists, has elements and no memory. Called for every operator."""
    for value in values:
        if isinstance(value, Tensor):
            if not value.untyped_storage().nbytes() and value.numel():
                return True
        elif isinstance(value, (list, tuple)) and _has_free(value):
            return True
    return False


def _looks_only(name: str) -> bool:
    """True if the operator of this name does not read the memory of its arguments."""
    return name in ("detach", "alias") or name.startswith("new_") or name.endswith("_like")


def is_there(value: object) -> bool:
    """True if a tensor has memory, or needs none. Other values are always there."""
    if not isinstance(value, Tensor):
        return True
    part = local_of(value)
    return not part.numel() or part.untyped_storage().nbytes() > 0


def count_of_events() -> int:
    """Return the number of events in the recording."""
    recorder = events.active()
    return len(recorder.drafts) if recorder else 0


def ready() -> None:
    """Begin a probe. Exclude the objects that exist now from garbage collection, so that collections are fast."""
    gc.freeze()


def copied(tensor: Tensor | None) -> Tensor | None:
    """Copy this rank's part of a tensor into new memory; None if there is no tensor, or it has no memory."""
    part = None if tensor is None else local_of(tensor)
    return None if part is None or part.is_meta else part.detach().clone()


def watch(tensor: Tensor) -> Watched:
    """Watch the storage of this rank's part. A view keeps a storage alive just as its tensor does."""
    return weakref.ref(local_of(tensor).untyped_storage())


def bytes_alive(refs: Iterable[Watched]) -> int:
    """Count the bytes of watched storages that are still referenced. Storages that only a reference cycle holds do not count."""
    global _left
    refs = list(refs)

    def alive() -> int:
        found = [storage for ref in refs if (storage := ref()) is not None]
        return sum({id(storage): storage.nbytes() for storage in found}.values())

    if alive():
        gc.collect()
    while _left > 0 and alive():
        time.sleep(0.002)
        _left -= 0.002
    return alive()


_left = 0.5  # seconds left to wait in this process, in total (Note [Threads let go late])


# --- Messages ----------------------------------------------------------------------------------------------

_COLLECTIVES = ("all", "barrier", "broadcast", "gather", "monitored", "recv", "reduce", "scatter", "send")


def collectives_of(kind: type) -> list[str]:
    """Return the names of a process group's methods that communicate."""
    names = [name for name in dir(kind) if name.lstrip("_").startswith(_COLLECTIVES)]
    return [name for name in names if not name.startswith("__") and callable(getattr(kind, name))]


@dataclass
class Wire:
    """Everything that a rank sends and receives.

    Attributes:
        moves: ["send" or "recv", peer in the group, bytes] of each message. sent: the bytes of all that are sent.
        others: the names of all other communicating calls, to process groups and stores, even if no recording sees them.
    """

    moves: list[list[Any]] = field(default_factory=list)
    sent: list[Tensor] = field(default_factory=list)
    others: list[str] = field(default_factory=list)


@contextmanager
def watch_wire() -> Iterator[Wire]:
    """Watch everything that this thread sends and receives."""
    wire, thread = Wire(), threading.get_ident()
    group: Any = distributed_c10d.ProcessGroup
    stores: list[Any] = [distributed_c10d.Store, *distributed_c10d.Store.__subclasses__()]
    kinds: list[Any] = [
        group,
        *(kind for kind in group.__subclasses__() if kind.__module__.startswith("hwfsdp")),
    ]
    calls = {kind: [n for n in collectives_of(kind) if n in vars(kind)] for kind in kinds}
    calls |= {kind: _calls_of(kind) for kind in stores}
    originals = {(kind, name): vars(kind)[name] for kind in calls for name in calls[kind]}

    def watched_call(kind: Any, name: str, original: Any) -> Any:
        def move(group: Any, tensors: Sequence[Any], peer: int, *rest: Any) -> Any:
            data = [t.detach().clone().reshape(-1).view(torch.uint8) for t in tensors]
            wire.moves.append([name, int(peer), sum(map(len, data))])
            wire.sent += data if name == "send" else []
            return original(group, tensors, peer, *rest)

        def other(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread:
                wire.others.append(f"{kind.__name__}.{name}" if kind in stores else name.lstrip("_"))
            return original(*args, **kwargs)

        return move if kind is group and name in ("send", "recv") else other

    try:
        for kind, name in originals:
            setattr(kind, name, watched_call(kind, name, getattr(kind, name)))
        yield wire
    finally:
        for (kind, name), original in originals.items():
            setattr(kind, name, original)


def _calls_of(kind: type) -> list[str]:
    """Return the names of a store's own methods, and of the function that makes one."""
    calls = [name for name, call in vars(kind).items() if callable(call)]
    return [name for name in calls if name == "__init__" or name[0] != "_"]
