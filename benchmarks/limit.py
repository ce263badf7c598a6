"""Limits that no schedule can beat: the compute of a step alone, and its collectives alone.

A sharded step gathers every block twice and reduces its gradients once. The same collectives, over buffers of the same sizes and
without a model, give one limit; an unsharded step gives the other. A schedule without overlap takes their sum, and a perfect
schedule takes the longer of the two. Both depend on how bytes are moved, so there is one pair of limits per transport.

A transport is an entry of `TRANSPORTS`: two functions that take the number of elements of a whole block. Each function
returns a function that runs one blocking collective over that many elements.

There is a third limit, which does not depend on a transport: the floor. It is an unsharded step and one pass over each byte that a
collective moves: a copy in place of a gather, a sum in place of a reduction, in the rank's own memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from benchmarks.contenders import DDP, FORWARD_BACKWARD, FSDP2, HWFSDP, UNSHARDED, Shape, build
from benchmarks.records import Record, Spread, ratio
from benchmarks.timing import Action, Samples, timed
from hwfsdp.comm import shared_memory
from hwfsdp.compat import all_gather_single, reduce_scatter_single
from hwfsdp.observe.accounting import GroupSizes

Collective = Callable[[], None]
COLLECTIVES = "collectives"  # the name of the lap that times them


class Transport(NamedTuple):
    """A way to move bytes. Both functions take the number of elements of the whole tensor, a multiple of the number of ranks."""

    make_gather: Callable[[int], Collective]
    make_reduce: Callable[[int], Collective]


def _gather(numel: int) -> Collective:
    whole = torch.zeros(numel)
    part = whole.view(dist.get_world_size(), -1)[dist.get_rank()]
    return lambda: _done(all_gather_single(whole, part, None, False))


def _reduce(numel: int) -> Collective:
    whole, part = torch.zeros(numel), torch.zeros(numel // dist.get_world_size())
    return lambda: _done(reduce_scatter_single(part, whole, dist.ReduceOp.AVG, None, False))


def _done(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


def _shared_gather(numel: int) -> Collective:
    whole = shared_memory.allocate((numel,), torch.float32)
    part = whole.view(dist.get_world_size(), -1)[dist.get_rank()]
    group = shared_memory.over(None, whole.device)
    return lambda: _done(all_gather_single(whole, part, group, False))


def _shared_reduce(numel: int) -> Collective:
    whole, part = shared_memory.allocate((numel,), torch.float32), torch.zeros(numel // dist.get_world_size())
    group = shared_memory.over(None, whole.device)
    return lambda: _done(reduce_scatter_single(part, whole, dist.ReduceOp.AVG, group, False))


def _copy(numel: int) -> Collective:
    whole, copied = torch.zeros(numel), torch.zeros(numel)

    def copy() -> None:
        copied.copy_(whole)

    return copy


def _sum(numel: int) -> Collective:
    parts = torch.zeros(dist.get_world_size(), numel // dist.get_world_size())
    total = torch.zeros_like(parts[0])

    def add() -> None:
        torch.sum(parts, 0, out=total)

    return add


FLOOR = "one pass"
TRANSPORTS: dict[str, Transport] = {
    "torch.distributed": Transport(_gather, _reduce),
    "shared memory": Transport(_shared_gather, _shared_reduce),
    FLOOR: Transport(_copy, _sum),
}


def block_numels(shape: Shape, world_size: int) -> list[int]:
    """Return the number of elements on the wire for every block."""
    blocks = build(shape)
    return [GroupSizes([p.shape for p in block.parameters()]).padded_numel(world_size) for block in blocks]


def limit(numels: Sequence[int], transports: Mapping[str, Transport]) -> dict[str, Action]:
    """Return, by transport, an action that runs all collectives of a step over blocks of these sizes."""
    return {name: timed(COLLECTIVES, _step(numels, transport)) for name, transport in transports.items()}


def _step(numels: Sequence[int], transport: Transport) -> Collective:
    gathers = [transport.make_gather(numel) for numel in numels]
    reductions = [transport.make_reduce(numel) for numel in numels]

    def step() -> None:
        for gather in gathers:
            gather()
        for gather, reduction in zip(reversed(gathers), reversed(reductions), strict=True):
            gather()
            reduction()

    return step


def limit_records(samples: Samples, case: dict[str, str | int]) -> list[Record]:
    """Return the floor, and by transport both limits, with each library's ratio to the lower one, from the same rounds as the steps."""
    steps = samples[FORWARD_BACKWARD]
    compute = steps[UNSHARDED]
    collected = dict(samples.get(COLLECTIVES, {}))
    passes = collected.pop(FLOOR)
    floor = [a + b for a, b in zip(compute, passes, strict=True)]
    values = {"compute": Spread.of(compute), FLOOR: Spread.of(passes), "floor": Spread.of(floor)}
    above = {f"{c} / floor": ratio(steps[c], floor) for c in (HWFSDP, FSDP2, DDP)}
    records = [Record("floor", case, "ms", values, above)]
    for name, collectives in collected.items():
        serial = [a + b for a, b in zip(compute, collectives, strict=True)]
        overlapped = [max(a, b) for a, b in zip(compute, collectives, strict=True)]
        values = {
            "compute": Spread.of(compute),
            "collectives": Spread.of(collectives),
            "one after the other": Spread.of(serial),
            "overlapped": Spread.of(overlapped),
        }
        checks = {f"{c} / overlapped": ratio(steps[c], overlapped) for c in (HWFSDP, FSDP2)}
        records.append(Record("limit", {**case, "transport": name}, "ms", values, checks))
    return records
