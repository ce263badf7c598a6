"""Where the time of an hwfsdp step goes: one line per size, in µs, and each part as a share of the step.

The parts come from three measurements of the same model:

    compute      an unsharded forward + backward, in turns with the whole step
    framework    the time of a sharded step beyond an unsharded one, in a fake process group on tiny layers
    copy_in, copy_out, wait, optimizer    spans of `hwfsdp.record`, all on the host's clock
    rest         the remaining time: the recording itself, caches emptied by copies, other ranks on the same cores;
                 below zero where parts count the same time twice
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist

from benchmarks import overhead
from benchmarks.contenders import (
    BATCH,
    FORWARD_BACKWARD,
    HWFSDP,
    OWN_ADAMW,
    SIZES,
    STEP,
    UNSHARDED,
    contender,
    own_adamw,
    training,
)
from benchmarks.fake import in_fake_world
from benchmarks.records import Check, Record, Spread
from benchmarks.timing import Action, Samples, meet, slowest, steady, take_turns
from hwfsdp import launch, record

ROUNDS = 10
WORLD_SIZE = 2
OPS = ("copy_in", "copy_out", "wait", "optimizer")


def measure(size: str, name: str, rounds: int) -> tuple[Samples, dict[str, list[float]]]:
    """Return times of `name` and of an unsharded step, and the µs of each recorded step by op; runs on a rank."""
    steady()
    shape = SIZES[size]
    torch.manual_seed(1 + dist.get_rank())
    x = torch.randn(BATCH, shape.width)
    steps = {who: training(contender(who, shape), x) for who in (name, UNSHARDED)}
    samples = take_turns(steps, rounds)
    return samples, recorded(steps[name], rounds)


def recorded(step: Action, rounds: int) -> dict[str, list[float]]:
    """Return, by op, the sum of its spans in each step, in µs."""
    with record() as log:
        for _ in range(rounds):
            meet()
            step()
    totals: dict[str, dict[int, float]] = {op: defaultdict(float) for op in OPS}
    for event in log.events:
        if event.op in totals:
            totals[event.op][event.step] += event.dur_us
    return {op: [by_step[number] for number in range(rounds)] for op, by_step in totals.items()}


def run(sizes: Sequence[str], rounds: int | None) -> list[Record]:
    """Return one record per size. Shares of the step are checks without a target."""
    rounds = rounds or ROUNDS
    name = OWN_ADAMW if own_adamw() else HWFSDP
    tiny = in_fake_world(overhead.measure, WORLD_SIZE, rounds)
    framework = Spread.of(overhead.overheads(tiny)[HWFSDP])
    records = []
    for size in sizes:
        by_rank = launch(measure, WORLD_SIZE, size, name, rounds)
        samples = slowest([samples for samples, _ in by_rank])
        whole = Spread.of([ms * 1e3 for ms in samples[STEP][name]])
        parts = {"compute": Spread.of([ms * 1e3 for ms in samples[FORWARD_BACKWARD][UNSHARDED]])}
        parts["framework"] = framework
        parts |= {op: Spread.of([us for _, spans in by_rank for us in spans[op]]) for op in OPS}
        rest = whole.median - sum(part.median for part in parts.values())
        parts["rest"] = Spread.of([rest])
        shares = {
            f"{part} [%]": Check(Spread.of([100 * spread.median / whole.median]))
            for part, spread in parts.items()
        }
        case: dict[str, str | int] = {"params": size, "ranks": WORLD_SIZE, "contender": name}
        records.append(Record("profile", case, "us", {"step": whole, **parts}, shares))
    return records
