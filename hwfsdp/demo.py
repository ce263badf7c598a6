"""Three times the same run: hwfsdp, torch's FSDP2, and a model that is not sharded at all.

All three start from the same weights and see the same batches, step by step in turn, so that the first two can be
compared bit for bit, and all three in the same weather. hwfsdp's last steps are recorded: what moved and what was
alive is held against the closed forms of `accounting`.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hwfsdp.accounting import GroupSizes, on_the_wire, peak_unsharded_bytes, step_traffic
from hwfsdp.compat import local_of
from hwfsdp.data import Batch, draw_batch, load_text, share
from hwfsdp.eventlog import EventLog
from hwfsdp.mesh import default_mesh
from hwfsdp.models import GPT
from hwfsdp.ranks import launch
from hwfsdp.recording import record
from hwfsdp.train import TrainConfig, build_model, mean_over_ranks, shard_model, train_step
from hwfsdp.wrap import fully_shard

RECORDED_STEPS = 2
RUNS = ("hwfsdp", "FSDP2", "unsharded")


@dataclass
class Comparison:
    """What one rank found.

    Attributes:
        losses: per run and step, mean over the whole batch; step_ms: per run and step.
        equal: every loss and every gradient of hwfsdp and FSDP2 was the same, bit for bit, on all ranks.
        largest_difference: between gradients of the two, anywhere.
        log: hwfsdp's last `RECORDED_STEPS` steps.
    """

    losses: dict[str, list[float]] = field(default_factory=lambda: {run: [] for run in RUNS})
    step_ms: dict[str, list[float]] = field(default_factory=lambda: {run: [] for run in RUNS})
    equal: bool = True
    largest_difference: float = 0.0
    log: EventLog = field(default_factory=EventLog)


class Contender:
    """One of the runs: a model, its optimizer, and what it has measured."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr)

    def step(self, batch: Batch) -> tuple[Tensor, float]:
        """One training step: this rank's loss, and milliseconds."""
        start = time.perf_counter()
        loss = train_step(self.model, self.optimizer, *batch)
        return loss, (time.perf_counter() - start) * 1e3


def compare(config: TrainConfig, on_step: Callable[[int, float], None] | None = None) -> Comparison:
    """Runs the three on this rank of an initialized process group. The unsharded one runs on rank 0 alone."""
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    rank, world_size = dist.get_rank(), dist.get_world_size()
    text = load_text(config.text)
    found = Comparison()
    mesh = default_mesh()
    ours = Contender(shard_model(build_model(config.model, config.seed), fully_shard, mesh=mesh), config.lr)
    theirs = Contender(
        shard_model(build_model(config.model, config.seed), torch_fully_shard, mesh=mesh), config.lr
    )
    whole = Contender(build_model(config.model, config.seed), config.lr)
    for step in range(config.steps):
        batch = draw_batch(text, config.model.seq_len, config.batch * world_size, config.seed, step)
        part = share(batch, rank, world_size)
        steps: dict[str, Callable[[], tuple[Tensor, float]]] = {
            "hwfsdp": lambda: ours.step(part),
            "FSDP2": lambda: theirs.step(part),
        }
        losses = {}
        for run in sorted(steps, reverse=step % 2 == 1):  # neither is always first
            dist.barrier()
            losses[run], ms = steps[run]()
            found.losses[run].append(float(losses[run]))
            found.step_ms[run].append(ms)
        _note_difference(found, ours.model, theirs.model, losses)
        _step_unsharded(found, whole, batch, rank)
        if on_step and rank == 0:
            on_step(step + 1, float(losses["hwfsdp"]))
    for run in ("hwfsdp", "FSDP2"):
        found.losses[run] = mean_over_ranks(found.losses[run])
    found.equal = min(mean_over_ranks([float(found.equal)])) == 1.0
    found.log = _record_steps(ours, config, text)
    return found


def _note_difference(
    found: Comparison, ours: nn.Module, theirs: nn.Module, losses: dict[str, Tensor]
) -> None:
    """Holds this rank's loss and gradients of the step just made against FSDP2's."""
    found.equal &= torch.equal(losses["hwfsdp"], losses["FSDP2"])
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert isinstance(p.grad, DTensor) and isinstance(q.grad, DTensor)
        a, b = local_of(p.grad), local_of(q.grad)
        if not torch.equal(a, b):
            found.equal = False
            found.largest_difference = max(found.largest_difference, float((a - b).abs().max()))


def _step_unsharded(found: Comparison, whole: Contender, batch: Batch, rank: int) -> None:
    """The whole batch in one process, with the threads of one rank; the other ranks wait."""
    dist.barrier()
    if rank == 0:
        loss, ms = whole.step(batch)
        found.losses["unsharded"].append(float(loss))
        found.step_ms["unsharded"].append(ms)
    dist.barrier()


def _record_steps(ours: Contender, config: TrainConfig, text: Tensor) -> EventLog:
    """A few steps more, recorded; apart from the others, so that recording slows none that is timed."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    seq_len, rows = config.model.seq_len, config.batch * world_size
    batches = [
        share(draw_batch(text, seq_len, rows, config.seed, config.steps + i), rank, world_size)
        for i in range(RECORDED_STEPS)
    ]
    dist.barrier()
    with record() as log:
        for batch in batches:
            ours.step(batch)
    return log


def group_sizes(model: GPT) -> tuple[GroupSizes, list[GroupSizes]]:
    """The groups that `shard_model` makes of an unsharded model: the root's, and one per block."""
    blocks = [GroupSizes([p.shape for p in block.parameters()]) for block in model.blocks]
    inside = {id(p) for block in model.blocks for p in block.parameters()}
    rest = [p.shape for p in model.parameters() if id(p) not in inside]
    return GroupSizes(rest, resharded_after_forward=False), blocks


def run_demo(
    ranks: int, config: TrainConfig, out: Path, on_step: Callable[[int, float], None] | None = None
) -> dict[str, Any]:
    """Runs the comparison, writes its files into `out`, and returns what `summary.json` holds."""
    found = launch(compare, ranks, config, on_step)
    log = EventLog.merge(comparison.log for comparison in found)
    summary = summarize(found[0], log, ranks, config)
    write_results(out, summary, log, found[0])
    return summary


def summarize(found: Comparison, log: EventLog, ranks: int, config: TrainConfig) -> dict[str, Any]:
    """The demo in numbers, measured beside expected."""
    root, blocks = group_sizes(build_model(config.model, config.seed))
    expected = {
        op: RECORDED_STEPS * nbytes for op, nbytes in step_traffic([root, *blocks], ranks).items() if nbytes
    }
    measured = log.summary()
    return {
        "ranks": ranks,
        "steps": config.steps,
        "loss_first": found.losses["hwfsdp"][0],
        "loss_last": found.losses["hwfsdp"][-1],
        "losses": found.losses,
        "equal_to_fsdp2": found.equal,
        "largest_gradient_difference_to_fsdp2": found.largest_difference,
        "largest_loss_difference_to_unsharded": max(
            abs(a - b) for a, b in zip(found.losses["hwfsdp"], found.losses["unsharded"], strict=True)
        ),
        "recorded_steps": RECORDED_STEPS,
        **{
            key: measured[key]
            for key in ("bytes_by_op", "count_by_op", "overlap_fraction", "exposed_comm_us")
        },
        "expected_bytes_by_op": expected,
        "wire_bytes_by_op": {op: on_the_wire(op, n, ranks) for op, n in measured["bytes_by_op"].items()},
        "peak_unsharded_bytes": measured["peak_unsharded_bytes"],
        "expected_peak_unsharded_bytes": peak_unsharded_bytes([root], blocks, ranks),
        "peak_bytes_by_kind": measured["peak_bytes_by_kind"],
        "step_ms": {run: statistics.median(times) for run, times in found.step_ms.items()},
    }


def write_results(out: Path, summary: dict[str, Any], log: EventLog, found: Comparison) -> None:
    """`summary.json`, `trace.json` and the figures."""
    from hwfsdp.plot.loss import plot_losses
    from hwfsdp.plot.memory import plot_memory
    from hwfsdp.plot.timeline import plot_timeline

    out.mkdir(parents=True, exist_ok=True)
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    log.save(out / "trace.json")
    expected = {"unsharded, closed form": summary["expected_peak_unsharded_bytes"]}
    figures = {
        "loss": plot_losses(found.losses),
        "timeline": plot_timeline(log, step=RECORDED_STEPS - 1),
        "memory": plot_memory(log, expected=expected),
    }
    for name, figure in figures.items():
        figure.savefig(out / f"{name}.png", dpi=150, bbox_inches="tight")
