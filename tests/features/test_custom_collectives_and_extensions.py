"""Parts that users write for FSDP2, used with torch's FSDP2 and with hwfsdp: collectives, extensions, attributes of groups."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map

import hwfsdp
import models
from hwfsdp import launch
from hwfsdp.compat import all_gather_single, reduce_scatter_single
from hwfsdp.core import private_torch
from hwfsdp.core.private_torch import local_of
from oracles import (
    BF16_FP32,
    BITS,
    Case,
    Library,
    Promises,
    Trace,
    Training,
    accumulate,
    case,
    cpu_mesh,
    differences,
    fresh,
    made,
    ours,
    reload,
    theirs,
    wrap,
)
from together import Together

BF16, FP32 = torch.bfloat16, torch.float32
accumulated = functools.partial(accumulate, pattern="nbb")
PROMISES = Promises()
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


def trained(library: Library, change: Callable[[Any], None]) -> Trace:
    """Change a sharded model, and run two steps. Return gradients."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    for layer in model:
        library(layer)
    library(model)
    change(model)
    for step in range(2):
        model(torch.full((2, 4), 1.0 + step)).square().sum().backward()
    return Trace().keep_grads(model)


def gather_into_one_buffer(model: Any) -> None:
    shared = OneBuffer()
    for layer in model:
        layer.set_custom_all_gather(shared)


def double_gradients_by_an_attribute(model: Any) -> None:
    model[1]._get_fsdp_state()._fsdp_param_group._reduce_scatter_comm = Doubled()


def divide_by_an_attribute(model: Any) -> None:
    model[1]._get_fsdp_state()._fsdp_param_group.gradient_divide_factor = 4.0


def gather_halves_by_methods_of_the_local_tensor(model: Any) -> None:
    """Methods that a user gives to a local tensor after sharding: half the weight travels."""
    local = local_of(model[0].weight)
    local.fsdp_pre_all_gather = lambda mesh: ((local * 0.5,), None)

    def after(outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
        return None if out is not None else (outputs[0], outputs)

    local.fsdp_post_all_gather = after


def divide_by_a_method(model: Any) -> None:
    model[1].set_gradient_divide_factor(4.0)


def other_than_fsdp2(change: Callable[[Any], None]) -> list[str]:
    return differences(trained(ours, change), trained(theirs, change), *BITS)


@two.finds([True, True])
def an_extension_runs_without_autograd_in_forward_and_backward() -> list[bool]:
    model: Any = ours(nn.Sequential(nn.Linear(4, 4, bias=False)))
    local, seen = local_of(model[0].weight), []

    def after(outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
        seen.append(not torch.is_grad_enabled())
        return None if out is not None else (outputs[0], outputs)

    local.fsdp_pre_all_gather, local.fsdp_post_all_gather = (lambda mesh: ((local,), None)), after
    model.set_reshard_after_forward(True)
    model(torch.ones(1, 4, requires_grad=True)).sum().backward()
    return seen


for _change in (
    gather_into_one_buffer,
    double_gradients_by_an_attribute,
    gather_halves_by_methods_of_the_local_tensor,
):
    two.add(f"as FSDP2: {_change.__name__}", functools.partial(other_than_fsdp2, _change), [])


@two.finds([True, False])
def zero_grad_of_one_module_of_a_list_leaves_the_gradients_of_the_others() -> list[bool]:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    ours([model[0], model[1]])  # type: ignore[arg-type]
    ours(model)
    model(torch.ones(1, 2)).sum().backward()
    model[0].zero_grad()
    return [layer.weight.grad is None for layer in model]


@two.finds([])
def an_attribute_of_torchs_group_sets_what_the_method_sets() -> list[str]:
    return differences(trained(ours, divide_by_an_attribute), trained(ours, divide_by_a_method), *BITS)


# --- Custom collectives ---------------------------------------------------------------------------------------------


class Counting:
    """A custom collective that notes its calls, for both libraries."""

    def __init__(self, collective: Callable[..., Any]) -> None:
        self.collective, self.calls = collective, []

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.calls.append(f"allocate {torch.Size(size).numel()} {dtype} {device}")
        return torch.full(tuple(size), 7.0, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op=None, async_op=False):
        name, sizes = self.collective.__name__, (output_tensor.numel(), input_tensor.numel(), group.size())
        self.calls.append(f"{name} {sizes}")
        options = (group,) if op is None else (op, group)
        self.collective(output_tensor, input_tensor, *options, False)


def custom(training: Training) -> None:
    """Give all modules but the first block custom collectives, and keep their calls."""
    gather, reduction = Counting(all_gather_single), Counting(reduce_scatter_single)
    for module in [training.model, *training.model.blocks[1:]]:
        module.set_custom_all_gather(gather)
        module.set_custom_reduce_scatter(reduction)
    training.steps(2)
    assert gather.calls and reduction.calls
    for call in sorted(gather.calls + reduction.calls):
        training.trace.keep(call, None)


def allocate_from_group(training: Training) -> None:
    """Take buffers from the process group's allocator, for a while."""
    for enable in (True, False):
        for module in [training.model, *training.model.blocks] if training.is_sharded else []:
            module.set_allocate_memory_from_process_group_for_comm(enable)
        training.steps(1)


PROMISES.trains(
    "custom collectives change no number and are asked for what FSDP2 asks them for",
    {"bf16": case(models.uneven, custom, policy=BF16_FP32)},
)
PROMISES.trains(
    "buffers of the process group change no number", {"blocks": case(models.uneven, allocate_from_group)}
)


@two.finds(None)
def a_transport_refuses_a_collective_that_it_lacks_and_names_the_alternative() -> None:
    model = wrap(models.stem(), ours)
    with pytest.raises(NotImplementedError, match="symm.*set_allocate_memory_from_process_group_for_comm"):
        model.set_symm_mem_for_comm()
    model(*model.inputs(4, 0)).sum().backward()
    model.set_custom_all_gather(Counting(all_gather_single))
    with pytest.raises(hwfsdp.StateError, match="Counting"):
        model.set_allocate_memory_from_process_group_for_comm(True)


class Failing(hwfsdp.collectives.DefaultAllGather):
    """A collective that fails at its call or at its wait."""

    def __init__(self, cause: Exception, at_once: bool) -> None:
        super().__init__()
        self.cause, self.at_once = cause, at_once

    def __call__(self, *_: Any, **__: Any) -> Any:
        if self.at_once:
            raise self.cause
        return self

    def wait(self) -> None:
        raise self.cause


@two.finds(["all_gather of blocks.0: lost by peer"] * 2 + ["a bug"])
def a_custom_collective_that_fails_is_named_with_its_group_and_other_exceptions_are_not_taken_for_that() -> (
    Any
):
    found = []
    lost, bug = RuntimeError("lost\n by peer"), KeyError("a bug")
    for cause, at_once in ((lost, True), (lost, False), (bug, False)):
        model = wrap(models.stem(), ours)
        model.blocks[0].set_custom_all_gather(Failing(cause, at_once))
        with pytest.raises((hwfsdp.CollectiveError, KeyError)) as caught:
            model(*model.inputs(4, 0))
        error = caught.value
        is_bug = isinstance(error, KeyError)
        found.append(error.args[0] if is_bug else f"{error.collective} of {error.owner}: {error.got}")
    return found


# --- Tensors that travel in a form of their own ------------------------------------------------------------


class Packed(torch.Tensor):
    """A parameter that is fp32 at rest. Subclasses choose its smaller form on the wire.

    It wraps one plain tensor. Operators that only move its elements return a tensor of the same class.
    """

    MOVES = ("detach", "clone", "view", "_unsafe_view", "split", "chunk", "slice", "narrow", "as_strided")
    MOVES += ("new_zeros", "new_empty", "_to_copy", "alias", "empty_like", "copy_", "t", "select")

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        options = {"dtype": inner.dtype, "device": inner.device, "requires_grad": inner.requires_grad}
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, inner.stride(), inner.storage_offset(), **options
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, tensors: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(tensors["inner"])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [tree_map(lambda t: t.inner if isinstance(t, Packed) else t, a) for a in (args, kwargs or {})]
        out = func(*plain[0], **plain[1])
        name = func._schema.name.removeprefix("aten::")
        if name.endswith("_") and isinstance(args[0], Packed):
            return args[0]
        if name not in cls.MOVES:
            return out
        return tree_map(lambda t: cls(t) if isinstance(t, Tensor) else t, out)

    def padded(self, mesh: DeviceMesh, outer_size: torch.Size) -> Tensor:
        """Return the inner tensor with the rows of a full chunk."""
        rows = -(-outer_size[0] // mesh.size())
        whole = self.inner.new_zeros(rows, *outer_size[1:])
        whole[: len(self.inner)] = self.inner
        return whole


def written(value: Tensor, out: Tensor | None, *inner: Tensor) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    """Return the first result of fsdp_post_all_gather. Later calls write the value into the tensor of that result."""
    if out is None:
        return value, (value, *inner)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
        (out.to_local() if isinstance(out, DTensor) else out).copy_(value)
    return None


class Quantized(Packed):
    """A parameter that travels as int8 with an fp32 scale per row. It has the old signature, which takes only the mesh."""

    def fsdp_pre_all_gather(self, mesh):
        scale = self.inner.abs().amax(1, keepdim=True) / 127
        return (torch.round(self.inner / scale).to(torch.int8), scale), mesh.size()

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        assert metadata == dist.get_world_size()
        values, scale = all_gather_outputs
        assert (values.dtype, scale.dtype, scale.shape) == (torch.int8, FP32, (len(values), 1))
        return written((values * scale).to(param_dtype), out)


class Kept(Packed):
    """A parameter that travels as it is, and is still a subclass when unsharded."""

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        return (self.padded(mesh, outer_size).to(mp_policy.param_dtype or self.dtype),), len(outer_size)

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        (values,) = all_gather_outputs
        assert (values.ndim, values.dtype) == (metadata, param_dtype)
        if out is not None:
            assert type(out) is Kept and out.inner.untyped_storage().data_ptr() == values.data_ptr()
            return None
        return Kept(values), ()


def pack(model: models.Model, kind: type[Packed]) -> None:
    """Pack weights; leave biases as plain tensors."""
    for block in model.blocks:
        for layer in block.children():
            layer.weight = nn.Parameter(kind(layer.weight.detach()))


def evaluate_packed(training: Training) -> None:
    """Run the first forwards and the last one without gradients."""
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            training.loss(0)
    training.call("reshard")
    training.steps(1)
    with torch.inference_mode():
        training.loss(1)


def check_packed(kind: type[Packed], plain: Case) -> dict[str, list[str]]:
    packed = dataclasses.replace(plain, build=made(plain.build, functools.partial(pack, kind=kind)))
    layers = [layer for block in wrap(packed.build(), ours).blocks for layer in block.children()]
    kinds = {type(layer.weight.to_local()) for layer in layers}
    got, reference = (unpacked_trace(packed.run(library)) for library in (ours, theirs))
    return {
        "FSDP2": differences(got, reference, *BITS),
        "kinds": [] if kinds == {kind} else [f"{kinds}"],
    }


def unpacked_trace(trace: Trace) -> Trace:
    tensors = {name: t.inner if isinstance(t, Packed) else t for name, t in trace.tensors.items()}
    return Trace(tensors)


TRAVELS: dict[str, tuple[type[Packed], Case]] = {
    "quantized to int8, loaded": (Quantized, case(models.even, functools.partial(reload, assign=False))),
    "quantized to int8, accumulated": (Quantized, case(models.even, accumulated)),
    "a subclass when whole, uneven, a list": (Kept, case(models.uneven, how="lists")),
    "a subclass when whole, evaluated first, bf16": (
        Kept,
        case(models.even, evaluate_packed, policy=BF16_FP32),
    ),
}
PROMISES.add(
    "a tensor subclass travels in its own form",
    {name: functools.partial(check_packed, *TRAVELS[name]) for name in TRAVELS},
)


class OnlyPre(Packed):
    def fsdp_pre_all_gather(self, mesh):
        return (self.inner,), None


class OnlyPost(Packed):
    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        return written(all_gather_outputs[0], out)


class Unpadded(OnlyPost):
    """A parameter that forgets to pad an uneven shard."""

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        return (self.inner,), None


def test_a_tensor_subclass_that_moves_to_another_device_stays_the_same_parameter():
    weight = nn.Parameter(Kept(torch.ones(2, 3)), requires_grad=False)
    private_torch.move_in_place(weight, torch.device("meta"))
    assert (type(weight), weight.inner.device.type, weight.requires_grad) == (Kept, "meta", False)


def test_a_tensor_subclass_with_only_one_of_the_two_methods_or_without_padding_is_refused():
    def on_a_rank() -> str:
        for kind, missing in ((OnlyPre, "fsdp_post_all_gather"), (OnlyPost, "fsdp_pre_all_gather")):
            with pytest.raises(hwfsdp.UsageError, match="up.weight") as refused:
                wrap(made(models.even, functools.partial(pack, kind=kind))(), ours)
            assert missing in str(refused.value)
        model = ours(made(models.uneven, functools.partial(pack, kind=Unpadded))())
        with pytest.raises(hwfsdp.FSDPError) as error:
            model(*model.inputs(4, 0))
        return f"{type(error.value).__name__}: {error.value}"

    full, uneven = launch(on_a_rank, 2, timeout=60)
    assert full.startswith("CollectiveError")  # it waits for the other rank, which is gone
    assert uneven.startswith("RefusedError") and "padded" in uneven and "Unpadded" in uneven


@two.finds(["up.weight", True])
def after_a_refused_local_part_a_plain_one_trains() -> list[Any]:
    """Shards are assigned by `load_state_dict`."""
    model: Any = ours(fresh(models.even))
    state, mesh = model.state_dict(), cpu_mesh()
    rows = model.inputs(4, 0)
    expected = model(*rows).detach()
    name = next(name for name in state if name.endswith("up.weight"))
    unfit = DTensor.from_local(OnlyPre(state[name].to_local().clone()), mesh, [Shard(0)])
    with pytest.raises(hwfsdp.UsageError) as refused:
        model.load_state_dict({**state, name: unfit}, assign=True)
        model(*rows)
    model.load_state_dict(state, assign=True)
    again = model(*rows)
    again.sum().backward()
    said = "up.weight" if "up.weight" in str(refused.value) else str(refused.value)
    return [said, torch.equal(again, expected) and all(p.grad is not None for p in model.parameters())]


test_a_promise_is_kept = PROMISES.test()
test_on_two_ranks = two.test()
