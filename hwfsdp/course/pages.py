"""Texts from Jinja templates. Jinja escapes all values that it puts into an HTML page.

Jinja loads slowly, so it is loaded when the first page is filled: `--help`, `--json` and many commands fill none.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwfsdp.extras import needed_by

if TYPE_CHECKING:
    import jinja2

TEMPLATES = Path(__file__).with_name("templates")


def template(path: Path, **names: Any) -> jinja2.Template:
    """Return a template. It and its neighbors may use these names besides the values that they get."""
    with needed_by("the course's pages"):
        import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(path.parent),
        autoescape=jinja2.select_autoescape(),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(path.name, globals=names)


def filled(name: str, **values: Any) -> str:
    """Fill one of the course's own templates with these values, and return the text."""
    return template(TEMPLATES / name).render(values)


def filled_for_terminal(name: str, **values: Any) -> str:
    """Fill one of the course's own templates, and return the text without its last line ending, as `print` wants it."""
    return filled(name, **values).removesuffix("\n")
