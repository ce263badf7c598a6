"""What commands print: JSON, or lines of text."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def answer(as_json: bool, found: Any, lines: Sequence[str], holds: bool = True) -> int:
    """Print the result of a command as JSON, or else as text. Return the exit status: 0 if the requested result holds."""
    print(json.dumps(found, indent=2) if as_json else "\n".join(lines))
    return 0 if holds else 1


def filled(text: str, indent: str = "  ") -> list[str]:
    """Return the lines of a text, wrapped and indented."""
    wrapper = textwrap.TextWrapper(
        100, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )
    return [line for part in text.splitlines() for line in wrapper.wrap(part)]


def shown_path(path: Path) -> str:
    """Return a path relative to the current folder, if it is below it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
