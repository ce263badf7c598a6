"""Python time of the framework itself, per forward + backward.

With layers of width 8, a step computes almost nothing, and both libraries get collectives that do nothing. The time of a sharded
step beyond an unsharded one is then the framework: hooks, states, bookkeeping, and copies. Every parameter is padded to as many
rows as there are ranks and copied row by row. So with 512 ranks, the copies take time too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.contenders import (
    FORWARD_BACKWARD,
    FSDP2,
    HWFSDP,
    TINY,
    UNSHARDED,
    Contender,
    build,
    training,
    wrapped,
)
from benchmarks.fake import Silence, in_fake_world
from benchmarks.records import Record, Spread, ratio
from benchmarks.timing import Samples, steady, take_turns

ROUNDS, REPEAT = 30, 10
WORLD_SIZES = (2, 8, 64, 512)
TARGET = 0.5


def measure(rounds: int) -> Samples:
    """Measure in a fake world."""
    steady()
    x = torch.randn(1, TINY.width)
    steps = {}
    for name in (HWFSDP, FSDP2, UNSHARDED):
        model: Any = wrapped(name, build(TINY))
        for block in model if name != UNSHARDED else ():
            block.set_custom_all_gather(Silence())
            block.set_custom_reduce_scatter(Silence())
        steps[name] = training(Contender(model), x)
    return take_turns(steps, rounds, repeat=REPEAT)


def overheads(samples: Samples) -> dict[str, list[float]]:
    """Return, by library, the µs per step beyond the unsharded step of the same round."""
    times = samples[FORWARD_BACKWARD]
    alone = times[UNSHARDED]
    return {
        name: [(ms - base) * 1e3 for ms, base in zip(times[name], alone, strict=True)]
        for name in (HWFSDP, FSDP2)
    }


def run(rounds: int | None, world_sizes: Sequence[int] = WORLD_SIZES) -> list[Record]:
    """Return one record per world size."""
    records = []
    for world_size in world_sizes:
        samples = in_fake_world(measure, world_size, rounds or ROUNDS)
        beyond = overheads(samples)
        values = {f"{name}, beyond unsharded": Spread.of(us) for name, us in beyond.items()}
        values[UNSHARDED] = Spread.of([ms * 1e3 for ms in samples[FORWARD_BACKWARD][UNSHARDED]])
        checks = {"hwfsdp / FSDP2": ratio(beyond[HWFSDP], beyond[FSDP2], TARGET)}
        case: dict[str, str | int] = {"pretended ranks": world_size, "groups": TINY.blocks}
        records.append(Record("overhead", case, "us", values, checks))
    return records
