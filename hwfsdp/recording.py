"""`record`: puts the instruments in place, takes them away again.

    with record() as log:
        train_step()
    print(log.summary())

What each instrument sees, and why none of them is inside the code it watches: see `events`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from hwfsdp import events
from hwfsdp.compat import storage_key
from hwfsdp.errors import StateError
from hwfsdp.eventlog import EventLog
from hwfsdp.events import Draft, HostMark, Recorder
from hwfsdp.memory import Ledger


class _Collective(NamedTuple):
    """How to read a call.

    Attributes:
        op: what to log it as; reads, writes: names of its arguments; whole: the one whose bytes count.
        kinds: of the memory that is read and written, where the ledger should count it.
    """

    op: str
    reads: str
    writes: str
    whole: str
    kinds: tuple[str, str] = ("", "")


_GATHER = _Collective(
    "all_gather", "input_tensor", "output_tensor", "output_tensor", ("", "all_gather_buffer")
)
_SCATTER = _Collective(
    "reduce_scatter", "input", "output", "input", ("reduce_scatter_buffer", "sharded_grad")
)
_WATCHED = {
    "all_gather_single": _GATHER,
    "all_gather_into_tensor": _GATHER,
    "all_gather": _Collective("all_gather", "tensor", "tensor_list", "tensor_list"),
    "reduce_scatter_single": _SCATTER,
    "reduce_scatter_tensor": _SCATTER,
    "reduce_scatter": _Collective("reduce_scatter", "input_list", "output", "input_list"),
    "all_reduce": _Collective("all_reduce", "tensor", "tensor", "tensor"),
    "broadcast": _Collective("broadcast", "tensor", "tensor", "tensor"),
    "all_to_all_single": _Collective("all_to_all", "input", "output", "input"),
    "all_to_all": _Collective("all_to_all", "input_tensor_list", "output_tensor_list", "input_tensor_list"),
    "send": _Collective("send", "tensor", "", "tensor"),
    "isend": _Collective("send", "tensor", "", "tensor"),
    "recv": _Collective("recv", "", "tensor", "tensor"),
    "irecv": _Collective("recv", "", "tensor", "tensor"),
}
_IN_BATCHES = ("isend", "irecv")
_OWN_STREAM = ("all_gather", "reduce_scatter", "all_reduce")  # the others run where they are called: compute


@contextmanager
def record(rank: int | None = None) -> Iterator[EventLog]:
    """Records this process until the block ends; the log it yields is filled then.

    Args:
        rank: the rank to write into the events; by default that of the process group, 0 without one.

    Raises:
        StateError: a recording is active already.
    """
    if events.active() is not None:
        raise StateError(
            "record()",
            expected="no recording in progress",
            got="a nested call",
            remedy="Record once, around the outermost block.",
        )
    if rank is None:
        rank = dist.get_rank() if dist.is_initialized() else 0
    ledger, log = Ledger(), EventLog()
    recorder = Recorder(rank, sample_memory=ledger.bytes_by_kind, visit=ledger.visit, watch=ledger.watch)
    with ExitStack() as instruments:
        instruments.enter_context(_watch_collectives())
        instruments.enter_context(_watch_storages(recorder))
        instruments.enter_context(_watch_optimizers(recorder, ledger))
        instruments.callback(events.activate, None)
        recorder.origin = recorder.mark("compute")
        events.activate(recorder)
        try:
            yield log
        finally:
            found, samples = recorder.finish()
            log.events, log.samples = found, {rank: samples}


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def _watch_collectives() -> Iterator[None]:
    """One wrapper per function, at both names it goes by.

    But for those of batches: torch tells sends from receives by comparing an operation's function, which may be older
    than the recording, with the name in its own module.
    """
    with ExitStack() as patches:
        for name, collective in _WATCHED.items():
            if hasattr(dist, name):
                wrapper = _WatchedFunction(getattr(dist, name), collective)
                patches.enter_context(_replaced(dist, name, wrapper))
                if name not in _IN_BATCHES:
                    patches.enter_context(_replaced(distributed_c10d, name, wrapper))
        batch = _watched_batch(distributed_c10d.batch_isend_irecv)
        patches.enter_context(_replaced(dist, "batch_isend_irecv", batch))
        patches.enter_context(_replaced(distributed_c10d, "batch_isend_irecv", batch))
        patches.enter_context(_replaced(dist.P2POp, "__init__", _unwatching(dist.P2POp.__init__)))
        yield


class _WatchedFunction:
    """A collective that is logged if a recording is active when it is called.

    It equals the function it wraps, because torch looks for the functions of a batch among `isend` and `irecv`.
    """

    def __init__(self, original: Callable[..., Any], collective: _Collective) -> None:
        self.original, self._collective = original, collective
        self._signature = inspect.signature(original)
        functools.update_wrapper(self, original)

    def __eq__(self, other: object) -> bool:
        return getattr(other, "original", other) is self.original

    def __hash__(self) -> int:
        return hash(self.original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        recorder = events.active()
        if recorder is None or recorder.inside_collective:  # one collective calls another
            return self.original(*args, **kwargs)
        collective, arguments = self._collective, self._signature.bind(*args, **kwargs).arguments
        draft = _begin(collective, arguments, recorder)
        for name, kind in zip((collective.reads, collective.writes), collective.kinds, strict=True):
            if kind and recorder.watch:
                recorder.watch(arguments[name], kind)
        recorder.inside_collective = True
        try:
            work = self.original(*args, **kwargs)
        finally:
            recorder.inside_collective = False
        _close_when_done(draft, work, recorder)
        recorder.sample()
        return work


def _unwatching(original: Callable[..., None]) -> Callable[..., None]:
    """Operations of a batch hold the functions themselves, so that they may be run after the recording."""

    @functools.wraps(original)
    def __init__(self: dist.P2POp, op: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        original(self, getattr(op, "original", op), *args, **kwargs)

    return __init__


def _watched_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    """A batch calls the functions of its operations itself, so it is logged here."""

    @functools.wraps(original)
    def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> Any:
        recorder = events.active()
        if recorder is None:
            return original(p2p_op_list)
        drafts = [
            _begin(_WATCHED[operation.op.__name__], {"tensor": operation.tensor}, recorder)
            for operation in p2p_op_list
        ]
        works = original(p2p_op_list)
        for number, draft in enumerate(drafts):  # NCCL makes one work of all
            _close_when_done(draft, works[min(number, len(works) - 1)], recorder)
        return works

    return batch_isend_irecv


def _begin(collective: _Collective, arguments: dict[str, Any], recorder: Recorder) -> Draft:
    whole = _tensors(arguments[collective.whole])
    stream = recorder.stream or (collective.op if collective.op in _OWN_STREAM else "compute")
    return recorder.begin(
        collective.op,
        stream,
        follows_stream=True,
        dtype=str(whole[0].dtype).removeprefix("torch.") if whole else "",
        bytes=sum(t.numel() * t.element_size() for t in whole),
        reads=tuple(storage_key(t) for t in _tensors(arguments.get(collective.reads))),
        writes=tuple(storage_key(t) for t in _tensors(arguments.get(collective.writes))),
    )


def _tensors(argument: Any) -> list[Tensor]:
    if isinstance(argument, Tensor):
        return [argument]
    return [t for t in argument if isinstance(t, Tensor)] if isinstance(argument, list | tuple) else []


def _close_when_done(draft: Draft, work: Any, recorder: Recorder) -> None:
    """Ends the event with its work; a call that blocked the host until then was a wait of the host, too."""
    if isinstance(work, dist.Work):
        try:
            work.get_future().add_done_callback(lambda _: draft.close(HostMark()))
        except RuntimeError:  # a fake process group has works without futures
            draft.close()
        return
    draft.close()
    if draft.event.stream != "compute":
        wait = recorder.begin("wait", "compute", after=(draft.event.seq,), owner=draft.event.owner)
        wait.begin = draft.begin
        wait.close()


@contextmanager
def _watch_storages(recorder: Recorder) -> Iterator[None]:
    original = torch.UntypedStorage.resize_

    @functools.wraps(original)
    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        before = storage.nbytes()
        result = original(storage, size)
        if size != before and events.active() is recorder:
            op, key = ("alloc" if size > before else "free"), (storage_key(storage),)
            recorder.instant(op, recorder.stream or "compute", bytes=abs(size - before), writes=key)
            recorder.sample()
        return result

    with _replaced(torch.UntypedStorage, "resize_", resize_):
        yield


@contextmanager
def _watch_optimizers(recorder: Recorder, ledger: Ledger) -> Iterator[None]:
    running: list[Draft] = []
    seen: set[int] = set()

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if id(optimizer) not in seen:
            seen.add(id(optimizer))
            _backdate_state(optimizer, recorder, ledger)
        running.append(recorder.begin("optimizer", "compute", phase="optimizer", owner=""))

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        ledger.visit_state(optimizer.state.values())
        recorder.sample()
        running.pop().close()
        recorder.step += 1

    handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _backdate_state(optimizer: Optimizer, recorder: Recorder, ledger: Ledger) -> None:
    """State that is there before an optimizer's first step of the recording was there when it began."""
    unseen = ledger.bytes_by_kind()["optimizer_state"]
    ledger.visit_state(optimizer.state.values())
    found = ledger.bytes_by_kind()["optimizer_state"] - unseen
    for sample in recorder.samples:
        sample.bytes_by_kind["optimizer_state"] += found
