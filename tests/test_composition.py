"""Sharded models under what else PyTorch has: checkpointing, compilation, pipelining, scaling, tensor subclasses.

The oracle is FSDP2 under the same, in the same processes: at two ranks the same bits. Where sharding should not be
seen at all, the model on the whole batch without it is another.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
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
    Check,
    Tolerance,
    Trace,
    Training,
    complaints,
    differences,
    fresh,
    objective,
    run_checks,
    unsharded,
)

HERE: ModuleType = hwfsdp  # what is tested; it has the names of `torch.distributed.fsdp`

BF16, FP32 = torch.bfloat16, torch.float32
Shape = tuple[int, ...]


@functools.cache
def grid(shape: Shape) -> DeviceMesh:
    """Made once, because process groups take their time."""
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


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
            mp_policy = library.MixedPrecisionPolicy(**self.policy)
            shard = functools.partial(
                library.fully_shard, mesh=grid(self.shape), mp_policy=mp_policy, **self.options
            )
            shard_by(shard, model, self.how)
        self.after(model)
        return model


def shard_by(shard: Callable[..., Any], model: models.Model, how: str) -> None:
    """Each block and the root; or the first two blocks as one group; or only the root."""
    blocks = list(model.blocks)
    if how == "lists":
        shard(blocks[:2])
        blocks = blocks[2:]
    for block in blocks if how != "root" else ():
        shard(block)
    shard(model)


class Composed(Training):
    """Of a plan, by a library or by none."""

    def __init__(self, plan: Plan, library: ModuleType | None) -> None:
        self.plan, self.library = plan, library or unsharded
        self.trace = Trace()
        self.model = plan.make(library)


Scenario = Callable[[Composed], None]


def two_steps(training: Composed) -> None:
    training.steps(2)


def accumulate(training: Composed) -> None:
    """Two micro-batches, reduced once and reduced twice."""
    for seed, sync in enumerate([False, True, True, True]):
        training.call("set_requires_gradient_sync", sync)
        training.loss(seed).backward()
        if seed % 2:
            training.update()
    training.keep_params()


def run(plan: Plan, library: ModuleType | None, scenario: Scenario = two_steps) -> Trace:
    training = Composed(plan, library)
    scenario(training)
    return training.trace


def compare(
    plan: Plan, scenario: Scenario = two_steps, exact: Tolerance | None = None, plain: Tolerance = REGROUPING
) -> dict[str, list[str]]:
    """What differs from FSDP2, and from the model without sharding."""
    exact = exact or (BITS if max(plan.shape) <= 2 else ROUNDING)
    got = run(plan, HERE, scenario)
    return {
        "FSDP2": differences(got, run(plan, fsdp, scenario), *exact),
        "unsharded": differences(got.whole(), run(plan, None, scenario).whole(), *plain),
    }


def ranks_of(shape: Shape) -> int:
    return int(torch.Size(shape).numel())


def launched(ranks: int, checks: dict[str, Check], timeout: float = 100) -> Any:
    return launch(run_checks, ranks, checks, timeout=timeout)


ORACLES = ["FSDP2", "unsharded"]

# --- Activation checkpointing ------------------------------------------------------------------------------


def wrapped(model: models.Model, impl: CheckpointImpl) -> None:
    """Each block becomes a checkpoint wrapper around itself."""
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block, checkpoint_impl=impl)


CHECKPOINTS: dict[str, dict[str, Any]] = {
    "around blocks": {"build": functools.partial(models.checkpointed, False)},
    "around blocks, reentrant": {"build": functools.partial(models.checkpointed, True)},
    "inside blocks": {"build": functools.partial(models.checkpointed_inside, False)},
    "inside blocks, reentrant": {"build": functools.partial(models.checkpointed_inside, True)},
}
for _name, _impl in (("", CheckpointImpl.NO_REENTRANT), (", reentrant", CheckpointImpl.REENTRANT)):
    CHECKPOINTS[f"wrapper, then sharded{_name}"] = {"before": functools.partial(wrapped, impl=_impl)}
    CHECKPOINTS[f"sharded, then wrapper{_name}"] = {"after": functools.partial(wrapped, impl=_impl)}
GROUPINGS: dict[str, dict[str, Any]] = {
    "a list": {"how": "lists"},
    "a list, kept after forward": {"how": "lists", "options": {"reshard_after_forward": False}},
    "replicas": {"shape": (2, 1)},
    "a list over shards and a replica": {"how": "lists", "shape": (1, 2)},
    "replicas of shards": {"shape": (2, 2)},
    "a list over replicas of shards": {"how": "lists", "shape": (2, 2)},
}


def checkpoint_plans(ranks: int) -> dict[str, Plan]:
    return {
        f"{checkpoint}; {grouping}": Plan(**(how | where))
        for checkpoint, how in CHECKPOINTS.items()
        for grouping, where in GROUPINGS.items()
        if ranks_of(where.get("shape", (2,))) == ranks
    }


@functools.cache
def checkpointing(ranks: int) -> Any:
    plans = checkpoint_plans(ranks)
    return launched(ranks, {name: functools.partial(compare, plan) for name, plan in plans.items()}, 200)


@pytest.mark.parametrize(
    "ranks, plan", [(ranks, plan) for ranks in (2, 4) for plan in checkpoint_plans(ranks)]
)
@pytest.mark.parametrize("oracle", ORACLES)
def test_activations_are_recomputed_with_gathered_parameters(ranks, plan, oracle):
    assert complaints(checkpointing(ranks), plan, oracle) == []


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


METHOD_PLANS: dict[str, Plan] = {
    "blocks": Plan(Methodical),
    "kept after forward": Plan(Methodical, options={"reshard_after_forward": False}),
    "replicas": Plan(Methodical, shape=(2, 1)),
    "bf16": Plan(Methodical, policy={"param_dtype": BF16, "reduce_dtype": FP32}),
}


@functools.cache
def methods() -> Any:
    return launched(
        2, {name: functools.partial(compare, plan, by_methods) for name, plan in METHOD_PLANS.items()}
    )


@pytest.mark.parametrize("plan", METHOD_PLANS)
def test_a_registered_method_gathers_like_forward_as_under_fsdp2(plan):
    assert complaints(methods(), plan, "FSDP2") == []


@pytest.mark.parametrize("plan", [name for name in METHOD_PLANS if name != "bf16"])
def test_a_registered_method_trains_as_without_sharding(plan):
    assert complaints(methods(), plan, "unsharded") == []


def test_a_registered_method_keeps_its_name_and_reshards_after_itself():
    def on_a_rank() -> list[Any]:
        model = Plan(Methodical).make(HERE)
        register(HERE, model)
        block = model.blocks[0]
        model(*model.inputs(4, 0))
        before = isinstance(block.up.weight, DTensor)
        with torch.no_grad():
            block.encode(torch.zeros(2, 8))
        return [block.encode.__name__, block.encode.__doc__, before, isinstance(block.up.weight, DTensor)]

    assert launch(on_a_rank, 2, timeout=60) == [["encode", "Its own words.", True, True]] * 2


def test_registering_a_method_of_a_module_that_is_not_sharded_does_nothing():
    encoder = Encoder()
    before = dict(vars(encoder))
    HERE.register_fsdp_forward_method(encoder, "encode")
    HERE.register_fsdp_forward_method(encoder, "no such method")
    assert vars(encoder) == before


def test_registering_a_method_that_is_not_there_is_an_error():
    def on_a_rank() -> str:
        with pytest.raises(ValueError, match="embed") as error:
            HERE.register_fsdp_forward_method(Plan(Methodical).make(HERE).blocks[0], "embed")
        return str(error.value)

    for message in launch(on_a_rank, 2, timeout=60):
        assert "Encoder" in message


# --- Several roots, one set of streams ---------------------------------------------------------------------


def contexts_of(module: Any) -> list[Any]:
    """The communication contexts of a sharded module and its groups; neither library has a public door to them."""
    if HERE is fsdp:
        state = module._get_fsdp_state()
        return [state._comm_ctx, *(group.comm_ctx for group in state._fsdp_param_groups)]
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


@functools.cache
def shared_streams() -> Any:
    return launched(2, {"two roots": check_two_roots})


@pytest.mark.parametrize("oracle", ["FSDP2", "apart", "unsharded"])
def test_roots_that_share_their_streams_train_as_if_they_did_not(oracle):
    assert complaints(shared_streams(), "two roots", oracle) == []


@pytest.mark.parametrize("ran", [False, True], ids=["before the first forward", "after a step"])
def test_roots_that_share_a_context_have_the_very_same_streams(ran):
    """So do all sharded modules below them, once they have run."""

    def on_a_rank() -> list[bool]:
        first, second = two_roots(HERE, share=False)
        if ran:
            step(first, second)
        before = contexts_of(first)[0] is contexts_of(second)[0]
        HERE.share_comm_ctx([first, second])
        contexts = [*contexts_of(first), *contexts_of(second)]
        one = all(context is contexts[0] for context in contexts)
        names = ("all_gather_stream", "reduce_scatter_stream")
        same = [getattr(contexts[0], name) is getattr(contexts[-1], name) for name in names]
        step(first, second)
        parts = (part for model in (first, second) for part in (model, *model.blocks))
        below = all(context is contexts[0] for part in parts for context in contexts_of(part))
        return [before, one, *same, below]

    assert launch(on_a_rank, 2, timeout=60) == [[False, True, True, True, True]] * 2


def step(*models_: models.Model) -> None:
    for model in models_:
        model(*model.inputs(4, 0)).sum().backward()


def test_sharing_among_no_roots_does_nothing():
    assert HERE.share_comm_ctx([]) is None


def test_sharing_with_a_module_that_is_not_sharded_is_an_error():
    def on_a_rank() -> bool:
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
    default = run(plan, fsdp)
    here, there = (sorted(map(str, transport.calls)) for transport in transports)
    return {
        "numbers": differences(got, default, *BITS) + differences(got, reference, *BITS),
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
    found = {"numbers": differences(got, run(plan, fsdp, three_steps), *BITS)}
    found["numbers"] += differences(got, run(plan, fsdp, allocate_from_group), *BITS)
    return found


TRANSPORT_PLANS: dict[str, Plan] = {
    "blocks": Plan(models.uneven),
    "bf16": Plan(models.uneven, policy={"param_dtype": BF16, "reduce_dtype": FP32}),
    "a list over shards and a replica": Plan(models.uneven, how="lists", shape=(1, 2)),
}


def custom_plans() -> dict[str, Plan]:
    return {name: plan for name, plan in TRANSPORT_PLANS.items() if plan.how != "lists"}


@functools.cache
def transport() -> Any:
    checks = {
        f"custom, {name}": functools.partial(check_custom, plan) for name, plan in custom_plans().items()
    }
    checks |= {
        f"allocation, {name}": functools.partial(check_allocation, plan)
        for name, plan in TRANSPORT_PLANS.items()
    }
    return launched(2, checks)


@pytest.mark.parametrize("plan", custom_plans())
def test_custom_collectives_give_the_numbers_of_the_default_ones(plan):
    assert complaints(transport(), f"custom, {plan}", "numbers") == []


@pytest.mark.parametrize("plan", custom_plans())
def test_custom_collectives_are_asked_for_what_fsdp2_asks_them_for(plan):
    assert complaints(transport(), f"custom, {plan}", "calls") == []


@pytest.mark.parametrize("plan", TRANSPORT_PLANS)
def test_buffers_of_the_process_group_change_no_number(plan):
    assert complaints(transport(), f"allocation, {plan}", "numbers") == []


def test_buffers_of_the_process_group_do_not_go_with_custom_collectives():
    def on_a_rank() -> str:
        model = Plan().make(HERE)
        model.set_custom_all_gather(Transport(HERE).all_gather)
        with pytest.raises(hwfsdp.StateError) as error:
            model.set_allocate_memory_from_process_group_for_comm(True)
        return str(error.value)

    for message in launch(on_a_rank, 2, timeout=60):
        assert "CountingAllGather" in message


def test_symmetric_memory_is_refused_with_an_alternative():
    def on_a_rank() -> str:
        model = Plan().make(HERE)
        with pytest.raises(NotImplementedError) as error:
            model.set_symm_mem_for_comm()
        model(*model.inputs(4, 0)).sum().backward()
        return str(error.value)

    for message in launch(on_a_rank, 2, timeout=60):
        assert "symm" in message and "set_allocate_memory_from_process_group_for_comm" in message


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
    "accumulated": accumulate,
    "loaded": load_packed,
    "evaluated first": evaluate_packed,
}


def check_packed(kind: str, plan_name: str) -> dict[str, list[str]]:
    """Two steps against FSDP2; the first loss against a plain model with weights that went through the packing."""
    packing, unpacked = PACKED[kind]
    plan = (PACKED_PLANS | UNEVEN_PACKED)[plan_name]
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
    "blocks": Plan(models.even),
    "root": Plan(models.even, how="root"),
    "kept after forward": Plan(models.even, options={"reshard_after_forward": False}),
    "shards and a replica": Plan(models.even, shape=(1, 2)),
    "accumulated": Plan(models.even),
    "evaluated first": Plan(models.even),
    "loaded": Plan(models.even),
    "bf16": Plan(models.even, policy={"param_dtype": BF16, "reduce_dtype": FP32}),
}
UNEVEN_PACKED = {"uneven": Plan(models.uneven), "uneven, a list": Plan(models.uneven, how="lists")}
PACKED_CASES = [(kind, plan) for kind in PACKED for plan in PACKED_PLANS]
PACKED_CASES += [(k, plan) for k in ("two inner tensors", "a subclass when whole") for plan in UNEVEN_PACKED]


@functools.cache
def packed() -> Any:
    return launched(2, {f"{k}, {plan}": functools.partial(check_packed, k, plan) for k, plan in PACKED_CASES})


@pytest.mark.parametrize("kind, plan", PACKED_CASES)
@pytest.mark.parametrize("oracle", ["FSDP2", "unsharded", "kinds"])
def test_a_tensor_subclass_travels_in_its_own_form(kind, plan, oracle):
    assert complaints(packed(), f"{kind}, {plan}", oracle) == []


class OnlyPre(Packed):
    def fsdp_pre_all_gather(self, mesh):
        return (self.inner,), None


class OnlyPost(Packed):
    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        return written(all_gather_outputs[0], out)


@pytest.mark.parametrize(
    "kind, missing", [(OnlyPre, "fsdp_post_all_gather"), (OnlyPost, "fsdp_pre_all_gather")]
)
def test_a_tensor_subclass_with_only_one_of_the_two_methods_is_refused(kind, missing):
    def on_a_rank() -> str:
        with pytest.raises(hwfsdp.UsageError) as error:
            Plan(models.even, before=functools.partial(pack, kind=kind)).make(HERE)
        return str(error.value)

    for message in launch(on_a_rank, 2, timeout=60):
        assert missing in message and "up.weight" in message


def test_a_tensor_subclass_that_does_not_pad_an_uneven_shard_is_refused():
    class Unpadded(Packed):
        def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
            return (self.inner,), None

        def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
            return written(all_gather_outputs[0], out)

    def on_a_rank() -> str:
        model = Plan(models.uneven, before=functools.partial(pack, kind=Unpadded), how="root").make(HERE)
        with pytest.raises(hwfsdp.FSDPError) as error:
            model(*model.inputs(4, 0))
        return f"{type(error.value).__name__}: {error.value}"

    full, uneven = launch(on_a_rank, 2, timeout=60)
    assert full.startswith("CollectiveError")  # it waits for the other, which is gone
    assert uneven.startswith("UsageError") and "padded" in uneven and "Unpadded" in uneven


# --- Gradients: clipping and scaling -----------------------------------------------------------------------


def clip(training: Composed, p: float) -> None:
    for seed in range(2):
        training.loss(seed).backward()
        norm = nn.utils.clip_grad_norm_(training.model.parameters(), max_norm=0.1, norm_type=p)
        training.trace.keep("norm", norm.full_tensor() if isinstance(norm, DTensor) else norm)
        training.update()
    training.keep_params()


def odd() -> models.Model:
    """Uneven shards, but none that is empty, over 2 and 4 ranks."""
    model = models.Model([models.Block(7, 11, 7), models.Block(7, 7, 7)])
    model.width = 7
    return model


CLIPPED: dict[str, Plan] = {
    "uneven shards": Plan(odd),
    "a list": Plan(how="lists"),
    "replicas": Plan(shape=(2, 1)),
    "shards and a replica": Plan(odd, shape=(1, 2)),
    "replicas of shards": Plan(odd, shape=(2, 2)),
    "four shards": Plan(odd, shape=(4,)),
    "empty shards": Plan(models.uneven),
    "replicas of empty shards": Plan(models.uneven, shape=(2, 2)),
}
CLIP_CASES = [(plan, p) for p in (1, 2) for plan in CLIPPED]
CLIP_CASES += [(plan, float("inf")) for plan in CLIPPED if "empty" not in plan]  # torch has no such norm


@functools.cache
def clipped(ranks: int) -> Any:
    checks: dict[str, Check] = {
        f"{plan}, p={p}": functools.partial(compare, CLIPPED[plan], functools.partial(clip, p=p))
        for plan, p in CLIP_CASES
        if ranks_of(CLIPPED[plan].shape) == ranks
    }
    return launched(ranks, checks)


@pytest.mark.parametrize("plan, p", CLIP_CASES)
@pytest.mark.parametrize("oracle", ORACLES)
def test_gradients_are_clipped_by_their_norm_over_all_ranks(plan, p, oracle):
    assert complaints(clipped(ranks_of(CLIPPED[plan].shape)), f"{plan}, p={p}", oracle) == []


def scale(training: Composed, poison: Callable[[Composed, int], None]) -> None:
    """Five steps under a gradient scaler; `poison` sees the gradients of each before they are unscaled."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    for seed in range(5):
        scaler.scale(training.loss(seed)).backward()
        poison(training, seed)
        scaler.unscale_(training.optimizer)
        scaler.step(training.optimizer)
        scaler.update()
        training.trace.keep("scale", torch.tensor(scaler.get_scale()))
        training.keep_params()
        training.optimizer.zero_grad()


def overflow_in_a_shard(training: Composed, seed: int) -> None:
    """One element, held by one rank, in step 2."""
    grad = training.model.blocks[0].up.weight.grad
    if seed == 2 and (not training.is_sharded or dist.get_rank() == dist.get_world_size() - 1):
        (grad.to_local() if training.is_sharded else grad).view(-1)[0] = float("inf")


def overflow_in_a_batch(training: Composed, seed: int) -> None:
    """One row, seen by one rank, after step 1; the reduction spreads it over the shards."""
    rows, part = training.batch(7), dist.get_rank() == dist.get_world_size() - 1 or not training.is_sharded
    if seed == 1:
        x = rows[0].clone()
        if part:
            x[-1] = 1e38
        objective(training.model(x)).backward()


SCALED: dict[str, tuple[Plan, Callable[[Composed, int], None]]] = {
    "an element of one shard": (Plan(), overflow_in_a_shard),
    "an element of one shard, a list": (Plan(how="lists"), overflow_in_a_shard),
    "a row of one rank": (Plan(), overflow_in_a_batch),
    "a row of one rank, replicas": (Plan(shape=(2, 1)), overflow_in_a_batch),
    "an element of one shard of three": (Plan(shape=(3,)), overflow_in_a_shard),
}


def check_scaler(case: str) -> dict[str, list[str]]:
    plan, poison = SCALED[case]
    scenario = functools.partial(scale, poison=poison)
    found = compare(plan, scenario)
    trace = run(plan, HERE, scenario)
    scales = [float(trace.tensors[f"scale #{step}"]) for step in range(5)]
    params = [trace.tensors[f"param blocks.0.up.weight #{step}"] for step in range(5)]
    bad = 2 if poison is overflow_in_a_shard else 1
    skipped = [step for step in range(1, 5) if torch.equal(params[step], params[step - 1])]
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, (scales, skipped))
    expected = [256.0]
    for step in range(5):
        since = step - bad if step > bad else step + 1
        expected.append(expected[-1] * (0.5 if step == bad else 2 if since % 2 == 0 else 1))
    if everyones != [(expected[1:], [bad])] * len(everyones):
        found["ranks"] = [f"scales and skipped steps {everyones} instead of {(expected[1:], [bad])}"]
    return {"ranks": []} | found


@functools.cache
def scaled(ranks: int) -> Any:
    cases = [name for name, (plan, _) in SCALED.items() if ranks_of(plan.shape) == ranks]
    return launched(ranks, {name: functools.partial(check_scaler, name) for name in cases})


@pytest.mark.parametrize("case", SCALED)
@pytest.mark.parametrize("oracle", ["FSDP2", "unsharded", "ranks"])
def test_an_overflow_on_one_rank_makes_all_ranks_skip_the_step_and_lower_the_scale(case, oracle):
    plan, _ = SCALED[case]
    assert complaints(scaled(ranks_of(plan.shape)), case, oracle) == []


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


NO_GRAD: dict[str, tuple[Plan, Callable[[], Any], bool]] = {
    f"{mode.__name__}, {name}, {'first' if first else 'in between'}": (plan, mode, first)
    for mode in (torch.no_grad, torch.inference_mode)
    for first in (True, False)
    for name, plan in {
        "a list": Plan(how="lists"),
        "uneven, kept after forward": Plan(models.uneven, options={"reshard_after_forward": False}),
        "replicas": Plan(shape=(2, 1)),
    }.items()
}
UNDER_FSDP2 = [name for name in NO_GRAD if not name.startswith("inference") or not name.endswith("first")]


def check_no_grad(case: str) -> dict[str, list[str]]:
    """FSDP2 cannot train after a first forward in inference mode."""
    plan, mode, first = NO_GRAD[case]
    scenario = functools.partial(evaluate, mode=mode, first=first)
    got = run(plan, HERE, scenario)
    plain = run(plan, None, scenario)
    found = {"unsharded": differences(got.whole(), plain.whole(), *REGROUPING), "FSDP2": []}
    if case in UNDER_FSDP2:
        found["FSDP2"] = differences(got, run(plan, fsdp, scenario), *BITS)
    return found


@functools.cache
def no_grad() -> Any:
    return launched(2, {name: functools.partial(check_no_grad, name) for name in NO_GRAD})


@pytest.mark.parametrize("case", UNDER_FSDP2)
def test_outputs_without_gradients_are_those_of_fsdp2(case):
    assert complaints(no_grad(), case, "FSDP2") == []


@pytest.mark.parametrize("case", NO_GRAD)
def test_evaluation_between_steps_changes_no_step(case):
    assert complaints(no_grad(), case, "unsharded") == []


# --- Offloading --------------------------------------------------------------------------------------------


OFFLOADED: dict[str, tuple[Plan, Scenario]] = {
    "blocks": (Plan(models.uneven), two_steps),
    "replicas": (Plan(models.uneven, shape=(2, 1)), two_steps),
    "bf16": (Plan(models.uneven, policy={"param_dtype": BF16, "reduce_dtype": FP32}), two_steps),
    "accumulated": (Plan(), accumulate),
}


def check_offload(case: str, pin: bool) -> dict[str, list[str]]:
    """FSDP2 can do it without pinning only, where there is no accelerator; all of it changes no number."""
    plan, scenario = OFFLOADED[case]

    def offloading(library: ModuleType, pin_memory: bool) -> Plan:
        policy = library.CPUOffloadPolicy(pin_memory=pin_memory)
        return dataclasses.replace(plan, options={"offload_policy": policy})

    training = Composed(offloading(HERE, pin), HERE)
    scenario(training)
    training.loss(8).backward()
    where = []
    for name, param in training.model.named_parameters():
        for tensor in (param, param.grad):
            local = tensor.to_local()
            if local.device.type != "cpu" or local.is_pinned():
                where.append(f"{name}: {local.device}, pinned: {local.is_pinned()}")
    got = training.trace
    del got.tensors[next(reversed([name for name in got.tensors if name.startswith("loss")]))]
    return {
        "FSDP2": differences(got, run(offloading(fsdp, False), fsdp, scenario), *BITS),
        "not offloaded": differences(got, run(plan, HERE, scenario), *BITS),
        "where": where,
    }


@functools.cache
def offloaded() -> Any:
    checks: dict[str, Check] = {
        f"{case}, pin_memory={pin}": functools.partial(check_offload, case, pin)
        for case in OFFLOADED
        for pin in (True, False)
    }
    return launched(2, checks)


@pytest.mark.parametrize("case", OFFLOADED)
@pytest.mark.parametrize("pin", [True, False])
@pytest.mark.parametrize("oracle", ["FSDP2", "not offloaded", "where"])
def test_offloading_from_the_cpu_to_the_cpu_changes_nothing(case, pin, oracle):
    assert complaints(offloaded(), f"{case}, pin_memory={pin}", oracle) == []


# --- Compilation -------------------------------------------------------------------------------------------


def compile_in_place(model: models.Model, backend: str) -> None:
    for block in model.blocks:
        block.compile(backend=backend)


def compile_around(model: models.Model, backend: str) -> None:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend=backend)


COMPILED: dict[str, Plan] = {}
for _name, _compile in {"block.compile()": compile_in_place, "torch.compile(block)": compile_around}.items():
    _compile = functools.partial(_compile, backend="aot_eager")
    COMPILED[f"{_name}, then sharded"] = Plan(before=_compile)
    COMPILED[f"sharded, then {_name}"] = Plan(after=_compile)
    COMPILED[f"sharded over replicas, then {_name}"] = Plan(after=_compile, shape=(2, 1))
    COMPILED[f"sharded, kept after forward, then {_name}"] = Plan(
        after=_compile, options={"reshard_after_forward": False}
    )


def compile_checkpointed(model: models.Model) -> None:
    wrapped(model, CheckpointImpl.NO_REENTRANT)
    compile_in_place(model, "aot_eager")


COMPILED["wrapped in checkpoints, then block.compile(), then sharded"] = Plan(before=compile_checkpointed)
COMPILED["sharded as a list, then block.compile()"] = Plan(
    after=functools.partial(compile_in_place, backend="aot_eager"), how="lists"
)
COMPILED["sharded, then model.compile()"] = Plan(after=lambda model: model.compile(backend="aot_eager"))
COMPILED["block.compile(), then sharded, bf16"] = Plan(
    before=functools.partial(compile_in_place, backend="aot_eager"),
    policy={"param_dtype": BF16, "reduce_dtype": FP32},
)


def one_block() -> models.Stem:
    return models.Stem([models.Block(8, 12, 8)])


INDUCTOR = Plan(
    one_block,
    before=functools.partial(compile_in_place, backend="inductor"),
)


def check_compiled(plan: Plan) -> dict[str, list[str]]:
    """Against FSDP2 under the same, and against the eager run of the same model; each starts with empty caches."""
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


@functools.cache
def compiled() -> Any:
    return launched(
        2, {name: functools.partial(check_compiled, plan) for name, plan in COMPILED.items()}, timeout=600
    )


@functools.cache
def compiled_by_inductor() -> Any:
    if " " in torch.__file__:
        pytest.skip(
            "torch's inductor names its own headers unquoted to the compiler: no space may be in their path"
        )
    return launched(2, {"inductor": functools.partial(check_compiled, INDUCTOR)}, timeout=600)


@pytest.mark.parametrize("plan", [*COMPILED, "inductor"])
def test_blocks_are_compiled_at_all(plan):
    """Guards the tests below: hooks that break every graph would pass them."""
    results = compiled_by_inductor() if plan == "inductor" else compiled()
    assert complaints(results, plan, "graphs") == []


@pytest.mark.parametrize("oracle", ["FSDP2", "eager"])
@pytest.mark.parametrize("plan", COMPILED)
def test_compiled_blocks_compute_what_they_compute_under_fsdp2_and_in_eager_mode(plan, oracle):
    assert complaints(compiled(), plan, oracle) == []


@pytest.mark.parametrize("oracle", ["FSDP2", "eager"])
def test_blocks_compiled_by_inductor_compute_what_they_compute_under_fsdp2_and_in_eager_mode(oracle):
    assert complaints(compiled_by_inductor(), "inductor", oracle) == []


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


SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}


def check_pipeline(schedule: str, static: bool) -> dict[str, list[str]]:
    got = pipelined(HERE, SCHEDULES[schedule], static)
    reference = pipelined(fsdp, SCHEDULES[schedule], static)
    plain = plain_pipeline().tensors
    mine = Trace({name: tensor for name, tensor in got.tensors.items() if "(local)" not in name})
    return {
        "FSDP2": differences(got, reference, *ROUNDING),
        "unsharded": differences(mine, Trace({name: plain[name] for name in mine.tensors}), *REGROUPING),
    }


@functools.cache
def pipelines(ranks: int, schedule: str, static: bool) -> Any:
    """A launch each: where one stage fails, the other waits."""
    name = f"{schedule}, static={static}"
    return launch(run_checks, ranks, {name: functools.partial(check_pipeline, schedule, static)}, timeout=60)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("static", [True, False], ids=["shapes given", "shapes found out"])
@pytest.mark.parametrize("oracle", ORACLES)
def test_stages_of_a_pipeline_get_the_gradients_of_the_whole_model(ranks, schedule, static, oracle):
    results = pipelines(ranks, schedule, static)
    assert complaints(results, f"{schedule}, static={static}", oracle) == []


# --- Copies and slices -------------------------------------------------------------------------------------


def test_a_sharded_module_cannot_be_copied_and_stays_usable():
    def on_a_rank() -> list[str]:
        training = Composed(Plan(how="lists"), HERE)
        for module in (
            training.model,
            training.model.blocks[0],
            training.model.blocks,
            training.model.blocks[2],
        ):
            with pytest.raises(hwfsdp.UsageError, match="deepcopy"):
                copy.deepcopy(module)
        training.steps(2)
        return differences(training.trace, run(Plan(how="lists"), fsdp), *BITS)

    assert launch(on_a_rank, 2, timeout=60) == [[], []]


def slices(library: ModuleType | None) -> Trace:
    """Parts of a sequence of sharded layers, called after the whole has run."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(5, 5) for _ in range(4)])
    if library:
        for layer in model:
            library.fully_shard(layer, mesh=grid((2,)))
        library.fully_shard(model, mesh=grid((2,)))
    trace = Trace()
    (x,) = models.uneven().inputs(ROWS, 0)
    x = x if library is None else x.chunk(2)[dist.get_rank()]
    for part in (model, model[:2], model[1:], model[::2], model[-1], model):
        loss = part(x).square().mean()
        trace.keep("loss", loss)
        loss.backward()
        for name, param in model.named_parameters():
            trace.keep(f"grad {name}", param.grad)
    kinds = [type(part) is nn.Sequential for part in (model[:2], model[1:], model[::2])]
    trace.keep("plain (local)", torch.tensor(kinds))
    return trace


def test_slices_of_a_sharded_sequence_compute_with_its_layers():
    def on_a_rank() -> list[str]:
        got, plain = slices(HERE), slices(None)
        wrong = differences(got, slices(fsdp), *BITS)
        return wrong + differences(got.whole(), plain.whole(), *REGROUPING)

    assert launch(on_a_rank, 2, timeout=60) == [[], []]
