"""Damage to every file of a checkpoint: flipped bits, and files that were cut short or have grown.

After any damage, a load gives exactly the saved values, or it raises an error that names the place and leaves the target unchanged.
`verify` finds every damage, also in padding. Three ranks save once; the rest only handles files. An error of one rank is raised by all, with
its file, key and offset: test_agreement.py checks this.
"""

from __future__ import annotations

import functools
import io
import os
import random
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import CURRENT, MANIFEST, Damage, chunks_in, error_of, exactly, folder_of
from samples import FORMATS, line
from torch.distributed.tensor import Shard, distribute_tensor

from hwfsdp import launch
from hwfsdp.checkpoint import parts, save
from hwfsdp.checkpoint.commit import check_archive
from hwfsdp.errors import CheckpointError, FSDPError, UsageError

BLOCK = 1 << 20
HEADER = 64


def state_dict_of() -> dict[str, Any]:
    """Return whole tensors. Their chunks have one byte to four blocks."""
    draw = torch.Generator().manual_seed(0)
    model = {
        "rows": torch.randn(10, 3, generator=draw),
        "columns": torch.randn(3, 7, generator=draw, dtype=torch.float64),
        "many blocks": torch.randint(1, 255, (1, 3 * BLOCK + 100), generator=draw, dtype=torch.uint8),
        "bias": torch.randn(5, generator=draw).bfloat16(),
        "flag": torch.tensor([True, False, True]),
        "scalar": torch.tensor(-3),
        "none": torch.empty(0, 4),
    }
    return {"model": model, "optim": {0: {"lr": 0.1, "betas": (0.9, 0.999)}, "steps": [1, 2]}}


def save_it(path: Path) -> None:
    state_dict = state_dict_of()
    model = state_dict["model"]
    for name, dim in (("rows", 0), ("columns", 1), ("many blocks", 0)):
        model[name] = distribute_tensor(model[name], line(), [Shard(dim)])
    save(state_dict, path)


@functools.cache
def saved_in(base: Path) -> Path:
    path = base / "checkpoint"
    launch(save_it, 3, path, timeout=60)
    return path


@pytest.fixture
def path(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Path:
    """Make a checkpoint of three ranks to damage."""
    shutil.copytree(saved_in(tmp_path_factory.getbasetemp()), tmp_path / "copy")
    return tmp_path / "copy"


def all_files(path: Path) -> list[Path]:
    folder = folder_of(path)
    return [path / CURRENT, folder / MANIFEST, *sorted(folder.glob("*.bin"))]


def edges_of(file: Path) -> set[int]:
    """Return the special bytes of a data file: header, padding, the ends of chunks and of blocks."""
    edges, end = set(range(HEADER)), HEADER
    for _, start, stop in chunks_in(file.parent, file.name):
        edges |= set(range(end, start))
        for block in range(start, stop, BLOCK):
            edges |= {block, min(block + BLOCK, stop) - 1}
        end = stop
    return edges | set(range(end, file.stat().st_size))


def flips_of(path: Path) -> Iterator[tuple[Path, int, int]]:
    """Yield (file, byte, bit)."""
    draw = random.Random(0)
    for file in all_files(path):
        size = file.stat().st_size
        if file.suffix == ".bin":
            places = edges_of(file) | {draw.randrange(size) for _ in range(40)}
        else:
            places = {0, 1, size - 2, size - 1} | {draw.randrange(size) for _ in range(80)}
        for byte in sorted(places):
            yield file, byte, 1 << draw.randrange(8)


def flip(file: Path, byte: int, mask: int) -> None:
    with open(file, "r+b") as opened:
        opened.seek(byte)
        value = opened.read(1)[0]
        opened.seek(byte)
        opened.write(bytes([value ^ mask]))


def test_a_flipped_bit_anywhere_is_found_or_harmless_and_its_place_is_named(path: Path) -> None:
    damage, folder = Damage(path, state_dict_of()), folder_of(path)
    flips = list(flips_of(path))
    chunks = {file.name: chunks_in(folder, file.name) for file in all_files(path)[2:]}
    assert len(flips) >= 400
    assert any(stop - start > 3 * BLOCK for of_file in chunks.values() for _, start, stop in of_file)
    for file, byte, mask in flips[::3]:
        flip(file, byte, mask)
        loaded, verified = damage.load(), damage.verify()
        flip(file, byte, mask)
        where = f"{file.name}, byte {byte}: load {loaded!r}, verify {verified!r}"
        assert isinstance(verified, CheckpointError | UsageError), where
        inside = [chunk for chunk in chunks.get(file.name, ()) if chunk[1] <= byte < chunk[2]]
        if inside:
            key, start, stop = inside[0]
            for error in (loaded, verified):
                assert isinstance(error, CheckpointError), where
                assert (error.file, error.key) == (str(file), key), where
                assert error.offset == start + (byte - start) // BLOCK * BLOCK, where
                assert file.name in str(error) and key in str(error) and str(error.offset) in str(error)
        elif file.suffix == ".bin" and byte >= HEADER:
            assert loaded is None and isinstance(verified, CheckpointError), where
            assert (verified.file, verified.offset) == (str(file), byte), where
        else:
            assert isinstance(loaded, CheckpointError) and loaded.file is not None, where
            assert file.name in str(loaded) or file.name == CURRENT, where
    assert damage.load() is None and damage.verify() is None


def test_a_file_that_was_cut_short_or_has_grown_is_found(path: Path) -> None:
    damage = Damage(path, state_dict_of())
    for file in all_files(path):
        good = file.read_bytes()
        ends = {stop for _, _, stop in chunks_in(file.parent, file.name)} if file.suffix == ".bin" else set()
        sizes = {0, HEADER, len(good) // 2, len(good) - 1, *ends}
        for data in (*(good[:n] for n in sizes if n < len(good)), good + b"\0", good + b"\n", good + good):
            file.write_bytes(data)
            for error in (damage.load(), damage.verify()):
                assert isinstance(error, CheckpointError | UsageError), f"{file.name}, {len(data)} bytes"
                assert file.name in str(error) or file.name == CURRENT, error
                assert isinstance(error, UsageError) or error.file == str(file), error
        file.write_bytes(good)
    assert damage.verify() is None


@pytest.mark.parametrize(
    "name, file", [("dcp", ".metadata"), ("dcp", "__0_0.distcp"), ("part", "PART_000.pt")]
)
def test_a_file_without_an_end_is_refused(name: str, file: str, tmp_path: Path) -> None:
    for put in (os.mkfifo, lambda path: os.symlink("/dev/zero", path)):
        FORMATS[name].save({"a": torch.ones(3)}, tmp_path / "c")
        (tmp_path / "c" / file).unlink()
        put(tmp_path / "c" / file)
        with pytest.raises(CheckpointError, match="expected a regular file"):
            FORMATS[name].load({"a": torch.zeros(3)}, tmp_path / "c")
        shutil.rmtree(tmp_path / "c")


def test_a_part_that_asks_for_very_many_parts_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "c" / "PART_000.pt"
    parts.save(tmp_path / "c", {"a": torch.ones(3)})
    torch.save({**torch.load(file), "__nshards__": 10**30}, file)
    with pytest.raises(CheckpointError, match="PART_001.pt: expected 1000000000"):
        parts.load(tmp_path / "c")


# --- Files of torch.save -------------------------------------------------------------------------------------


def archive() -> bytes:
    file = io.BytesIO()
    torch.save({"a": torch.arange(1.0, 9.0), "b": [1, "x"]}, file)
    return file.getvalue()


def loads_as_saved(data: bytes) -> bool:
    """Return True if torch loads the right values, or refuses the file: a refused file misleads nobody."""
    try:
        found = torch.load(io.BytesIO(data), weights_only=True)
    except Exception:
        return True
    return exactly(found) == exactly({"a": torch.arange(1.0, 9.0), "b": [1, "x"]})


def damage_in(data: bytes) -> FSDPError | None:
    return error_of(lambda: check_archive(io.BytesIO(data), Path("x")))


def test_no_flipped_bit_is_both_unnoticed_and_loaded_as_something_else() -> None:
    data = archive()
    assert damage_in(data) is None
    directory = data.index(b"PK\x01\x02")
    bits = [*range(8 * directory, 8 * len(data)), *random.Random(0).sample(range(8 * directory), 1500)]
    unnoticed = 0
    for bit in bits:
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        if damage_in(bytes(damaged)) is None:
            unnoticed += 1
            assert loads_as_saved(bytes(damaged)), f"bit {bit} of {8 * len(data)}"
    assert 0 < unnoticed < len(bits)  # what lies between the records, for example


def test_a_record_with_other_attributes_is_found_by_name() -> None:
    for folder, method in ((0x10, zipfile.ZIP_STORED), (0, zipfile.ZIP_DEFLATED)):
        changed = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(archive())) as old, zipfile.ZipFile(changed, "w") as new:
            for record in old.infolist():
                copy = zipfile.ZipInfo(record.filename)
                copy.external_attr, copy.compress_type = folder, method
                new.writestr(copy, old.read(record))
        damage = damage_in(changed.getvalue())
        assert isinstance(damage, CheckpointError) and damage.key == "archive/data.pkl"
