"""A forward computes with what the shards hold when it reaches their module, also if a gather was started before, or the module is whole.

The oracle is the plain model, to which the same is written. Every rank has the same inputs.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hwfsdp import FSDPModule, core, record
from oracles import Trace, differences, other_gradients, ours
from together import Together

Shard = Callable[..., Any]


def encoder() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


class Momentum(nn.Module):
    """After the first encoder has run, the forward moves the second encoder's weights towards the first encoder's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = encoder(), encoder().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x)
        with torch.no_grad():
            for slow, quick in zip(self.key.parameters(), self.query.parameters(), strict=True):
                slow.mul_(0.5).add_(quick, alpha=0.5)
        return query * self.key(2 * x)


class Steps(nn.Module):
    """An optimizer steps in the forward, for the layer that comes next."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = encoder(), encoder()
        self.optimizer: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.query(x)
        if self.optimizer is not None:
            self.optimizer.step()
        return self.key(x)


class Scales(nn.Module):
    """The forward scales the weights of the layer that comes next."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = encoder(), encoder()

    def forward(self, x: Tensor) -> Tensor:
        x = self.query(x)
        self.write()
        return self.key(x)

    def write(self) -> None:
        with torch.no_grad():
            for param in self.key.parameters():
                param.mul_(0.9)


class Converts(Scales):
    """The forward gives the layers that come next other memory."""

    def write(self) -> None:
        self.key._apply(lambda tensor: tensor * 0.9)


def inputs(number: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(number))


def both(make: Callable[[], nn.Module], shard: Shard, **options: Any) -> tuple[Any, Any]:
    """Return a plain model, and a sharded copy of it. Each layer is a group."""
    torch.manual_seed(0)
    plain = make()
    model = copy.deepcopy(plain)
    for module in [*model.modules()][::-1]:
        if isinstance(module, nn.Linear) or module is model:
            shard(module, **options)
    return plain, model


def trained(model: Any) -> Trace:
    """Return the losses of four steps, and the weights."""
    trace = Trace()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.3)
    for number in range(4):
        loss = model(inputs(number)).square().sum()
        trace.keep("loss", loss)
        loss.backward()
        optimizer.step()
        if isinstance(model, Steps):  # from the second step on
            model.optimizer = torch.optim.SGD(model.key.parameters(), 0.1)
        else:
            optimizer.zero_grad()
    return kept(model, trace)


def kept(model: nn.Module, trace: Trace | None = None) -> Trace:
    """Keep the weights, too."""
    trace = trace or Trace()
    for name, param in model.named_parameters():
        trace.keep(name, param)
    return trace


def reshard(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


two = Together(2)


def wrong(make: Callable[[], nn.Module], shard: Shard) -> list[str]:
    plain, model = both(make, shard)
    return differences(trained(model).gathered(), trained(plain), 1e-5, 1e-6)


for _make, _in_core in itertools.product((Momentum, Steps, Scales, Converts), (False, True)):
    _shard = core.fully_shard if _in_core else ours
    two.add(f"{_make.__name__}{', core' * _in_core}", functools.partial(wrong, _make, _shard), [])


@two.finds(["key.0"])
def a_group_is_gathered_a_second_time_only_if_it_was_written_after_its_gather_began() -> list[str]:
    _, model = both(Momentum, ours)
    for number in range(2):
        with record() as log:
            model(inputs(number))
    gathers = [event.owner for event in log.select("all_gather")]
    return sorted(owner for owner in {*gathers} if gathers.count(owner) > 1)


# --- Modules that are whole ------------------------------------------------------------------------------------


@two.finds([])
def an_optimizer_that_runs_forwards_in_its_step_sees_its_own_changes() -> list[str]:
    plain, model = both(encoder, ours)
    model.set_reshard_after_backward(False)
    for each in (plain, model):
        optimizer = torch.optim.LBFGS(each.parameters(), 0.1, max_iter=4)

        def closure(each: Any = each, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = each(inputs(0)).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
    reshard(model)
    return differences(kept(model).gathered(), kept(plain), 1e-4, 1e-5)


@two.finds([])
def an_average_written_to_the_shards_is_used_by_the_next_forward() -> list[str]:
    plain, model = both(encoder, ours, reshard_after_forward=False)
    shards = [*model.parameters()]
    with torch.no_grad():
        for each in (plain, model):
            each(inputs(0))
        for param in (*shards, *plain.parameters()):
            param.mul_(0.5)
        return ["output"] * (not torch.allclose(model(inputs(1)), plain(inputs(1))))


@two.finds([])
def shards_that_are_frozen_while_modules_are_whole_get_no_gradients() -> list[str]:
    plain, model = both(encoder, ours)
    model.set_reshard_after_backward(False)
    shards = [*model.parameters()]
    for each in (plain, model):
        each(inputs(0)).sum().backward()
    for param in (*shards[1:], *[*plain.parameters()][1:]):
        param.requires_grad_(False)
    model.zero_grad()
    plain.zero_grad()
    for each in (plain, model):
        each(inputs(1)).sum().backward()
    reshard(model)
    return other_gradients(model, plain)


# --- Gathers that the user asked for ---------------------------------------------------------------------------


class WithHead(nn.Module):
    """The head is called after the root's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


@two.finds([True, ["body", "head"]])
def a_gather_that_the_user_asked_for_stays_until_it_is_used() -> list[Any]:
    _, model = both(WithHead, ours)
    model.head(model(inputs(0))).sum().backward()
    model.body.set_modules_to_forward_prefetch([model.head])
    handle = model.head.unshard(async_op=True)
    model(inputs(1))
    handle.wait()
    is_whole = tuple(model.head.weight.shape) == (4, 4) and not hasattr(model.head.weight, "to_local")
    model.head.reshard()
    with record() as log:
        model.head(model(inputs(2)))
    return [is_whole, [event.owner for event in log.select("all_gather")]]


test_on_two_ranks = two.test()
