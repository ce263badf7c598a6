"""The same run three times: with hwfsdp or your own file, with torch's FSDP2, and with an unsharded model.

All three runs start from the same weights and see the same batches. They take turns at each step, so the machine has the same
load for all three. The first two runs are compared bit for bit. The last steps of the first run are recorded: the bytes that it
moved and the bytes alive are compared with the closed forms of `accounting`.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hwfsdp.compat import local_of
from hwfsdp.errors import UsageError
from hwfsdp.observe.accounting import GroupSizes, on_the_wire, peak_unsharded_bytes, step_traffic
from hwfsdp.observe.eventlog import EventLog
from hwfsdp.observe.recording import record
from hwfsdp.train.data import Batch, draw_batch, load_text, share
from hwfsdp.train.implementations import NONE, TORCHS, label_of, limit_collectives, own_square, patience
from hwfsdp.train.loop import (
    TrainConfig,
    Trainee,
    TrainResult,
    build_model,
    launch_blaming,
    sum_over_ranks,
    train_step,
)
from hwfsdp.train.models import GPT

RECORDED_STEPS = 2
_MEASURED = ("bytes_by_op", "count_by_op", "overlap_fraction", "blocking", "exposed_comm_us")
THEIRS, WHOLE = "FSDP2", "unsharded"
# Relative tolerance for losses and norms: rounding in a demo stays below it, a mistake exceeds it.
ROUNDING = 1e-3


@dataclass
class ThreeRuns:
    """The result of the three runs on one rank. Their names are `label_of(config.implementation)`, `THEIRS` and `WHOLE`.

    Attributes:
        runs: the losses, gradient norms and times of each run.
        equal: True if every loss and every gradient of the first run equaled FSDP2's, bit for bit, on all ranks.
        largest_difference: the largest difference between a gradient of the first run and FSDP2's, on this rank.
        log: the last `RECORDED_STEPS` steps of the first run.
    """

    runs: dict[str, TrainResult]
    equal: bool = True
    largest_difference: float = 0.0
    log: EventLog = field(default_factory=EventLog)


class _Comparer:
    """The three runs on one rank. Only rank 0 has the unsharded run, which trains on the whole batch."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.text = load_text(config.text)
        self.name = label_of(config.implementation)
        self.found = ThreeRuns({run: TrainResult() for run in (self.name, THEIRS, WHOLE)})
        self.sharded = {self.name: Trainee(config, config.implementation), THEIRS: Trainee(config, TORCHS)}
        self.whole = build_model(config.model, config.seed)
        self.optimizer = torch.optim.AdamW(self.whole.parameters(), lr=config.lr)

    def batch_of(self, step: int) -> Batch:
        """Return the batch of all ranks."""
        config = self.config
        return draw_batch(self.text, config.model.seq_len, config.batch * self.world_size, config.seed, step)

    def step(self, step: int) -> None:
        """Make one step of each run. The two sharded runs alternate in going first."""
        batch = self.batch_of(step)
        own_rows = share(batch, self.rank, self.world_size)
        losses = {}
        for run in sorted(self.sharded, reverse=step % 2 == 1):
            dist.barrier()
            losses[run] = self.sharded[run].measured_step(own_rows, self.found.runs[run])
        self.compare(losses)
        dist.barrier()
        if self.rank == 0:
            start = time.perf_counter()
            whole_loss = train_step(self.whole, self.optimizer, *batch)
            ms = (time.perf_counter() - start) * 1e3
            self.found.runs[WHOLE].note(float(whole_loss), math.sqrt(own_square(self.whole, {})), ms)
        dist.barrier()

    def compare(self, losses: Mapping[str, Tensor]) -> None:
        """Compare this rank's loss and gradients of the last step with FSDP2's."""
        found = self.found
        found.equal &= torch.equal(losses[self.name], losses[THEIRS])
        ours = dict(self.sharded[self.name].model.named_parameters())
        for name, param in self.sharded[THEIRS].model.named_parameters():
            a, b = (_local_grad(p) for p in (ours.get(name), param))
            if a is None or b is None or a.shape != b.shape:
                found.equal &= a is b
            elif not torch.equal(a, b):
                found.equal = False
                found.largest_difference = max(found.largest_difference, float((a - b).abs().max()))

    def finish(self) -> ThreeRuns:
        """Record a few more steps, which are not timed, because recording slows steps down. Return the result."""
        found, first = self.found, self.config.steps
        found.equal = not any(sum_over_ranks([float(not found.equal)]))
        batches = [self.batch_of(step) for step in range(first, first + RECORDED_STEPS)]
        dist.barrier()
        with record() as found.log:
            for batch in batches:
                self.sharded[self.name].step(*share(batch, self.rank, self.world_size))
        return found


def compare(config: TrainConfig, on_step: Callable[[int, float, float], None] | None = None) -> ThreeRuns:
    """Make the three runs on this rank of an initialized process group."""
    limit_collectives(patience(config.implementation, config.timeout))
    runs = _Comparer(config)
    for step in range(config.steps):
        runs.step(step)
        if on_step and runs.rank == 0:
            run = runs.found.runs[runs.name]
            on_step(step + 1, run.losses[-1], run.grad_norms[-1])
    return runs.finish()


def _local_grad(param: nn.Parameter | None) -> Tensor | None:
    return None if param is None or param.grad is None else local_of(param.grad)


def group_sizes(model: GPT) -> tuple[GroupSizes, list[GroupSizes]]:
    """Return the sizes of the groups that `shard_model` makes of an unsharded model: the root group, and one per block."""
    blocks = [GroupSizes([p.shape for p in block.parameters()]) for block in model.blocks]
    inside = {id(p) for block in model.blocks for p in block.parameters()}
    rest = [p.shape for p in model.parameters() if id(p) not in inside]
    return GroupSizes(rest, resharded_after_forward=False), blocks


class Result(NamedTuple):
    """The demo's result: the numbers of `summary.json`, and the log of all ranks."""

    summary: dict[str, Any]
    log: EventLog


def run_demo(
    ranks: int, config: TrainConfig, on_step: Callable[[int, float, float], None] | None = None
) -> Result:
    """Run the comparison on `ranks` ranks.

    Args:
        on_step: called on rank 0 with the step's number, loss and gradient norm.

    Raises:
        UsageError: the implementation is FSDP2 or none. The demo compares other implementations with these two.
    """
    if config.implementation in (TORCHS, NONE):
        raise UsageError(
            "demo",
            expected="hwfsdp, or your own file, to compare with FSDP2 and with an unsharded model",
            got=f"--implementation {config.implementation}",
            remedy=f"Leave out --implementation, or use hwfsdp train --implementation {config.implementation}.",
        )
    found = launch_blaming(config, compare, ranks, config, on_step)
    found[0].largest_difference = max(of_rank.largest_difference for of_rank in found)
    log = EventLog.merge(comparison.log for comparison in found)
    return Result(summarize(found[0], log, ranks, config), log)


def summarize(found: ThreeRuns, log: EventLog, ranks: int, config: TrainConfig) -> dict[str, Any]:
    """Summarize the demo in numbers: measured values and expected values."""
    root, blocks = group_sizes(build_model(config.model, config.seed))
    traffic = step_traffic([root, *blocks], ranks)
    expected = {op: RECORDED_STEPS * nbytes for op, nbytes in traffic.items() if nbytes}
    measured, label = log.summary(), label_of(config.implementation)
    ours, theirs, whole = (found.runs[name] for name in (label, THEIRS, WHOLE))
    pairs = zip([*ours.losses, *ours.grad_norms], [*theirs.losses, *theirs.grad_norms], strict=True)
    differences = [abs(a - b) for a, b in zip(ours.losses, whole.losses, strict=True)]
    return {
        "implementation": label,
        "ranks": ranks,
        "steps": config.steps,
        "loss_first": ours.losses[0],
        "loss_last": ours.losses[-1],
        "losses": {name: run.losses for name, run in found.runs.items()},
        "grad_norms": {name: run.grad_norms for name, run in found.runs.items()},
        "equal_to_fsdp2": found.equal,
        "agrees_with_fsdp2": all(math.isclose(a, b, rel_tol=ROUNDING) for a, b in pairs),
        "largest_gradient_difference_to_fsdp2": found.largest_difference,
        "largest_loss_difference_to_unsharded": max(differences),
        "recorded_steps": RECORDED_STEPS,
        **{key: measured[key] for key in _MEASURED},
        "expected_bytes_by_op": expected,
        "wire_bytes_by_op": {op: on_the_wire(op, n, ranks) for op, n in measured["bytes_by_op"].items()},
        "peak_unsharded_bytes": measured["peak_unsharded_bytes"],
        "expected_peak_unsharded_bytes": peak_unsharded_bytes([root], blocks, ranks),
        "peak_bytes_by_kind": measured["peak_bytes_by_kind"],
        "step_ms": {name: statistics.median(run.step_ms) for name, run in found.runs.items()},
    }
