"""From the meta device straight into shards.

A model that is built and sharded on the meta device needs no memory. Then it needs memory for this rank's shards, and values
from a checkpoint. So:

    with torch.device("meta"):
        model = GPT(config)
    fully_shard(model)
    state_dict = init_meta_model(model)        allocate memory for the entries of a checkpoint
    load(state_dict, path)                     write the values into the model's tensors
    check_materialized(model, optimizer)       check that nothing was forgotten

`load(model, path)` does the two steps in the middle at once. If it fails, it leaves the model on the meta device.

`init_optimizer_state` does the same for an optimizer: it makes the state that the optimizer would have after a step, to load
into.

Note [The same objects]
    An optimizer, or any other code that holds a parameter, must go on holding the right one. So we do not put new tensors in
    the places of old ones. Instead, the new tensor and the old tensor exchange their contents (`swap_tensors`). But a state dict
    does not hold the model's tensors. It holds detached tensors, which share only the storage with them. On the meta device, a
    storage has an identity but no memory, and the identity is enough: every storage becomes one new block of memory. Every
    tensor becomes a view of the block for its storage, with the same strides and offset as before. So tied weights stay tied,
    and a slice stays a slice. If the model is given (`model=`), entries of a state dict stay views of its parameters.

Note [Whose shape]
    This module computes the local shape of a DTensor with `layout`. A DTensor that was made on the meta device may have torch's
    local shape, which is wrong where cuts are strided and uneven. Such a tensor gets memory of its own.

Note [One parameter at a time]
    Only the step of an optimizer knows which state the optimizer keeps. So we make a step with gradients that are zero. We make
    it for each parameter alone. So we need a copy of only one parameter to restore its bits afterwards.

Left out: values. No checkpoint has values for non-persistent buffers. They stay on the meta device, where `check_materialized`
finds them. Memory without values would hide them.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from hwfsdp.checkpoint.boxes import is_expanded, local_shape_of, part_of
from hwfsdp.checkpoint.error_messages import KeyPath, listed, refusal, refuse, show, told
from hwfsdp.checkpoint.traverse import leaves_of, state_dict_of
from hwfsdp.compat import dtensor, is_sharded_tensor, local_of, storage_key, wrap_like
from hwfsdp.core.group import ParamGroup
from hwfsdp.core.state import state_of
from hwfsdp.errors import FSDPError, StateError, UnsupportedError
from hwfsdp.features.policies import is_offloaded
from hwfsdp.layout.extents import compute_local_stride

StateDict = TypeVar("StateDict", bound=dict[Any, Any])


@torch.no_grad()
def init_state_dict(
    state_dict: StateDict,
    device: torch.device | str | None = None,
    *,
    model: nn.Module | None = None,
) -> StateDict:
    """Give memory to every tensor on the meta device, in place. The memory holds undefined values until the tensors are loaded.

    There is no communication. A tensor that is a slice of another one keeps its place in it: the memory of all of the other one is
    allocated, even if only the slice is in the state dict. To get memory for the slice alone, put a clone of it into the state dict.

    Tensors stay the same objects, in the state dict and in every other place that holds them (Note [The
    same objects]). Shapes, dtypes, strides, placements and `requires_grad` stay the same; gradients on the meta device are dropped.
    Tensors on other devices are not changed.

    Args:
        state_dict: may be nested; has tensors and DTensors, which may be cut unevenly.
        device: where the memory is. By default, a DTensor gets memory on its mesh's kind of device, or in host memory if FSDP
            offloads it. All other tensors get memory on the kind of device that the DTensors are on.
        model: the model whose `state_dict()` this is. Its parameters and buffers that share storage with entries get memory,
            too, and the entries are views of it. With `model.state_dict(keep_vars=True)`, the entries are the parameters
            themselves, and this argument is not needed.

    Returns:
        `state_dict`.

    Raises:
        UsageError: the device is meta, or a parameter is lazy.
        UnsupportedError: a tensor is sparse or a ShardedTensor, or an entry is detached from a parameter that is a tensor subclass.
        StateError: there is a weak reference to a tensor.
        In all cases, nothing was changed.
    """
    _init(state_dict, device, model)
    return state_dict


class NewMemory:
    """A state dict to load into, given directly or as a module. Tensors on meta get memory, as in `init_state_dict`.

    If an error leaves the context, all these tensors go back to the meta device. At the end of the context, a module gets the
    entries of its state dict that are not tensors.

    Attributes:
        state_dict: the state dict to load into; None before `give`. paths: the entries that got memory; they hold no values before the load.
    """

    def __init__(self, target: Any, device: torch.device | str | None, model: nn.Module | None) -> None:
        self._module = target if isinstance(target, nn.Module) else None
        self.state_dict: Any = None
        self._target = target
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
        """Take the state dict, and give memory to its tensors on meta; both once. Raise the errors of `init_state_dict`."""
        if self.state_dict is None:
            self.state_dict = state_dict_of(self._target)
        on_meta = [path for path, v in leaves_of(self.state_dict) if isinstance(v, Tensor) and v.is_meta]
        if on_meta:
            self._rooms, self.paths = _init(self.state_dict, self._device, self._model), on_meta

    @torch.no_grad()
    def take_back(self) -> None:
        """Put all these tensors back on the meta device, as they were."""
        if self._rooms is not None:
            self._rooms.take_back()
            for group in _groups_of(self._model):
                group.adopt_registered()


def check_all_filled(on_meta: Collection[KeyPath], found: Container[KeyPath]) -> None:
    """Raise an error if an entry that was on the meta device is not among the paths to load."""
    missing = [show(path) for path in on_meta if path not in found]
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
    """Give memory to the model's parameters and persistent buffers on the meta device, so that a checkpoint can be loaded.

    Args:
        model: sharded or not. Non-persistent buffers stay on the meta device, because no checkpoint has them.
        device: see `init_state_dict`.

    Returns:
        `model.state_dict()`. A value that is copied into one of its tensors is in the model.

    Raises:
        The errors of `init_state_dict`.
    """
    return init_state_dict(model.state_dict(), device, model=model)


def _sharing_storage(model: nn.Module | None, entries: Iterable[Tensor]) -> dict[str, Tensor]:
    """Return the parameters and buffers on meta, by fqn, that share storage with an entry."""
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
    """True if the memory belongs to tensors inside the tensor, and not to the tensor itself."""
    memory = local_of(tensor)
    return not (type(memory) is Tensor or isinstance(memory, nn.Parameter))


def _key(tensor: Tensor) -> int:
    return id(tensor) if _is_odd(tensor) or _is_subclass(tensor) else storage_key(local_of(tensor))


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
            got, remedy = type(local_of(tensor)).__name__, "Take model.state_dict(keep_vars=True)."
            refuse(name, expected, got, remedy, UnsupportedError)


class _Rooms:
    """New memory for tensors on meta: one block for each storage (Note [The same objects])."""

    def __init__(self, device: torch.device | str | None, tensors: list[Tensor]) -> None:
        self.device = None if device is None else torch.device(device)
        kinds = [tensor.device_mesh.device_type for tensor in tensors if isinstance(tensor, DTensor)]
        default = torch.get_default_device()
        self.elsewhere = torch.device(kinds[0] if kinds else "cpu" if default.type == "meta" else default)
        self.blocks: dict[int, torch.UntypedStorage] = {}
        # Each tensor and its former contents, in the order of the exchanges. Keep both alive: `blocks` knows
        # storages by their identity.
        self.exchanged: list[tuple[Tensor, Tensor]] = []

    def exchange(self, tensor: Tensor, is_offloaded: bool = False) -> None:
        """Give memory to the tensor if it is on the meta device."""
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
        """Undo all exchanges, the last one first."""
        while self.exchanged:
            torch.utils.swap_tensors(*self.exchanged.pop())

    def _home(self, tensor: Tensor) -> torch.device:
        return torch.device(tensor.device_mesh.device_type) if isinstance(tensor, DTensor) else self.elsewhere

    def _with_memory(self, tensor: Tensor, device: torch.device) -> Tensor:
        memory = local_of(tensor).detach()
        if not isinstance(tensor, DTensor):
            return self._alike(memory, device)
        shape = local_shape_of(tensor)
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
    """Give memory to the parameters of FSDP groups, group by group. If a group moves its rows, its memory is the block."""
    for group in _groups_of(model):
        params = [p.sharded_param for p in group.params if id(p.sharded_param) in wanted]
        keys = {id(param): _key(param) for param in params if not _is_subclass(param)}
        for param in params:
            rooms.exchange(param, is_offloaded(group))
        group.adopt_registered()
        for param in params:
            if id(param) in keys and keys[id(param)] in rooms.blocks:
                rooms.blocks[keys[id(param)]] = local_of(param).untyped_storage()


# --- Nothing forgotten -------------------------------------------------------------------------------------


def check_materialized(model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Raise an error if a tensor of the model is on the meta device, or if the optimizer would update other tensors than the model's.

    The check covers parameters, buffers (persistent or not), and tensors that are plain attributes of modules. For the optimizer, it
    covers the parameters in its groups, and its state.

    Raises:
        StateError: for the model, it names the first few tensors, says how to initialize them, and counts the rest. For the
            optimizer, it names the group and the index of each parameter that the model does not have (any more).
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
    """Return each tensor on the meta device: its kind and fqn, and the remedy."""
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
    known -= {id(p.places[0].registered()) for p in fsdp_params}  # unsharded, this is the full parameter
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


# --- The state of an optimizer -----------------------------------------------------------------------------


@torch.no_grad()
def init_optimizer_state(optimizer: Optimizer) -> None:
    """Give a fresh optimizer the state that it will have, so that a checkpoint can be loaded into it.

    Every parameter that requires grad and has no state yet gets state (Note [One parameter at a time]): moments are zero, and counts
    of steps are zero. Parameters keep every bit, gradients and groups stay the same, and hooks are not called. There is no
    communication, unless the optimizer's step communicates. The state of parameters on the meta device is on the meta device, too.

    Args:
        optimizer: of `torch.optim`, of `hwfsdp.optim`, or any other optimizer whose step skips parameters without gradients.

    Raises:
        UnsupportedError: the step needs a closure (as LBFGS does), or refuses dense gradients of zeros.
            Then the optimizer stays as it was.
    """
    step = _plain_step(optimizer)
    done: list[Tensor] = []
    try:
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.requires_grad and not optimizer.state.get(param):
                    done.append(param)
                    _step_alone(optimizer, step, group, param)
    except Exception as error:
        for param in done:
            optimizer.state.pop(param, None)
        if isinstance(error, FSDPError):
            raise
        raise _refusal(optimizer, "a step over gradients that are dense and zero", told(error)) from error


def stateless_in(missing: Iterable[KeyPath], saved: Iterable[KeyPath]) -> set[KeyPath]:
    """Return the paths above `missing` to states of parameters that had none when their optimizer was saved. DCP has str as keys."""
    states = {path[: n + 2] for path in missing for n in range(len(path) - 1) if path[n] == "state"}
    there = {tuple(map(str, path[:n])) for path in (saved if states else ()) for n in range(len(path) + 1)}

    def is_saved(*path: Any) -> bool:
        return tuple(map(str, path)) in there

    return {p for p in states if is_saved(*p[:-2], "param_groups") and not is_saved(*p)}


def _refusal(optimizer: Optimizer, expected: str, got: str) -> FSDPError:
    what, remedy = type(optimizer).__name__, "Take one training step, and load the checkpoint afterwards."
    return refusal(f"init_optimizer_state({what})", expected, got, remedy, UnsupportedError)


def _plain_step(optimizer: Optimizer) -> Callable[..., Any]:
    """Return the step of the optimizer's class, without torch's wrapper that calls hooks."""
    step: Any = inspect.unwrap(type(optimizer).step, stop=lambda step: not getattr(step, "hooked", False))
    closure = inspect.signature(step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        expected = "an optimizer whose step can be made without a closure"
        raise _refusal(optimizer, expected, "one that evaluates the model itself")
    return step  # type: ignore[no-any-return]


def _step_alone(optimizer: Optimizer, step: Callable[..., Any], group: dict[str, Any], param: Tensor) -> None:
    """Make a step of this parameter alone, with a gradient of zeros and without weight decay. Keep its bits; count no step."""
    groups, params, grad = optimizer.param_groups, group["params"], param.grad
    memory, decay = part_of(param), group.get("weight_decay")
    bits, zeros = memory.detach().clone(), torch.zeros_like(memory)
    try:
        optimizer.param_groups = [group]
        group["params"] = [param]
        if decay is not None:
            group["weight_decay"] = 0
        param.grad = wrap_like(zeros, param) if isinstance(param, DTensor) else zeros
        step(optimizer)
    finally:
        param.grad = grad
        group["params"], optimizer.param_groups = params, groups
        if decay is not None:
            group["weight_decay"] = decay
        memory.copy_(bits)
    state = optimizer.state.get(param, {})
    if isinstance(count := state.get("step"), Tensor):
        count.zero_()
    elif count is not None:
        state["step"] = 0
