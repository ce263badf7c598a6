"""`record`: put the instruments in place, and remove them again.

    with record() as log:
        train_step()
    print(log.summary())

The module `events` lists the instruments, and explains why most of them are outside the code that they watch.

A recording sees:

- collectives of `torch.distributed`. An object collective is logged as the collectives that it calls, a batch of sends and receives as
  its parts, and collectives in torch's coalescing manager as one if the backend gets them in one call;
- functional collectives, which DTensors use; waits for a work;
- every resize of a storage, and flat buffers that are dropped;
- forwards and backwards of modules that hwfsdp shards, also when checkpointing repeats them; steps of optimizers.

A recording does not see:

- collectives that C++ calls: by DDP, in backwards of functional collectives, in compiled graphs;
- collectives called on a process group itself, such as the messages of checkpoints;
- streams that a program takes from torch itself, and their waits: work on them counts as work of the compute stream;
- waits other than `Work.wait`: polling, futures, a host that waits for a device;
- memory that is allocated as a new tensor, such as activations, gradients and results of casts. The samples of memory contain
  the tensors that the ledger watches. Flat buffers are seen at their first copy-in;
- the reuse of blocks by `shared_memory`, which keeps its own records; each tensor in a block counts as separate memory;
- what an optimizer does before it calls its closure (`optimizer.step(closure)`);
- work that is deferred until a reduction has ended (casts, additions to a gradient, the copy of an offloaded gradient to the
  host). The copy of offloaded shards to the device is a part of the copy-in.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from hwfsdp.comm.shared_memory import this_machine
from hwfsdp.compat import gloo_beside
from hwfsdp.core import observer
from hwfsdp.errors import StateError
from hwfsdp.observe import events
from hwfsdp.observe.clocks import RankClock, answer_with_time, measure_offset, use_newest
from hwfsdp.observe.collective_calls import watch_collectives, watch_operators, watch_works
from hwfsdp.observe.eventlog import EventLog, clocks_about
from hwfsdp.observe.events import Recorder
from hwfsdp.observe.instrument import Instrument
from hwfsdp.observe.ledger import Ledger
from hwfsdp.observe.run_info import describe_run


@contextmanager
def record(
    rank: int | None = None, ledger: Ledger | None = None, first_step: int = 0, resizes: bool = True
) -> Iterator[EventLog]:
    """Record this process until the block ends, then fill the yielded log.

    Args:
        rank: the rank to write into the events; by default the rank in the process group, or 0 without a process group.
        ledger: watches memory; by default a new ledger.
        first_step: number of the first step, so that the log counts steps as the run does.
        resizes: False: do not record memory that is resized, of which most events are.

    Raises:
        StateError: a recording is active already.

    For example:

        import torch
        from torch import nn
        from hwfsdp import fully_shard, launch, record

        def step():
            model = fully_shard(nn.Linear(256, 256))
            with record() as log:
                model(torch.randn(8, 256)).sum().backward()
            return [event.op for event in log.select("all_gather", "reduce_scatter")]

        if __name__ == "__main__":
            assert launch(step, 2) == [["all_gather", "reduce_scatter"]] * 2
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
    log, recorder = EventLog(), Recorder(rank, first_step=first_step, ledger=ledger or Ledger())
    with ExitStack() as instruments:
        instruments.enter_context(watch_collectives())
        instruments.enter_context(watch_operators(recorder))
        instruments.enter_context(watch_works(recorder))
        if resizes:
            instruments.enter_context(_watch_storages(recorder))
        instruments.enter_context(_watch_optimizers(recorder))
        instrument = Instrument(observer.put(None))
        observer.put(instrument)
        instruments.callback(lambda: observer.put(instrument.behind))
        instruments.callback(lambda: events.activate(None))
        recorder.origin = recorder.mark("compute")
        events.activate(recorder)
        try:
            yield log
        finally:
            _fill(log, recorder)


def recorded_so_far() -> EventLog:
    """Return the log of the recording in progress up to now. This ends all open events, so use it only for a rank that hangs.

    Any thread may call this. Raises StateError if no recording is in progress.
    """
    recorder = events.active()
    if recorder is None:
        raise StateError(
            "recorded_so_far()",
            expected="a recording in progress",
            got="none",
            remedy="Call it inside the block of record().",
        )
    for draft in recorder.drafts:
        draft.close()
    log = EventLog()
    _fill(log, recorder)
    return log


def _fill(log: EventLog, recorder: Recorder) -> None:
    found, samples = recorder.finish()
    clock = RankClock(recorder.origin.us(), this_machine())
    log.events, log.samples = found, {recorder.rank: samples}
    log.about = {**describe_run(recorder.visited, recorder.groups), **clocks_about({recorder.rank: clock})}


def gather_log(log: EventLog, group: dist.ProcessGroup | None = None) -> EventLog | None:
    """Merge the logs of all ranks of a group on one time axis. All ranks must call this.

    For each other machine, the group's first rank asks one rank there for its time (`clocks.measure_offset`).

    Args:
        log: this rank's log. group: the ranks whose logs to merge; None: all ranks.

    Returns:
        The merged log on the group's first rank, None on all other ranks.
    """
    with events.paused():
        told: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(told, (this_machine(), secrets.token_hex(8)), group=group)
        machines, own, ahead = [machine for machine, _ in told], dist.get_rank(group), dict[str, float]()
        for peer in sorted({machines.index(machine) for machine in machines} - {0}):
            if own in (0, peer):
                around: Any = group or dist.group.WORLD
                pair = gloo_beside(around, (0, peer), told[0][1])
                if own == 0:
                    ahead[machines[peer]] = measure_offset(1, pair)
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
    """Express a rank's clock in the time of `machine`, if the offset between the two machines was measured (`ahead`, in µs)."""
    if clock.machine not in ahead:
        return clock
    return RankClock(clock.origin_us - ahead[clock.machine], machine)


# --- Hooks -------------------------------------------------------------------------------------------------


@contextmanager
def after_each_resize(seen: Callable[[torch.UntypedStorage, int], None]) -> Iterator[None]:
    """Inside the block, call `seen(storage, by)` after each resize of a storage by `by` bytes."""
    original = torch.UntypedStorage.resize_

    @functools.wraps(original)
    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        before = storage.nbytes()
        result = original(storage, size)
        seen(storage, size - before)
        return result

    with mock.patch.object(torch.UntypedStorage, "resize_", resize_):
        yield


@contextmanager
def around_optimizer_steps(
    before: Callable[[Optimizer, Any, Any], Any], after: Callable[[Optimizer, Any, Any], None]
) -> Iterator[None]:
    """Inside the block, call `before` and `after` around each step of any optimizer, with the arguments of torch's hooks.

    `before` returns None, or other arguments for the step.
    """
    handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def around_closure(args: Any, kwargs: Any, call: Callable[[Callable[[], Any]], Any]) -> Any:
    """Return the arguments of an optimizer's step with `call` around its closure; None if it has no closure."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        return None
    wrapped = functools.wraps(closure)(
        lambda *given, **named: call(functools.partial(closure, *given, **named))
    )
    if "closure" in kwargs:
        return args, {**kwargs, "closure": wrapped}
    return (args[0], wrapped, *args[2:]), kwargs


def _watch_storages(recorder: Recorder) -> AbstractContextManager[None]:
    def seen(storage: torch.UntypedStorage, by: int) -> None:
        if by and events.active() is recorder:
            recorder.resized(storage, by, storage.nbytes())

    return after_each_resize(seen)


def _watch_optimizers(recorder: Recorder) -> AbstractContextManager[None]:
    """Log the steps of optimizers. What a closure does is not part of the step: the event begins when the closure has returned."""
    seen: dict[int, list[int]] = {}  # by optimizer, ids of the values in its state

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if id(optimizer) not in seen:
            seen[id(optimizer)] = []
            _backdate_state(optimizer, recorder)

        def outside(closure: Callable[[], Any]) -> Any:
            if id(optimizer) in recorder.stepping:  # it calls its closure again
                recorder.stepping.pop(id(optimizer)).close()
            result = closure()
            begin(optimizer)
            return result

        changed = around_closure(args, kwargs, outside)
        if changed is None:
            begin(optimizer)
        return changed

    def begin(optimizer: Optimizer) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        grads = [param.grad for param in params if param.grad is not None]
        draft = recorder.begin("optimizer", recorder.stream or "compute", reads=grads, writes=params)
        draft.phase, draft.owner = "optimizer", ""
        recorder.stepping[id(optimizer)] = draft

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        held = [id(value) for state in optimizer.state.values() for value in state.values()]
        if held != seen.get(id(optimizer)):
            seen[id(optimizer)] = held
            recorder.ledger.visit_state(optimizer.state.values())
        recorder.sample()
        if id(optimizer) not in recorder.stepping:  # the recording began inside the step, in its closure
            begin(optimizer)
        recorder.stepping.pop(id(optimizer)).close()
        recorder.stepped(optimizer)

    return around_optimizer_steps(before, after)


def _backdate_state(optimizer: Optimizer, recorder: Recorder) -> None:
    """Add an optimizer's state to all earlier samples if it exists before the optimizer's first step in the recording."""
    ledger = recorder.ledger
    unseen = ledger.bytes_by_kind()["optimizer_state"]
    ledger.visit_state(optimizer.state.values())
    found = ledger.bytes_by_kind()["optimizer_state"] - unseen
    for sample in recorder.samples:
        sample.bytes_by_kind["optimizer_state"] += found
