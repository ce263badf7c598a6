"""Tables of records, for the terminal and for the documentation.

Records of one part with the same unit and the same column names form one table. A check reads
"0.31 (0.29–0.34) ≤ 0.35 ✓": the median over rounds, its quartiles, and the target if there is one. If the target is missed, the check
reads "0.71 (0.66–0.75) > 0.6 MISS". The median is rounded before it is compared, so a check is met if the number that it shows is at most
the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from benchmarks.records import Check, Record, Spread, number

TITLES = {
    "steps": "Training steps",
    "floor": "Floor of forward + backward: compute, and one pass over each byte that moves",
    "limit": "Limits of forward + backward",
    "scaling": "How forward + backward grows",
    "overhead": "Python time of the framework, per forward + backward",
    "recording": "Recording a training step",
    "memory": "Peak memory of forward + backward, per rank",
    "startup": "Start-up",
    "checkpoints": "Checkpoints",
    "grading": "Grading a class, two workers",
    "gpu": "One GPU, collectives replaced by copies",
    "profile": "Where the time of a full hwfsdp step goes",
}


class Table(NamedTuple):
    """Cells as text; `numeric` tells which columns to align to the right."""

    headers: list[str]
    rows: list[list[str]]
    numeric: list[bool]

    def as_text(self) -> str:
        """Return the table with columns separated by spaces."""
        widths = [max(map(len, column)) for column in zip(self.headers, *self.rows, strict=True)]
        lines = [self._line(row, widths) for row in (self.headers, ["-" * w for w in widths], *self.rows)]
        return "\n".join(lines)

    def _line(self, cells: Sequence[str], widths: Sequence[int]) -> str:
        padded = (
            c.rjust(w) if right else c.ljust(w)
            for c, w, right in zip(cells, widths, self.numeric, strict=True)
        )
        return "  ".join(padded).rstrip()

    def as_markdown(self) -> str:
        """Return the table as Markdown, with columns separated by bars."""
        marks = ["---:" if right else "---" for right in self.numeric]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in (self.headers, marks, *self.rows))


def tables(records: Sequence[Record]) -> list[Table]:
    """Make tables; neighboring records with the same columns form one table."""
    return [_table(list(group)) for _, group in groupby(records, key=_columns)]


def _columns(record: Record) -> tuple[object, ...]:
    return record.unit, tuple(record.case), tuple(record.values), tuple(record.checks)


def _table(records: Sequence[Record]) -> Table:
    first = records[0]
    values = [f"{name} [{_unit(first.unit)}]" for name in first.values]
    rows = [
        [
            *map(str, record.case.values()),
            *map(number, (spread.median for spread in record.values.values())),
            *map(_check, record.checks.values()),
        ]
        for record in records
    ]
    numeric = [isinstance(v, int) for v in first.case.values()] + [True] * (len(values) + len(first.checks))
    return Table([*first.case, *values, *first.checks], rows, numeric)


def _unit(unit: str) -> str:
    return "µs" if unit == "us" else unit


def _check(check: Check) -> str:
    text, target = number(check.spread.median), check.target
    if _is_spread(check.spread):
        text += f" ({number(check.spread.q1)}–{number(check.spread.q3)})"
    if target is None:
        return text
    return f"{text} ≤ {target:g} ✓" if check.met else f"{text} > {target:g} MISS"


def _is_spread(spread: Spread) -> bool:
    return spread.n > 1 and number(spread.q1) != number(spread.q3)


def as_text(part: str, records: Sequence[Record]) -> str:
    """Return one part as text for the terminal."""
    blocks = [f"== {TITLES[part]} ==", *(table.as_text() for table in tables(records)), *_notes(records)]
    return "\n".join([*blocks, verdict(records), ""])


def as_markdown(machine: dict[str, str | int], records: Sequence[Record]) -> str:
    """Return all parts as Markdown for the documentation."""
    blocks = [", ".join(f"{name} {value}" for name, value in machine.items()) + "."]
    for part, title in TITLES.items():
        found = [r for r in records if r.part == part]
        if found:
            blocks += [f"## {title}", f"Measured {found[0].date[:10]}. {verdict(found)}".strip()]
            blocks += [table.as_markdown() for table in tables(found)]
            blocks += _notes(found)
    return "\n\n".join(blocks)


def verdict(records: Sequence[Record]) -> str:
    """Say how many targets are met; "" if there are none."""
    found = [check.met for record in records for check in record.checks.values()]
    met, missed = found.count(True), found.count(False)
    return f"{met} of {met + missed} targets met." if met + missed else ""


def _notes(records: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(note for record in records for note in record.notes))
