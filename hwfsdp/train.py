"""The training loop: the same for the command, for the demo, and under torchrun."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hwfsdp.data import draw_batch, load_text, share
from hwfsdp.errors import UsageError
from hwfsdp.eventlog import EventLog
from hwfsdp.models import GPT, GPTConfig, next_byte_loss
from hwfsdp.precision import MixedPrecisionPolicy
from hwfsdp.ranks import stoppable
from hwfsdp.recording import record
from hwfsdp.snapshots import ROWS, Progress, SnapshotConfig, Snapshots, rows_of
from hwfsdp.worker import stop_requested
from hwfsdp.wrap import fully_shard

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class TrainConfig:
    """A run.

    Attributes:
        batch: rows per rank; steps: optimizer steps; lr: AdamW's learning rate; seed: of weights and batches.
        param_dtype: a key of `DTYPES`; gradients are reduced in float32.
        reshard_after_forward: as for `fully_shard`.
        text: path of the training text; None: the one that comes with Python.
        record_last: how many of the last steps to record.
        snapshots: where and when to save; None: never. Then a request to stop is not heeded either.
    """

    model: GPTConfig = field(default_factory=GPTConfig)
    batch: int = 8
    steps: int = 50
    lr: float = 1e-3
    seed: int = 0
    param_dtype: str = "float32"
    reshard_after_forward: bool | None = None
    text: str | None = None
    record_last: int = 0
    snapshots: SnapshotConfig | None = None

    def __post_init__(self) -> None:
        if (
            min(self.batch, self.steps) < 1
            or self.param_dtype not in DTYPES
            or not 0 < self.lr < float("inf")
        ):
            raise UsageError(
                "TrainConfig",
                expected=f"rows, steps and a learning rate above 0, and a dtype among {', '.join(DTYPES)}",
                got=f"{self.batch} rows, {self.steps} steps, learning rate {self.lr}, {self.param_dtype}",
                remedy="Change these settings.",
            )


@dataclass
class TrainResult:
    """What one rank has to tell: losses are means over all ranks, times are its own; the log if it recorded.

    Attributes:
        losses: of all steps, those before the run was resumed as well. resumed_at: how many those are.
        stopped: whether it was asked to stop before the last step.
    """

    losses: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    log: EventLog | None = None
    resumed_at: int = 0
    stopped: bool = False


def build_model(config: GPTConfig, seed: int) -> GPT:
    """The model with the weights that `seed` gives, the same in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT(config)


def shard_model(model: GPT, shard: Callable[..., Any], **options: Any) -> GPT:
    """Applies a `fully_shard`, ours or torch's, to each block and to the rest.

    Args:
        options: for `shard`. Of an `mp_policy`, the output dtype holds for the whole model only: between blocks,
            activations stay in the param dtype.
    """
    inner = dict(options)
    if "mp_policy" in options:
        inner["mp_policy"] = replace(options["mp_policy"], output_dtype=None)
    for block in model.blocks:
        shard(block, **inner)
    shard(model, **options)
    return model


def policy_of(config: TrainConfig) -> MixedPrecisionPolicy:
    """Parameters in the config's dtype, reductions and logits in float32."""
    if config.param_dtype == "float32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(DTYPES[config.param_dtype], torch.float32, torch.float32)


def mean_over_ranks(values: Sequence[float]) -> list[float]:
    """Element by element, the mean over all ranks; every rank gives as many values."""
    total = torch.tensor(values, dtype=torch.float64)
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    total = total.to(device)
    dist.all_reduce(total)
    means: list[float] = (total / dist.get_world_size()).tolist()
    return means


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor) -> Tensor:
    """Forward, backward and update; returns this rank's loss."""
    optimizer.zero_grad()
    loss = next_byte_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    return loss.detach()


def train(
    config: TrainConfig, device: str = "cpu", on_step: Callable[[int, float], None] | None = None
) -> TrainResult:
    """Trains a sharded GPT on this rank, one of an initialized process group.

    Args:
        on_step: called on rank 0 with the number of steps done and its loss.
    """
    with stoppable() if config.snapshots else nullcontext():
        return _Run(config, device, on_step).run()


class _Run:
    """A run on one rank."""

    def __init__(
        self, config: TrainConfig, device: str, on_step: Callable[[int, float], None] | None
    ) -> None:
        self.config, self.device, self.on_step = config, device, on_step
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.text = load_text(config.text)
        self.rows = rows_of(config.snapshots, config.batch * self.world_size, self.world_size)
        options = {"reshard_after_forward": config.reshard_after_forward, "mp_policy": policy_of(config)}
        self.model = shard_model(build_model(config.model, config.seed), fully_shard, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.lr)
        self.snapshots = self._open_snapshots()
        self.progress = self.snapshots.resume() if self.snapshots else Progress()
        self.own_losses: list[float] = []  # of this rank, since the means were last taken

    def _open_snapshots(self) -> Snapshots | None:
        config = self.config
        settings = {
            "model": str(config.model),
            "lr": config.lr,
            "seed": config.seed,
            "param_dtype": config.param_dtype,
            "text": f"{self.text.numel()} bytes, CRC-32 {zlib.crc32(self.text.numpy().data):08x}",
            ROWS: self.rows,
        }
        return Snapshots(config.snapshots, self.model, self.optimizer, settings) if config.snapshots else None

    def run(self) -> TrainResult:
        """Trains to the last step, or until it is asked to stop."""
        config, progress = self.config, self.progress
        result = TrainResult(resumed_at=progress.step)
        with ExitStack() as recording:
            while progress.step < config.steps and not result.stopped:
                if result.log is None and progress.step >= config.steps - config.record_last:
                    result.log = recording.enter_context(record(first_step=progress.step))
                result.step_ms.append(self.step())
                if self.snapshots:
                    result.stopped = self.any_asked_to_stop() and progress.step < config.steps
                    self.save_if_due(result.stopped)
        if self.snapshots:
            self.snapshots.finish()
        self.gather_losses()
        result.losses = progress.losses
        return result

    def step(self) -> float:
        """One step on the next batch; returns its milliseconds."""
        progress, config = self.progress, self.config
        batch = draw_batch(self.text, config.model.seq_len, self.rows, config.seed, progress.step)
        inputs, targets = share(batch, self.rank, self.world_size)
        start = time.perf_counter()
        inputs, targets = inputs.to(self.device), targets.to(self.device)
        self.own_losses.append(float(train_step(self.model, self.optimizer, inputs, targets)))
        elapsed = (time.perf_counter() - start) * 1e3
        progress.step += 1
        if self.on_step and self.rank == 0:
            self.on_step(progress.step, self.own_losses[-1])
        return elapsed

    def gather_losses(self) -> None:
        self.progress.losses += mean_over_ranks(self.own_losses)
        self.own_losses = []

    def any_asked_to_stop(self) -> bool:
        """Whether any rank is to stop, so that all do after the same step."""
        return any(mean_over_ranks([float(stop_requested.is_set())]))

    def save_if_due(self, stopping: bool) -> None:
        """Saves every so many steps, and at the end of the run."""
        assert self.config.snapshots is not None and self.snapshots is not None
        step, every = self.progress.step, self.config.snapshots.every
        if stopping or step == self.config.steps or (every and step % every == 0):
            self.gather_losses()
            self.snapshots.save(self.progress)
