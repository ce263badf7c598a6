"""Parameters of one module on several meshes: dense ones over all ranks, experts over some of them.

The model is a mixture of experts. Where experts are parallel, a rank holds half of them, and computes them for the rows of two ranks.
The oracles are FSDP2 in the same processes, and the unsharded model.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_common as torchs
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint as recompute

import hwfsdp
import models
from hwfsdp import EventLog
from hwfsdp.observe.analysis import examine
from oracles import (
    BF16_FP32,
    BITS,
    Case,
    Check,
    Library,
    Promises,
    Trace,
    Training,
    accumulate,
    compare_traffic,
    differences,
    grid,
    unequal,
)

PROMISES = Promises()


# --- The model ---------------------------------------------------------------------------------------------


class Gather(torch.autograd.Function):
    """Gather the rows of all ranks of a group. The backward adds up their gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        whole = rows.new_zeros(group.size(), *rows.shape)
        whole[group.rank()] = rows
        dist.all_reduce(whole, group=group)  # an all-reduce, so that all gathers in the log are FSDP's
        return whole.flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size())[ctx.group.rank()], None


class Scatter(torch.autograd.Function):
    """Add up over the ranks of a group, and give each rank its own rows of the sum."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        rows = rows.clone()
        dist.all_reduce(rows, group=group)
        return rows.chunk(group.size())[group.rank()]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return Gather.forward(ctx, grad, ctx.group), None


class Experts(nn.Module):
    """Experts, side by side in two tensors. If they are parallel, these are DTensors."""

    def __init__(self, number: int, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(number, width, hidden) / 4)
        self.down = nn.Parameter(torch.randn(number, hidden, width) / 4)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        up, down = self.up, self.down
        if not isinstance(up, DTensor) or not isinstance(down, DTensor):
            return self.weighted(x, weights, up, down)
        group = up.device_mesh.get_group("ep")
        x, weights = Gather.apply(x, group), Gather.apply(weights, group)
        own = weights.chunk(group.size(), dim=1)[group.rank()]
        return Scatter.apply(self.weighted(x, own, up.to_local(), down.to_local()), group)

    def weighted(self, x: Tensor, weights: Tensor, up: Tensor, down: Tensor) -> Tensor:
        hidden = torch.einsum("nd,edh->enh", x, up).relu()
        return torch.einsum("enh,ehd,ne->nd", hidden, down, weights)


class Mixture(nn.Module):
    """A router, a dense layer, and experts, which get tokens if `has_tokens`."""

    has_tokens = True

    def __init__(self, number: int, hidden: int, experts_first: bool = False) -> None:
        super().__init__()
        children = {
            "dense": nn.Linear(8, 8),
            "router": nn.Linear(8, number),
            "experts": Experts(number, 8, hidden),
        }
        for name in reversed(children) if experts_first else children:
            setattr(self, name, children[name])

    def forward(self, x: Tensor) -> Tensor:
        hidden, weights = torch.tanh(self.dense(x)), self.router(x).softmax(-1)
        if self.has_tokens:
            return self.experts(hidden, weights) + hidden
        return hidden * weights.sum(-1, keepdim=True)


class Mixtures(models.Stem):
    """Mixtures between two layers of the root."""

    recomputes = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + (recompute(block, x, use_reentrant=False) if self.recomputes else block(x))
        return self.head(x)


def mixtures(sizes: Sequence[int] = (6, 4, 2), experts_first: bool = False, **attributes: Any) -> Mixtures:
    """Make blocks with these numbers of experts. 0: a dense layer in place of a mixture."""
    model = Mixtures([Mixture(n, 3 + n % 3, experts_first) if n else nn.Linear(8, 8) for n in sizes])
    vars(model).update(attributes)
    return model


# --- Meshes ------------------------------------------------------------------------------------------------


def expert_grid() -> DeviceMesh:
    return grid((2, 2), ("efsdp", "ep"))


@functools.cache
def nameless() -> DeviceMesh:
    """Make a mesh without names, of ranks 0 and 2 or of ranks 1 and 3."""
    return DeviceMesh.from_group(dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])[0], "cpu")


# Meshes of dense parameters, of experts, and of the experts' second layer if it has its own.
MESHES: dict[str, Callable[[], tuple[DeviceMesh, ...]]] = {
    "two of four": lambda: (grid((4,), ("dp",)), expert_grid()["efsdp"]),
    "without names": lambda: (grid((4,), ("dp",)), nameless()),
    "hybrid experts": lambda: (grid((4,), ("dp",)), grid((2, 2))),
    "hybrid around experts": lambda: (grid((2, 2)), grid((2, 2))["shard"]),
    "three": lambda: (grid((4,), ("dp",)), expert_grid()["efsdp"], expert_grid()["ep"]),
}


@functools.cache
def info_of(mesh: DeviceMesh) -> Any:
    """Return torch's description of a mesh, the same object each time."""
    if mesh.ndim == 2:
        return torchs.HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    return torchs.FSDPMeshInfo(mesh, shard_mesh_dim=0)


def deal_out(experts: Experts) -> None:
    """Give every rank half of the experts: DTensors on the axis `ep`."""
    for name, param in list(experts.named_parameters()):
        part = distribute_tensor(param.detach(), expert_grid()["ep"], [Shard(0)])
        setattr(experts, name, nn.Parameter(part))


def on_meshes(
    package: ModuleType,
    module: Any,
    *,
    kind: str = "two of four",
    parallel: bool = False,
    placement: Shard | None = None,
    torchs_result: bool = False,
    policy: dict[str, Any] | None = None,
    offload: bool = False,
    **options: Any,
) -> Any:
    """Call a package's fully_shard. With `parallel`, deal out the experts first, and divide sums by all ranks."""
    dense, *sparse = MESHES[kind]()
    found = [each for each in nn.ModuleList(module if isinstance(module, list) else [module]).modules()]
    experts = [each for each in found if isinstance(each, Experts) and not isinstance(each.up, DTensor)]
    for each in experts if parallel else ():
        deal_out(each)
    if package is hwfsdp and not torchs_result:
        results: list[Any] = [hwfsdp.ShardPlacementResult(placement, mesh) for mesh in sparse]
    else:
        results = [torchs.ShardPlacementResult(placement, info_of(mesh)) for mesh in sparse]
    chosen = {each.up: results[0] for each in experts} | {each.down: results[-1] for each in experts}
    package.fully_shard(
        module,
        mesh=dense,
        mp_policy=package.MixedPrecisionPolicy(**policy or {}),
        offload_policy=package.CPUOffloadPolicy(pin_memory=False) if offload else package.OffloadPolicy(),
        shard_placement_fn=chosen.get,
        **options,
    )
    for each in (module if isinstance(module, list) else [module]) if parallel else ():
        each.set_gradient_divide_factor(4)
        each.set_force_sum_reduction_for_comms(True)  # FSDP2 cannot divide by a number of its own on gloo
    return module


ours, theirs = (functools.partial(on_meshes, package) for package in (hwfsdp, fsdp))


# --- The same values as FSDP2 ------------------------------------------------------------------------------


def two_steps(training: Training) -> None:
    training.steps(2)


def case(
    scenario: Any = two_steps, sizes: Sequence[int] = (5, 6), how: str = "blocks", **options: Any
) -> Case:
    attributes = {name: options.pop(name) for name in ("experts_first", "recomputes") if name in options}
    return Case(functools.partial(mixtures, sizes, **attributes), scenario, how, options, on_meshes)


def prefetching(training: Training) -> None:
    """Set lists: in forward, the first block gathers the next two; in backward, the last block gathers the two before."""
    first, second, third = training.model.blocks
    first.set_modules_to_forward_prefetch([second, third])
    third.set_modules_to_backward_prefetch([second, first])
    training.steps(2)


def idle(training: Training) -> None:
    """Leave the experts on rank 0 without work. The rank reduces zeros."""
    training.call("set_reduce_scatter_unused_params", True)
    for block in training.model.blocks:
        block.has_tokens = dist.get_rank() != 0
    training.steps(2)


CASES: dict[str, Case] = {
    **{
        f"meshes: {kind}": case(kind=kind) for kind in MESHES if kind != "without names"
    },  # `names` trains there
    "meshes: two of four, bf16": case(policy=BF16_FP32),
    "kept after forward; what torch's function returns": case(
        reshard_after_forward=False, torchs_result=True
    ),
    "columns of experts, registered first, recomputed": case(
        sizes=(4, 7, 1), placement=Shard(1), experts_first=True, recomputes=True
    ),
    "a list of blocks; experts without tokens": case(idle, how="lists"),
    "accumulate nb": case(functools.partial(accumulate, pattern="nb")),
    "prefetch lists, offloaded": case(prefetching, sizes=(5, 6, 3), offload=True),
}
PARALLEL: dict[str, Case] = {
    "uneven experts in parallel": case(sizes=(6, 4, 2), parallel=True),
}
PROMISES.trains(
    "groups on several meshes train as FSDP2's do",
    CASES,
    ranks=4,
    not_plain=CASES,
)
PROMISES.trains(
    "experts in parallel train as FSDP2's do, and as the model that is not sharded",
    PARALLEL,
    ranks=4,
)


# --- Traffic -----------------------------------------------------------------------------------------------


UNEVEN = PARALLEL["uneven experts in parallel"]
PROMISES.add(
    "collectives are FSDP2's, in FSDP2's order",
    {"uneven experts in parallel": functools.partial(compare_traffic, UNEVEN, seeds=(0, 1, 2))},
    ranks=4,
)


def waits() -> dict[str, list[str]]:
    """Check that the packing of gradients waits for the reductions of the module before, and not for the other group's."""
    _, log = recorded("two of four")
    found = []
    for block in (2, 1):
        both = [f"blocks.{block} [efsdp]", f"blocks.{block}"]
        first, second = (log.select("reduce_scatter", owner=name)[0] for name in both)
        [packing] = log.select("copy_in", owner=both[1], phase="backward", stream="compute")
        [next_packing] = log.select(
            "copy_in", owner=f"blocks.{block - 1} [efsdp]", phase="backward", stream="compute"
        )
        if log.happens_before(first, packing):
            found.append(f"{both[1]} is packed after the reduction of {both[0]}")
        if not all(log.happens_before(each, next_packing) for each in (first, second)):
            found.append(f"more reductions in flight than the two of blocks.{block}")
    return {"waits": found}


PROMISES.add("the reductions of one module do not wait for each other", {"two groups": waits}, ranks=4)


# --- Norms, state dicts, checkpoints -----------------------------------------------------------------------


def trained(library: Library, steps: int) -> Training:
    training = Training(functools.partial(mixtures, (6, 4, 2)), library, parallel=True)
    training.steps(steps)
    return training


def state_of_all(training: Training) -> dict[str, Any]:
    model, optimizer = get_state_dict(training.model, training.optimizer)
    return {"model": model, "optimizer": optimizer}


def through_dcp() -> dict[str, list[str]]:
    """Save with FSDP2, load with hwfsdp, and compare two more steps."""
    folder, first, second = [tempfile.mkdtemp()], trained(theirs, 1), trained(ours, 2)
    dist.broadcast_object_list(folder)
    dcp.save(state_of_all(first), checkpoint_id=folder[0])
    state = state_of_all(second)
    dcp.load(state, checkpoint_id=folder[0])
    set_state_dict(
        second.model, second.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    shutil.rmtree(folder[0], ignore_errors=True)
    for training in (first, second):
        training.trace = Trace()
        training.steps(2, first_seed=5)
    return {"FSDP2": differences(second.trace, first.trace, *BITS)}


PROMISES.add(
    "state dicts and checkpoints hold the parameters of all meshes", {"DCP, from FSDP2": through_dcp}, ranks=4
)


# --- Names -------------------------------------------------------------------------------------------------


def recorded(kind: str) -> tuple[Training, EventLog]:
    training = Training(functools.partial(mixtures, (4, 4, 4)), ours, kind=kind)
    training.steps(1)
    with hwfsdp.record() as log:
        training.steps(1)
    return training, log


def names(kind: str, label: str) -> dict[str, list[str]]:
    training, log = recorded(kind)
    expected = [name for i in range(3) for name in (f"blocks.{i}", f"blocks.{i}{label}")] + ["Mixtures"]
    explained = {row.group: row.fqn for row in hwfsdp.explain(training.model).rows}
    about = {group["fqn"]: group["shards"] for group in log.about["groups"]}
    found = examine(log)
    seen = {
        "explain": sorted(explained) == sorted(expected) and "experts" in explained[f"blocks.0{label}"],
        "owners": sorted({event.owner for event in log.collectives()}) == sorted(expected),
        "recording": sorted(about) == sorted(expected)
        and (about["blocks.0"], about[f"blocks.0{label}"]) == (4, 2),
        "closed form": found.as_expected is True and found.races == [],
    }
    return {"names": [f"{what}: {explained} {about}" for what, right in seen.items() if not right]}


PROMISES.add(
    "the groups of a module have names of their own",
    {
        "by axes": functools.partial(names, "two of four", " [efsdp]"),
        "by size": functools.partial(names, "without names", " [2 ranks]"),
    },
    ranks=4,
)


# --- Mistakes ----------------------------------------------------------------------------------------------


def refused(
    *words: str,
    mesh: Any = None,
    result: Any = None,
    ranks: Sequence[int] = range(4),
    build: Any = None,
) -> dict[str, list[str]]:
    """Check that these ranks raise an error with these words, and that the model is unchanged."""
    model = (build or functools.partial(mixtures, (5,)))()
    before = dict(model.named_parameters())
    experts = set(model.blocks[0].experts.parameters())
    mesh, result = (make() if callable(make) else make for make in (mesh or grid((4,), ("dp",)), result))
    if not hasattr(result, "mesh_info"):
        result = hwfsdp.ShardPlacementResult(None, result)
    if dist.get_rank() not in ranks:
        return {"refused": []}
    with pytest.raises(hwfsdp.UsageError) as caught:
        hwfsdp.fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: result if p in experts else None)
    found = [f"{word!r} not in {caught.value}" for word in words if word not in str(caught.value)]
    return {"refused": found + unequal(dict(model.named_parameters()), before)}


def tied() -> Mixtures:
    """Make a model whose router and experts share memory, as two parameters."""
    model = mixtures((8,))
    model.blocks[0].router.weight = nn.Parameter(model.blocks[0].experts.up.detach()[0])
    return model


def of_one_mesh_only() -> dict[str, list[str]]:
    """Check that setters for a single mesh are refused, as by FSDP2."""
    for library in (ours, theirs):
        block = library(mixtures((5,)).blocks[0])
        for setter in ("set_custom_all_gather", "set_custom_reduce_scatter", "set_all_reduce_hook"):
            with pytest.raises(ValueError):
                getattr(block, setter)(lambda *_: None)
    return {"refused": []}


MISTAKES: dict[str, Check] = {
    "ranks that overlap": functools.partial(
        refused,
        "[0, 1, 2]",
        "[1, 2, 3], which overlap",
        mesh=lambda: DeviceMesh("cpu", [0, 1, 2]),
        result=lambda: DeviceMesh("cpu", [1, 2, 3]),
        ranks=(1, 2),
    ),
    "another device type": functools.partial(
        refused, "'cpu'", "'meta'", result=lambda: DeviceMesh.from_group(dist.group.WORLD, "meta")
    ),
    "no axis to shard over": functools.partial(
        refused,
        "to shard over",
        result=lambda: torchs.ShardPlacementResult(
            None, torchs.DDPMeshInfo(grid((4,), ("dp",)), replicate_mesh_dim=0)
        ),
    ),
    "tied by their memory": functools.partial(
        refused,
        "router.weight",
        "shares its memory",
        "one nn.Parameter",
        result=lambda: expert_grid()["efsdp"],
        build=tied,
    ),
    "of one mesh only": of_one_mesh_only,
}
PROMISES.add("what does not fit is refused", MISTAKES, ranks=4)


test_promise = PROMISES.test()
