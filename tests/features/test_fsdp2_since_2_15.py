"""Features of FSDP2 since torch 2.15. hwfsdp has them with every torch.

With 2.15, the oracle is FSDP2 in the same processes, bit for bit. With an older torch, it is hwfsdp without the new call, where the
arithmetic is the same.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor

import models
from hwfsdp import StateError, UsageError
from hwfsdp.core.private_torch import REDUCES_IN_GRAD_DTYPE
from oracles import (
    BITS,
    REGROUPING,
    Library,
    Trace,
    Training,
    differences,
    fresh,
    objective,
    ours,
    rank_rows,
    theirs,
    wrap,
)
from together import Together

two = Together(2)
BF16, FP32 = torch.bfloat16, torch.float32
IS_NEW = hasattr(fsdp, "GradientReductionHandle")
Run = Callable[[Library], Trace]


def same(run: Run, otherwise: Run | None = None) -> list[str]:
    """Return the differences from torch's FSDP2. With an older torch, which lacks the call, compare with `otherwise`."""
    assert IS_NEW or otherwise, "nothing to compare with"
    expected = run(theirs) if IS_NEW or not otherwise else otherwise(ours)
    return differences(run(ours), expected, *BITS)


def micro_batch(model: Any, trace: Trace, seed: int) -> Tensor:
    loss = objective(model(rank_rows(model.inputs(12, seed)[0])))
    trace.keep("loss", loss)
    return loss


# --- Parameters that compute in a dtype of their own -------------------------------------------------------


class Scaled(nn.Module):
    """A layer whose vector must stay in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 8, bias=False), nn.Parameter(torch.linspace(0.5, 1.5, 7))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen = [x.dtype, self.linear.weight.dtype, self.scale.dtype]
        return x + torch.cat([self.scale, self.scale[:1]]).to(x.dtype) * self.linear(x)


def scaled() -> models.Model:
    return models.Model([Scaled(), Scaled()])


def keep_vectors(param: nn.Parameter) -> torch.dtype | None:
    return param.dtype if param.ndim == 1 else None


def with_vectors_in_fp32(library: Library, micros: int = 3, **policy: Any) -> Trace:
    policy = {"param_dtype": BF16, "param_dtype_override_fn": keep_vectors, **policy}
    model, trace = wrap(fresh(scaled), library, "blocks", policy=policy), Trace()
    for micro in range(micros):
        model.set_requires_gradient_sync(micro > 0 or micros == 1)
        micro_batch(model, trace, micro).backward()
        assert model.blocks[0].seen == [BF16, BF16, FP32]
    return trace.keep_grads(model)


def on_plain_tensors() -> Trace:
    """Train this rank's rows without sharding: matrices in bf16, vectors in fp32. Add up and average gradients in fp32."""
    model, trace = fresh(scaled), Trace()
    for block in model.blocks:
        block.linear.to(BF16)
    sums = [torch.zeros(param.shape) for param in model.parameters()]
    for micro in range(3):
        loss = objective(model(rank_rows(model.inputs(12, micro)[0]).to(BF16)))
        trace.keep("loss", loss)
        for total, grad in zip(sums, torch.autograd.grad(loss, [*model.parameters()]), strict=True):
            total += grad
    for (name, _), total in zip(model.named_parameters(), sums, strict=True):
        torch.distributed.all_reduce(total)
        trace.keep(f"grad {name}", total / 2)
    return trace


@two.finds([])
def parameters_keep_their_dtype_where_a_function_says_so() -> list[str]:
    run = functools.partial(with_vectors_in_fp32, reduce_dtype=FP32)
    if IS_NEW:
        return same(run)
    return differences(run(ours).gathered(), on_plain_tensors(), *REGROUPING)


@two.finds([])
def without_a_reduce_dtype_the_group_reduces_in_one_that_holds_all() -> list[str]:
    once = functools.partial(with_vectors_in_fp32, micros=1)
    return same(once, functools.partial(once, reduce_dtype=FP32))


@two.finds(True)
def any_other_dtype_is_refused_before_anything_is_changed() -> bool:
    model = fresh(scaled)
    override = {"param_dtype_override_fn": lambda p: torch.float64 if p.ndim == 1 else None}
    with pytest.raises(UsageError, match="'blocks.0.scale'.*float64"):
        ours(model, policy={"param_dtype": BF16, **override})
    return all(type(param) is nn.Parameter for param in model.parameters())


# --- The dtype of gradients --------------------------------------------------------------------------------

GRAD_DTYPES: dict[str, tuple[torch.dtype, torch.dtype | None, dict[str, Any]]] = {
    "gradients of fp32 in bf16": (FP32, BF16, {}),
    "computed in bf16, gradients in bf16": (FP32, BF16, {"param_dtype": BF16}),
    "any, computed in bf16": (FP32, None, {"param_dtype": BF16}),
    "gradients of bf16 in fp32, reduced in bf16": (BF16, FP32, {"reduce_dtype": BF16}),
}


def with_grad_dtype(
    library: Library, orig: torch.dtype, grad: torch.dtype | None, policy: dict[str, Any], late: bool = False
) -> Trace:
    """Give every second parameter a `grad_dtype`, before sharding or after. Cast the model in between."""
    model, trace = fresh(models.uneven).to(orig), Trace()

    def ask() -> None:
        for param in [*model.parameters()][::2]:
            param.grad_dtype = grad

    if not late:
        ask()
    wrap(model, library, "blocks", policy=policy)
    if late:
        ask()
    for micro in range(3):
        model.set_requires_gradient_sync(micro > 0)
        (rows,) = model.inputs(12, micro)
        objective(model(rank_rows(rows).to(orig))).backward()
    trace.keep_grads(model)
    model.to(torch.float64)  # parameters with their own dtype keep it
    return trace.keep_grads(model)


for _name, _late in itertools.product(GRAD_DTYPES if REDUCES_IN_GRAD_DTYPE else (), (False, True)):
    _orig, _grad, _policy = GRAD_DTYPES[_name]
    _run = functools.partial(with_grad_dtype, orig=_orig, grad=_grad, policy=_policy, late=_late)
    two.add(f"{_name}{', set after sharding' if _late else ''}", functools.partial(same, _run), [])


# --- The caller says when a backward is over ---------------------------------------------------------------


def finalized(
    library: Library, pattern: str, manual: bool = True, async_op: bool = False, **options: Any
) -> Trace:
    """Train two iterations of micro-batches: "n" does not reduce, "a" reduces."""
    training = Training(models.stem, library, **options)
    model, trace = training.model, training.trace
    if manual:
        model.set_manual_backward_finalization(True)
    for step in range(2):
        for micro, reduces in enumerate(pattern):
            last = micro == len(pattern) - 1
            model.set_requires_gradient_sync(reduces == "a" or (last and not manual))
            model.set_is_last_backward(last)
            training.loss(10 * step + micro).backward()
        model.set_requires_gradient_sync(True)
        if manual:
            handle = model.finalize_backward(async_op=async_op)
            assert (handle is not None) == async_op
            if handle:
                handle.wait()
                handle.wait()
        training.update()
    training.keep_params()
    return trace


MANUAL: dict[str, dict[str, Any]] = {
    "one backward": {"pattern": "a"},
    "three that accumulate in fp32": {
        "pattern": "nnn",
        "policy": {"param_dtype": BF16, "reduce_dtype": FP32},
        "async_op": True,
    },
    "a nested model": {"pattern": "nn", "how": "nested"},
}
for _name, _options in MANUAL.items():
    _manual = functools.partial(finalized, **_options)
    _by_itself = functools.partial(finalized, manual=False, **_options)
    two.add(f"manual: {_name}", functools.partial(same, _manual, _by_itself), [])


def started(mode: bool = True) -> Any:
    """Return a sharded model after a forward and a backward."""
    model: Any = wrap(fresh(models.stem), ours)
    model.set_manual_backward_finalization(mode)
    micro_batch(model, Trace(), 0).backward()
    return model


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(StateError) as caught:
        call()
    assert isinstance(caught.value, RuntimeError)
    return caught.value.got


@two.finds(
    [
        "a module below it",
        "a module below it",
        "one after it began",
        "a model whose backwards end by themselves",
        "one in flight",
        "one in flight",
        "one that was reset",
    ]
)
def a_module_that_cannot_be_finalized_is_refused() -> list[str]:
    model, rows = started(), rank_rows(models.stem().inputs(12, 0)[0])
    found = [
        refusal(lambda: model.blocks[0].set_manual_backward_finalization(True)),
        refusal(lambda: model.blocks[0].finalize_backward()),
        refusal(lambda: model.set_manual_backward_finalization(False)),
        refusal(lambda: started(False).finalize_backward()),
    ]
    handle = model.finalize_backward(async_op=True)
    found += [refusal(lambda: model(rows)), refusal(model.finalize_backward)]
    model.reset_iter_state()
    found.append(refusal(handle.wait))
    micro_batch(model, Trace(), 0).backward()  # it goes on
    model.finalize_backward()
    return found


@two.finds(["some that are reduced within a replica only", 4.0])
def gradients_that_wait_for_the_replicas_are_seen_when_a_backward_is_finalized() -> list[Any]:
    """Their reductions may still be in flight when the backward ends."""
    found: list[Any] = []
    for backwards in (1, 2):
        model: Any = ours(nn.Linear(4, 4, bias=False), shape=(1, 2))
        model.set_reduce_scatter_max_input_buffers(2)
        model.set_manual_backward_finalization(True)
        for last in (False, True)[:backwards]:
            model.set_requires_all_reduce(last)
            model(torch.ones(2, 4, requires_grad=True)).sum().backward()
        model.set_requires_all_reduce(True)
        found.append(refusal(model.finalize_backward) if backwards == 1 else model.finalize_backward())
    return [found[0], model.weight.grad.full_tensor()[0, 0].item()]


def break_backward(model: Any) -> None:
    """Run a forward, and a backward that an exception ends."""
    hook = model.blocks[0].register_full_backward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        micro_batch(model, Trace(), 5).backward()
    hook.remove()


@two.finds(["one that an exception ended", True])
def after_a_broken_backward_the_error_names_a_remedy_that_works() -> list[Any]:
    model: Any = wrap(fresh(models.stem), ours)
    model.set_manual_backward_finalization(True)
    break_backward(model)
    found: list[Any] = [refusal(model.finalize_backward)]
    model.reset_iter_state()
    micro_batch(model, Trace(), 1).backward()
    model.finalize_backward()
    return [*found, all(p.grad is not None for p in model.parameters())]


# --- Memory that stays -------------------------------------------------------------------------------------


@two.finds([True, True, False])
def whole_parameters_keep_their_memory_if_asked_to() -> list[bool]:
    model: Any = wrap(fresh(models.stem), ours)
    model.set_keep_unsharded_storage(True)

    def whole() -> list[Tensor]:
        found = []
        for module in [*model.blocks, model]:
            module.unshard()
            found += [p.data for p in module.parameters(recurse=True) if not isinstance(p, DTensor)]
            module.reshard()
        return found

    first = whole()
    pointers = [t.data_ptr() for t in first]
    micro_batch(model, Trace(), 0).backward()
    kept = all(t.untyped_storage().nbytes() > 0 for t in first)
    stable = pointers == [t.data_ptr() for t in whole()]
    model.set_keep_unsharded_storage(False)
    return [kept, stable, any(t.untyped_storage().nbytes() > 0 for t in whole())]


@two.finds([])
def keeping_memory_changes_no_number() -> list[str]:
    def run(library: Library, keep: bool = True) -> Trace:
        training = Training(models.stem, library)
        if keep:
            training.model.set_keep_unsharded_storage(True)
        training.steps(2)
        return training.trace

    return same(run, functools.partial(run, keep=False))


test_on_two_ranks = two.test()
