"""Checks of `torch.save`'s zip files, and directories of such files that are replaced as a whole.

torch writes checksums, but its reader does not compare them. Its reader also differs from other zip readers: one flipped bit in
the central directory can make a record look like a folder. Then torch reads nothing, and the tensor keeps whatever its memory
held. So this module compares the checksums. It also requires records as torch writes them: not compressed, not encrypted,
without attributes.

A checkpoint of such files is a directory. A save writes a new directory under another name, and then puts it in the place of
the old one. So a directory with the checkpoint's name is always complete. On Linux, the two directories exchange their names in
one step. On other systems, there is a moment without any directory of this name. A killed save leaves a directory behind; the
next save removes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import pickle
import re
import secrets
import shutil
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from hwfsdp.checkpoint.agreement import Agreement
from hwfsdp.checkpoint.blocks import sync_directory
from hwfsdp.checkpoint.messages import KeyPath, damaged, refuse, told
from hwfsdp.checkpoint.traverse import items_of, map_leaves

_FLAGS = 0x0808  # sizes follow the data; names are UTF-8


def check_archive(
    file: Path | IO[bytes], path: Path, key: str | None = None, offset: int | None = None
) -> None:
    """Read every record and compare it with its checksum.

    Args:
        path, key: the file and the entry that an error names. Without a key, the error names the record.
        offset: the byte at which the archive begins in the file at `path`. None: the archive is the whole file.

    Raises:
        CheckpointError: a record differs from what torch.save wrote, or the file is not a zip archive.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            for record in archive.infolist():
                plain = record.external_attr == 0 and record.compress_type == zipfile.ZIP_STORED
                if not plain or record.flag_bits & ~_FLAGS:
                    expected, got = "a record as torch.save writes it", "one with other attributes"
                    break
            else:
                name = archive.testzip()
                if name is None:
                    return
                record, expected = archive.getinfo(name), "the bytes that were written"
                got = "others, by their CRC-32"
    except (OSError, zipfile.BadZipFile, EOFError, RuntimeError, ValueError, zlib.error) as error:
        raise damaged(path, "an undamaged zip file of torch.save", told(error), offset, key) from error
    got, at = f"{got}, in {record.filename}", (offset or 0) + record.header_offset
    raise damaged(path, expected, got, at, key or record.filename)


def load_archive(
    file: Path | IO[bytes],
    path: Path,
    options: Mapping[str, Any],
    key: str | None = None,
    offset: int | None = None,
    check: bool = True,
) -> Any:
    """Load an archive with `torch.load(weights_only=True)`, which runs no code from the archive.

    Args:
        options: for torch.load. path, key, offset: as for `check_archive`. check: call `check_archive` first.

    Raises:
        CheckpointError: the archive is damaged, or contains something that weights_only=True does not allow. No code of it has run.
    """
    if check:
        check_archive(file, path, key, offset)
    try:
        if not isinstance(file, Path):
            file.seek(0)
        return torch.load(file, **{**options, "weights_only": True})
    except Exception as error:
        expected, got = "what torch.load(weights_only=True) allows", told(error)[:300]
        unsafe = _calls_in(file) if isinstance(error, pickle.UnpicklingError) else []
        if not unsafe:
            raise damaged(path, expected, got, offset, key) from error
        got = f"calls of {', '.join(unsafe)}, which were not made"
        remedy = "If you trust who wrote it, load it inside torch.serialization.safe_globals([those])."
        raise damaged(path, expected, got, offset, key, remedy) from error


def _calls_in(file: Path | IO[bytes]) -> list[str]:
    """Return the names of the classes and functions that loading the file would call. Leave out names that torch considers safe."""
    with contextlib.suppress(Exception):  # the file may be damaged in any way
        if not isinstance(file, Path):
            file.seek(0)
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    return []


def check_loadable(path: KeyPath, tree: Any) -> None:
    """Raise an error if torch.load with weights_only=True would not accept the tree. Tensors are taken out before the test."""
    error = _loading_error(map_leaves(lambda _, leaf, __: None if isinstance(leaf, Tensor) else leaf, tree))
    if error is None:
        return
    for key, child in (items_of(tree) or {}).items():
        check_loadable((*path, key), child)
    expected = "what torch.load takes with weights_only=True: tensors, numbers, str, and the plain containers"
    remedy = "Convert it, for example with its state_dict(), or both save and load it inside "
    remedy += "torch.serialization.safe_globals([its class])."
    refuse(path, expected, f"{type(tree).__name__} ({' '.join(str(error).split())[:200]})", remedy)


def _loading_error(tree: Any) -> Exception | None:
    """Save `tree` and load it with weights_only=True, in memory. Return the error; None if it can be loaded."""
    file = io.BytesIO()
    try:
        torch.save(tree, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception as error:
        return error
    return None


# --- Directories -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def replaced(
    target: Path, agreement: Agreement, check: Callable[[], None], complete: Callable[[Path], None]
) -> Iterator[tuple[Path, str]]:
    """Provide a new directory beside `target`, and the id of the save. When all ranks have written there, the directory is renamed.

    It then has the name `target`. If a rank raises an error, `target` stays as it was, and the new directory is removed.

    Args:
        check: called on the first rank before the directory is made; raises if `target` must not be replaced.
        complete: called on the first rank with the new directory, just before it gets its name.
    """

    def begin(_: list[Any]) -> list[str]:
        save_id = secrets.token_hex(16)
        check()
        name_beside(target, save_id).mkdir(parents=True)
        return [save_id] * agreement.size

    def publish(_: list[Any]) -> None:
        complete(draft)
        put_in_place(draft, target)

    save_id = agreement.step("beginning", lambda: None, begin)
    draft = name_beside(target, save_id)
    try:
        yield draft, save_id
        agreement.step("publishing", lambda: None, publish)
    finally:
        if agreement.rank == 0:
            shutil.rmtree(draft, ignore_errors=True)


def name_beside(target: Path, save_id: str) -> Path:
    """Return the path of the directory that a save writes before it renames it to `target`; `save_id` has 32 hexadecimal digits."""
    return target.with_name(f".{target.name}.{save_id}.saving")


def left_beside(target: Path) -> list[str]:
    """Return the names of the directories that killed saves left beside `target`."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{32}}\.(saving|previous)")
    there = os.listdir(target.parent) if target.parent.is_dir() else []
    return [name for name in there if pattern.fullmatch(name)]


def put_in_place(new: Path, target: Path) -> None:
    """Rename a complete directory to `target`, and remove the old `target`."""
    sync_directory(new)
    _rename(new, target, aside=new.with_suffix(".previous"))
    with contextlib.suppress(OSError):  # the directory has its name even if this fails
        sync_directory(target.parent)
    for name in left_beside(target):
        shutil.rmtree(target.parent / name, ignore_errors=True)


def _rename(new: Path, target: Path, aside: Path) -> None:
    """Rename `new` to `target`. The old `target` is then called `new` or `aside`."""
    if not target.exists():
        os.rename(new, target)
        return
    if _exchange(new, target):
        return
    os.rename(target, aside)
    try:
        os.rename(new, target)
    except OSError:
        os.rename(aside, target)
        raise


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step. Return False, without any change, if the system cannot do this."""
    at_cwd, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE of Linux
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    return bool(rename and rename(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), swap) == 0)
