"""Optimizers over local parts: the same bits, the same state and the same behavior as torch's over DTensors.

Two oracles: `torch.optim` over the same DTensors, and `torch.optim` over plain tensors, the local parts. Parameters have all layouts
at once: even, uneven and empty shards, cut along another dimension, replicated.
"""

from __future__ import annotations

import functools
import inspect
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

import hwfsdp.optim
import models
from hwfsdp import UsageError
from oracles import Training, grid, local_part, ours, unequal
from together import Together

Make = Callable[..., torch.optim.Optimizer]
NAMES = [name for name in hwfsdp.optim.__all__ if name not in ("LocalStep", "local")]


def both(name: str) -> tuple[type[torch.optim.Optimizer], type[torch.optim.Optimizer]]:
    """Return hwfsdp's class and torch's class."""
    return getattr(hwfsdp.optim, name), getattr(torch.optim, name)


# --- Parameters, and their comparison ----------------------------------------------------------------------

LAYOUTS = [  # of 2 ranks
    ((4, 3), Shard(0)),  # even
    ((5, 2), Shard(0)),  # uneven
    ((1, 3), Shard(0)),  # nothing on the second rank
    ((3, 4), Shard(1)),
    ((3,), Replicate()),
]


def mesh() -> DeviceMesh:
    return grid((dist.get_world_size(),))


def whole(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the same numbers on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def lay_out(tensor: Tensor, *placements: Placement) -> DTensor:
    """Distribute a tensor without communication, since every rank has the whole tensor."""
    return distribute_tensor(tensor, mesh(), placements, src_data_rank=None)


def dtensors(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Return one parameter of each layout. Parameters of two calls share no memory."""
    return [
        nn.Parameter(lay_out(whole(shape, seed, dtype), placement))
        for seed, (shape, placement) in enumerate(LAYOUTS)
    ]


def local_copies(params: Iterable[Tensor]) -> list[nn.Parameter]:
    """Copy the local parts of DTensors, and plain tensors."""
    return [nn.Parameter(local_part(p.detach()).clone(), p.requires_grad) for p in params]


def give_grads(params: Iterable[Tensor], step: int) -> None:
    """Give the parameters gradients, the same at each call."""
    for number, param in enumerate(params):
        grad = whole(tuple(param.shape), 100 * step + number + 50, param.dtype)
        if isinstance(param, DTensor):
            grad = lay_out(grad, *param.placements)
        param.grad = grad if param.requires_grad else None


def copy_grads(sources: Iterable[Tensor], targets: Iterable[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        grad = source.grad if source.grad is None or isinstance(target, DTensor) else local_part(source.grad)
        target.grad = None if grad is None else grad.clone()


def all_params(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def contents(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the parameters, the groups, and the state in the order of its creation."""
    order = [next(i for i, p in enumerate(all_params(optimizer)) if p is key) for key in optimizer.state]
    return {"params": all_params(optimizer), "order": order, **optimizer.state_dict()}


def compare(optimizer: torch.optim.Optimizer, *oracles: torch.optim.Optimizer, steps: int = 2) -> list[str]:
    """Step all optimizers with the same gradients. The oracles have DTensors of the same layouts, or local parts."""
    wrong = []
    for step in range(steps):
        params = all_params(optimizer)
        give_grads(params, step)
        for oracle in oracles:
            copy_grads(params, all_params(oracle))
            oracle.step()
        grads = [param.grad for param in params]
        optimizer.step()
        wrong += [f"gradient {i} is another" for i, p in enumerate(params) if p.grad is not grads[i]]
        for oracle in oracles:
            locally = not any(isinstance(p, DTensor) for p in all_params(oracle))
            wrong += unequal(
                contents(optimizer), contents(oracle), f"step {step}, locally {locally}", locally
            )
    return wrong


two = Together(2)
on_ranks = two.finds([])  # a check returns its problems


# --- Numbers and states ------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "ASGD": {"lr": 0.1, "lambd": 0.1, "t0": 1, "weight_decay": 0.1, "maximize": True},
    "Adadelta": {"weight_decay": 0.1, "maximize": True},
    "Adagrad": {"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.1, "maximize": True},
    "Adam": {"weight_decay": 0.1, "amsgrad": True, "maximize": True},
    "AdamW": {},
    "Adamax": {"weight_decay": 0.1, "maximize": True},
    "NAdam": {"weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True},
    "RAdam": {"betas": (0.5, 0.6), "weight_decay": 0.1, "decoupled_weight_decay": True},
    "RMSprop": {"weight_decay": 0.1, "momentum": 0.9, "centered": True, "maximize": True},
    "Rprop": {"etas": (0.4, 1.3), "maximize": True},
    "SGD": {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1, "maximize": True},
}
WAYS: list[dict[str, Any]] = [{"foreach": False}, {"foreach": True}, {"fused": True}]


def check_ways(name: str) -> list[str]:
    """Check all dtypes, one parameter at a time or many."""
    takes = inspect.signature(getattr(torch.optim, name)).parameters
    ways = [OPTIONS[name] | way for way in WAYS if set(way) <= set(takes)]
    variants = [(way, torch.float32) for way in ways] + [(ways[-1], torch.bfloat16)]
    return [
        f"{options} {dtype}: {w}" for options, dtype in variants for w in check_bits(name, options, dtype)
    ]


def check_bits(name: str, options: dict[str, Any], dtype: torch.dtype) -> list[str]:
    """Compare optimizers over two groups of DTensors and a plain tensor. One DTensor is frozen.

    Where torch cannot run an operator on a list of both kinds, or, for Rprop, on DTensors at all, the only oracle is over local parts.
    """
    fast, slow = both(name)

    def made(make: Make, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        params[0].requires_grad_(False)
        plain = nn.Parameter(whole((2, 2), 40, dtype))
        return make([{"params": params[:2], "lr": 0.05}, {"params": [*params[2:], plain]}], **options)

    oracles = [made(slow, local_copies(dtensors(dtype)))]
    if options.get("foreach") is False and name != "Rprop":
        oracles.append(made(slow, dtensors(dtype)))
    return compare(made(fast, dtensors(dtype)), *oracles)


for _name in NAMES:
    bits = f"{_name}_has_the_bits_of_torch_over_dtensors_and_over_local_parts"
    two.add(bits, functools.partial(check_ways, _name), [])


# --- Gradients and parameters that local parts do not tell about -------------------------------------------


def half_sums(params: Iterable[Tensor]) -> list[DTensor]:
    """Return a partial sum for each parameter, different on every rank. Two numbers have only one sum."""
    rank = dist.get_rank()
    return [
        DTensor.from_local(whole(tuple(p.shape), 70 + 10 * rank + i), mesh(), [Partial()], run_check=False)
        for i, p in enumerate(params)
    ]


@on_ranks
def gradients_that_are_partial_sums_are_summed_first_and_stay_as_they_are() -> list[str]:
    """torch's optimizer gets gradients that were summed before."""
    wrong = []
    for name in ("SGD", "AdamW"):
        fast, slow = (make(dtensors(), lr=0.1) for make in both(name))
        for _ in range(2):
            pairs = zip(all_params(fast), all_params(slow), half_sums(all_params(fast)), strict=True)
            for mine, theirs, grad in pairs:
                mine.grad, theirs.grad = grad, grad.redistribute(placements=theirs.placements)
            fast.step()
            slow.step()
            wrong += unequal(contents(fast), contents(slow), name)
            wrong += [f"{p.grad.placements}" for p in all_params(fast) if p.grad.placements != (Partial(),)]
    return wrong


@on_ranks
def a_step_of_a_parameter_without_dimensions_is_torchs_own() -> list[str]:
    params = [[nn.Parameter(lay_out(whole((), 1), Replicate())), *dtensors()[:1]] for _ in range(2)]
    optimizers = [make(of_one) for make, of_one in zip(both("Adam"), params, strict=True)]
    wrong = compare(*optimizers)
    return wrong + [f"{s['step']}" for s in optimizers[0].state.values() if isinstance(s["step"], DTensor)]


@on_ranks
def a_differentiable_step_is_torchs_own() -> list[str]:
    """Its parameters are results of an earlier step."""
    results, starts = [], []
    for make in both("Adam"):
        optimizer = make(dtensors()[:1], differentiable=True)
        starts += all_params(optimizer)
        optimizer.param_groups[0]["params"] = [starts[-1] * 2]
        give_grads(all_params(optimizer), 0)
        optimizer.step()
        all_params(optimizer)[0].sum().backward()
        results.append(all_params(optimizer))
    return unequal(*results) + unequal(*(start.grad for start in starts))


@on_ranks
def gradients_may_have_another_dtype_than_their_parameter() -> list[str]:
    """The gradients are in float32, the parameters in bfloat16."""
    optimizers = [make(dtensors(torch.bfloat16), lr=0.1) for make in both("SGD")]
    for optimizer in optimizers:
        for number, param in enumerate(all_params(optimizer)):
            param.grad_dtype = None
            param.grad = lay_out(whole(tuple(param.shape), number), *param.placements)
        optimizer.step()
    return unequal(contents(optimizers[0]), contents(optimizers[1]))


# --- Unchanged by a step -----------------------------------------------------------------------------------


class Scripted(torch.optim.Optimizer):
    """An element-wise optimizer that counts its steps, keeps the last gradient in float32, and then calls `then`."""

    def __init__(self, params: Any, then: Callable[[Any], Any] = lambda closure: None) -> None:
        super().__init__(params, {"lr": 0.5})
        self.then = then

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                state["step"] = state.get("step", 0) + 1
                state["last"] = param.grad.float()
                state.setdefault("name", "kept")
                param.add_(param.grad, alpha=-group["lr"])
        return self.then(closure)


@on_ranks
def any_other_element_wise_optimizer_can_run_locally() -> list[str]:
    """The optimizer is not torch's. It rebinds its state, which has another dtype, and is not only tensors."""
    wrong = []
    for dtype in (torch.float32, torch.bfloat16):
        optimizer, theirs = (make(dtensors(dtype)) for make in (hwfsdp.optim.local(Scripted), Scripted))
        wrong += compare(optimizer, theirs, Scripted(local_copies(dtensors(dtype))))
    return wrong


@on_ranks
def a_step_between_forward_and_backward_is_noticed() -> list[str]:
    """Autograd notices it, as with torch."""
    (param,) = params = dtensors()[:1]
    loss = (param * param).sum()
    give_grads(params, 0)
    hwfsdp.optim.SGD(params, lr=0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    return []


class Dispatched(TorchDispatchMode):
    """Collect the operators that run over DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            self.operators.append(str(func))
        return func(*args, **(kwargs or {}))


@on_ranks
def a_step_runs_no_operator_over_dtensors() -> list[str]:
    """This holds for the first step and later ones. torch's optimizer runs some, which shows that the test works."""
    wrong = []
    for name in ("AdamW", "SGD"):
        for make in both(name):
            optimizer = make(dtensors())
            for step in range(2):
                give_grads(all_params(optimizer), step)
                with Dispatched() as dispatched:
                    optimizer.step()
                if bool(dispatched.operators) == (make is both(name)[0]):
                    wrong.append(f"{make.__module__}.{name}, step {step}: {dispatched.operators}")
    return wrong


# --- Everything around a step ------------------------------------------------------------------------------


@on_ranks
def a_closure_sees_the_dtensors_and_is_called_once_a_step() -> list[str]:
    traces = []
    for make in both("AdamW"):
        params = dtensors()[:2]
        optimizer, seen = make(params, lr=0.1), []

        def closure() -> Tensor:
            seen.append([p is q for p, q in zip(params, all_params(optimizer), strict=True)])
            optimizer.zero_grad()
            loss = torch.stack([(p * p).sum().full_tensor() for p in params]).sum()
            loss.backward()
            return loss

        with torch.no_grad():
            losses = [optimizer.step(closure) for _ in range(3)]
        traces.append([losses, contents(optimizer), seen])
    twice = hwfsdp.optim.local(Scripted)(dtensors(), then=lambda closure: [closure(), closure()])
    with pytest.raises(UsageError, match="expected an optimizer that calls its closure once"):
        twice.step(lambda: 1.0)
    return unequal(*traces) + ([] if seen == [[True, True]] * 3 else [str(seen)])


@on_ranks
def hooks_run_once_a_step_and_see_dtensors() -> list[str]:
    """This holds for hooks of one optimizer and hooks of all optimizers, no matter which class ran before."""
    wrong = []
    for make in reversed(both("AdamW")):
        optimizer, calls = make(dtensors(), lr=0.1), []

        def note(kind: str, optimizer: Any, *_: Any) -> None:
            state = [v for s in optimizer.state.values() for v in s.values() if v.ndim]
            local = [type(t) for t in (*all_params(optimizer), *state) if not isinstance(t, DTensor)]
            calls.append((kind, local))

        handles = [
            optimizer.register_step_pre_hook(functools.partial(note, "before")),
            optimizer.register_step_post_hook(functools.partial(note, "after")),
            register_optimizer_step_pre_hook(functools.partial(note, "before all")),
            register_optimizer_step_post_hook(functools.partial(note, "after all")),
        ]
        for step in range(2):
            give_grads(all_params(optimizer), step)
            optimizer.step()
        for handle in handles:
            handle.remove()
        expected = [(kind, []) for kind in ("before all", "before", "after", "after all")]
        wrong += [] if calls == expected * 2 else [f"{make.__module__}: {calls}"]
    return wrong


@on_ranks
def gradient_scalers_are_as_with_torch() -> list[str]:
    """Gradients are scaled for half precision, fused or not. In the second step, rank 0 has an infinite gradient."""
    wrong = []
    for options in ({"foreach": False}, {"fused": True}):
        scales, results = [], []
        for make in both("AdamW"):
            optimizer = make(dtensors(), lr=0.1, **options)
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
            for step in range(3):
                give_grads(all_params(optimizer), step)
                scaler.scale(torch.ones(()))
                if step == 1 and dist.get_rank() == 0:
                    local_part(all_params(optimizer)[0].grad)[0] = float("inf")
                scaler.step(optimizer)
                scaler.update()
                scales.append(scaler.get_scale())
            results.append(contents(optimizer))
        wrong += unequal(*results, str(options))
        wrong += [] if scales == [8.0, 4.0, 8.0] * 2 else [f"{options}: {scales}"]
    return wrong


# --- Models that are sharded -------------------------------------------------------------------------------


class Slow(Training):
    """A training with torch's optimizer in place of the tested one."""

    def new_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=0.02, eps=1e-3)


def trainings() -> tuple[Training, Training]:
    return Training(models.uneven, ours), Slow(models.uneven, ours)


@on_ranks
def the_state_dict_functions_of_torch_see_no_difference() -> list[str]:
    """They read the same from both optimizers, and load the state of each into the other."""
    pair = trainings()
    for training in pair:
        training.steps(2)
    states = [get_optimizer_state_dict(t.model, t.optimizer) for t in pair]
    wrong = unequal(*states)
    for training, state in zip(trainings(), states[::-1], strict=True):
        training.model.load_state_dict(pair[0].model.state_dict())
        set_optimizer_state_dict(training.model, training.optimizer, state)
        training.steps(2)
        states.append(get_optimizer_state_dict(training.model, training.optimizer))
    return wrong + unequal(states[-2], states[-1])


test_on_two_ranks = two.test()


# --- Classes -----------------------------------------------------------------------------------------------


def test_every_optimizer_of_torch_is_here_or_refused():
    theirs = {
        name
        for name, value in vars(torch.optim).items()
        if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer)
    }
    assert theirs - {"Optimizer"} == {*NAMES, *REFUSED}


def test_a_class_is_torchs_with_its_arguments_and_its_name():
    for name in NAMES:
        fast, slow = both(name)
        assert issubclass(fast, slow) and fast.__name__ == slow.__name__
        assert inspect.signature(fast) == inspect.signature(slow)
        optimizer = fast([nn.Parameter(torch.ones(2))])
        assert type(pickle.loads(pickle.dumps(optimizer))) is fast
        assert repr(optimizer) == repr(slow([nn.Parameter(torch.ones(2))]))


REFUSED = ("Adafactor", "LBFGS", "Muon", "SparseAdam")


def test_an_optimizer_that_is_not_element_wise_is_refused_by_name():
    for name in REFUSED:
        with pytest.raises(
            UsageError, match=rf"optimizer {name}: expected .* got torch\.optim\.{name}, which"
        ):
            hwfsdp.optim.local(getattr(torch.optim, name))


@hwfsdp.optim.local
class Decorated(torch.optim.SGD):
    """A decorated class under its own name in the module, so that it can be pickled."""


def test_local_makes_a_subclass_of_the_same_name_once():
    made = hwfsdp.optim.local(Scripted)
    assert issubclass(made, Scripted) and issubclass(made, hwfsdp.optim.LocalStep)
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(made, name) == getattr(Scripted, name)
    assert inspect.signature(made) == inspect.signature(Scripted)
    assert hwfsdp.optim.local(made) is made
    assert type(pickle.loads(pickle.dumps(Decorated([nn.Parameter(torch.ones(2))])))) is Decorated
