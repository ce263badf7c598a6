"""The instrument that a recording puts into the core's slot (`core.observer`).

Forwards and backwards become spans. Copies into and out of flat buffers become events. Waits and the order of streams become
edges of the log. A recording sees everything else from outside (`recording`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from hwfsdp.core.private_torch import NOTHING, in_backward
from hwfsdp.core.state import Phase
from hwfsdp.core.observer import Observer
from hwfsdp.core.state import FSDPState
from hwfsdp.core.device_streams import Stream, StreamEvent, StreamSet
from hwfsdp.observe import events
from hwfsdp.observe.events import Draft, Recorder
from hwfsdp.observe.clocks import clock_of, clock_of_stream, use_newest

_COPIES = ("copy_in", "copy_out")
_OF_STATES = ("pre_forward", "post_forward", "pre_backward", "post_backward", "finish_backward", "broken_off")
_OF_GROUPS = ("all_gather", "reduce_scatter", "all_reduce", "wait_for_reduction", "part")


class Instrument:
    """Reports to the recorder of the active recording.

    Attributes:
        behind: the instrument that was in the slot before. It still gets every moment.
    """

    def __init__(self, behind: Observer | None) -> None:
        self.behind = behind
        self._newest: object = None
        self._after: WeakKeyDictionary[StreamEvent, tuple[int, ...]] = WeakKeyDictionary()
        self._forwards: dict[FSDPState, list[Draft]] = {}
        self._backwards: dict[FSDPState, Draft] = {}
        self._parents: dict[FSDPState, FSDPState | None] = {}

    def moment(
        self, name: str, of: Any, stream: str, reads: Sequence[Tensor], writes: Sequence[Tensor]
    ) -> AbstractContextManager[Any]:
        recorder = events.active()
        around = self.behind.moment(name, of, stream, reads, writes) if self.behind else NOTHING
        if recorder is None:
            return around
        if name in _COPIES:
            flat = (reads if name == "copy_out" else writes)[0]
            nbytes = flat.numel() * flat.element_size()
            # The buffer of a reduction and the whole gradients are alive together here, and nowhere else.
            if name == "copy_in" and stream == "compute":
                recorder.ledger.watch(flat, "reduce_scatter_buffer")
                recorder.sample()
            span = events.span(name, stream, owner=of.name, bytes=nbytes, reads=reads, writes=writes)
            return _both(span, around)
        if name in _OF_GROUPS:
            return _both(events.scope(owner=of.name), around)
        if name in _OF_STATES:
            return _both(getattr(self, f"_{name}")(of, recorder), around)
        return around

    def made(self, buffer: Tensor) -> None:
        if recorder := events.active():
            recorder.buffer_made(buffer)

    def recorded(self, event: StreamEvent) -> None:
        if recorder := events.active():
            self._after[event] = recorder.over_on(event.stream.name)

    @contextmanager
    def waiting(self, stream: Stream, event: StreamEvent) -> Iterator[None]:
        """Log a wait. A wait of the compute stream is an event. A wait of another stream is an edge to the next event on it."""
        after = self._after.get(event, ())
        if stream.name == "compute":
            clock = clock_of_stream(stream)
            with events.scope(clock=clock), events.span("wait", stream.name, after=after):
                yield
            return
        yield
        if recorder := events.active():
            recorder.ordered_after(stream.name, *after)

    def running(self, stream: Stream, current: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
        recorder = events.active()
        if recorder is None:
            return current
        clock = clock_of_stream(stream)
        fields = {"stream": stream.name, "host_runs_stream": stream.is_host, "clock": clock}
        return _both(events.holding(recorder, **fields), current)

    def deferred(self, stream: Stream, function: Callable[[], None]) -> Callable[[], None]:
        """Let the events of a deferred function, such as a user's hook, follow the work that is in flight now."""
        if self.behind is not None:
            function = self.behind.deferred(stream, function)
        recorder = events.active()
        if recorder is None:
            return function
        after = recorder.over_on(stream.name)

        def follow() -> None:
            with events.holding(recorder, awaited=after):
                function()

        return follow

    # --- the moments of a state ---

    @contextmanager
    def _pre_forward(self, state: FSDPState, recorder: Recorder) -> Iterator[None]:
        if StreamSet.newest is not self._newest:
            self._newest = StreamSet.newest
            use_newest()
        with _scope("backward" if in_backward() else "forward", state):
            if state.root.forward_root is None:
                for module in state.modules:  # including parameters that no group owns
                    recorder.ledger.visit_params(module.parameters())
                recorder.sample()
            yield
            recorder.sample()  # the copy-out has dropped its buffer
            self._forwards.setdefault(state, []).append(_begin_span("forward", state, recorder))

    @contextmanager
    def _post_forward(self, state: FSDPState, recorder: Recorder) -> Iterator[None]:
        if self._forwards.get(state):
            self._forwards[state].pop().close()
        with _scope("backward" if in_backward() else "forward", state):
            recorder.sample()
            yield

    @contextmanager
    def _pre_backward(self, state: FSDPState, recorder: Recorder) -> Iterator[None]:
        first = state.phase is not Phase.PRE_BACKWARD
        with _scope("backward", state):
            yield
            if first:
                recorder.sample()  # the copy-out has dropped its buffer
                self._open_backward(state, recorder)

    def _open_backward(self, state: FSDPState, recorder: Recorder) -> None:
        """Open a backward span. Spans nest as modules do, although the backward may enter a module before or after its last child."""
        if state not in self._backwards and state.phase is not Phase.POST_BACKWARD:
            if state not in self._parents:
                self._parents[state] = _parent_of(state)
            if parent := self._parents[state]:
                self._open_backward(parent, recorder)
            self._backwards[state] = _begin_span("backward", state, recorder)

    @contextmanager
    def _post_backward(self, state: FSDPState, recorder: Recorder) -> Iterator[None]:
        if state in self._backwards:
            self._backwards.pop(state).close()
        with _scope("backward", state):
            _watch_grads(state, recorder, sharded=False)
            recorder.sample()
            yield

    @contextmanager
    def _finish_backward(self, state: FSDPState, recorder: Recorder) -> Iterator[None]:
        with _scope("backward", state):
            yield
            for each in state.root.states:
                _watch_grads(each, recorder, sharded=True)
            recorder.sample()

    @contextmanager
    def _broken_off(self, state: FSDPState, recorder: Recorder) -> Iterator[None]:
        self._forwards.pop(state, None)
        self._backwards.pop(state, None)
        yield


def _both(
    inner: AbstractContextManager[Any], outer: AbstractContextManager[Any]
) -> AbstractContextManager[Any]:
    if outer is NOTHING:
        return inner
    stack = ExitStack()
    stack.enter_context(inner)
    stack.enter_context(outer)
    return stack


def _scope(phase: str, state: FSDPState) -> AbstractContextManager[Any]:
    return events.scope(phase, state.name, clock_of(state.comm_ctx.streams))


def _parent_of(state: FSDPState) -> FSDPState | None:
    """Return the state of the closest sharded module above."""
    above: FSDPState | None = None
    for other in state.root.states:  # each after the states of the modules around it
        if other is state:
            return above
        if any(state.modules[0] is module for given in other.modules for module in given.modules()):
            above = other
    return None


def _begin_span(op: str, state: FSDPState, recorder: Recorder) -> Draft:
    """Open the span of a forward or a backward. It reads the module's parameters that are whole now."""
    params = [p for g in state.groups if g.is_unsharded for p in g.params]
    whole = [p.unsharded_param for p in params if p.unsharded_param is not None]
    ids, known = list(map(id, whole)), recorder.visited.get(state.modules[0])
    if known is None or known[0] != ids:  # other tensors than the last time
        known = recorder.visited[state.modules[0]] = ids, recorder.ledger.numbers_of(whole)
        recorder.ledger.visit_params(whole)
    draft = recorder.begin(op, "compute", owner=state.name)
    draft.reads = known[1]
    return draft


def _watch_grads(state: FSDPState, recorder: Recorder, sharded: bool) -> None:
    """Count the gradients that exist now, of the whole parameters or of the shards."""
    for param in [p for group in state.groups for p in group.params]:
        of = param.sharded_param if sharded else param.unsharded_param
        if of is not None and of.grad is not None:
            recorder.ledger.watch(of.grad, "sharded_grad" if sharded else "unsharded_grad")
