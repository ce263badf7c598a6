"""Options, read from the rows of `verbs.toml`, and the answer as text or JSON."""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hwfsdp.errors import UsageError

_KIND = re.compile(r"([^=!]+)(!?)(?:=(.*))?")  # the kind, "!" if the option is required, and its default
_MANY = ("...", "?", "*", "+")  # these ends of a value's name say how often it may come
_MOST_GPUS = 1 << 16


def add_options(parser: argparse.ArgumentParser, rows: str, shared: Mapping[str, str]) -> None:
    """Add an option for each row; `verbs.toml` says how a row is written.

    Args:
        shared: rows by their name, for "@name".
    """
    to: Any = parser
    for row in re.sub(r"\n +", " ", textwrap.dedent(rows).strip()).splitlines():  # one line per row
        if row.startswith("@"):
            add_options(to, shared[row[1:]], shared)
        elif row.startswith("["):
            title, _, text = row[1:].partition("]")
            to = parser.add_argument_group(title, text.strip() or None) if title else parser
        else:
            names, kind, text = re.split(r" {2,}", row, maxsplit=2)
            name, _, value = names.partition(" ")
            to.add_argument(name, help=text, **_value(value), **_kind(kind))


def _value(name: str) -> dict[str, Any]:
    """Return how often a value may come, and its name in the help."""
    many = next((end for end in _MANY if name.endswith(end)), "")
    found = {"nargs": argparse.REMAINDER if many == "..." else many, "metavar": name.removesuffix(many)}
    return {key: value for key, value in found.items() if value}


def _kind(text: str) -> dict[str, Any]:
    """Return the type of an option's value, and its default, or that the option is required."""
    found = _KIND.fullmatch(text)
    assert found is not None, text
    kind, required, default = found.groups()
    more: dict[str, Any] = {"required": True} if required else {}
    if default is not None:
        more["default"] = default  # argparse converts it to the type
    if bounds := re.fullmatch(r"(\d+)\.\.(\d+)", kind):
        return {"type": whole(int(bounds[1]), int(bounds[2])), **more}
    return {**(KINDS[kind] if kind in KINDS else {"choices": kind.split("|")}), **more}


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """Make the type of an option that is a whole number within bounds."""
    bounds = f"{least} or more" if most is None else f"{least} to {most}"

    def read(text: str) -> int:
        number = int(text) if text.isdecimal() and len(text) < 19 else -1
        if number < least or (most is not None and number > most):
            raise argparse.ArgumentTypeError(f"expected a whole number, {bounds}, got {text!r}")
        return number

    return read


def seconds(text: str) -> float:
    with suppress(ValueError):
        if 0 < float(text) <= 1e6:
            return float(text)
    raise argparse.ArgumentTypeError(f"expected seconds, more than 0 and at most 1,000,000, got {text!r}")


def names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


def reshard(text: str) -> bool | int:
    if text in ("yes", "no"):
        return text == "yes"
    return whole(1, _MOST_GPUS)(text)


def sweep(text: str) -> list[int]:
    match = re.fullmatch(r"gpus=(\d+)\.\.(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]) <= _MOST_GPUS:
        raise argparse.ArgumentTypeError(f"expected gpus=A..B with 1 ≤ A ≤ B ≤ 65536, got {text!r}")
    found, last = [int(match[1])], int(match[2])
    while found[-1] * 2 <= last:
        found.append(found[-1] * 2)
    return found


KINDS: dict[str, dict[str, Any]] = {
    "text": {},
    "flag": {"action": "store_true"},
    "path": {"type": Path},
    "int": {"type": int},
    "float": {"type": float},
    "few": {"type": int, "choices": range(1, 9)},
    "positive": {"type": whole(1)},
    "natural": {"type": whole(0)},
    "seconds": {"type": seconds},
    "names": {"type": names},
    "reshard": {"type": reshard},
    "sweep": {"type": sweep},
}


def check_exists(value: Path | list[Path]) -> None:
    """Raise UsageError for a path, or the first of several, at which there is nothing."""
    for path in value if isinstance(value, list) else [value]:
        if not path.exists():
            raise UsageError(str(path), expected="a file or folder", got="nothing", remedy="Check the path.")


# --- What verbs print --------------------------------------------------------------------------------------


def answer(args: argparse.Namespace, found: Any, text: str, holds: bool = True) -> int:
    """Print the result of a verb as text, or as JSON with `--json`. Return the exit status: 0 if the result holds, else 1."""
    print(json.dumps(found, indent=2) if args.json else text, flush=True)
    return 0 if holds else 1
