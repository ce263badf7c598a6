"""The programs that ranks run with the core alone and with torch's FSDP2. The library is an argument."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from hwfsdp import core
from hwfsdp.core import device_streams, observer
from hwfsdp.core.private_torch import all_gather_single
from hwfsdp.core.base_errors import UsageError
from hwfsdp.core.param import FSDPParam
from hwfsdp.core.mesh import Transport
from hwfsdp.core.state import state_of
from hwfsdp.core.device_streams import Stream, StreamEvent, StreamSet, Work


class Block(nn.Module):
    """A block with rows that no number of ranks divides, a bias, and a vector that has fewer elements than there are ranks."""

    def __init__(self, width: int, recompute: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 11), nn.Linear(11, width, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute and self.training:
            result: Tensor = checkpoint(self.compute, x, use_reentrant=False)
            return result
        return self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """An embedding, blocks, and a head that may share the embedding's weight. The input needs no gradient."""

    def __init__(self, recompute: bool = False, tied: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 7)
        self.blocks = nn.ModuleList(Block(7, recompute) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(7), nn.Linear(7, 13, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        if frozen:
            self.blocks[1].requires_grad_(False)
            self.norm.weight.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Case(NamedTuple):
    """A model and the way to train it.

    Attributes:
        micro: micro-batches per step. accumulate: if True, only the last one reduces.
        keep: if True, parameters stay unsharded between the micro-batches.
    """

    build: Callable[[], Model] = Model
    reshard: bool | None = None
    policy: dict[str, Any] = {}
    wrap_embedding: bool = False
    micro: int = 1
    accumulate: bool = False
    keep: bool = False


BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
CASES = {
    "wrapped embedding": Case(wrap_embedding=True),
    "whole between forward and backward": Case(reshard=False),
    "tied": Case(lambda: Model(tied=True)),
    "frozen": Case(lambda: Model(frozen=True)),
    "recomputed": Case(lambda: Model(recompute=True)),
    "bf16 throughout": Case(policy={"param_dtype": torch.bfloat16, "output_dtype": torch.float32}),
    "fp16 reductions": Case(policy={"reduce_dtype": torch.float16}),
    "two micro-batches": Case(micro=2),
    "accumulation, kept whole": Case(micro=3, accumulate=True, keep=True),
    "accumulation in bf16": Case(policy=BF16, micro=2, accumulate=True),
}


def trained(case: Case, library: Any) -> dict[str, Any]:
    """Train for two steps. Return the losses, and this rank's rows of gradients and parameters after each step."""
    torch.manual_seed(0)
    model = case.build()
    policy = library.MixedPrecisionPolicy(**case.policy)
    for module in [*model.blocks, *([model.embedding] if case.wrap_embedding else [])]:
        inner = library.MixedPrecisionPolicy(policy.param_dtype, policy.reduce_dtype)
        library.fully_shard(module, reshard_after_forward=case.reshard, mp_policy=inner)
    sharded: Any = library.fully_shard(model, reshard_after_forward=case.reshard, mp_policy=policy)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    found: dict[str, Any] = {}
    for step in range(2):
        for micro in range(case.micro):
            generator = torch.Generator().manual_seed(100 * step + 10 * micro + dist.get_rank())
            tokens = torch.randint(13, (4, 5), generator=generator)
            last = micro == case.micro - 1
            sharded.set_requires_gradient_sync(last or not case.accumulate)
            sharded.set_reshard_after_backward(last or not case.keep)
            logits = model(tokens)
            loss = mse_loss(logits.float(), torch.ones_like(logits, dtype=torch.float32))
            loss.backward()
            found[f"loss {step}.{micro}"] = loss.item()
        for name, param in model.named_parameters():
            found[f"grad of {name} {step}"] = None if param.grad is None else local(param.grad).clone()
        optimizer.step()
        optimizer.zero_grad()
        for name, param in model.named_parameters():
            found[f"{name} {step}"] = local(param).detach().clone()
    return found


def local(tensor: Any) -> Tensor:
    rows: Tensor = tensor.to_local()
    return rows


Both = dict[str, tuple[dict[str, Any], dict[str, Any]]]


def both() -> Both:
    """Return case → its results with the core, and with torch's FSDP2."""
    return {name: (trained(case, core), trained(case, fsdp)) for name, case in CASES.items()}


def sharded_model() -> Model:
    torch.manual_seed(0)
    model = Model()
    for block in model.blocks:
        core.fully_shard(block)
    core.fully_shard(model)
    return model


# --- What is in memory ------------------------------------------------------------------------------------------


class DeviceLikeStream(Stream):
    """A stream that the host does not run, as on a device, except that all its work is done at once."""

    def add(self, work: Work | None) -> None:
        if work is not None:
            work.wait()

    def then(self, function: Callable[[], None]) -> None:
        function()

    def _record(self) -> StreamEvent:
        return StreamEvent(self)

    def _wait(self, event: StreamEvent) -> None:
        pass


def groups_in_memory() -> dict[str, list[int]]:
    """Count whole blocks and buffers of gathers while a block computes, in its forwards and in its backwards of three steps."""
    buffers: list[StorageWeakRef] = []

    class Gathers(observer.Observer):
        """An instrument that notes the buffers of gathers."""

        def moment(self, name: str, of: Any, stream: str = "", reads: Any = (), writes: Any = ()) -> Any:
            if name == "copy_in" and stream == "copy" and "blocks" in of.name:
                buffers.append(StorageWeakRef(writes[0].untyped_storage()))
            return nullcontext()

        def waiting(self, stream: Any, event: Any) -> Any:
            return nullcontext()

        def running(self, stream: Any, current: Any) -> Any:
            return current

    with device_streams.backend("cpu", lambda: StreamSet(DeviceLikeStream)):
        model = sharded_model()
    groups = [group for block in model.blocks for group in state_of(block).groups]  # type: ignore[union-attr]
    found: dict[str, list[int]] = {"forward": [], "backward": []}

    def count(when: str) -> None:
        wholes = [group.params[0].gathered for group in groups]
        alive = sum(whole is not None and whole.untyped_storage().nbytes() > 0 for whole in wholes)
        found[when].append(alive + sum(not buffer.expired() for buffer in buffers))

    for block in model.blocks:
        block.up.register_forward_hook(lambda *_: count("forward"))
        block.up.register_full_backward_hook(lambda *_: count("backward"))
    before = observer.put(Gathers())  # type: ignore[arg-type]
    with mock.patch.object(Transport, "all_gather", gather_a_copy):
        for _ in range(3):
            model(torch.arange(5)).sum().backward()
    observer.put(before)
    return found


def frames_to_collectives() -> dict[str, list[str]]:
    """For each collective of the second step, return the longest chain of calls from torch's hook to it. The collective comes last."""
    torch.manual_seed(0)
    model = Model()
    for module in (*model.blocks, model):
        core.fully_shard(module)
    found: dict[str, list[str]] = {}

    def counted(name: str) -> Any:
        real = getattr(dist, name)

        def collective(*args: Any, **options: Any) -> Any:
            calls, frame = [name], sys._getframe(1)
            while not re.search("/torch/(nn|autograd)/", frame.f_code.co_filename):
                calls.insert(0, frame.f_code.co_qualname)
                frame = frame.f_back  # type: ignore[assignment]
            found[name] = max(found.get(name, []), calls, key=len)
            return real(*args, **options)

        return mock.patch.object(dist, name, collective)

    tokens = torch.arange(5)
    model(tokens).sum().backward()
    names = ("all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor")
    with ExitStack() as watched:
        for name in names:  # torch 2.13 renamed them
            if hasattr(dist, name):
                watched.enter_context(counted(name))
        model(tokens).sum().backward()
    return found


def gather_a_copy(transport: Transport, whole: Tensor, part: Tensor, async_op: bool) -> None:
    """Gather in other memory, because the threads of gloo keep their tensors for some moments."""
    copied = torch.empty_like(whole)
    all_gather_single(copied, part.clone(), transport.ranks.group, False)
    whole.copy_(copied)


# --- State dicts, and calls that are refused ---------------------------------------------------------------------


def adoptions() -> list[int]:
    """Count the parameters that a `load_state_dict` adopts in a group of many modules, with and without `assign`."""
    model = core.fully_shard(nn.Sequential(*(nn.Linear(3, 3) for _ in range(20))))
    model(
        torch.ones(1, 3)
    )  # leaves the root whole: the first hook of the load puts the whole group's shards back
    counts = []
    for assign in (False, True):
        adopted: list[str] = []
        with mock.patch.object(FSDPParam, "adopt_registered", lambda param: adopted.append(param.name)):
            model.load_state_dict(model.state_dict(), assign=assign)
        counts.append(len(adopted))
    return counts


def refuses() -> bool:
    """Check that a module or a parameter of a group is refused and stays as it is. It is taken if all its parameters are ignored."""
    shared = nn.Linear(4, 4)
    first, second = nn.Sequential(shared, nn.Tanh()), nn.Sequential(nn.Linear(4, 4), shared)
    parent = nn.Sequential(nn.Sequential(nn.Linear(4, 4)))
    core.fully_shard(first)
    core.fully_shard(parent)
    for module, words in {
        first: "was not sharded yet.*Sequential, which was.*children before their parents",
        second: "'1.weight'.*of one group only.*the group 'Sequential'.*share a Linear.*first",
        parent[0]: "'0.weight'.*the group 'Sequential'.*children before parents",
    }.items():
        before = as_it_is(module)
        with pytest.raises(UsageError, match=words):
            core.fully_shard(module)
        assert as_it_is(module) == before
    return state_of(core.fully_shard(second, ignored_params=set(shared.parameters()))) is not None


def as_it_is(module: nn.Module) -> list[Any]:
    hooks = [len(vars(m)[name]) for m in module.modules() for name in sorted(vars(m)) if "_hooks" in name]
    return [*map(type, module.modules()), *map(id, module.parameters()), hooks]


PROGRAMS = (groups_in_memory, frames_to_collectives, adoptions, refuses)


def everything() -> tuple[Both, dict[str, Any]]:
    """Return the results of `both`, and of each other program of this part."""
    return both(), {each.__name__: each() for each in PROGRAMS}
