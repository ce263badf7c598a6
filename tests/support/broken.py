"""Trainings in which an exception interrupts one micro-batch, at every place that can raise it. `test_recovery` runs them.

All ranks have the same batches. So a mean over 2 or 4 ranks is exact, and an unsharded model in the same process computes the same
bits.
"""

from __future__ import annotations

import contextlib
import traceback
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from hwfsdp import share_comm_ctx

Fault = Callable[..., None]


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sin()


class Block(nn.Module):
    """A layer, a module that is sharded separately, and another layer. If `reentrant` is set, the backward recomputes them."""

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
    """A model whose root owns stem and head. The loss is a module, too, so that hooks reach it."""

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


# --- Places where the exception is raised ------------------------------------------------------------------


def in_gradient_of(module: nn.Module, fault: Fault) -> Any:
    """Raise the fault when the gradient of the module's output is ready."""

    def watch(module: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda grad: fault())

    return module.register_forward_hook(watch)


Place = Callable[[Net, Loss, Fault], Any]  # returns a handle to remove

FORWARD: dict[str, Place] = {
    "in a leaf": lambda m, loss, f: m.blocks[1].up.register_forward_pre_hook(f),
    "in a nested module": lambda m, loss, f: m.blocks[1].inner.linear.register_forward_hook(f),
    "at a block's output": lambda m, loss, f: m.blocks[1].register_forward_hook(f),
    "in the loss": lambda m, loss, f: loss.register_forward_hook(f),
}
BACKWARD: dict[str, Place] = {
    "at the root's gradient": lambda m, loss, f: in_gradient_of(m, f),
    "at a block's gradient": lambda m, loss, f: in_gradient_of(m.blocks[1], f),
    "in a block's backward": lambda m, loss, f: in_gradient_of(m.blocks[1].inner, f),
    "at the end of backward": lambda m, loss, f: in_gradient_of(m.stem, f),
    "in a recomputation": lambda m, loss, f: m.blocks[1].inner.linear.register_forward_pre_hook(f),
}


def part(tensor: Tensor | None, shards: int) -> Tensor | None:
    """Copy this rank's rows: the local part of a DTensor, or one of `shards` parts of a whole tensor."""
    if tensor is None:
        return None
    if isinstance(tensor, DTensor):
        return tensor.to_local().detach().clone()
    return tensor.detach().chunk(shards)[dist.get_rank() % shards].clone()


class Run:
    """A model that has taken one step, and has the gradients of one more micro-batch. `kept` collects its results."""

    def __init__(self, shard: Callable[..., Any] | None, **options: Any) -> None:
        self.shard, self.model, self.loss = shard, build(shard, **options), Loss()
        self.shards = options["mesh"].size(-1) if "mesh" in options else dist.get_world_size()
        self.params = list(self.model.parameters())
        self.optimizer = torch.optim.SGD(self.params, lr=0.1, weight_decay=0.1)
        self.kept: list[Any] = []
        self.update()
        self.forward().backward()

    def forward(self, seed: int = 1) -> Tensor:
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        return self.loss(self.model(batch))

    def sync(self, on: bool) -> None:
        if self.shard:
            self.model.set_requires_gradient_sync(on)

    def keep_grads(self) -> None:
        self.kept += [part(param.grad, self.shards) for param in self.params]

    def update(self, seed: int = 1) -> None:
        loss = self.forward(seed)
        loss.backward()
        self.kept.append(loss.detach().clone())
        self.keep_grads()
        self.step()
        self.kept += [part(param, self.shards) for param in self.params]

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    @contextmanager
    def broken(self, place: str, error: type[BaseException] = KeyError) -> Iterator[None]:
        """Raise once in the `with` block: at the first call, or, in a recomputation, at the second call, which is the recomputation."""
        calls = 0

        def fault(*_: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == (2 if place == "in a recomputation" else 1):
                raise error("broken")

        handle = {**FORWARD, **BACKWARD}[place](self.model, self.loss, fault)
        try:
            yield
            raise AssertionError(f"{place}: nothing was raised")
        except error:
            pass
        finally:
            handle.remove()


Way = Callable[[Run], None]


class Case(NamedTuple):
    """A way to go on after a broken micro-batch.

    Attributes:
        place: a key of `FORWARD` or `BACKWARD`. error: the exception to raise there.
        synced: if True, the micro-batch before was reduced.
        then: the next action. "step"; "zero": the optimizer's `zero_grad`, and a step of weight decay; "": the next micro-batch.
        mode: a context around the broken micro-batch. reentrant: how the middle block is checkpointed.
    """

    place: str
    error: type[BaseException] = KeyError
    synced: bool = True
    then: str = ""
    mode: Callable[[], AbstractContextManager[Any]] = nullcontext
    reentrant: bool | None = None

    def __call__(self, run: Run) -> None:
        run.model.blocks[1].reentrant = self.reentrant
        run.step()
        run.sync(self.synced)
        run.forward(1).backward()
        with run.broken(self.place, self.error), self.mode():
            run.forward(2).backward()
        in_forward = self.place in FORWARD and self.place != "in the loss"
        if in_forward and self.error is KeyError and run.shard:
            assert all(isinstance(param, DTensor) for param in run.model.parameters())
        self.go_on(run)
        run.sync(True)
        run.update(3)
        run.update(4)

    def go_on(self, run: Run) -> None:
        if self.then == "zero":
            run.optimizer.zero_grad()
            assert all(param.grad is None for param in run.params)
            for param in run.params:  # so that the step changes the weights
                param.grad = torch.zeros_like(param)
        if self.then:
            run.keep_grads()
            run.step()


def few_cases() -> list[Case]:
    """List one case of each kind."""
    recomputed = [
        Case("in a recomputation", synced=False, reentrant=reentrant) for reentrant in (True, False)
    ]
    return [
        Case("in a leaf", then="step"),
        Case("at a block's output", KeyboardInterrupt, then="step"),
        Case("in the loss", then="step"),
        Case("in the loss", then="step", mode=torch.no_grad),
        Case("in a block's backward", then="zero"),
        Case("in a block's backward", synced=False),
        Case("at the end of backward", then="zero"),
        *recomputed,
    ]


# --- Other ways to go on -----------------------------------------------------------------------------------


def another_loss_s_backward(run: Run) -> None:
    first, second = run.forward(), run.forward(2)
    with run.broken("at a block's gradient"):
        run.forward(3).backward()
    run.optimizer.zero_grad()
    second.backward()
    first.backward()
    run.update()


def a_reset(run: Run) -> None:
    """Drop unreduced gradients by a reset."""
    for place in ("in a leaf", "in a block's backward"):
        run.sync(False)
        run.forward().backward()
        with run.broken(place):
            run.forward(2).backward()
        if run.shard:
            run.model.reset_iter_state()
        run.model.zero_grad()
        run.sync(True)
        run.update()


def unshard_by_hand(run: Run) -> None:
    for error in (KeyError, KeyboardInterrupt):
        with run.broken("in a leaf", error):
            run.forward()
        run.step()
        for block in run.model.blocks if hasattr(run.model, "unshard") else ():
            block.unshard()
        run.update()
        run.forward().backward()


def weights_that_are_loaded(run: Run) -> None:
    for place, error in (("in a leaf", KeyError), ("in a nested module", KeyboardInterrupt)):
        with run.broken(place, error):
            run.forward()
        run.model.load_state_dict({k: v.detach() * 0.5 for k, v in run.model.state_dict().items()})
        run.update()


def a_fallback_inside_the_forward(run: Run) -> None:
    block = run.model.blocks[1]
    body = block.body

    def careful(x: Tensor) -> Tensor:
        try:
            return body(x)
        except KeyError:
            return body(x)  # the same once more

    block.body = careful
    handle = block.inner.register_forward_hook(raise_once())
    run.update()
    handle.remove()
    run.update()


def raise_once() -> Fault:
    calls = iter([True])

    def fault(*_: Any) -> None:
        if next(calls, False):
            raise KeyError("once")

    return fault


def a_hook_on_a_parameter(run: Run) -> None:
    run.optimizer.zero_grad()
    handle = run.params[5].register_post_accumulate_grad_hook(raise_once())
    with contextlib.suppress(KeyError):
        run.forward().backward()
    handle.remove()
    run.optimizer.zero_grad()
    run.update()
    run.update()


def a_model_that_calls_itself(run: Run) -> None:
    model = run.model

    def recursive(self: Net, x: Tensor, depth: int = 1) -> Tensor:
        y = Net.forward(self, x)
        return self(x * y.mean(), depth - 1) + self.head(x) if depth else y

    model.forward = types.MethodType(recursive, model)
    run.update()
    run.update()


def two_models_that_share_the_wire(run: Run) -> None:
    critic = build(run.shard)
    if run.shard:
        share_comm_ctx([run.model, critic])

    def backward() -> None:
        run.loss(critic(run.model(torch.ones(4, 8)).repeat(1, 2))).backward()

    for _ in range(2):  # in the second round, each model knows the other
        with run.broken("at the root's gradient"):
            backward()
        critic.zero_grad()
        run.optimizer.zero_grad()
        run.update()
        run.kept += [part(p.grad, run.shards) for p in critic.parameters()]
        backward()
        run.kept += [part(p.grad, run.shards) for p in critic.parameters()]
        critic.zero_grad()
        run.step()


WAYS: list[Way] = [
    another_loss_s_backward,
    a_reset,
    unshard_by_hand,
    weights_that_are_loaded,
    a_fallback_inside_the_forward,
    a_hook_on_a_parameter,
    a_model_that_calls_itself,
    two_models_that_share_the_wire,
]


# --- Comparison --------------------------------------------------------------------------------------------


def same(a: Any, b: Any) -> bool:
    """Return True if all bits are the same."""
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a is b


def complaints(ways: Iterable[Way], shard: Callable[..., Any], **options: Any) -> dict[str, str]:
    """Go each way with a sharded and an unsharded model. Return way → the difference or the traceback, if there is one."""
    found = {}
    for way in ways:
        name = getattr(way, "__name__", str(way))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # warnings about steps without gradients
                runs = Run(shard, **options), Run(None, **options)
                for run in runs:
                    way(run)
        except Exception as error:
            found[name] = "".join(traceback.format_exception(error, limit=-3))
            continue
        pairs = list(zip(runs[0].kept, runs[1].kept, strict=True))
        wrong = [number for number, pair in enumerate(pairs) if not same(*pair)]
        if wrong:
            found[name] = f"{len(wrong)} of {len(pairs)} differ, the first {wrong[0]}: {pairs[wrong[0]]}"
    return found
