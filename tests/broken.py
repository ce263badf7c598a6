"""Trainings in which an exception breaks one micro-batch off, everywhere it can be raised; run by `test_recovery`.

Every rank has the same batches. Then a mean over 2 or 4 ranks is exact, and an unsharded model in the same process computes
the same bits.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

Fault = Callable[..., None]


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sin()


class Block(nn.Module):
    """A layer, a module that is sharded by itself, and a layer; recomputed in backward if asked for."""

    reentrant: bool | None = None

    def __init__(self) -> None:
        super().__init__()
        self.up, self.inner, self.down = nn.Linear(8, 8), Inner(), nn.Linear(8, 8)

    def body(self, x: Tensor) -> Tensor:
        return self.down(self.inner(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return x + self.body(x)
        return x + checkpoint(self.body, x, use_reentrant=self.reentrant)


class Net(nn.Module):
    """Stem and head are the root's own; the loss is a module as well, so that hooks reach it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Loss(nn.Module):
    def forward(self, output: Tensor) -> Tensor:
        return output.square().mean()


def build(shard: Callable[..., Any] | None, **options: Any) -> Net:
    torch.manual_seed(0)
    model = Net()
    if shard:
        for block in model.blocks:
            shard(block.inner, **options)
            shard(block, **options)
        shard(model, **options)
    return model


# --- Where it can be raised --------------------------------------------------------------------------------


class Raising(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fault: Fault) -> Tensor:
        ctx.fault = fault
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.fault()
        return grad, None


def in_gradient_of(module: nn.Module, fault: Fault) -> Any:
    """When the gradient of the module's output is there."""

    def watch(module: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda grad: fault())

    return module.register_forward_hook(watch)


Place = Callable[[Net, Loss, Fault], Any]  # → a handle to remove

FORWARD: dict[str, Place] = {
    "before the root's inputs": lambda m, loss, f: m.register_forward_pre_hook(f, prepend=True),
    "after the root's inputs": lambda m, loss, f: m.register_forward_pre_hook(f),
    "before a block's inputs": lambda m, loss, f: m.blocks[1].register_forward_pre_hook(f, prepend=True),
    "in a leaf": lambda m, loss, f: m.blocks[1].up.register_forward_pre_hook(f),
    "in a nested module": lambda m, loss, f: m.blocks[1].inner.linear.register_forward_hook(f),
    "in a block, after its child": lambda m, loss, f: m.blocks[1].down.register_forward_hook(f),
    "at a block's output": lambda m, loss, f: m.blocks[1].register_forward_hook(f),
    "in the root, after its children": lambda m, loss, f: m.head.register_forward_pre_hook(f),
    "at the root's output": lambda m, loss, f: m.register_forward_hook(f),
    "in the loss": lambda m, loss, f: loss.register_forward_hook(f),
}
BACKWARD: dict[str, Place] = {
    "at the loss's gradient": lambda m, loss, f: in_gradient_of(loss, f),
    "at the root's gradient": lambda m, loss, f: in_gradient_of(m, f),
    "at a block's gradient": lambda m, loss, f: in_gradient_of(m.blocks[1], f),
    "in a block's backward": lambda m, loss, f: in_gradient_of(m.blocks[1].inner, f),
    "in an autograd function": lambda m, loss, f: m.blocks[1].up.register_forward_hook(
        lambda module, args, output: Raising.apply(output, f)
    ),
    "at the end of backward": lambda m, loss, f: in_gradient_of(m.stem, f),
    "in a recomputation": lambda m, loss, f: m.blocks[1].inner.linear.register_forward_pre_hook(f),
}


class Case(NamedTuple):
    """One broken training.

    Attributes:
        place: of `FORWARD` or `BACKWARD`. error: what is raised there.
        synced: whether the micro-batch before was reduced.
        then: what follows at once: "step", "zero" (and a step of weight decay), "" (the next micro-batch).
        mode: around the broken forward. reentrant: how the middle block is checkpointed.
    """

    place: str
    error: type[BaseException] = KeyError
    synced: bool = True
    then: str = ""
    mode: Callable[[], AbstractContextManager[Any]] = nullcontext
    reentrant: bool | None = None


@contextmanager
def armed(model: Net, loss: Loss, case: Case) -> Iterator[None]:
    """Raises once in the block: at the first call, or in the recomputation, which is the last one."""
    calls = 0

    def fault(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == (2 if case.place == "in a recomputation" else 1):
            raise case.error("broken")

    handle = {**FORWARD, **BACKWARD}[case.place](model, loss, fault)
    try:
        with case.mode():
            yield
        raise AssertionError(f"{case}: nothing was raised")
    except case.error:
        pass
    finally:
        handle.remove()


# --- What is compared --------------------------------------------------------------------------------------


def part(tensor: Tensor | None, shards: int) -> Tensor | None:
    """A copy of this rank's rows, which a DTensor has, and of which a whole tensor has `shards` times as many."""
    if tensor is None:
        return None
    if isinstance(tensor, DTensor):
        return tensor.to_local().detach().clone()
    return tensor.detach().chunk(shards)[dist.get_rank() % shards].clone()


def train(model: Net, case: Case, shards: int) -> dict[str, Any]:
    """Two micro-batches, of which the second breaks, and two steps; what they computed, by name."""
    kept: dict[str, Any] = {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    params = dict(zip([name for name, _ in model.named_parameters()], optimizer.param_groups[0]["params"]))
    loss = Loss()
    model.blocks[1].reentrant = case.reentrant

    def batch(seed: int) -> Tensor:
        return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))

    def keep(when: str) -> None:
        for name, param in params.items():
            kept[f"{when}: gradient of {name}"] = part(param.grad, shards)
            kept[f"{when}: {name}"] = part(param, shards)

    def update(seed: int) -> None:
        value = loss(model(batch(seed)))
        value.backward()
        kept[f"loss {seed}"] = value.detach().clone()
        if seed == 3:
            keep(f"update {seed}")
        optimizer.step()
        optimizer.zero_grad()

    def sync(on: bool) -> None:
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(on)

    update(0)
    sync(case.synced)
    loss(model(batch(1))).backward()
    with armed(model, loss, case):
        loss(model(batch(2))).backward()
    in_forward = case.place in FORWARD and case.place not in ("at the root's output", "in the loss")
    if in_forward and case.error is KeyError:
        kept["parameters that are shards"] = all(
            isinstance(p, DTensor) for p in model.parameters()
        ) or not hasattr(model, "unshard")
    if case.then == "zero":
        model.zero_grad()
        assert all(p.grad is None for p in params.values())
        for param in params.values():  # so that the step changes the weights
            param.grad = torch.zeros_like(param)
    if case.then:
        keep("broken")
        kept["state dict"] = {name: part(value, shards) for name, value in model.state_dict().items()}
        optimizer.step()
        optimizer.zero_grad()
    sync(True)
    update(3)
    update(4)
    return kept


def same(a: Any, b: Any) -> bool:
    """Bit for bit."""
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a is b or a == b


def differences(case: Case, shard: Callable[..., Any], **options: Any) -> list[str]:
    """What the sharded training computed otherwise than the unsharded one."""
    mesh = options.get("mesh")
    shards = mesh.size(-1) if mesh else dist.get_world_size()
    try:
        got = train(build(shard, **options), case, shards)
    except Exception as error:
        return ["".join(traceback.format_exception(error, limit=-2))]
    expected = train(build(None), case, shards)
    return [name for name in expected if not same(got.get(name), expected[name])]


def cases() -> list[Case]:
    """All that one world is asked; for a gradient that was not reduced, a step is another thing than without sharding."""
    found = []
    for place in FORWARD:
        found += [Case(place, synced=synced) for synced in (True, False)]
        found += [Case(place, then="step"), Case(place, KeyboardInterrupt, then="step")]
    for mode in (torch.no_grad, torch.inference_mode):
        found += [Case(place, then="step", mode=mode) for place in ("in a leaf", "in the loss")]
    for place in BACKWARD:
        for reentrant in (True, False) if place == "in a recomputation" else (None,):
            found += [Case(place, synced=False, reentrant=reentrant)]
            found += [Case(place, then="zero", reentrant=reentrant)]
            found += [Case(place, KeyboardInterrupt, then="zero", reentrant=reentrant)]
    found += [Case("at the loss's gradient", then="step"), Case("at the loss's gradient")]
    found += [Case("in a leaf", then="step", reentrant=r) for r in (True, False)]
    return found
