"""Wrappers that log the collectives of `torch.distributed`, and the waits for them.

All functions of `torch.distributed` that move bytes between ranks call a method of the process group. A recording puts wrappers
around these methods, and the wrappers log every such call. `recording` lists the calls that they do not see.

Note [Streams of a collective]
    FSDP calls its collectives on streams of its own (`core.device_streams`). The log has those streams. A collective that is called outside
    of them belongs to torch's current stream, which the log calls compute. torch runs it beside this stream, from the point that
    the stream has reached. So in the log it has a stream of its own, by its name or "other", and waits for the last
    event of compute. Compute waits for it at the end of the call, or with `async_op=True` when the program waits for its work. Calls
    that block and that have no stream by their name are events of compute itself.

Note [Functional collectives]
    A functional collective returns its result at once, and a later wait completes it. DTensors use functional collectives for
    redistribution. Such a collective calls no function of `torch.distributed`, so its operator is wrapped. The event begins when
    Python calls the operator, and ends after the wait for its result.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from hwfsdp.comm.users_collectives import caller, op_of, tensors_in
from hwfsdp.compat import functional_operators, is_fake_work, kinds_of_work
from hwfsdp.observe import events
from hwfsdp.observe.events import Draft, Recorder

_OWN_STREAM = ("all_gather", "reduce_scatter", "all_reduce")  # Note [Streams of a collective]
# the kinds of memory that collectives of one flat tensor read and write
_KINDS = {
    "all_gather": ("", "all_gather_buffer"),
    "reduce_scatter": ("reduce_scatter_buffer", "sharded_grad"),
}
# functions that return the works of sends and receives
_RETURN_WORKS = ("isend", "irecv", "batch_isend_irecv")


@contextmanager
def watch_collectives() -> Iterator[None]:
    """Put a wrapper around each method that communicates, of torch's process group and of classes derived from it."""
    calls = {name: op for name in vars(dist.ProcessGroup) if (op := op_of(name))}
    kinds = (dist.ProcessGroup, *dist.ProcessGroup.__subclasses__())
    with ExitStack() as patches:
        for kind, (name, op) in product(kinds, calls.items()):
            if name in vars(kind):
                patches.enter_context(mock.patch.object(kind, name, _watched(vars(kind)[name], op)))
        end = _watched_end(dist.ProcessGroup._end_coalescing)
        patches.enter_context(mock.patch.object(dist.ProcessGroup, "_end_coalescing", end))
        yield


def _watched(method: Callable[..., Any], op: str) -> Callable[..., Any]:
    """Log the calls of a method of a process group that come from a function of `torch.distributed`."""

    @functools.wraps(method)
    def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        recorder, frame = events.active(), sys._getframe(1)
        is_watched = recorder is not None and frame.f_globals.get("__name__") == distributed_c10d.__name__
        if recorder is None or not is_watched or recorder.inside_collective:  # one collective calls another
            return method(group, *args, **kwargs)
        is_async = getattr(kwargs.get("opts", args[-1] if args else None), "asyncOp", None)
        if is_async is None:  # the methods of sends and receives have no options
            is_async = caller(frame)[1] in _RETURN_WORKS
        draft = _begin(op, args, recorder, is_async)
        recorder.sample()  # before the call, which may block until the collective ends
        recorder.inside_collective = True
        try:
            work = method(group, *args, **kwargs)
        finally:
            recorder.inside_collective = False
        if work is None and is_async:
            recorder.coalesced.append(draft)
        elif work is not None and not is_async:  # the function waits for the work before it returns
            recorder.blocking[work] = draft
        else:
            _close_when_done(draft, work, recorder)
        return work

    return call


def _watched_end(method: Callable[..., Any]) -> Callable[..., Any]:
    """Log the end of calls that returned no work, because NCCL makes one work of all calls in torch's coalescing manager."""

    @functools.wraps(method)
    def end(group: dist.ProcessGroup, *args: Any) -> Any:
        work, recorder = method(group, *args), events.active()
        if recorder is not None:
            for draft in recorder.coalesced:
                _close_when_done(draft, work, recorder)
            recorder.coalesced.clear()
        return work

    return end


def _begin(op: str, args: tuple[Any, ...], recorder: Recorder, is_async: bool) -> Draft:
    """Begin the event of a method. The method's arguments are what it writes, and what it reads if that is something else."""
    writes, reads = tensors_in(args[:1]), tensors_in(args[1:2])
    if op in ("all_reduce", "broadcast", "reduce"):
        reads = writes
    elif op == "send":
        writes, reads = [], writes
    draft = _begin_on(op, reads, recorder, is_async)
    draft.writes = recorder.ledger.numbers_of(writes)
    _describe(draft, writes if op in ("all_gather", "scatter", "recv") else reads)
    if op in _KINDS and isinstance(args[0], Tensor):
        for tensors, kind in zip((reads, writes), _KINDS[op], strict=True):
            if kind:
                recorder.ledger.watch(tensors[0], kind)
    return draft


def _begin_on(op: str, reads: list[Tensor], recorder: Recorder, is_async: bool) -> Draft:
    """Begin a collective on its stream (Note [Streams of a collective])."""
    stream = recorder.stream
    after: tuple[int, ...] = ()
    if not stream:
        stream = op if op in _OWN_STREAM else "other" if is_async else "compute"
        after = recorder.over_on("compute") if stream != "compute" else ()
        # Inside a step of an optimizer, it follows the part of the step that has been issued.
        after = (*after, *(step.seq for step in recorder.stepping.values()))
    draft = recorder.begin(op, stream, follows_stream=True, reads=reads, after=after)
    if not recorder.stream:
        draft.begin = draft.clock("compute")
    return draft


def _describe(draft: Draft, whole: list[Tensor]) -> None:
    draft.dtype = str(whole[0].dtype).removeprefix("torch.") if whole else ""
    draft.bytes = sum(t.numel() * t.element_size() for t in whole)


def _close_when_done(draft: Draft, work: dist.Work | None, recorder: Recorder) -> None:
    """End the event when its work ends. A call without a work has ended already."""
    if work is None:
        _close_at_return(draft, recorder)
        return
    # A stream of the host waits itself, and reports it. Simulated streams wait for no work.
    if not recorder.stream or (is_fake_work(work) and not recorder.host_runs_stream):
        recorder.in_flight[work] = draft
    if is_fake_work(work):
        draft.close()  # the stream's clock includes the time of this work
        return
    try:
        work.get_future().add_done_callback(lambda _: draft.close(draft.clock("compute")))
    except RuntimeError:  # some works have no futures
        draft.close()


def _close_at_return(draft: Draft, recorder: Recorder) -> None:
    """End the event of a call that has blocked the host until its end, and log a wait of the host."""
    draft.close()
    if draft.stream != "compute" and (recorder.host_runs_stream or not recorder.stream):
        wait = recorder.begin("wait", "compute", after=(draft.seq,), owner=draft.owner)
        wait.begin = draft.begin
        wait.close()


@contextmanager
def watch_works(recorder: Recorder) -> Iterator[None]:
    """Log waits for works that belong to no stream, by the stream on which the program waits. A stream reports its own waits."""

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wait(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
            blocking, draft = recorder.blocking.pop(work, None), recorder.in_flight.get(work)
            if blocking is not None:
                with events.holding(recorder, inside_collective=True):
                    result = original(work, *args, **kwargs)
                _close_at_return(blocking, recorder)
                return result
            if draft is None or events.active() is not recorder:
                return original(work, *args, **kwargs)
            if recorder.stream not in ("", "compute"):
                recorder.ordered_after(recorder.stream, draft.seq)
                if not recorder.host_runs_stream:
                    return original(work, *args, **kwargs)
            with events.span("wait", "compute", after=(draft.seq,), owner=draft.owner):
                return original(work, *args, **kwargs)

        return wait

    with ExitStack() as stack:
        for kind in kinds_of_work():
            stack.enter_context(mock.patch.object(kind, "wait", watched(getattr(kind, "wait"))))
        yield


# --- Functional collectives --------------------------------------------------------------------------------

# of torch.ops._c10d_functional; each has some of these variants
_OPERATORS = (
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_reduce",
    "broadcast",
    "all_to_all_single",
)
_VARIANTS = ("", "_", "_out", "_coalesced", "_coalesced_")


@contextmanager
def watch_operators(recorder: Recorder) -> Iterator[None]:
    """Log functional collectives, as DTensors use them, when Python calls their operators."""
    variants = product(_OPERATORS, _VARIANTS)
    logged: dict[str, Any] = {name + end: partial(_log_call, op_of(name)) for name, end in variants}
    logged["wait_tensor"] = _log_wait
    with ExitStack() as patches:
        for namespace, (name, log) in product(functional_operators(), logged.items()):
            if hasattr(namespace, name):
                operator = _Operator(getattr(namespace, name), recorder, log)
                patches.enter_context(mock.patch.object(namespace, name, operator))
        yield


class _Operator:
    """A stand-in for an operator of torch, with the operator's overloads. While its recording is active, `logged` calls the operator."""

    def __init__(self, original: Any, recorder: Recorder, logged: Callable[..., Any]) -> None:
        self._original, self._recorder, self._logged = original, recorder, logged

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        recorder = self._recorder
        is_watched = events.active() is recorder and not recorder.inside_collective
        if not is_watched or torch.compiler.is_compiling():
            return self._original(*args, **kwargs)
        return self._logged(self._original, recorder, *args, **kwargs)


def _log_call(op: str, original: Any, recorder: Recorder, *args: Any, **kwargs: Any) -> Any:
    """Call a functional collective. Its event begins with the call and ends after the wait for its result."""
    given = tensors_in([*args, *kwargs.values()])
    draft = _begin_on(op, given, recorder, is_async=True)
    result = original(*args, **kwargs)
    made = tensors_in(result)
    draft.writes = recorder.ledger.numbers_of(made)
    _describe(draft, made if op == "all_gather" else given)
    recorder.results |= dict.fromkeys(draft.writes, draft)
    return result


def _log_wait(original: Any, recorder: Recorder, tensor: Tensor) -> Any:
    """Call the operator that waits for the result of a functional collective."""
    (number,) = recorder.ledger.numbers_of([tensor])
    draft = recorder.results.pop(number, None)
    if draft is None:
        return original(tensor)
    with events.span("wait", "compute", after=(draft.seq,), owner=draft.owner):
        result = original(tensor)
        draft.close()
    return result
