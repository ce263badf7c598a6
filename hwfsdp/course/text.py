"""What commands print, and the pages that they make of `templates/`."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hwfsdp.optional_packages import needed_by


def answer(as_json: bool, found: Any, lines: Sequence[str], holds: bool = True) -> int:
    """Print the result of a command as JSON, or else as text. Return the exit status: 0 if the requested result holds."""
    print(json.dumps(found, indent=2) if as_json else "\n".join(lines))
    return 0 if holds else 1


def filled(text: str, indent: str = "  ") -> list[str]:
    """Return the lines of a text, wrapped to the terminal and indented."""
    width = min(100, shutil.get_terminal_size((100, 24)).columns)
    wrapper = textwrap.TextWrapper(
        width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )
    return [line for part in text.splitlines() for line in wrapper.wrap(part)]


def rendered(template: str, **values: Any) -> str:
    """Fill values into a template. Each value is escaped.

    Raises:
        MissingPackageError: jinja2 is not installed.
    """
    with needed_by(f"the page {template}"):
        import jinja2
    loader = jinja2.FileSystemLoader(Path(__file__).with_name("templates"))
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template(template).render(**values)
