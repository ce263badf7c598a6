"""The player's page: template, style, scripts and packed logs in one text.

The page asks for nothing: its policy (`Content-Security-Policy`) forbids every request. Names in a log come from files, so the page
shows them as text only, and no data can end the element that holds it.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hwfsdp.files import whole_file
from hwfsdp.optional_packages import needed_by
from hwfsdp.observe.eventlog import EventLog
from hwfsdp.plot.player.page_data import pack

with needed_by("the step player"):
    from jinja2 import StrictUndefined, Template

SCRIPTS = (
    *("format", "looks", "events", "reasons", "state", "chart"),
    *("timeline", "memory", "parameters", "code", "summary", "controls", "main"),
)
_FOLDER = Path(__file__).parent
FRAME = 860  # pixels: the height of a frame; the page scrolls in it
_ICON = (  # a bar of compute, and a gather below it that ran ahead
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E"
    "%3Cpath fill='%230072b2' d='M5 2h11v5H5z'/%3E%3Cpath fill='%23009e73' d='M0 9h10v5H0z'/%3E%3C/svg%3E"
)
_NO_FRAME = (
    "The step player stands here where the page runs scripts: run this cell, or open the site of the course."
)


@dataclass(frozen=True)
class Page:
    """A page of HTML. A notebook shows it; `save` writes it.

    Attributes:
        title: title of the browser window. text: the HTML.
    """

    title: str
    text: str

    def save(self, path: str | Path) -> None:
        """Write the page to a file."""
        with whole_file(path) as draft:
            draft.write_text(self.text, encoding="utf-8")

    def __repr__(self) -> str:
        return f"<{self.title}: {len(self.text):,} characters of HTML; save(path) writes them>"

    def _repr_html_(self) -> str:
        """Return a frame with the page, so that page and notebook cannot disturb each other."""
        whole, title = html.escape(self.text), html.escape(self.title)
        look = f'width="100%" height="{FRAME}" style="border: 1px solid #8886; box-sizing: border-box; max-height: 95vh"'
        return f'<iframe sandbox="allow-scripts" {look} title="{title}" srcdoc="{whole}">{_NO_FRAME}</iframe>'


def make_page(logs: Sequence[tuple[str, EventLog]]) -> Page:
    """Make the page of one log, or of two logs side by side.

    Args:
        logs: one or two pairs of a name and a log.

    Raises:
        UsageError: as `page_data.pack`.
    """
    title = f"Step player: {' and '.join(name for name, _ in logs)}"
    data = json.dumps(pack(logs), separators=(",", ":"), allow_nan=False)
    scripts = {name: _asset(f"{name}.js") for name in SCRIPTS}
    template = Template(
        _asset("page.html"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    given = {
        "icon": _ICON,
        "style": _asset("style.css"),
        "scripts": scripts,
        "data": data.replace("<", "\\u003c"),
    }
    return Page(title, template.render(title=title, **given))


def _asset(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")
