"""Values that are not tensors, as JSON and back.

A state dict has many small values: learning rates, counters, names, flags. Values of JSON's own types are written as they are.
Any other value becomes an object that names its type. Types outside the list below are refused, because a format that could
write them could also run code when it is read.
"""

from __future__ import annotations

import base64
import enum
import math
from collections.abc import Callable
from typing import Any

import torch

# By type, a function that returns the JSON of a value. _READERS has the reverse functions.
_WRITERS: dict[type, Callable[[Any], Any]] = {
    bytes: lambda value: base64.b64encode(value).decode(),
    bytearray: lambda value: base64.b64encode(value).decode(),
    complex: lambda value: [value.real.hex(), value.imag.hex()],
    torch.Size: list,
    torch.dtype: lambda value: str(value).removeprefix("torch."),
    torch.device: str,
    torch.layout: lambda value: str(value).removeprefix("torch."),
    torch.memory_format: lambda value: str(value).removeprefix("torch."),
}


def _constant(kind: type) -> Callable[[Any], Any]:
    """Return a reader for constants of torch of this type, such as torch.float32."""

    def read(name: Any) -> Any:
        found = getattr(torch, name, None) if isinstance(name, str) else None
        if not isinstance(found, kind):
            raise ValueError(f"no {kind.__name__} of torch: {name!r}")
        return found

    return read


def _complex(real: str, imag: str) -> complex:
    return complex(float.fromhex(real), float.fromhex(imag))


_READERS: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "bytearray": lambda text: bytearray(base64.b64decode(text, validate=True)),
    "complex": lambda parts: _complex(*parts),
    "Size": torch.Size,
    "dtype": _constant(torch.dtype),
    "device": torch.device,
    "layout": _constant(torch.layout),
    "memory_format": _constant(torch.memory_format),
}

dtype_named = _constant(torch.dtype)


def encode(value: Any) -> Any:
    """Return the value as JSON.

    Raises:
        TypeError: a checkpoint cannot hold values of this type.
    """
    if isinstance(value, enum.Enum):  # it may be an int or str, too, and would come back as a plain one
        raise TypeError(type(value).__name__)
    if value is None or isinstance(value, bool | str):
        return value if value is None or isinstance(value, bool) else str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"type": "float", "value": str(float(value))}
    for kind, write in _WRITERS.items():
        if isinstance(value, kind):
            return {"type": kind.__name__, "value": write(value)}
    raise TypeError(type(value).__name__)


def decode(json_value: Any) -> Any:
    """Return the value that `encode` wrote.

    Raises:
        ValueError: `encode` writes no such JSON.
    """
    if json_value is None or isinstance(json_value, bool | int | float | str):
        return json_value
    try:
        read = _READERS[json_value["type"]]
        return read(json_value["value"])
    except Exception as error:
        raise ValueError(f"no value that a checkpoint can hold: {str(json_value)[:80]}") from error
