"""Pack data on ranks that run a student's file, and unpack it in the process that judges.

A pickle can run any code in the process that reads it. This format can hold only data: a tree of dicts with text keys, lists, numbers,
text, None, tensors and dtypes. The tree is JSON, followed by the bytes of the tensors.

    8 bytes    length of the JSON, little-endian
    JSON       tuples come back as lists; tensors are {"$tensor": [dtype, shape, offset]}
    bytes      the bytes of the tensors, one after the other
"""

from __future__ import annotations

import json
from math import prod
from typing import Any

import torch
from torch import Tensor

_HEADER = 8
_PLAIN = {type(None), bool, int, str}  # JSON has them. Most values are of these types, so they take no call
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.q", "torch.bits"))
}


def pack(tree: Any) -> bytes:
    """Return the bytes of a tree. Raise TypeError if it holds a value of another type."""
    data = bytearray()  # of the tensors
    text = json.dumps(_flatten(tree, data)).encode()
    return b"".join([len(text).to_bytes(_HEADER, "little"), text, data])


def unpack(data: bytes) -> Any:
    """Return the tree that `pack` packed. Raise ValueError if the bytes do not come from there."""
    try:
        end = _HEADER + int.from_bytes(data[:_HEADER], "little")
        return _restore(json.loads(data[_HEADER:end]), memoryview(data)[end:])
    except (LookupError, TypeError, ArithmeticError, RuntimeError) as error:
        raise ValueError(f"not the data of a rank: {error!r}") from error


def _flatten(value: Any, data: bytearray) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, float):
        return {"$float": value.hex()}  # infinities and NaN, too, bit for bit
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, Tensor):
        return {"$tensor": _flatten_tensor(value, data)}
    if isinstance(value, (list, tuple)):
        return [item if type(item) in _PLAIN else _flatten(item, data) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) and key[:1] != "$" for key in value):
        return {key: _flatten(item, data) for key, item in value.items()}
    if isinstance(value, (int, str)):  # of a class of its own, such as an enum
        return value
    raise TypeError(
        f"a fact must be numbers, text, lists, dicts with text keys, tensors or dtypes, got {type(value).__name__}"
    )


def _flatten_tensor(tensor: Tensor, data: bytearray) -> list[Any]:
    whole, offset = tensor.detach().cpu().contiguous(), len(data)
    if whole.numel():
        data += whole.view(-1).view(torch.uint8).numpy().tobytes()
    return [str(whole.dtype).removeprefix("torch."), list(whole.shape), offset]


def _restore(value: Any, data: memoryview) -> Any:
    if isinstance(value, list):
        return [item if type(item) in _PLAIN else _restore(item, data) for item in value]
    if not isinstance(value, dict):
        return value
    if "$float" in value:
        return float.fromhex(value["$float"])
    if "$dtype" in value:
        return _DTYPES[value["$dtype"]]
    if "$tensor" in value:
        name, shape, offset = value["$tensor"]
        return _restore_tensor(_DTYPES[name], shape, data[offset:])
    return {key: _restore(item, data) for key, item in value.items()}


def _restore_tensor(dtype: torch.dtype, shape: list[int], data: memoryview) -> Tensor:
    count = prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data[: count * dtype.itemsize]), dtype=dtype, count=count).view(shape)
