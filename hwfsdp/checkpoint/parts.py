"""The PART checkpoint format, version 2.0.0: a directory with one `torch.save` file per rank, PART_000.pt and so on.

    save("ckpt", model, optimizer, others={"step": 7})     # on every rank
    load("ckpt")                                           # anywhere: {"model": …, "optimizer": …, "step": 7}
    load_into("ckpt", model, optimizer)                    # on every rank: into shards

Other programs write and read this format, too. Sharded models are written as whole tensors, so that any reader can load them. For
this, DTensors are gathered one at a time. A rank needs memory for its part and for one more tensor. `load_into` maps the files into
memory, and copies only what this rank has (see `loading`).

Note [One save or the other]
    The ranks write into a new directory beside the old one. When all of them have finished, rank 0 exchanges the two
    directories, in one step on Linux. On other systems, there is a moment at which no directory has the name; then `load` says
    where the old one is. A rank that fails while it writes tells the others. All ranks raise its error, and the old checkpoint
    stays as it was. The directory is replaced as a whole. So no old part can be left in it, and it may hold nothing but parts.
    Each save has an id, which every part holds under a key that other readers ignore. So parts of two saves do not mix.

Note [Targets]
    A model has a place for every entry: the tensors of its state dict. An optimizer that has made no step yet has no places. So an
    optimizer gets a new state. The state of a parameter is cut like the present state; without one, like the parameter, if it has the
    parameter's shape. So sharded states of other shapes need an optimizer that has made one step. Tensors on the meta device
    get memory in place (see `meta`). So an optimizer that was made over such parameters has the right parameters afterwards.

See `part_files` for what is in a part, and how parts are read.

Left out: shared memory (tied weights are two entries with the same values); tensors in lists in the state of an optimizer, which stay
whole; files that torch.save wrote before it used zip archives, and files that were written with CRCs turned off.
"""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import Collection, Mapping, MutableMapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hwfsdp.checkpoint.agreement import ALONE, Agreement, check_alike
from hwfsdp.checkpoint.archives import archive_file, check_loadable
from hwfsdp.checkpoint.boxes import check_data, local_shape_of
from hwfsdp.checkpoint.commit import replaced
from hwfsdp.checkpoint.loading import Match, match_entries, read_and_fill
from hwfsdp.checkpoint.manifest import TensorEntry
from hwfsdp.checkpoint.messages import KeyPath, check_in_common, damaged, on_one_side, path_of, refuse
from hwfsdp.checkpoint.messages import said_once, show, warn_left_out
from hwfsdp.checkpoint.meta import NewMemory
from hwfsdp.checkpoint.part_files import COUNT_KEY, ID_KEY, PART, RESERVED, VERSION, VERSION_KEY, Cut, Parts
from hwfsdp.checkpoint.part_files import entries_in, kept, own, part_name, read
from hwfsdp.checkpoint.saving import deal
from hwfsdp.checkpoint.state_dict import whole_of
from hwfsdp.checkpoint.traverse import PerRank, brief, containers_in, items_of, leaves_of
from hwfsdp.compat import local_of, wrap_like
from hwfsdp.core.sharding import chunk_extent
from hwfsdp.errors import CheckpointError, WrongTypeError

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
    target = Path(os.path.realpath(path_of(fname, "save")))
    mine = _Save(agreement, group)
    remedy = "Save the same models and optimizers on all ranks, or pass the group of the ranks that do."
    same = partial(check_alike, remedy=remedy)
    agreement.step("planning", lambda: mine.plan(model, optimizer, others), same)
    check = partial(check_replaceable, target)
    with replaced(target, agreement, check, mine.check_complete) as (directory, save_id):
        part = mine.part(save_id)
        agreement.step("writing", lambda: mine.write(part, directory))


def load(fname: str | os.PathLike[str], nthreads: int = 8, **kwargs: Any) -> dict[Any, Any]:
    """Read a checkpoint of any number of parts, in any process.

    Args:
        nthreads: the number of parts that are read at the same time. 0: one after the other, without a thread.
        kwargs: for torch.load, for example map_location or mmap.

    Returns:
        "model": {name: tensor}. "optimizer": its state dict, or [] if there is none. Each is a list if there are several. The
        other entries of the checkpoint, and the format's own "__nshards__" and "__version__".

    Raises:
        UsageError: an argument is wrong, for example weights_only=False.
        CheckpointError: a part is missing, stale, damaged, or of another save or version; a part holds a value that cannot be
            loaded safely; an entry is in two parts, or incomplete.
    """
    parts = read(path_of(fname, "load"), nthreads, kwargs)
    for path, entry in parts.found.items():
        if isinstance(entry, Cut):
            parts.found[path] = entry.whole()  # one after the other, so that the chunks are freed
    models, optimizers = (
        several[0] if len(several) == 1 else several for several in parts.trees(parts.found)
    )
    head = {COUNT_KEY: parts.part_count, VERSION_KEY: VERSION}
    return head | {"model": models, "optimizer": optimizers} | parts.others


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
            `model`. If the optimizer does not have a saved state yet, the state is sharded like its parameter, provided that it
            has the same shape.
        device: where tensors on the meta device get memory; see `meta.init_state_dict`.
        strict, allow_cast: as for `loading.load`.

    Returns:
        The other entries of the checkpoint.

    Raises:
        UsageError: on all ranks, if on any of them keys, shapes or dtypes differ, or an argument is wrong. Nothing was loaded.
        UnsupportedError: on all ranks, if any of them has a `Partial` placement. Nothing was loaded.
        CheckpointError: on all ranks, for the reasons that `load` has, or if ranks read different saves.
    """
    agreement, found = _agreement(group), list[_Targets]()
    directory = path_of(fname, "load_into")
    with ExitStack() as held:

        def prepare() -> tuple[str | None, str]:
            parts = read(directory, nthreads, {"map_location": "cpu", "mmap": True})
            found.append(_Targets(parts, model, optimizer))
            return parts.save_id, found[0].prepare(device, held, strict, allow_cast)

        def compare(reports: list[Any]) -> list[str]:
            if (saves := len({save_id for save_id, _ in reports})) > 1:
                remedy = "Give all ranks the same directory, while no other job saves to it."
                refuse("load_into", "one save on all ranks", f"{saves} of them", remedy, CheckpointError)
            return said_once([left_out for _, left_out in reports])

        left_out: str = agreement.step("preparing", prepare, compare)
        (targets,) = found
        read_and_fill(agreement, targets.tree, targets.match, targets.parts)
        targets.finish()
    warn_left_out(left_out, directory)
    others: dict[Any, Any] = kept(targets.parts.others, True)
    return others


def _agreement(group: Any) -> Agreement:
    known = isinstance(group, dist.ProcessGroup | None) or group in (dist.GroupMember.NON_GROUP_MEMBER, ALONE)
    if not known:
        refuse_kind("group", group, "a process group, or None for all ranks")
    return Agreement(group, "PART checkpoint")


# --- Saving ------------------------------------------------------------------------------------------------


class _Save:
    """One save on one rank. Its methods are the steps, in this order."""

    def __init__(self, agreement: Agreement, group: dist.ProcessGroup | None) -> None:
        self.rank, self.ranks = agreement.rank, [0]
        if not agreement.alone:
            self.ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        self.models: list[dict[str, Any]] = []
        self.optimizers: list[dict[str, Any]] = []
        self.others: dict[Any, Any] = {}
        self.deals: tuple[list[Division], list[Division]] = ([], [])

    @property
    def tree(self) -> dict[Any, Any]:
        return {"model": self.models, "optimizer": self.optimizers}

    def plan(self, model: Any, optimizer: Any, others: Mapping[Any, Any] | None) -> list[tuple[str, str]]:
        """Check the entries to save, and divide them among the ranks. Return a list of everything that must be the same on all ranks."""
        if model is None:
            refuse_kind("model", model)
        modules = several(model)
        self.models = [state_of(module, f"model[{i}]") for i, module in enumerate(modules)]
        self.optimizers = [state_of(o, f"optimizer[{i}]") for i, o in enumerate(several(optimizer))]
        if not isinstance(others, Mapping | None):
            refuse_kind("others", others, "a dict")
        self.others = dict(others or {})
        self._check_entries()
        loads = [0] * len(self.ranks)
        named = zip(self.models, map(buffers_of, modules))
        self.deals = (
            [divide(state, loads, LARGE_BYTES, buffers) for state, buffers in named],
            [divide(state["state"], loads, LARGE_BYTES) for state in self.optimizers],
        )
        listing = [(show(path), describe_entry(value)) for path, value in leaves_of(self.tree)]
        dealt = [(each.holders, sorted(map(repr, each.cut))) for each in (*self.deals[0], *self.deals[1])]
        return [*listing, ("who writes which entry", hashlib.sha256(repr(dealt).encode()).hexdigest())]

    def _check_entries(self) -> None:
        for i, state in enumerate(self.optimizers):
            if not isinstance(state.get("state"), Mapping) or not isinstance(state.get("param_groups"), list):
                expected = 'an optimizer\'s state dict, with "state" and "param_groups"'
                refuse_kind(f"optimizer[{i}]", state, expected)
        self._check_others()
        for path, value in (*leaves_of(self.tree), *leaves_of(self.others)):
            if isinstance(value, Tensor):
                check_tensor(path, value, self.ranks)
        for i, state in enumerate(self.models):
            for name in state:
                if not isinstance(name, str):
                    refuse_kind(show(("model", i, name)), name, "a name that is a str")
        check_loadable((), {**self.tree, **self.others})

    def _check_others(self) -> None:
        for key in self.others:
            if key in RESERVED:
                expected = f"a key that the format does not use; it uses {list(RESERVED)}"
                refuse(f"others[{key!r}]", expected, repr(key), "Rename it.")
        for path, value in leaves_of(self.others):
            if isinstance(value, DTensor):
                refuse_kind(show(path), value, "no DTensor among others, which are rank 0's alone")
        for path, value in containers_in({**self.tree, "others": self.others}).items():
            if isinstance(value, PerRank):
                expected, remedy = "what rank 0 has for all", "Save it with checkpoint.save or dcp.save."
                refuse(show(path).removeprefix("state_dict"), expected, "a PerRank", remedy)

    def part(self, save_id: str) -> dict[Any, Any]:
        """Make this rank's part. All ranks gather DTensors in it."""
        head = {COUNT_KEY: len(self.ranks), VERSION_KEY: VERSION}
        at = self.rank, len(self.ranks)
        models, states = ([part_of(each, *at) for each in deals] for deals in self.deals)
        optimizers: list[Any] = []
        for state_dict, (whole, chunks) in zip(self.optimizers, states):
            rest = {key: kept(value, True) for key, value in state_dict.items() if key != "state"}
            optimizers.append(({"state": whole, **rest}, chunks))
        part: dict[Any, Any] = {**head, ID_KEY: save_id, "model": models, "optimizer": optimizers}
        return part | (kept(self.others, True) if self.rank == 0 else {})

    def write(self, part: dict[Any, Any], directory: Path) -> None:
        path = directory / part_name(self.rank)
        for _ in entries_in(part, str(path)):  # checks them
            pass
        with archive_file(path, bytes_in(part)) as file:
            torch.save(part, file)

    def check_complete(self, directory: Path) -> None:
        """Raise an error unless every rank's part is in the directory."""
        for rank in range(len(self.ranks)):
            path = directory / part_name(rank)
            if not path.is_file():
                remedy = "Give all ranks the same directory, in a file system that they share."
                raise damaged(path, f"the part that rank {rank} wrote", "none", remedy=remedy)


# --- Dividing ----------------------------------------------------------------------------------------------


class Division(NamedTuple):
    """The entries of a model, or the state of an optimizer, divided among ranks.

    Attributes:
        whole: the entries that stay whole, by name; for an optimizer, the states of the parameters, by index.
        holders: the rank that writes each of them. cut: the large tensors, by name; for an optimizer, by (param index, key).
    """

    whole: dict[Any, Any]
    holders: dict[Any, int]
    cut: dict[Any, Tensor]


def bytes_in(tree: Any) -> int:
    """Return the bytes of the tensors in the tree. A DTensor counts as a whole."""
    tensors = [leaf.value for leaf in leaves_of(tree) if isinstance(leaf.value, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def is_large(value: Any, large_bytes: int) -> bool:
    """True if the value is a dense tensor of more bytes than `large_bytes`."""
    is_dense = isinstance(value, Tensor) and value.layout == torch.strided
    return is_dense and value.numel() * value.element_size() > large_bytes


def divide(
    entries: Mapping[Any, Any], loads: list[int], large_bytes: int, buffers: Collection[Any] | None = None
) -> Division:
    """Divide the entries of a model among ranks, or the states of the parameters of an optimizer.

    Args:
        loads: bytes by rank, to which the bytes of the entries are added.
        buffers: the entries that rank 0 gets, whatever their size. None: the entries are of an optimizer, each the state of a parameter.
    """
    whole, cut, mine = dict(entries), dict[Any, Any](), dict[Any, int]()
    for name, entry in entries.items():
        if buffers is None and isinstance(entry, Mapping):
            large = {key: value for key, value in entry.items() if is_large(value, large_bytes)}
            cut |= {(name, key): value for key, value in large.items()}
            whole[name] = {key: value for key, value in entry.items() if key not in large}
        elif buffers is not None and name in buffers:
            mine[name] = 0
            loads[0] += bytes_in(entry)
        elif buffers is not None and is_large(entry, large_bytes):
            cut[name] = whole.pop(name)
    sizes = {name: bytes_in(entry) for name, entry in whole.items() if name not in mine}
    return Division(whole, mine | deal(sizes, loads), cut)


# --- Making a part -----------------------------------------------------------------------------------------


def chunk_of(value: Tensor, rank: int, world_size: int) -> tuple[torch.Size, Tensor]:
    """Return the size of a tensor and this rank's chunk of its elements, [k], in row-major order. A DTensor is gathered first."""
    whole = whole_of(value) if isinstance(value, DTensor) else value
    start, length = chunk_extent(whole.numel(), world_size, rank)
    return whole.shape, own(whole.reshape(-1)[start : start + length])


def part_of(dealt: Division, rank: int, world_size: int) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Return this rank's part: whole entries, chunks. All ranks gather DTensors one at a time, in the same order."""
    chunks = {key: chunk_of(value, rank, world_size) for key, value in dealt.cut.items()}
    whole: OrderedDict[Any, Any] = OrderedDict()
    for key, value in dealt.whole.items():
        taken = kept(value, dealt.holders[key] == rank)
        if dealt.holders[key] == rank:
            whole[key] = taken
    return whole, chunks


# --- Replacing ---------------------------------------------------------------------------------------------


def check_replaceable(target: Path) -> None:
    """Raise an error if the directory holds a file that a new save would remove and that is not a part."""
    foreign = None
    if target.is_dir():
        foreign = next((name for name in sorted(os.listdir(target)) if not PART.fullmatch(name)), None)
    elif target.exists():
        foreign = "a file of that name"
    if foreign is not None:
        expected = "a directory that holds nothing but PART files, or none yet"
        refuse(target, expected, foreign, "Save into a directory of its own; it is replaced as a whole.")


# --- What is saved and filled ------------------------------------------------------------------------------


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


class _Targets:
    """What a load fills on this rank (Note [Targets]).

    Attributes:
        tree: the state dicts to fill, {"model": [...], "optimizer": [...]}. match: what is read into them.
    """

    match: Match

    def __init__(self, parts: Parts, model: Any, optimizer: Any) -> None:
        self.parts, self.models, self.optimizers = parts, several(model), several(optimizer)
        self.tree: dict[str, list[Any]] = {"model": [], "optimizer": []}
        self.has_memory: list[bool] = []  # by model: tensors on the meta device got memory
        counts = ("model", model, parts.model_count), ("optimizer", optimizer, len(parts.rests))
        for what, given, saved in counts:
            if given is not None and (got := len(several(given))) != saved:
                remedy = "Give as many, in the same order; None leaves all as they are."
                refuse(f"load_into's {what}", f"{saved}, as were saved", f"{got}", remedy)

    def prepare(self, device: torch.device | None, held: ExitStack, strict: bool, allow_cast: bool) -> str:
        """Compare the entries with their targets. Return the keys that are left out, in words. No target is changed.

        But models on the meta device get memory. They keep it if the context `held` ends without an error.
        """
        here = [("model", i, name) for i in range(len(self.models)) for name in self._entries(i)]
        there = [path for path in self.parts.found if path[0] == "model" and self.models]
        common = {*here} & {*there}
        missing, unexpected = ([repr(p[2]) for p in paths if p not in common] for paths in (here, there))
        left_out = on_one_side(missing, unexpected)
        check_in_common("load_into", left_out, strict, bool(common), "Load into the model that was saved")
        for i, module in enumerate(self.models):
            target = module if isinstance(module, nn.Module) else self._entries(i)
            memory = held.enter_context(NewMemory(target, device, None))
            memory.give()
            memory.check_loaded({path[2:] for path in there if path[1] == i})
            self.tree["model"].append(memory.state_dict)
            self.has_memory.append(bool(memory.paths))
        leaves = {path: self.tree["model"][path[1]][path[2]] for path in here if path in common}
        for i, optimizer in enumerate(self.optimizers):
            leaves |= self._make_state(i, optimizer)
        self.match = match_entries(self.tree, leaves, self.parts, allow_cast)
        return left_out

    def _entries(self, i: int) -> dict[Any, Any]:
        if isinstance(self.models[i], Mapping) and not isinstance(self.models[i], MutableMapping):
            refuse_kind(f"model[{i}]", self.models[i], "a state dict that can be filled")
        return state_of(self.models[i], f"model[{i}]")

    def _make_state(self, i: int, optimizer: Any) -> dict[KeyPath, Tensor]:
        """Make the state to load for an optimizer, and return the tensors in it, which have no values yet."""
        groups, rest = getattr(optimizer, "param_groups", None), self.parts.rests[i]
        if not isinstance(groups, list) or not callable(getattr(optimizer, "load_state_dict", None)):
            refuse_kind(f"optimizer[{i}]", optimizer, "an optimizer")
        mine, theirs = ([len(group["params"]) for group in each] for each in (groups, rest["param_groups"]))
        if mine != theirs:
            got, remedy = f"{theirs}", "Make the optimizer over the same parameters, in the same groups."
            at = "optimizer", i, "param_groups"
            refuse(at, f"groups of {mine} params, as the optimizer has", got, remedy)
        indices = [index for group in rest["param_groups"] for index in group["params"]]
        params = dict(zip(indices, (param for group in groups for param in group["params"])))
        entries: dict[KeyPath, Any] = {}
        tensors: dict[KeyPath, Tensor] = {}
        for path, value in self.parts.found.items():
            if path[:2] == ("optimizer", i):
                entry = self.parts.manifest.entries[path]
                if isinstance(entry, TensorEntry) and len(path) > 4:
                    param = params.get(path[3])
                    held = getattr(optimizer, "state", {}).get(param, {})
                    place = held.get(path[4]) if isinstance(held, Mapping) else None
                    value = tensors[path] = _room_for(entry, param, place)
                entries[path] = value if path in tensors else kept(value, True)
        state_dict = self.parts.trees(entries)[1][i]
        self.tree["optimizer"].append(state_dict | {key: kept(value, True) for key, value in rest.items()})
        return tensors

    def finish(self) -> None:
        """Hand the filled state dicts over. A module gets the entries that are not tensors when the context `held` ends."""
        for module, entries, has_memory in zip(self.models, self.tree["model"], self.has_memory):
            if isinstance(module, MutableMapping):
                module.update(entries)
            elif not isinstance(module, nn.Module):
                module.load_state_dict(entries, **({"assign": True} if has_memory else {}))
        for optimizer, state_dict in zip(self.optimizers, self.tree["optimizer"]):
            optimizer.load_state_dict(state_dict)


def _room_for(entry: TensorEntry, param: Any, place: Any) -> Tensor:
    """Return memory for a tensor of an optimizer's state, cut as Note [Targets] says. `place`: the optimizer's present tensor, or None."""
    if isinstance(param, Tensor) and param.is_meta:
        expected, remedy = "parameters with memory", "Load its model in the same call, or before."
        refuse(entry.path, expected, "one on the meta device", remedy)
    dtype, shape = entry.dtype, entry.shape
    if isinstance(place, Tensor):
        dtype, shape = place.dtype, tuple(place.shape)
    elif isinstance(param, Tensor) and tuple(param.shape) == entry.shape:
        place = param
    if not isinstance(place, DTensor):
        return torch.empty(shape, dtype=dtype)
    home = param if place.is_meta and isinstance(param, DTensor) else place
    return wrap_like(torch.empty(local_shape_of(place), dtype=dtype, device=local_of(home).device), place)


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
