"""What went wrong once does not go on being wrong: exceptions, backwards that are not the last, early calls."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hwfsdp import FSDPCommContext, StateError, UsageError, fully_shard, launch, record
from oracles import cpu_mesh, theirs


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


def test_without_the_reset_the_next_forward_says_what_to_do() -> None:
    def go_on() -> None:
        model = build()
        with pytest.raises(KeyError):
            fail_under_the_root(model)
        with pytest.raises(StateError, match="reset_iter_state"):
            run(model, 0)

    launch(go_on, 2, timeout=60)


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
