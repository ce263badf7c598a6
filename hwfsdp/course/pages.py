"""Texts from templates of Jinja, which escapes whatever is filled into a page of HTML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

TEMPLATES = Path(__file__).with_name("templates")


def template(path: Path, **names: Any) -> jinja2.Template:
    """A template, with names that it and its neighbors may use besides what they are given."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(path.parent),
        autoescape=jinja2.select_autoescape(),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(path.name, globals=names)


def filled(name: str, **values: Any) -> str:
    """The text that one of the course's own templates gives with these values."""
    return template(TEMPLATES / name).render(values)
