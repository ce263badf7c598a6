"""Sharded models under what else PyTorch has: checkpointing, compilation, pipelining, scaling, tensor subclasses.

The oracle is FSDP2 under the same, in the same processes: at two ranks the same bits. Where sharding should not be
seen at all, the model on the whole batch without it is another.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_api
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

import hwfsdp
import models
from hwfsdp import launch
from oracles import (
    BITS,
    REGROUPING,
    ROUNDING,
    ROWS,
    Library,
    Promises,
    Shape,
    Tolerance,
    Trace,
    Training,
    accumulate,
    clip,
    differences,
    fresh,
    objective,
    shard,
    unsharded,
)

HERE: ModuleType = hwfsdp  # what is tested; it has the names of `torch.distributed.fsdp`

BF16, FP32 = torch.bfloat16, torch.float32
BF16_FP32 = {"param_dtype": BF16, "reduce_dtype": FP32}


def untouched(model: nn.Module) -> None:
    """The usual."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """A model, what is done to it before and after it is sharded, and how it is sharded."""

    build: Callable[[], models.Model] = models.stem
    before: Callable[[models.Model], None] = untouched
    after: Callable[[models.Model], None] = untouched
    how: str = "blocks"
    shape: Shape = (2,)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    policy: dict[str, Any] = dataclasses.field(default_factory=dict)

    def make(self, library: ModuleType | None) -> models.Model:
        model = fresh(self.build)
        self.before(model)
        if library:
            options = {"shape": self.shape, "policy": self.policy, **self.options}
            shard_by(functools.partial(shard, library, **options), model, self.how)
        self.after(model)
        return model


def shard_by(library: Library, model: models.Model, how: str) -> None:
    """Each block and the root; or the first two blocks as one group; or only the root."""
    blocks = list(model.blocks)
    if how == "lists":
        library(blocks[:2])
        blocks = blocks[2:]
    for block in blocks if how != "root" else ():
        library(block)
    library(model)


class Composed(Training):
    """Of a plan, by a library or by none."""

    def __init__(self, plan: Plan, library: ModuleType | None) -> None:
        self.plan, self.library = plan, library or unsharded
        self.trace = Trace()
        self.model = plan.make(library)


Scenario = Callable[[Composed], None]


def two_steps(training: Composed) -> None:
    training.steps(2)


accumulated = functools.partial(accumulate, pattern="nbb")


def run(plan: Plan, library: ModuleType | None, scenario: Scenario = two_steps) -> Trace:
    training = Composed(plan, library)
    scenario(training)
    return training.trace


def compare(plan: Plan, scenario: Scenario) -> dict[str, list[str]]:
    """What differs from FSDP2, and, but for rounding in 16 bits, from the model without sharding."""
    got = run(plan, HERE, scenario)
    found = {"FSDP2": differences(got, run(plan, fsdp, scenario), *BITS)}
    if not plan.policy:
        found["unsharded"] = differences(got.whole(), run(plan, None, scenario).whole(), *REGROUPING)
    return found


PROMISES = Promises()


def promise(
    text: str,
    cases: dict[str, tuple[Plan, Scenario]],
    ranks: int = 2,
    fast: Iterable[str] | None = None,
) -> None:
    """That these plans, trained in these ways, compute what FSDP2 computes, and PyTorch without sharding."""
    checks = {name: functools.partial(compare, plan, scenario) for name, (plan, scenario) in cases.items()}
    PROMISES.add(text, checks, ranks, fast)


# --- Activation checkpointing ------------------------------------------------------------------------------


def wrapped(model: models.Model, impl: CheckpointImpl) -> None:
    """Each block becomes a checkpoint wrapper around itself."""
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block, checkpoint_impl=impl)


around, inside = models.checkpointed, models.checkpointed_inside
wrapped_once = functools.partial(wrapped, impl=CheckpointImpl.NO_REENTRANT)
wrapped_reentrant = functools.partial(wrapped, impl=CheckpointImpl.REENTRANT)
CHECKPOINTED: dict[str, Plan] = {
    "around blocks": Plan(functools.partial(around, False)),
    "around blocks, reentrant; a list": Plan(functools.partial(around, True), how="lists"),
    "around blocks; a list, kept after forward": Plan(
        functools.partial(around, False), how="lists", options={"reshard_after_forward": False}
    ),
    "inside blocks; replicas": Plan(functools.partial(inside, False), shape=(2, 1)),
    "inside blocks, reentrant": Plan(functools.partial(inside, True)),
    "wrapper, then sharded; a list over shards and a replica": Plan(
        before=wrapped_once, how="lists", shape=(1, 2)
    ),
    "wrapper, then sharded, reentrant; replicas": Plan(before=wrapped_reentrant, shape=(2, 1)),
    "sharded, then wrapper; a list": Plan(after=wrapped_once, how="lists"),
    "sharded, then wrapper, reentrant": Plan(after=wrapped_reentrant),
}


promise(
    "activations are recomputed with gathered parameters",
    {name: (plan, two_steps) for name, plan in CHECKPOINTED.items()},
    fast=(
        *("around blocks", "around blocks, reentrant; a list", "inside blocks; replicas"),
        *("wrapper, then sharded, reentrant; replicas", "sharded, then wrapper; a list"),
    ),
)
promise(
    "activations are recomputed with gathered parameters",
    {
        "around blocks, reentrant": (Plan(functools.partial(around, True), shape=(2, 2)), two_steps),
        "sharded, then wrapper; a list": (Plan(after=wrapped_once, how="lists", shape=(2, 2)), two_steps),
    },
    ranks=4,
    fast=(),
)

# --- Methods besides forward -------------------------------------------------------------------------------


class Encoder(nn.Module):
    """Used by two methods, neither of which is forward alone."""

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
    """Calls methods of its blocks; each step another part of them, by `path`."""

    path = ("forward", "encode and decode")

    def __init__(self) -> None:
        super().__init__([Encoder() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block, path in zip(self.blocks, self.path, strict=True):
            x = x + (block(x) if path == "forward" else block.decode(block.encode(x), scale=0.5))
        return self.head(x)


def register(library: ModuleType | None, model: models.Model) -> None:
    """As a program does that runs with and without sharding."""
    for block in model.blocks:
        for method in ("encode", "decode"):
            (library or HERE).register_fsdp_forward_method(block, method)


def by_methods(training: Composed) -> None:
    """The methods are used now by one block, now by the other, now by both, now by none."""
    register(training.library if training.is_sharded else None, training.model)
    both = ("encode and decode",) * 2
    paths = [Methodical.path, Methodical.path[::-1], both, ("forward",) * 2, both]
    for seed, path in enumerate(paths):
        training.model.path = path
        training.steps(1, first_seed=seed)
    with torch.no_grad():
        training.loss(9)


promise(
    "a registered method gathers like forward",
    {
        "blocks": (Plan(Methodical), by_methods),
        "kept after forward": (Plan(Methodical, options={"reshard_after_forward": False}), by_methods),
        "replicas": (Plan(Methodical, shape=(2, 1)), by_methods),
        "bf16": (Plan(Methodical, policy=BF16_FP32), by_methods),
    },
)


def test_a_registered_method_keeps_its_name_and_reshards_after_itself_and_has_to_be_there():
    def on_a_rank() -> list[Any]:
        model = Plan(Methodical).make(HERE)
        register(HERE, model)
        block = model.blocks[0]
        model(*model.inputs(4, 0))
        before = isinstance(block.up.weight, DTensor)
        with torch.no_grad():
            block.encode(torch.zeros(2, 8))
        with pytest.raises(ValueError, match="embed.*Encoder|Encoder.*embed"):
            HERE.register_fsdp_forward_method(block, "embed")
        return [block.encode.__name__, block.encode.__doc__, before, isinstance(block.up.weight, DTensor)]

    assert launch(on_a_rank, 2, timeout=60) == [["encode", "Its own words.", True, True]] * 2


def test_registering_a_method_of_a_module_that_is_not_sharded_does_nothing():
    encoder = Encoder()
    before = dict(vars(encoder))
    HERE.register_fsdp_forward_method(encoder, "encode")
    HERE.register_fsdp_forward_method(encoder, "no such method")
    assert vars(encoder) == before


# --- Several roots, one set of streams ---------------------------------------------------------------------


def contexts_of(module: Any) -> list[Any]:
    """The communication contexts of a sharded module and its groups; there is no public door to them."""
    state = module._state()
    return [state.comm_ctx, *(group.comm_ctx for group in state.groups)]


def two_roots(library: ModuleType | None, share: bool) -> tuple[models.Model, models.Model]:
    first, second = Plan(models.stem).make(library), Plan(models.wandering).make(library)
    if library and share:
        library.share_comm_ctx([first, second])
    return first, second


def train_two_roots(library: ModuleType | None, share: bool) -> Trace:
    """The sum of both; taking turns in forward, and the second alone at the end."""
    trace, (first, second) = Trace(), two_roots(library, share)
    params = [*first.named_parameters(prefix="first"), *second.named_parameters(prefix="second")]
    optimizer = torch.optim.SGD([param for _, param in params], lr=0.1)
    for seed in range(4):
        (x,) = first.inputs(ROWS, seed)
        x = x if library is None else x.chunk(dist.get_world_size())[dist.get_rank()]
        loss = objective(second(x)) + (objective(first(x)) if seed < 3 else 0.0)
        trace.keep("loss", loss)
        loss.backward()
        for name, param in params:
            trace.keep(f"grad {name}", param.grad)
        optimizer.step()
        optimizer.zero_grad()
    return trace


def check_two_roots() -> dict[str, list[str]]:
    got = train_two_roots(HERE, share=True)
    return {
        "FSDP2": differences(got, train_two_roots(fsdp, share=True), *BITS),
        "apart": differences(got, train_two_roots(HERE, share=False), *BITS),
        "unsharded": differences(got.whole(), train_two_roots(None, share=False).whole(), *REGROUPING),
    }


PROMISES.add("roots that share their streams train as if they did not", {"two roots": check_two_roots})


def test_roots_that_share_a_context_have_the_very_same_streams():
    """So do all sharded modules below them, whether they had run before or not."""

    def on_a_rank() -> list[bool]:
        found = []
        for ran in (False, True):
            first, second = two_roots(HERE, share=False)
            if ran:
                step(first, second)
            found.append(contexts_of(first)[0] is contexts_of(second)[0])
            HERE.share_comm_ctx([first, second])
            step(first, second)
            parts = (part for model in (first, second) for part in (model, *model.blocks))
            contexts = [context for part in parts for context in contexts_of(part)]
            found.append(all(context is contexts[0] for context in contexts))
        return found

    assert launch(on_a_rank, 2, timeout=60) == [[False, True, False, True]] * 2


def step(*models_: models.Model) -> None:
    for model in models_:
        model(*model.inputs(4, 0)).sum().backward()


def test_sharing_with_a_module_that_is_not_sharded_is_an_error():
    def on_a_rank() -> bool:
        assert HERE.share_comm_ctx([]) is None
        model = Plan().make(HERE)
        before = contexts_of(model)
        for modules in ([model, nn.Linear(2, 2)], [nn.Linear(2, 2)]):
            with pytest.raises(ValueError, match="Linear|FSDPModule"):
                HERE.share_comm_ctx(modules)
        return contexts_of(model) == before

    assert launch(on_a_rank, 2, timeout=60) == [True, True]


# --- Transport ---------------------------------------------------------------------------------------------


class Transport:
    """A custom all-gather and reduce-scatter of a library, which note what they were asked for."""

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
                parts = [torch.empty_like(input_tensor) for _ in range(group.size())]
                dist.all_gather(parts, input_tensor.clone(), group=group)
                output_tensor.copy_(torch.cat(parts))

        class CountingReduceScatter(api.ReduceScatter):
            kind = "reduce_scatter"

            def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
                calls.append(("reduce_scatter", output_tensor.numel(), input_tensor.numel(), group.size()))
                total = input_tensor.clone()
                dist.all_reduce(total, group=group)
                if op == dist.ReduceOp.AVG:
                    total /= group.size()
                output_tensor.copy_(total.chunk(group.size())[group.rank()])

        CountingAllGather.allocate = CountingReduceScatter.allocate = allocate
        CountingAllGather.__abstractmethods__ = CountingReduceScatter.__abstractmethods__ = frozenset()
        self.all_gather, self.reduce_scatter = CountingAllGather(), CountingReduceScatter()


def custom(training: Composed, transports: list[Transport]) -> None:
    """All modules but the first block get the custom collectives."""
    transport = Transport(training.library)
    transports.append(transport)
    for module in [training.model, *training.model.blocks[1:]]:
        module.set_custom_all_gather(transport.all_gather)
        module.set_custom_reduce_scatter(transport.reduce_scatter)
    training.steps(2)


def check_custom(plan: Plan) -> dict[str, list[str]]:
    """Numbers against FSDP2 without custom collectives; calls against FSDP2 with them."""
    transports: list[Transport] = []
    scenario = functools.partial(custom, transports=transports)
    got, reference = run(plan, HERE, scenario), run(plan, fsdp, scenario)
    here, there = (sorted(map(str, transport.calls)) for transport in transports)
    return {
        "default": differences(got, run(plan, fsdp), *BITS),
        "FSDP2": differences(got, reference, *BITS),
        "calls": [] if here == there and here else [f"{here} instead of {there}"],
    }


def allocate_from_group(training: Composed) -> None:
    """Buffers from the process group's allocator, for a while."""
    modules = [training.model, *training.model.blocks]
    for enable in (True, False, True):
        for module in modules:
            module.set_allocate_memory_from_process_group_for_comm(enable)
        training.steps(1)


def three_steps(training: Composed) -> None:
    for _ in range(3):
        training.steps(1)


def check_allocation(plan: Plan) -> dict[str, list[str]]:
    got = run(plan, HERE, allocate_from_group)
    return {
        "default": differences(got, run(plan, fsdp, three_steps), *BITS),
        "FSDP2": differences(got, run(plan, fsdp, allocate_from_group), *BITS),
    }


PROMISES.add(
    "custom collectives change no number and are asked for what FSDP2 asks them for",
    {
        "fp32": functools.partial(check_custom, Plan(models.uneven)),
        "bf16": functools.partial(check_custom, Plan(models.uneven, policy=BF16_FP32)),
    },
)
PROMISES.add(
    "buffers of the process group change no number",
    {
        "blocks": functools.partial(check_allocation, Plan(models.uneven)),
        "a list": functools.partial(check_allocation, Plan(models.uneven, how="lists", shape=(1, 2))),
    },
)


def test_what_a_transport_cannot_do_is_refused_with_the_alternative():
    def on_a_rank() -> tuple[str, str]:
        model = Plan().make(HERE)
        with pytest.raises(NotImplementedError) as symmetric:
            model.set_symm_mem_for_comm()
        model(*model.inputs(4, 0)).sum().backward()
        model.set_custom_all_gather(Transport(HERE).all_gather)
        with pytest.raises(hwfsdp.StateError) as allocated:
            model.set_allocate_memory_from_process_group_for_comm(True)
        return str(symmetric.value), str(allocated.value)

    for symmetric, allocated in launch(on_a_rank, 2, timeout=60):
        assert "symm" in symmetric and "set_allocate_memory_from_process_group_for_comm" in symmetric
        assert "CountingAllGather" in allocated


# --- Tensors that travel in a form of their own ------------------------------------------------------------


class Packed(torch.Tensor):
    """A parameter that is fp32 at rest and something smaller on the wire; what, say its subclasses.

    A wrapper around one plain tensor. Whatever only moves its elements gives another of its kind.
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
        """The inner tensor with the rows of a full chunk."""
        rows = -(-outer_size[0] // mesh.size())
        whole = self.inner.new_zeros(rows, *outer_size[1:])
        whole[: len(self.inner)] = self.inner
        return whole


def written(value: Tensor, out: Tensor | None, *inner: Tensor) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    """What fsdp_post_all_gather returns at first; later the value goes into the tensor returned then."""
    if out is None:
        return value, (value, *inner)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
        (out.to_local() if isinstance(out, DTensor) else out).copy_(value)
    return None


class Halves(Packed):
    """Travels as two bf16 tensors: the value, and what that leaves out. Any number of rows."""

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        assert len(outer_stride) == len(outer_size) and isinstance(module, nn.Module)
        value = self.padded(mesh, outer_size)
        high = value.to(BF16)
        return (high, (value - high.float()).to(BF16)), tuple(outer_size)

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        high, low = (t[: metadata[0]] for t in all_gather_outputs)
        return written((high.float() + low.float()).to(param_dtype), out)


class Quantized(Packed):
    """Travels as int8, with a scale per row in fp32."""

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        scale = self.inner.abs().amax(1, keepdim=True) / 127
        return (torch.round(self.inner / scale).to(torch.int8), scale), mp_policy.param_dtype or FP32

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        assert metadata == param_dtype
        values, scale = all_gather_outputs
        assert (values.dtype, scale.dtype, scale.shape) == (torch.int8, FP32, (len(values), 1))
        return written((values * scale).to(param_dtype), out)


class Rounded(Packed):
    """Travels as bf16; the old signature, with nothing but the mesh."""

    def fsdp_pre_all_gather(self, mesh):
        return (self.inner.to(BF16),), mesh.size()

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        (values,) = all_gather_outputs
        assert metadata == dist.get_world_size()
        return written(values.to(param_dtype), out)


class Kept(Packed):
    """Travels as it is, and is still a subclass when whole."""

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        return (self.padded(mesh, outer_size).to(mp_policy.param_dtype or self.dtype),), len(outer_size)

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        (values,) = all_gather_outputs
        assert (values.ndim, values.dtype) == (metadata, param_dtype)
        if out is not None:
            assert type(out) is Kept and out.inner.untyped_storage().data_ptr() == values.data_ptr()
            return None
        return Kept(values), ()


def quantized(weight: Tensor) -> Tensor:
    """What the model computes with: rows do not depend on one another, so sharding changes nothing."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    return torch.round(weight / scale) * scale


def halved(weight: Tensor) -> Tensor:
    high = weight.to(BF16).float()
    return high + (weight - high).to(BF16).float()


def pack(model: models.Model, kind: type[Packed]) -> None:
    """Weights are packed, biases stay plain tensors."""
    for block in model.blocks:
        for layer in block.children():
            layer.weight = nn.Parameter(kind(layer.weight.detach()))


PACKED: dict[str, tuple[type[Packed], Callable[[Tensor], Tensor]]] = {
    "two inner tensors": (Halves, halved),
    "quantized to int8": (Quantized, quantized),
    "a subclass when whole": (Kept, lambda weight: weight),
    "the signature with a mesh alone": (Rounded, lambda weight: weight.to(BF16).float()),
}


def load_packed(training: Composed) -> None:
    """A state goes into its own model again after a step, then into another model."""
    state = {name: tensor.detach().clone() for name, tensor in training.model.state_dict().items()}
    training.steps(1)
    training.model.load_state_dict(state)
    training.steps(1)
    state = training.model.state_dict()
    training.model = training.plan.make(training.library)
    training.model.load_state_dict(state)
    training.optimizer = training.new_optimizer()
    training.steps(1)


def evaluate_packed(training: Composed) -> None:
    """The first forwards and the last are without gradients."""
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            training.loss(0)
    training.call("reshard")
    training.steps(1)
    with torch.inference_mode():
        training.loss(1)


PACKED_SCENARIOS: dict[str, Scenario] = {
    "accumulated": accumulated,
    "loaded": load_packed,
    "evaluated first": evaluate_packed,
}


def check_packed(kind: str, plan_name: str) -> dict[str, list[str]]:
    """Two steps against FSDP2; the first loss against a plain model with weights that went through the packing."""
    packing, unpacked = PACKED[kind]
    plan = PACKED_PLANS[plan_name]
    scenario = PACKED_SCENARIOS.get(plan_name, two_steps)
    plan = dataclasses.replace(plan, before=functools.partial(pack, kind=packing))
    training = Composed(plan, HERE)
    kinds = [type(layer.weight.to_local()) for block in training.model.blocks for layer in block.children()]
    scenario(training)
    got = training.trace
    plain = fresh(plan.build)
    for block in plain.blocks:
        for layer in block.children():
            layer.weight = nn.Parameter(unpacked(layer.weight.detach()))
    first = Trace()
    first.keep("loss", objective(plain(*training.batch(0))))
    expected = {name: first.tensors[name] for name in first.tensors}
    loss = Trace({name: got.tensors[name] for name in expected})
    return {
        "FSDP2": differences(unpacked_trace(got), unpacked_trace(run(plan, fsdp, scenario)), *BITS),
        "unsharded": differences(loss, first, *REGROUPING) if not plan.policy else [],
        "kinds": [] if set(kinds) == {packing} else [f"{kinds}"],
    }


def unpacked_trace(trace: Trace) -> Trace:
    tensors = {name: t.inner if isinstance(t, Packed) else t for name, t in trace.tensors.items()}
    return Trace(tensors)


PACKED_PLANS: dict[str, Plan] = {
    "root": Plan(models.even, how="root"),
    "kept after forward": Plan(models.even, options={"reshard_after_forward": False}),
    "shards and a replica": Plan(models.even, shape=(1, 2)),
    "accumulated": Plan(models.even),
    "evaluated first": Plan(models.even),
    "loaded": Plan(models.even),
    "bf16": Plan(models.even, policy=BF16_FP32),
    "uneven": Plan(models.uneven),
    "uneven, a list": Plan(models.uneven, how="lists"),
}
PACKED_CASES = [
    *[("two inner tensors", plan) for plan in ("uneven", "bf16", "evaluated first")],
    *[("quantized to int8", plan) for plan in ("bf16", "loaded", "kept after forward")],
    *[("a subclass when whole", plan) for plan in ("uneven, a list", "evaluated first", "loaded", "bf16")],
    *[("the signature with a mesh alone", plan) for plan in ("root", "accumulated", "shards and a replica")],
]
PROMISES.add(
    "a tensor subclass travels in its own form",
    {f"{kind}, {plan}": functools.partial(check_packed, kind, plan) for kind, plan in PACKED_CASES},
    fast=(
        *("two inner tensors, uneven", "quantized to int8, loaded", "a subclass when whole, bf16"),
        *("a subclass when whole, uneven, a list", "the signature with a mesh alone, accumulated"),
    ),
)


class OnlyPre(Packed):
    def fsdp_pre_all_gather(self, mesh):
        return (self.inner,), None


class OnlyPost(Packed):
    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        return written(all_gather_outputs[0], out)


class Unpadded(OnlyPost):
    """Forgets that an uneven shard has to be padded."""

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        return (self.inner,), None


def test_a_tensor_subclass_with_only_one_of_the_two_methods_or_without_padding_is_refused():
    def on_a_rank() -> str:
        for kind, missing in ((OnlyPre, "fsdp_post_all_gather"), (OnlyPost, "fsdp_pre_all_gather")):
            with pytest.raises(hwfsdp.UsageError, match="up.weight") as refused:
                Plan(models.even, before=functools.partial(pack, kind=kind)).make(HERE)
            assert missing in str(refused.value)
        model = Plan(models.uneven, before=functools.partial(pack, kind=Unpadded), how="root").make(HERE)
        with pytest.raises(hwfsdp.FSDPError) as error:
            model(*model.inputs(4, 0))
        return f"{type(error.value).__name__}: {error.value}"

    full, uneven = launch(on_a_rank, 2, timeout=60)
    assert full.startswith("CollectiveError")  # it waits for the other, which is gone
    assert uneven.startswith("UsageError") and "padded" in uneven and "Unpadded" in uneven


# --- Gradients: clipping and scaling -----------------------------------------------------------------------


def odd() -> models.Model:
    """Uneven shards, but none that is empty, over 2 and 4 ranks."""
    model = models.Model([models.Block(7, 11, 7), models.Block(7, 7, 7)])
    model.width = 7
    return model


def clipped(shape: Shape, p: float, build: Callable[[], models.Model] = odd, how: str = "blocks") -> Any:
    return Plan(build, how=how, shape=shape), functools.partial(clip, p=p)


INF = float("inf")
CLIPPING = "gradients are clipped by their norm over all ranks"
promise(
    CLIPPING,
    {
        "uneven shards": clipped((2,), 2),
        "a list": clipped((2,), INF, models.stem, "lists"),
        "replicas": clipped((2, 1), 1),
        "shards and a replica": clipped((1, 2), INF),
        "empty shards": clipped((2,), 1, models.uneven),  # torch has no maximum of those
    },
)
promise(
    CLIPPING, {"uneven": clipped((2, 2), INF), "empty": clipped((2, 2), 2, models.uneven)}, ranks=4, fast=()
)


def overflow(training: Composed) -> None:
    """Five steps under a gradient scaler; in the third, one element overflows, which one rank holds."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    for seed in range(5):
        scaler.scale(training.loss(seed)).backward()
        grad = training.model.blocks[0].up.weight.grad
        if seed == 2 and (not training.is_sharded or dist.get_rank() == 1):
            (grad.to_local() if training.is_sharded else grad).view(-1)[0] = float("inf")
        scaler.unscale_(training.optimizer)
        scaler.step(training.optimizer)
        scaler.update()
        training.trace.keep("scale", torch.tensor(scaler.get_scale()))
        training.keep_params()
        training.optimizer.zero_grad()


promise(
    "an overflow on one rank makes all ranks skip the step and lower the scale",
    {"a list": (Plan(how="lists"), overflow)},
)


# --- Without gradients -------------------------------------------------------------------------------------


def evaluate(training: Composed, mode: Callable[[], Any], first: bool) -> None:
    """Outputs between training steps, and what training makes of it; `first`: also before the first step."""
    for seed in range(3):
        if seed > 0 or first:
            with mode():
                output = training.model(*training.batch(10 + seed))
                training.trace.keep("loss", objective(output))
                assert not output.requires_grad
                training.trace.keep("output (local)", output)
        training.steps(1, first_seed=seed)


KEPT = Plan(models.uneven, options={"reshard_after_forward": False})
NO_GRAD: dict[str, tuple[Plan, Callable[[], Any], bool]] = {
    "no_grad first, a list": (Plan(how="lists"), torch.no_grad, True),
    "no_grad, kept after forward": (KEPT, torch.no_grad, False),
    "inference_mode, a list": (Plan(how="lists"), torch.inference_mode, False),
    "inference_mode, replicas": (Plan(shape=(2, 1)), torch.inference_mode, False),
    "inference_mode first": (Plan(), torch.inference_mode, True),
    "inference_mode first, kept after forward": (KEPT, torch.inference_mode, True),
}


def check_no_grad(case: str) -> dict[str, list[str]]:
    """FSDP2 cannot train after a first forward in inference mode."""
    plan, mode, first = NO_GRAD[case]
    scenario = functools.partial(evaluate, mode=mode, first=first)
    got = run(plan, HERE, scenario)
    found = {"unsharded": differences(got.whole(), run(plan, None, scenario).whole(), *REGROUPING)}
    if not (first and mode is torch.inference_mode):
        found["FSDP2"] = differences(got, run(plan, fsdp, scenario), *BITS)
    return found


PROMISES.add(
    "evaluation between steps gives the outputs of FSDP2 and changes no step",
    {name: functools.partial(check_no_grad, name) for name in NO_GRAD},
)


# --- Offloading --------------------------------------------------------------------------------------------


OFFLOADED: dict[str, tuple[Plan, Scenario, bool]] = {  # pinned or not
    "blocks": (Plan(models.uneven), two_steps, True),
    "replicas": (Plan(models.uneven, shape=(2, 1)), two_steps, False),
    "bf16": (Plan(models.uneven, policy=BF16_FP32), two_steps, True),
    "accumulated": (Plan(), accumulated, False),
}


def check_offload(case: str) -> dict[str, list[str]]:
    """FSDP2 can do it without pinning only, where there is no accelerator; all of it changes no number."""
    plan, scenario, pin = OFFLOADED[case]

    def offloading(library: ModuleType, pin_memory: bool) -> Plan:
        policy = library.CPUOffloadPolicy(pin_memory=pin_memory)
        return dataclasses.replace(plan, options={"offload_policy": policy})

    training = Composed(offloading(HERE, pin), HERE)
    scenario(training)
    found = {
        "FSDP2": differences(training.trace, run(offloading(fsdp, False), fsdp, scenario), *BITS),
        "not offloaded": differences(training.trace, run(plan, HERE, scenario), *BITS),
        "where": [],
    }
    training.loss(8).backward()
    for name, param in training.model.named_parameters():
        for local in (param.to_local(), param.grad.to_local()):
            if local.device.type != "cpu" or local.is_pinned():
                found["where"].append(f"{name}: {local.device}, pinned: {local.is_pinned()}")
    return found


PROMISES.add(
    "offloading from the CPU to the CPU changes nothing",
    {name: functools.partial(check_offload, name) for name in OFFLOADED},
)


# --- Compilation -------------------------------------------------------------------------------------------


def compile_in_place(model: models.Model, backend: str) -> None:
    for block in model.blocks:
        block.compile(backend=backend)


def compile_around(model: models.Model, backend: str) -> None:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend=backend)


def compile_checkpointed(model: models.Model) -> None:
    wrapped_once(model)
    compile_in_place(model, "aot_eager")


in_place = functools.partial(compile_in_place, backend="aot_eager")
as_a_wrapper = functools.partial(compile_around, backend="aot_eager")
COMPILED: dict[str, Plan] = {
    "block.compile(), then sharded": Plan(before=in_place),
    "torch.compile(block), then sharded, bf16": Plan(before=as_a_wrapper, policy=BF16_FP32),
    "sharded as a list, then block.compile()": Plan(after=in_place, how="lists"),
    "sharded, kept after forward, then torch.compile(block)": Plan(
        after=as_a_wrapper, options={"reshard_after_forward": False}
    ),
    "sharded over replicas, then block.compile()": Plan(after=in_place, shape=(2, 1)),
    "sharded, then model.compile()": Plan(after=lambda model: model.compile(backend="aot_eager")),
    "wrapped in checkpoints, then block.compile(), then sharded": Plan(before=compile_checkpointed),
}
INDUCTOR = Plan(
    lambda: models.Stem([models.Block(8, 12, 8)]),
    before=functools.partial(compile_in_place, backend="inductor"),
)


def check_compiled(plan: Plan) -> dict[str, list[str]]:
    """Against FSDP2 under the same, and against the eager run of the same model; each starts with empty caches.

    Hooks that break every graph would pass, so there have to be graphs.
    """
    traces, graphs = [], []
    for library, each in ((HERE, plan), (fsdp, plan), (HERE, eager(plan))):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        traces.append(run(each, library))
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    compiled, reference, plain = traces
    names = {plain_name(name): tensor for name, tensor in compiled.tensors.items()}
    exact = REGROUPING if not plan.policy else Tolerance(0.1, 0.01)
    return {
        "FSDP2": differences(compiled, reference, *BITS),
        "eager": differences(Trace(names), plain, *exact),
        "graphs": [] if graphs[0] > 0 == graphs[2] else [f"{graphs}"],
    }


def plain_name(name: str) -> str:
    """Without what compiling and checkpointing put between."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def eager(plan: Plan) -> Plan:
    return dataclasses.replace(plan, before=untouched, after=untouched)


COMPILING = "compiled blocks compute what they compute under FSDP2 and in eager mode"
PROMISES.add(
    COMPILING,
    {name: functools.partial(check_compiled, plan) for name, plan in COMPILED.items()},
    fast=("block.compile(), then sharded", "sharded, then model.compile()"),
)
BY_INDUCTOR = COMPILING + ", by inductor"
PROMISES.add(BY_INDUCTOR, {"blocks": functools.partial(check_compiled, INDUCTOR)}, fast=())


# --- Pipelining --------------------------------------------------------------------------------------------

MICRO_BATCHES = 4


class Stage(nn.Module):
    """Two blocks of a model, one after the other."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def whole_pipeline() -> nn.Sequential:
    return nn.Sequential(*[Stage([models.Block(8, 12, 8) for _ in range(2)]) for _ in range(2)])


def pipeline_loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def pipeline_batch(part: int, parts: int, seed: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    x, y = torch.randn(2, 32, 8)
    return x.chunk(parts)[part], y.chunk(parts)[part]


def pipelined(library: ModuleType, schedule: Any, static: bool) -> Trace:
    """Two steps of this rank's stage; gradients by the names they have in the whole model."""
    trace, ranks = Trace(), dist.get_world_size()
    mesh = pipeline_mesh(ranks)
    index, parts = mesh["pp"].get_local_rank(), ranks // 2
    part = fresh(whole_pipeline)[index]
    for block in part.blocks:
        library.fully_shard(block, mesh=mesh["dp"])
    library.fully_shard(part, mesh=mesh["dp"])
    x, y = pipeline_batch(mesh["dp"].get_local_rank(), parts, 0)
    rows = len(x) // MICRO_BATCHES
    zeros = [torch.zeros(rows, 8, requires_grad=requires_grad) for requires_grad in (index > 0, True)]
    sample = {"input_args": zeros[0], "output_args": zeros[1]} if static else {}
    stage = PipelineStage(part, index, 2, torch.device("cpu"), group=mesh.get_group("pp"), **sample)
    runner = schedule(stage, MICRO_BATCHES, loss_fn=pipeline_loss)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9)
    for seed in range(2):
        x, y = pipeline_batch(mesh["dp"].get_local_rank(), parts, seed)
        runner.step(*([x] if index == 0 else []), **({} if index == 0 else {"target": y}))
        for name, param in part.named_parameters():
            trace.keep(f"grad {index}.{name}", param.grad)
        optimizer.step()
        optimizer.zero_grad()
    return trace


@functools.cache
def pipeline_mesh(ranks: int) -> DeviceMesh:
    return init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("pp", "dp"))


def plain_pipeline() -> Trace:
    """The whole model on the whole batch."""
    trace, model = Trace(), fresh(whole_pipeline)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for seed in range(2):
        x, y = pipeline_batch(0, 1, seed)
        pipeline_loss(model(x), y).backward()
        for name, param in model.named_parameters():
            trace.keep(f"grad {name}", param.grad)
        optimizer.step()
        optimizer.zero_grad()
    return trace


def check_pipeline(schedule: Any, static: bool) -> dict[str, list[str]]:
    got, reference = (pipelined(library, schedule, static) for library in (HERE, fsdp))
    plain = plain_pipeline().tensors
    mine = got.gathered()
    return {
        "FSDP2": differences(got, reference, *ROUNDING),
        "unsharded": differences(mine, Trace({name: plain[name] for name in mine.tensors}), *REGROUPING),
    }


PIPELINING = "stages of a pipeline get the gradients of the whole model"
PROMISES.add(PIPELINING, {"1F1B, shapes given": functools.partial(check_pipeline, Schedule1F1B, True)})
PROMISES.add(
    PIPELINING,
    {"GPipe, shapes found out": functools.partial(check_pipeline, ScheduleGPipe, False)},
    ranks=4,
    fast=(),
)


@pytest.mark.parametrize("promise, ranks, case", PROMISES.cases())
def test_a_promise_is_kept(promise, ranks, case):
    if promise == BY_INDUCTOR and " " in torch.__file__:
        pytest.skip(
            "torch's inductor names its headers unquoted to the compiler: their path may have no space"
        )
    assert PROMISES.broken(promise, ranks, case) == []
