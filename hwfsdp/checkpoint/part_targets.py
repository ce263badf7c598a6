"""The sources and targets of a PART checkpoint: modules, optimizers, and their state dicts.

Loading has two phases. Making a `Loading` compares the saved entries with the targets, and changes no value. Then its `fill` puts
one tensor after the other in its place: it makes a whole tensor, cuts it, and releases it. What was read may lie in a file that is
mapped into memory, so everything is copied.

A model has a place for every entry: the tensors of its state dict. An optimizer that has made no step yet has no places. So the
state of a parameter is cut like the parameter, if it has the parameter's shape. If the optimizer has state already, the state is
cut like the existing state. So sharded states of other shapes need an optimizer that has made one step.

Tensors on the meta device get memory in place (see `meta`). So an optimizer that was made over such parameters has the right
parameters afterwards.

Left out: tensors in lists in the state of an optimizer. They stay whole.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from contextlib import ExitStack
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hwfsdp.checkpoint.distribute import TensorInfo, check_plan, distribute_state_dict
from hwfsdp.checkpoint.messages import KeyPath, on_one_side, refuse
from hwfsdp.checkpoint.meta import NewMemory
from hwfsdp.checkpoint.partition import Contents, Cut, kept, own, whole_entry
from hwfsdp.checkpoint.tensors import check_data, check_no_sum
from hwfsdp.checkpoint.traverse import brief, items_of
from hwfsdp.compat import local_of, wrap_like
from hwfsdp.errors import WrongTypeError
from hwfsdp.layout.extents import shard_of


def several(value: Any) -> list[Any]:
    """Return one object or many as a list; [] for None."""
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def state_of(value: Any, what: str) -> dict[Any, Any]:
    """Return a dict with the state dict of a module or optimizer, or with the entries of a mapping. The caller may change the dict."""
    if isinstance(value, Mapping):
        return dict(value)
    if not callable(getattr(value, "state_dict", None)) or isinstance(value, type):
        refuse_kind(what, value)
    state = value.state_dict()
    return state if isinstance(state, dict) else refuse_kind(f"{what}.state_dict()", state, "a dict")


def refuse_kind(what: str, value: Any, expected: str = "a module, an optimizer or a state dict") -> NoReturn:
    remedy = "See the arguments of hwfsdp.checkpoint.parts.save."
    refuse(what, expected, brief(value)[:200], remedy, WrongTypeError)


class Loading:
    """The entries to load, and their places on this rank.

    The constructor checks everything. It changes nothing, except that models on the meta device get memory, because the cuts of
    their optimizers' states must be known. They keep the memory if the context `held` ends without an error.
    """

    def __init__(
        self, contents: Contents, model: Any, optimizer: Any, device: torch.device | None, held: ExitStack
    ) -> None:
        self.contents, self.modules, self.optimizers = contents, several(model), several(optimizer)
        places = [state_of(module, f"model[{i}]") for i, module in enumerate(self.modules)]
        for i, module in enumerate(self.modules):
            if isinstance(module, Mapping) and not isinstance(module, MutableMapping):
                refuse_kind(f"model[{i}]", module, "a state dict that can be filled")
        counts = (("model", model, contents.models), ("optimizer", optimizer, contents.optimizers))
        for what, given, saved in counts:
            if given is not None and len(several(given)) != len(saved):
                remedy = "Give as many, in the same order; None leaves all as they are."
                got = f"{len(several(given))}"
                refuse(f"load_into's {what}", f"{len(saved)}, as were saved", got, remedy)
        for i, entries in enumerate(places):
            _check_places(("model", i), contents.models[i], entries)
        self.memories = []
        for module, entries in zip(self.modules, places):
            target = module if isinstance(module, nn.Module) else entries
            self.memories.append(held.enter_context(NewMemory(target, device, None)))
            self.memories[-1].give()
        self.states = [
            _OptimizerPlaces(("optimizer", i), saved, target)
            for i, (saved, target) in enumerate(zip(contents.optimizers, self.optimizers))
        ]

    def fill(self) -> None:
        """Put all values in their places. A module gets the entries that are not tensors when the context `held` ends."""
        for module, memory, entries in zip(self.modules, self.memories, self.contents.models):
            places = memory.state_dict
            for name, entry in entries.items():
                places[name] = self._filled(entry, places[name])
            if isinstance(module, MutableMapping):
                module.update(places)
            elif not isinstance(module, nn.Module):
                module.load_state_dict(places, **({"assign": True} if memory.paths else {}))
        for state in self.states:
            state.fill()

    def _filled(self, entry: Any, place: Any) -> Any:
        """Fill the place with this rank's values of the entry, and return it."""
        value = whole_entry(entry)
        if not isinstance(place, Tensor):
            return kept(value, True)
        held = {"": place}
        distribute_state_dict({"": value}, held, place.device)
        return held[""]


def _check_places(path: KeyPath, entries: Mapping[str, Any], places: Mapping[str, Any]) -> None:
    """Raise an error unless the model has a place for every entry and an entry for every place, of the same kind."""
    missing = [name for name in places if name not in entries]
    unknown = [name for name in entries if name not in places]
    if missing or unknown:
        got, remedy = (
            on_one_side([*map(repr, missing)], [*map(repr, unknown)]),
            "Load into the model that was saved.",
        )
        refuse(path, "the entries that the model has", got, remedy)
    names = [name for name, entry in entries.items() if _is_tensor(entry) or isinstance(places[name], Tensor)]
    plan = {(*path, name): _info(entries[name]) for name in names}
    held: dict[Any, Any] = {name: places[name] for name in names}
    for key in reversed(path):
        held = {key: held}
    check_plan(plan, held)


def _is_tensor(entry: Any) -> bool:
    return isinstance(entry, Tensor | Cut)


def _info(entry: Any) -> Any:
    return TensorInfo(tuple(entry.shape), entry.dtype) if _is_tensor(entry) else entry


class _OptimizerPlaces:
    """The saved state of an optimizer, and how it is cut for the target optimizer."""

    def __init__(self, path: KeyPath, saved: dict[str, Any], target: Any) -> None:
        self.path, self.saved, self.target = path, saved, target
        groups = getattr(target, "param_groups", None)
        if not isinstance(groups, list) or not callable(getattr(target, "load_state_dict", None)):
            refuse_kind(f"optimizer[{path[1]}]", target, "an optimizer")
        mine, theirs = ([len(group["params"]) for group in each] for each in (groups, saved["param_groups"]))
        if mine != theirs:
            got, remedy = f"{theirs}", "Make the optimizer over the same parameters, in the same groups."
            refuse((*path, "param_groups"), f"groups of {mine} params, as the optimizer has", got, remedy)
        indices = [index for group in saved["param_groups"] for index in group["params"]]
        self.params = dict(zip(indices, (param for group in groups for param in group["params"])))
        self.likes: dict[Any, DTensor | None] = {}  # by (param index, key), for each tensor
        for index, entry in saved["state"].items():
            for key, value in entry.items() if isinstance(entry, dict) else ():
                if _is_tensor(value):
                    self.likes[index, key] = self._like(index, key, value)

    def _like(self, index: Any, key: Any, value: Any) -> DTensor | None:
        """Return a DTensor that is cut as the value must be cut; None if the value stays whole. Check that the value fits."""
        path, param = (*self.path, "state", index, key), self.params.get(index)
        held = getattr(self.target, "state", {}).get(param, {})
        place = held.get(key) if isinstance(held, Mapping) else None
        if isinstance(place, Tensor):  # the optimizer's present value
            _check_places(path[:-1], {key: value}, {key: place})
        elif isinstance(param, Tensor) and param.shape == value.shape:
            place = param
        if isinstance(param, Tensor) and param.is_meta:
            expected, remedy = "parameters with memory", "Load its model in the same call, or before."
            refuse(path, expected, "one on the meta device", remedy)
        if not isinstance(place, DTensor):
            return None
        check_no_sum(path, place)
        return place

    def _part(self, index: Any, key: Any, value: Any) -> Any:
        if not _is_tensor(value):
            return kept(value, True)
        like, whole, param = self.likes[index, key], whole_entry(value), self.params.get(index)
        if like is None:
            return own(whole)
        home = param if like.is_meta and isinstance(param, DTensor) else like
        local = own(shard_of(whole, like.device_mesh, like.placements)).to(local_of(home).device)
        return wrap_like(local, like)

    def fill(self) -> None:
        def parts_of(index: Any, entry: Any) -> Any:
            if not isinstance(entry, dict):
                return kept(entry, True)
            return {key: self._part(index, key, value) for key, value in entry.items()}

        state = {index: parts_of(index, entry) for index, entry in self.saved["state"].items()}
        rest = {key: kept(value, True) for key, value in self.saved.items() if key != "state"}
        self.target.load_state_dict({"state": state, **rest})


def buffers_of(module: Any) -> set[str]:
    """Return the names of the module's buffers, including non-persistent ones, which its state dict does not have."""
    if not isinstance(module, nn.Module):
        return set()
    return {name for name, _ in module.named_buffers(remove_duplicate=False)}


def check_tensor(path: KeyPath, tensor: Tensor, ranks: list[int]) -> None:
    check_data(path, tensor)
    inner = tensor
    if isinstance(tensor, DTensor):
        inner = tensor.to_local()
        across = tensor.device_mesh.mesh.flatten().tolist()
        if tensor.device_mesh.get_coordinate() is None or not set(across) <= set(ranks):
            expected = f"a mesh that this rank is in, and all of whose ranks take part: {ranks}"
            got = f"one of the ranks {across}"
            refuse(path, expected, got, "Call save with the group of the ranks that have the model.")
    if type(inner.detach()) is not Tensor:
        expected = "a plain tensor, or a DTensor of plain ones"
        refuse(path, expected, type(inner).__name__, "Convert it first; readers would need that class.")


def describe_entry(value: Any) -> str:
    """Describe everything about an entry that must be the same on all ranks."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}" if items_of(value) is None else "nothing in it"
    text = f"{value.dtype} {list(value.shape)} {value.layout}"
    return f"{text} as {list(value.placements)}" if isinstance(value, DTensor) else text
