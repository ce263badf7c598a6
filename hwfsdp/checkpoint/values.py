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

import numpy as np
import torch


def _name(constant: Any) -> str:
    return str(constant).removeprefix("torch.")


def _constant(kind: type) -> Callable[[Any], Any]:
    """Return a reader for constants of torch of this type, such as torch.float32."""

    def read(name: Any) -> Any:
        found = getattr(torch, name, None) if isinstance(name, str) else None
        if not isinstance(found, kind):
            raise ValueError(f"no {kind.__name__} of torch: {name!r}")
        return found

    return read


def _base64(value: Any) -> str:
    return base64.b64encode(value).decode()


def _bytes(text: Any) -> bytes:
    return base64.b64decode(text, validate=True)


def _complex(real: str, imag: str) -> complex:
    return complex(float.fromhex(real), float.fromhex(imag))


# By type, a function that returns the JSON of a value, and the reverse function.
_FORMS: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    float: (lambda value: str(float(value)), float),  # infinite, or not a number
    bytes: (_base64, _bytes),
    bytearray: (_base64, lambda text: bytearray(_bytes(text))),
    complex: (lambda value: [value.real.hex(), value.imag.hex()], lambda parts: _complex(*parts)),
    torch.Size: (list, torch.Size),
    torch.dtype: (_name, _constant(torch.dtype)),
    torch.device: (str, torch.device),
    torch.layout: (_name, _constant(torch.layout)),
    torch.memory_format: (_name, _constant(torch.memory_format)),
}
_READERS = {kind.__name__: read for kind, (_, read) in _FORMS.items()}

dtype_named = _constant(torch.dtype)


def encode(value: Any) -> Any:
    """Return the value as JSON.

    Raises:
        TypeError: a checkpoint cannot hold values of this type.
    """
    if isinstance(value, enum.Enum):  # it may be an int or str, too, and would come back as a plain one
        raise TypeError(type(value).__name__)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    for kind, (write, _) in _FORMS.items():
        if isinstance(value, kind):
            return {"type": kind.__name__, "value": write(value)}
    raise TypeError(type(value).__name__)


def advice_for(value: Any) -> str:
    """Say what to save in place of a value that a checkpoint cannot hold."""
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return "Save torch.from_numpy(array), which shares the array's memory: a load fills the array, too."
    if isinstance(value, np.generic):
        return "Save value.item()."
    if isinstance(value, enum.Enum):
        return "Save its name, or its value."
    if isinstance(value, set | frozenset):
        return "Save a sorted list of it."
    if callable(getattr(value, "state_dict", None)):
        return "Save its state_dict()."
    return "Leave it out, or save what it can be made from again."


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
