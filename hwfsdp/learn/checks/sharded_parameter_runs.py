"""What ranks of 04 do: every hole on parameters of all kinds, and what can be seen afterwards.

Nothing is communicated: where a gather would fill a parameter's memory, the run does, with what the gather would bring.
So a wrong shard cannot keep another rank waiting. Sections are independent: where one fails, the others still report.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from hwfsdp import storage
from hwfsdp.compat import local_of, storage_key
from hwfsdp.learn.checks.lifetimes import bytes_alive, ready, watch
from hwfsdp.learn.run import Report
from hwfsdp.mesh import ShardMesh, shard_mesh, smaller_mesh
from hwfsdp.param import FSDPParam, Slot
from hwfsdp.placement import spread
from hwfsdp.precision import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

FLAGS = (True, True, False, True)  # requires_grad, as the user sets it before each round
ROUNDS = len(FLAGS)
Data = dict[str, Any]


class Case(NamedTuple):
    """A parameter to shard: its shape, the dimension to cut, its dtype, and which mesh: "1D", "replicated" or "alone".

    `world_size`: of the run; the ranks of the mesh's sharded dimension are as many, or one.
    """

    shape: tuple[int, ...]
    dim: int = 0
    dtype: torch.dtype = torch.float32
    mesh: str = "1D"
    requires_grad: bool = True
    world_size: int = 1

    @property
    def ranks(self) -> int:
        return 1 if self.mesh == "alone" else self.world_size

    def whole(self, seed: int) -> Tensor:
        """No two elements are the same, none is zero, all are exact in bf16."""
        count = torch.arange(1, prod(self.shape) + 1) + seed % 128
        return count.to(self.dtype).view(self.shape)

    def piece(self, whole: Tensor, rank: int) -> Tensor:
        """The oracle: what torch.chunk gives the rank, or nothing."""
        pieces = whole.chunk(self.ranks, self.dim)
        return pieces[rank] if rank < len(pieces) else whole.narrow(self.dim, 0, 0)

    @property
    def padded_numel(self) -> int:
        """Elements of the longest piece."""
        return self.piece(torch.empty(self.shape, device="meta"), 0).numel()

    def __str__(self) -> str:
        return f"shape {self.shape}, Shard({self.dim}), {self.ranks} ranks"


def cases(world_size: int) -> list[Case]:
    """What is to be sharded on so many ranks; a dimension other than 0 is cut into equal parts, or not at all."""
    made = (
        Case((6, 3)),
        Case((5, 3), requires_grad=False),
        Case((7,), dtype=torch.bfloat16),
        Case((4, 2, 2), dtype=torch.float64),
        Case((2, 3)),
        Case((1,)),
        Case((4, 2 * world_size), 1),
        Case((2, world_size, 5), 1, torch.bfloat16),
        Case((2, 2, 3 * world_size), 2),
        Case((5, 2), mesh="replicated"),
        Case((5, 2), mesh="alone"),
        Case((4, 3), 1, mesh="alone"),
    )
    return [case._replace(world_size=world_size) for case in made]


def probe_parameter(report: Report, seed: int) -> None:
    """All sections, whichever of them fail; the first failure counts in the end."""
    ready()
    errors: list[Exception] = []
    for section in (_storages, _shards, _elsewhere, _places, _transitions, _post_forward, _extension):
        try:
            section(report, seed)
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _storages(report: Report, seed: int) -> None:
    """`free` and `allocate` on plain tensors, each with an alias and something that autograd saved."""
    report["storages"] = found = []
    for case in (Case((5, 3)), Case((7,), dtype=torch.bfloat16), Case((2, 2), dtype=torch.float64)):
        tensor, whole = case.whole(seed), case.whole(seed)
        alias = nn.Parameter(tensor.data[:1])
        saved = (alias * alias).sum()
        facts: Data = {"elements": tensor.numel(), "itemsize": tensor.element_size(), "states": []}
        facts["shape"] = list(tensor.shape)
        found.append(facts)
        for action in (storage.free, storage.free, storage.allocate, storage.allocate):
            action(tensor)
            facts["states"].append([action.__name__, _alive(tensor), _alive(alias), list(tensor.shape)])
            if action is storage.allocate and _readable(tensor) and len(facts["states"]) == 3:
                tensor.copy_(whole)
        facts["kept"] = _copy(tensor)
        facts["alias"] = _copy(alias)
        if _readable(alias):
            saved.backward()
            facts["grad"] = alias.grad
    smallest = torch.zeros(1, dtype=torch.uint8)
    storage.free(smallest)
    report["one byte"] = _alive(smallest)


def _alive(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _readable(tensor: Tensor) -> bool:
    """Whether there is memory under every element; nobody may look otherwise."""
    return _alive(tensor) >= (tensor.storage_offset() + tensor.numel()) * tensor.element_size()


def _copy(tensor: Tensor) -> Tensor | None:
    tensor = local_of(tensor) if isinstance(tensor, DTensor) else tensor
    return tensor.detach().clone() if _readable(tensor) else None


class _Unregistered(FSDPParam):
    """Shards and goes no further."""

    def register(self, param: nn.Parameter) -> None: ...

    @property
    def local(self) -> Tensor:
        return _local(self.sharded_param)


class _Moved(_Unregistered):
    """Host memory is memory of its own here, as it is where the device is another one."""

    def _on_shard_device(self, tensor: Tensor) -> Tensor:
        self.host = tensor.clone()
        return self.host


def _mesh(name: str) -> ShardMesh:
    ranks = dist.get_world_size()
    shape = {"1D": (ranks,), "replicated": (1, ranks), "alone": (ranks, 1)}[name]
    names = ("shard",) if len(shape) == 1 else ("replicate", "shard")
    return shard_mesh(init_device_mesh("cpu", shape, mesh_dim_names=names))


def _made(
    case: Case,
    whole: Tensor,
    mesh: ShardMesh,
    slots: Sequence[Slot] = (),
    kind: type[FSDPParam] = FSDPParam,
    offload: OffloadPolicy = OffloadPolicy(),
) -> FSDPParam:
    param = nn.Parameter(whole, requires_grad=case.requires_grad)
    slots = slots or [Slot(nn.Module(), "weight")]
    layout = spread(param, case.dim, mesh, "weight")
    return kind(param, slots, "weight", mesh, MixedPrecisionPolicy(), layout, offload)


def _shards(report: Report, seed: int) -> None:
    """What `shard` makes of parameters of all kinds; memory that nobody wrote is full of NaN meanwhile."""
    meshes = {name: _mesh(name) for name in ("1D", "replicated", "alone")}
    report["shards"] = found = []
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for case in cases(dist.get_world_size()):
            whole = case.whole(seed)
            param = _made(case, whole, meshes[case.mesh], kind=_Unregistered)
            found.append(_facts(param, whole))
            memory = watch(whole)
            del whole  # by all but `param`, if it keeps it
            found[-1]["whole alive"] = bytes_alive([memory])
    finally:
        torch.use_deterministic_algorithms(False)


def _local(sharded: nn.Parameter) -> Tensor:
    return local_of(sharded) if isinstance(sharded, DTensor) else sharded.detach()


def _facts(param: FSDPParam, whole: Tensor) -> Data:
    sharded, padded, layout = param.sharded_param, param.padded_shard, param.spread.sharded
    local = _local(sharded)
    facts: Data = {
        "rank": param.mesh.rank,
        "local": local,
        "padded": padded,
        "padded bytes": _alive(padded),
        "front": [storage_key(local), local.storage_offset()]
        == [storage_key(padded), padded.storage_offset()],
        "row strides": local.stride() == torch.empty(local.shape, device="meta").stride(),
        "shares": storage_key(padded) == storage_key(whole),
        "whole": _copy(whole),
        "parameter": isinstance(sharded, nn.Parameter) and sharded.is_leaf,
        "requires_grad": sharded.requires_grad,
        "dtensor": isinstance(sharded, DTensor),
    }
    if isinstance(sharded, DTensor):
        facts["layout"] = [
            *(str(tuple(sharded.placements)), list(sharded.shape), list(sharded.stride())),
            *(str(sharded.dtype), str(sharded.device_mesh)),
        ]
        facts["wanted"] = [
            *(str(tuple(layout.placements)), list(whole.shape), list(whole.stride())),
            *(str(whole.dtype), str(layout.mesh)),
        ]
    return facts


def _elsewhere(report: Report, seed: int) -> None:
    """On the meta device, and with shards in host memory."""
    case, mesh = Case((5, 3)), shard_mesh(None)
    on_meta = _made(case, torch.empty(case.shape, device="meta"), mesh, kind=_Unregistered)
    report["meta"] = [on_meta.padded_shard.is_meta, on_meta.local.is_meta]
    moved = _made(case, case.whole(seed), mesh, kind=_Moved, offload=CPUOffloadPolicy(pin_memory=False))
    key = storage_key(moved.host) if hasattr(moved, "host") else -1
    report["host"] = [key == storage_key(t) for t in (moved.padded_shard, moved.local)]


def _tied() -> tuple[nn.ModuleDict, list[Slot]]:
    """Three places for one parameter of shape (5, 3), one of which is in a module that keeps a list."""
    weight = nn.Parameter(torch.zeros(5, 3))
    head, tail, rnn = nn.Linear(3, 5, bias=False), nn.Linear(3, 5, bias=False), nn.RNN(3, 5, bias=False)
    head.weight = tail.weight = rnn.weight_ih_l0 = weight
    model = nn.ModuleDict({"head": head, "tail": tail, "rnn": rnn})
    return model, [Slot(head, "weight"), Slot(tail, "weight"), Slot(rnn, "weight_ih_l0")]


def _places(report: Report, seed: int) -> None:
    model, slots = _tied()
    case = Case((5, 3))
    param = _made(case, case.whole(seed), shard_mesh(None), slots)
    report["after init"] = _found_at(model, slots, param.sharded_param)
    another = nn.Parameter(case.whole(seed))
    param.register(another)
    report["after register"] = _found_at(model, slots, another)
    report["names"] = sorted(name for name, _ in model.named_parameters(remove_duplicate=False))


def _found_at(model: nn.ModuleDict, slots: Sequence[Slot], param: nn.Parameter | None) -> Data:
    """Where the very object `param` is found: by attribute, by `get_parameter`, and in the RNN's own list."""
    found = {
        name: getattr(slot.module, slot.name) is param and _listed(slot) is param
        for name, slot in zip(model, slots, strict=True)
    }
    rnn: Any = model["rnn"]
    return {**found, "the RNN's list": rnn._flat_weights[0] is param}


def _listed(slot: Slot) -> nn.Parameter | None:
    """What `named_parameters` gives for this place."""
    return dict(slot.module.named_parameters(recurse=False)).get(slot.name)


def _transitions(report: Report, seed: int) -> None:
    """SHARDED to UNSHARDED and back, four times, as training does; autograd saves in the first round."""
    model, slots = _tied()
    case = Case((5, 3))
    whole = case.whole(seed)
    param = _made(case, whole.clone(), shard_mesh(None), slots)
    sharded, first = param.sharded_param, param.unsharded_param
    rounds: list[Data] = []
    report["rounds"] = rounds
    for number, requires_grad in enumerate(FLAGS):
        sharded.requires_grad_(requires_grad)
        _gather(param, whole)
        first = first if number else param.unsharded_param
        grad = _grad(first)
        param.to_unsharded()
        entered = _state(param, first, model, slots, requires_grad)
        entered["value"] = _copy(slots[1].registered())
        entered["grad kept"] = _grad(first) is grad
        rounds.append({"unsharded": entered})
        if number == 0:
            saved = slots[0].registered()
            loss = (saved**2).sum()
        if number == 1:
            report["error"], report["grad"] = _backward(loss, saved, first)
        grad = _grad(first)
        param.to_sharded()
        left = _state(param, sharded, model, slots, requires_grad)
        rounds[-1]["sharded"] = left | {"grad kept": _grad(first) is grad}
        rounds[-1]["kept"] = [param.unsharded_param is first, _shape(first)]


def _grad(param: nn.Parameter | None) -> Tensor | None:
    return None if param is None else param.grad


def _shape(param: nn.Parameter | None) -> list[int] | None:
    return None if param is None else list(param.shape)


def _backward(loss: Tensor, saved: Tensor, param: nn.Parameter | None) -> tuple[str, Tensor | None]:
    """What autograd says, and the gradient that it left."""
    if isinstance(saved, DTensor) or not _readable(saved):
        return "what autograd saved has no memory", None
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error), None
    return "", None if param is None else param.grad


def _gather(param: FSDPParam, whole: Tensor) -> None:
    """What a gather leaves in a parameter's memory; NaN in the padding."""
    param.allocate()
    if not _readable(param.gathered):
        raise RuntimeError(f"allocate left {_alive(param.gathered)} B under {tuple(param.gathered.shape)}")
    param.gathered.fill_(torch.nan)[: whole.numel()].copy_(whole.flatten())


def _state(
    param: FSDPParam,
    wanted: nn.Parameter | None,
    model: nn.ModuleDict,
    slots: Sequence[Slot],
    flag: bool = True,
) -> Data:
    registered = slots[0].registered()
    return {
        "state": param.state.name,
        "places": _found_at(model, slots, wanted),
        "same": wanted is param.sharded_param or wanted is param.unsharded_param is not None,
        "flag": flag,
        "requires_grad": [registered.requires_grad, param.sharded_param.requires_grad],
        "alive": _alive(param.gathered),
        "mesh": param.gather_mesh is param.mesh,
        "post forward": param.post_forward_shard is None,
    }


def _post_forward(report: Report, seed: int) -> None:
    """Both ways out of POST_FORWARD."""
    model, slots = _tied()
    case = Case((5, 3))
    whole, mesh = case.whole(seed), shard_mesh(None)
    param = _made(case, whole.clone(), mesh, slots)
    smaller = smaller_mesh(mesh, 1)
    report["left"] = left = []
    for leave in ("to_unsharded", "to_sharded"):
        _gather(param, whole)
        param.to_unsharded()
        param.to_post_forward(smaller)
        if leave == "to_unsharded":
            _gather(param, whole)
        getattr(param, leave)()
        wanted = param.unsharded_param if leave == "to_unsharded" else param.sharded_param
        left.append(_state(param, wanted, model, slots))


class _OwnForm:
    """An extension that makes a tensor of nines of whatever it gathered."""

    dtypes = [torch.float32]

    def __init__(self) -> None:
        self.freed = 0

    def unpack(self, local: Any, dtype: torch.dtype, out: Tensor | None) -> Tensor | None:
        return torch.full((5, 3), 9.0) if out is None else None

    def free(self) -> None:
        self.freed += 1


def _extension(report: Report, seed: int) -> None:
    case = Case((5, 3))
    slots = [Slot(nn.Linear(3, 5, bias=False), "weight")]
    param = _made(case, case.whole(seed), shard_mesh(None), slots)
    extension: Any = _OwnForm()
    param.extension = extension
    param.to_unsharded()
    report["own form"] = _copy(slots[0].registered())
    param.to_sharded()
    report["own form freed"] = extension.freed
