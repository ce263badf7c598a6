"""Training goes on after a failure: exceptions, backwards that are not the last, early calls."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import broken
import pytest
import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel, parallelize_module

from hwfsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    StateError,
    UsageError,
    core,
    explain,
    fully_shard,
    launch,
    record,
)
from hwfsdp.features.schedule import checked_state
from oracles import cpu_mesh, grid, other_gradients, ours
from together import Together


def build(shard: Callable[..., Any] = fully_shard) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    for layer in model:
        shard(layer)
    return shard(model)


def run(model: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    model(torch.randn(4, 8)).square().mean().backward()


two = Together(2)
two.add(
    "training_goes_on_in_every_way_after_an_exception",
    functools.partial(broken.complaints, [*broken.few_cases(), *broken.WAYS], ours),
    {},
)


@pytest.mark.long
def test_iterations_after_exceptions_are_right_with_whole_or_smaller_shards_replicas_offloading() -> None:
    def on_a_rank() -> list[dict[str, str]]:
        options: list[dict[str, Any]] = [
            {"reshard_after_forward": False},
            {"reshard_after_forward": 2},
            {"mesh": grid((2, 2))},
            {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        ]
        return [broken.complaints(broken.few_cases(), fully_shard, **chosen) for chosen in options]

    assert launch(on_a_rank, 4, timeout=400) == [[{}] * 4] * 4


@two.finds(True)
def a_root_of_the_core_refuses_modules_of_the_package() -> bool:
    model = nn.Sequential(nn.Linear(8, 8))
    fully_shard(model[0])
    core.fully_shard(model)
    with pytest.raises(StateError, match="forward of Sequential: expected one fully_shard"):
        run(model, 0)
    return True


@two.finds(["2", "1", "0"])
def a_root_without_parameters_of_its_own_gathers_the_given_modules() -> list[str]:
    model = build()
    model.set_modules_to_forward_prefetch([model[2], model[1]])
    with record() as log:
        run(model, 0)
    return [e.owner for e in log.select("all_gather")][:3]


def test_a_manual_unshard_leaves_no_buffer_and_checks_the_same_as_a_forward() -> None:
    def unshard() -> int:
        with torch.device("meta"):
            on_meta = fully_shard(nn.Linear(4, 4))
        with pytest.raises(StateError, match="meta device"):
            on_meta.unshard()
        model = fully_shard(nn.Linear(64, 64))
        seen = []

        class Counting(type(model._state().groups[0].transport.gather)):
            def allocate(self, size: Any, **kind: Any) -> Tensor:
                flat: Tensor = super().allocate(size, **kind)
                seen.append(weakref.ref(flat.untyped_storage()))
                return flat

        model.set_custom_all_gather(Counting())
        model.unshard()
        assert len(seen) == 1
        return sum(ref() is not None for ref in seen)

    # one rank: no thread of gloo holds the buffer a moment longer
    assert launch(unshard, 1, timeout=60) == [0]


@two.finds(["DTensor", "Parameter"])
def ignored_parameters_come_in_any_collection_and_policies_of_torch_are_taken() -> list[str]:
    module, policies = nn.Linear(4, 4), (fsdp.MixedPrecisionPolicy(), fsdp.OffloadPolicy())
    fully_shard(module, ignored_params=[module.bias], mp_policy=policies[0], offload_policy=policies[1])
    return [type(p).__name__ for p in (module.weight, module.bias)]


# --- Narrow places -----------------------------------------------------------------------------------------


def cut_twice(*layers: nn.Module, **plan: Any) -> nn.Module:
    """Shard over two ranks by tensor parallelism, and over one by fully_shard."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(*layers)
    parallelize_module(model, mesh["tp"], plan)
    return fully_shard(model, mesh=mesh["dp"])


@two.finds(4.0)
def gradients_that_are_not_reduced_yet_outlive_a_change_of_dtype() -> float:
    model: Any = fully_shard(nn.Linear(4, 4, bias=False))
    for reduces, dtype in ((False, torch.float32), (True, torch.bfloat16)):
        model.to(dtype).set_requires_gradient_sync(reduces)
        model(torch.ones(2, 4, dtype=dtype)).sum().backward()
    return float(model.weight.grad.full_tensor()[0, 0])


@two.finds(0)
def a_reset_after_an_exception_runs_no_collective_under_tensor_parallelism() -> int:
    plan = {"0": SequenceParallel(), "1": ColwiseParallel()}
    model = cut_twice(nn.LayerNorm(4), nn.Linear(4, 4), **plan)
    model.set_requires_gradient_sync(False)
    model(torch.randn(2, 2, 4)).sum().backward()  # leaves partial gradients
    with record() as log:
        model.reset_iter_state()
    return len(log.collectives())


@two.finds((0, 3), (3, 6))
def the_table_of_a_parameter_cut_twice_has_rows_of_the_whole() -> tuple[int, int]:
    return explain(cut_twice(nn.Linear(4, 6, bias=False), **{"0": ColwiseParallel()})).rows[0].rows


@two.finds(None)
def a_shard_of_another_dimension_cannot_be_assigned() -> None:
    model = fully_shard(nn.Linear(4, 4, bias=False))
    other = distribute_tensor(torch.ones(4, 4), cpu_mesh(), [Shard(1)])
    with pytest.raises(UsageError, match="dim=0.*dim=1"):
        model.load_state_dict({"weight": other}, assign=True)


# --- Backwards after a broken one ------------------------------------------------------------------------------


class Keeps(nn.Module):
    """Two layers in sequence. It keeps a tensor between them. A backward may be broken there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.breaks = nn.Linear(8, 8), nn.Linear(8, 8), False

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.first(x).tanh()
        self.kept.register_hook(lambda grad: 1 / 0 if self.breaks else None)
        return self.last(self.kept).view(-1, 2)


def broken_backward(model: Any, again: Callable[[Any, Tensor], Any]) -> None:
    """Break a backward, and clear the gradients. Then run `again`, with the output of the model."""
    torch.manual_seed(0)
    output = model(torch.randn(4, 8))
    output += 1.0
    block = next(module for module in model.modules() if isinstance(module, Keeps))
    block.breaks = True
    with pytest.raises(ZeroDivisionError):
        output.sum().backward(retain_graph=True)
    block.breaks = False
    model.zero_grad()
    again(model, output)


def without_sync(model: Any, micro_batches: int) -> None:
    """Accumulate without reductions, forget this, break a backward, and take a step as usual."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
        for seed in range(micro_batches):
            run(model, seed)
        model.reset_iter_state()
    broken_backward(model, lambda model, output: None)
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(True)
    run(model, 2)


AGAIN: dict[str, Callable[[Any], Any]] = {
    "the same backward": lambda model: broken_backward(model, lambda _, output: output.sum().backward()),
    "a backward of a kept tensor": lambda model: broken_backward(
        model, lambda model, _: model[1].kept.square().sum().backward()
    ),
    "reset while gradients accumulated": lambda model: without_sync(model, 1),
    "reset": lambda model: without_sync(model, 0),
}


def wrong_again(name: str, layers: bool) -> list[str]:
    """Return the gradients that differ from a plain model's. `layers`: each layer is a group, too."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), Keeps(), nn.Flatten(0))
    model = copy.deepcopy(plain)
    for module in [*model.modules()][::-1]:
        if isinstance(module, Keeps) or (layers and isinstance(module, nn.Linear)):
            fully_shard(module)
    fully_shard(model)
    for each in (plain, model):
        AGAIN[name](each)
    return other_gradients(model, plain)


for _name, _layers in itertools.product(AGAIN, (False, True)):
    two.add(f"{_name}, {_layers}", functools.partial(wrong_again, _name, _layers), [])


@two.finds("setStorage")
def an_error_about_the_memory_of_another_module_stays_torchs() -> str:
    model, other = build(), nn.Linear(8, 8)
    run(model, 0)
    loss = (other.weight @ torch.ones(8, 8, requires_grad=True)).sum()
    other.weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError) as caught:
        loss.backward()
    return str(caught.value).partition(":")[0]


@two.finds([True] * 3)
def a_model_is_freed_although_a_backward_broke_while_reductions_were_in_flight() -> list[bool]:
    freed = []
    for broken_at in range(3):
        model = build()
        run(model, 0)
        model[broken_at].register_full_backward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(model, 1)
        kept = weakref.ref(model)
        del model
        gc.collect()
        freed.append(kept() is None)
    return freed


@two.finds([0, 0])
def a_forward_that_could_not_begin_is_not_in_the_order_of_forwards() -> list[int]:
    with torch.device("meta"):
        module: Any = fully_shard(nn.Linear(4, 4))
    with pytest.raises(StateError, match="meta device"):
        module(torch.ones(1, 4))
    state = checked_state(module, "")
    return [len(state.comm_ctx.post_forward_order), len(state.running)]


test_on_two_ranks = two.test()
