"""Parts that users write for FSDP2, used with torch's FSDP2 and with hwfsdp: collectives, extensions, attributes of groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import hwfsdp
from hwfsdp.compat import all_gather_single, reduce_scatter_single
from hwfsdp.core.private_torch import local_of
from oracles import Library, ours, theirs
from together import Together

two = Together(2)


class OneBuffer:
    """An all-gather that allocates once, and hands out the same buffer each time."""

    def __init__(self) -> None:
        self.buffer = torch.empty(0)

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        numel = torch.Size(size).numel()
        if self.buffer.numel() < numel:
            self.buffer = torch.empty(numel, dtype=dtype, device=device)
        return self.buffer[:numel]

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        return all_gather_single(output_tensor, input_tensor, group, async_op)


class Doubled:
    """A reduce-scatter that works on its result, and takes no `async_op`."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(tuple(size), dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any) -> None:
        reduce_scatter_single(output_tensor, input_tensor, op, group, False)
        output_tensor.mul_(2)


def trained(library: Library, change: Callable[[Any], None]) -> list[Tensor]:
    """Change a sharded model, and run two steps. Return losses and gradients."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    for layer in model:
        library(layer)
    library(model)
    change(model)
    found = []
    for step in range(2):
        loss = model(torch.full((2, 4), 1.0 + step)).square().sum()
        loss.backward()
        found.append(loss.detach())
    return [*found, *(p.grad.full_tensor() for p in model.parameters())]


def same(change: Callable[[Any], None]) -> bool:
    return all(map(torch.equal, trained(ours, change), trained(theirs, change)))


def gather_into_one_buffer(model: Any) -> None:
    shared = OneBuffer()
    for layer in model:
        layer.set_custom_all_gather(shared)


def double_gradients(model: Any) -> None:
    model[1].set_custom_reduce_scatter(Doubled())


def double_gradients_by_an_attribute(model: Any) -> None:
    model[1]._get_fsdp_state()._fsdp_param_group._reduce_scatter_comm = Doubled()


def divide_by_an_attribute(model: Any) -> None:
    model[1]._get_fsdp_state()._fsdp_param_group.gradient_divide_factor = 4.0


def divide_as_usual_again(model: Any) -> None:
    model[1].set_gradient_divide_factor(4.0)
    model[1].set_gradient_divide_factor(None)


def gather_halves_by_methods_of_the_local_tensor(model: Any) -> None:
    """Methods that a user gives to a local tensor after sharding: half the weight travels."""
    local = local_of(model[0].weight)
    local.fsdp_pre_all_gather = lambda mesh: ((local * 0.5,), None)

    def after(outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
        return None if out is not None else (outputs[0], outputs)

    local.fsdp_post_all_gather = after


def divide_by_a_method(model: Any) -> None:
    model[1].set_gradient_divide_factor(4.0)


for _change in (
    gather_into_one_buffer,
    double_gradients,
    double_gradients_by_an_attribute,
    divide_as_usual_again,
    gather_halves_by_methods_of_the_local_tensor,
):
    two.add(f"as FSDP2: {_change.__name__}", lambda _change=_change: same(_change), True)


def is_autograd_off_after_gathers() -> list[bool]:
    """Look at the grad mode in which an extension's tensors are filled, in a forward and in its backward."""
    model: Any = ours(nn.Sequential(nn.Linear(4, 4, bias=False)))
    local, seen = local_of(model[0].weight), []

    def after(outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
        seen.append(not torch.is_grad_enabled())
        return None if out is not None else (outputs[0], outputs)

    local.fsdp_pre_all_gather, local.fsdp_post_all_gather = (lambda mesh: ((local,), None)), after
    model.set_reshard_after_forward(True)
    model(torch.ones(1, 4, requires_grad=True)).sum().backward()
    return seen


two.add(
    "an extension runs without autograd in forward and backward", is_autograd_off_after_gathers, [True, True]
)


@dataclass
class Offload(hwfsdp.CPUOffloadPolicy):
    """A user's policy with a field of its own, as torch's class allows it."""

    extra: int = 0


@two.finds([False, 7])
def policies_can_be_changed_and_extended() -> list[Any]:
    policy = Offload(extra=7)
    policy.pin_memory = False
    return [policy.pin_memory, policy.extra]


@two.finds([True, True])
def zero_grad_of_one_module_of_a_list_leaves_the_gradients_of_the_others() -> list[bool]:
    found = []
    for library in (ours, theirs):
        model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        library([model[0], model[1]])  # type: ignore[arg-type]
        library(model)
        model(torch.ones(1, 2)).sum().backward()
        model[0].zero_grad()
        found.append(model[0].weight.grad is None and model[1].weight.grad is not None)
    return found


two.add(
    "an attribute of torch's group sets what the method sets",
    lambda: all(map(torch.equal, trained(ours, divide_by_an_attribute), trained(ours, divide_by_a_method))),
    True,
)
test_on_two_ranks = two.test()
