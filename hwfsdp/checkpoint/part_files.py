"""The files of a PART checkpoint: what is in a part, and all parts together as a source of a load.

This is the part of rank r of n, in a save of one model and one optimizer. Like every part, it is a dict:

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

Note [What the checks see]
    A part is a zip archive. torch writes a CRC-32 for each of its records, but does not compare it. We compare it before we load
    anything. The CRC-32 does not cover the structure of the archive. So records must be as torch writes them (see `archives`).
    Any other change of the structure makes the archive unreadable, or changes no loaded value. Deliberate damage is not
    detected, since an attacker can change the CRC, too. But it cannot run code: `weights_only=True` is not optional.

Note [Chunks as boxes]
    A chunk is a range of the elements of its tensor, in row-major order. A range is a few boxes (`boxes.boxes_between`). So all parts
    together are a source of the loader (`Parts`), which fills targets of any layout from boxes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hwfsdp.checkpoint.archives import check_archive, load_archive
from hwfsdp.checkpoint.boxes import boxes_between, whole, within
from hwfsdp.checkpoint.commit import left_beside
from hwfsdp.checkpoint.loading import Need, Source
from hwfsdp.checkpoint.manifest import Chunk, Manifest, TensorEntry, ValueEntry
from hwfsdp.checkpoint.messages import KeyPath, damaged, refuse, show
from hwfsdp.checkpoint.state_dict import whole_of
from hwfsdp.checkpoint.traverse import brief, map_leaves, nest

VERSION = "2.0.0"
COUNT_KEY, VERSION_KEY, ID_KEY = "__nshards__", "__version__", "__save_id__"
RESERVED = ("model", "optimizer", COUNT_KEY, VERSION_KEY, ID_KEY)
PART = re.compile(r"PART_(\d{3,})\.pt")


def part_name(rank: int) -> str:
    return f"PART_{rank:03d}.pt"


# --- Reading -----------------------------------------------------------------------------------------------


def read(directory: Path, nthreads: int, options: Mapping[str, Any]) -> Parts:
    """Read all parts of a checkpoint, each once, and put them together; see `load`.

    Args:
        nthreads: the number of parts that are read at the same time; 0: no threads. options: for torch.load.
    """
    _check_options(nthreads, options)
    files = _parts_in(directory)
    with ThreadPoolExecutor(max(1, min(nthreads, len(files)))) as pool:
        read_all = pool.map if nthreads else map
        parts = dict(zip(files, read_all(partial(_read_part, options=options), files.values())))
    count = parts[0][COUNT_KEY]
    expected = f"{count} parts, as {files[0]} says"
    for rank in range(count):
        if rank not in files:
            raise damaged(directory / part_name(rank), expected, "no such file", remedy=_INCOMPLETE)
    for rank, path in files.items():
        if rank >= count:
            remedy = "It is of another save, of more ranks: remove it if the others are the newer ones."
            raise damaged(path, expected, f"part {rank}", remedy=remedy)
    return Parts({str(files[rank]): parts[rank] for rank in range(count)})


_INCOMPLETE = "Copy all parts of the checkpoint into the directory."


def _check_options(nthreads: int, options: Mapping[str, Any]) -> None:
    if type(nthreads) is not int or nthreads < 0:
        expected = "how many parts to read at a time, 0 or more"
        refuse("nthreads", expected, repr(nthreads), "Leave it out for 8.")
    if options.get("weights_only", True) is not True or options.get("pickle_module") is not None:
        remedy = "Leave them out; anything else would run code that is in the file."
        refuse("load", "torch.load's weights_only=True, and no pickle_module", f"{dict(options)}", remedy)


def _parts_in(directory: Path) -> dict[int, Path]:
    """Return the path of each part in the directory, by rank. Part 0 must exist."""
    if not directory.is_dir():
        target = Path(os.path.realpath(directory))
        before = [name for name in left_beside(target) if name.endswith(".previous")]
        remedy = f"Rename {target.parent / before[0]}, which it was before." if before else "Check the path."
        raise damaged(directory, "a directory of PART files", "none", remedy=remedy)
    ranks = sorted(int(match[1]) for match in map(PART.fullmatch, os.listdir(directory)) if match)
    files = {rank: directory / part_name(rank) for rank in ranks if (directory / part_name(rank)).exists()}
    if 0 not in files:
        raise damaged(directory / part_name(0), "the first part", "no such file", remedy=_INCOMPLETE)
    return files


def _read_part(path: Path, options: Mapping[str, Any]) -> dict[Any, Any]:
    check_archive(path, path)
    part: dict[Any, Any] = load_archive(path, path, options)
    _check_head(part, str(path))
    return part


# --- All parts together ------------------------------------------------------------------------------------


class Cut:
    """A tensor in chunks.

    Attributes:
        shape, dtype: of the whole tensor. chunks: in the order of parts, [k] each; some may be empty.
    """

    def __init__(self, size: Sequence[int], first: Tensor) -> None:
        self.shape, self.dtype, self.chunks = torch.Size(size), first.dtype, [first]

    def whole(self) -> Tensor:
        """Return the tensor, on the device of its first chunk. If there is only one chunk, it is a view of the chunk."""
        first, *others = [chunk for chunk in self.chunks if chunk.numel()] or self.chunks[:1]
        rest = [chunk.to(first.device) for chunk in others]
        return (torch.cat([first, *rest]) if rest else first).detach().view(self.shape)

    def boxes(self) -> Iterator[Chunk]:
        """Yield the boxes that the chunks consist of (Note [Chunks as boxes]). `file` counts chunks, and `at` elements in a chunk."""
        start = 0
        for number, values in enumerate(self.chunks):
            for at, box in boxes_between(self.shape, start, start + len(values)):
                yield Chunk(number, at - start, box)
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
        self.found: dict[KeyPath, Any] = {}
        files: dict[KeyPath, str] = {}  # the first file that has the entry
        entries = {file: [*entries_in(part, file)] for file, part in parts.items()}
        for file, part in parts.items():
            _check_same_save(first_file, first, file, part)
            for path, value in entries[file]:
                _add(self.found, files, path, value, file)
        for path, value in self.found.items():
            _check_whole(path, value, self.found.get(path[:-1], {}), files)
        self.model_count, self.others = len(first["model"]), {
            k: v for k, v in first.items() if k not in RESERVED
        }
        self.rests = [{k: v for k, v in rest.items() if k != "state"} for rest, _ in first["optimizer"]]
        self.save_id: str | None = first.get(ID_KEY)
        self.part_count: int = first[COUNT_KEY]
        self.manifest = Manifest("", (), {}, {path: _entry_of(path, v) for path, v in self.found.items()})

    def trees(self, entries: Mapping[KeyPath, Any]) -> tuple[list[Any], list[Any]]:
        """Return the state dicts of the models and of the optimizers, with these entries in place of the entries that were found."""
        inner = {path[:-1] for path in entries}
        leaves = {path: value for path, value in entries.items() if path not in inner}
        tree = nest(
            leaves, lambda path, items: dict(sorted(items.items())) if _are_indices(path, items) else items
        )
        models, states = (tree.get(kind, {}) for kind in ("model", "optimizer"))
        return [models.get(i, {}) for i in range(self.model_count)], [
            {**rest, "state": states.get(i, {}).get("state", {})} for i, rest in enumerate(self.rests)
        ]

    def check(self, entry: TensorEntry, chunk: Chunk) -> None:
        """Do nothing: `read` has compared the checksums of the parts."""

    def value(self, entry: ValueEntry) -> Any:
        return kept(self.found[entry.path], True)

    def jobs(self, need: Need, part: Tensor) -> Iterator[Callable[[], None]]:
        yield partial(self._copy, need, part[need.place.slices])

    def _copy(self, need: Need, place: Tensor) -> None:
        values, chunk = self.found[need.entry.path], need.chunk
        if isinstance(values, Cut):
            values = values.chunks[chunk.file][chunk.at : chunk.at + chunk.box.numel].view(chunk.box.shape)
        place.copy_(values[within(need.shared, chunk.box).slices])


def _are_indices(path: KeyPath, items: dict[Any, Any]) -> bool:
    return path[2:] == ("state",) and all(isinstance(index, int) for index in items)


def _entry_of(path: KeyPath, value: Any) -> TensorEntry | ValueEntry:
    if isinstance(value, Cut):
        return TensorEntry(path, value.dtype, tuple(value.shape), tuple(value.boxes()))
    if (
        isinstance(value, Tensor)
        and value.layout == torch.strided
        and not (value.is_nested or value.is_quantized)
    ):
        shape = tuple(value.shape)
        return TensorEntry(path, value.dtype, shape, (Chunk(0, 0, whole(shape)),) if value.numel() else ())
    return ValueEntry(path, chunk=Chunk(0, 0, whole(())))


def _check_whole(path: KeyPath, value: Any, above: Any, files: Mapping[KeyPath, str]) -> None:
    """Raise an error if a tensor lacks chunks, or a part has a value `above`, in the place of the dict with the entry."""
    if above != {}:
        raise damaged(files[path], "a dict in every part or in none", "both", key=show(path[:-1]))
    if isinstance(value, Cut) and (elements := sum(map(len, value.chunks))) != prod(value.shape):
        expected = f"chunks of {prod(value.shape)} elements in all parts, for shape {tuple(value.shape)}"
        raise damaged(files[path], expected, f"{elements}", key=show(path))


def _add(found: dict[KeyPath, Any], files: dict[KeyPath, str], path: KeyPath, value: Any, file: str) -> None:
    """Add an entry of a part: a new one, an empty state, or the next chunk of a tensor."""
    known = found.get(path)
    if isinstance(value, dict) and not value:
        found.setdefault(path, {})
    elif path not in files:
        found[path], files[path] = value, file
    elif not (isinstance(known, Cut) and isinstance(value, Cut)):
        expected = f"the entry in one part only; it is in {files[path]}"
        raise damaged(file, expected, "the entry again", key=show(path))
    elif (value.shape, value.dtype) != (known.shape, known.dtype):
        expected = f"a chunk of {tuple(known.shape)}, {known.dtype}, as {files[path]} has"
        raise damaged(file, expected, f"one of {tuple(value.shape)}, {value.dtype}", key=show(path))
    else:
        known.chunks += value.chunks


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


# --- Is it a part? -----------------------------------------------------------------------------------------


def entries_in(part: Any, file: str) -> Iterator[tuple[KeyPath, Any]]:
    """Yield the entries of a part and their paths, a `Cut` of one chunk for each chunk. Of a parameter's state, each key is an entry.

    Raises CheckpointError unless `part` has the structure of a part.
    """
    _check_head(part, file)
    for kind in ("model", "optimizer"):
        several = part.get(kind)
        _expect(isinstance(several, list), file, (kind,), "a list", several)
        for i, pair in enumerate(several):
            fits = isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(x, dict) for x in pair)
            _expect(fits, file, (kind, i), "a pair of dicts: whole entries, chunks", pair)
            yield from (_model_entries if kind == "model" else _optimizer_entries)(pair, (kind, i), file)


def _check_head(part: Any, file: str) -> None:
    _expect(isinstance(part, dict), file, (), "a dict", part)
    version, count = part.get(VERSION_KEY), part.get(COUNT_KEY)
    if not isinstance(version, str) or version != VERSION:
        remedy = "Load it with the program that wrote it, and save it again."
        raise damaged(file, f"version {VERSION!r}", _brief(version), key=show((VERSION_KEY,)), remedy=remedy)
    _expect(type(count) is int and count > 0, file, (COUNT_KEY,), "the number of parts", count)
    _expect(isinstance(part.get(ID_KEY), str | None), file, (ID_KEY,), "a str", part.get(ID_KEY))


def _expect(fits: bool, file: str, path: KeyPath, expected: str, value: Any) -> None:
    """Raise an error for the value at this path of a part, unless it fits."""
    if not fits:
        raise damaged(file, expected, _brief(value), key=show(path) if path else None)


def _brief(value: Any) -> str:
    return (
        brief(value)[:200] if isinstance(value, dict | list | Tensor) else " ".join(repr(value)[:80].split())
    )


def _model_entries(pair: Any, path: KeyPath, file: str) -> Iterator[tuple[KeyPath, Any]]:
    whole, chunks = pair
    for name in (*whole, *chunks):
        _expect(isinstance(name, str), file, (*path, name), "a name that is a str", name)
    yield from (((*path, name), value) for name, value in whole.items())
    yield from (_chunk((*path, name), chunk, file) for name, chunk in chunks.items())


def _optimizer_entries(pair: Any, path: KeyPath, file: str) -> Iterator[tuple[KeyPath, Any]]:
    (whole, chunks), at = pair, (*path, "state")
    state, groups = whole.get("state"), whole.get("param_groups")
    _expect(isinstance(state, dict), file, at, "a dict", state)
    fits = isinstance(groups, list) and all(
        isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups
    )
    _expect(fits, file, (*path, "param_groups"), 'a list of dicts with "params"', groups)
    for index, entry in state.items():
        if isinstance(entry, dict) and entry:
            yield from (((*at, index, key), value) for key, value in entry.items())
        else:
            yield (*at, index), entry
    for key, chunk in chunks.items():
        _expect(isinstance(key, tuple) and len(key) == 2, file, (*path, key), "(param index, key)", key)
        yield _chunk((*at, *key), chunk, file)


def _chunk(path: KeyPath, chunk: Any, file: str) -> tuple[KeyPath, Cut]:
    fits = isinstance(chunk, tuple) and len(chunk) == 2 and isinstance(chunk[0], tuple)
    _expect(fits, file, path, "(torch.Size, chunk)", chunk)
    size, values = chunk
    fits = all(type(n) is int and n >= 0 for n in size)
    _expect(fits, file, path, "a size of ints, 0 or more each", tuple(size))
    plain = isinstance(values, Tensor) and not isinstance(values, DTensor) and values.layout == torch.strided
    _expect(plain and values.ndim == 1, file, path, "a chunk with one dim", values)
    return path, Cut(size, values)


# --- Copies -----------------------------------------------------------------------------------------------


def own(tensor: Tensor) -> Tensor:
    """Return a copy on the CPU, row-major, with memory of its own. A view would bring all of its storage into the file."""
    plain = tensor.detach()
    if plain.layout == torch.strided:
        plain = plain.resolve_conj().resolve_neg().contiguous()
    return plain.clone() if plain.is_cpu else plain.cpu()


def kept(value: Any, keep: bool) -> Any:
    """Return the value with copies of its tensors; without `keep`, with None for each leaf. DTensors are gathered in both cases."""

    def take(_: KeyPath, leaf: Any, __: Any) -> Any:
        whole = whole_of(leaf) if isinstance(leaf, DTensor) else leaf
        return own(whole) if keep and isinstance(whole, Tensor) else whole if keep else None

    return map_leaves(take, value)
