"""Sharded models under other features of PyTorch: checkpointing, compilation, pipelining, scaling, tensor subclasses.

The oracle is FSDP2 under the same feature, in the same processes: two ranks must give the same bits. Where sharding must not show
at all, the unsharded model on the whole batch is a second oracle.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_api
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

import hwfsdp
import models
from hwfsdp import launch
from hwfsdp.compat import all_gather_single, reduce_scatter_single
from hwfsdp.core import private_torch
from oracles import (
    BF16_FP32,
    BITS,
    Case,
    Promises,
    Scenario,
    Trace,
    Training,
    accumulate,
    differences,
    objective,
    ours,
    reload,
    shard,
    theirs,
    wrap,
)
from together import Together

BF16, FP32 = torch.bfloat16, torch.float32


def two_steps(training: Training) -> None:
    training.steps(2)


accumulated = functools.partial(accumulate, pattern="nbb")


def case(
    build: Callable[[], models.Model] = models.stem,
    scenario: Scenario = two_steps,
    how: str = "blocks",
    **options: Any,
) -> Case:
    return Case(build, scenario, how, options)


def made(
    build: Callable[[], models.Model], prepare: Callable[[models.Model], None]
) -> Callable[[], models.Model]:
    """Prepare the model before it is sharded."""

    def prepared() -> models.Model:
        model = build()
        prepare(model)
        return model

    return prepared


def changed(training: Training, change: Callable[[models.Model], None]) -> None:
    """Change the model after it is sharded."""
    change(training.model)
    two_steps(training)


PROMISES = Promises()
two = Together(2)


# --- Activation checkpointing ------------------------------------------------------------------------------


def wrapped(model: models.Model, impl: CheckpointImpl) -> None:
    """Wrap each block in a checkpoint wrapper."""
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block, checkpoint_impl=impl)


wrapped_once = functools.partial(wrapped, impl=CheckpointImpl.NO_REENTRANT)
wrapped_reentrant = functools.partial(wrapped, impl=CheckpointImpl.REENTRANT)
# without torch's wrapper: `test_parity`, `test_schedule` and `core/test_core_alone`
PROMISES.trains(
    "activations are recomputed with gathered parameters",
    {
        "wrapper, then sharded; a list over shards and a replica": case(
            made(models.stem, wrapped_once), how="lists", shape=(1, 2)
        ),
        "wrapper, then sharded, reentrant; replicas": case(
            made(models.stem, wrapped_reentrant), shape=(2, 1)
        ),
        "sharded, then wrapper; a list": case(
            scenario=functools.partial(changed, change=wrapped_once), how="lists"
        ),
    },
)

# --- Methods besides forward -------------------------------------------------------------------------------


class Encoder(nn.Module):
    """A module with two methods besides `forward`. The blocks call both."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 6), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x), scale=1.0)

    def encode(self, x: Tensor) -> Tensor:
        """Its own words."""
        return torch.tanh(self.up(x))

    def decode(self, code: Tensor, *, scale: float) -> Tensor:
        return self.down(code) * scale


class Methodical(models.Stem):
    """A model that calls methods of its blocks. `path` chooses them in each step."""

    path = ("forward", "encode and decode")

    def __init__(self) -> None:
        super().__init__([Encoder() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block, path in zip(self.blocks, self.path, strict=True):
            x = x + (block(x) if path == "forward" else block.decode(block.encode(x), scale=0.5))
        return self.head(x)


def register(training: Training) -> None:
    """Register the methods. The call works with and without sharding."""
    for block in training.model.blocks:
        for method in ("encode", "decode"):
            training.package.register_fsdp_forward_method(block, method)


def by_methods(training: Training) -> None:
    """Call the methods of one block, of the other, of both, of none."""
    register(training)
    both = ("encode and decode",) * 2
    paths = [Methodical.path, Methodical.path[::-1], both, ("forward",) * 2, both]
    for seed, path in enumerate(paths):
        training.model.path = path
        training.steps(1, first_seed=seed)
    with torch.no_grad():
        training.loss(9)


PROMISES.trains(
    "a registered method gathers like forward",
    {"blocks": case(Methodical, by_methods), "bf16": case(Methodical, by_methods, policy=BF16_FP32)},
)


@two.finds(["encode", "Its own words.", True, True])
def a_registered_method_keeps_its_name_and_reshards_after_itself_and_has_to_be_there() -> list[Any]:
    training = Training(Methodical, ours)
    register(training)
    model = training.model
    block = model.blocks[0]
    model(*model.inputs(4, 0))
    before = isinstance(block.up.weight, DTensor)
    with torch.no_grad():
        block.encode(torch.zeros(2, 8))
    with pytest.raises(ValueError, match="embed.*Encoder|Encoder.*embed"):
        hwfsdp.register_fsdp_forward_method(block, "embed")
    return [block.encode.__name__, block.encode.__doc__, before, isinstance(block.up.weight, DTensor)]


def test_registering_a_method_of_a_module_that_is_not_sharded_does_nothing():
    encoder = Encoder()
    before = dict(vars(encoder))
    hwfsdp.register_fsdp_forward_method(encoder, "encode")
    hwfsdp.register_fsdp_forward_method(encoder, "no such method")
    assert vars(encoder) == before


# --- Several roots, one set of streams ---------------------------------------------------------------------


def contexts_of(model: models.Model) -> list[Any]:
    """Return the communication contexts of all sharded modules and their groups, for which there is no public API."""
    states = [module._state() for module in (model, *model.blocks)]
    return [each.comm_ctx for state in states for each in (state, *state.groups)]


@two.finds([True, True])
def roots_that_share_a_context_have_the_very_same_streams() -> list[bool]:
    """All sharded modules below the roots share them, too, whether they had run before or not. `test_recovery` trains two roots."""
    found = []
    for ran in (False, True):
        pair = [wrap(build(), ours) for build in (models.stem, models.wandering)]
        if ran:
            for model in pair:
                model(*model.inputs(4, 0)).sum().backward()
        hwfsdp.share_comm_ctx(pair)
        for model in pair:
            model(*model.inputs(4, 0)).sum().backward()
        contexts = [context for model in pair for context in contexts_of(model)]
        found.append(all(context is contexts[0] for context in contexts))
    return found


@two.finds(None)
def sharing_with_a_module_that_is_not_sharded_is_an_error() -> None:
    assert hwfsdp.share_comm_ctx([]) is None
    model = wrap(models.stem(), ours)
    for modules in ([model, nn.Linear(2, 2)], [nn.Linear(2, 2)]):
        with pytest.raises(ValueError, match="Linear|FSDPModule"):
            hwfsdp.share_comm_ctx(modules)


# --- Transport ---------------------------------------------------------------------------------------------


class Transport:
    """A custom all-gather and reduce-scatter of a library. They record their calls."""

    def __init__(self, library: ModuleType) -> None:
        self.calls: list[tuple[Any, ...]] = []
        api = hwfsdp.collectives if library is hwfsdp else _fsdp_api
        calls = self.calls

        def allocate(self: Any, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
            calls.append(("allocate", self.kind, torch.Size(size).numel(), dtype, str(device)))
            return torch.full(tuple(size), 7.0, dtype=dtype, device=device)

        class CountingAllGather(api.AllGather):
            kind = "all_gather"

            def __call__(self, output_tensor, input_tensor, group, async_op=False):
                calls.append(("all_gather", output_tensor.numel(), input_tensor.numel(), group.size()))
                all_gather_single(output_tensor, input_tensor, group, False)

        class CountingReduceScatter(api.ReduceScatter):
            kind = "reduce_scatter"

            def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
                calls.append(("reduce_scatter", output_tensor.numel(), input_tensor.numel(), group.size()))
                reduce_scatter_single(output_tensor, input_tensor, op, group, False)

        CountingAllGather.allocate = CountingReduceScatter.allocate = allocate
        CountingAllGather.__abstractmethods__ = CountingReduceScatter.__abstractmethods__ = frozenset()
        self.all_gather, self.reduce_scatter = CountingAllGather(), CountingReduceScatter()


def custom(training: Training) -> None:
    """Give all modules but the first block the custom collectives, and keep their calls."""
    transport = Transport(training.package)
    for module in [training.model, *training.model.blocks[1:]]:
        module.set_custom_all_gather(transport.all_gather)
        module.set_custom_reduce_scatter(transport.reduce_scatter)
    training.steps(2)
    assert transport.calls
    for call in sorted(map(str, transport.calls)):
        training.trace.keep(call, None)


def allocate_from_group(training: Training) -> None:
    """Take buffers from the process group's allocator, for a while."""
    modules = [training.model, *training.model.blocks] if training.is_sharded else []
    for enable in (True, False, True):
        for module in modules:
            module.set_allocate_memory_from_process_group_for_comm(enable)
        training.steps(1)


CUSTOM = {"fp32": case(models.uneven, custom), "bf16": case(models.uneven, custom, policy=BF16_FP32)}
PROMISES.trains(
    "custom collectives change no number and are asked for what FSDP2 asks them for", CUSTOM, not_plain=CUSTOM
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
    model.set_custom_all_gather(Transport(hwfsdp).all_gather)
    with pytest.raises(hwfsdp.StateError, match="CountingAllGather"):
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


class Halves(Packed):
    """A parameter that travels as two bf16 tensors: the rounded value, and the rest. It may have any number of rows."""

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        assert len(outer_stride) == len(outer_size) and isinstance(module, nn.Module)
        value = self.padded(mesh, outer_size)
        high = value.to(BF16)
        return (high, (value - high.float()).to(BF16)), tuple(outer_size)

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        high, low = (t[: metadata[0]] for t in all_gather_outputs)
        return written((high.float() + low.float()).to(param_dtype), out)


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


PACKED: dict[str, type[Packed]] = {
    "two inner tensors": Halves,
    "quantized to int8": Quantized,
    "a subclass when whole": Kept,
}


def evaluate_packed(training: Training) -> None:
    """Run the first forwards and the last one without gradients."""
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            training.loss(0)
    training.call("reshard")
    training.steps(1)
    with torch.inference_mode():
        training.loss(1)


def check_packed(kind: str, name: str) -> dict[str, list[str]]:
    plain = PACKED_CASES[name]
    packed = dataclasses.replace(plain, build=made(plain.build, functools.partial(pack, kind=PACKED[kind])))
    layers = [layer for block in wrap(packed.build(), ours).blocks for layer in block.children()]
    kinds = {type(layer.weight.to_local()) for layer in layers}
    got, reference = (unpacked_trace(packed.run(library)) for library in (ours, theirs))
    return {
        "FSDP2": differences(got, reference, *BITS),
        "kinds": [] if kinds == {PACKED[kind]} else [f"{kinds}"],
    }


def unpacked_trace(trace: Trace) -> Trace:
    tensors = {name: t.inner if isinstance(t, Packed) else t for name, t in trace.tensors.items()}
    return Trace(tensors)


PACKED_CASES: dict[str, Case] = {
    "accumulated": case(models.even, accumulated),
    "evaluated first": case(models.even, evaluate_packed),
    "loaded": case(models.even, functools.partial(reload, assign=False)),
    "bf16": case(models.even, policy=BF16_FP32),
    "uneven": case(models.uneven),
    "uneven, a list": case(models.uneven, how="lists"),
}
TRAVELS: dict[str, tuple[str, ...]] = {
    "two inner tensors": ("uneven",),
    "quantized to int8": ("loaded", "accumulated"),
    "a subclass when whole": ("uneven, a list", "evaluated first", "bf16"),
}
PROMISES.add(
    "a tensor subclass travels in its own form",
    {
        f"{kind}, {name}": functools.partial(check_packed, kind, name)
        for kind in TRAVELS
        for name in TRAVELS[kind]
    },
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


# --- Without gradients -------------------------------------------------------------------------------------


def evaluate(training: Training, mode: Callable[[], Any], first: bool) -> None:
    """Evaluate between training steps, and train on. `first`: also evaluate before the first step."""
    for seed in range(3):
        if seed > 0 or first:
            with mode():
                output = training.model(*training.batch(10 + seed))
                training.trace.keep("loss", objective(output))
                assert not output.requires_grad
                training.trace.keep("output (local)", output)
        training.steps(1, first_seed=seed)


PROMISES.trains(
    "evaluation between steps gives the outputs of FSDP2 and changes no step",
    {
        "no_grad first, a list": case(
            scenario=functools.partial(evaluate, mode=torch.no_grad, first=True), how="lists"
        ),
        "inference_mode, replicas": case(
            scenario=functools.partial(evaluate, mode=torch.inference_mode, first=False), shape=(2, 1)
        ),
        "inference_mode first": case(
            scenario=functools.partial(evaluate, mode=torch.inference_mode, first=True)
        ),
    },
    not_fsdp2=["inference_mode first"],  # it cannot train then
)


# --- Offloading --------------------------------------------------------------------------------------------


def offloaded(package: ModuleType, module: nn.Module, **options: Any) -> nn.Module:
    """Offload parameters. Without an accelerator, FSDP2 can do so only without pinned memory."""
    return shard(package, module, offload_policy=package.CPUOffloadPolicy(package is hwfsdp), **options)


PROMISES.trains(
    "offloading from the CPU to the CPU changes nothing",
    {
        "blocks": Case(models.uneven, two_steps, sharding=offloaded),
        "bf16": Case(models.uneven, two_steps, options={"policy": BF16_FP32}, sharding=offloaded),
        "accumulated": Case(models.stem, accumulated, sharding=offloaded),
    },
)


# --- Compilation -------------------------------------------------------------------------------------------


def compile_in_place(model: models.Model, backend: str) -> None:
    for block in model.blocks:
        block.compile(backend=backend)


in_place = functools.partial(compile_in_place, backend="aot_eager")
COMPILED: dict[str, Case] = {
    "block.compile(), then sharded": case(made(models.stem, in_place)),
    "sharded, then model.compile()": case(
        scenario=functools.partial(changed, change=lambda model: model.compile(backend="aot_eager"))
    ),
}


def check_compiled(one: Case) -> dict[str, list[str]]:
    """Compare with FSDP2 under the same compiler. Each run starts with empty caches.

    There must be graphs, because hooks that break every graph would pass, too.
    """
    traces, graphs = [], []
    for library in (ours, theirs):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        traces.append(one.run(library))
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return {"FSDP2": differences(*traces, *BITS), "graphs": [] if all(graphs) else [f"{graphs}"]}


COMPILING = "compiled blocks compute what they compute under FSDP2"
PROMISES.add(
    COMPILING,
    {name: functools.partial(check_compiled, one) for name, one in COMPILED.items()},
)


test_a_promise_is_kept = PROMISES.test()
test_on_two_ranks = two.test()
