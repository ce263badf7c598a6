"""The simulated program: it builds a model, shards it, and trains it for a step, as on real GPUs.

Mixed precision is as usual: parameters are gathered in bfloat16, gradients are reduced in float32, and AdamW keeps float32.

Note [Selective checkpointing]
    Selective checkpointing keeps some activations and recomputes the others. It keeps the outputs of attention and of every
    second matrix product. (The runs whose published figures are compared with predictions used it. torch's tool for it is
    `create_selective_checkpoint_contexts`.)
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hwfsdp.compat import is_fake
from hwfsdp.core.precision import MixedPrecisionPolicy
from hwfsdp.errors import UsageError
from hwfsdp.features.fully_shard import fully_shard
from hwfsdp.layout.shard_on_meta import find_blocks, find_classes
from hwfsdp.train.models.zoo import Config, build, config_of

CHECKPOINTS = ("none", "selective", "full")
Step = Callable[[], Any]
Target = str | Config | nn.Module | Callable[[], Any]


@dataclass(frozen=True)
class Plan:
    """The settings of training.

    Attributes:
        batch: sequences per GPU and step. seq: tokens in each sequence.
        checkpoint: one of `CHECKPOINTS`: which activations the forward of each wrapped module drops, and recomputes later.
        reshard_after_forward: the argument of `fully_shard` for the wrapped modules. If it is None, the last module stays whole,
            because its backward comes at once.
        shards: number of GPUs to shard over; the others replicate (HSDP). None: all GPUs.
        wrap: names of the classes whose modules are sharded by themselves. Empty: the model's blocks
            (`shard_on_meta.find_blocks`).
        param_dtype: the dtype of the computation. Gradients are reduced in float32.
    """

    batch: int = 1
    seq: int = 1024
    checkpoint: str = "none"
    reshard_after_forward: bool | int | None = None
    shards: int | None = None
    wrap: tuple[str, ...] = ()
    param_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        whole = all(isinstance(n, int) and n >= 1 for n in (self.batch, self.seq))
        if not whole or self.checkpoint not in CHECKPOINTS or not self.param_dtype.is_floating_point:
            raise UsageError(
                "simulate",
                expected=f"a batch and a length of 1 or more, a checkpoint among {', '.join(CHECKPOINTS)}, a float dtype",
                got=f"batch {self.batch!r}, length {self.seq!r}, {self.checkpoint!r}, {self.param_dtype}",
                remedy="Change these settings.",
            )


def checkpointed(module: nn.Module, how: str) -> None:
    """Let the module recompute in the backward the activations that its forward does not keep. Its hooks stay outside of this."""
    if how == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if how == "selective":
        options["context_fn"] = _selective
    module.forward = partial(checkpoint, module.forward, **options)


def _selective() -> tuple[Any, Any]:
    """Make the contexts of Note [Selective checkpointing]. Forward and recomputation each count their own matrix products."""
    products = {False: 0, True: 0}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op is torch.ops.aten.mm.default:
            products[context.is_recompute] += 1
            keep = products[context.is_recompute] % 2 == 1
        else:
            keep = op.name().startswith("aten::_scaled_dot_product")
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(policy)
    return contexts


def shard(model: nn.Module, plan: Plan, gpus: int) -> nn.Module:
    """Apply checkpointing and `fully_shard` from the inside out. Under HSDP, the mesh has the shape (replicas, shards)."""
    mesh = None
    if plan.shards is not None:
        shape = gpus // plan.shards, plan.shards
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(plan.param_dtype, torch.float32)
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    wrapped = list((find_classes(model, plan.wrap) if plan.wrap else find_blocks(model)).values())
    reshard = plan.reshard_after_forward
    for module in reversed(wrapped):  # inner ones first
        checkpointed(module, plan.checkpoint)
        stays = module is wrapped[-1] and reshard is None
        fully_shard(module, reshard_after_forward=False if stays else reshard, **options)
    fully_shard(model, **options)
    return model


def training_step(model: nn.Module, plan: Plan) -> Step:
    """Return a step of language modeling on a sharded model: forward, backward, clipping, AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.zeros(plan.batch, plan.seq, dtype=torch.int64)

    def step() -> None:
        optimizer.zero_grad()
        loss = token_loss(model(tokens), tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()

    return step


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits [B, T, V] against targets [B, T], in float32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def copy_on_meta(model: nn.Module) -> nn.Module:
    """Copy the model for the virtual world. The user's model does not change. Tied parameters are tied in the copy, too."""
    known: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        copied = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        is_param = isinstance(tensor, nn.Parameter)
        known[id(tensor)] = nn.Parameter(copied, tensor.requires_grad) if is_param else copied
    return deepcopy(model, known)


class Program(NamedTuple):
    """The program of a virtual world: a step, and its number of tokens per GPU (None: unknown)."""

    step: Step
    tokens: int | None


def program(target: Target, plan: Plan, gpus: int) -> Program:
    """Build the program that runs in the entered world.

    As on real GPUs, whole parameters never exist: a model is built on the meta device, and gets memory only for its shards.

    Raises:
        UsageError: the target is a function that returns neither a model nor a step.
    """
    if isinstance(target, str | Config):
        config = config_of(target) if isinstance(target, str) else target
        with torch.device("meta"):  # the model has as many positions as a sequence has tokens
            made: Any = build(replace(config, seq_len=plan.seq))
    else:
        made = target if isinstance(target, nn.Module) else target()
    if isinstance(made, nn.Module):
        if not all(map(is_fake, made.parameters())):  # made elsewhere
            made = copy_on_meta(made)
        model = shard(made, plan, gpus)
        model.to_empty(device="cpu")
        return Program(training_step(model, plan), plan.batch * plan.seq)
    if not callable(made):
        raise UsageError(
            "simulate",
            expected="a function that returns a model, or a step to be called",
            got=f"one that returns {type(made).__name__}",
            remedy="Return the step: a function without arguments that trains for one step.",
        )
    return Program(made, None)
