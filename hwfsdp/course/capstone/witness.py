"""A witness of every operator on a rank: which memory is alive, and who reads and writes it on which stream.

The homework's file packs, copies and frees in its own way, and no instrument of the package is in it. So the witness works where
every operator passes, and where `hwfsdp.streams` knows the current stream. During a recording, operators become events of the
log, and `races.find_races` reads from them whether anything is read before it is there. The memory that they allocate counts as
a buffer (`Recorder.buffer_made`): once it is released, the stream that allocated it may write there again.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from hwfsdp.compat import DispatchMode, arguments_of
from hwfsdp.core.streams import HostStream
from hwfsdp.observe import events

LEAST = 256  # smallest storage in bytes that is watched: smaller ones are counters or flags


class Witness(DispatchMode):
    """A mode that sees the operators called in its block, including autograd's."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()
        self._waiting = False

    def __torch_dispatch__(
        self, op: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # a DTensor's operator calls operators on local parts, which are seen
        if op is torch.ops.prim.device.default:
            return args[0].device  # C++ asks fake tensors very often; the modes below need not see it
        kwargs = kwargs or {}
        out = op(*args, **kwargs)
        made = list(_tensors((out,)))
        for tensor in made:
            storage = tensor.untyped_storage()
            if storage.nbytes() >= LEAST:
                self._made[id(storage)] = storage
        recorder = events.active()
        quiet = self._waiting or recorder is None or recorder.inside_collective or op.namespace != "aten"
        if recorder is not None and not quiet:
            self._log(recorder, op, args, kwargs, made)
        return out

    def alive(self) -> int:
        """Count the bytes alive in storages that were allocated in the block."""
        return sum(storage.nbytes() for storage in self._made.values())

    def _log(
        self,
        recorder: events.Recorder,
        op: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        made: list[Tensor],
    ) -> None:
        """Log one event, unless the operator only makes a view."""
        given = {a.name: value for a, value in zip(arguments_of(op), args, strict=False)} | kwargs
        written = [t for a in arguments_of(op) if a.is_written for t in _tensors((given.get(a.name),))]
        read = list(_tensors(given.values()))
        name = op.name().partition("::")[2].partition(".")[0]
        if name.startswith("new_") or name.endswith("_like"):  # these read only shapes
            read = []
        known = {id(t.untyped_storage()) for t in read}
        fresh = [t for t in made if id(t.untyped_storage()) not in known]
        if not written and not fresh:
            return
        own = {id(t) for t in written}
        stream = recorder.stream or "compute"
        for tensor in fresh:
            if tensor.untyped_storage().nbytes() >= LEAST:
                recorder.buffer_made(tensor)
        recorder.instant(name, stream, reads=[t for t in read if id(t) not in own], writes=[*written, *fresh])

    def unseen(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `function` so that its operators are not events: it waits, and its order follows from its waits."""

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            outer, self._waiting = self._waiting, True
            try:
                return function(*args, **kwargs)
            finally:
                self._waiting = outer

        return wrapped


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)


@contextmanager
def witnessed() -> Iterator[Witness]:
    """Witness everything that a probe does in the block."""
    witness = Witness()
    with ExitStack() as stack:
        for owner, name in ((HostStream, "finish"), (dist.Work, "wait")):
            stack.enter_context(mock.patch.object(owner, name, witness.unseen(getattr(owner, name))))
        stack.enter_context(witness)
        yield witness
