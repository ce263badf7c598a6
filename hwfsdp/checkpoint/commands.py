"""The commands of `hwfsdp checkpoint`: inspect, verify, convert. Each function returns the exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hwfsdp.checkpoint.convert import convert
from hwfsdp.checkpoint.messages import show
from hwfsdp.checkpoint.store import Inspection, inspect, verify


def show_inspection(path: Path, as_json: bool) -> int:
    """Print the contents of a checkpoint, and the list of its saves."""
    found = inspect(path)
    if as_json:
        print(json.dumps(_as_json(found), indent=2))
        return 0
    print(found)
    for key, entry in found.tensors.items():
        chunks = f"{len(entry.chunks)} chunk{'s' if len(entry.chunks) != 1 else ''}"
        note = f"the same tensor as {_short(show(entry.same_as))}" if entry.same_as else chunks
        dtype = str(entry.dtype).removeprefix("torch.")
        print(f"  {_short(key):<48} {dtype:<10} {str(list(entry.shape)):<20} {note}")
    for key, value in found.values.items():
        print(f"  {_short(key):<48} {str(value)[:60]}")
    print(f"saves, oldest first: {', '.join(found.saves)}")
    _mention(found)
    return 0


def _mention(found: Inspection) -> None:
    if found.unlisted:
        print(f"files that are not part of the save: {', '.join(found.unlisted)}")


def _as_json(found: Inspection) -> dict[str, Any]:
    return {
        "save": found.save_id,
        "saves": list(found.saves),
        "ranks": found.ranks,
        "bytes": found.nbytes,
        "unlisted": list(found.unlisted),
        "tensors": {
            _short(key): {
                "dtype": str(entry.dtype).removeprefix("torch."),
                "shape": list(entry.shape),
                "chunks": len(entry.chunks),
            }
            for key, entry in found.tensors.items()
        },
        "values": {_short(key): str(value) for key, value in found.values.items()},
    }


def _short(key: str) -> str:
    return key.removeprefix("state_dict")


def verify_all(path: Path, as_json: bool) -> int:
    """Read every byte of a checkpoint. Raise an error if something is wrong."""
    found = verify(path)
    if as_json:
        print(json.dumps({"intact": True, "save": found.save_id, "bytes": found.nbytes}))
    else:
        print(f"{found}: intact")
        _mention(found)
    return 0


def convert_to(source: Path, target: Path, to: str, overwrite: bool, key: str | None, as_json: bool) -> int:
    """Write a checkpoint in another format."""
    found = convert(source, target, to=to, overwrite=overwrite, key=key)
    if as_json:
        print(json.dumps({"from": found.source_format, "tensors": found.tensors, "bytes": found.nbytes}))
    else:
        print(f"{source} ({found.source_format}) → {target} ({to}): ", end="")
        print(f"{found.tensors} tensors of {found.nbytes:,} bytes")
    return 0
