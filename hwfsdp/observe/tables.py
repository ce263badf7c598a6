"""Tables as text, and numbers in a form for people."""

from __future__ import annotations

from collections.abc import Sequence

from hwfsdp.observe.validate import printable


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
