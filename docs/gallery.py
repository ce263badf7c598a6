"""Draw one picture of every kind for pictures.md, from runs made for it.

    python docs/gallery.py [DIR]

This trains a small GPT on 1, 2 and 4 ranks, and records the last two steps. Only
the times differ from run to run, because the ranks of one machine compete for its cores. Pictures about time use virtual GPUs,
whose times are the same on every machine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

import papers
from collective_drawing import plot_collective
from hwfsdp.compat import strided_shard
from hwfsdp.features.fully_shard import fully_shard
from hwfsdp.launcher.launch import launch
from hwfsdp.observe.analysis import expect_peak
from hwfsdp.observe.run_info import read_about
from hwfsdp.observe.eventlog import EventLog
from hwfsdp.plot import loss, memory, scaling, timeline
from hwfsdp.plot.grid import LaidOut, laid_out, plot_sharding
from hwfsdp.train.loop import TrainConfig, build_model, shard_model, train
from hwfsdp.train.models import GPT, GPTConfig
from hwfsdp.train.traced_run import Capture, Steps
from hwfsdp.virtual.run import LIMITS, Simulation, simulate

MODEL = GPTConfig(dim=128, layers=4, heads=4, seq_len=64)
BATCH, STEPS, RECORDED = 16, 12, 2  # sequences over all ranks, steps, recorded steps at the end
WORLD_SIZES = (1, 2, 4)
VIRTUAL = GPTConfig(dim=4096, layers=6, heads=32, seq_len=1024)  # the model in pictures of time
GPUS, SEQUENCES = 16, (2, 1)  # virtual GPUs on two nodes; sequences per GPU in each of two runs
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass
class Sight:
    """The observations of one rank of four.

    Attributes:
        parameters: the layout of the model, sharded over all four ranks.
        exchanged: collective → the rank's tensor before and after it.
    """

    parameters: list[LaidOut]
    exchanged: dict[str, tuple[Tensor, Tensor]]


@dataclass
class Runs:
    """The data that the pictures show.

    Attributes:
        logs: number of ranks → log. virtual: number of sequences per GPU → log of virtual GPUs.
        losses: name of the run → losses. sights: the observations of each of four ranks.
    """

    logs: dict[int, EventLog]
    virtual: dict[int, EventLog]
    losses: dict[str, list[float]]
    sights: list[Sight]


def draw_all(folder: Path) -> Iterator[Path]:
    """Make the runs, then draw every picture into `folder`. Yield the path of each picture when it is written."""
    folder.mkdir(parents=True, exist_ok=True)
    runs = make_runs()
    for name, draw in PICTURES.items():
        path = folder / f"{name}.png"
        papers.save_each(partial(draw, runs), path)
        yield path


def make_runs() -> Runs:
    """Train on ranks of this machine, and on virtual GPUs."""
    logs, losses = {}, {}
    for ranks in WORLD_SIZES:
        config = TrainConfig(MODEL, batch=BATCH // ranks, steps=STEPS)
        found = launch(_train, ranks, config, timeout=300)
        logs[ranks] = EventLog.merge(log for log, _ in found)
        losses[f"{ranks} rank{'s' * (ranks > 1)}"] = found[0][1]
    virtual = {n: _on_virtual_gpus(GPUS, n).log for n in SEQUENCES}
    return Runs(logs, virtual, losses, launch(_look, 4, timeout=300))


def _on_virtual_gpus(gpus: int, sequences: int) -> Simulation:
    return simulate(VIRTUAL, gpus, "h100", batch=sequences, seq=VIRTUAL.seq_len, reshard_after_forward=True)


# --- On the ranks ------------------------------------------------------------------------------------------


def _train(config: TrainConfig) -> tuple[EventLog, list[float]]:
    """Return the log of the last steps, and the losses of all steps."""
    with Capture(Steps(config.steps - RECORDED, None)).running() as capture:
        losses = train(config).losses
    assert capture.log is not None
    return capture.log, losses


def _model(**options: Any) -> GPT:
    return shard_model(build_model(MODEL, seed=0), fully_shard, **options)


def _look() -> Sight:
    model = _model()
    exchanged = {op: _exchange(op) for op in COLLECTIVES}
    return Sight(laid_out(model), exchanged)


def _exchange(op: str) -> tuple[Tensor, Tensor]:
    """Run a collective of torch, and return this rank's tensor before it and after it."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    before = torch.arange(2.0 if op == "all_gather" else 2.0 * ranks) + 10 * rank
    after = {"all_gather": torch.empty(2 * ranks), "reduce_scatter": torch.empty(2)}.get(op, before.clone())
    if op == "all_gather":
        dist.all_gather(list(after.chunk(ranks)), before)
    elif op == "reduce_scatter":
        dist.reduce_scatter(after, list(before.chunk(ranks)))
    else:
        dist.all_reduce(after)
    return before, after


# --- Pictures ----------------------------------------------------------------------------------------------


def _memory(runs: Runs, width: float) -> Figure:
    """Draw the memory of ranks of this machine, which compute on the CPU."""
    about = read_about(runs.logs[2].about)
    closed = (expect_peak(about.groups) if about else None) or 0
    return memory.plot_memory(runs.logs[2], expected={"closed form of unsharded_param": closed}, width=width)


def _scaling(runs: Runs, width: float) -> Figure:
    """Draw predictions for growing numbers of GPUs, with two sequences per GPU."""
    found = [_on_virtual_gpus(2**n, sequences=2) for n in range(3, 12, 2)]
    return scaling.plot_scaling(found, title="A GPT on H100s", caption=f"Predicted: {LIMITS}.", width=width)


def _strided(runs: Runs, width: float) -> Figure:
    rows, columns = (strided_shard(0, 2), Shard(0)), (Shard(0), Shard(1))
    laid = [
        LaidOut("attention.wq.weight", (14, 8), rows),
        LaidOut("attention.wo.weight", (8, 14), columns),
        LaidOut("feed_forward.w1.weight", (30, 8), rows),
        LaidOut("feed_forward.w2.weight", (8, 30), columns),
        LaidOut("norm.weight", (8,), (Shard(0), Replicate())),
    ]
    return plot_sharding(laid, {"dp": 3, "tp": 2}, width=width)


def _sharded(runs: Runs, width: float) -> Figure:
    unlike_shapes = {(p.shape, p.placements): p for p in reversed(runs.sights[0].parameters)}
    small = [LaidOut("five.rows", (5, 3), (Shard(0),)), LaidOut("two.rows", (2,), (Shard(0),))]
    return plot_sharding([*reversed(unlike_shapes.values()), *small], {"shard": 4}, width=width)


def _hybrid(runs: Runs, width: float) -> Figure:
    shapes = {p.name: p.shape for p in runs.sights[0].parameters[:4]} | {"five.rows": (5, 3)}
    laid = [LaidOut(name, shape, (Replicate(), Shard(0))) for name, shape in shapes.items()]
    return plot_sharding(laid, {"replicate": 2, "shard": 2}, width=width)


def _collective(op: str, runs: Runs, width: float) -> Figure:
    before, after = zip(*(sight.exchanged[op] for sight in runs.sights), strict=True)
    return plot_collective(op, before, after, width)


PICTURES: dict[str, Callable[[Runs, float], Figure]] = {
    "timeline": lambda runs, width: timeline.plot_timeline(
        runs.virtual[SEQUENCES[0]],
        title=f"FSDP on {GPUS} virtual GPUs: gathers run ahead, reductions behind",
        width=width,
    ),
    "memory": _memory,
    "sharding_1d": _sharded,
    "sharding_hsdp": _hybrid,
    "sharding_fsdp_tp": _strided,
    "comparison": lambda runs, width: timeline.plot_comparison(
        {f"{n} sequence{'s' * (n > 1)} per GPU": runs.virtual[n] for n in SEQUENCES}, width=width
    ),
    **{op: partial(_collective, op) for op in COLLECTIVES},
    "loss": lambda runs, width: loss.plot_losses(runs.losses, width=width),
    "scaling": _scaling,
}


if __name__ == "__main__":
    for path in draw_all(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/pictures")):
        print(path, flush=True)
