"""Checks of values read from a file, before code computes with them.

Numbers in JSON have no limits, and somebody may have changed the file. So a reader checks the type and the limits of each value.
A wrong value raises a ValueError that names the field and shows the value, shortened and printable.

Left out: files that are not JSON, and missing entries. Python's own errors are clear enough.
"""

from __future__ import annotations

import functools
from math import isfinite
from typing import Any, get_args, get_origin, get_type_hints

MOST = 2**63 - 1  # limit of counts and bytes: other programs keep them in 64 bits
MOST_RANKS = 2**24  # no machine has so many
MOST_US = 2.0**53  # µs, 285 years: up to this limit, floats can tell two whole µs apart
LIMITS: dict[str, tuple[int, ...]] = {  # least and most by name of a field; other integers are counts
    "rank": (0, MOST_RANKS - 1),
    **dict.fromkeys(("world_size", "shards", "replicas"), (1, MOST_RANKS)),
    "gathered_again_from": (0, MOST_RANKS),
    # bytes; complex128, the largest, has 16
    **dict.fromkeys(("gather_itemsize", "reduce_itemsize"), (1, 64)),
    "after": (-MOST, MOST),
    "dur_us": (0,),
}
_SHOWN = 40  # characters of a value in a message


def whole(name: str, value: Any, least: int = 0, most: int = MOST) -> int:
    """Check for an integer in least … most, and return it. A bool is not an integer. Raises ValueError for anything else."""
    if type(value) is not int or not least <= value <= most:
        bounds = f"{least} or more" if most == MOST else f"{least} to {most}"
        raise ValueError(f"{name} is {shown(value)}, not a whole number, {bounds}")
    return value


def time_us(name: str, value: Any, least: float = -MOST_US) -> float:
    """Check for a finite number in least … `MOST_US`, and return it. Raises ValueError for anything else."""
    if type(value) not in (int, float) or not (least <= value <= MOST_US and isfinite(value)):
        raise ValueError(f"{name} is {shown(value)}, not a number of µs{', 0 or more' if least == 0 else ''}")
    return value  # type: ignore[no-any-return]


def text(name: str, value: Any) -> str:
    """Check for a string, and return it. Make it `printable` before you show it. Raises ValueError for anything else."""
    if type(value) is not str:
        raise ValueError(f"{name} is {shown(value)}, not a text")
    return value


def many(name: str, value: Any) -> list[Any]:
    """Check for a list or a tuple, and return a list. Raises ValueError for anything else."""
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{name} is {shown(value)}, not a list")
    return list(value)


def fields_of(kind: type, where: str, value: Any) -> dict[str, Any]:
    """Check the fields of an object by the types of a dataclass and by `LIMITS`, and return them. A list becomes a tuple.

    Raises KeyError if a field is missing, and ValueError if a value is of another type or outside of its limits.
    """
    found, front = named(where, value), f"{where}." if where else ""
    return {name: _field(hint, name, front + name, found[name]) for name, hint in _types_of(kind).items()}


@functools.cache
def _types_of(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _field(hint: Any, field: str, name: str, value: Any) -> Any:
    if hint is int:
        return whole(name, value, *LIMITS.get(field, (0, MOST)))
    if hint is float:
        return time_us(name, value, *LIMITS.get(field, ()))
    if hint is str:
        return text(name, value)
    if get_origin(hint) is tuple:
        inner, _ = get_args(hint)
        return tuple(_field(inner, field, f"{name}[{i}]", part) for i, part in enumerate(many(name, value)))
    if hint is bool:
        if type(value) is not bool:
            raise ValueError(f"{name} is {shown(value)}, neither true nor false")
        return value
    return hint(**fields_of(hint, name, value))


def named(name: str, value: Any) -> dict[str, Any]:
    """Check for a dict (JSON calls it an object), and return it. Raises ValueError for anything else."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {shown(value)}, not an object")
    return value


def shown(value: Any) -> str:
    """Return a value for a message: its `ascii` text, cut short."""
    if type(value) is int and value.bit_length() > 128:  # Python refuses to write very long integers
        return f"a number of {value.bit_length()} bits"
    said = ascii(value)
    return said if len(said) <= _SHOWN else f"{said[: _SHOWN - 1]}…"
