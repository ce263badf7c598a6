"""A load on one rank, from a path to a state dict that is filled.

    [leader: which save] → match the state dict with the manifest → read into new memory → into the state dict

All ranks agree at each arrow (see `agreement`).

Note [Read first, then write]
    A damaged block may be the last one that is read. So values go to memory of their own, as much as the rank's part of
    the state dict, and from there into the target when all ranks have all of theirs. It is the price of a load that
    happens or does not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from hwfsdp.checkpoint import saves
from hwfsdp.checkpoint.agreement import Agreement
from hwfsdp.checkpoint.matching import Match, fill, match, read_tensors
from hwfsdp.checkpoint.traverse import Path as KeyPath


def load_agreed(agreement: Agreement, state_dict: Any, path: Path, *, strict: bool, allow_cast: bool) -> None:
    """`store.load`, in an agreement that was made before."""
    matched: list[Match] = []
    parts: dict[KeyPath, Tensor] = {}

    def choose(_: list[Any]) -> list[Any]:
        current = saves.find_current(path)
        manifest = saves.read_manifest(current)
        saves.check_files(current.folder, manifest)
        return [[current.folder.name, manifest.digest]] * agreement.size

    save_id, digest = agreement.step("finding", lambda: None, choose)
    folder = path if path.name == save_id else path / save_id

    def match_mine() -> None:
        manifest = saves.read_manifest(saves.Current(folder, digest))
        matched.append(match(state_dict, manifest, strict=strict, allow_cast=allow_cast))

    def read_mine() -> None:
        parts.update(read_tensors(matched[0], folder, agreement.check))

    agreement.step("matching", match_mine)
    agreement.step("reading", read_mine)
    fill(state_dict, matched[0], parts)
