"""Wrappers that log the collectives of `torch.distributed`, and the waits for them.

A recording puts wrappers around the functions, and the wrappers log every call. `recording` lists the calls that they do not
see.

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
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from hwfsdp.comm.users_collectives import tensors_in
from hwfsdp.compat import functional_operators, is_fake_work, kinds_of_work
from hwfsdp.observe import events
from hwfsdp.observe.events import Draft, Recorder

OWN_STREAM = ("all_gather", "reduce_scatter", "all_reduce")  # Note [Streams of a collective]


class _Collective(NamedTuple):
    """The meaning of the arguments of a collective.

    Attributes:
        op: the name to log. reads, writes: names of the arguments that it reads and writes.
        kinds: the kinds of memory that it reads and writes, if the ledger should count them.
    """

    op: str
    reads: str
    writes: str
    kinds: tuple[str, str] = ("", "")

    @property
    def whole(self) -> str:
        """Return the name of the argument whose bytes count."""
        return self.writes if self.op in ("all_gather", "scatter", "recv") else self.reads


_GATHER = _Collective("all_gather", "input_tensor", "output_tensor", ("", "all_gather_buffer"))
_SCATTER = _Collective("reduce_scatter", "input", "output", ("reduce_scatter_buffer", "sharded_grad"))
_WATCHED = {
    "all_gather_single": _GATHER,
    "all_gather_into_tensor": _GATHER,
    "all_gather": _Collective("all_gather", "tensor", "tensor_list"),
    "reduce_scatter_single": _SCATTER,
    "reduce_scatter_tensor": _SCATTER,
    "reduce_scatter": _Collective("reduce_scatter", "input_list", "output"),
    "all_reduce": _Collective("all_reduce", "tensor", "tensor"),
    "broadcast": _Collective("broadcast", "tensor", "tensor"),
    "all_to_all_single": _Collective("all_to_all", "input", "output"),
    "all_to_all": _Collective("all_to_all", "input_tensor_list", "output_tensor_list"),
    "all_gather_coalesced": _Collective("all_gather", "input_tensor_list", "output_tensor_lists"),
    "all_reduce_coalesced": _Collective("all_reduce", "tensors", "tensors"),
    "reduce": _Collective("reduce", "tensor", "tensor"),
    "gather": _Collective("gather", "tensor", "gather_list"),
    "scatter": _Collective("scatter", "scatter_list", "tensor"),
    "barrier": _Collective("barrier", "", ""),
    "monitored_barrier": _Collective("barrier", "", ""),
    "send": _Collective("send", "tensor", ""),
    "isend": _Collective("send", "tensor", ""),
    "recv": _Collective("recv", "", "tensor"),
    "irecv": _Collective("recv", "", "tensor"),
}
_IN_BATCHES = ("isend", "irecv")
_MANAGER = "_coalescing_manager"  # it has no public name


@contextmanager
def watch_collectives() -> Iterator[None]:
    """Make one wrapper per function, and put it at both of the function's names.

    For `isend` and `irecv`, only the name in `torch.distributed` is replaced. To tell sends from receives in a batch, torch compares
    each operation's function with the name in its own module. The operation may be older than the recording.
    """
    if isinstance(dist.all_reduce, _WatchedFunction):  # `watch_from_now_on`
        yield
        return
    wrappers: dict[str, Any] = {
        name: _WatchedFunction(getattr(dist, name), collective)
        for name, collective in _WATCHED.items()
        if hasattr(dist, name)
    }
    wrappers[_MANAGER] = _watched_manager(getattr(dist, _MANAGER))
    wrappers["batch_isend_irecv"] = _watched_batch(dist.batch_isend_irecv)
    inside = {name: wrapper for name, wrapper in wrappers.items() if name not in _IN_BATCHES}
    operations = mock.patch.object(dist.P2POp, "__init__", _unwatching(dist.P2POp.__init__))
    with mock.patch.multiple(dist, **wrappers), mock.patch.multiple(distributed_c10d, **inside), operations:
        yield


_from_now_on = ExitStack()  # whatever is not kept is undone by the garbage collector


def watch_from_now_on() -> None:
    """Leave the wrappers in place between recordings, so that a function that is imported now and called later is logged, too."""
    _from_now_on.enter_context(watch_collectives())


class _WatchedFunction:
    """A collective that is logged if a recording is active when it is called.

    It equals the function that it wraps, because torch compares the functions of a batch with `isend` and `irecv`.
    """

    def __init__(self, original: Callable[..., Any], collective: _Collective) -> None:
        self.original, self._collective = original, collective
        self._names = list(inspect.signature(original).parameters)
        self._needed = {collective.whole} - {""}
        self._is_async = original.__name__ in _IN_BATCHES
        functools.update_wrapper(self, original)

    def __eq__(self, other: object) -> bool:
        return getattr(other, "original", other) is self.original

    def __hash__(self) -> int:
        return hash(self.original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        recorder = events.active()
        if recorder is None or recorder.inside_collective:  # one collective calls another
            return self.original(*args, **kwargs)
        collective, arguments = self._collective, {**dict(zip(self._names, args)), **kwargs}
        if not self._needed <= arguments.keys():
            return self.original(*args, **kwargs)  # its error names the missing argument
        if recorder.coalesced and recorder.coalesced[0] is arguments.get("group"):
            recorder.coalesced[1].append((collective, arguments))
            return self.original(*args, **kwargs)
        draft = _begin(collective, arguments, recorder, self._is_async or bool(arguments.get("async_op")))
        for name, kind in zip((collective.reads, collective.writes), collective.kinds, strict=True):
            if kind and isinstance(arguments.get(name), Tensor):
                recorder.ledger.watch(arguments[name], kind)
        recorder.sample()  # before the call, which may block until the collective ends
        recorder.inside_collective = True
        try:
            work = self.original(*args, **kwargs)
        finally:
            recorder.inside_collective = False
        _close_when_done(draft, work, recorder)
        return work


def _unwatching(original: Callable[..., None]) -> Callable[..., None]:
    """Let the operations of a batch hold the original functions, so that they may run after the recording."""

    @functools.wraps(original)
    def __init__(self: dist.P2POp, op: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        original(self, getattr(op, "original", op), *args, **kwargs)

    return __init__


def _watched_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Log the operations of a batch. A batch calls their functions itself, so the wrappers of these functions do not see it."""

    @functools.wraps(original)
    def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> Any:
        recorder = events.active()
        if recorder is None:
            return original(p2p_op_list)
        drafts = [
            _begin(_WATCHED[operation.op.__name__], {"tensor": operation.tensor}, recorder, is_async=True)
            for operation in p2p_op_list
        ]
        with events.holding(recorder, inside_collective=True):
            works = original(p2p_op_list)
        for number, draft in enumerate(drafts):  # NCCL makes one work of all
            _close_when_done(draft, works[min(number, len(works) - 1)], recorder)
        return works

    return batch_isend_irecv


def _watched_manager(original: Callable[..., Any]) -> Callable[..., Any]:
    """Log the collectives inside torch's coalescing manager when it ends, because then it runs them."""

    @functools.wraps(original)
    @contextmanager
    def manager(*args: Any, **kwargs: Any) -> Iterator[Any]:
        recorder = events.active()
        if recorder is None or recorder.inside_collective:
            with original(*args, **kwargs) as managed:
                yield managed
            return
        calls: list[tuple[_Collective, dict[str, Any]]] = []
        group = args[0] if args else kwargs.get("group")
        with original(*args, **kwargs) as managed:
            with events.holding(recorder, coalesced=(group, calls)):
                yield managed
            drafts = [_begin(*call, recorder, is_async=True) for call in calls]
        for draft in drafts:
            _close_when_done(draft, managed.works[-1] if managed.works else None, recorder)

    return manager


def _begin(collective: _Collective, arguments: dict[str, Any], recorder: Recorder, is_async: bool) -> Draft:
    draft = begin_on(collective.op, tensors_in(arguments.get(collective.reads)), recorder, is_async)
    draft.writes = recorder.identify(tensors_in(arguments.get(collective.writes)))
    describe(draft, tensors_in(arguments.get(collective.whole)))
    return draft


def begin_on(op: str, reads: list[Tensor], recorder: Recorder, is_async: bool) -> Draft:
    """Begin a collective on its stream (Note [Streams of a collective])."""
    stream = recorder.stream
    after: tuple[int, ...] = ()
    if not stream:
        stream = op if op in OWN_STREAM else "other" if is_async else "compute"
        after = recorder.over_on("compute") if stream != "compute" else ()
        # Inside a step of an optimizer, it follows the part of the step that has been issued.
        after = (*after, *(step.seq for step in recorder.stepping.values()))
    draft = recorder.begin(op, stream, follows_stream=True, reads=reads, after=after)
    if not recorder.stream:
        draft.begin = draft.clock("compute")
    return draft


def describe(draft: Draft, whole: list[Tensor]) -> None:
    draft.dtype = str(whole[0].dtype).removeprefix("torch.") if whole else ""
    draft.bytes = sum(t.numel() * t.element_size() for t in whole)


def _close_when_done(draft: Draft, work: Any, recorder: Recorder) -> None:
    """End the event when its work ends. If the call blocked the host until its end, log a wait of the host, too."""
    # a work without a future: a coalescing manager will wait
    if isinstance(work, dist.Work) and getattr(work, "get_future", None):
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
        return
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
            draft = recorder.in_flight.get(work)
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

_OPERATORS = {  # operator of torch.ops._c10d_functional → the op to log; each has some of these variants
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "broadcast": "broadcast",
    "all_to_all_single": "all_to_all",
}
_VARIANTS = ("", "_", "_out", "_coalesced", "_coalesced_")


@contextmanager
def watch_operators(recorder: Recorder) -> Iterator[None]:
    """Log functional collectives, as DTensors use them, when Python calls their operators."""
    variants = product(_OPERATORS.items(), _VARIANTS)
    logged: dict[str, Any] = {name + end: partial(_log_call, op) for (name, op), end in variants}
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
    draft = begin_on(op, given, recorder, is_async=True)
    result = original(*args, **kwargs)
    made = tensors_in(result)
    draft.writes = recorder.identify(made)
    describe(draft, made if op == "all_gather" else given)
    recorder.results |= dict.fromkeys(draft.writes, draft)
    return result


def _log_wait(original: Any, recorder: Recorder, tensor: Tensor) -> Any:
    """Call the operator that waits for the result of a functional collective."""
    (number,) = recorder.identify([tensor])
    draft = recorder.results.pop(number, None)
    if draft is None:
        return original(tensor)
    with events.span("wait", "compute", after=(draft.seq,), owner=draft.owner):
        result = original(tensor)
        draft.close()
    return result
