"""Steps on virtual GPUs, for checks of what is hidden and how much memory that takes: the same on every machine.

A probe of one rank calls `simulate_here` with the learner's functions in the package, and reports `figures_of` what it gets;
the judge compares with the same probe's run with the package as it is.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from hwfsdp.course.run import log_data
from hwfsdp.virtual.devices import Device
from hwfsdp.virtual.programs import Target
from hwfsdp.virtual.run import Simulation, simulate


def simulate_here(target: Target, gpus: int, device: Device | str, **settings: Any) -> Simulation:
    """`simulate` in the process of a rank, whose process group ends: a run of one rank, which communicates no more."""
    if dist.is_initialized():
        dist.destroy_process_group()
    return simulate(target, gpus, device, **settings)


def figures_of(simulation: Simulation, with_log: bool = True) -> dict[str, Any]:
    """What a probe reports of it: µs, bytes, and the event log if asked for (`Run.log` reads it)."""
    log = simulation.log
    figures = {
        "step_us": simulation.step_seconds * 1e6,
        "exposed_us": simulation.exposed_comm_fraction * simulation.step_seconds * 1e6,
        "peak_bytes": round(simulation.peak_allocated_gib * (1 << 30)),
        "peak_by_kind": dict(simulation.peak_by_kind),
    }
    return figures | ({"log": log_data(log)} if with_log else {})
