"""The contents of each part of a PART checkpoint, and the way from parts to whole entries. No files here; see `parts`.

A part is a dict. This is the part of rank r of n, in a save of one model and one optimizer:

    "__nshards__"   n
    "__version__"   "2.0.0"
    "model"         [(OrderedDict of whole tensors, {name: (torch.Size, chunk [k])})]
    "optimizer"     [({"state": {param index: {key: value}}, "param_groups": [...]},
                      {(param index, key): (torch.Size, chunk [k])})]
    any other       the user's, in part 0 only

A *large* tensor is cut: its elements, in row-major order, are divided among the ranks in chunks, as `torch.chunk` makes them. All
other entries stay whole. They are assigned to ranks, the largest first, each to the rank that has the fewest bytes so far. The
state of one parameter stays together, except for tensors that are cut. Rank 0 writes the buffers.

Note [Whoever holds it]
    Readers take an entry from the part that has it. So they need not know which rank had to write it. They do check that every
    entry is in one part only, and that the chunks of a tensor add up to its size. A part without a chunk of a tensor means the
    same as a part with an empty chunk: there were fewer chunks than ranks. If a whole entry is missing in all parts, no reader
    notices, because nothing in the format lists the entries.

Left out: shared memory. Tied weights are two entries with the same values.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hwfsdp.checkpoint.messages import KeyPath, damaged, show
from hwfsdp.checkpoint.state_dict import whole_of
from hwfsdp.checkpoint.traverse import leaves_of, map_leaves
from hwfsdp.core.sharding import chunk_extent

VERSION = "2.0.0"
COUNT_KEY, VERSION_KEY, ID_KEY = "__nshards__", "__version__", "__save_id__"
RESERVED = ("model", "optimizer", COUNT_KEY, VERSION_KEY, ID_KEY)


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


def deal(sizes: Mapping[Any, int], loads: list[int]) -> dict[Any, int]:
    """Choose a rank for each entry: the largest entry first, each to the rank with the least load; the lowest rank if loads are equal.

    Args:
        sizes: bytes by key. loads: bytes that each rank has already; the bytes of the entries are added.
    """
    holders = {}
    for key, size in sorted(sizes.items(), key=lambda item: -item[1]):
        holders[key] = loads.index(min(loads))
        loads[holders[key]] += size
    return holders


def bytes_in(tree: Any) -> int:
    """Return the bytes of the tensors in the tree. A DTensor counts as a whole."""
    tensors = [leaf.value for leaf in leaves_of(tree) if isinstance(leaf.value, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def is_large(value: Any, large_bytes: int) -> bool:
    """True if the value is a dense tensor of more bytes than `large_bytes`."""
    is_dense = isinstance(value, Tensor) and value.layout == torch.strided
    return is_dense and value.numel() * value.element_size() > large_bytes


def divide_model(
    state: Mapping[str, Any], buffers: Collection[str], loads: list[int], large_bytes: int
) -> Division:
    """Divide a model's state dict among ranks. Rank 0 gets all `buffers`, whatever their size."""
    cut = {name: v for name, v in state.items() if name not in buffers and is_large(v, large_bytes)}
    whole = {name: value for name, value in state.items() if name not in cut}
    mine = {name: 0 for name in whole if name in buffers}
    loads[0] += sum(bytes_in(whole[name]) for name in mine)
    sizes = {name: bytes_in(value) for name, value in whole.items() if name not in mine}
    return Division(whole, mine | deal(sizes, loads), cut)


def divide_optimizer(state: Mapping[Any, Any], loads: list[int], large_bytes: int) -> Division:
    """Divide the "state" of an optimizer's state dict among ranks."""
    whole, cut = dict(state), dict[Any, Tensor]()
    for index, entry in state.items():
        if isinstance(entry, Mapping):
            large = {key: value for key, value in entry.items() if is_large(value, large_bytes)}
            cut |= {(index, key): value for key, value in large.items()}
            whole[index] = {key: value for key, value in entry.items() if key not in large}
    return Division(whole, deal({index: bytes_in(entry) for index, entry in whole.items()}, loads), cut)


# --- Making a part -----------------------------------------------------------------------------------------


def own(tensor: Tensor) -> Tensor:
    """Return a copy on the CPU, row-major, with memory of its own. A view would bring all of its storage into the file."""
    plain = tensor.detach()
    if plain.layout == torch.strided:
        plain = plain.resolve_conj().resolve_neg().contiguous()
    return plain.clone() if plain.is_cpu else plain.cpu()


def chunk_of(value: Tensor, rank: int, world_size: int) -> tuple[torch.Size, Tensor]:
    """Return the size of a tensor and this rank's chunk of its elements, [k], in row-major order. A DTensor is gathered first."""
    whole = whole_of(value) if isinstance(value, DTensor) else value
    start, length = chunk_extent(whole.numel(), world_size, rank)
    return whole.shape, own(whole.reshape(-1)[start : start + length])


def kept(value: Any, keep: bool) -> Any:
    """Return the value with copies of its tensors; without `keep`, with None for each leaf. DTensors are gathered in both cases."""

    def take(_: KeyPath, leaf: Any, __: Any) -> Any:
        whole = whole_of(leaf) if isinstance(leaf, DTensor) else leaf
        return own(whole) if keep and isinstance(whole, Tensor) else whole if keep else None

    return map_leaves(take, value)


def part_of(dealt: Division, rank: int, world_size: int) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Return this rank's part: whole entries, chunks. All ranks gather DTensors one at a time, in the same order."""
    chunks = {key: chunk_of(value, rank, world_size) for key, value in dealt.cut.items()}
    whole: OrderedDict[Any, Any] = OrderedDict()
    for key, value in dealt.whole.items():
        taken = kept(value, dealt.holders[key] == rank)
        if dealt.holders[key] == rank:
            whole[key] = taken
    return whole, chunks


# --- Whole again -------------------------------------------------------------------------------------------


class Cut:
    """A tensor whose chunks are not put together yet.

    Attributes:
        shape, dtype: of the whole tensor. chunks: in the order of ranks; some may be empty.
    """

    def __init__(self, size: Sequence[int], first: Tensor) -> None:
        self.shape, self.dtype = torch.Size(size), first.dtype
        self.chunks = [first]

    def whole(self) -> Tensor:
        """Return the tensor, on the device of its first chunk. If there is only one chunk, it is a view of the chunk."""
        first, *others = [chunk for chunk in self.chunks if chunk.numel()] or self.chunks[:1]
        rest = [chunk.to(first.device) for chunk in others]
        return (torch.cat([first, *rest]) if rest else first).detach().view(self.shape)


def whole_entry(entry: Any) -> Any:
    """Return the entry. If it is a `Cut`, put its chunks together."""
    return entry.whole() if isinstance(entry, Cut) else entry


class Contents(NamedTuple):
    """The contents of all parts together. A `Cut` stands for each tensor that is in chunks."""

    models: list[dict[str, Any]]
    optimizers: list[dict[str, Any]]
    others: dict[Any, Any]
    save_id: str | None
    part_count: int


class _Entries:
    """Collects the entries of all models and of the states of all optimizers, by their paths, part by part."""

    def __init__(self) -> None:
        self.entries: dict[KeyPath, Any] = {}  # a `Cut` for a tensor in chunks
        self.files: dict[KeyPath, str] = {}  # the first file that has the entry

    def add_part(self, part: dict[str, Any], file: str) -> None:
        for i, (whole, chunks) in enumerate(part["model"]):
            for name, value in whole.items():
                self.add(("model", i, name), value, file)
            for name, chunk in chunks.items():
                self.add_chunk(("model", i, name), chunk, file)
        for i, (whole, chunks) in enumerate(part["optimizer"]):
            for index, entry in whole["state"].items():
                self.add_state(("optimizer", i, "state", index), entry, file)
            for key, chunk in chunks.items():
                self.add_chunk(("optimizer", i, "state", *key), chunk, file)

    def add(self, path: KeyPath, value: Any, file: str) -> None:
        if path in self.files:
            expected = f"the entry in one part only; it is in {self.files[path]}"
            raise damaged(file, expected, "the entry again", key=show(path))
        self.entries[path], self.files[path] = value, file

    def add_state(self, path: KeyPath, entry: Any, file: str) -> None:
        """Add a parameter's state, one entry for each key. A state that is not a dict, or is an empty dict, is one entry."""
        if not isinstance(entry, dict):
            self.add(path, entry, file)
        elif not entry:
            self.entries.setdefault(path, {})
        else:
            for key, value in entry.items():
                self.add((*path, key), value, file)

    def add_chunk(self, path: KeyPath, chunk: tuple[Sequence[int], Tensor], file: str) -> None:
        (size, values), cut = chunk, self.entries.get(path)
        if not isinstance(cut, Cut):
            self.add(path, Cut(size, values), file)  # raises an error if the entry is whole
        elif (tuple(size), values.dtype) != (tuple(cut.shape), cut.dtype):
            expected = f"a chunk of {tuple(cut.shape)}, {cut.dtype}, as {self.files[path]} has"
            raise damaged(file, expected, f"one of {tuple(size)}, {values.dtype}", key=show(path))
        else:
            cut.chunks.append(values)

    def check_complete(self) -> None:
        """Raise an error if chunks do not add up."""
        for path, cut in self.entries.items():
            if isinstance(cut, Cut) and (elements := sum(map(len, cut.chunks))) != prod(cut.shape):
                expected = f"chunks of {prod(cut.shape)} elements in all parts, for shape {tuple(cut.shape)}"
                raise damaged(self.files[path], expected, f"{elements}", key=show(path))


def merge(parts: Mapping[str, dict[str, Any]]) -> Contents:
    """Put the contents of all parts together.

    Args:
        parts: the parts by file, in the order of ranks. `part_files.check_part` has accepted each of them.

    Raises:
        CheckpointError: they are not parts of one save, an entry is in two of them, or an entry is incomplete.
    """
    (first_file, first), *_ = parts.items()
    found = _Entries()
    for file, part in parts.items():
        _check_same_save(first_file, first, file, part)
        found.add_part(part, file)
    found.check_complete()
    models: list[dict[str, Any]] = [{} for _ in first["model"]]
    optimizers: list[dict[str, Any]] = [{**whole, "state": {}} for whole, _ in first["optimizer"]]
    for path, value in sorted(found.entries.items(), key=lambda item: len(item[0])):
        tree: Any = (models if path[0] == "model" else optimizers)[path[1]]
        for n, key in enumerate(path[2:-1], 3):
            tree = tree.setdefault(key, {})
            if not isinstance(tree, dict):
                expected = "a dict in every part or in none"
                raise damaged(found.files[path], expected, "both", key=show(path[:n]))
        tree[path[-1]] = value
    for optimizer in optimizers:
        if all(isinstance(index, int) for index in optimizer["state"]):
            optimizer["state"] = dict(sorted(optimizer["state"].items()))
    others = {key: value for key, value in first.items() if key not in RESERVED}
    return Contents(models, optimizers, others, first.get(ID_KEY), first[COUNT_KEY])


def _check_same_save(first_file: str, first: dict[str, Any], file: str, part: dict[str, Any]) -> None:
    """Raise an error if two parts differ in something that is the same in all parts of a save."""
    what: dict[str, tuple[Hashable, Hashable]] = {
        show((COUNT_KEY,)): (first[COUNT_KEY], part[COUNT_KEY]),
        show((ID_KEY,)): (first.get(ID_KEY), part.get(ID_KEY)),
        "the number of models": (len(first["model"]), len(part["model"])),
        "the number of optimizers": (len(first["optimizer"]), len(part["optimizer"])),
    }
    for i, pairs in enumerate(zip(first["optimizer"], part["optimizer"])):
        one, other = (repr([group["params"] for group in whole["param_groups"]]) for whole, _ in pairs)
        what[f"the params of {show(('optimizer', i, 'param_groups'))}"] = (one, other)
    for key, (here, there) in what.items():
        if here != there:
            expected = f"{str(here)[:80]}, as in {first_file}"
            remedy = "These are parts of two saves: put the files of one save into a directory of their own."
            raise damaged(file, expected, str(there)[:80], key=key, remedy=remedy)
