"""Python time of the framework itself, per forward + backward.

On layers of width 8 a step computes next to nothing, and collectives of a fake process group return at once. What a
sharded step then takes beyond an unsharded one is the framework: hooks, states, bookkeeping, the issue of copies and
collectives. Every parameter is padded to as many rows as there are ranks and copied row by row, so at 512 ranks the
copies take as long as the framework, in both libraries alike.
"""

from __future__ import annotations

from collections.abc import Sequence

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
from benchmarks.fake import in_fake_world
from benchmarks.records import Record, Spread, ratio
from benchmarks.timing import Samples, steady, take_turns

ROUNDS, REPEAT = 30, 10
WORLD_SIZES = (2, 8, 64, 512)
TARGET = 0.5


def measure(rounds: int) -> Samples:
    """In a fake world."""
    steady()
    x = torch.randn(1, TINY.width)
    steps = {name: training(Contender(wrapped(name, build(TINY))), x) for name in (HWFSDP, FSDP2, UNSHARDED)}
    return take_turns(steps, rounds, repeat=REPEAT)


def overheads(samples: Samples) -> dict[str, list[float]]:
    """By library, µs per step beyond the unsharded one of the same round."""
    times = samples[FORWARD_BACKWARD]
    alone = times[UNSHARDED]
    return {
        name: [(ms - base) * 1e3 for ms, base in zip(times[name], alone, strict=True)]
        for name in (HWFSDP, FSDP2)
    }


def run(rounds: int | None, world_sizes: Sequence[int] = WORLD_SIZES) -> list[Record]:
    """One record per world size."""
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
