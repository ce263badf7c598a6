"""`record`: puts the instruments in place, takes them away again.

    with record() as log:
        train_step()
    print(log.summary())

What each instrument sees, and why none of them is inside the code it watches: see `events`.

Seen are the collectives of `torch.distributed`, called as attributes of that module or of `distributed_c10d`, object
collectives as the collectives that they are made of, batches of sends and receives as their parts; functional collectives, which DTensors use; waiting
for a work; every resizing of a storage; flat buffers as they are let go; forwards and backwards of sharded modules, those
that checkpointing repeats too; steps of optimizers.

Not seen is what does not pass through these doors. Names that hold a function since before the recording, as after
`from torch.distributed import all_reduce`; neither do these come into the `history`. Collectives that C++ calls: DDP's, backwards of functional
collectives, those inside a compiled graph. Collectives called on a process group itself, such as the messages of
checkpoints. Within torch's coalescing manager a collective is seen when it is named, not when all are run. Waiting by
other means than `Work.wait`: polling, futures, a host that waits for a device. Memory that is allocated as a new tensor,
but for flat buffers, whose making their first copy-in shows: activations, gradients, results of casts; what the ledger
watches of it is in the samples. The blocks of `shared_memory`, which have bookkeeping of their own; here every tensor in a
block counts as memory of its own. What is put off until a reduction has ended (casting, adding to a gradient that is
there, the copy of an offloaded one to the host) belongs to no event; the copy of offloaded shards to the device is part of
the copy-in.
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

from hwfsdp.comm import history
from hwfsdp.compat import is_fake_work
from hwfsdp.core import observer
from hwfsdp.errors import StateError
from hwfsdp.observe import events
from hwfsdp.observe.clocks import RankClock, answer_with_time, measure_offset, pair_of, this_machine
from hwfsdp.observe.eventlog import EventLog, clocks_about
from hwfsdp.observe.events import Draft, Recorder
from hwfsdp.observe.functional import OWN_STREAM, replaced, tensors_in, watch_operators
from hwfsdp.observe.instrument import Instrument
from hwfsdp.observe.memory import Flats, Ledger
from hwfsdp.observe.run_info import describe_run
from hwfsdp.observe.stream_clocks import use_newest


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
    "all_gather_coalesced": _Collective(
        "all_gather", "input_tensor_list", "output_tensor_lists", "output_tensor_lists"
    ),
    "all_reduce_coalesced": _Collective("all_reduce", "tensors", "tensors", "tensors"),
    "reduce": _Collective("reduce", "tensor", "tensor", "tensor"),
    "gather": _Collective("gather", "tensor", "gather_list", "tensor"),
    "scatter": _Collective("scatter", "scatter_list", "tensor", "tensor"),
    "barrier": _Collective("barrier", "", "", ""),
    "monitored_barrier": _Collective("barrier", "", "", ""),
    "send": _Collective("send", "tensor", "", "tensor"),
    "isend": _Collective("send", "tensor", "", "tensor"),
    "recv": _Collective("recv", "", "tensor", "tensor"),
    "irecv": _Collective("recv", "", "tensor", "tensor"),
}
_IN_BATCHES = ("isend", "irecv")


@contextmanager
def record(rank: int | None = None, ledger: Ledger | None = None, first_step: int = 0) -> Iterator[EventLog]:
    """Records this process until the block ends; the log it yields is filled then.

    Args:
        rank: the rank to write into the events; by default that of the process group, 0 without one.
        ledger: what watches memory; by default a new one.
        first_step: number of the first step, for the log to count as the run does.

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
    use_newest()
    ledger, log = ledger or Ledger(), EventLog()
    recorder = _recorder(rank, ledger)
    recorder.first_step = first_step
    with ExitStack() as instruments:
        instruments.enter_context(_watch_collectives())
        instruments.enter_context(watch_operators(recorder))
        instruments.enter_context(_watch_works(recorder))
        instruments.enter_context(_watch_storages(recorder))
        instruments.enter_context(_watch_optimizers(recorder, ledger))
        instrument = Instrument(observer.put(None))
        observer.put(instrument)
        instruments.callback(lambda: observer.put(instrument.behind))
        instruments.callback(lambda: events.activate(None))
        recorder.origin = recorder.mark("compute")
        events.activate(recorder)
        try:
            yield log
        finally:
            found, samples = recorder.finish()
            clock = RankClock(recorder.origin.us(), this_machine())
            log.events, log.samples = found, {rank: samples}
            log.about = {**describe_run(recorder.visited, recorder.groups), **clocks_about({rank: clock})}


def gather_log(log: EventLog, group: dist.ProcessGroup | None = None) -> EventLog | None:
    """The logs of all ranks of a group as one, on one axis of time; a collective.

    Ranks on other machines than the group's first are asked for their time (`clocks.measure_offset`).

    Args:
        log: what this rank recorded. group: None: all ranks.

    Returns:
        The merged log on the group's first rank, None on the others.
    """
    with events.paused():
        machines: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(machines, this_machine(), group=group)
        own, ahead = dist.get_rank(group), dict[str, float]()
        for peer in sorted({machines.index(machine) for machine in machines} - {0}):
            if own in (0, peer):
                with pair_of(0, peer, group) as pair:
                    if own == 0:
                        ahead[machines[peer]] = measure_offset(1, pair).us
                    else:
                        answer_with_time(0, pair)
        logs: list[Any] = [None] * len(machines)
        dist.gather_object(log, logs if own == 0 else None, group=group, group_dst=0)
    if own != 0:
        return None
    for of_rank in logs:
        clocks = {r: _as_seen_from(machines[0], ahead, clock) for r, clock in of_rank.clocks.items()}
        of_rank.about = {**of_rank.about, **clocks_about(clocks)}
    return EventLog.merge(logs)


def _as_seen_from(machine: str, ahead: dict[str, float], clock: RankClock) -> RankClock:
    """A rank's clock in the time of another machine, if that has measured how far it is ahead, in µs."""
    if clock.machine not in ahead:
        return clock
    return RankClock(clock.origin_us - ahead[clock.machine], machine)


def _recorder(rank: int, ledger: Ledger) -> Recorder:
    return Recorder(
        rank,
        identify=ledger.identities.of,
        book=ledger.resized,
        sample_memory=ledger.sums,
        visit=ledger.visit,
        visit_params=ledger.visit_params,
        watch=ledger.watch,
        buffers=Flats(ledger.identities),
    )


@contextmanager
def _watch_collectives() -> Iterator[None]:
    """One wrapper per function, at both names it goes by.

    But for those of batches: torch tells sends from receives by comparing an operation's function, which may be older
    than the recording, with the name in its own module.
    """
    if isinstance(dist.all_reduce, _WatchedFunction):  # `watch_from_now_on`
        yield
        return
    with ExitStack() as patches:
        for name, collective in _WATCHED.items():
            if hasattr(dist, name):
                wrapper = _WatchedFunction(getattr(dist, name), collective)
                patches.enter_context(replaced(dist, name, wrapper))
                if name not in _IN_BATCHES:
                    patches.enter_context(replaced(distributed_c10d, name, wrapper))
        batch = _watched_batch(distributed_c10d.batch_isend_irecv)
        patches.enter_context(replaced(dist, "batch_isend_irecv", batch))
        patches.enter_context(replaced(distributed_c10d, "batch_isend_irecv", batch))
        patches.enter_context(replaced(dist.P2POp, "__init__", _unwatching(dist.P2POp.__init__)))
        yield


def watch_from_now_on() -> None:
    """Leaves the wrappers in place between recordings, so that who takes a function now, and calls it later, is seen."""
    _watch_collectives().__enter__()


class _WatchedFunction:
    """A collective that is logged if a recording is active when it is called.

    It equals the function it wraps, because torch looks for the functions of a batch among `isend` and `irecv`.
    """

    def __init__(self, original: Callable[..., Any], collective: _Collective) -> None:
        self.original, self._collective = original, collective
        self._names = list(inspect.signature(original).parameters)
        self._needed = {collective.whole} - {""}
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
            return self.original(*args, **kwargs)  # it will say what is missing
        draft = _begin(collective, arguments, recorder)
        for name, kind in zip((collective.reads, collective.writes), collective.kinds, strict=True):
            if kind and recorder.watch and isinstance(arguments.get(name), Tensor):
                recorder.watch(arguments[name], kind)
        recorder.inside_collective = True
        try:
            call = functools.partial(self.original, *args, **kwargs)
            event = draft.event
            work = history.watch(call, event.op, arguments.get("group"), event.dtype, event.bytes)
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
    whole = tensors_in(arguments.get(collective.whole))
    stream = recorder.stream or (collective.op if collective.op in OWN_STREAM else "compute")
    return recorder.begin(
        collective.op,
        stream,
        follows_stream=True,
        dtype=str(whole[0].dtype).removeprefix("torch.") if whole else "",
        bytes=sum(t.numel() * t.element_size() for t in whole),
        reads=tensors_in(arguments.get(collective.reads)),
        writes=tensors_in(arguments.get(collective.writes)),
    )


def _close_when_done(draft: Draft, work: Any, recorder: Recorder) -> None:
    """Ends the event with its work; a call that blocked the host until then was a wait of the host, too."""
    if isinstance(work, dist.Work):
        if not recorder.stream:  # whoever called it waits by himself
            recorder.in_flight[work] = draft
        if is_fake_work(work):
            draft.close()  # its stream is as late as the work takes
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
def _watch_works(recorder: Recorder) -> Iterator[None]:
    """Sees the waiting for works that are not of a stream, which knows by itself what it waits for."""
    original = dist.Work.wait

    @functools.wraps(original)
    def wait(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
        draft = recorder.in_flight.get(work)
        if draft is None or events.active() is not recorder:
            return original(work, *args, **kwargs)
        with events.span("wait", "compute", after=(draft.seq,), owner=draft.owner):
            return original(work, *args, **kwargs)

    with replaced(dist.Work, "wait", wait):
        yield


@contextmanager
def _watch_storages(recorder: Recorder) -> Iterator[None]:
    original = torch.UntypedStorage.resize_

    @functools.wraps(original)
    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        before = storage.nbytes()
        result = original(storage, size)
        if size != before and events.active() is recorder:
            recorder.resized(storage, size - before, size)
        return result

    with replaced(torch.UntypedStorage, "resize_", resize_):
        yield


@contextmanager
def _watch_optimizers(recorder: Recorder, ledger: Ledger) -> Iterator[None]:
    running: dict[int, Draft] = {}  # by optimizer; a step that raised has left its own there
    seen: dict[int, list[int]] = {}  # by optimizer, ids of what its state held

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if id(optimizer) not in seen:
            seen[id(optimizer)] = []
            _backdate_state(optimizer, recorder, ledger)
        params = [param for group in optimizer.param_groups for param in group["params"]]
        grads = [param.grad for param in params if param.grad is not None]
        running[id(optimizer)] = recorder.begin(
            "optimizer", "compute", phase="optimizer", owner="", reads=grads, writes=params
        )

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        held = [id(value) for state in optimizer.state.values() for value in state.values()]
        if held != seen.get(id(optimizer)):
            seen[id(optimizer)] = held
            ledger.visit_state(optimizer.state.values())
        recorder.sample()
        if id(optimizer) in running:  # the recording may be younger than the step
            draft = running.pop(id(optimizer))
            draft.close()
            recorder.stepped(optimizer, draft)

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
