"""Backwards that enter a module inside, and reads of freed or sharded parameters: right gradients, or one error with names."""

from __future__ import annotations

import copy
import functools
import pickle
import threading
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from hwfsdp import StateError
from hwfsdp.features.schedule import FSDPState
from hwfsdp.errors import CopyRefusedError, MissingParameterError, RuntimeRefusedError, UnsupportedError
from oracles import Trace, differences, other_gradients, ours
from together import Together


class Hidden:
    """An object of a class that nobody knows."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Block(nn.Module):
    """Keeps a tensor of its forward, and adds to a cache if it gets one. `norm` is read elementwise in the backward."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.norm = nn.Parameter(torch.rand(8) + 0.5)
        self.up.requires_grad_(not frozen)

    def forward(self, x: Tensor, cache: Hidden | None = None) -> Tensor:
        self.kept = (self.up(x) * self.norm).tanh()
        before = cache.value.setdefault(id(self), []) if cache else []
        total = sum(before, self.kept)
        before.append(self.kept)
        return x + self.down(total)


class Hiding(Block):
    def forward(self, x: Tensor, cache: Hidden | None = None) -> Any:
        return Hidden([Hidden(super().forward(x))])


class Lazy(Block):
    def forward(self, x: Tensor, cache: Hidden | None = None) -> Any:
        yield super().forward(x)


class GivesWeight(nn.Module):
    """Returns a view of its weight; its caller computes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(6, 6))

    def forward(self, x: Tensor, cache: Hidden | None = None) -> Any:
        return self.weight.t()


class Net(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(6, 6)

    def forward(self, x: Tensor, cache: Hidden | None = None) -> Tensor:
        for block in self.blocks:
            out = block(x, cache)
            if isinstance(block, Hiding):
                out = out.value[0].value
            elif isinstance(block, Lazy):
                out = next(out)
            x = F.linear(x, out) if isinstance(block, GivesWeight) else out
        return self.head(x)


def inputs() -> Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(1))


def output(model: Any) -> Tensor:
    return model(inputs())


def kept(model: Any) -> Tensor:
    model(inputs())
    return model.blocks[1].kept


def kept_of_an_earlier_forward(model: Any) -> Tensor:
    earlier = kept(model)
    return torch.cat([model(2 * inputs()).view(-1), earlier.view(-1)])


def after_a_backward(model: Any) -> Tensor:
    model(inputs()).sum().backward(retain_graph=True)
    return model.blocks[1].kept


def cached(model: Any) -> Tensor:
    cache = Hidden({})
    model(inputs(), cache)
    return model(2 * inputs(), cache)


def curvature(model: Any) -> Tensor:
    x = inputs().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return torch.autograd.grad(grad.square().sum(), x, create_graph=True)[0]


Make = Callable[[], nn.Module]
CASES: dict[str, tuple[Make, Callable[[Any], Tensor]]] = {
    "kept": (lambda: Net(Block(), Block()), kept),
    "kept of a forward with frozen weights": (lambda: Net(Block(), Block(frozen=True)), kept),
    "kept of an earlier forward": (lambda: Net(Block(), Block()), kept_of_an_earlier_forward),
    "kept, after a backward": (lambda: Net(Block(), Block()), after_a_backward),
    "in unknown objects": (lambda: Net(Hiding(), Hiding()), output),
    "from generators": (lambda: Net(Lazy(), Lazy()), output),
    "through a cache": (lambda: Net(Block(), Block()), cached),
    "penalty of a gradient penalty": (lambda: Net(Block(), Block()), curvature),
    "a view of a returned weight": (lambda: Net(GivesWeight(), Block()), output),
}


def wrong_gradients(case: str, reshard: bool | None) -> list[str]:
    """Take two steps with and without sharding. Every rank has the same inputs. Return the gradients that differ."""
    make, values = CASES[case]
    torch.manual_seed(0)
    plain = make()
    model: Any = copy.deepcopy(plain)
    for block in model.blocks:
        ours(block)
    ours(model, reshard_after_forward=reshard)
    found = []
    for _ in range(2):
        for each in (plain, model):
            each.zero_grad()
            values(each).square().sum().backward()
        found += other_gradients(model, plain)
    return found


def of_some_parameters(model: Any) -> Trace:
    """Run a backward that the program limits to some parameters, which it took before the forward."""
    some = [model[0].weight, model[2].bias]
    model(inputs()).square().sum().backward(inputs=some)
    return Trace().keep_grads(model)


def of_a_penalty_on_the_shards(model: Any) -> Trace:
    """Compute a penalty from the parameters, and its gradients: by `grad`, and by `backward`, with a loss."""
    params, trace = list(model.parameters()), Trace()
    model(inputs()).sum().backward()
    model.zero_grad()
    penalty = sum((param * param).sum() for param in params)
    total = getattr(penalty, "full_tensor", lambda: penalty)()
    for grad in torch.autograd.grad(total, params, retain_graph=True):
        trace.keep("grad of the penalty", grad)
    (model(inputs()).square().sum() + total).backward(inputs=params)
    return trace.keep_grads(model)


two = Together(2)
for _case in CASES:
    for _reshard in (None, True) if _case in ("kept", "through a cache") else (None,):
        two.add(f"{_case}, {_reshard}", functools.partial(wrong_gradients, _case, _reshard), [])


# --- Errors --------------------------------------------------------------------------------------------------


def sharded(*modules: nn.Module) -> nn.Sequential:
    model = nn.Sequential(*modules)
    for module in model:
        ours(module)
    return ours(model)


def said(error: type[Exception], action: Callable[[], Any], *words: str) -> list[str]:
    """Return the words that are missing in the error of an action."""
    with pytest.raises(error) as caught:
        action()
    return [f"{word!r} not in {caught.value}" for word in words if word not in str(caught.value)]


@two.finds([])
def a_backward_of_another_thread_enters_no_module_with_frozen_parameters() -> list[str]:
    """Each thread numbers the nodes of its graphs from 0, so the same numbers mean other nodes."""
    model: Any = sharded(nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False))
    entered: list[str] = []

    def backward_of_another_graph() -> None:
        x = torch.ones(4, requires_grad=True)
        y = x
        for _ in range(40):
            y = y + x
        with mock.patch.object(FSDPState, "pre_backward", lambda state: entered.append(state.name)):
            y.sum().backward()

    for run in (lambda: model(torch.ones(2, 4)), backward_of_another_graph):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    return entered


@two.finds([])
def a_freed_parameter_is_named_in_place_of_torchs_error_or_a_crash() -> list[str]:
    model, weights = sharded(nn.Linear(4, 4), nn.Linear(4, 4)), []
    handle = model[1].register_forward_pre_hook(lambda module, _: weights.append(module.weight))
    model(torch.ones(2, 4))
    handle.remove()
    (weight,) = weights
    reads = [lambda: F.linear(torch.ones(1, 4), weight), lambda: weight + 1, lambda: weight[0, 0].item()]
    found = [m for read in reads for m in said(StateError, read, "'1.weight' of group '1'", "clone()")]
    described = [repr(weight), tuple(weight.shape), weight.dtype, weight.grad]
    expected = ["<freed parameter '1.weight' of shape (4, 4)>", (4, 4), torch.float32, None]
    model.unshard()
    model[1].unshard()
    return (
        found + [str(described)] * (described != expected) + ["stays refused"] * (weight.sum().isnan().item())
    )


@two.finds([])
def a_backward_may_be_limited_to_sharded_parameters_and_include_a_penalty_on_them() -> list[str]:
    wrong = []
    for gradients in (of_some_parameters, of_a_penalty_on_the_shards):
        found = []
        for way in (sharded, nn.Sequential):
            torch.manual_seed(0)
            found.append(gradients(way(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))).gathered())
        wrong += differences(*found, 1e-5, 1e-5)
    return wrong


class AddsInPlace(nn.Module):
    """A module that changes one of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor, total: Tensor) -> Tensor:
        total += self.up(x).sum()
        return total


class Saves(nn.Linear):
    """A module that saves in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.state_dict()
        return super().forward(x)


@two.finds([])
def gradients_at_once_changed_inputs_and_saves_in_a_forward_are_refused_with_a_remedy() -> list[str]:
    model, x = sharded(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(1, 4, requires_grad=True)
    adds, total = ours(AddsInPlace()), torch.ones((), requires_grad=True) + 0
    weight = model[0].weight
    return [
        *said(
            UnsupportedError, lambda: torch.autograd.grad(model(x).sum(), weight), "'0.weight'", "backward()"
        ),
        *said(RuntimeError, lambda: adds(x, total), "in place", "x = x + y"),
        *said(RuntimeError, lambda: ours(Saves(4, 4))(x), "'weight'", "state_dict()"),
    ]


@two.finds([])
def a_parameter_of_another_group_is_named_where_a_forward_reads_its_shard() -> list[str]:
    attention = nn.MultiheadAttention(4, 2)
    ours(attention.out_proj)
    ours(attention)
    x = torch.ones(1, 4)
    words = "'out_proj.weight' of group 'out_proj'", "fully_shard([a, b])", "(3) Another module"
    return said(RuntimeError, lambda: attention(x, x, x), *words)


class Triangle(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu()


@two.finds([])
def what_takes_a_parameter_away_before_the_first_forward_is_named() -> list[str]:
    def first_forward(change: Callable[[Any], Any]) -> Callable[[], Any]:
        model = sharded(nn.Linear(4, 4))
        change(model[0])
        return lambda: model(torch.ones(1, 4))

    other = {"0.weight": torch.ones(4, 4)}
    functional = functools.partial(torch.func.functional_call, sharded(nn.Linear(4, 4)), other)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # weight_norm is deprecated
        normed = first_forward(nn.utils.weight_norm)
    by = functools.partial(said, MissingParameterError)
    return [
        *by(
            first_forward(lambda m: parametrize.register_parametrization(m, "weight", Triangle())),
            "'0.weight'",
            "a parametrization",
        ),
        *by(first_forward(lambda m: delattr(m, "bias")), "'0.bias'", "got none"),
        *by(first_forward(lambda m: setattr(m, "bias", None)), "'0.bias'", "got none"),
        *by(lambda: functional((torch.ones(1, 4),)), "'0.weight'", "functional_call"),
        *by(normed, "'0.weight'", "weight_norm"),
    ]


@two.finds([])
def copies_pickles_traces_and_sparse_gradients_are_refused_with_a_remedy() -> list[str]:
    model, x = sharded(nn.Linear(4, 4)), torch.ones(1, 4)
    table = ours(nn.Embedding(4, 4, sparse=True))
    return [
        *said(CopyRefusedError, lambda: copy.copy(model[0]), "FSDPLinear", "state_dict"),
        *said(CopyRefusedError, lambda: copy.deepcopy(nn.Sequential(model)), "FSDPSequential", "deepcopy"),
        *said(pickle.PicklingError, lambda: pickle.dumps(model), "FSDPSequential", "state_dict"),
        *said(RuntimeRefusedError, model.share_memory, "before fully_shard"),
        *said(RuntimeRefusedError, lambda: torch.jit.script(model), "torch.compile"),
        *said(RuntimeRefusedError, lambda: torch.jit.trace(model, (x,)), "torch.compile"),
        *said(
            UnsupportedError, lambda: table(torch.tensor([1])).sum().backward(), "'weight'", "sparse=False"
        ),
    ]


test_a_backward_gives_the_unsharded_gradients_or_an_error_says_what_to_do = two.test()
