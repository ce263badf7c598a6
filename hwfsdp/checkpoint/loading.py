"""A load on one rank, from a path to a state dict that is filled.

    [leader: which save] → match the state dict with the manifest → read into new memory → into the state dict

All ranks agree at each arrow (see `agreement`).

Note [Read first, then write]
    A damaged block may be the last one that is read. So values go to memory of their own, as much as the rank's part of
    the state dict, and from there into the target when all ranks have all of theirs. It is the price of a load that
    happens or does not. What is on the meta device has no values that could be lost: it gets memory, which is read into at
    once, and goes back to the meta device if the load fails.

Note [A save that goes while it is read]
    Another job may save into the same directory, and sweep what is being read. Then something is missing, and another
    save counts. So after an error about a file, the leader looks again: if the save that counts is another one, that one
    is loaded; if it is the same, the error stands.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from hwfsdp.checkpoint import saves
from hwfsdp.checkpoint.agreement import Agreement
from hwfsdp.checkpoint.matching import Match, fill, match, read_tensors
from hwfsdp.checkpoint.meta import NewMemory
from hwfsdp.checkpoint.traverse import Path as KeyPath
from hwfsdp.errors import CheckpointError


class Request(NamedTuple):
    """What is asked of a load; `memory` is for what of the state dict is on the meta device."""

    state_dict: Any
    memory: NewMemory
    strict: bool
    allow_cast: bool


def load_agreed(agreement: Agreement, request: Request, path: Path) -> None:
    """`store.load`, in an agreement that was made before."""
    try:
        _load_current(agreement, request, path)
    except BaseException:
        request.memory.take_back()
        raise


def _load_current(agreement: Agreement, request: Request, path: Path) -> None:
    save_id, digest = _find(agreement, path)
    while True:
        try:
            _load_save(agreement, request, path, save_id, digest)
            return
        except CheckpointError as error:
            if error.file is None:  # a rank is lost, say
                raise
            before, (save_id, digest) = save_id, _find(agreement, path)
            if save_id == before:
                raise


def _find(agreement: Agreement, path: Path) -> list[Any]:
    """The id of the save that counts, and the hash of its manifest, as the leader sees them."""

    def choose(_: list[Any]) -> list[Any]:
        current = saves.find_current(path)
        manifest = saves.read_manifest(current)
        saves.check_files(current.folder, manifest)
        return [[current.folder.name, manifest.digest]] * agreement.size

    found: list[Any] = agreement.step("finding", lambda: None, choose)
    return found


def _load_save(agreement: Agreement, request: Request, path: Path, save_id: str, digest: str) -> None:
    matched: list[Match] = []
    parts: dict[KeyPath, Tensor] = {}
    folder = path if path.name == save_id else path / save_id
    state_dict, memory, strict, allow_cast = request

    def match_mine() -> None:
        manifest = saves.read_manifest(saves.Current(folder, digest))
        memory.give()
        matched.append(match(state_dict, manifest, strict=strict, allow_cast=allow_cast))
        memory.check_loaded(manifest.entries)
        matched[0].fresh.update(memory.paths)

    def read_mine() -> None:
        parts.update(read_tensors(matched[0], folder, agreement.check))

    agreement.step("matching", match_mine)
    agreement.step("reading", read_mine)
    fill(state_dict, matched[0], parts)
