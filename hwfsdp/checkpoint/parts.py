"""The PART checkpoint format, version 2.0.0: a directory with one `torch.save` file per rank, PART_000.pt and so on.

    save("ckpt", model, optimizer, others={"step": 7})     # on every rank
    load("ckpt")                                           # anywhere: {"model": …, "optimizer": …, "step": 7}
    load_into("ckpt", model, optimizer)                    # on every rank: into shards

Other programs write and read this format, too. Sharded models are written as whole tensors, so that any reader can load them. For
this, DTensors are gathered one at a time. A rank needs memory for its part and for one more tensor. In `load_into`, every rank reads and
checks every part. It maps the files into memory, and copies only what this rank has (see `loading`). `part_files` says what is in a part,
which rank writes what, and reads parts.

Note [One save or the other]
    The directory is replaced as a whole (`commit.replaced`). So no old part can be left in it, and it may hold nothing but parts. A
    rank that fails while it writes tells the others. All ranks raise its error, and the old checkpoint stays as it was. Each save
    has an id, which every part holds under a key that other readers ignore. So parts of two saves do not mix.

Note [Targets]
    A model has a place for every entry: the tensors of its state dict. An optimizer that has made no step yet has no places. So an
    optimizer gets a new state. The state of a parameter is cut like the present state; without one, like the parameter, if it has the
    parameter's shape. So states of other shapes need an optimizer that has made one step. Tensors on the meta device
    get memory in place (see `meta`). So an optimizer that was made over such parameters has the right parameters afterwards.

Left out: shared memory (tied weights are two entries with the same values); tensors in lists in the state of an optimizer, which stay
whole; files that torch.save wrote before it used zip archives, and files that were written with CRCs turned off.
"""

from __future__ import annotations

import copy
import hashlib
import os
from collections import OrderedDict
from collections.abc import Mapping, MutableMapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hwfsdp.checkpoint import commit
from hwfsdp.checkpoint.agreement import ALONE, Agreement, check_alike
from hwfsdp.checkpoint.boxes import check_data, local_shape_of, packed
from hwfsdp.checkpoint.error_messages import KeyPath, path_of, refuse, show, warn_left_out
from hwfsdp.checkpoint.loading import LoadPlan, load_from
from hwfsdp.checkpoint.manifest import TensorEntry
from hwfsdp.checkpoint.meta import NewMemory
from hwfsdp.checkpoint.part_files import COUNT_KEY, ID_KEY, PART, RESERVED, VERSION, VERSION_KEY, Cut, Parts
from hwfsdp.checkpoint.part_files import Share, bytes_in, packed_tree, part_name, read, shares_of
from hwfsdp.checkpoint.state_dict import layout_text, whole_of
from hwfsdp.checkpoint.traverse import PerRank, brief, items_of, leaves_of, nodes_of
from hwfsdp.compat import local_of, wrap_like
from hwfsdp.core.sharding import chunk_extent
from hwfsdp.errors import WrongTypeError

LARGE_BYTES = 256 * 2**20  # larger tensors are cut


@torch.no_grad()
def save(
    fname: str | os.PathLike[str],
    model: Any,
    optimizer: Any = None,
    others: Mapping[Any, Any] | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write a checkpoint with one part per rank of the group. Without a process group, write one part.

    A collective over `group`. Every rank has the same models and optimizers, sharded or not. Tensors are written as plain tensors,
    on the CPU.

    Args:
        fname: the directory. An existing directory is replaced, and may hold nothing but parts.
        model: a module or its state dict, or a list or tuple of them. A list of one is loaded as this one.
        optimizer: an optimizer or its state dict, or a list or tuple of them.
        others: more entries; rank 0's entries are saved. torch.load must accept the values with weights_only=True. DTensors are
            not allowed.

    Raises:
        UsageError: on all ranks, if an argument of any rank does not fit the description above, or if the entries differ between
            ranks. If an argument has a wrong type, it is a WrongTypeError, which is also a TypeError.
        UnsupportedError: on all ranks, for a ShardedTensor.
        CheckpointError: on all ranks, if one rank could not write. An existing checkpoint stays as it was.
    """
    agreement = _agreement(group)
    mine = _Save(agreement, group)
    remedy = "Save the same models and optimizers on all ranks, or pass the group of the ranks that do."
    same = partial(check_alike, remedy=remedy)
    target = Path()

    def plan() -> list[tuple[str, str]]:
        nonlocal target
        target = Path(os.path.realpath(path_of(fname, "save")))
        return mine.plan(model, optimizer, others)

    agreement.step("planning", plan, same)
    check = partial(commit.check_replaceable, target, PART, "PART files")
    with commit.replaced(target, agreement, check) as (directory, save_id):
        part = mine.part(save_id)
        files = [directory / part_name(rank) for rank in range(agreement.size)]
        agreement.step("writing", lambda: mine.write(part, directory), lambda _: commit.check_written(*files))


def load(fname: str | os.PathLike[str], nthreads: int = 8, **kwargs: Any) -> dict[Any, Any]:
    """Read a checkpoint of any number of parts, in any process.

    Args:
        nthreads: the number of parts that are read at the same time. 0: one after the other, without a thread.
        kwargs: for torch.load, for example map_location or mmap.

    Returns:
        "model": {name: tensor}. "optimizer": its state dict, or [] if there is none. Each is a list if there are several. The
        other entries of the checkpoint, and the format's own "__nshards__" and "__version__".

    Raises:
        UsageError: there is no checkpoint of this format, or an argument is wrong, for example weights_only=False.
        CheckpointError: a part is missing, stale, damaged, or of another save or version; a part holds a value that cannot be
            loaded safely; an entry is in two parts, or incomplete.
    """
    parts = read(path_of(fname, "load"), nthreads, kwargs)
    for path, entry in parts.found.items():
        if isinstance(entry, Cut):
            parts.found[path] = entry.whole()  # one after the other, so that the chunks are freed
    return {COUNT_KEY: parts.part_count, VERSION_KEY: VERSION, **parts.state(parts.found)}


@torch.no_grad()
def load_into(
    fname: str | os.PathLike[str],
    model: Any,
    optimizer: Any = None,
    *,
    group: dist.ProcessGroup | None = None,
    nthreads: int = 8,
    device: torch.device | None = None,
    strict: bool = True,
    allow_cast: bool = False,
) -> dict[Any, Any]:
    """Load models and optimizers, sharded or not. Each rank loads its shards. Any number of ranks may have saved the checkpoint.

    A collective over `group`; without a process group, one process calls it alone. Every rank reads every part.

    Args:
        model: a module or a state dict to fill, or a list or tuple of them, as many as were saved. None: models stay as they
            are.
        optimizer: an optimizer over the same parameters, or a list or tuple of them, as many as were saved. None: as for
            `model`. If the optimizer does not have a saved state yet, the state is sharded like its parameter, if it has the same shape.
        device: where tensors on the meta device get memory; see `meta.init_state_dict`.
        strict, allow_cast: as for `loading.load`. Of an optimizer, the keys of states are compared that it has already, and the keys
            of groups if both sides have others. With strict=False, it keeps its own values of keys that were not saved.

    Returns:
        The other entries of the checkpoint.

    Raises:
        UsageError: on all ranks, if there is no checkpoint of this format, or if on any of them keys, shapes or dtypes differ, or an argument is wrong. Nothing was loaded.
        UnsupportedError: on all ranks, if any of them has a `Partial` placement. Nothing was loaded.
        CheckpointError: on all ranks, for the reasons that `load` has, or if ranks read different saves.
    """
    agreement = _agreement(group)
    tree: dict[str, list[Any]] = {"model": [], "optimizer": []}
    found: list[Parts] = []
    with ExitStack() as held:

        def plan_of(_: ExitStack) -> LoadPlan:
            found.append(read(path_of(fname, "load_into"), nthreads, {"map_location": "cpu", "mmap": True}))
            counts = ("model", model, found[0].model_count), ("optimizer", optimizer, len(found[0].rests))
            for what, given, saved in counts:
                if given is not None and (got := len(several(given))) != saved:
                    remedy = "Give as many, in the same order; None leaves all as they are."
                    refuse(f"load_into's {what}", f"{saved}, as were saved", f"{got}", remedy)
            leaves, fresh = _places_in_models(tree, several(model), device, held)
            there = [path for path in found[0].found if path[0] == "model" and model is not None]
            plan = LoadPlan(found[0], tree, leaves, saved=there, name_of=lambda p: repr(p[2]), fresh=fresh)
            plan.leaves = leaves | _places_in_optimizers(tree, plan, found[0], several(optimizer))
            return plan

        left_out = load_from(agreement, plan_of, f"load_into from {fname}", strict, allow_cast)
        for each, state_dict in zip(several(optimizer), tree["optimizer"]):
            each.load_state_dict(state_dict)
    warn_left_out(left_out, fname)
    return copy.deepcopy(found[0].others)


def _agreement(group: Any) -> Agreement:
    known = isinstance(group, dist.ProcessGroup | None) or group in (dist.GroupMember.NON_GROUP_MEMBER, ALONE)
    if not known:
        refuse_kind("group", group, "a process group, or None for all ranks")
    return Agreement(group, "PART checkpoint")


def refuse_kind(what: str, value: Any, expected: str = "a module, an optimizer or a state dict") -> NoReturn:
    remedy = "See the arguments of hwfsdp.checkpoint.parts.save."
    refuse(what, expected, brief(value)[:200], remedy, WrongTypeError)


def several(value: Any) -> list[Any]:
    """Return one object or many as a list; [] for None."""
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


# --- Saving ------------------------------------------------------------------------------------------------


class _Save:
    """One save on one rank. Its methods are the steps, in this order."""

    def __init__(self, agreement: Agreement, group: dist.ProcessGroup | None) -> None:
        self.rank, self.ranks = agreement.rank, [0]
        if not agreement.alone:
            self.ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        self.tree: dict[Any, list[dict[Any, Any]]] = {}
        self.others: dict[Any, Any] = {}
        self.entries: dict[KeyPath, Share] = {}

    def plan(self, model: Any, optimizer: Any, others: Mapping[Any, Any] | None) -> list[tuple[str, str]]:
        """Check the entries to save, and divide them among the ranks. Return a list of everything that must be the same on all ranks."""
        if model is None:
            refuse_kind("model", model)
        if not isinstance(others, Mapping | None):
            refuse_kind("others", others, "a dict")
        modules, self.others = several(model), dict(others or {})
        for what, given in (("model", modules), ("optimizer", several(optimizer))):
            self.tree[what] = [state_of(each, f"{what}[{i}]") for i, each in enumerate(given)]
        self._check_entries()
        buffers = {("model", i, name) for i, module in enumerate(modules) for name in buffers_of(module)}
        self.entries = shares_of(self.tree, buffers, len(self.ranks), LARGE_BYTES)
        listing = [(show(path), layout_text(value)) for path, value in leaves_of(self.tree)]
        holders = {path: entry.holder for path, entry in self.entries.items()}
        return [*listing, ("who writes which entry", hashlib.sha256(repr(holders).encode()).hexdigest())]

    def _check_entries(self) -> None:
        for i, state in enumerate(self.tree["optimizer"]):
            if not isinstance(state.get("state"), Mapping) or not isinstance(state.get("param_groups"), list):
                expected = 'an optimizer\'s state dict, with "state" and "param_groups"'
                refuse_kind(f"optimizer[{i}]", state, expected)
        for key in self.others:
            if key in RESERVED:
                expected = f"a key that the format does not use; it uses {list(RESERVED)}"
                refuse(f"others[{key!r}]", expected, repr(key), "Rename it.")
        for path, value in nodes_of({**self.tree, "others": self.others}):
            if isinstance(value, DTensor) and path[0] == "others":
                refuse_kind(show(path), value, "no DTensor among others, which are rank 0's alone")
            if isinstance(value, PerRank):
                remedy = "Save it with checkpoint.save or dcp.save."
                refuse(path, "what rank 0 has for all", "a PerRank", remedy)
            if isinstance(value, Tensor):
                check_tensor(path, value, self.ranks)
        commit.check_loadable((), {**self.tree, **self.others})

    def part(self, save_id: str) -> dict[Any, Any]:
        """Make this rank's part. All ranks gather DTensors one at a time, in the same order."""
        part: dict[Any, Any] = {COUNT_KEY: len(self.ranks), VERSION_KEY: VERSION, ID_KEY: save_id}
        part |= {"model": [(OrderedDict(), {}) for _ in self.tree["model"]], "optimizer": []}
        for state_dict in self.tree["optimizer"]:
            rest = {key: packed_tree(value, True) for key, value in state_dict.items() if key != "state"}
            part["optimizer"].append(({"state": OrderedDict(), **rest}, {}))
        for path, (value, holder) in self.entries.items():
            is_state, (entire, chunks) = path[0] == "optimizer", part[path[0]][path[1]]
            if holder is None:
                chunks[path[3:] if is_state else path[2]] = self._chunk_of(value)
                continue
            copied = packed_tree(value, holder == self.rank)
            if holder == self.rank:
                (entire["state"] if is_state else entire)[path[-1]] = copied
        return part | (packed_tree(self.others, True) if self.rank == 0 else {})

    def _chunk_of(self, value: Tensor) -> tuple[torch.Size, Tensor]:
        whole = whole_of(value) if isinstance(value, DTensor) else value
        start, length = chunk_extent(whole.numel(), len(self.ranks), self.rank)
        return whole.shape, packed(whole.reshape(-1)[start : start + length])

    def write(self, part: dict[Any, Any], directory: Path) -> None:
        with commit.archive_file(directory / part_name(self.rank), bytes_in(part)) as file:
            torch.save(part, file)


def state_of(value: Any, what: str) -> dict[Any, Any]:
    """Return the state dict of a module or optimizer, or the entries of a mapping, as a dict."""
    if not isinstance(value, Mapping) and callable(make := getattr(value, "state_dict", None)):
        value = value if isinstance(value, type) else make()
    return dict(value) if isinstance(value, Mapping) else refuse_kind(what, value)


def buffers_of(module: Any) -> set[str]:
    """Return the names of the module's buffers, including non-persistent ones, which its state dict does not have."""
    if not isinstance(module, nn.Module):
        return set()
    return {name for name, _ in module.named_buffers(remove_duplicate=False)}


def check_tensor(path: KeyPath, tensor: Tensor, ranks: list[int]) -> None:
    check_data(path, tensor)
    if isinstance(tensor, DTensor):
        across = tensor.device_mesh.mesh.flatten().tolist()
        if tensor.device_mesh.get_coordinate() is None or not set(across) <= set(ranks):
            expected = f"a mesh that this rank is in, and all of whose ranks take part: {ranks}"
            got = f"one of the ranks {across}"
            refuse(path, expected, got, "Call save with the group of the ranks that have the model.")
    if type(inner := local_of(tensor).detach()) is not Tensor:
        expected = "a plain tensor, or a DTensor of plain ones"
        refuse(path, expected, type(inner).__name__, "Convert it first; readers would need that class.")


# --- Into models and optimizers ----------------------------------------------------------------------------


def _places_in_models(
    tree: dict[str, list[Any]], models: list[Any], device: torch.device | None, held: ExitStack
) -> tuple[dict[KeyPath, Any], list[KeyPath]]:
    """Add the models' state dicts to the tree. Return their entries by path, and the paths that were on the meta device.

    Models on the meta device get memory. They keep it if the context `held` ends without an error. Then a module also gets the
    entries that are not tensors.
    """
    places: dict[KeyPath, Any] = {}
    fresh: list[KeyPath] = []
    for i, module in enumerate(models):
        if not isinstance(module, nn.Module | MutableMapping):
            refuse_kind(f"model[{i}]", module, "a module, or a state dict that can be filled")
        for name, value in () if isinstance(module, nn.Module) else module.items():
            _check_flat(("model", i, name), value)
        memory = held.enter_context(NewMemory(module, device, None))
        memory.give()
        tree["model"].append(memory.state_dict)
        places |= {("model", i, name): value for name, value in memory.state_dict.items()}
        fresh += [("model", i, *path) for path in memory.paths]
    return places, fresh


def _check_flat(path: KeyPath, value: Any) -> None:
    """Raise an error for tensors in a container, because only tensors directly in a state dict are filled."""
    if items_of(value) is not None and any(isinstance(leaf.value, Tensor) for leaf in leaves_of(value)):
        remedy = "Fill it from the result of parts.load, or give each dict of tensors as a model."
        refuse(
            path, "no tensors in containers inside a state dict", f"a {type(value).__name__} of them", remedy
        )


def _places_in_optimizers(
    tree: dict[str, list[Any]], plan: LoadPlan, parts: Parts, optimizers: list[Any]
) -> dict[KeyPath, Any]:
    """Add new states for the optimizers to the tree. Return the tensors in them, which have no values yet.

    The keys of groups are compared, and the keys of states that parameters have already. The plan gets the names of differing keys.
    """
    rooms: dict[KeyPath, Any] = {}
    for i, (optimizer, rest) in enumerate(zip(optimizers, copy.deepcopy(parts.rests))):
        at = "optimizer", i
        params = _params_of(optimizer, at, rest["param_groups"])
        groups = [
            _group(plan, (*at, "param_groups", n), mine, theirs)
            for n, (mine, theirs) in enumerate(zip(optimizer.param_groups, rest["param_groups"]))
        ]
        saved: dict[Any, dict[Any, Any]] = {index: {} for index in params}
        entries: dict[KeyPath, Any] = {}
        for path, value in parts.found.items():
            if path[:2] == at and len(path) > 4:
                saved.setdefault(path[3], {})[path[4]] = value
            elif path[:2] == at:
                entries[path] = copy.deepcopy(value)
        states = getattr(optimizer, "state", {})
        for index, theirs in saved.items():
            mine = theirs and states.get(params.get(index)) or theirs  # without a gradient it had no state
            for key, value in _in_common(plan, (*at, "state", index), mine, theirs).items():
                path = (*at, "state", index, key)
                entry = parts.manifest.entries.get(path)
                if isinstance(entry, TensorEntry):
                    entries[path] = rooms[path] = _room_for(entry, params.get(index), states)
                else:
                    entries[path] = copy.deepcopy(value) if entry else value
        state = parts.trees(entries)[1][i]["state"]
        tree["optimizer"].append(rest | {"param_groups": groups, "state": state})
    return rooms


def _params_of(optimizer: Any, at: KeyPath, saved: list[dict[str, Any]]) -> dict[Any, Any]:
    """Return the parameters of an optimizer, by the indices that they have in the saved groups. Raise an error if groups differ."""
    groups = getattr(optimizer, "param_groups", None)
    if not isinstance(groups, list) or not callable(getattr(optimizer, "load_state_dict", None)):
        refuse_kind(f"optimizer[{at[1]}]", optimizer, "an optimizer")
    mine, theirs = ([len(g["params"]) for g in each] for each in (groups, saved))
    if mine != theirs:
        got, remedy = f"{theirs}", "Make the optimizer over the same parameters, in the same groups."
        refuse((*at, "param_groups"), f"groups of {mine} params, as the optimizer has", got, remedy)
    indices = [index for group in saved for index in group["params"]]
    return dict(zip(indices, (param for group in groups for param in group["params"])))


_NAMES = {"params", "param_names"}  # keys of groups that say which parameters they have


def _group(plan: LoadPlan, at: KeyPath, mine: Mapping[Any, Any], theirs: dict[Any, Any]) -> dict[Any, Any]:
    """Return a saved group, with the optimizer's own values of keys that were not saved.

    Keys that only one side has are fine: a scheduler adds some, and so do later versions of torch. If each side has keys that the
    other has not, the group is of another kind of optimizer.
    """
    if mine.keys() - theirs.keys() - _NAMES and theirs.keys() - mine.keys() - _NAMES:
        return _in_common(plan, at, mine, theirs)
    return {key: value for key, value in mine.items() if key not in _NAMES} | theirs


def _in_common(
    plan: LoadPlan, at: KeyPath, mine: Mapping[Any, Any], theirs: dict[Any, Any]
) -> dict[Any, Any]:
    """Return the saved values of the keys that the optimizer has, too, and its own values of the others. Add differing keys to the plan."""
    missing = [key for key in mine if key not in theirs and key not in _NAMES]
    unexpected = [key for key in theirs if key not in mine and key not in _NAMES]
    plan.missing += [show((*at, key)) for key in missing]
    plan.unexpected += [show((*at, key)) for key in unexpected]
    kept = {key: value for key, value in theirs.items() if key not in unexpected}
    return kept | {key: mine[key] for key in missing}


def _may_be_of(param: Tensor, shape: tuple[int, ...]) -> bool:
    """True if a state of this shape may belong to the parameter: of another number of dims, or reduced along some of them."""
    return len(shape) != param.ndim or all(n in (1, size) for n, size in zip(shape, param.shape))


def _room_for(entry: TensorEntry, param: Any, states: Mapping[Any, Any]) -> Tensor:
    """Return memory for a tensor of an optimizer's state, cut as Note [Targets] says. `states`: the optimizer's present state."""
    if isinstance(param, Tensor) and param.is_meta:
        expected, remedy = "parameters with memory", "Load its model in the same call, or before."
        refuse(entry.path, expected, "one on the meta device", remedy)
    state = states.get(param)
    place = state.get(entry.path[4]) if isinstance(state, Mapping) else None
    dtype, shape = entry.dtype, entry.shape
    if isinstance(place, Tensor):
        dtype, shape = place.dtype, tuple(place.shape)
    elif isinstance(param, Tensor) and tuple(param.shape) == entry.shape:
        place = param
    elif isinstance(param, Tensor) and not _may_be_of(param, entry.shape):
        expected = f"shape {tuple(param.shape)}, as the parameter has, or a state to compare with"
        remedy = "For states of other shapes, call hwfsdp.checkpoint.meta.init_optimizer_state first."
        refuse(entry.path, expected, f"shape {entry.shape} in the checkpoint", remedy)
    if not isinstance(place, DTensor):
        return torch.empty(shape, dtype=dtype)
    home = param if place.is_meta and isinstance(param, DTensor) else place
    return wrap_like(torch.empty(local_shape_of(place), dtype=dtype, device=local_of(home).device), place)
