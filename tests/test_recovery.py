"""What went wrong once does not go on being wrong: exceptions, backwards that are not the last, early calls."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import broken
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel, parallelize_module
from torch.utils.data import DataLoader

from hwfsdp import (
    CPUOffloadPolicy,
    FSDPCommContext,
    StateError,
    UsageError,
    explain,
    fully_shard,
    init_shards,
    launch,
    record,
)
from hwfsdp.collectives import DefaultReduceScatter
from oracles import cpu_mesh, ours, theirs


def build(shard: Callable[..., Any] = fully_shard) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    for layer in model:
        shard(layer)
    return shard(model)


def run(model: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    model(torch.randn(4, 8)).square().mean().backward()


def grads(model: nn.Module) -> list[Tensor]:
    return [p.grad.full_tensor() for p in model.parameters()]


def fail_under_the_root(model: nn.Module) -> None:
    handle = model[0].register_full_backward_hook(_raise)
    try:
        model(torch.randn(4, 8, requires_grad=True)).sum().backward()
    finally:
        handle.remove()


def _raise(*args: Any) -> None:
    raise KeyError("in a hook")


def fail_in_forward(model: nn.Module) -> None:
    handle = model[1].register_forward_pre_hook(_raise)
    try:
        model(torch.randn(4, 8))
    finally:
        handle.remove()


@pytest.mark.parametrize("fail", [fail_under_the_root, fail_in_forward])
def test_after_an_exception_and_a_reset_an_iteration_is_clean(fail: Callable[[nn.Module], None]) -> None:
    def recover() -> list[bool]:
        broken, whole = build(), build()
        run(broken, 0)
        with pytest.raises(KeyError):
            fail(broken)
        broken.reset_iter_state()
        broken.zero_grad()
        results = []
        for seed in (1, 2):
            run(broken, seed)
            run(whole, seed)
            results += [torch.equal(a, b) for a, b in zip(grads(broken), grads(whole), strict=True)]
        return results

    for results in launch(recover, 2, timeout=60):
        assert results == [True] * 12


def test_whatever_broke_the_next_iteration_is_that_of_an_unsharded_model() -> None:
    def on_a_rank() -> list[dict[str, Any]]:
        return [broken.complaints(broken.all_cases(), ours), broken.complaints_of_ways(ours)]

    for found in launch(on_a_rank, 2, timeout=240):
        assert found == [{}, {}]


def test_that_holds_for_parameters_that_stay_whole_or_in_part_for_replicas_and_offloading() -> None:
    def on_a_rank() -> dict[str, Any]:
        def shard(module: nn.Module, **options: Any) -> nn.Module:
            return fully_shard(module, **{"mesh": cpu_mesh(), **options})

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        options: dict[str, dict[str, Any]] = {
            "whole": {"reshard_after_forward": False},
            "smaller": {"reshard_after_forward": 2},
            "hybrid": {"mesh": mesh},
            "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        }
        cases = broken.few_cases()
        found = {name: broken.complaints(cases, shard, **chosen) for name, chosen in options.items()}
        return {option: wrong for option, wrong in found.items() if wrong}

    assert launch(on_a_rank, 4, timeout=400) == [{}] * 4


def test_only_the_root_resets() -> None:
    def reset_a_part() -> None:
        model = build()
        run(model, 0)
        with pytest.raises(StateError, match="root"):
            model[0].reset_iter_state()

    launch(reset_a_part, 1, timeout=60)


def test_gradients_are_there_after_a_backward_that_is_not_the_last_as_in_fsdp2() -> None:
    def compare() -> list[bool]:
        ours, torchs = build(), build(theirs)
        results = []
        for model in (ours, torchs):
            model.set_is_last_backward(False)
        for seed in range(2):
            run(ours, seed)
            run(torchs, seed)
            results += [torch.equal(a, b) for a, b in zip(grads(ours), grads(torchs), strict=True)]
        return results

    for results in launch(compare, 2, timeout=60):
        assert results == [True] * 12


def test_a_rank_may_start_processes_of_its_own() -> None:
    def load() -> list[float]:
        loader = DataLoader([torch.ones(2), torch.zeros(2)], num_workers=1, multiprocessing_context="fork")
        return [float(batch.sum()) for batch in loader]

    assert launch(load, 1, timeout=60) == [[2.0, 0.0]]


def test_a_root_without_parameters_of_its_own_gathers_what_it_was_told_to() -> None:
    def first_gathers() -> list[str]:
        model = build()
        model.set_modules_to_forward_prefetch([model[2], model[1]])
        with record() as log:
            model(torch.randn(4, 8))
        return [e.owner for e in log.select("all_gather")][:3]

    assert launch(first_gathers, 2, timeout=60)[0] == ["2", "1", "0"]


def test_a_manual_unshard_leaves_no_buffer_and_checks_what_a_forward_would() -> None:
    def unshard() -> int:
        with torch.device("meta"):
            on_meta = fully_shard(nn.Linear(4, 4))
        with pytest.raises(StateError, match="meta device"):
            on_meta.unshard()
        model = fully_shard(nn.Linear(64, 64))
        seen = []

        class Counting(type(model._state().group.channel.all_gather)):
            def allocate(self, size: Any, **kind: Any) -> Tensor:
                flat: Tensor = super().allocate(size, **kind)
                seen.append(weakref.ref(flat.untyped_storage()))
                return flat

        model.set_custom_all_gather(Counting())
        model.unshard()
        assert len(seen) == 1
        return sum(ref() is not None for ref in seen)

    assert launch(unshard, 1, timeout=60) == [
        0
    ]  # one rank: no thread of gloo holds the buffer a moment longer


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("mesh", "cpu"),
        ("mp_policy", None),
        ("reshard_after_forward", "no"),
        ("comm_ctx", 3),
    ],
)
def test_nonsense_is_refused_before_anything_changes(argument: str, value: object) -> None:
    def refuse() -> None:
        module = nn.Linear(4, 4)
        before = module.weight
        with pytest.raises(UsageError, match=argument):
            fully_shard(module, **{"mesh": cpu_mesh(), argument: value})
        assert type(module) is nn.Linear
        assert module.weight is before

    launch(refuse, 1, timeout=60)


def test_ignored_parameters_come_in_any_collection_and_policies_of_torch_are_taken() -> None:
    def shard() -> list[str]:
        from torch.distributed import fsdp

        module = nn.Linear(4, 4)
        fully_shard(
            module,
            ignored_params=[module.bias],
            mp_policy=fsdp.MixedPrecisionPolicy(),
            offload_policy=fsdp.OffloadPolicy(),
            comm_ctx=FSDPCommContext("cpu"),
        )
        return [type(p).__name__ for p in (module.weight, module.bias)]

    assert launch(shard, 1, timeout=60) == [["DTensor", "Parameter"]]


# --- Narrow places -----------------------------------------------------------------------------------------


class Chunked(nn.Module):
    """Norm and head are one group; whoever trains it calls the head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.norm, self.head = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.trunk(x))


def test_two_calls_of_a_head_with_a_backward_each_give_the_gradients_of_both() -> None:
    def on_a_rank() -> bool:
        torch.manual_seed(1)
        x, found = torch.randn(2, 4), []
        for sharded in (True, False):
            model = Chunked()
            if sharded:
                fully_shard([model.norm, model.head])
                fully_shard(model)
            hidden = model(x).detach()
            chunks = [chunk.clone().requires_grad_() for chunk in hidden.split(1)]
            losses = [model.head(chunk).square().sum() for chunk in chunks]
            for loss in losses:
                loss.backward()
            grad = (
                model.head.weight.grad if not sharded else dict(model.named_parameters())["head.weight"].grad
            )
            found.append(grad.full_tensor() if sharded else grad)
        return torch.allclose(*found)

    assert launch(on_a_rank, 2, timeout=60) == [True, True]


def test_gradients_of_a_head_on_a_frozen_trunk_that_no_backward_reduced_are_warned_of() -> None:
    def on_a_rank() -> list[str]:
        model = Chunked()
        model.trunk.requires_grad_(False)
        model.norm.requires_grad_(False)
        fully_shard([model.norm, model.head])
        fully_shard(model)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        model.head(model(torch.ones(2, 4))).sum().backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        return [str(w.message) for w in caught if "norm, head" in str(w.message)]

    for messages in launch(on_a_rank, 2, timeout=60):
        assert len(messages) == 1 and "synchronized" in messages[0]


def test_a_reset_after_an_exception_runs_no_collective_under_tensor_parallelism() -> None:
    def on_a_rank() -> int:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
        parallelize_module(model, mesh["tp"], {"0": SequenceParallel(), "1": ColwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        model.set_requires_gradient_sync(False)
        model(torch.randn(2, 2, 4)).sum().backward()  # leaves partial gradients
        with record() as log:
            model.reset_iter_state()
        return len(log.collectives())

    assert launch(on_a_rank, 2, timeout=60) == [0, 0]


def test_a_shard_of_another_dimension_cannot_be_assigned() -> None:
    def on_a_rank() -> str:
        model = nn.Linear(4, 4, bias=False)
        fully_shard(model)
        other = distribute_tensor(torch.ones(4, 4), cpu_mesh(), [Shard(1)])
        with pytest.raises(UsageError) as caught:
            model.load_state_dict({"weight": other}, assign=True)
        return str(caught.value)

    for message in launch(on_a_rank, 2, timeout=60):
        assert "dim=0" in message and "dim=1" in message


def test_half_of_an_extension_is_refused_before_anything_is_sharded() -> None:
    class Half(Tensor):
        def fsdp_pre_all_gather(self, mesh: Any) -> Any:
            raise AssertionError("not called")

    def on_a_rank() -> bool:
        model = nn.Linear(4, 4)
        model.bias = nn.Parameter(torch.ones(4).as_subclass(Half))
        with pytest.raises(UsageError, match="fsdp_post_all_gather"):
            fully_shard(model)
        return type(model) is nn.Linear and not isinstance(model.weight, DTensor)

    assert launch(on_a_rank, 2, timeout=60) == [True, True]


def test_buffers_of_reductions_are_bounded_under_hybrid_sharding_too() -> None:
    """By counting those alive when the backward comes to an end."""

    def alive_at_the_end() -> int:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        buffers: list[weakref.ref[Tensor]] = []

        class Counting(DefaultReduceScatter):
            def allocate(self, size: Any, **kind: Any) -> Tensor:
                buffer = super().allocate(size, **kind)
                if size == (64 * 64,):
                    buffers.append(weakref.ref(buffer))
                return buffer

        model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(6)])
        for layer in model:
            fully_shard(layer, mesh=mesh)
            layer.set_custom_reduce_scatter(Counting())
        fully_shard(model, mesh=mesh)
        alive: list[int] = []
        x = torch.randn(2, 64, requires_grad=True) * 1
        x.register_hook(lambda grad: alive.append(sum(ref() is not None for ref in buffers)))
        model(x).sum().backward()
        return alive[0]

    assert max(launch(alive_at_the_end, 4, timeout=60)) <= 2


def test_shards_initialized_after_a_forward_are_kept() -> None:
    def on_a_rank() -> float:
        model = build()
        model.set_reshard_after_forward(False)
        model(torch.ones(1, 8))
        init_shards(model, lambda fqn, row, generator: row.fill_(7.0), seed=0)
        model.reshard()
        return float(min(p.full_tensor().min() for p in model.parameters()))

    assert launch(on_a_rank, 2, timeout=60) == [7.0, 7.0]


TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "grad": lambda model, x: torch.func.grad(lambda x: model(x).square().sum())(x),
    "vjp": lambda model, x: torch.func.vjp(model, x)[1](torch.ones(4, 8))[0],
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (torch.ones_like(x),))[1],
    "vmap": lambda model, x: torch.func.vmap(model)(x),
    "jacrev": lambda model, x: torch.func.jacrev(model)(x),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_of_functions_see_through_a_sharded_model(transform: str) -> None:
    def on_a_rank() -> bool:
        torch.manual_seed(3)
        x, apply = torch.randn(4, 8), TRANSFORMS[transform]
        model, plain = build(), build(lambda module: module)
        for _ in range(2):  # the second finds what the first left
            same = torch.allclose(apply(model, x), apply(plain, x), atol=1e-6)
        run(model, 1), run(plain, 1)
        return same and all(map(torch.allclose, grads(model), [p.grad for p in plain.parameters()]))

    assert launch(on_a_rank, 2, timeout=60) == [True, True]


def test_the_table_of_a_parameter_cut_twice_has_rows_of_the_whole() -> None:
    def on_a_rank() -> tuple[int, int]:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        model = nn.Sequential(nn.Linear(4, 6, bias=False))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        return explain(model).rows[0].rows

    assert launch(on_a_rank, 2, timeout=60) == [(0, 3), (3, 6)]
