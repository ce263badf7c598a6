"""Tables as text, and numbers in a form for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hwfsdp.errors import printable


def lay_out(rows: Sequence[Sequence[str]], left: int = 1, indent: str = "  ") -> list[str]:
    """Return lines with aligned columns: the first `left` columns flush left, the others flush right.

    Cells are made printable, because names come from files.
    """
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:left], widths[:left], strict=True)]
        cells += [cell.rjust(width) for cell, width in zip(row[left:], widths[left:], strict=True)]
        lines.append((indent + "  ".join(cells)).rstrip())
    return lines


def ms(us: float) -> str:
    """Write microseconds as milliseconds: "12.3 ms", "0.045 ms", "0"."""
    value = us / 1e3
    if value == 0:
        return "0"
    return f"{value:,.1f} ms" if abs(value) >= 1 else f"{value:.3f} ms"


def signed(number: float, text: str) -> str:
    """Return `text` with the sign of `number`, or "0" if the number is 0."""
    return "0" if number == 0 else f"{'+' if number > 0 else '−'}{text.lstrip('-−')}"


def number_of(count: int, what: str) -> str:
    """Write a count with its noun: "1 rank", "2 ranks"."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


class ByteUnit(NamedTuple):
    """A unit of bytes: its name and how many bytes it has."""

    name: str
    nbytes: int


_BYTE_UNITS = tuple(ByteUnit(name, 1024**i) for i, name in enumerate(("B", "KiB", "MiB", "GiB", "TiB")))


def byte_unit(nbytes: float) -> ByteUnit:
    """Return the largest unit that is not larger than `nbytes`. Below one byte, return bytes."""
    return max((u for u in _BYTE_UNITS if u.nbytes <= nbytes), key=lambda u: u.nbytes, default=_BYTE_UNITS[0])


def format_bytes(nbytes: int, like: int | None = None) -> str:
    """Format bytes for a reader: "512 B", "1.50 KiB", "20.0 MiB", "300 GiB". Bytes are exact; other units have three digits.

    Args:
        like: use the unit of this number of bytes, for example of the sum that `nbytes` is a part of.
    """
    unit = byte_unit(nbytes if like is None else like)
    if unit.nbytes == 1:
        return f"{nbytes:,} B"
    return f"{three_digits(nbytes / unit.nbytes)} {unit.name}"


def three_digits(value: float) -> str:
    """Format with three digits: "1.50", "20.0", "300"."""
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{decimals}f}"
