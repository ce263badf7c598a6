"""A block writes into lists, dicts and dataclasses that it gets as arguments; and hooks do not pile up on tensors that stay."""

from __future__ import annotations

import gc
from collections import UserDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hwfsdp import MixedPrecisionPolicy, fully_shard
from hwfsdp.core.autograd_hooks import WatchedOutputs
from oracles import ours, unsharded
from together import Together

two = Together(2)


class OwnList(list):
    pass


@dataclass
class Record:
    losses: list[Tensor] = field(default_factory=list)
    hidden: Any = None


@dataclass(frozen=True)
class Frozen:
    losses: list[Tensor]
    hidden: Tensor


class Pair(NamedTuple):
    losses: list[Tensor]
    hidden: Tensor


class Block(nn.Module):
    """A block that writes into its arguments by a given function, also losses that no output leads to."""

    def __init__(self, write: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.router, self.write = nn.Linear(4, 4), nn.Linear(4, 4), write

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y = torch.tanh(self.layer(x))
        self.write(y, self.router(y).square().mean(), *args, **kwargs)
        return y


class Net(nn.Module):
    def __init__(self, write: Callable[..., Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(write) for _ in range(3))

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        for block in self.blocks:
            x = block(x, *args, **kwargs)
        return x


def build(shard: Callable[..., nn.Module], write: Callable[..., Any], **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = Net(write)
    for block in model.blocks:
        shard(block, **options)
    return shard(model, **options)


def grads(model: nn.Module) -> list[Tensor | None]:
    return [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in model.parameters()]


# --- Every way to write ------------------------------------------------------------------------------------


def append(y: Tensor, loss: Tensor, losses: Any, other: Any = None) -> None:
    losses.append(loss)


def set_items(y: Tensor, loss: Tensor, seen: Any) -> None:
    seen[len(seen)] = loss
    seen.pop("none", None)
    seen.update(last=loss, hidden=y)


def edit(y: Tensor, loss: Tensor, losses: list[Tensor]) -> None:
    losses.insert(0, losses.pop())
    losses[-1] = losses[-1] + loss
    losses.extend([loss])
    total = sum(losses) + loss
    losses.clear()
    losses += [total, y]


def set_fields(y: Tensor, loss: Tensor, record: Record) -> None:
    record.losses.append(loss)
    record.hidden = y if record.hidden is None else record.hidden + y


def in_nested(y: Tensor, loss: Tensor, tree: Any) -> None:
    tree["layers"][0].append((loss, {"y": y}))
    tree["layers"].append([y])


WAYS: dict[str, tuple[Callable[..., None], Callable[[Tensor], tuple[tuple[Any, ...], dict[str, Any]]]]] = {
    "append to a list of a class, by name": (append, lambda t: ((), {"losses": OwnList([t])})),
    "append to a list in a named tuple": (
        lambda y, loss, pair: append(y, loss * pair.hidden.mean(), pair.losses),
        lambda t: ((Pair([t], t),), {}),
    ),
    "append to a list in a frozen dataclass": (
        lambda y, loss, pair: append(y, loss * pair.hidden.mean(), pair.losses),
        lambda t: ((Frozen([t], t),), {}),
    ),
    "insert, pop, set, clear": (edit, lambda t: (([t.mean(), t.sum()],), {})),
    "items of a dict": (set_items, lambda t: (({"none": None, "t": t},), {})),
    "items of a defaultdict": (set_items, lambda t: ((defaultdict(list, t=t),), {})),
    "items of a UserDict, in which nothing is watched": (
        lambda y, loss, seen: set_items(y, y.mean(), seen),
        lambda t: ((UserDict(t=t),), {}),
    ),
    "fields of a dataclass": (set_fields, lambda t: ((Record([t]),), {})),
    "nested": (in_nested, lambda t: (({"layers": [[t]], "t": t},), {})),
}


def flat(tree: Any) -> list[Any]:
    """List the parts of the arguments with their types."""
    if isinstance(tree, dict | UserDict):
        return [type(tree), *([key, flat(value)] for key, value in tree.items())]
    if isinstance(tree, list | tuple):
        return [type(tree), *map(flat, tree)]
    return [type(tree), flat(vars(tree))] if isinstance(tree, Record | Frozen) else [tree]


def tensors(tree: Any) -> list[Tensor]:
    return [each for part in tree for each in (tensors(part) if isinstance(part, list) else [part])]


Written = tuple[list[str], list[Tensor | None]]


def written(shard: Callable[..., nn.Module], way: str, **options: Any) -> Written:
    """Run a model that writes. Describe its arguments afterwards; return their tensors, and gradients of a loss of all of them."""
    write, make = WAYS[way]
    model = build(shard, write, **options)
    given, x = torch.full((2, 4), 2.0, requires_grad=True), torch.ones(2, 4, requires_grad=True)
    for _ in range(2):
        args, kwargs = make(given)
        model(x, *args, **kwargs)
        parts = tensors(flat([*args, kwargs]))
        sum(part.sum() for part in parts if isinstance(part, Tensor)).backward()
    found = [part for part in parts if isinstance(part, Tensor)]
    names = ["given" if part is given else "" if isinstance(part, Tensor) else str(part) for part in parts]
    return names, [*(part.detach() for part in found), given.grad, x.grad, *grads(model)]


@two.finds([])
def writes_arrive_and_have_gradients() -> list[str]:
    wrong = []
    for way in WAYS:
        expected = written(unsharded, way)
        for reshard in (None, False):
            try:
                found = written(ours, way, reshard_after_forward=reshard)
                assert found[0] == expected[0]
                torch.testing.assert_close(found[1], expected[1])
            except Exception as error:
                wrong.append(f"{way}, {reshard}: {error!r}")
    return wrong


# --- The caller's own objects ------------------------------------------------------------------------------

BF16 = {"param_dtype": torch.bfloat16}


@two.finds([torch.bfloat16, torch.bfloat16, torch.float32, torch.float32])
def a_block_sees_cast_tensors_in_the_callers_containers_and_the_caller_its_own() -> list[torch.dtype]:
    seen: list[Any] = []
    batch: dict[str, Any] = {"x": torch.ones(2, 4), "more": [torch.ones(2, requires_grad=True)]}
    before = [batch["x"], batch["more"], batch["more"][0]]

    def look(y: Tensor, loss: Tensor, first: Any, second: Any, direct: Tensor) -> None:
        assert first is batch and second is batch["more"] and first["more"] is second
        seen[:] = [first["x"].dtype, second[0].dtype]
        first["same"] = direct
        second.append(second[0])

    x = torch.ones(2, 4)
    model = build(fully_shard, look, mp_policy=MixedPrecisionPolicy(**BF16))
    model(x, batch, second=batch["more"], direct=x)
    assert [batch["x"], batch["more"], batch["more"][0]] == before
    assert batch["same"] is x and batch["more"][-1] is before[-1] and len(batch["more"]) == 4
    return [*seen, batch["x"].dtype, batch["more"][0].dtype]


@two.finds([True, True])
def containers_are_the_callers_again_after_an_exception() -> list[bool]:
    given, found = torch.ones(2, 4, requires_grad=True), []
    for error in (ValueError, KeyboardInterrupt):

        def fail(y: Tensor, loss: Tensor, losses: list[Tensor], wants: bool) -> None:
            losses.append(loss)
            if wants:
                raise error

        model, losses = build(fully_shard, fail, mp_policy=MixedPrecisionPolicy(**BF16)), [given]
        with pytest.raises(error):
            model(torch.ones(2, 4), losses, True)
        if error is KeyboardInterrupt:  # torch calls no hook after it
            model(torch.ones(2, 4), losses, False)
        found.append(losses[0] is given and losses[0].dtype == torch.float32)
    return found


@two.finds(True)
def a_block_may_return_and_keep_the_callers_container() -> bool:
    kept: list[Any] = []

    class Returning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
            kept.append(batch)
            batch["h"] = self.layer(batch["h"])
            return batch

    model = nn.Sequential(Returning(), Returning())
    torch.manual_seed(0)
    nn.init.ones_(model[0].layer.weight)
    for module in (*model, model):
        ours(module)
    extra, x = torch.ones(2, requires_grad=True), torch.ones(2, 4, requires_grad=True)
    batch = {"h": x, "extra": extra}
    assert model(batch) is batch and kept == [batch, batch] and batch["extra"] is extra
    (batch["h"].sum() + extra.sum()).backward()
    return x.grad is not None and torch.equal(extra.grad, torch.ones(2))


def in_checkpoint(shard: Callable[..., nn.Module]) -> nn.Module:
    model = build(shard, append)

    def forward(x: Tensor, losses: list[Tensor]) -> Tensor:
        for block in model.blocks:
            x = checkpoint(block, x, losses, use_reentrant=False)
        return x

    model.forward = forward
    return model


def in_a_list(shard: Callable[..., nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = Net(append)
    shard([*model.blocks] if shard is ours else model)
    return shard(model)


@two.finds([])
def writes_arrive_from_recomputed_blocks_and_module_lists() -> list[str]:
    wrong = []
    for make in (in_checkpoint, in_a_list):
        found = []
        for shard in (unsharded, ours):
            model, given = make(shard), torch.ones(2, 4, requires_grad=True)
            losses = [given]
            y = model(torch.ones(2, 4), losses)
            (y.sum() + sum(loss.sum() for loss in losses)).backward()
            found.append([[loss.detach() for loss in losses], given.grad, *grads(model)])
        try:
            torch.testing.assert_close(*found)
        except Exception as error:
            wrong.append(f"{make.__name__}: {error!r}")
    return wrong


# --- Hooks on tensors that stay ----------------------------------------------------------------------------


class Returning(nn.Module):
    """A module whose outputs outlive its forward: its parameter, a view of it, a buffer, an input, and kept tensors and their views."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.kept = nn.Linear(4, 4), torch.ones(4)
        self.register_buffer("scale", torch.ones(4, requires_grad=True))

    def forward(self, x: Tensor, prompt: Tensor) -> tuple[Tensor, ...]:
        y, weight = self.layer(x), self.layer.weight
        return y, weight, weight.view(-1), self.scale, prompt, prompt[0], self.kept, self.kept[:2]


def many_steps(shard: Callable[..., nn.Module]) -> tuple[list[Tensor | None], int]:
    """Return the gradients after many steps, and how many objects of hooks there are."""
    torch.manual_seed(0)
    inner = Returning()
    shard(inner)
    source, prompt = torch.ones(4, requires_grad=True), torch.ones(2, 4, requires_grad=True)
    inner.kept = source * 2
    for _ in range(20):
        sum(out.sum() for out in inner(torch.ones(2, 4), prompt)).backward(retain_graph=True)
    leaves = [inner.scale.grad, prompt.grad, source.grad, *grads(inner)]
    gc.collect()
    return leaves, sum(isinstance(each, WatchedOutputs) for each in gc.get_objects())


@two.finds(True)
def hooks_do_not_pile_up_on_tensors_that_outlive_a_step() -> bool:
    expected, _ = many_steps(unsharded)
    got, hooks = many_steps(ours)
    torch.testing.assert_close(got, expected)
    return hooks < 10


test_on_two_ranks = two.test()
