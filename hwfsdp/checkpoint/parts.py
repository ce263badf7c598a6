"""The PART checkpoint format, version 2.0.0: a directory with one `torch.save` file per rank, PART_000.pt and so on.

    save("ckpt", model, optimizer, others={"step": 7})     # on every rank
    load("ckpt")                                           # anywhere: {"model": …, "optimizer": …, "step": 7}
    load_into("ckpt", model, optimizer)                    # on every rank: into shards

Other programs write and read this format, too. Sharded models are written as whole tensors, so that any reader can load them. For
this, DTensors are gathered one at a time. A rank needs memory for its part and for one more tensor. `load_into` maps the files into
memory, and copies only what this rank has (see `loading`). `part_files` says what is in a part, and reads parts.

Note [One save or the other]
    The directory is replaced as a whole (`commit.replaced`). So no old part can be left in it, and it may hold nothing but parts. A
    rank that fails while it writes tells the others. All ranks raise its error, and the old checkpoint stays as it was. Each save
    has an id, which every part holds under a key that other readers ignore. So parts of two saves do not mix.

Note [Targets]
    A model has a place for every entry: the tensors of its state dict. An optimizer that has made no step yet has no places. So an
    optimizer gets a new state. The state of a parameter is cut like the present state; without one, like the parameter, if it has the
    parameter's shape. So sharded states of other shapes need an optimizer that has made one step. Tensors on the meta device
    get memory in place (see `meta`). So an optimizer that was made over such parameters has the right parameters afterwards.

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
from hwfsdp.checkpoint.boxes import check_data, local_shape_of
from hwfsdp.checkpoint.commit import archive_file, check_loadable, check_replaceable, check_written, replaced
from hwfsdp.checkpoint.loading import Match, match_entries, read_and_fill
from hwfsdp.checkpoint.manifest import TensorEntry
from hwfsdp.checkpoint.messages import KeyPath, check_in_common, on_one_side, path_of, refuse
from hwfsdp.checkpoint.messages import said_once, show, warn_left_out
from hwfsdp.checkpoint.meta import NewMemory
from hwfsdp.checkpoint.part_files import COUNT_KEY, ID_KEY, PART, RESERVED, VERSION, VERSION_KEY, Cut, Parts
from hwfsdp.checkpoint.part_files import kept, own, part_name, read
from hwfsdp.checkpoint.saving import deal
from hwfsdp.checkpoint.state_dict import describe, whole_of
from hwfsdp.checkpoint.traverse import PerRank, brief, leaves_of, nodes_of
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
    check = partial(check_replaceable, target, PART, "PART files")
    with replaced(target, agreement, check) as (directory, save_id):
        part = mine.part(save_id)
        files = [directory / part_name(rank) for rank in range(agreement.size)]
        agreement.step("writing", lambda: mine.write(part, directory), lambda _: check_written(*files))


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
    trees = parts.trees(parts.found)
    models, optimizers = (several[0] if len(several) == 1 else several for several in trees)
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
            leaves, left_out = found[0].of_models(device, held, strict)
            leaves |= found[0].of_optimizers()
            found[0].match = match_entries(found[0].tree, leaves, parts, allow_cast)
            return parts.save_id, left_out

        def compare(reports: list[Any]) -> list[str]:
            if (saves := len({save_id for save_id, _ in reports})) > 1:
                remedy = "Give all ranks the same directory, while no other job saves to it."
                refuse("load_into", "one save on all ranks", f"{saves} of them", remedy, CheckpointError)
            return said_once([left_out for _, left_out in reports])

        left_out: str = agreement.step("preparing", prepare, compare)
        (targets,) = found
        read_and_fill(agreement, targets.tree, targets.match, targets.parts)
        for each, state_dict in zip(targets.optimizers, targets.tree["optimizer"]):
            each.load_state_dict(state_dict)
    warn_left_out(left_out, directory)
    others: dict[Any, Any] = kept(targets.parts.others, True)
    return others


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
        self.divisions: dict[str, list[Division]] = {}

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
        loads = [0] * len(self.ranks)
        named = zip(self.tree["model"], map(buffers_of, modules))
        self.divisions = {
            "model": [divide(state, loads, LARGE_BYTES, buffers) for state, buffers in named],
            "optimizer": [divide(state["state"], loads, LARGE_BYTES) for state in self.tree["optimizer"]],
        }
        listing = [(show(path), describe(value)) for path, value in leaves_of(self.tree)]
        dealt = [(d.holders, sorted(map(repr, d.cut))) for each in self.divisions.values() for d in each]
        return [*listing, ("who writes which entry", hashlib.sha256(repr(dealt).encode()).hexdigest())]

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
        check_loadable((), {**self.tree, **self.others})

    def part(self, save_id: str) -> dict[Any, Any]:
        """Make this rank's part. All ranks gather DTensors in it."""
        at = self.rank, len(self.ranks)
        models, states = ([part_of(each, *at) for each in self.divisions[what]] for what in self.tree)
        optimizers: list[Any] = []
        for state_dict, (whole, chunks) in zip(self.tree["optimizer"], states):
            rest = {key: kept(value, True) for key, value in state_dict.items() if key != "state"}
            optimizers.append(({"state": whole, **rest}, chunks))
        head = {COUNT_KEY: len(self.ranks), VERSION_KEY: VERSION, ID_KEY: save_id}
        part: dict[Any, Any] = {**head, "model": models, "optimizer": optimizers}
        return part | (kept(self.others, True) if self.rank == 0 else {})

    def write(self, part: dict[Any, Any], directory: Path) -> None:
        with archive_file(directory / part_name(self.rank), bytes_in(part)) as file:
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


def divide(
    entries: Mapping[Any, Any], loads: list[int], large_bytes: int, buffers: Collection[Any] | None = None
) -> Division:
    """Divide the entries of a model among ranks, or the states of the parameters of an optimizer.

    Args:
        loads: bytes by rank, to which the bytes of the entries are added.
        buffers: the entries that rank 0 gets, whatever their size. None: the entries are of an optimizer, each the state of a parameter.
    """

    def is_large(value: Any) -> bool:
        return isinstance(value, Tensor) and value.layout == torch.strided and bytes_in(value) > large_bytes

    whole, cut, mine = dict(entries), dict[Any, Any](), dict[Any, int]()
    for name, entry in entries.items():
        if buffers is None and isinstance(entry, Mapping):
            large = {key: value for key, value in entry.items() if is_large(value)}
            cut |= {(name, key): value for key, value in large.items()}
            whole[name] = {key: value for key, value in entry.items() if key not in large}
        elif buffers is not None and name in buffers:
            mine[name] = 0
            loads[0] += bytes_in(entry)
        elif buffers is not None and is_large(entry):
            cut[name] = whole.pop(name)
    sizes = {name: bytes_in(entry) for name, entry in whole.items() if name not in mine}
    return Division(whole, mine | deal(sizes, loads), cut)


def part_of(dealt: Division, rank: int, world_size: int) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Return this rank's part: whole entries, chunks. All ranks gather DTensors one at a time, in the same order."""

    def chunk_of(value: Tensor) -> tuple[torch.Size, Tensor]:
        whole = whole_of(value) if isinstance(value, DTensor) else value
        start, length = chunk_extent(whole.numel(), world_size, rank)
        return whole.shape, own(whole.reshape(-1)[start : start + length])

    chunks = {key: chunk_of(value) for key, value in dealt.cut.items()}
    taken = ((key, dealt.holders[key] == rank, value) for key, value in dealt.whole.items())
    gathered = ((key, mine, kept(value, mine)) for key, mine, value in taken)
    return OrderedDict((key, value) for key, mine, value in gathered if mine), chunks


# --- Into models and optimizers ----------------------------------------------------------------------------


class _Targets:
    """What a load fills on this rank (Note [Targets]).

    Attributes:
        tree: the state dicts to fill, {"model": [...], "optimizer": [...]}. match: what is read into them.
    """

    match: Match

    def __init__(self, parts: Parts, model: Any, optimizer: Any) -> None:
        self.parts, self.models, self.optimizers = parts, several(model), several(optimizer)
        self.tree: dict[str, list[Any]] = {"model": [], "optimizer": []}
        counts = ("model", model, parts.model_count), ("optimizer", optimizer, len(parts.rests))
        for what, given, saved in counts:
            if given is not None and (got := len(several(given))) != saved:
                remedy = "Give as many, in the same order; None leaves all as they are."
                refuse(f"load_into's {what}", f"{saved}, as were saved", f"{got}", remedy)

    def of_models(
        self, device: torch.device | None, held: ExitStack, strict: bool
    ) -> tuple[dict[KeyPath, Any], str]:
        """Return the entries to fill, and the keys that are left out, in words.

        Models on the meta device get memory. They keep it if the context `held` ends without an error. Then a module also gets the
        entries that are not tensors.
        """
        here: dict[KeyPath, Any] = {}
        there = [path for path in self.parts.found if path[0] == "model" and self.models]
        for i, module in enumerate(self.models):
            if not isinstance(module, nn.Module | MutableMapping):
                refuse_kind(f"model[{i}]", module, "a module, or a state dict that can be filled")
            memory = held.enter_context(NewMemory(module, device, None))
            memory.give()
            memory.check_loaded({path[2:] for path in there if path[1] == i})
            self.tree["model"].append(memory.state_dict)
            here |= {("model", i, name): value for name, value in memory.state_dict.items()}
        common = {path: value for path, value in here.items() if path in {*there}}
        missing, unexpected = ([repr(p[2]) for p in paths if p not in common] for paths in (here, there))
        left_out = on_one_side(missing, unexpected)
        check_in_common("load_into", left_out, strict, bool(common), "Load into the model that was saved")
        return common, left_out

    def of_optimizers(self) -> dict[KeyPath, Any]:
        """Make the states to load for the optimizers. Return the tensors in them, which have no values yet."""
        rooms: dict[KeyPath, Any] = {}
        for i, (optimizer, rest) in enumerate(zip(self.optimizers, self.parts.rests)):
            groups = getattr(optimizer, "param_groups", None)
            if not isinstance(groups, list) or not callable(getattr(optimizer, "load_state_dict", None)):
                refuse_kind(f"optimizer[{i}]", optimizer, "an optimizer")
            mine, theirs = ([len(g["params"]) for g in each] for each in (groups, rest["param_groups"]))
            if mine != theirs:
                got, remedy = f"{theirs}", "Make the optimizer over the same parameters, in the same groups."
                at = "optimizer", i, "param_groups"
                refuse(at, f"groups of {mine} params, as the optimizer has", got, remedy)
            indices = [index for group in rest["param_groups"] for index in group["params"]]
            params = dict(zip(indices, (param for group in groups for param in group["params"])))
            found = {path: v for path, v in self.parts.found.items() if path[:2] == ("optimizer", i)}
            for path in found:
                entry = self.parts.manifest.entries[path]
                if isinstance(entry, TensorEntry) and len(path) > 4:
                    rooms[path] = _room_for(entry, params.get(path[3]), getattr(optimizer, "state", {}))
            entries = {path: rooms[path] if path in rooms else kept(v, True) for path, v in found.items()}
            state_dict = {key: kept(value, True) for key, value in rest.items()}
            self.tree["optimizer"].append(state_dict | {"state": self.parts.trees(entries)[1][i]["state"]})
        return rooms


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
    if not isinstance(place, DTensor):
        return torch.empty(shape, dtype=dtype)
    home = param if place.is_meta and isinstance(param, DTensor) else place
    return wrap_like(torch.empty(local_shape_of(place), dtype=dtype, device=local_of(home).device), place)
