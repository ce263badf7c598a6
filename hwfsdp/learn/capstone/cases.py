"""What the homework is tried on: small transformers, how they are wrapped, and how they are trained.

Cases of the tasks and of the first bonuses ask for no more than the homework's skeleton: rows that ranks divide, modules sharded
side by side. Cases of our own bonuses have a sharded root, and sizes that ranks do not divide. The same cases run with the learner's `fully_shard` and, in other ranks, with torch's; sizes and values are drawn by the seed.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from hwfsdp.models.gpt import GPT, GPTConfig, next_byte_loss

BF16, FP32 = torch.bfloat16, torch.float32
EVEN = 12  # a multiple of 1, 2, 3 and 4


class Case(NamedTuple):
    """A model and how it is trained.

    Attributes:
        uneven: sizes that 2, 3 and 4 ranks do not divide, a parameter with a single row, and the whole model sharded as the root.
        tied: the output layer is the embedding, and one module has a parameter under two names.
        frozen: some parameters of a block, all of another, and the embedding.
        nested: the attention of each block is sharded by itself, inside its block; and so is the head, which has one parameter.
        peek: there is a forward without a backward before the second step.
        param, reduce, output: dtypes of the policy; output of the root only.
        reshard: reshard_after_forward. micros: micro-batches of a step. sync_all: reduce after every one of them.
        keep: parameters stay whole from one micro-batch to the next.
        recomputed: the first block and parts of the second are checkpointed: "reentrant" or "non-reentrant".
        steps: of the optimizer.
    """

    name: str
    uneven: bool = False
    tied: bool = False
    frozen: bool = False
    nested: bool = False
    peek: bool = False
    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None
    reshard: bool = True
    micros: int = 1
    sync_all: bool = True
    keep: bool = False
    recomputed: str = ""
    steps: int = 3


PLAIN = Case("an even model")
MIXED = Case("bf16, reduced in fp32", param=BF16, reduce=FP32)
RECOMPUTED = Case("checkpointing, non-reentrant", recomputed="non-reentrant", steps=2)
REENTRANT = Case("checkpointing, reentrant", recomputed="reentrant", steps=2)
WHOLE = Case("reshard_after_forward=False", reshard=False, steps=2)
KEPT = Case("set_reshard_after_backward(False)", micros=3, keep=True, steps=2)
SUMMED = Case("set_requires_gradient_sync(False)", micros=3, sync_all=False, steps=2)
SUMMED_MIXED = SUMMED._replace(
    name="set_requires_gradient_sync(False), bf16 reduced in fp32", param=BF16, reduce=FP32
)
UNEVEN = Case("an uneven model", uneven=True, peek=True)
CASTS = Case("an uneven model in bf16", uneven=True, peek=True, param=BF16, reduce=FP32, output=FP32)
FROZEN = Case("frozen parameters", uneven=True, frozen=True)
TIED = Case("tied parameters", uneven=True, tied=True)
NESTED = Case("nested modules", uneven=True, nested=True)
TASKS = (PLAIN, MIXED)
BONUSES = (RECOMPUTED, REENTRANT, WHOLE, KEPT, SUMMED, SUMMED_MIXED)
OURS = (UNEVEN, CASTS, FROZEN, TIED, NESTED)
CASES = (*TASKS, *BONUSES, *OURS)


class Model(GPT):
    """A GPT with a gain of one row, which any two ranks cannot share; a tied one registers it twice, in one module."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.gain = nn.Parameter(torch.ones(1, config.dim))
        if config.tied:
            self.scale = self.gain

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x.float())  # which a block that computes in bf16 has to cast
        x = self.norm(x) * self.gain
        if hasattr(self, "scale"):
            x = x * self.scale
        logits: Tensor = self.head(x)
        return logits


class Recomputing(GPT):
    """A GPT that keeps less for its backward: its first block is recomputed from outside, the second one's perceptron within."""

    def __init__(self, config: GPTConfig, reentrant: bool) -> None:
        super().__init__(config)
        self.reentrant = reentrant
        self.blocks[1].down = Recomputed(self.blocks[1].down, reentrant)  # type: ignore[arg-type]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        x = checkpoint(self.blocks[0], x, use_reentrant=self.reentrant)
        for block in self.blocks[1:]:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Recomputed(nn.Module):
    """What a module computes, kept nothing of."""

    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def config_of(case: Case, seed: int) -> GPTConfig:
    """Sizes; the same on every rank."""
    draw = random.Random(f"{case.name} {seed}")
    if case.uneven:
        return GPTConfig(
            draw.choice([10, 14]), 3, 2, draw.choice([5, 7, 11]), draw.choice([13, 17, 19]), case.tied
        )
    return GPTConfig(EVEN * draw.choice([1, 2]), 3, 2, EVEN, EVEN * draw.choice([1, 2]), case.tied)


def model_of(case: Case, seed: int) -> nn.Module:
    """The model before it is sharded; the same values on every rank."""
    config = config_of(case, seed)
    torch.manual_seed(seed)
    model = Model(config) if case.uneven else GPT(config)
    if case.recomputed:
        model = Recomputing(config, case.recomputed == "reentrant")
    for param in model.parameters():
        param.data.add_(0.2 * torch.randn_like(param))  # norms and gains are not all ones
    if case.frozen:
        model.blocks[0].up.weight.requires_grad_(False)  # type: ignore[union-attr]
        for frozen in (*model.blocks[1].parameters(), model.tokens.weight):
            frozen.requires_grad_(False)
    return model


def groups_of(model: nn.Module, case: Case) -> Iterator[tuple[str, nn.Module]]:
    """The modules to shard, from the inside out, with their names."""
    assert isinstance(model, GPT)
    if not case.uneven:
        yield from (("tokens", model.tokens), ("positions", model.positions))
    for index, block in enumerate(model.blocks):
        if case.nested:
            yield f"blocks.{index}.attention", block.attention  # type: ignore[misc]
        yield f"blocks.{index}", block
    if case.nested:
        yield "head", model.head
    if case.uneven:
        yield "model", model
    else:
        yield from (("norm", model.norm), ("head", model.head))


def batch_of(case: Case, seed: int, rank: int, number: int) -> Tensor:
    """Tokens [2, T] of one micro-batch of one rank."""
    config = config_of(case, seed)
    draw = torch.Generator().manual_seed(seed * 1009 + rank * 101 + number)
    return torch.randint(0, config.vocab, (2, config.seq_len), generator=draw)


def peek(model: Any, case: Case, seed: int) -> Tensor:
    """The output of a forward that no backward follows, as in a look at the loss, with gradients on."""
    output: Tensor = model(batch_of(case, seed, dist.get_rank(), 0))
    return output.detach()


def mesh_of_all() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


Shard = Callable[..., Any]  # module, name, mesh, policy, reshard


def learners() -> ModuleType:
    """The homework's file, which the rank has run."""
    return sys.modules["submitted_capstone"]


def learners_shard() -> Shard:
    """The learner's `fully_shard`."""
    return shard_with(learners())


def shard_with(homework: ModuleType) -> Shard:
    """The `fully_shard` of a homework, with one communication context for all modules it is called with."""
    context: Any = None

    def shard(module: nn.Module, name: str, mesh: DeviceMesh, policy: Any, reshard: bool) -> Any:
        nonlocal context
        context = context or homework.FSDPCommContext(mesh.device_type)
        options = {"reshard_after_forward": reshard, "mp_policy": policy}
        return homework.fully_shard(module, module_fqn=name, comm_ctx=context, mesh=mesh, **options)

    return shard


def torchs_shard() -> Shard:
    """torch's own: the oracle."""
    from torch.distributed.fsdp import fully_shard

    def shard(module: nn.Module, name: str, mesh: DeviceMesh, policy: Any, reshard: bool) -> Any:
        return fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)

    return shard


def sharded(model: nn.Module, case: Case, shard: Shard, mesh: DeviceMesh) -> Any:
    """The model, sharded as the case says."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    for name, module in list(groups_of(model, case)):
        output = case.output if module is model else None
        policy = MixedPrecisionPolicy(case.param, case.reduce, output)
        shard(module, name, mesh, policy, case.reshard)
    return model


def train_step(model: Any, case: Case, seed: int, step: int, after: Callable[[str], None]) -> list[Tensor]:
    """Forwards and backwards of one step; the loss of each micro-batch. `after` is called after each of both."""
    losses = []
    for micro in range(case.micros):
        last = micro == case.micros - 1
        if case.micros > 1:
            for _, module in groups_of(model, case):
                module.set_requires_gradient_sync(last or case.sync_all)  # type: ignore[operator]
                if case.keep:
                    module.set_reshard_after_backward(last)  # type: ignore[operator]
        tokens = batch_of(case, seed, dist.get_rank(), step * case.micros + micro)
        loss = next_byte_loss(model(tokens).float(), tokens)
        losses.append(loss.detach().clone())
        after("forward")
        loss.backward()
        after("backward")
    return losses
