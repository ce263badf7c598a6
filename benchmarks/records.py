"""The fields of a result, and the file that keeps results.

The file, `runs/bench.json`:

    schema    1
    machine   cpu, cores, python, torch (and gpu, where there is one)
    records   a list of:
        part     "steps", "floor", "limit", "scaling", "overhead", "recording", "memory", "startup", "checkpoints", "grading",
                 "gpu" or "profile"
        case     what was varied, by name: {"params": "3 M", "ranks": 2, "kind": "fwd+bwd"}
        unit     of the values: "ms", "us", "s", "MiB"
        values   name → spread
        checks   name → {"spread": spread, "target": number or null}, met when the median is at most the target
        notes    sentences for the reader of this part
        date     when it was measured, UTC
    spread    {"median", "q1", "q3", "n"}: quartiles over n rounds

A part that is measured again replaces its old records. Records of another machine are dropped.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

SCHEMA = 1


@dataclass(frozen=True)
class Spread:
    """Quartiles of `n` measurements."""

    median: float
    q1: float
    q3: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Compute the quartiles. Raises ValueError without values."""
        if not values:
            raise ValueError("Spread.of expected measurements, got none; measure at least one round")
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, q1, q3, len(values))


def number(value: float) -> str:
    """Format a number with three digits: 0.123, 1.23, 12.3, 123, 1234."""
    size = abs(value)
    decimals = 3 if size < 0.1 else 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{value:.{decimals}f}"


@dataclass(frozen=True)
class Check:
    """A number that must not exceed its target. Without a target, it is only there to be compared."""

    spread: Spread
    target: float | None = None

    @property
    def met(self) -> bool | None:
        """Return True if the median, rounded as the tables show it, is at most the target; None without a target."""
        return None if self.target is None else float(number(self.spread.median)) <= self.target


@dataclass(frozen=True)
class Record:
    """One line of results; the module's docstring describes the fields."""

    part: str
    case: dict[str, str | int]
    unit: str
    values: dict[str, Spread]
    checks: dict[str, Check] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))


def ratio(above: Sequence[float], below: Sequence[float], target: float | None = None) -> Check:
    """Divide measurements of the same rounds.

    Both values of a round were measured within a second, so a longer slowdown of the machine cancels out.
    """
    return Check(Spread.of([a / b for a, b in zip(above, below, strict=True)]), target)


def machine() -> dict[str, str | int]:
    """Return the properties of the machine on which the numbers depend."""
    found: dict[str, str | int] = {
        "cpu": _cpu_model(),
        "cores": os.cpu_count() or 1,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def save(path: Path, fresh: Sequence[Record]) -> None:
    """Add records to the file, in place of records of the same parts."""
    parts = {record.part for record in fresh}
    kept = [r for r in load(path) if r.part not in parts] if _is_of_this_machine(path) else []
    content = {"schema": SCHEMA, "machine": machine(), "records": [asdict(r) for r in [*kept, *fresh]]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def load(path: Path) -> list[Record]:
    """Return the records of a file; none if there is no such file, or if it has another schema."""
    content = _content(path)
    return [record_of(entry) for entry in content["records"]] if content else []


def machine_of(path: Path) -> dict[str, str | int]:
    """Return the machine on which the records of a file were measured."""
    content = _content(path)
    return dict(content["machine"]) if content else {}


def of_part(records: Iterable[Record], part: str) -> list[Record]:
    return [r for r in records if r.part == part]


def _is_of_this_machine(path: Path) -> bool:
    return machine_of(path) == machine()


def _content(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    content = json.loads(path.read_text())
    return content if isinstance(content, dict) and content.get("schema") == SCHEMA else None


def record_of(entry: Mapping[str, Any]) -> Record:
    """Make a record from its entry in a file."""
    values = {name: Spread(**spread) for name, spread in entry["values"].items()}
    checks = {name: Check(Spread(**c["spread"]), c["target"]) for name, c in entry["checks"].items()}
    return Record(
        entry["part"], entry["case"], entry["unit"], values, checks, tuple(entry["notes"]), entry["date"]
    )
