"""What programs attach to parameters reaches the sharded and the whole one; what they change while parameters are whole is kept, or said.

The oracle is an unsharded model on the batches of both ranks, or the same change on a model that is not sharded.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from hwfsdp import MixedPrecisionPolicy, StateError, UsageError, fully_shard
from hwfsdp.errors import WrongTypeError
from oracles import cpu_mesh, other_gradients, ours, unsharded
from test_advice import Messages, caught, other_than
from test_custom_collectives_and_extensions import Kept
from test_entries import said
from together import Together

two = Together(2)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def linear(**options: Any) -> Any:
    torch.manual_seed(0)
    return nn.Linear(6, 5, bias=False, **options)


def whole(module: nn.Module) -> Tensor:
    return module.weight.full_tensor()


# --- Attributes and classes --------------------------------------------------------------------------------


class Scaled(nn.Linear):
    """A module whose forward reads an attribute of its parameter."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.weight.scale


@two.finds([("expert", True)] * 2)
def attributes_are_on_the_shard_and_in_the_forward() -> list[Any]:
    found = []
    for options in ({"reshard_after_forward": False}, {"shard_placement_fn": lambda param: Shard(1)}):
        module, x = Scaled(6, 4, bias=False), torch.ones(2, 6)
        module.weight.scale, module.weight.tag = 2.0, "expert"
        shard = ours(module, **options).weight
        module(x)
        shard.scale = 3.0  # after the first gather
        expected = nn.functional.linear(x, shard.full_tensor()) * 3
        found.append((shard.tag, torch.allclose(module(x), expected)))
    return found


@two.finds(["expert", "expert", "expert", "late"])
def attributes_survive_conversions_and_assignment() -> list[str]:
    with torch.device("meta"):
        module = linear()
    module.weight.tag = "expert"
    fully_shard(module, mesh=cpu_mesh())
    module.weight.later = "late"
    found = [module.to_empty(device="cpu").weight.tag, module.to(torch.float64).weight.tag]
    other = fully_shard(linear(dtype=torch.float64), mesh=cpu_mesh())
    module.load_state_dict(other.state_dict(), assign=True)
    return [*found, module.weight.tag, module.weight.later]


@two.finds((Kept, "expert"))
def attributes_are_on_a_whole_parameter_of_another_class() -> tuple[type, str]:
    module = linear()
    module.weight = nn.Parameter(Kept(torch.ones(5, 6)))
    module.weight.tag = "expert"
    ours(module, reshard_after_forward=False)(torch.ones(2, 6))
    return type(module.weight), module.weight.tag


class Expert(nn.Parameter):
    """A parameter of the program's own class."""


class Wants(nn.Module):
    """A module that needs the class in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = Expert(torch.ones(4, 4)), Expert(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.weight, Expert)
        return x @ self.weight + self.other


@two.finds([])
def a_class_of_parameters_is_there_in_the_forward_and_a_warning_says_that_the_shard_is_a_dtensor() -> (
    Messages
):
    with caught() as messages:
        model = ours(Wants())
        model(torch.ones(1, 4)).sum().backward()
    return other_than(messages, ("'weight'", "Expert", "isinstance"))


# --- Gradient hooks ----------------------------------------------------------------------------------------


def gradient(
    hook: Callable[[nn.Parameter], Any], before: bool, policy: Any = MixedPrecisionPolicy()
) -> Tensor:
    """Return the gradient of a sharded model on which `hook` registers a hook, before or after sharding."""
    module = linear()
    if before:
        hook(module.weight)
    fully_shard(module, mesh=cpu_mesh(), mp_policy=policy)
    if not before:
        hook(module.weight)
    rank = dist.get_rank() + 1.0
    module(torch.full((2, 6), rank)).sum().backward()
    return module.weight.grad.full_tensor()


def scale_rows(grad: Tensor) -> Tensor:
    return grad * torch.arange(5.0, dtype=grad.dtype).view(5, 1)


@two.finds([])
def a_hook_from_before_gets_whole_gradients_and_a_hook_from_after_gets_means() -> Messages:
    wrong = []
    for change, before, policy in (
        (scale_rows, True, BF16),
        (lambda g: g.clamp(max=2.5), False, MixedPrecisionPolicy()),
        (lambda g: g / g.norm(), False, MixedPrecisionPolicy()),
    ):
        got = gradient(lambda p: p.register_hook(change), before, policy)
        # the hook of an unsharded model gets the mean over both ranks
        expected = change(torch.full((5, 6), 3.0))
        wrong += [] if torch.allclose(got, expected) else [f"{before} {policy}: {got} {expected}"]
    return wrong


@two.finds([("DTensor", 1), ("DTensor", 1)])
def a_post_accumulate_hook_gets_the_sharded_parameter_once() -> list[tuple[str, int]]:
    found = []
    for before in (True, False):
        seen: list[str] = []

        def note(param: Tensor, seen: list[str] = seen) -> None:
            seen.append(type(param).__name__)
            assert isinstance(param.grad, DTensor)

        gradient(lambda p: p.register_post_accumulate_grad_hook(note), before)
        found.append((*set(seen), len(seen)))
    return found


@two.finds(True)
def a_handle_from_before_still_removes_its_hook() -> bool:
    module = linear()
    handle = module.weight.register_hook(lambda g: g * 10)
    fully_shard(module, mesh=cpu_mesh())
    for _ in range(2):
        module(torch.ones(1, 6)).sum().backward()
        handle.remove()
    return torch.equal(module.weight.grad.full_tensor(), torch.full((5, 6), 11.0))


@two.finds([])
def a_hook_that_returns_a_plain_tensor_is_refused_by_name() -> list[str]:
    plain = functools.partial(gradient, lambda p: p.register_hook(lambda g: torch.zeros(5, 6)), before=False)
    return said(WrongTypeError, plain, "'weight'")


# --- Writes while whole ------------------------------------------------------------------------------------

WRITES: dict[str, Callable[[Tensor], Any]] = {
    "a part": lambda weight: weight[1:3].mul_(2.0),
    "copy": lambda weight: weight.copy_(torch.arange(30.0).view(5, 6)),
    "through detach": lambda weight: weight.detach().zero_(),
    "foreach": lambda weight: torch._foreach_mul_([weight], 3.0),
    "data": lambda weight: weight.data[:2].mul_(2.0),
    "another data": lambda weight: setattr(weight, "data", weight.data * 2),
    "parameters from a vector": lambda weight: nn.utils.vector_to_parameters(torch.ones(30), [weight]),
}


def forwards(module: Any) -> None:
    module(torch.ones(2, 6))


def unshards(module: Any) -> None:
    module.unshard()


HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "columns": {"shard_placement_fn": lambda param: Shard(1)},
    "bf16": {"policy": {"param_dtype": torch.bfloat16}},
}


@two.finds([])
def writes_to_a_whole_parameter_reach_the_shard_and_nothing_else_changes() -> Messages:
    wrong = []
    for how, options in HOW.items():
        for (name, write), make_whole in zip(WRITES.items(), itertools.cycle((forwards, unshards))):
            module, expected = ours(linear(), **options), linear().weight.detach().clone()
            before = expected.clone()
            make_whole(module)
            with torch.no_grad():
                write(module.weight)
                write(expected)
            module.reshard()
            if how == "bf16":  # only written values are rounded
                expected = torch.where(expected == before, before, write_in_bf16(write, before))
            if not torch.equal(whole(module), expected):
                wrong.append(f"{how}, {name}: {whole(module)} {expected}")
    return wrong


@torch.no_grad()
def write_in_bf16(write: Callable[[Tensor], Any], before: Tensor) -> Tensor:
    rounded = before.to(torch.bfloat16)
    write(rounded)
    return rounded.float()


@two.finds([])
def writes_before_an_optimizer_step_are_kept_and_later_ones_are_said_to_be_lost() -> Messages:
    module, plain = ours(linear()), linear()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (module, plain)]
    forwards(module)
    with torch.no_grad():
        module.weight.fill_(1.0)
        plain.weight.fill_(1.0)
    for shard in (optimizers[0].param_groups[0]["params"][0], plain.weight):
        shard.grad = torch.ones_like(shard)
    for optimizer in optimizers:
        optimizer.step()
    with torch.no_grad(), caught() as messages:
        module.weight.fill_(7.0)
        module.reshard()
    wrong = other_than(messages, ("'weight'", "optimizer step", "lost", "reshard()"))
    return wrong if torch.equal(whole(module), plain.weight) else [*wrong, str(whole(module))]


class Logs(nn.Linear):
    """A module that gives its weight to numpy in each forward. It writes there in the first one."""

    writes = True

    def forward(self, x: Tensor) -> Tensor:
        values = self.weight.detach().numpy()
        if self.writes:
            values[1] = 1.0
        self.writes = False
        return super().forward(x)


def trained(module: Any, change: Callable[[Any], Any]) -> list[Tensor]:
    """Return the parameters after steps before and after a change."""
    for _ in range(2):
        optimizer = torch.optim.SGD(module.parameters(), 0.5)
        for _ in range(2):
            module(torch.ones(2, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        change(module)
    return [getattr(p, "full_tensor", lambda p=p: p)() for p in module.parameters()]


@two.finds([])
def memory_that_numpy_has_is_not_freed_and_a_warning_says_so() -> Messages:
    torch.manual_seed(0)
    expected = trained(Logs(6, 5), lambda module: None)
    torch.manual_seed(0)
    with caught() as messages:
        found = trained(ours(Logs(6, 5)), lambda module: None)
    wrong = other_than(messages, ("'weight'", "keeps the memory", "numpy", "clone()"))
    return wrong if all(map(torch.allclose, found, expected)) else [*wrong, f"{found} {expected}"]


def swap(module: Any) -> None:
    """Swap a parameter with a copy of it that is half as large."""
    torch.utils.swap_tensors(module[1].weight, nn.Parameter(module[1].weight.detach() / 2))


CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "to bf16 and back": lambda module: module[1].to(torch.bfloat16).float(),
    "to_empty": lambda module: nn.init.ones_(module[1].to_empty(device="cpu").weight),
    "another function": lambda module: module[1]._apply(lambda tensor: tensor * 2),
    "swap": swap,
}


@two.finds([])
def a_module_in_a_group_may_be_converted_after_the_first_forward() -> list[str]:
    wrong = []
    for name, change in CONVERSIONS.items():
        results = []
        for way in (ours, unsharded):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 5, bias=False))  # 5 rows are padded
            results.append(trained(way(model), change))
        if not all(map(torch.allclose, *results)):
            wrong.append(f"{name}: {results}")
    return wrong


@two.finds((nn.Parameter, "data of parameter 'weight': expected a tensor of shape (5, 6); got (6,)."))
def a_whole_parameter_is_copied_as_a_plain_one_and_keeps_its_shape() -> tuple[type, str]:
    module = ours(linear())
    module.unshard()
    with pytest.raises(UsageError) as caught:
        module.weight.data = torch.ones(6)
    return type(copy.deepcopy(module.weight)), str(caught.value).split(" Change")[0]


@two.finds([False] * 3)
def requires_grad_that_is_set_while_whole_stays() -> list[bool]:
    found = []
    for context in (torch.inference_mode(), torch.enable_grad()):
        module = ours(linear())
        with context:
            forwards(module)
        module.requires_grad_(False)
        module.reshard()
        found.append(module.weight.requires_grad)
        forwards(module)
    return [*found, module.weight.requires_grad]


# --- Parameters that are replaced or deleted ---------------------------------------------------------------


@two.finds([])
def functional_call_may_get_the_models_own_parameters_in_each_step() -> list[str]:
    wrong = []
    for reshard in (True, False):
        plain = nn.Sequential(linear(), nn.Linear(5, 6))
        model = copy.deepcopy(plain)
        for module in (model[0], model):
            ours(module, reshard_after_forward=reshard)
        for each in (plain, model):
            for _ in range(2):
                params = dict(each.named_parameters())
                torch.func.functional_call(each, params, torch.ones(2, 6)).sum().backward()
        wrong += other_gradients(model, plain)
    return wrong


def assign(module: nn.Module) -> None:
    module.weight = nn.Parameter(torch.zeros(5, 6))


def delete(module: nn.Module) -> None:
    del module.weight


def set_to_none(module: nn.Module) -> None:
    module.weight = None


@two.finds([])
def a_parameter_replaced_or_deleted_after_the_first_forward_is_refused_by_name() -> Messages:
    wrong = []
    for change, got in ((assign, "(5, 6)"), (delete, "nothing"), (set_to_none, "nothing")):
        module = ours(linear(), reshard_after_forward=True)
        forwards(module)
        change(module)
        wrong += said(StateError, lambda: forwards(module), "'weight'", "Linear.weight", got, "copy_")
    return wrong


@two.finds([])
def a_parameter_replaced_while_it_is_whole_comes_back_with_a_warning() -> Messages:
    wrong = []
    for change in (assign, set_to_none):
        module = ours(linear())
        before = whole(module)
        module.unshard()
        with caught() as messages:
            change(module)
            module.reshard()
        wrong += other_than(messages, ("'weight'", "Linear.weight", "lost", "copy_"))
        wrong += [] if torch.equal(whole(module), before) else [f"{whole(module)}"]
    return wrong


# --- Embeddings that shorten rows --------------------------------------------------------------------------


@two.finds([])
def max_norm_is_warned_of_by_name_and_takes_effect_on_the_ranks_own_rows() -> Messages:
    model = nn.Sequential(nn.Embedding(4, 8, max_norm=1.0), nn.EmbeddingBag(4, 8), nn.Embedding(4, 8))
    with caught() as messages:
        ours(model[0])
        ours(model)
    model[0](torch.arange(4)).sum().backward()
    model[0].reshard()
    short = bool((whole(model[0]).norm(dim=1) < 1.001).all())
    return other_than(messages, ("'weight'", "Embedding", "max_norm=1.0")) + ([] if short else ["long"])


# --- Several changes in one iteration ------------------------------------------------------------------------


@two.finds([])
def data_that_was_only_read_does_not_undo_a_change_of_the_shard() -> Messages:
    module: Any = ours(linear())
    shard, before = module.weight, whole(module)
    with caught() as messages:
        module.unshard()
        assert module.weight.data.shape == (5, 6)
        with torch.no_grad():
            shard.sub_(1.0)
        module.reshard()
    return messages if torch.equal(whole(module), before - 1.0) else ["the change is lost"]


@two.finds([])
def a_conversion_of_a_whole_module_is_said_to_change_only_values() -> Messages:
    module: Any = ours(nn.Sequential(nn.Linear(4, 4, bias=False)))
    module.unshard()
    with caught() as messages:
        module[0].to(torch.bfloat16)
    module.reshard()
    module[0].to(torch.bfloat16)
    wrong = other_than(messages, ("'0.weight'", "stays torch.float32", "call reshard()"))
    return (
        wrong if module(torch.ones(1, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16 else ["not converted"]
    )


@two.finds(7.0)
def a_gather_that_was_refused_is_not_used_later() -> float:
    module: Any = ours(linear())
    with torch.no_grad():
        module(torch.ones(1, 6))
    shard = module.weight
    module.weight = nn.Parameter(torch.zeros(5, 6))
    with pytest.raises(StateError, match="sharded parameter"):
        module.unshard()
    module.weight = shard
    with torch.no_grad():
        shard.fill_(7.0)
    module.unshard()
    found = module.weight.detach().unique().item()
    module.reshard()
    return float(found)


# --- After an error ------------------------------------------------------------------------------------------


@two.finds([True, True])
def a_parameter_without_memory_refuses_reads_also_after_an_error() -> list[bool]:
    module: Any = ours(linear())
    module.unshard()
    whole_weight = module.weight
    module.reshard()
    refuses = []
    for place in ("core.param.allocate", "features.feature_group.watch"):
        with mock.patch(f"hwfsdp.{place}", side_effect=MemoryError), pytest.raises(MemoryError):
            module.unshard()
        module.reshard()
        with pytest.raises(StateError, match="freed"):
            whole_weight.sum()
        refuses.append(whole_weight.untyped_storage().nbytes() == 0)
    return refuses


test_on_two_ranks = two.test()
