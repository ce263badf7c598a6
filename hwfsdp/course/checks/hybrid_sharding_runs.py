"""11, on the ranks: meshes of replicas and shards, parts of a group by themselves, and training steps.

Weights and inputs are integers and halves, and each loss is multiplied by the number of ranks. So no sum and no mean in fp32
has to round, whichever axis is reduced first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import hwfsdp
from hwfsdp.collectives import GroupTransport
from hwfsdp.comm import history
from hwfsdp.core.collectives import Mean, Reducing
from hwfsdp.core.layout import Layout
from hwfsdp.core.group import ParamGroup
from hwfsdp.core.param import FSDPParam, Place
from hwfsdp.core.precision import MixedPrecisionPolicy
from hwfsdp.core.mesh import Axis, Transport
from hwfsdp.core.streams import HostStream, Stream, StreamEvent
from hwfsdp.course.checks.hybrid_sharding_models import ALL, batch, build
from hwfsdp.course.checks.lifetimes import Watched, bytes_alive, copied, ready, watch
from hwfsdp.course.run import Report, attempt, log_data
from hwfsdp.features.group import FSDPCommContext
from hwfsdp.features.hybrid_sharding import HybridMesh, HybridReducer, data_parallel_axes
from hwfsdp.observe import events
from hwfsdp.observe.eventlog import EventLog
from hwfsdp.observe.events import COLLECTIVES

NAMES = ("replicate", "shard")
KEPT_OPS = (*COLLECTIVES, "copy_in", "backward", "wait")


class Setting(NamedTuple):
    """Steps of several micro-batches.

    Attributes:
        reduces: per step, what each micro-batch reduces: "n" nothing, "s" over the shards only, "a" over all ranks. Between two
            steps, gradients are set to None.
        paths: per micro-batch of a step, the layers that its forward runs.
        factor: divide by the number of shards, not of all ranks. force_sum: collectives only sum.
    """

    name: str
    reduces: tuple[str, ...] = ("a",)
    paths: tuple[tuple[int, ...], ...] = (ALL,)
    factor: bool = False
    force_sum: bool = False


ONE = Setting("one batch")
PARTS = Setting("three micro-batches, two of them reduced in part", ("ssa", "a"), (ALL, ALL, ALL))
SKIPPED = Setting("layers that later micro-batches skip", ("ssa",), (ALL, (0, 1), (0,)))
MIXED = Setting("unreduced, reduced in part, all-reduced", ("nsa",), (ALL, ALL, ALL))
LATE = Setting("a step that ends before its all-reduce", ("s", "a"))
FACTOR = Setting("divided by the number of shards", factor=True)
SUMS = Setting("with collectives that only sum", force_sum=True)
SETTINGS = (ONE, PARTS, SKIPPED, MIXED, LATE, FACTOR, SUMS)
ON_OTHERS = (ONE, PARTS, FACTOR)  # for meshes that have one axis of one rank


class MicroBatch(NamedTuple):
    """One backward: whether it is the first of a step, what it reduces, and the layers that run."""

    begins_step: bool
    reduces: str
    path: tuple[int, ...]


def micro_batches(setting: Setting) -> list[MicroBatch]:
    """Return the micro-batches of all steps."""
    return [
        MicroBatch(micro == 0, how, path)
        for pattern in setting.reduces
        for micro, (how, path) in enumerate(zip(pattern, setting.paths, strict=False))
    ]


def loss_of(
    model: nn.Module, seed: int, rank: int, micro: int, path: Sequence[int], world_size: int
) -> Tensor:
    x, counts = batch(seed, rank, micro)
    output: Tensor = model(x, path)
    return (output * counts).sum() * world_size


# --- Axes --------------------------------------------------------------------------------------------------


def _described(axis: Axis) -> list[Any]:
    ranks = None if axis.group is None else dist.get_process_group_ranks(axis.group)
    return [ranks, axis.size, axis.rank]


def _axes(mesh: DeviceMesh) -> list[Any]:
    """Return (shard, replicate) of the mesh, and of the 1D mesh of its second axis."""
    return [[_described(axis) for axis in data_parallel_axes(each)] for each in (mesh, mesh[NAMES[1]])]


def axis_by_hand(mesh: DeviceMesh, dim: int) -> Axis:
    return Axis(mesh.get_group(dim), mesh.size(dim), mesh.get_local_rank(dim))


def mesh_by_hand(mesh: DeviceMesh) -> HybridMesh:
    return HybridMesh(mesh, axis_by_hand(mesh, 1), torch.device("cpu"), axis_by_hand(mesh, 0))


def _placements(mesh: DeviceMesh) -> list[list[str]]:
    """Return placements for dims 0 and 1 on meshes with both axes, with only the shard axis, and with only the replica axis."""
    shard, replicate = axis_by_hand(mesh, 1), axis_by_hand(mesh, 0)
    meshes = [(mesh, shard, replicate), (mesh[NAMES[1]], shard, Axis()), (mesh[NAMES[0]], Axis(), replicate)]
    made = [HybridMesh(grid, s, torch.device("cpu"), r) for grid, s, r in meshes]
    return [[repr(p) for p in each.placements(dim)] for each in made for dim in (0, 1)]


# --- Functions of a group by themselves --------------------------------------------------------------------


def shapes_of(seed: int, shards: int) -> list[tuple[int, ...]]:
    """Return shapes; the shards divide the rows of some, and not of others."""
    more = torch.randint(1, 4, (3,), generator=torch.Generator().manual_seed(seed)).tolist()
    return [(2 * shards + 1, more[0]), (shards,), (1, more[1]), (shards * more[2], 2)]


def _reducer(seed: int, mesh: HybridMesh) -> HybridReducer:
    """Return the reducer of a group by itself."""
    params = []
    for number, shape in enumerate(shapes_of(seed, mesh.size)):
        module, param = nn.Module(), nn.Parameter(torch.ones(shape))
        module.register_parameter("weight", param)
        places, layout = [Place(module, "weight")], Layout(param, mesh)
        params.append(FSDPParam(param, places, f"p{number}", MixedPrecisionPolicy(), layout))
    reducer = HybridReducer(mesh.replicate)
    transport = GroupTransport(mesh.shard, mesh.device)
    ParamGroup("group", params, mesh, FSDPCommContext("cpu"), transport, reducer)
    return reducer


CHOSEN = ((0, 1, 2), (2, 0), (3,), (0, 1, 2, 3))  # the parameters of each reduction, in order


def reduced(group_sizes: Sequence[int], number: int) -> Tensor:
    """Return the result of a reduction; all elements are different."""
    return torch.arange(1.0, 1.0 + sum(group_sizes)) * 2.0 ** (8 * number)


def _partials(seed: int, mesh: HybridMesh) -> dict[str, Any]:
    """Report what is kept after each of three partial reductions; then what a fourth and a fifth reduction take."""
    reducer = _reducer(seed, mesh)
    group, partials = reducer.group, reducer.partial_grads
    shared, kept = [], []
    for number, chosen in enumerate(CHOSEN[:3]):
        params = [group.params[i] for i in chosen]
        result = reduced([p.padded_numel for p in params], number)
        reducer.add_partial_grads(params, result)
        shared.append(_memory(result) in [_memory(grad) for grad in partials.values() if grad.numel()])
        kept.append([copied(partials.get(p)) for p in group.params])
    taken = []
    for chosen in ((0, 1, 3), CHOSEN[3]):
        params = [group.params[i] for i in chosen]
        result = torch.zeros(sum(p.padded_numel for p in params))
        reducer.take_partial_grads(params, result)
        taken.append({"result": result, "left": [p in partials for p in group.params]})
    return {"kept": kept, "shared": shared, "taken": taken}


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Finish(NamedTuple):
    """A call of `HybridReducer.finish` on a rank that has no other replicas: the replica axis has one rank.

    Attributes:
        all_reduce: of the group. partial: p0 has a partial gradient.
    """

    all_reduce: bool
    partial: bool = False


FINISHES = (Finish(False), Finish(True), Finish(True, True), Finish(False, True))


def _finishes(seed: int, mesh: HybridMesh, alone: dist.ProcessGroup) -> list[Any]:
    """Report the gradients before the reduction is over, and after. `alone`: the process group of this rank only."""
    found = []
    for case in FINISHES:
        reducer, work = _reducer(seed, mesh), mock.Mock(spec=["wait"])  # over once someone waits for it
        group = reducer.group
        reducer.replicas, reducer.all_reduce_grads = Axis(alone, 1, 0), case.all_reduce
        if case.partial:
            first = group.params[0]
            reducer.partial_grads[first] = torch.full(first.layout.local_shape, 512.0)
        result, stream = reduced([p.padded_numel for p in group.params], 0), HostStream("reduce_scatter")
        with stream.run():
            stream.add(work)
        reducing = Reducing(result, result, Mean(1, dist.ReduceOp.SUM, 4.0), stream)
        reducer.finish(group.params, reducing)
        before, early = _state(reducer), work.wait.called
        stream.settle()
        group.comm_ctx.settle()
        found.append({"before": before, "early": early, "after": _state(reducer)})
    return found


def _state(reducer: HybridReducer) -> dict[str, Any]:
    params = reducer.group.params
    grads = [p.sharded_param.grad for p in params]
    return {
        "grads": [copied(grad) if isinstance(grad, DTensor) else None for grad in grads],
        "partials": [copied(reducer.partial_grads.get(p)) for p in params],
    }


# --- Training ----------------------------------------------------------------------------------------------


def _train(setting: Setting, seed: int, mesh: DeviceMesh, package: Any) -> list[dict[str, Tensor | None]]:
    """Train, and return the local gradients after each micro-batch."""
    model: Any = build(seed)
    for module in (*model.layers, model):
        package.fully_shard(module, mesh=mesh, reshard_after_forward=True)
        if setting.factor:
            module.set_gradient_divide_factor(float(mesh.size(1)))
        if setting.force_sum:
            module.set_force_sum_reduction_for_comms(True)
    moments: list[dict[str, Tensor | None]] = []
    for micro, (begins_step, how, path) in enumerate(micro_batches(setting)):
        if begins_step:
            model.zero_grad()
        model.set_requires_gradient_sync(how != "n")
        if how != "n":
            model.set_requires_all_reduce(how == "a")
        loss_of(model, seed, dist.get_rank(), micro, path, dist.get_world_size()).backward()
        moments.append({name: copied(p.grad) for name, p in model.named_parameters()})
    return moments


def _run(report: Report, key: str, setting: Setting, seed: int, mesh: DeviceMesh) -> None:
    """Train with instruments: report the log, the ranks of each collective, and the buffers that were kept."""
    with hwfsdp.record() as log, _watched_reductions() as seen:
        notes = _notes()
        since = notes[-1].serial if notes else 0
        report[f"{key}moments"] = _train(setting, seed, mesh, hwfsdp)
        calls = [note for note in _notes() if note.serial > since]
    report[f"{key}calls"] = [[c.op, c.owner, history.members_of(c.group), c.nbytes] for c in calls]
    report[f"{key}seen"] = seen
    shown = [event for event in log.events if event.op in KEPT_OPS]
    report[f"{key}log"] = log_data(EventLog(shown))


def _notes() -> list[history.Call]:
    ring = history._ring
    return history.read(bytes(ring.memory)) if ring is not None else []


@contextmanager
def _watched_reductions() -> Iterator[dict[str, list[Any]]]:
    """Watch what the package does with reductions and collectives.

    Yields what is seen in a step:
        kept: at each reduction, the bytes of inputs of earlier reductions that are still alive.
        goes_on: for each reduction, the stream that it reports at its end.
        issued, queued: for each collective, and each function that follows one, its stream, and the stream that was current.
    """
    keep, hold = FSDPCommContext.keep_until_reduced, FSDPCommContext.hold
    add, then = HostStream.add, HostStream.then
    inputs, going_on = list[Watched](), list[str]()
    seen: dict[str, list[Any]] = {"kept": [], "goes_on": [], "issued": [], "queued": []}

    def keep_until_reduced(
        self: FSDPCommContext, flat: Tensor, done: StreamEvent, transport: Transport
    ) -> None:
        if transport.ranks.size > 1:
            seen["kept"].append(bytes_alive(inputs))
            inputs.append(watch(flat))
        seen["goes_on"].append(going_on.pop() if going_on else "reduce_scatter")
        keep(self, flat, done, transport)

    def hold_result(self: FSDPCommContext, tensor: Tensor, stream: Stream) -> None:
        going_on.append(stream.name)
        hold(self, tensor, stream)

    def streams_of(issued_on: HostStream) -> list[str]:
        recorder = events.active()
        return [issued_on.name, str(recorder.stream) if recorder else ""]

    def add_work(self: HostStream, work: Any) -> None:
        seen["issued"].append(streams_of(self))
        add(self, work)

    def queue(self: HostStream, function: Callable[[], None]) -> None:
        seen["queued"].append(streams_of(self))
        then(self, function)

    with (
        mock.patch.object(FSDPCommContext, "keep_until_reduced", keep_until_reduced),
        mock.patch.object(FSDPCommContext, "hold", hold_result),
        mock.patch.object(HostStream, "add", add_work),
        mock.patch.object(HostStream, "then", queue),
    ):
        yield seen


def _grid(replicas: int) -> DeviceMesh:
    """Arrange all ranks in a mesh with this many replicas."""
    return init_device_mesh("cpu", (replicas, dist.get_world_size() // replicas), mesh_dim_names=NAMES)


def probe_meshes(report: Report, seed: int, replicas: tuple[int, ...]) -> None:
    """Run everything on meshes of all ranks with these numbers of replicas; parts before steps.

    Each rank runs the parts by itself, so a rank that fails in a part leaves no other rank waiting. Process groups are made before.
    """
    ready()
    grids = {number: _grid(number) for number in replicas}
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    for number, grid in grids.items():
        mesh = mesh_by_hand(grid)
        attempt(report, f"{number} axes", partial(_axes, grid))
        attempt(report, f"{number} placements", partial(_placements, grid))
        attempt(report, f"{number} partials", partial(_partials, seed, mesh))
        attempt(report, f"{number} finishes", partial(_finishes, seed, mesh, alone))
    for number, grid in grids.items():
        for setting in settings_of(number, grid.size(1)):
            _run(report, f"{number} {setting.name} ", setting, seed, grid)


def settings_of(replicas: int, shards: int) -> tuple[Setting, ...]:
    return SETTINGS if min(replicas, shards) > 1 else ON_OTHERS


def probe_fsdp2(report: Report, seed: int, replicas: int) -> None:
    """Run the same steps with torch's `fully_shard`: the oracle of the oracle."""
    grid = _grid(replicas)
    for setting in SETTINGS:
        report[setting.name] = _train(setting, seed, grid, torch.distributed.fsdp)


def parts_of(setting: Setting, seed: int, world_size: int) -> list[list[dict[str, Tensor | None]]]:
    """Return the gradients of the model without sharding, by rank and micro-batch."""
    model = build(seed)
    found: list[list[dict[str, Tensor | None]]] = [[] for _ in range(world_size)]
    for rank in range(world_size):
        for micro, (_, _, path) in enumerate(micro_batches(setting)):
            model.zero_grad()
            loss_of(model, seed, rank, micro, path, world_size).backward()
            found[rank].append({name: p.grad for name, p in model.named_parameters()})
    return found
