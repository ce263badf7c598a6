"""The files of a PART checkpoint, read with all possible checks.

Note [What the checks see]
    A part is a zip archive. torch writes a CRC-32 for each of its records, but does not compare it. We compare it before we load
    anything. The CRC-32 does not cover the structure of the archive. So records must be as torch writes them (see `archives`).
    Any other change of the structure makes the archive unreadable, or changes no loaded value. Deliberate damage is not
    detected, since an attacker can change the CRC, too. But it cannot run code: `weights_only=True` is not optional.

Left out: files that torch.save wrote before it used zip archives, and files that were written with CRCs turned off.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hwfsdp.checkpoint.archives import left_beside, load_archive
from hwfsdp.checkpoint.messages import KeyPath, damaged, refuse, show
from hwfsdp.checkpoint.partition import COUNT_KEY, ID_KEY, VERSION, VERSION_KEY, Contents, merge
from hwfsdp.checkpoint.traverse import brief

_PART = re.compile(r"PART_(\d{3,})\.pt")


def part_name(rank: int) -> str:
    return f"PART_{rank:03d}.pt"


# --- Reading -----------------------------------------------------------------------------------------------


def read(fname: str | os.PathLike[str], nthreads: int, options: Mapping[str, Any]) -> Contents:
    """Read all parts of a checkpoint, each once, and return their contents together; see `parts.load`.

    Args:
        nthreads: the number of parts that are read at the same time; 0: no threads. options: for torch.load.
    """
    _check_options(nthreads, options)
    directory = Path(fname)
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
    return merge({str(files[rank]): parts[rank] for rank in range(count)})


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
    ranks = sorted(int(match[1]) for match in map(_PART.fullmatch, os.listdir(directory)) if match)
    files = {rank: directory / part_name(rank) for rank in ranks if (directory / part_name(rank)).exists()}
    if 0 not in files:
        raise damaged(directory / part_name(0), "the first part", "no such file", remedy=_INCOMPLETE)
    return files


def _read_part(path: Path, options: Mapping[str, Any]) -> dict[Any, Any]:
    part: dict[Any, Any] = load_archive(path, path, options)
    check_part(part, str(path))
    return part


# --- Replacing ---------------------------------------------------------------------------------------------


def check_replaceable(target: Path) -> None:
    """Raise an error if the directory holds a file that a new save would remove and that is not a part."""
    foreign = None
    if target.is_dir():
        foreign = next((name for name in sorted(os.listdir(target)) if not _PART.fullmatch(name)), None)
    elif target.exists():
        foreign = "a file of that name"
    if foreign is not None:
        expected = "a directory that holds nothing but PART files, or none yet"
        refuse(target, expected, foreign, "Save into a directory of its own; it is replaced as a whole.")


# --- Is it a part? -----------------------------------------------------------------------------------------


def check_part(part: Any, file: str) -> None:
    """Raise CheckpointError unless `part` has the structure of a part. Later, `merge` compares entries that two parts share."""
    _expect(isinstance(part, dict), file, (), "a dict", part)
    version, count = part.get(VERSION_KEY), part.get(COUNT_KEY)
    if not isinstance(version, str) or version != VERSION:
        remedy = "Load it with the program that wrote it, and save it again."
        raise damaged(file, f"version {VERSION!r}", _brief(version), key=show((VERSION_KEY,)), remedy=remedy)
    _expect(type(count) is int and count > 0, file, (COUNT_KEY,), "the number of parts", count)
    _expect(isinstance(part.get(ID_KEY), str | None), file, (ID_KEY,), "a str", part.get(ID_KEY))
    for kind, check in (("model", _check_model), ("optimizer", _check_optimizer)):
        several = part.get(kind)
        _expect(isinstance(several, list), file, (kind,), "a list", several)
        for i, pair in enumerate(several):
            fits = isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(x, dict) for x in pair)
            _expect(fits, file, (kind, i), "a pair of dicts: whole entries, chunks", pair)
            check(pair, (kind, i), file)


def _expect(fits: bool, file: str, path: KeyPath, expected: str, value: Any) -> None:
    """Raise an error for the value at this path of a part, unless it fits."""
    if not fits:
        raise damaged(file, expected, _brief(value), key=show(path) if path else None)


def _brief(value: Any) -> str:
    return (
        brief(value)[:200] if isinstance(value, dict | list | Tensor) else " ".join(repr(value)[:80].split())
    )


def _check_model(pair: tuple[Any, Any], path: KeyPath, file: str) -> None:
    whole, chunks = pair
    for name in (*whole, *chunks):
        _expect(isinstance(name, str), file, (*path, name), "a name that is a str", name)
    for name, chunk in chunks.items():
        _check_chunk(chunk, (*path, name), file)


def _check_optimizer(pair: tuple[Any, Any], path: KeyPath, file: str) -> None:
    whole, chunks = pair
    state, groups = whole.get("state"), whole.get("param_groups")
    _expect(isinstance(state, dict), file, (*path, "state"), "a dict", state)
    fits = isinstance(groups, list) and all(
        isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups
    )
    _expect(fits, file, (*path, "param_groups"), 'a list of dicts with "params"', groups)
    for key, chunk in chunks.items():
        fits = isinstance(key, tuple) and len(key) == 2
        _expect(fits, file, (*path, key), "(param index, key)", key)
        _check_chunk(chunk, (*path, "state", *key), file)


def _check_chunk(chunk: Any, path: KeyPath, file: str) -> None:
    fits = isinstance(chunk, tuple) and len(chunk) == 2 and isinstance(chunk[0], tuple)
    _expect(fits, file, path, "(torch.Size, chunk)", chunk)
    size, values = chunk
    fits = all(type(n) is int and n >= 0 for n in size)
    _expect(fits, file, path, "a size of ints, 0 or more each", tuple(size))
    plain = isinstance(values, Tensor) and not isinstance(values, DTensor) and values.layout == torch.strided
    _expect(plain and values.ndim == 1, file, path, "a chunk with one dim", values)
