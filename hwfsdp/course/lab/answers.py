"""A learner's answers to the lab: `answers.toml`, read as data and never run.

    [01_flat_loss]
    evidence = 4096        # a number, or a name in quotes
    cause = "B"            # a letter
    fix = "D"

A missing table or value, or the value "", means "not answered". Anything else in the file is refused with one line that names
the place. Otherwise a mistyped name would be an answer that silently does not count.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from hwfsdp.course.lab.bugs import Bug
from hwfsdp.course.refusals import read_text, unusable
from hwfsdp.errors import did_you_mean
from hwfsdp.observe.validate import printable, shown

FILE = "answers.toml"
LARGEST = 1 << 16  # bytes; a larger file is not written by hand
QUESTIONS = ("evidence", "cause", "fix")
_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
_TOLERANCE = 0.02  # relative, for kind "ratio"


class Answers(NamedTuple):
    """The answers to one bug, as typed; "" for a missing one."""

    evidence: str = ""
    cause: str = ""
    fix: str = ""


def find_answers(folder: Path) -> Path:
    """Return the path of the answers: `lab/answers.toml` in a submission's folder, or `answers.toml`, if only this one exists."""
    nested, flat = folder / "lab" / FILE, folder / FILE
    return flat if flat.exists() and not nested.exists() else nested


def read_answers(path: Path, bugs: Iterable[Bug]) -> dict[str, Answers]:
    """Read the answers by directory of the bug. Missing answers are empty. Without a file, all are empty.

    Raises:
        UsageError: the file is not a valid file of answers.
    """
    known = [bug.directory for bug in bugs]
    try:
        text = read_text(path, "lab.answers", LARGEST) if path.exists() else ""
        found = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        what = "brackets nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise unusable("lab.toml", path=path, got=printable(what)) from None
    answers = {directory: Answers() for directory in known}
    for name, table in found.items():
        if name not in known:
            remedy = did_you_mean(name, known, f"For example: [{known[0]}]", "[{}]")
            raise unusable("lab.table_name", path=path, name=printable(name[:40]), remedy=remedy)
        answers[name] = _read_table(path, name, table)
    return answers


def _read_table(path: Path, name: str, table: Any) -> Answers:
    if not isinstance(table, dict):
        raise unusable("lab.table", path=path, name=name, got=shown(table))
    for key in table:
        if key not in QUESTIONS:
            known = ", ".join(QUESTIONS)
            raise unusable("lab.question", path=path, known=known, name=name, key=printable(key[:40]))
    return Answers(**{key: _read_value(path, f"{key} of [{name}]", value) for key, value in table.items()})


def _read_value(path: Path, name: str, value: Any) -> str:
    if type(value) in (int, float) and shown(value) == str(value):
        return str(value)
    if type(value) is str and len(value) <= 100:
        return value.strip()
    raise unusable("lab.value", path=path, name=name, got=shown(value))


# --- Evidence as it was typed --------------------------------------------------------------------------------


class Unreadable(Exception):
    """A value of the wrong kind; the text says what was expected."""


def agrees(kind: str, typed: str, measured: str) -> bool:
    """True if the typed value equals the measured one (`evidence.Measured.value`).

    Raises:
        Unreadable: the typed value is of another kind.
    """
    if kind == "name":
        return _name(typed) == _name(measured)
    given = _number(kind, typed)
    if kind == "whole":
        return given == int(measured)
    return abs(given - Fraction(measured)) <= _TOLERANCE * abs(Fraction(measured))


def _name(text: str) -> str:
    plain = text.strip("'\"` ").lower().removeprefix("torch.")
    return _ALIASES.get(plain, plain)


def _number(kind: str, typed: str) -> Fraction:
    """Read a number as people write it: 65,536 or 65_536 or 65536 B; a ratio as 0.25 or 1/4."""
    plain = typed.lower()
    for unit in ("bytes", "byte", "b"):
        plain = plain.removesuffix(unit).rstrip()
    plain = plain.replace("_", "").replace(" ", "")
    if kind == "whole":
        plain = plain.replace(",", "")
    try:
        if len(plain) > 30 or "e" in plain:  # Fraction("1e999999999") would not finish
            raise ValueError(plain)
        return Fraction(plain)
    except (ValueError, ZeroDivisionError):
        example = "a whole number such as 65536" if kind == "whole" else "a number such as 0.25"
        raise Unreadable(example) from None
