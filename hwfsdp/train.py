"""The training loop: the same for the command, for the demo, and under torchrun."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
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
from hwfsdp.recording import record
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
    """What one rank has to tell: losses are means over all ranks, times are its own; the log if it recorded."""

    losses: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    log: EventLog | None = None


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
    rank, world_size = dist.get_rank(), dist.get_world_size()
    text = load_text(config.text)
    options = {"reshard_after_forward": config.reshard_after_forward, "mp_policy": policy_of(config)}
    model = shard_model(build_model(config.model, config.seed), fully_shard, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
    result = TrainResult()
    with ExitStack() as recording:
        for step in range(config.steps):
            if step == config.steps - config.record_last:
                result.log = recording.enter_context(record())
            batch = draw_batch(text, config.model.seq_len, config.batch * world_size, config.seed, step)
            inputs, targets = share(batch, rank, world_size)
            start = time.perf_counter()
            loss = float(train_step(model, optimizer, inputs.to(device), targets.to(device)))
            result.step_ms.append((time.perf_counter() - start) * 1e3)
            result.losses.append(loss)
            if on_step and rank == 0:
                on_step(step + 1, loss)
    result.losses = mean_over_ranks(result.losses)
    return result
