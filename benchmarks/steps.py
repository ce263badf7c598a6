"""Training steps of all contenders, in one process group, in turns.

They are compared on forward + backward, and on a full step with AdamW. Every contender uses `torch.optim.AdamW`; hwfsdp is measured a
second time with its own AdamW. The limits (`limit`) are measured in the same rounds.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist

from benchmarks.contenders import (
    BATCH,
    DDP,
    FORWARD_BACKWARD,
    FSDP2,
    HWFSDP,
    OWN_ADAMW,
    SIZES,
    STEP,
    UNSHARDED,
    contender,
    own_adamw,
    training,
)
from benchmarks.limit import TRANSPORTS, block_numels, limit, limit_records
from benchmarks.records import Check, Record, Spread, ratio
from benchmarks.timing import Samples, slowest, steady, take_turns
from hwfsdp import launch

ROUNDS = {"0.2 M": 30, "3 M": 16, "13 M": 9}
TO_FSDP2 = {  # (ranks, size) → the most time that forward + backward may take, relative to FSDP2
    **{(2, "0.2 M"): 0.35, (2, "3 M"): 0.45, (2, "13 M"): 0.55},
    **{(4, "0.2 M"): 0.55, (4, "3 M"): 0.60, (4, "13 M"): 0.80},
}
STEP_TO_FSDP2, OWN_STEP_TO_FSDP2 = 0.65, 0.5  # at the sizes where optimizers are a large part of a step
SMALLER = ("0.2 M", "3 M")
TO_DDP = {"13 M": 1.3}
WITHOUT_OWN = "hwfsdp.optim.AdamW is missing in this version; its rows are left out."
OVERSUBSCRIBED = (
    "More ranks than cores: ranks share cores, so compute and communication slow each other down."
)


def measure(size: str, rounds: int) -> Samples:
    """Measure on a rank."""
    steady()
    shape = SIZES[size]
    names = [HWFSDP, FSDP2, DDP, UNSHARDED, *([OWN_ADAMW] if own_adamw() else [])]
    torch.manual_seed(1 + dist.get_rank())
    x = torch.randn(BATCH, shape.width)
    steps = {name: training(contender(name, shape), x) for name in names}
    collectives = limit(block_numels(shape, dist.get_world_size()), TRANSPORTS)
    return take_turns({**steps, **collectives}, rounds)


def step_records(samples: Samples, ranks: int, size: str) -> list[Record]:
    """Return one record for each kind of step."""
    records = []
    for kind in (FORWARD_BACKWARD, STEP):
        times = dict(samples[kind])
        if kind == FORWARD_BACKWARD:  # the optimizer does not affect it
            times.pop(OWN_ADAMW, None)
        notes = [] if own_adamw() else [WITHOUT_OWN]
        if (os.cpu_count() or 1) < ranks:
            notes.append(OVERSUBSCRIBED)
        values = {name: Spread.of(ms) for name, ms in times.items()}
        case: dict[str, str | int] = {"params": size, "ranks": ranks, "kind": kind}
        records.append(Record("steps", case, "ms", values, _checks(times, ranks, size, kind), tuple(notes)))
    return records


def _checks(times: dict[str, list[float]], ranks: int, size: str, kind: str) -> dict[str, Check]:
    forward_backward = kind == FORWARD_BACKWARD
    to_fsdp2 = TO_FSDP2.get((ranks, size)) if forward_backward else STEP_TO_FSDP2 if size in SMALLER else None
    checks = {"hwfsdp / FSDP2": ratio(times[HWFSDP], times[FSDP2], to_fsdp2)}
    if OWN_ADAMW in times:
        target = OWN_STEP_TO_FSDP2 if size in SMALLER else None
        checks[f"{OWN_ADAMW} / FSDP2"] = ratio(times[OWN_ADAMW], times[FSDP2], target)
    checks["hwfsdp / DDP"] = ratio(times[HWFSDP], times[DDP], TO_DDP.get(size) if forward_backward else None)
    return checks


def run(ranks: Sequence[int], sizes: Sequence[str], rounds: int | None) -> list[Record]:
    """Measure steps and limits for every size at every world size."""
    records = []
    for world_size in ranks:
        for size in sizes:
            found = slowest(launch(measure, world_size, size, rounds or ROUNDS[size]))
            case: dict[str, str | int] = {"params": size, "ranks": world_size}
            records += [*step_records(found, world_size, size), *limit_records(found, case)]
    return sorted(records, key=lambda r: (r.part, r.case.get("kind") == STEP))
