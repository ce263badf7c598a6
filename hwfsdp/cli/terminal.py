"""What every verb needs of the terminal: arguments that are refused in one line, and the answer as text or JSON."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TextIO

from hwfsdp.errors import did_you_mean

MOST_GPUS = 1 << 16


class VerbParser(argparse.ArgumentParser):
    """A parser whose errors are one line, and name the choice or option that a mistyped word may mean."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [*map(str, action.choices)]
            expected = "a verb that --help lists" if action.dest == "verb" else f"one of {', '.join(choices)}"
            form = " ".join([self.prog, *action.option_strings[:1], "{}"])
            meant = did_you_mean(str(value), choices, form=form)
            raise argparse.ArgumentError(
                action, f"expected {expected}, got {str(value)[:40]!r}" + (f". {meant}" if meant else "")
            )

    def refuse_unknown(self, words: list[str]) -> NoReturn:
        """End with an error that names the option which the first of these words may mean."""
        known = [name[2:] for action in self._actions for name in action.option_strings if name[:2] == "--"]
        meant = did_you_mean(words[0].partition("=")[0].lstrip("-"), known, form="--{}")
        self.error(f"unrecognized arguments: {' '.join(words)}" + (f". {meant}" if meant else ""))

    def error(self, message: str) -> NoReturn:
        end = "" if "Did you mean" in message else f". See: {self.prog} --help"
        complain(f"{self.prog}: {message}{end}")
        self.exit(2)


def own_command() -> str:
    """Return what the user can type to run this program: "hwfsdp", or its path if the environment of this Python is not activated."""
    beside, found = Path(sys.executable).with_name("hwfsdp"), shutil.which("hwfsdp")
    if not beside.exists() or (found and Path(found).samefile(beside)):
        return "hwfsdp"
    return os.path.relpath(beside) if beside.is_relative_to(Path.cwd()) else str(beside)


# --- Values of options -------------------------------------------------------------------------------------


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """Make the type of an option that is a whole number within bounds."""
    bounds = f"{least} or more" if most is None else f"{least} to {most}"

    def read(text: str) -> int:
        number = int(text) if text.isdecimal() and len(text) < 19 else -1
        if number < least or (most is not None and number > most):
            raise argparse.ArgumentTypeError(f"expected a whole number, {bounds}, got {text!r}")
        return number

    return read


def positive(text: str) -> float:
    with suppress(ValueError):
        if 0 < float(text) <= 1e6:
            return float(text)
    raise argparse.ArgumentTypeError(f"expected a number above 0 and at most 1,000,000, got {text!r}")


def names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


def reshard(text: str) -> bool | int:
    return text == "yes" if text in ("yes", "no") else whole(1, MOST_GPUS)(text)


def sweep(text: str) -> list[int]:
    match = re.fullmatch(r"gpus=(\d+)\.\.(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]) <= MOST_GPUS:
        raise argparse.ArgumentTypeError(f"expected gpus=A..B with 1 ≤ A ≤ B ≤ 65536, got {text!r}")
    found, last = [int(match[1])], int(match[2])
    while found[-1] * 2 <= last:
        found.append(found[-1] * 2)
    return found


# --- Output ------------------------------------------------------------------------------------------------


def wrapped(text: str, stream: TextIO) -> str:
    """Wrap the sentences of a text to the width of the terminal, if there is one. Tables keep their lines."""
    lines, width = text.splitlines(), shutil.get_terminal_size().columns
    for number, line in enumerate(lines) if stream.isatty() else ():
        if len(line) > width and "  " not in line and line[:1] != " ":
            lines[number] = textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


def check_writable(out: Path) -> None:
    """Raise an error now if the file cannot be written. Leave no empty file behind, however the run ends."""
    is_new = not out.exists()
    with out.open("ab"):
        pass
    if is_new:
        out.unlink()


def complain(text: str) -> None:
    """Print to standard error."""
    print(wrapped(text, sys.stderr), file=sys.stderr)


def answer(args: argparse.Namespace, found: Any, text: str, holds: bool = True) -> int:
    """Print the result of a verb as text, or as JSON with `--json`. Return the exit status: 0 if the result holds, else 1."""
    print(json.dumps(found, indent=2) if args.as_json else wrapped(text, sys.stdout), flush=True)
    return 0 if holds else 1
