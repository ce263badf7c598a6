"""Flip any bit in a file of `torch.save`: either it is found, or torch still loads the saved values."""

from __future__ import annotations

import io
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from hwfsdp.checkpoint.commit import check_archive
from hwfsdp.errors import CheckpointError


def saved() -> bytes:
    file = io.BytesIO()
    torch.save({"a": torch.arange(1.0, 9.0), "b": [1, "x"]}, file)
    return file.getvalue()


def loads_as_saved(data: bytes) -> bool:
    """Return True if torch loads the right values, or refuses the file: a refused file misleads nobody."""
    try:
        found = torch.load(io.BytesIO(data), weights_only=True)
    except Exception:
        return True
    return torch.equal(found["a"], torch.arange(1.0, 9.0)) and found["b"] == [1, "x"]


def damage_in(file: Any) -> CheckpointError | None:
    try:
        check_archive(file, Path("x"))
    except CheckpointError as error:
        return error
    return None


def test_no_flipped_bit_is_both_unnoticed_and_loaded_as_something_else() -> None:
    data = saved()
    assert damage_in(io.BytesIO(data)) is None
    directory = data.index(b"PK\x01\x02")
    bits = [*range(8 * directory, 8 * len(data)), *random.Random(0).sample(range(8 * directory), 1500)]
    unnoticed = 0
    for bit in bits:
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        if damage_in(io.BytesIO(damaged)) is None:
            unnoticed += 1
            assert loads_as_saved(bytes(damaged)), f"bit {bit} of {8 * len(data)}"
    assert 0 < unnoticed < len(bits)  # what lies between the records, for example


@pytest.mark.parametrize("attribute", ["folder", "compressed"])
def test_a_record_with_other_attributes_is_found_by_name(attribute: str) -> None:
    changed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved())) as old, zipfile.ZipFile(changed, "w") as new:
        for record in old.infolist():
            copy = zipfile.ZipInfo(record.filename)
            copy.external_attr = 0x10 if attribute == "folder" else 0
            copy.compress_type = zipfile.ZIP_DEFLATED if attribute == "compressed" else zipfile.ZIP_STORED
            new.writestr(copy, old.read(record))
    damage = damage_in(changed)
    assert damage is not None and damage.key == "archive/data.pkl"
