"""Trainings in which an exception breaks one micro-batch off, everywhere it can be raised; run by `test_recovery`.

Every rank has the same batches. Then a mean over 2 or 4 ranks is exact, and an unsharded model in the same process computes
the same bits.
"""

from __future__ import annotations

import contextlib
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from hwfsdp import fully_shard, register_fsdp_forward_method, share_comm_ctx

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
        then: what follows at once: "step"; "zero" or "zero all", the optimizer's or the model's `zero_grad`, and a step of
            weight decay; "save", a state dict; "", the next micro-batch.
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
    kept, params = dict[str, Any](), dict(model.named_parameters())
    optimizer = torch.optim.SGD(params.values(), lr=0.1, weight_decay=0.1)
    loss = Loss()
    model.blocks[1].reentrant = case.reentrant

    def batch(seed: int) -> Tensor:
        return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))

    def update(seed: int) -> None:
        value = loss(model(batch(seed)))
        value.backward()
        kept[f"loss {seed}"] = value.detach().clone()
        for name, param in params.items() if seed == 3 else ():
            kept[f"gradient of {name}"], kept[name] = part(param.grad, shards), part(param, shards)
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
    kept["went on"] = go_on(case, model, optimizer, shards)
    sync(True)
    update(3)
    update(4)
    return kept


def go_on(case: Case, model: Net, optimizer: torch.optim.Optimizer, shards: int) -> dict[str, Any]:
    """What the case says that follows; what was seen meanwhile."""
    params, kept = optimizer.param_groups[0]["params"], dict[str, Any]()
    if case.then.startswith("zero"):
        (optimizer if case.then == "zero" else model).zero_grad()
        kept["cleared"] = all(p.grad is None for p in params)
        for param in params:  # so that the step changes the weights
            param.grad = torch.zeros_like(param)
    if case.then == "save":
        return {name: part(value, shards) for name, value in model.state_dict().items()}
    if case.then:
        kept |= {f"gradient {number}": part(p.grad, shards) for number, p in enumerate(params)}
        optimizer.step()
        optimizer.zero_grad()
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


def few_cases() -> list[Case]:
    """One of each kind."""
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


def all_cases() -> list[Case]:
    """No step while a gradient is not reduced: sharded, that is a step without it."""
    found = few_cases()
    for place in FORWARD:
        found += [Case(place, then="step"), Case(place, KeyboardInterrupt, then="step")]
        found += [Case(place, synced=False)]
    for mode in (torch.no_grad, torch.inference_mode):
        found += [Case(place, then="step", mode=mode) for place in ("in a leaf", "in the loss")]
    for place in BACKWARD:
        for reentrant in (True, False) if place == "in a recomputation" else (None,):
            found += [Case(place, synced=False, reentrant=reentrant)]
            found += [Case(place, then="zero", reentrant=reentrant)]
    found += [Case("at the loss's gradient", then=then) for then in ("", "step", "zero all")]
    found += [Case("in a leaf", then="step", reentrant=r) for r in (True, False)]
    found += [Case(place, then="save") for place in ("in a leaf", "at a block's output", "in the loss")]
    found += [Case(place, then="zero all") for place in ("in a leaf", "in a block's backward")]
    found += [Case("in a block's backward", KeyboardInterrupt, then="zero")]
    return list(dict.fromkeys(found))


def complaints(cases: list[Case], shard: Callable[..., Any], **options: Any) -> dict[str, list[str]]:
    """What differs, of the cases in which something does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of steps without gradients
        found = {str(case): differences(case, shard, **options) for case in cases}
    return {case: names for case, names in found.items() if names}


# --- Other ways to go on -----------------------------------------------------------------------------------


class Run:
    """A model that has had a step and the gradients of a micro-batch, and what it computed."""

    def __init__(self, shard: Callable[..., Any] | None) -> None:
        self.shard, self.model, self.loss = shard, build(shard), Loss()
        self.shards = dist.get_world_size()
        self.params = list(self.model.parameters())
        self.optimizer = torch.optim.SGD(self.params, lr=0.1)
        self.kept: list[Tensor | None] = []
        self.update()
        self.forward().backward()

    def forward(self, seed: int = 1) -> Tensor:
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        return self.loss(self.model(batch))

    def update(self) -> None:
        loss = self.forward()
        loss.backward()
        self.kept += [loss.detach().clone(), *(part(p.grad, self.shards) for p in self.params)]
        self.step()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def broken(self, place: str, error: type[BaseException] = KeyError) -> AbstractContextManager[Any]:
        return armed(self.model, self.loss, Case(place, error))

    def part_breaks(self, error: type[BaseException]) -> None:
        with self.broken("in a leaf", error):
            self.model.blocks[1](torch.ones(4, 8))


def another_loss_s_backward(run: Run) -> None:
    first, second = run.forward(), run.forward(2)
    with run.broken("at a block's gradient"):
        run.forward(3).backward()
    run.optimizer.zero_grad()
    second.backward()
    first.backward()
    run.update()


def a_part_that_was_called_by_itself(run: Run) -> None:
    for error in (KeyError, KeyboardInterrupt):
        run.part_breaks(error)
        run.step()
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


def a_method_that_gathers(run: Run) -> None:
    block = run.model.blocks[1]
    block.apart = types.MethodType(Block.body, block)
    register_fsdp_forward_method(block, "apart")
    for error in (KeyError, KeyboardInterrupt):
        with run.broken("in a nested module", error):
            block.apart(torch.ones(4, 8))
        run.step()
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


def a_training_inside_a_handler(run: Run) -> None:
    try:
        raise ValueError("an earlier one")
    except ValueError:
        run.update()
        with run.broken("in a leaf"):
            run.forward()
        run.step()
        run.update()


def a_hook_on_a_parameter(run: Run) -> None:
    run.optimizer.zero_grad()
    handle = run.params[5].register_post_accumulate_grad_hook(raise_once())
    with contextlib.suppress(KeyError):
        run.forward().backward()
    handle.remove()
    run.optimizer.zero_grad()
    run.update()
    run.update()


def a_method_that_calls_the_forward(run: Run) -> None:
    model = run.model

    def generate(self: Net, x: Tensor) -> Tensor:
        y = self.head(self.stem(x))
        return y + self(x * y.mean()) + self(x) + self.head(self.stem(x))

    model.generate = types.MethodType(generate, model)
    register_fsdp_forward_method(model, "generate")
    for _ in range(2):
        with torch.no_grad():
            run.kept.append(model.generate(torch.ones(4, 8)).clone())
        run.loss(model.generate(torch.ones(4, 8))).backward()
        run.step()
        run.update()


def a_model_that_calls_itself(run: Run) -> None:
    model = run.model

    def recursive(self: Net, x: Tensor, depth: int = 1) -> Tensor:
        y = Net.forward(self, x)
        return self(x * y.mean(), depth - 1) + self.head(x) if depth else y

    model.forward = types.MethodType(recursive, model)
    run.update()
    run.update()


def an_optimizer_inside_the_forward(run: Run) -> None:
    for sharded in (False, True):
        other = nn.Linear(4, 4)
        if sharded and run.shard:
            fully_shard(other)
        inner = torch.optim.SGD(other.parameters(), lr=0.1)
        handle = run.model.blocks[1].register_forward_pre_hook(lambda *_: inner.step(), prepend=True)
        run.update()
        run.update()
        handle.remove()


def an_optimizer_on_one_rank(run: Run) -> None:
    run.step()
    with torch.no_grad():
        run.kept.append(run.forward().clone())
    if dist.get_rank() == 0:
        torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1).step()
    run.update()


def two_models_that_share_the_wire(run: Run) -> None:
    critic = build(run.shard)
    if run.shard:
        share_comm_ctx([run.model, critic])

    def backward() -> None:
        run.loss(critic(run.model(torch.ones(4, 8)).repeat(1, 2))).backward()

    for _ in range(2):  # the second time both are known to each other
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


WAYS: list[Callable[[Run], None]] = [
    another_loss_s_backward,
    a_part_that_was_called_by_itself,
    unshard_by_hand,
    weights_that_are_loaded,
    a_method_that_gathers,
    a_fallback_inside_the_forward,
    a_training_inside_a_handler,
    a_hook_on_a_parameter,
    a_method_that_calls_the_forward,
    a_model_that_calls_itself,
    an_optimizer_inside_the_forward,
    an_optimizer_on_one_rank,
    two_models_that_share_the_wire,
]


def complaints_of_ways(shard: Callable[..., Any]) -> dict[str, str]:
    """What differs from the unsharded model, for those ways to go on after which something does."""
    found = {}
    for way in WAYS:
        runs = Run(shard), Run(None)
        try:
            for run in runs:
                way(run)
        except Exception as error:
            found[way.__name__] = "".join(traceback.format_exception(error, limit=-3))
            continue
        pairs = list(zip(runs[0].kept, runs[1].kept, strict=True))
        wrong = [number for number, pair in enumerate(pairs) if not same(*pair)]
        if wrong:
            found[way.__name__] = (
                f"{len(wrong)} of {len(pairs)} differ, the first {wrong[0]}: {pairs[wrong[0]]}"
            )
    return found
