"""The training loop. The command, the demo and runs under torchrun all use it."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hwfsdp.core.precision import MixedPrecisionPolicy
from hwfsdp.core.mesh import default_mesh
from hwfsdp.errors import RankError, UsageError
from hwfsdp.launcher.launch import launch, stoppable
from hwfsdp.launcher.worker import stop_requested
from hwfsdp.observe import events
from hwfsdp.observe.module_hooks import Layout, ModuleHooks, units_of
from hwfsdp.train.data import Batch, draw_batch, load_text, share
from hwfsdp.train import implementations
from hwfsdp.train.models import GPT, GPTConfig, next_byte_loss
from hwfsdp.train.snapshots import ROWS, Progress, SnapshotConfig, Snapshots, rows_of


@dataclass(frozen=True)
class TrainConfig:
    """The settings of a run.

    Attributes:
        batch: rows per rank. steps: number of optimizer steps. lr: learning rate of AdamW. seed: for weights and batches.
        param_dtype: the name of a dtype of torch. Gradients are reduced in float32.
        reshard_after_forward: as for `fully_shard`.
        text: path of the training text. None: the text that comes with Python.
        snapshots: where and when to save. None: never; then a request to stop has no effect.
        implementation: "hwfsdp", "fsdp2", "none", or a Python file (see `implementations`).
        timeout: seconds for a step; each collective in it gets 5 s more. None: with a file, 60. With the others, a step has no
            limit, and a collective has 300 s.
    """

    model: GPTConfig = field(default_factory=GPTConfig)
    batch: int = 8
    steps: int = 50
    lr: float = 1e-3
    seed: int = 0
    param_dtype: str = "float32"
    reshard_after_forward: bool | None = None
    text: str | None = None
    snapshots: SnapshotConfig | None = None
    implementation: str = implementations.OURS
    timeout: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "implementation", implementations.read_implementation(self.implementation))
        if self.implementation == implementations.NONE and self.param_dtype != "float32":
            raise UsageError(
                "implementation none",
                expected="float32, since it casts nothing",
                got=self.param_dtype,
                remedy="Leave --param-dtype out, or choose another implementation.",
            )


@dataclass
class TrainResult(Progress):
    """The result of a run on one rank.

    Attributes:
        step_ms: milliseconds of this run's steps on this rank.
        resumed_at: number of steps before a resume; `losses` and `grad_norms` include them.
        stopped: True if asked to stop before the end.
    """

    step_ms: list[float] = field(default_factory=list)
    resumed_at: int = 0
    stopped: bool = False

    def note(self, loss: float, grad_norm: float, ms: float) -> None:
        """Add one step: its loss and gradient norm over all ranks, and this rank's milliseconds."""
        self.losses.append(loss)
        self.grad_norms.append(grad_norm)
        self.step_ms.append(ms)


def build_model(config: GPTConfig, seed: int) -> GPT:
    """Build the model. The same `seed` gives the same weights in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT(config)


def shard_model(model: GPT, shard: Callable[..., Any], **options: Any) -> GPT:
    """Apply `shard`, such as our `fully_shard` or torch's, to each block and then to the whole model.

    Args:
        options: keywords for `shard`. The output dtype of an `mp_policy` applies only to the whole model: between blocks,
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
    """Return the policy: parameters in the config's dtype, reductions and logits in float32."""
    if config.param_dtype == "float32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(getattr(torch, config.param_dtype), torch.float32, torch.float32)


def sum_over_ranks(values: Sequence[float]) -> list[float]:
    """Sum each value over all ranks. Every rank must give the same number of values. Recordings do not show this collective."""
    total = torch.tensor(values, dtype=torch.float64)
    total = total.to("cuda" if dist.get_backend() == "nccl" else "cpu")
    with events.paused():
        dist.all_reduce(total)
    sums: list[float] = total.tolist()
    return sums


_CUDA_BUILD = "install a CUDA build: make setup TORCH_SPEC=torch"


def device_for(ranks: int, asked: str | None) -> str:
    """Return the device for this number of ranks on this machine: the one asked for, or else "cuda" if each rank has a GPU.

    Raises:
        UsageError: "cuda" needs more GPUs than there are.
    """
    gpus = torch.cuda.device_count()
    if asked == "cuda" and gpus < ranks:
        raise UsageError(
            "--device cuda",
            expected=f"a GPU for each of {ranks} ranks" if ranks > 1 else "a GPU",
            got=f"{gpus or 'no'} GPU{'s' * (gpus > 1)} that this build of torch can use",
            remedy=f"Use --device cpu, or {'fewer --ranks' if gpus else _CUDA_BUILD}.",
        )
    return asked or ("cuda" if gpus >= ranks else "cpu")


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: Tensor,
    targets: Tensor,
    after_backward: Callable[[], None] = lambda: None,
) -> Tensor:
    """Run forward, backward and the update. Return this rank's loss, a scalar.

    Args:
        inputs, targets: a `data.Batch`: [B, T] int64. after_backward: called between the backward and the update.
    """
    optimizer.zero_grad()
    loss = next_byte_loss(model(inputs), targets)
    loss.backward()
    after_backward()
    optimizer.step()
    return loss.detach()


def train(
    config: TrainConfig, device: str = "cpu", on_step: Callable[[int, float, float], None] | None = None
) -> TrainResult:
    """Train a GPT on this rank, one of an initialized process group.

    Args:
        on_step: called on rank 0 with the number of steps done, and the loss and the gradient norm of the last one.
    """
    with stoppable() if config.snapshots else nullcontext():
        return _Run(config, device, on_step).run()


def launch_blaming(
    config: TrainConfig, fn: Callable[..., Any], ranks: int, *args: Any, **options: Any
) -> list[Any]:
    """Call `launch`. If the config's implementation is a user's file, errors name the line in that file.

    Raises:
        RankError, UsageError: as `launch` does.
    """
    try:
        return launch(fn, ranks, *args, **options)
    except RankError as error:
        if config.implementation in implementations.NAMES:
            raise
        found = implementations.blamed(error, config.implementation)
        if uneven := implementations.uneven_rows(build_model(config.model, config.seed), ranks):
            found.remedy = f"Rows are uneven here ({uneven}): try --ranks 1 or 2. {found.remedy}"
        raise found from found.__cause__


class Trainee:
    """A GPT that one implementation has sharded, and its optimizer. It is trained step by step.

    Raises:
        UsageError: the user's file cannot be called. Errors that the file raises pass unchanged.
        TimeoutError: sharding takes too long.
    """

    def __init__(self, config: TrainConfig, implementation: str) -> None:
        self.implementation = implementation
        self.seconds = implementations.patience(implementation, config.timeout)
        model, mesh = build_model(config.model, config.seed), default_mesh()
        hooks = ModuleHooks(units_of(model, *_layout(config, implementation, model, mesh.size())))
        self.shapes = {name: param.shape for name, param in model.named_parameters()}
        options = {"reshard_after_forward": config.reshard_after_forward, "mp_policy": policy_of(config)}
        sharding = f"sharding with {implementations.label_of(implementation)}"
        with implementations.time_limit(self.seconds, sharding):
            shard = implementations.sharder(implementation, model, mesh)
            self.model = shard_model(model, shard, **options)
        hooks.attach()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.lr)

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Make one training step. Return this rank's loss."""
        with implementations.time_limit(self.seconds, "a step"):
            return train_step(self.model, self.optimizer, inputs, targets, self._after_backward)

    def _after_backward(self) -> None:
        if self.implementation == implementations.NONE:
            implementations.average_gradients(self.model)

    def measured_step(self, batch: Batch, result: TrainResult) -> Tensor:
        """Make one training step, and note it in `result`. Return this rank's loss."""
        start = time.perf_counter()
        loss = self.step(*batch)
        own_loss = float(loss)  # waits for the device
        ms = (time.perf_counter() - start) * 1e3
        own_square = implementations.own_square(self.model, self.shapes)
        total, square = sum_over_ranks([own_loss, own_square])
        result.note(total / dist.get_world_size(), math.sqrt(square), ms)
        return loss


def _layout(
    config: TrainConfig, implementation: str, model: GPT, ranks: int
) -> tuple[dict[nn.Module, bool], Layout]:
    """Return the modules that have their own group, with True if backward gathers it again; and the layout over the ranks."""
    if implementation == implementations.NONE:
        return {model: False}, Layout(1, ranks)
    policy, reshard = policy_of(config), config.reshard_after_forward
    again = {block: reshard is not False for block in model.blocks} | {model: bool(reshard)}
    return again, Layout(ranks, 1, policy.param_dtype, policy.reduce_dtype)


class _Run:
    """A run on one rank."""

    def __init__(
        self, config: TrainConfig, device: str, on_step: Callable[[int, float, float], None] | None
    ) -> None:
        self.config, self.device, self.on_step = config, device, on_step
        implementations.limit_collectives(implementations.patience(config.implementation, config.timeout))
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.text = load_text(config.text)
        self.rows = rows_of(config.snapshots, config.batch * self.world_size, self.world_size)
        self.trainee = Trainee(config, config.implementation)
        self.snapshots = self._open_snapshots()
        saved = self.snapshots.resume() if self.snapshots else Progress()
        self.result = TrainResult(saved.losses, saved.grad_norms, resumed_at=saved.step)

    def _open_snapshots(self) -> Snapshots | None:
        config, trainee = self.config, self.trainee
        if config.snapshots is None:
            return None
        if config.implementation != implementations.NONE:
            _check_savable(trainee)
        settings = {
            "model": str(config.model),
            "lr": config.lr,
            "seed": config.seed,
            "param_dtype": config.param_dtype,
            "text": f"{self.text.numel()} bytes, CRC-32 {zlib.crc32(self.text.numpy().data):08x}",
            ROWS: self.rows,
        }
        return Snapshots(config.snapshots, trainee.model, trainee.optimizer, settings)

    def run(self) -> TrainResult:
        """Train to the last step, or until a rank is asked to stop."""
        config, result = self.config, self.result
        while result.step < config.steps and not result.stopped:
            self.step()
            if self.snapshots:
                result.stopped = self.any_asked_to_stop() and result.step < config.steps
                self.save_if_due(self.snapshots)
        if self.snapshots:
            self.snapshots.finish()
        return result

    def step(self) -> None:
        """Make one step on the next batch."""
        config, result = self.config, self.result
        batch = draw_batch(self.text, config.model.seq_len, self.rows, config.seed, result.step)
        own_rows = share(batch, self.rank, self.world_size)
        self.trainee.measured_step(Batch(*(part.to(self.device) for part in own_rows)), result)
        if self.on_step and self.rank == 0:
            self.on_step(result.step, result.losses[-1], result.grad_norms[-1])

    def any_asked_to_stop(self) -> bool:
        """True if any rank was asked to stop. All ranks agree on this, so they stop after the same step."""
        return any(sum_over_ranks([float(stop_requested.is_set())]))

    def save_if_due(self, snapshots: Snapshots) -> None:
        """Save after every `snapshots.every` steps, and at the end of the run."""
        result, every = self.result, snapshots.config.every
        is_last = result.stopped or result.step == self.config.steps
        if is_last or (every and result.step % every == 0):
            snapshots.save(result)


def _check_savable(trainee: Trainee) -> None:
    """Raise UsageError if a parameter is a plain tensor. Only a DTensor says which part of it this rank has."""
    plain = [name for name, p in trainee.model.named_parameters() if not isinstance(p, DTensor)]
    if plain:
        raise UsageError(
            f"saving with {implementations.label_of(trainee.implementation)}",
            expected="parameters that are DTensors, which say what part of them a rank has",
            got=f"{plain[0]}, a plain tensor",
            remedy="Train without saving: leave --save-every, --resume, --keep and --checkpoint out.",
        )
