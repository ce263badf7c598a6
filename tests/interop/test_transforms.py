"""`torch.func` and forward-mode AD on sharded models, and an ordinary backward through their results: equal to the unsharded model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jvp, vjp, vmap
from torch.utils._pytree import tree_leaves

from hwfsdp import UsageError
from oracles import ours, unsharded
from together import Together

Case = Callable[[nn.Module, Tensor], Any]


class TwoInputs(nn.Module):
    """A block with two inputs and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.left(x)) * self.right(z), x + self.right(x)


class Net(nn.Module):
    """A model with groups in groups."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.two, self.last = nn.Linear(4, 4), TwoInputs(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.two(torch.tanh(self.first(x)), x)
        return self.last(torch.tanh(first + second))


def build(shard: Callable[..., nn.Module], **options: Any) -> Net:
    torch.manual_seed(0)
    model = Net()
    for module in (model.two.left, model.two, model.last, model):
        shard(module, **options)
    return model


def mean(*tensors: Any) -> Tensor:
    """Return a loss of all tensors."""
    return sum((tensor.square().mean() for tensor in tensors), torch.zeros(()))


def in_place(model: nn.Module, x: Tensor) -> Tensor:
    """Change an output in place, and a view of it."""
    y = model(x)
    y += 1
    y.view(-1).mul_(2)
    return y


def dual(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    with forward_ad.dual_level():
        y, tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(x, x.detach() + 1)))
    return y, tangent


def twice(model: nn.Module, x: Tensor) -> Tensor:
    """Run two backwards through one graph: of the output, then of its tangent."""
    y, tangent = jvp(model, (x,), (x + 1,))
    mean(y).backward(retain_graph=True)
    return mean(tangent)


LOSSES: dict[str, Case] = {  # the cases that FSDP2 computes, and more
    "jvp: tangent with gradient": lambda m, x: mean(*jvp(m, (x.detach(),), (x.requires_grad_() * 2,))),
    "jvp: two inputs": lambda m, x: mean(*jvp(lambda a, b: m(a) * m(b), (x, x + 1), (x + 1, x))),
    "jvp of jvp": lambda m, x: mean(*jvp(lambda x: jvp(m, (x,), (x + 1,))[1], (x,), (x + 2,))),
    "jvp: in place": lambda m, x: mean(*jvp(functools.partial(in_place, m), (x,), (x + 1,))),
    "jvp: two backwards": twice,
    "vmap: input with gradient": lambda m, x: mean(vmap(m)(x.requires_grad_())),
    "vmap of jvp": lambda m, x: mean(*vmap(lambda x: jvp(m, (x,), (x + 1,)))(x)),
    "vjp: output": lambda m, x: mean(vjp(m, x)[0]),
    "grad_and_value: value": lambda m, x: grad_and_value(lambda x: mean(m(x)))(x)[1],
    "grad: auxiliary output": lambda m, x: mean(grad(lambda x: ((y := m(x)).sum(), y), has_aux=True)(x)[1]),
    "grad without graph": lambda m, x: mean(m(torch.no_grad()(grad(lambda x: mean(m(x))))(x) + x)),
    "functional_call": lambda m, x: mean(*jvp(lambda x: functional_call(m, {}, (x,)), (x,), (x + 1,))),
    "dual tensors": lambda m, x: mean(*dual(m, x)),
}
VALUES: dict[str, Case] = {
    "vjp": lambda m, x: vjp(m, x)[1](torch.ones(4, 4)),
    "jacfwd": lambda m, x: jacfwd(m)(x),
    "hessian": lambda m, x: hessian(lambda x: mean(m(x)))(x[0]),
    "vmap of grad": lambda m, x: vmap(grad(lambda x: mean(m(x))))(x),
    "grad of jvp": lambda m, x: grad(lambda x: mean(jvp(m, (x,), (x + 1,))[1]))(x),
}


def gradients(model: nn.Module, case: Case) -> list[Tensor | None]:
    """Return the gradients of two steps with the loss of the case. The second one shows leftovers of the first one."""
    found = []
    for seed in range(2):
        torch.manual_seed(seed)
        x = torch.randn(4, 4)
        case(model, x).backward()
        found += [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in model.parameters()] + [x.grad]
        model.zero_grad()
    return found


def values(model: nn.Module, case: Case) -> list[Tensor | None]:
    """Return the results of the case, then the gradients of an ordinary step."""
    torch.manual_seed(0)
    return tree_leaves(case(model, torch.randn(4, 4))) + gradients(model, lambda model, x: mean(model(x)))


def wrong(
    evaluate: Callable[[nn.Module, Case], list[Any]], cases: dict[str, Case], reshard: Any
) -> list[str]:
    """List the cases in which a sharded model differs from the unsharded one."""
    found = []
    for name, case in cases.items():
        plain = evaluate(build(unsharded), case)
        try:
            torch.testing.assert_close(evaluate(build(ours, reshard_after_forward=reshard), case), plain)
        except Exception as error:
            found.append(f"{name}: {error}")
    return found


two = Together(2)
two.add("losses", functools.partial(wrong, gradients, LOSSES, None), [])
two.add("values", functools.partial(wrong, values, VALUES, None), [])
for reshard in (True, False, 1):  # fewer cases, because each takes time
    few = {name: LOSSES[name] for name in ("jvp: tangent with gradient", "vmap of jvp")}
    two.add(f"losses, {reshard=}", functools.partial(wrong, gradients, few, reshard), [])


@two.finds([False])
def parameters_are_freed_when_the_backward_of_their_module_is_over() -> list[bool]:
    model = build(ours)
    last, first = model.last._state().groups[0], model.two.left._state()
    whole, pre_backward = [], first.pre_backward

    def note() -> None:
        whole.append(last.is_unsharded)
        pre_backward()

    first.pre_backward = note
    mean(jvp(model, (torch.randn(4, 4),), (torch.ones(4, 4),))[0]).backward()
    return whole


@two.finds(True)
def a_transform_over_parameters_is_refused() -> bool:
    model = build(ours)
    for _ in range(2):
        params = dict(model.named_parameters())
        with pytest.raises(UsageError, match="'first.weight'.*functional_call"):
            grad(lambda params: mean(functional_call(model, params, torch.randn(4, 4))))(params)
    return True


test_on_two_ranks = two.test()
