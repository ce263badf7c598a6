"""Private parts of torch. Two other modules have some: `core.private_torch` for the core, `features.private_autograd` for features.

Supported: torch 2.11 to 2.15. A few modules depend on names or texts of torch that are not documented: `features.lookup` on the name of a
method, `features.whole` on error messages, `features.entries` on names of nodes, `interop.pipelines` on attributes of schedules.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from math import prod
from typing import Any, NamedTuple, TypeVar, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import profiler
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from hwfsdp.core.private_torch import all_gather_single as all_gather_single
from hwfsdp.core.private_torch import dtensor as dtensor, local_of as local_of
from hwfsdp.core.private_torch import reduce_scatter_single as reduce_scatter_single
from hwfsdp.core.private_torch import replace_local as replace_local, wrap_like as wrap_like

F = TypeVar("F", bound=Callable[..., Any])


class DispatchMode(TorchDispatchMode):
    """A mode whose `__torch_dispatch__` sees every operator that is called in its block.

    torch wraps this method, so that its compiler never sees it, and with the wrapper each operator takes three times as long. No
    compiled code runs in a block of ours.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


StridedShard = _StridedShard  # the placement of a DTensor that later axes of its mesh have cut before

# The first DTensor or optimizer of a process imports it, which takes half a second.
LATE_IMPORT = "torch._dynamo"

# torch's own FSDP2, and `replicate`, which is built on it: these modules keep torch's names
IN_FSDP2 = ("torch.distributed.fsdp._fully_shard._fsdp_", "torch.distributed._composable.replicate_with_fsdp")
# Some programs import FSDPModule from here. Torch's methods of modules, replicated ones too, test with this name.
HOME_OF_FSDP2 = "torch.distributed.fsdp._fully_shard._fully_shard"


def empty_from_group(
    group: dist.ProcessGroup | None, size: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Make a tensor in memory of the group's own allocator, or in ordinary memory if the group has no allocator."""
    backend = group._get_backend(device) if group is not None else None
    if backend is None or not backend.supports_tensor_alloc(device):
        return torch.empty(*size, dtype=dtype, device=device)
    return backend.allocate_tensor(prod(size), dtype=dtype, device=device)


def cpu_backend(group: dist.ProcessGroup) -> str:
    """Return the name of the backend that moves CPU tensors of this group, for example "gloo", or "" if none does."""
    config: str = getattr(dist, "get_backend_config")(group)  # noqa: B009  (exported, but not declared)
    return dict(part.split(":") for part in config.split(",") if ":" in part).get("cpu", "")


def device_types(group: dist.ProcessGroup) -> list[str]:
    """Return the types of device whose tensors this group moves, for example ["cpu", "cuda"]."""
    config: str = getattr(dist, "get_backend_config")(group)  # noqa: B009  (exported, but not declared)
    return [part.split(":")[0] for part in config.split(",") if ":" in part]


def send_bytes(group: dist.ProcessGroup, data: Tensor, rank: int, tag: int) -> None:
    """Send [n] uint8 to a rank of the group. Wait as long as the other rank takes to receive them, up to a day.

    Recordings do not see this. Messages that belong to a step go through `dist.send`.
    """
    group.send([data], rank, tag).wait(timedelta(days=1))


def receive_bytes(group: dist.ProcessGroup, data: Tensor, rank: int, tag: int) -> None:
    """Receive the bytes that `send_bytes` sent. Wait as long as this takes, up to a day."""
    group.recv([data], rank, tag).wait(timedelta(days=1))


def is_disconnected(group: dist.ProcessGroup, rank: int, tag: int) -> bool:
    """True if the connection to a rank of a gloo group is known to be broken. This never blocks.

    Args:
        tag: a tag that no message has. The receive that is posted under this tag never gets a message.
    """
    try:
        group.recv([torch.empty(1, dtype=torch.uint8)], rank, tag)
    except RuntimeError:
        return True
    return False


def gloo_beside(group: dist.ProcessGroup, members: Sequence[int] = (), use: str = "") -> dist.ProcessGroup:
    """Make a gloo group of ranks of a group, with the same time limit. Only its own `send` and `recv` can be used.

    `dist.new_group` gives a group of some ranks a name that counts the groups of each rank. If ranks have different numbers
    of groups, they would wait for each other under different names. Here the name comes from the group.

    Args:
        members: the numbers of the ranks in `group`; none: all of them. use: a part of the name, which can be used once.
    """
    ranks, timeout = dist.get_process_group_ranks(group), timedelta(seconds=timeout_of(group))
    ranks = [ranks[member] for member in members] or ranks
    own, name = ranks.index(dist.get_rank()), f"hwfsdp {group.group_name} {ranks} {use}"
    prefixed, gloo = (getattr(dist, kind) for kind in ("PrefixStore", "ProcessGroupGloo"))  # not declared
    beside: dist.ProcessGroup = gloo(prefixed(name, default_store()), own, len(ranks), timeout)
    return beside


def show_collective(kind: str, group: dist.ProcessGroup, output: Tensor, input: Tensor, options: Any) -> None:
    """Let dispatch modes, if there are any, see a collective that no backend of torch runs.

    Args:
        kind: "all_gather" or "reduce_scatter". output: gets undefined values. If it repeats one element, the modes see another tensor.

    torch has a fake process group for its own tests. It dispatches the operator, and moves nothing.
    """
    if not torch._C._len_torch_dispatch_stack():
        return
    if not output.is_contiguous():
        with unseen_by_modes():
            output = output.new_empty(output.shape)
    fake: Any = torch._C._distributed_c10d.FakeProcessGroup._create_internal(group.rank(), group.size())
    dispatching: Any = dist.ProcessGroup(group.rank(), group.size())  # type: ignore[call-arg]
    dispatching._register_backend(output.device, dist.ProcessGroup.BackendType.CUSTOM, fake)
    old_name = {"all_gather": "_allgather_base", "reduce_scatter": "_reduce_scatter_base"}[kind]
    name = f"{kind}_single" if hasattr(dispatching, f"{kind}_single") else old_name
    getattr(dispatching, name)(output, input, options)


_NOTHING = nullcontext()


def applied_to(module: nn.Module) -> Collection[str]:
    """Return the names of torch's composable functions that were applied to a module, for example "replicate".

    A wrapper may forward attributes to the module that it wraps. Functions that were applied only to that module do not count.
    """
    return set(module.__dict__.get(REGISTRY_KEY, ()))


def note_applied(module: nn.Module, name: str) -> None:
    """Tell torch's composable functions that this function was applied to the module."""
    module.__dict__.setdefault(REGISTRY_KEY, {})[name] = RegistryItem()


def profiler_is_running() -> bool:
    """True if torch's profiler is recording now."""
    return bool(profiler._is_profiler_enabled)


def profiler_range(moment: str, fqn: str = "", shards: int = 0) -> AbstractContextManager[Any]:
    """Make a range that torch's profiler shows around the block, with FSDP2's name. Do nothing if no profiler is running.

    Args:
        moment: for example "all_gather"; "backward_prefetch for" is followed by the name alone.
        fqn: fqn of the module; "" for the root. shards: the number of ranks that share a group, if the module has several
            groups; else 0.
    """
    if not profiler._is_profiler_enabled:
        return _NOTHING
    named = f" {fqn}" if moment.endswith(" for") else f" ({fqn})" if fqn else ""
    named += f" [pg={shards}]" if shards else ""
    shown: AbstractContextManager[Any] = profiler.record_function(f"FSDP::{moment}{named}")
    return shown


def unseen_by_modes() -> AbstractContextManager[None]:
    """Hide the block from dispatch modes, such as the one that counts communication."""
    return _disable_current_modes()


def default_store() -> Any:
    """Return the key-value store in which the ranks of the default process group met. No public function gives it."""
    return dist.distributed_c10d._get_default_store()


def default_store_below(prefix: str) -> Any:
    """Return the same store with a separate range of names, so that ranks can meet in it again."""
    return dist.distributed_c10d.PrefixStore(prefix, default_store())


def store_by_itself(store: Any) -> Any:
    """Return a store over a separate connection, for a thread that waits. None if torch or the store cannot copy it."""
    try:
        return store.clone()
    except (AttributeError, RuntimeError):
        return None


def timeout_of(group: dist.ProcessGroup) -> float:
    """Return the timeout of the group's collectives in seconds: the timeout of its CPU backend, else of its first backend."""
    kinds = device_types(group)
    kind = "cpu" if "cpu" in kinds else kinds[0]
    options = getattr(group._get_backend(torch.device(kind)), "options", None)
    timeout: timedelta = getattr(options, "_timeout", dist.distributed_c10d.default_pg_timeout)
    return timeout.total_seconds()


def remove_hook(module: nn.Module, hook: Callable[..., Any]) -> None:
    """Remove a forward hook from a module without its handle."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, value in hooks.items() if value is hook]:
            del hooks[key]


# Attributes with the hooks of `register_hook` and `register_post_accumulate_grad_hook`. If two tensors share such a dictionary,
# the handles of the hooks remove them from both.
GRAD_HOOKS, POST_ACCUMULATE_GRAD_HOOKS = "_backward_hooks", "_post_accumulate_grad_hooks"


def outside_transforms(method: F) -> F:
    """Run a method outside the `torch.func` transforms in progress, so that it is not part of the function."""

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not torch._C._are_functorch_transforms_active():
            return method(*args, **kwargs)
        with torch._C._DisableFuncTorch():
            return method(*args, **kwargs)

    return cast(F, wrapped)


def read_debug_level() -> None:
    """Take `TORCH_DISTRIBUTED_DEBUG` from the environment as it is now, not as it was when torch was imported."""
    getattr(dist, "set_debug_level_from_env")()  # noqa: B009  (exported, but not declared)


def one_gloo_thread(gloo: Any, timeout: timedelta) -> Any:
    """Return the options of a group of class `gloo` that runs its collectives in one thread; torch's default is two."""
    options, interfaces = gloo._Options(), os.environ.get("GLOO_SOCKET_IFNAME", "")
    devices = [gloo.create_device(interface=name) for name in interfaces.split(",") if name]
    options._devices = devices or [gloo.create_default_device()]
    options._timeout, options._threads = timeout, 1
    return options


def collectives_are_checked() -> bool:
    """True if `TORCH_DISTRIBUTED_DEBUG` is DETAIL. Then every collective is compared across ranks before it runs."""
    return bool(getattr(dist, "get_debug_level")() == getattr(dist, "DebugLevel").DETAIL)  # noqa: B009


def join_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Join `meshes`, all sliced from the same mesh, into one mesh with the axes of all."""
    joined: DeviceMesh = DeviceMesh._concatenate(list(meshes))
    return joined


def flatten_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return all axes of `mesh` as one axis."""
    flat: DeviceMesh = mesh._flatten("_".join(mesh.mesh_dim_names or ()))
    return flat


def is_shard(placement: Placement) -> bool:
    """True if the placement cuts the tensor. `_StridedShard` does, although only some versions of torch make it a `Shard`."""
    return isinstance(placement, Shard | _StridedShard)


def strided_shard(dim: int, split_factor: int) -> Placement:
    """Make a `Shard(dim)` of a tensor that later axes of the mesh have already cut into `split_factor` parts along `dim`."""
    return _StridedShard(dim, split_factor=split_factor)


def is_sharded_tensor(value: object) -> bool:
    """True if this is a ShardedTensor, the type that torch had before DTensor."""
    home = sys.modules.get("torch.distributed._shard.sharded_tensor.api")  # not imported: there is none
    return home is not None and isinstance(value, home.ShardedTensor)


def group_of_sharded_tensor(tensor: Any) -> dist.ProcessGroup:
    """Return the group of the ranks that hold this ShardedTensor."""
    group: dist.ProcessGroup = tensor._process_group
    return group


def sharded_tensor_like(shards: Sequence[Tensor], like: Any) -> Any:
    """Make a ShardedTensor with these local shards, cut among the same ranks as `like`; without communication.

    Args:
        shards: the same number as `like` has on this rank, of the same shapes, in the order of their offsets, all on the CPU.
    """
    metadata = copy.deepcopy(like.metadata())
    for place in metadata.shards_metadata:
        place.placement._device = torch.device("cpu")
    places = {tuple(place.shard_offsets): place for place in metadata.shards_metadata}
    offsets = [tuple(shard.metadata.shard_offsets) for shard in like.local_shards()]
    new = dict(zip(sorted(offsets), shards))
    local = [type(shard)(new[at], places[at]) for shard, at in zip(like.local_shards(), offsets)]
    return type(like)._init_from_local_shards_and_global_metadata(
        local, sharded_tensor_metadata=metadata, process_group=like._process_group
    )


IS_PARAMETER = "_is_param"  # torch marks parameters of a Tensor subclass with this attribute


def dcp_place(file: str, offset: int, length: int, seal: int) -> Any:
    """Return what the metadata of torch's DCP holds for each of its blobs: a range of bytes of a file. `seal` is ours; torch ignores it."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    place = _StorageInfo(file, offset, length)
    vars(place)["seal"] = seal
    return place


def quantized_over(integers: Tensor, like: Tensor) -> Tensor:
    """Make a quantized tensor over the memory of its integers, with copies of the scales and zero points of `like`."""
    size = [0] * like.ndim
    if like.qscheme() == torch.per_tensor_affine:
        new = torch._empty_affine_quantized(
            size, scale=like.q_scale(), zero_point=like.q_zero_point(), dtype=like.dtype, device="cpu"
        )
    else:
        new = torch._empty_per_channel_affine_quantized(
            size,
            scales=like.q_per_channel_scales().to("cpu", copy=True),
            zero_points=like.q_per_channel_zero_points().to("cpu", copy=True),
            axis=like.q_per_channel_axis(),
            dtype=like.dtype,
            device="cpu",
        )
    storage, offset = integers.untyped_storage(), int(integers.storage_offset())
    return new.set_(storage, offset, integers.shape, integers.stride())


def storage_key(of: Tensor | torch.UntypedStorage) -> int:
    """Return the identity of a storage while it lives. Unlike `data_ptr`, this works for fake and freed storages."""
    storage = of.untyped_storage() if isinstance(of, Tensor) else of
    return int(storage._cdata)


USE_COUNT = "_storage_Use_Count"  # a function of torch that is not documented


def is_referred_to_elsewhere(storages: list[torch.UntypedStorage], index: int) -> bool | None:
    """True if anything except this list refers to its storage at `index`. None if this version of torch cannot tell.

    Tensors refer to a storage, and so does everything made of them: views, arrays, tensors that autograd saved. Weak references
    cannot tell, because a view outlives its tensor. C++ counts its own references, and no public function returns this count. There,
    all Python references together count as one. So Python references are compared with the references to an object that only
    another list holds.
    """
    use_count = getattr(torch._C, USE_COUNT, None)
    if use_count is None:
        return None
    other = [object()]
    shared: bool = use_count(storages[index]._cdata) > 1
    return shared or sys.getrefcount(storages[index]) > sys.getrefcount(other[0])


class OperatorArgument(NamedTuple):
    """One argument of an operator of torch: its name, its default (None without one), and whether it is written."""

    name: str
    default: Any
    is_written: bool


@functools.cache
def arguments_of(op: Any) -> tuple[OperatorArgument, ...]:
    """Return the arguments of an operator as dispatch modes get it, in order. No public function gives an operator's schema."""
    arguments = op._schema.arguments
    return tuple(
        OperatorArgument(
            a.name,
            a.default_value if a.has_default_value() else None,
            a.alias_info is not None and a.alias_info.is_write,
        )
        for a in arguments
    )


def group_named(name: str) -> dist.ProcessGroup:
    """Return the process group that a functional collective calls by this name."""
    group: dist.ProcessGroup = getattr(dist.distributed_c10d, "_resolve_process_group")(name)  # noqa: B009
    return group


def fake_tensors() -> AbstractContextManager[Any]:
    """Let tensors made in the block have shapes, dtypes and storages that count bytes, but no memory and no values."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(tensor: Tensor) -> bool:
    """True if this tensor was made under `fake_tensors`."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


@contextmanager
def fake_process_group(rank: int, world_size: int) -> Iterator[None]:
    """Let this process pretend to be `rank` of a group of ranks inside the block. torch has this for its own tests.

    Collectives of such a group are not compared (`TORCH_DISTRIBUTED_DEBUG=DETAIL`), because there are no other ranks.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    set_debug_level = getattr(dist, "set_debug_level")  # noqa: B009  (exported, but not declared)
    before = getattr(dist, "get_debug_level")()  # noqa: B009
    set_debug_level(getattr(dist, "DebugLevel").OFF)  # noqa: B009
    try:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        try:
            yield
        finally:
            dist.destroy_process_group()
    finally:
        set_debug_level(before)


def is_fake_work(work: dist.Work) -> bool:
    """True if the work belongs to a fake process group. It is done when it is issued, although its `is_completed` says no."""
    return type(work).__name__ == "FakeWork"


def kinds_of_work() -> list[type]:
    """Return the classes that define `wait`: torch's works, and classes derived from them, as for fake process groups."""
    return [dist.Work, *(kind for kind in dist.Work.__subclasses__() if "wait" in vars(kind))]


@contextmanager
def around_shape_propagation(around: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Enter `around()` whenever DTensor works out the shape of a result, as long as the block runs.

    DTensor then calls the operator on fake tensors of the global shapes. Dispatch modes see this as if it were computed.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    name = "_propagate_tensor_meta_non_cached"
    original = getattr(ShardingPropagator, name)

    @functools.wraps(original)
    def surrounded(*args: Any, **kwargs: Any) -> Any:
        with around():
            return original(*args, **kwargs)

    with mock.patch.object(ShardingPropagator, name, surrounded):
        yield


def functional_operators() -> list[Any]:
    """Return the namespaces of the operators behind functional collectives. There is no public way to watch these."""
    return [torch.ops._c10d_functional, torch.ops._c10d_functional_autograd]


@functools.cache
def is_composite(op: Any) -> bool:
    """True if an operator consists of other operators on all devices. Then look at those operators instead."""
    return bool(op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))


def exchange(a: Tensor, b: Tensor) -> None:
    """Swap two tensors as `torch.utils.swap_tensors` does. This also swaps fake tensors, to which weak references exist."""
    names: list[str] = getattr(copyreg, "_slotnames")(type(a))  # noqa: B009  (as torch does)
    held = [(name, getattr(a, name), getattr(b, name)) for name in names]
    a.__class__, b.__class__ = b.__class__, a.__class__
    a.__dict__, b.__dict__ = b.__dict__, a.__dict__
    for name, of_a, of_b in held:
        setattr(a, name, of_b)
        setattr(b, name, of_a)
    torch._C._swap_tensor_impl(a, b)
