"""The files of a PART checkpoint, read with every check there is.

Note [What the checks see]
    A part is a zip archive. Each of its records has a CRC-32, which torch writes and does not read. It is compared before
    anything is loaded. It does not cover the structure of the archive. So records must be as torch writes them (see
    `archives`); any other change makes the archive unreadable, or changes no loaded value. Deliberate damage is not
    detected, since an attacker can change the CRC, too. But it cannot run code: `weights_only=True` is not optional.

Left out: files that torch.save wrote before it wrote zip archives, and those written with CRCs turned off.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hwfsdp.checkpoint.archives import find_damage, left_beside
from hwfsdp.checkpoint.partition import COUNT_KEY, ID_KEY, VERSION, VERSION_KEY, Contents, merge, refuse_part
from hwfsdp.checkpoint.traverse import Path as Keys
from hwfsdp.checkpoint.traverse import brief, show
from hwfsdp.errors import CheckpointError, UsageError

_PART = re.compile(r"PART_(\d{3,})\.pt")


def part_name(rank: int) -> str:
    return f"PART_{rank:03d}.pt"


# --- Reading -----------------------------------------------------------------------------------------------


def read(fname: str | os.PathLike[str], nthreads: int, options: Mapping[str, Any]) -> Contents:
    """All parts of a checkpoint, each read once, and what they hold together; see `parts.load`.

    Args:
        nthreads: parts read at a time; 0: without threads. options: for torch.load.
    """
    _check_options(nthreads, options)
    directory = Path(fname)
    files = _parts_in(directory)
    with ThreadPoolExecutor(max(1, min(nthreads, len(files)))) as pool:
        reading: dict[int, Callable[[], dict[Any, Any]]] = {
            rank: (
                pool.submit(_read_part, path, options).result
                if nthreads
                else cache(partial(_read_part, path, options))
            )
            for rank, path in files.items()
        }
        count = reading[0]()[COUNT_KEY]
        for rank in range(count):
            if rank not in files:
                expected = f"{count} parts, as {files[0]} says"
                refuse_part(str(directory / part_name(rank)), None, expected, "no such file", _INCOMPLETE)
        for rank, path in files.items():
            if rank >= count:
                remedy = "It is of another save, of more ranks: remove it if the others are the newer ones."
                refuse_part(str(path), None, f"{count} parts, as {files[0]} says", f"part {rank}", remedy)
        return merge({str(files[rank]): reading[rank]() for rank in range(count)})


_INCOMPLETE = "Copy all parts of the checkpoint into the directory."


def _check_options(nthreads: int, options: Mapping[str, Any]) -> None:
    if type(nthreads) is not int or nthreads < 0:
        raise UsageError(
            "nthreads",
            expected="how many parts to read at a time, 0 or more",
            got=repr(nthreads),
            remedy="Leave it out for 8.",
        )
    if options.get("weights_only", True) is not True or options.get("pickle_module") is not None:
        raise UsageError(
            "load",
            expected="torch.load's weights_only=True, and no pickle_module",
            got=f"{dict(options)}",
            remedy="Leave them out; anything else would run code that is in the file.",
        )


def _parts_in(directory: Path) -> dict[int, Path]:
    """Path of each part that is there, by rank; part 0 is."""
    if not directory.is_dir():
        target = Path(os.path.realpath(directory))
        before = [name for name in left_beside(target) if name.endswith(".previous")]
        remedy = f"Rename {target.parent / before[0]}, which it was before." if before else "Check the path."
        refuse_part(str(directory), None, "a directory of PART files", "none", remedy)
    ranks = sorted(int(match[1]) for match in map(_PART.fullmatch, os.listdir(directory)) if match)
    files = {rank: directory / part_name(rank) for rank in ranks if (directory / part_name(rank)).exists()}
    if 0 not in files:
        refuse_part(str(directory / part_name(0)), None, "the first part", "no such file", _INCOMPLETE)
    return files


def _read_part(path: Path, options: Mapping[str, Any]) -> dict[Any, Any]:
    try:
        _check_records(path)
        part = torch.load(path, **{**options, "weights_only": True})
    except CheckpointError:
        raise
    except Exception as error:
        expected = "an undamaged file of torch.save, of plain data and tensors"
        unsafe = _calls_in(path) if isinstance(error, pickle.UnpicklingError) else []
        if unsafe:
            got = f"calls of {', '.join(unsafe)}, which were not made"
            remedy = "If you trust who wrote it, load it inside torch.serialization.safe_globals([those])."
            refuse_file(path, expected, got, error, remedy)
        refuse_file(path, expected, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", error)
    check_part(part, str(path))
    checked: dict[Any, Any] = part
    return checked


def refuse_file(
    path: Path,
    expected: str,
    got: str,
    cause: Exception,
    remedy: str = "Load another checkpoint, or copy this file again.",
) -> None:
    """Raise a CheckpointError about a file as a whole."""
    raise CheckpointError(str(path), expected=expected, got=got, remedy=remedy).at(path) from cause


def _check_records(path: Path) -> None:
    """Raise if the archive, or a record in it, is not as it was written."""
    damage = find_damage(path)
    if damage is not None:
        raise CheckpointError(
            f"{damage.record} in {path}" if damage.record else str(path),
            expected=damage.expected,
            got=damage.got,
            remedy="Load another checkpoint, or copy this file again.",
        ).at(path, damage.record, damage.offset)


def _calls_in(path: Path) -> list[str]:
    """Names of classes and functions that loading the file would call, except the ones that torch calls safe."""
    with contextlib.suppress(Exception):  # it reads the same file, which may be anything
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    return []


# --- Replacing ---------------------------------------------------------------------------------------------


def check_replaceable(target: Path) -> None:
    """Raise if the directory holds something that a new save would remove."""
    foreign = None
    if target.is_dir():
        foreign = next((name for name in sorted(os.listdir(target)) if not _PART.fullmatch(name)), None)
    elif target.exists():
        foreign = "a file of that name"
    if foreign is not None:
        raise UsageError(
            str(target),
            expected="a directory that holds nothing but PART files, or none yet",
            got=foreign,
            remedy="Save into a directory of its own; it is replaced as a whole.",
        )


# --- Is it a part? -----------------------------------------------------------------------------------------


def check_part(part: Any, file: str) -> None:
    """Raise CheckpointError unless it is built like a part. Entries that two parts share are compared later."""
    if not isinstance(part, dict):
        refuse_part(file, None, "a dict", brief(part))
    version = part.get(VERSION_KEY)
    if not isinstance(version, str) or version != VERSION:
        remedy = "Load it with the program that wrote it, and save it again."
        refuse_part(file, show((VERSION_KEY,)), f"version {VERSION!r}", repr(version)[:80], remedy)
    count = part.get(COUNT_KEY)
    if type(count) is not int or count < 1:
        refuse_part(file, show((COUNT_KEY,)), "the number of parts", repr(count)[:80])
    if not isinstance(part.get(ID_KEY), str | None):
        refuse_part(file, show((ID_KEY,)), "a str", brief(part[ID_KEY]))
    for kind, check in (("model", _check_model), ("optimizer", _check_optimizer)):
        several = part.get(kind)
        if not isinstance(several, list):
            refuse_part(file, show((kind,)), "a list", brief(several))
        for i, pair in enumerate(several):
            if not isinstance(pair, tuple) or len(pair) != 2 or not all(isinstance(x, dict) for x in pair):
                refuse_part(file, show((kind, i)), "a pair of dicts: whole entries, chunks", brief(pair))
            check(pair, (kind, i), file)


def _check_model(pair: tuple[Any, Any], path: Keys, file: str) -> None:
    whole, chunks = pair
    for name in (*whole, *chunks):
        if not isinstance(name, str):
            refuse_part(file, show((*path, name)), "a name that is a str", type(name).__name__)
    for name, chunk in chunks.items():
        _check_chunk(chunk, show((*path, name)), file)


def _check_optimizer(pair: tuple[Any, Any], path: Keys, file: str) -> None:
    whole, chunks = pair
    if not isinstance(whole.get("state"), dict):
        refuse_part(file, show((*path, "state")), "a dict", brief(whole.get("state")))
    groups = whole.get("param_groups")
    if not isinstance(groups, list) or not all(map(_is_group, groups)):
        refuse_part(file, show((*path, "param_groups")), 'a list of dicts with "params"', brief(groups))
    for key, chunk in chunks.items():
        if not isinstance(key, tuple) or len(key) != 2:
            refuse_part(file, show((*path, key)), "(param index, key)", repr(key)[:80])
        _check_chunk(chunk, show((*path, "state", *key)), file)


def _is_group(group: Any) -> bool:
    return isinstance(group, dict) and isinstance(group.get("params"), list)


def _check_chunk(chunk: Any, key: str, file: str) -> None:
    if not isinstance(chunk, tuple) or len(chunk) != 2 or not isinstance(chunk[0], tuple):
        refuse_part(file, key, "(torch.Size, chunk)", brief(chunk))
    size, values = chunk
    if not all(type(n) is int and n >= 0 for n in size):
        refuse_part(file, key, "a size of ints, 0 or more each", repr(tuple(size))[:80])
    plain = isinstance(values, Tensor) and not isinstance(values, DTensor) and values.layout == torch.strided
    if not plain or values.ndim != 1:
        refuse_part(file, key, "a chunk with one dim", brief(values))
