"""The cost of recording: the same training steps with and without it, in turns.

The benchmark trains the model of `hwfsdp demo` on the same batches, on two ranks. A turn is a few full steps, recorded from the
first to the last. Setting up the instruments and reading the log afterwards are not part of a step, and are timed separately.
Processor time is the time of the rank's main thread; it does not depend on other work of the machine.
"""

from __future__ import annotations

import time
from contextlib import nullcontext

import torch
import torch.distributed as dist

from benchmarks.records import Record, Spread, ratio
from benchmarks.timing import Action, Laps, Samples, slowest, steady, stopwatch, take_turns
from hwfsdp import fully_shard, launch, record
from hwfsdp.core.mesh import default_mesh
from hwfsdp.train.data import Batch
from hwfsdp.train.loop import TrainConfig, build_model, shard_model, train_step

ROUNDS, STEPS = 24, 4
RECORDED, PLAIN = "recorded", "not recorded"
STEP, PROCESSOR, AROUND = "full step", "processor time of a full step", "beginning and end"
TARGET = 1.03


def turn(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, recorded: bool) -> Action:
    """Return an action of some steps. Its laps: the time and the processor time of one step, and the time around all steps."""

    def action() -> Laps:
        entered = stopwatch()
        with record() if recorded else nullcontext():
            began, worked = stopwatch(), time.thread_time()
            for _ in range(STEPS):
                train_step(model, optimizer, *batch)
            took, worked = stopwatch() - began, time.thread_time() - worked
        around = stopwatch() - entered - took
        return {STEP: took / STEPS, PROCESSOR: worked * 1e3 / STEPS, AROUND: around}

    return action


def measure(rounds: int) -> Samples:
    """Measure on a rank."""
    steady()
    config = TrainConfig()
    model = shard_model(build_model(config.model, config.seed), fully_shard, mesh=default_mesh())
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (config.batch, config.model.seq_len)
    inputs, targets = (torch.randint(0, config.model.vocab, shape, generator=generator) for _ in range(2))
    actions = {
        name: turn(model, optimizer, Batch(inputs, targets), name == RECORDED) for name in (RECORDED, PLAIN)
    }
    return take_turns(actions, rounds)


def run(rounds: int | None, ranks: int = 2) -> list[Record]:
    """Return one record for each lap."""
    samples = slowest(launch(measure, ranks, rounds or ROUNDS))
    records = []
    for kind, found in samples.items():
        values = {name: Spread.of(ms) for name, ms in found.items()}
        compared = {f"{RECORDED} / {PLAIN}": ratio(found[RECORDED], found[PLAIN], TARGET)}
        checks = {} if kind == AROUND else compared
        records.append(Record("recording", {"ranks": ranks, "kind": kind}, "ms", values, checks))
    return records
