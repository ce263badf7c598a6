"""The files of a PART checkpoint: what is in a part, which rank writes what, and all parts together as a source of a load.

This is the part of rank r of n, in a save of one model and one optimizer:

    "__nshards__"   n
    "__version__"   "2.0.0"
    "model"         [(OrderedDict of whole tensors, {name: (torch.Size, chunk [k])})]
    "optimizer"     [({"state": {param index: {key: value}}, "param_groups": [...]},
                      {(param index, key): (torch.Size, chunk [k])})]
    any other       the user's, in part 0 only

A *large* tensor is cut: its elements, in row-major order, are divided among the ranks in chunks, as `torch.chunk` makes them. All
other entries stay whole. They are assigned to ranks, the largest first, each to the rank that has the fewest bytes so far. The
state of one parameter stays together, except for tensors that are cut. Rank 0 writes the buffers. In this module, an entry has the
path ("model", i, name) or ("optimizer", i, "state", param index, key), and the state of a parameter the second one without the key.

Note [Whoever holds it]
    Readers take an entry from the part that has it. So they need not know which rank had to write it. They do check that every
    entry is in one part only, and that the chunks of a tensor add up to its size. A part without a chunk of a tensor means the
    same as a part with an empty chunk: there were fewer chunks than ranks. If a whole entry is missing in all parts, no reader
    notices, because nothing in the format lists the entries.

Note [What the checks see]
    A part is a zip archive. torch writes a CRC-32 for each of its records, but does not compare it. We compare it before we load
    anything. The CRC-32 does not cover the structure of the archive. So records must be as torch writes them (see `commit`).
    Any other change of the structure makes the archive unreadable, or changes no loaded value. Deliberate damage is not
    detected, since an attacker can change the CRC, too. But it cannot run code: `weights_only=True` is not optional.

Note [Chunks as boxes]
    A chunk is a range of the elements of its tensor, in row-major order. A range is a few boxes (`boxes.boxes_between`). So all parts
    together are a source of the loader (`Parts`), which fills targets of any layout from boxes.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import filterfalse
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hwfsdp.checkpoint import commit
from hwfsdp.checkpoint.boxes import Box, boxes_between, packed, whole
from hwfsdp.checkpoint.error_messages import KeyPath, check_format, damaged, is_utf8, refuse, show, told
from hwfsdp.checkpoint.loading import Source
from hwfsdp.checkpoint.manifest import Chunk, Manifest, TensorEntry, ValueEntry
from hwfsdp.checkpoint.saving import deal
from hwfsdp.checkpoint.state_dict import whole_of
from hwfsdp.checkpoint.traverse import leaves_of, map_leaves, nest

VERSION = "2.0.0"
COUNT_KEY, VERSION_KEY, ID_KEY = "__nshards__", "__version__", "__save_id__"
RESERVED = ("model", "optimizer", COUNT_KEY, VERSION_KEY, ID_KEY)
PART = re.compile(r"PART_(\d{3,})\.pt")


def part_name(rank: int) -> str:
    return f"PART_{rank:03d}.pt"


# --- Dividing ---------------------------------------------------------------------------------------------


class Share(NamedTuple):
    """A value to save, and the rank that writes it. None: the value is a large tensor, and each rank writes a chunk."""

    value: Any
    holder: int | None


def bytes_in(tree: Any) -> int:
    """Return the bytes of the tensors in the tree. A DTensor counts as a whole."""
    tensors = [leaf.value for leaf in leaves_of(tree) if isinstance(leaf.value, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def shares_of(
    tree: Mapping[Any, list[dict[Any, Any]]], buffers: Collection[KeyPath], world_size: int, large_bytes: int
) -> dict[KeyPath, Share]:
    """Divide the entries of models, and the states of the parameters of optimizers. Rank 0 gets the buffers, whatever their size."""
    entire: dict[KeyPath, Any] = {}
    cut: dict[KeyPath, Tensor] = {}
    for i, state_dict in enumerate(tree["model"]):
        for name, value in state_dict.items():
            path: KeyPath = ("model", i, name)
            is_cut = path not in buffers and _is_large(value, large_bytes)
            (cut if is_cut else entire)[path] = value
    for i, state_dict in enumerate(tree["optimizer"]):
        for index, state in state_dict["state"].items():
            path = ("optimizer", i, "state", index)
            items = state.items() if isinstance(state, Mapping) else ()
            large = {key: value for key, value in items if _is_large(value, large_bytes)}
            cut |= {(*path, key): value for key, value in large.items()}
            entire[path] = {key: value for key, value in items if key not in large} if large else state
    sizes = {path: bytes_in(value) for path, value in entire.items()}
    first = {path: sizes.pop(path) for path in buffers if path in sizes}
    holders = dict.fromkeys(first, 0) | deal(sizes, [sum(first.values()), *[0] * (world_size - 1)])
    shares = {path: Share(value, holders[path]) for path, value in entire.items()}
    return shares | {path: Share(value, None) for path, value in cut.items()}


def _is_large(value: Any, large_bytes: int) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and bytes_in(value) > large_bytes


# --- Reading -----------------------------------------------------------------------------------------------


def read(directory: Path, nthreads: int, options: Mapping[str, Any]) -> Parts:
    """Read all parts of a checkpoint, each once, and put them together; see `load`.

    Args:
        nthreads: the number of parts that are read at the same time; 0: no threads. options: for torch.load.
    """
    if type(nthreads) is not int or nthreads < 0:
        expected = "how many parts to read at a time, 0 or more"
        refuse("nthreads", expected, repr(nthreads), "Leave it out for 8.")
    if options.get("weights_only", True) is not True or options.get("pickle_module") is not None:
        remedy = "Leave them out; anything else would run code that is in the file."
        refuse("load", "torch.load's weights_only=True, and no pickle_module", f"{dict(options)}", remedy)
    target, expected = Path(os.path.realpath(directory)), "a directory of PART files"
    before = [name for name in commit.left_beside(target) if name.endswith(".previous")]
    if before and not directory.is_dir():
        remedy = f"Rename {target.parent / before[0]}, which it was before."
        raise damaged(directory, expected, "none", remedy=remedy)
    check_format(directory, expected, "part")
    numbers = {name: int(match[1]) for name in os.listdir(directory) if (match := PART.fullmatch(name))}
    ranks = sorted(rank for name, rank in numbers.items() if name == part_name(rank))
    _check_present(directory, ranks, 1, "at least one part")
    files = [directory / part_name(rank) for rank in ranks]
    with ThreadPoolExecutor(max(1, min(nthreads, len(files)))) as pool:
        read_all = pool.map if nthreads else map
        parts = dict(zip(map(str, files), read_all(partial(_read_part, options=options), files)))
    count = parts[str(files[0])][COUNT_KEY]
    expected = f"{count} parts, as {files[0]} says"
    _check_present(directory, ranks, count, expected)
    if len(files) > count:
        remedy = "It is of another save, of more ranks: remove it if the others are the newer ones."
        raise damaged(files[count], expected, files[count].stem, remedy=remedy)
    return Parts(parts)


def _check_present(directory: Path, ranks: list[int], count: int, expected: str) -> None:
    # there may be any number in a file: the first one that is missing is soon found
    for rank in filterfalse(ranks.__contains__, range(count)):
        remedy = "Copy all parts of the checkpoint into the directory."
        raise damaged(directory / part_name(rank), expected, "no such file", remedy=remedy)


def _read_part(path: Path, options: Mapping[str, Any]) -> dict[Any, Any]:
    with open(commit.open_file(path, may_be_link=True), "rb") as file:
        commit.check_archive(file, path)
    if not is_utf8(path):  # torch could not map it into memory
        options = {**options, "mmap": False}
    part = commit.load_archive(path, path, options)
    head = {key: part.get(key) for key in (VERSION_KEY, COUNT_KEY)} if isinstance(part, dict) else {}
    version, count = head.get(VERSION_KEY), head.get(COUNT_KEY)
    if not isinstance(version, str) or version != VERSION or type(count) is not int or count < 1:
        expected, got = f"version {VERSION!r}, and the number of parts", " ".join(f"{head}"[:200].split())
        remedy = "Load it with the program that wrote it, and save it again."
        raise damaged(path, expected, got, key=show((VERSION_KEY,)), remedy=remedy)
    return dict(part)


class Cut:
    """A tensor in chunks.

    Attributes:
        shape, dtype: of the whole tensor. chunks: in the order of parts, [k] each; some may be empty.
    """

    def __init__(self, size: Sequence[int], first: Tensor) -> None:
        """Raise an exception of any kind if these are no size and no dense tensor."""
        self.shape, self.dtype, self.chunks = torch.Size(size), first.dtype, [first.view(-1)]
        if min(self.shape, default=0) < 0:
            raise ValueError(f"a chunk of {tuple(self.shape)}")

    def whole(self) -> Tensor:
        """Return the tensor, on the device of its first chunk. If there is only one chunk, it is a view of the chunk."""
        first, *others = [chunk for chunk in self.chunks if chunk.numel()] or self.chunks[:1]
        rest = [chunk.to(first.device) for chunk in others]
        return (torch.cat([first, *rest]) if rest else first).detach().view(self.shape)

    def boxes(self) -> Iterator[Chunk]:
        """Yield the boxes that the chunks consist of (Note [Chunks as boxes])."""
        start = 0
        for values in self.chunks:
            for at, box in boxes_between(self.shape, start, start + len(values)):
                yield _chunk(box, values[at - start :][: box.numel].view(box.shape))
            start += len(values)


class Parts(Source):
    """The contents of all parts together, as a source of a load. Their checksums were compared when they were read.

    Attributes:
        found: the entries by path: ("model", i, name), ("optimizer", i, "state", param index, key), and without the key for a state
            that is not a dict, or is empty. A `Cut` stands for each tensor that is in chunks.
        rests: all of each optimizer's state dict but the state. others: the user's own entries.
    """

    def __init__(self, parts: Mapping[str, dict[str, Any]]) -> None:
        """Put the contents of the parts together. `parts`: by file, in the order of ranks.

        Raises:
            CheckpointError: they are not parts of one save, an entry is in two of them, or an entry is incomplete.
        """
        (first_file, first), *_ = parts.items()
        there: dict[KeyPath, list[tuple[str, Any]]] = {}  # by path, what each file has
        for file, part in parts.items():
            entries = [*entries_in(part, file)]
            _check_same_save(first_file, first, file, part)
            for path, value in entries:
                there.setdefault(path, []).append((file, value))
        self.found: dict[KeyPath, Any] = {path: _joined(path, each) for path, each in there.items()}
        for path, ((file, _), *_) in there.items():
            # A part may have a value in the place of the dict with the entry.
            if self.found.get(path[:-1], {}) != {}:
                raise damaged(file, "a dict in every part or in none", "both", key=show(path[:-1]))
        self.model_count, self.part_count = len(first["model"]), first[COUNT_KEY]
        self.others = {key: value for key, value in first.items() if key not in RESERVED}
        self.rests = [{k: v for k, v in rest.items() if k != "state"} for rest, _ in first["optimizer"]]
        known = {path: _entry_of(path, value) for path, value in self.found.items()}
        self.manifest = Manifest(str(first.get(ID_KEY)), (), {}, known)

    def trees(self, entries: Mapping[KeyPath, Any]) -> tuple[list[Any], list[Any]]:
        """Return the state dicts of the models and of the optimizers, with these entries in place of the entries that were found."""
        inner = {path[:-1] for path in entries}
        leaves = {path: value for path, value in entries.items() if path not in inner}
        tree = nest(leaves, _in_order)
        models, states = (tree.get(kind, {}) for kind in ("model", "optimizer"))
        return [models.get(i, {}) for i in range(self.model_count)], [
            {**rest, "state": states.get(i, {}).get("state", {})} for i, rest in enumerate(self.rests)
        ]

    def state(self, entries: Mapping[KeyPath, Any]) -> dict[Any, Any]:
        """Return what was saved, with these entries; one model or optimizer without a list around it."""
        models, optimizers = (each[0] if len(each) == 1 else each for each in self.trees(entries))
        return {"model": models, "optimizer": optimizers, **self.others}

    def value(self, entry: ValueEntry) -> Any:
        return copy.deepcopy(self.found[entry.path])


def _in_order(path: KeyPath, items: dict[Any, Any]) -> dict[Any, Any]:
    """Return the items; the states of parameters in the order of their indices."""
    are_indices = path[2:] == ("state",) and all(isinstance(index, int) for index in items)
    return dict(sorted(items.items())) if are_indices else items


def _entry_of(path: KeyPath, value: Any) -> TensorEntry | ValueEntry:
    if isinstance(value, Cut):
        return TensorEntry(path, value.dtype, tuple(value.shape), tuple(value.boxes()))
    dense = isinstance(value, Tensor) and value.layout == torch.strided
    if dense and not (value.is_nested or value.is_quantized):
        box = whole(value.shape)
        return TensorEntry(path, value.dtype, box.shape, (_chunk(box, value),) if value.numel() else ())
    return ValueEntry(path, chunk=_chunk(whole(())))


def _chunk(box: Box, values: Tensor | None = None) -> Chunk:
    """Return a chunk of a file that is in memory already."""
    return Chunk(-1, 0, box, values=values)


def _joined(path: KeyPath, found: list[tuple[str, Any]]) -> Any:
    """Put together what the parts have at a path: one entry, the chunks of a tensor, or empty states."""
    (first, value), *more = [(file, v) for file, v in found if not (isinstance(v, dict) and not v)] or found[
        :1
    ]
    for file, other in more:
        if not (isinstance(value, Cut) and isinstance(other, Cut)):
            expected = f"the entry in one part only; it is in {first}"
            raise damaged(file, expected, "the entry again", key=show(path))
        if (value.shape, value.dtype) != (other.shape, other.dtype):
            expected = f"a chunk of {tuple(value.shape)}, {value.dtype}, as {first} has"
            raise damaged(file, expected, f"one of {tuple(other.shape)}, {other.dtype}", key=show(path))
        value.chunks += other.chunks
    if isinstance(value, Cut) and (elements := sum(map(len, value.chunks))) != prod(value.shape):
        expected = f"{prod(value.shape)} elements in all parts, for shape {tuple(value.shape)}"
        raise damaged(first, expected, f"{elements}", key=show(path))
    return value


def _check_same_save(first_file: str, first: dict[str, Any], file: str, part: dict[str, Any]) -> None:
    """Raise an error if two parts differ in something that is the same in all parts of a save."""

    def facts_of(part: dict[str, Any]) -> dict[str, str]:
        facts = {show((key,)): str(part.get(key)) for key in (COUNT_KEY, ID_KEY)}
        facts |= {f"the number of {kind}s": str(len(part[kind])) for kind in ("model", "optimizer")}
        groups = [[group["params"] for group in rest["param_groups"]] for rest, _ in part["optimizer"]]
        return facts | {"the params of the optimizers": str(groups)}

    theirs = facts_of(part)
    for key, here in facts_of(first).items():
        if here != theirs[key]:
            expected = f"{here[:80]}, as in {first_file}"
            remedy = "These are parts of two saves: put the files of one save into a directory of their own."
            raise damaged(file, expected, theirs[key][:80], key=key, remedy=remedy)


def entries_in(part: dict[Any, Any], file: str) -> Iterator[tuple[KeyPath, Any]]:
    """Yield the entries of a part and their paths, a `Cut` of one chunk for each chunk. Of a parameter's state, each key is an entry.

    Raises CheckpointError unless `part` has the structure of a part.
    """
    path: KeyPath = ()
    try:
        for i, (entire, chunks) in enumerate(part["model"]):
            path = "model", i
            yield from (((*path, name), value) for name, value in entire.items())
            yield from (((*path, name), Cut(*chunk)) for name, chunk in chunks.items())
        for i, (entire, chunks) in enumerate(part["optimizer"]):
            path = "optimizer", i, "state"
            for index, entry in entire["state"].items():
                keys = entry if isinstance(entry, dict) and entry else ()
                yield from (((*path, index, key), entry[key]) for key in keys)
                yield from () if keys else [((*path, index), entry)]
            for (index, key), chunk in chunks.items():
                yield (*path, index, key), Cut(*chunk)
            path = "optimizer", i, "param_groups"
            [*map(len, (group["params"] for group in entire["param_groups"]))]
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise damaged(file, "entries as in a part", told(error), key=show(path)) from error


# --- Copies -----------------------------------------------------------------------------------------------


def packed_tree(value: Any, keep: bool) -> Any:
    """Return the value with packed tensors on the CPU; without `keep`, with None for each leaf. DTensors are gathered in both cases."""

    def take(_: KeyPath, leaf: Any, __: Any) -> Any:
        whole = whole_of(leaf) if isinstance(leaf, DTensor) else leaf
        return None if not keep else packed(whole) if isinstance(whole, Tensor) else whole

    return map_leaves(take, value)
