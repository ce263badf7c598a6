"""14 Checkpoints: save a sharded model and its optimizer; load both on any number of ranks; survive a crash at any moment.

The files in the folder are your own design. They may hold any number of saves; a load finds the last one that is complete. Someone may
move the folder between a save and a load.
"""

from __future__ import annotations

# @14
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterator

# @end
from pathlib import Path

# @14
from typing import Any

# @end
import torch

# @14
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from hwfsdp.layout import compute_local_shape_and_global_offset

# folder/CURRENT             the name of the save that counts, and the hash of its index
# folder/0002/index.json     every tensor's shape, dtype and parts: [file, first byte, number of bytes, checksum, offset, shape]
# folder/0002/0.bin …        the bytes that each rank wrote
DTYPES = {
    str(dtype): dtype for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)
}

# @00
# | from torch import nn
# @end


@torch.no_grad()
def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Save parameters, the optimizer's state, and the settings of its parameter groups. All ranks call it together.

    On return, a load finds this state, even after a power cut. A process may be killed at any moment, on one rank or on all, and the
    power may fail: then a load finds the whole state from before, or the whole new one. A save that died leaves nothing behind that
    keeps the next save from succeeding. Each row is written once, also if several ranks have it; rows do not travel between ranks.

    Raises:
        OSError: a write failed on some rank. It is raised on every rank, and a load still finds the state from before.
    """
    # @14
    tensors = dict(entries_of(model, optimizer))
    name = together(lambda: new_save(folder) if dist.get_rank() == 0 else "")[0]
    parts = together(lambda: write_parts(folder / name, tensors))
    index: dict[str, Any] = {
        key: {
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype),
            "parts": [p for by in parts for p in by[key]],
        }
        for key, tensor in tensors.items()
    }
    settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    text = json.dumps({"tensors": index, "settings": settings}).encode()
    together(lambda: commit(folder, name, text) if dist.get_rank() == 0 else None)
    # @00
    # |     raise NotImplementedError("TODO(14): save")
    # @end


@torch.no_grad()
def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Fill the model's shards and the optimizer from the last complete save, in place. All ranks call it together.

    Any number of ranks may have saved. The model has the same parameter names, its modules may stand in another order. The optimizer
    has the same parameter groups, and may be new: then it has no state yet. A rank reads what it keeps, and not much more.

    Raises:
        Exception: there is no save; or a file is missing, too short, or damaged. Nothing wrong is ever loaded without an error.
    """
    # @14
    name, digest = (folder / "CURRENT").read_text().split()
    text = (folder / name / "index.json").read_bytes()
    if hashlib.sha256(text).hexdigest() != digest:
        raise ValueError(f"{folder / name}: the index is damaged")
    saved = json.loads(text)
    for param_name, param in model.named_parameters():
        kept = [key for key in saved["tensors"] if key.startswith(f"{param_name}/")]
        optimizer.state[param] = {
            key.partition("/")[2]: empty_like(saved["tensors"][key], param) for key in kept
        }
    for key, tensor in entries_of(model, optimizer):
        fill(tensor, saved["tensors"][key]["parts"], folder / name)
    for group, settings in zip(optimizer.param_groups, saved["settings"], strict=True):
        group.update(settings)
    # @00
    # |     raise NotImplementedError("TODO(14): load")
    # @end


# @14
def entries_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor with a name: parameters, and what the optimizer keeps for each."""
    for name, param in model.named_parameters():
        yield name, param
        for key, value in optimizer.state.get(param, {}).items():
            yield f"{name}/{key}", value


def together(work: Callable[[], Any]) -> list[Any]:
    """Do this rank's work; return the results of all ranks. If the work of one fails, every rank raises its error."""
    try:
        result, failure = work(), None
    except Exception as error:
        result, failure = None, error
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (result, failure and OSError(f"rank {dist.get_rank()}: {failure}")))
    for _, error in found:
        if error is not None:
            raise error
    return [result for result, _ in found]


def part_of(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return this rank's part of a tensor, and the index of its first element in the whole."""
    if not isinstance(tensor, DTensor):
        return tensor, (0,) * tensor.ndim
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), tuple(offset)


def is_writer(tensor: Tensor) -> bool:
    """True if no earlier rank has the same part."""
    if not isinstance(tensor, DTensor):
        return dist.get_rank() == 0
    place = tensor.device_mesh.get_coordinate() or ()
    return not any(at for at, placement in zip(place, tensor.placements) if isinstance(placement, Replicate))


def write_parts(save_folder: Path, tensors: dict[str, Tensor]) -> dict[str, list[Any]]:
    """Write this rank's parts to a file, and say where they are."""
    found: dict[str, list[Any]] = {}
    name = f"{dist.get_rank()}.bin"
    with open(save_folder / name, "xb") as file:
        for key, tensor in tensors.items():
            part, offset = part_of(tensor)
            found[key] = []
            if part.numel() and is_writer(tensor):
                data = part.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                found[key] = [[name, file.tell(), len(data), zlib.crc32(data), offset, list(part.shape)]]
                file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return found


def empty_like(entry: dict[str, Any], param: Tensor) -> Tensor:
    """Return a tensor for a saved state: sharded like its parameter, if it has the same shape."""
    same, dtype = entry["shape"] == list(param.shape), DTYPES[entry["dtype"]]
    return torch.zeros_like(param, dtype=dtype) if same else torch.zeros(entry["shape"], dtype=dtype)


def fill(tensor: Tensor, parts: list[Any], save_folder: Path) -> None:
    """Copy what this rank keeps of a tensor from the saved parts, which count from the whole tensor's first element."""
    own, start = part_of(tensor)
    missing = own.numel()
    for name, at, nbytes, checksum, offset, shape in parts:
        first = [max(pair) for pair in zip(start, offset)]
        last = [min(a + n, b + m) for a, n, b, m in zip(start, own.shape, offset, shape)]
        if missing == 0 or any(a >= b for a, b in zip(first, last)):
            continue
        with open(save_folder / name, "rb") as file:
            file.seek(at)
            data = bytearray(file.read(nbytes))
        if len(data) != nbytes or zlib.crc32(data) != checksum:
            raise ValueError(f"{save_folder / name} is damaged")
        part = torch.frombuffer(data, dtype=tensor.dtype).view(shape)
        source = part[tuple(slice(a - o, b - o) for a, b, o in zip(first, last, offset))]
        own[tuple(slice(a - o, b - o) for a, b, o in zip(first, last, start))].copy_(source)
        missing -= source.numel()
    if missing:
        raise ValueError(f"{save_folder}: {missing} elements are in no part")


def new_save(folder: Path) -> str:
    """Make a folder beside all earlier ones."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{1 + max((int(path.name) for path in folder.iterdir() if path.name.isdecimal()), default=0):04}"
    (folder / name).mkdir()
    return name


def commit(folder: Path, name: str, index: bytes) -> None:
    """Bring everything that CURRENT will name to the disk, then replace CURRENT."""
    write_synced(folder / name / "index.json", index)
    sync(folder / name)
    write_synced(folder / "CURRENT.new", f"{name} {hashlib.sha256(index).hexdigest()}".encode())
    sync(folder)
    before = (folder / "CURRENT").read_bytes() if (folder / "CURRENT").exists() else None
    os.replace(folder / "CURRENT.new", folder / "CURRENT")
    try:
        sync(folder)
    except OSError:
        if before is None:
            (folder / "CURRENT").unlink()
        else:
            (folder / "CURRENT").write_bytes(before)
        raise


def write_synced(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


# @end
