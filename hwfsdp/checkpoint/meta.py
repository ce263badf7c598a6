"""From the meta device straight into shards.

A model that is built and sharded on the meta device costs nothing. It still needs memory for this rank's shards, and values
from a checkpoint. So:

    with torch.device("meta"):
        model = GPT(config)
    fully_shard(model)
    state_dict = init_meta_model(model)        memory, for what a checkpoint holds
    load(state_dict, path)                     values, written where the model has them
    check_materialized(model, optimizer)       nothing was forgotten

`load(model, path)` does the middle two at once, and leaves the model on the meta device if it fails.

`init_optimizer_state` is the same for an optimizer: the state that it would have after a step, to load into.

Note [The same objects]
    Who holds a parameter, an optimizer for example, must go on holding the right one. So tensors are not replaced in
    the places where they are found: the new tensor and the old one exchange what they are (`swap_tensors`). But a
    state dict does not hold the model's tensors, it holds detached ones, which have nothing in common with them except
    the storage. On the meta device a storage is a name without memory, and names are enough: every storage becomes
    one new block of memory, and every tensor a view into the block that stands for its storage, with the strides and
    the offset that it had. Tied weights stay tied, a slice stays a slice, and entries of a state dict, given the model
    (`model=`), stay views of its parameters.

Note [Whose shape]
    The local shape of a DTensor is computed here (`layout`), because a DTensor that was made on the meta device may have
    torch's, which is wrong where cuts are strided and uneven. Such a tensor gets memory of its own.

Left out: values. Non-persistent buffers have none in any checkpoint; they stay on the meta device, where
`check_materialized` finds them, instead of being given memory that holds nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable, Iterator
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from hwfsdp.checkpoint.messages import KeyPath, listed, refuse, show
from hwfsdp.checkpoint.optimizer_state import init_optimizer_state
from hwfsdp.checkpoint.tensors import is_expanded, memory_of
from hwfsdp.checkpoint.traverse import leaves_of
from hwfsdp.compat import dtensor, is_sharded_tensor, storage_key
from hwfsdp.core.group import ParamGroup
from hwfsdp.core.state import state_of
from hwfsdp.errors import StateError, UnsupportedError
from hwfsdp.features.offload import is_offloaded
from hwfsdp.layout.extents import compute_local_shape_and_global_offset, compute_local_stride

__all__ = ["check_materialized", "init_meta_model", "init_optimizer_state", "init_state_dict"]

StateDict = TypeVar("StateDict", bound=dict[Any, Any])


@torch.no_grad()
def init_state_dict(
    state_dict: StateDict,
    device: torch.device | str | None = None,
    *,
    model: nn.Module | None = None,
) -> StateDict:
    """Give every tensor on the meta device memory, in place; what the memory holds is undefined until it is loaded.

    No communication. Tensors stay the same objects, in the state dict and in whatever else holds them (Note [The same
    objects]). Shapes, dtypes, strides, placements and `requires_grad` stay, gradients on the meta device do not.
    Tensors elsewhere are not touched.

    Args:
        state_dict: nested or not; tensors and DTensors, cut evenly or not.
        device: where the memory is. By default each DTensor's goes to its mesh's kind of device, in host memory if
            FSDP offloads it, and all other memory to the kind of device that the DTensors are on.
        model: the one whose `state_dict()` it is. Its parameters and buffers that share storage with entries get their
            memory, too, and entries are views of it. With `model.state_dict(keep_vars=True)` entries are the
            parameters themselves, and the model need not be given.

    Returns:
        `state_dict`.

    Raises:
        UsageError: the device is meta, or a parameter is lazy. UnsupportedError: a tensor that is sparse or a
            ShardedTensor, or the detached entry of a parameter that is a tensor subclass. StateError: something holds
            a weak reference to a tensor. Nothing was touched then.
    """
    _init(state_dict, device, model)
    return state_dict


class NewMemory:
    """A state dict to load into, or a module's. What is on the meta device gets memory, as `init_state_dict` gives it.

    Within the context, an error puts everything back on the meta device. At the end of it, a module gets what its state
    dict holds besides tensors.

    Attributes:
        state_dict: to load into. paths: of the entries that got memory; they hold nothing before they are loaded.
    """

    def __init__(self, target: Any, device: torch.device | str | None, model: nn.Module | None) -> None:
        self._module = target if isinstance(target, nn.Module) else None
        self.state_dict: Any = target if self._module is None else self._module.state_dict()
        self._device, self._model = device, model if self._module is None else self._module
        self._rooms: _Rooms | None = None
        self.paths: list[KeyPath] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is not None:
            self.take_back()
        elif self._module is not None:
            self._module.load_state_dict(self.state_dict)

    @torch.no_grad()
    def give(self) -> None:
        """Give it, once; raise what `init_state_dict` raises."""
        on_meta = [path for path, v in leaves_of(self.state_dict) if isinstance(v, Tensor) and v.is_meta]
        if on_meta:
            self._rooms, self.paths = _init(self.state_dict, self._device, self._model), on_meta

    @torch.no_grad()
    def take_back(self) -> None:
        """Put everything back on the meta device, as it was."""
        if self._rooms is not None:
            self._rooms.take_back()
            for group in _groups_of(self._model):
                group.adopt_registered()

    def check_loaded(self, found: Container[Any]) -> None:
        """Raise if something on the meta device is not among the paths that a checkpoint has."""
        missing = [show(path) for path in self.paths if path not in found]
        if missing:
            expected = "values for everything in the state dict that is on the meta device"
            got = f"no entry in the checkpoint for {_counted(missing)}"
            remedy = "Take it out of the state dict, or initialize it first: to_empty, then its values."
            refuse("load", expected, got, remedy)


def _init(state_dict: Any, device: torch.device | str | None, model: nn.Module | None) -> _Rooms:
    if device is not None and torch.device(device).type == "meta":
        remedy = "Leave it out for the device of the mesh."
        refuse("init_state_dict(device='meta')", "a device with memory", "meta", remedy)
    tensors = {show(path): value for path, value in leaves_of(state_dict) if isinstance(value, Tensor)}
    entries = {name: t for name, t in tensors.items() if is_sharded_tensor(t) or t.is_meta}
    of_model = _sharing_storage(model, entries.values())
    for name, tensor in (entries | of_model).items():
        _check_exchangeable(name, tensor)
    if model is not None:
        _check_connected(entries, of_model)
    rooms = _Rooms(device, [*of_model.values(), *entries.values()])
    _exchange_groups(model, {id(tensor) for tensor in of_model.values()}, rooms)
    for tensor in (*of_model.values(), *entries.values()):
        rooms.exchange(tensor)
    return rooms


def init_meta_model(model: nn.Module, device: torch.device | str | None = None) -> dict[str, Any]:
    """Give the model's parameters and persistent buffers on the meta device memory, for a checkpoint to be loaded into.

    Args:
        model: sharded or not. Buffers that are not persistent are left where they are, since no checkpoint has them.
        device: see `init_state_dict`.

    Returns:
        `model.state_dict()`. What is copied into its tensors is in the model.

    Raises:
        What `init_state_dict` does.
    """
    return init_state_dict(model.state_dict(), device, model=model)


def _sharing_storage(model: nn.Module | None, entries: Iterable[Tensor]) -> dict[str, Tensor]:
    """Parameters and buffers on meta, by fqn, whose storage is one of the entries' storages."""
    if model is None:
        return {}
    for group in _groups_of(model):
        group.reshard()
    keys = {_key(entry) for entry in entries}
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor for name, tensor in found.items() if tensor.is_meta and _key(tensor) in keys}


def _groups_of(model: nn.Module | None) -> Iterator[ParamGroup]:
    for module in model.modules() if model is not None else ():
        if (state := state_of(module)) is not None:
            yield from state.groups


def _is_subclass(tensor: Tensor) -> bool:
    """Whether the memory belongs to tensors inside the tensor, not to the tensor."""
    memory = memory_of(tensor)
    return not (type(memory) is Tensor or isinstance(memory, nn.Parameter))


def _key(tensor: Tensor) -> int:
    return id(tensor) if _is_odd(tensor) or _is_subclass(tensor) else storage_key(memory_of(tensor))


def _is_odd(tensor: Tensor) -> bool:
    return is_sharded_tensor(tensor) or is_lazy(tensor) or tensor.layout != torch.strided


def _check_exchangeable(name: str, tensor: Tensor) -> None:
    if is_lazy(tensor):
        remedy = "Run a forward, or build the module with its sizes."
        refuse(name, "a tensor of known shape", "a lazy parameter", remedy)
    if _is_odd(tensor):
        got = "a ShardedTensor" if is_sharded_tensor(tensor) else f"one of layout {tensor.layout}"
        expected = "a dense Tensor or DTensor on the meta device"
        refuse(name, expected, got, "Build this one off the meta device.", UnsupportedError)
    if references := weakref.getweakrefs(tensor):
        remedy = "Initialize memory first, then build what refers to its tensors."
        expected = "no weak reference to a tensor on the meta device"
        refuse(name, expected, f"{len(references)}", remedy, StateError)


def _check_connected(entries: dict[str, Tensor], of_model: dict[str, Tensor]) -> None:
    own = {id(tensor) for tensor in of_model.values()}
    for name, tensor in entries.items():
        if _is_subclass(tensor) and id(tensor) not in own:
            expected = "a plain tensor in each shard, where entries are detached from the model"
            got, remedy = type(memory_of(tensor)).__name__, "Take model.state_dict(keep_vars=True)."
            refuse(name, expected, got, remedy, UnsupportedError)


class _Rooms:
    """New memory for what is on meta: a block for each storage (Note [The same objects])."""

    def __init__(self, device: torch.device | str | None, tensors: list[Tensor]) -> None:
        self.device = None if device is None else torch.device(device)
        kinds = [tensor.device_mesh.device_type for tensor in tensors if isinstance(tensor, DTensor)]
        default = torch.get_default_device()
        self.elsewhere = torch.device(kinds[0] if kinds else "cpu" if default.type == "meta" else default)
        self.blocks: dict[int, torch.UntypedStorage] = {}
        # What is known by identity has to live. Of each tensor what it was before, in the order of the exchanges.
        self.exchanged: list[tuple[Tensor, Tensor]] = []

    def exchange(self, tensor: Tensor, is_offloaded: bool = False) -> None:
        """Give the tensor memory, if it has none."""
        if not tensor.is_meta:
            return
        device = self.device or (torch.device("cpu") if is_offloaded else self._home(tensor))
        new = self._with_memory(tensor, device)
        if isinstance(tensor, nn.Parameter):
            new = nn.Parameter(new, requires_grad=tensor.requires_grad)
        elif tensor.requires_grad:
            new.requires_grad_()
        if type(new) is not type(tensor):  # a kind of nn.Parameter
            new.__class__ = type(tensor)
        new.__dict__.update(tensor.__dict__)
        torch.utils.swap_tensors(tensor, new)
        self.exchanged.append((tensor, new))

    def take_back(self) -> None:
        """Make every tensor what it was before."""
        while self.exchanged:
            torch.utils.swap_tensors(*self.exchanged.pop())

    def _home(self, tensor: Tensor) -> torch.device:
        return torch.device(tensor.device_mesh.device_type) if isinstance(tensor, DTensor) else self.elsewhere

    def _with_memory(self, tensor: Tensor, device: torch.device) -> Tensor:
        memory = memory_of(tensor).detach()
        if not isinstance(tensor, DTensor):
            return self._alike(memory, device)
        shape = tuple(memory.shape)
        if tensor.device_mesh.get_coordinate() is not None:
            shape = compute_local_shape_and_global_offset(
                tensor.shape, tensor.device_mesh, tensor.placements
            )[0]
        if shape == tuple(memory.shape):
            local = self._alike(memory, device)
        else:  # Note [Whose shape]
            stride = compute_local_stride(tensor.stride(), shape)
            local = torch.empty_strided(shape, stride, dtype=memory.dtype, device=device)
        return dtensor(local, tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())

    def _alike(self, memory: Tensor, device: torch.device) -> Tensor:
        if _is_subclass(memory):
            return torch.empty_like(memory, device=device)
        if is_expanded(memory):
            return torch.empty(memory.shape, dtype=memory.dtype, device=device)
        key = storage_key(memory)
        if key not in self.blocks:
            size = memory.untyped_storage().nbytes()
            self.blocks[key] = torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()
        offset, shape, stride = int(memory.storage_offset()), memory.shape, memory.stride()
        return torch.empty(0, dtype=memory.dtype, device=device).set_(self.blocks[key], offset, shape, stride)


def _exchange_groups(model: nn.Module | None, wanted: set[int], rooms: _Rooms) -> None:
    """Parameters of FSDP groups, group by group: where a group moves its rows into padded memory, that is the block."""
    for group in _groups_of(model):
        params = [p.sharded_param for p in group.params if id(p.sharded_param) in wanted]
        keys = {id(param): _key(param) for param in params if not _is_subclass(param)}
        for param in params:
            rooms.exchange(param, is_offloaded(group))
        group.adopt_registered()
        for param in params:
            if id(param) in keys and keys[id(param)] in rooms.blocks:
                rooms.blocks[keys[id(param)]] = memory_of(param).untyped_storage()


# --- Nothing forgotten -------------------------------------------------------------------------------------


def check_materialized(model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Raise if something of the model is on the meta device, or if the optimizer would update something else.

    Looks at parameters, buffers (persistent or not) and tensors that are plain attributes of modules; of the optimizer at
    the parameters in its groups, and at its state.

    Raises:
        StateError: names the first few and how to initialize them, and counts the rest; or an optimizer's group and
            the index in it of a parameter that the model does not have (any more).
    """
    found = _left_on_meta(model)
    if found:
        remedies = [remedy for remedy in (_LOAD, _COMPUTE) if any(remedy == of for _, of in found)]
        subject, got = f"{type(model).__name__} after loading", _counted([name for name, _ in found])
        refuse(subject, "nothing on the meta device", got, " ".join(remedies), StateError)
    if optimizer is not None:
        _check_optimizer(model, optimizer)


_LOAD = "Call init_meta_model(model) and load a checkpoint, or model.to_empty(device=…) and initialize what is new."
_COMPUTE = "No checkpoint has non-persistent buffers and attributes: compute them again, and assign them to their module."


def _left_on_meta(model: nn.Module) -> list[tuple[str, str]]:
    """Each tensor on the meta device, by its fqn, and what to do about it."""
    found = [(f"parameter {n!r}", _LOAD) for n, p in model.named_parameters() if p.is_meta]
    on_meta = {name: buffer for name, buffer in model.named_buffers() if buffer.is_meta}
    persistent = {id(value) for value in model.state_dict(keep_vars=True).values()} if on_meta else set()
    for name, buffer in on_meta.items():
        kept = id(buffer) in persistent
        found.append((f"{'' if kept else 'non-persistent '}buffer {name!r}", _LOAD if kept else _COMPUTE))
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                found.append((f"attribute {f'{prefix}.{name}'.lstrip('.')!r}", _COMPUTE))
    return found


def _counted(names: list[str]) -> str:
    return f"{len(names)}: {listed(names)}"


def _check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    fsdp_params = [p for group in _groups_of(model) for p in group.params]
    known = {id(param) for param in model.parameters()}
    known -= {id(p.places[0].registered()) for p in fsdp_params}  # may be the whole one, just now
    known |= {id(p.sharded_param) for p in fsdp_params}
    stale, states = [], []
    for number, group in enumerate(optimizer.param_groups):
        for index, param in enumerate(group["params"]):
            name = f"param_groups[{number}]['params'][{index}]"
            if id(param) not in known:
                stale.append(f"{name} of shape {tuple(param.shape)} on {param.device}")
            for key, value in optimizer.state.get(param, {}).items():
                if isinstance(value, Tensor) and value.is_meta:
                    states.append(f"state {key!r} of {name}")
    kind = type(optimizer).__name__
    if stale:
        got = f"{_counted(stale)} that the model does not have"
        remedy = "Build the optimizer after fully_shard, which makes new parameters, and while they are "
        remedy += "sharded; otherwise a step changes tensors that the model does not use."
        refuse(kind, "parameters that are the model's own objects", got, remedy, StateError)
    if states:
        remedy = "Call init_state_dict(optimizer.state_dict()), and load a checkpoint into it."
        refuse(kind, "no state on the meta device", _counted(states), remedy, StateError)
