"""Helpers for notebooks: figures as PNG, errors in one line, predictions with sliders.

    lesson.begin()                                             # in the first cell
    lesson.explore(lambda rank: plot_memory(log, rank=rank), rank=range(2))      # as the value of a cell

A notebook of the course defines no algorithm. It calls the package and shows the results: on real ranks (`launch`), on virtual ranks
(`simulate`), or by arithmetic (`accounting`, `layout`).

Note [A slider without a kernel]
    People read notebooks more often than they run them: on a web page, in a review, as a PDF. So `explore` draws a picture for every
    position of its sliders, and puts all pictures into one piece of HTML (`templates/explore.html`), which needs no kernel and no
    network. A page without scripts, such as GitHub's, does not show the sliders, and neither does paper. For these readers, the
    pictures of the first and the last choice follow as plain outputs. A page with sliders hides these two pictures.
"""

from __future__ import annotations

import base64
import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from html import escape
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwfsdp.errors import FSDPError, UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OLDEST = (3, 11)  # oldest version of Python
_BEFORE = """\
<p><strong>Predict, then reveal.</strong> {question}</p>
<textarea class="prediction" rows="2" placeholder="Your prediction" aria-label="Your prediction"></textarea>
<details>
<summary>Reveal</summary>
<p>{answer}</p>
"""


def begin() -> None:
    """Prepare a notebook: figures as PNG, errors of this package in one line.

    Raises:
        UsageError: the kernel's Python is too old, or the caller is not in a notebook.
    """
    shell = _shell()
    if shell is None:
        raise UsageError(
            "lesson.begin",
            expected="a notebook or IPython",
            got="plain Python",
            remedy="Open the notebook in Jupyter: .venv/bin/jupyter lab notebooks",
        )
    shell.set_custom_exc((FSDPError,), _show_error)
    if sys.version_info < OLDEST:
        oldest, version = (f"{major}.{minor}" for major, minor, *_ in (OLDEST, sys.version_info))
        raise UsageError(
            "this notebook",
            expected=f"a kernel with Python {oldest} or newer",
            got=f"Python {version}",
            remedy="Choose the kernel of the environment in which hwfsdp is installed, as README.md says.",
        )
    backend: Any = importlib.import_module("matplotlib_inline.backend_inline")  # only in notebooks, untyped
    sheet: Any = importlib.import_module("hwfsdp.plot.sheet")
    backend.set_matplotlib_formats("retina", dpi=sheet.DPI, bbox_inches=None)  # shown at half its pixels


def explore(
    draw: Callable[..., Figure], question: str = "", answer: str = "", **choices: Sequence[Any]
) -> Choices:
    """Let the reader choose what `draw` draws. See Note [A slider without a kernel].

    Args:
        draw: called with one value for each name; returns a figure.
        question: the question that the reader should answer first. A box for the prediction stands below it, and the sliders are
            folded until the reader reveals them. "": there is no question, and the sliders are open.
        answer: text above the sliders, folded with them.
        choices: the values to choose from, by name, for example `rank=range(4)`.

    Raises:
        UsageError: there is nothing to choose from, or only one of question and answer is given.
    """
    empty = [name for name, values in choices.items() if not len(values)]
    if empty or not choices:
        raise UsageError(
            "lesson.explore",
            expected="values to choose from",
            got=f"none for {empty[0]!r}" if empty else "no name at all",
            remedy="Pass them by name: explore(draw, rank=range(4)).",
        )
    if bool(question) != bool(answer):
        raise UsageError(
            "lesson.explore",
            expected="a question with its answer, or neither",
            got=f"only the {'question' if question else 'answer'}",
            remedy="Pass both: explore(draw, question=..., answer=..., rank=range(4)).",
        )
    return Choices(draw, question, answer, choices)


class Choices:
    """Pictures of all choices. A notebook shows them with sliders; paper shows only the first and the last.

    Args:
        draw, question, answer, choices: as for `explore`.

    Attributes:
        pictures: pairs of a combination of values and its figure, in the order of `itertools.product`.
    """

    def __init__(
        self, draw: Callable[..., Figure], question: str, answer: str, choices: dict[str, Sequence[Any]]
    ) -> None:
        self.question, self.answer, self.choices = question, answer, choices
        combinations = [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]
        self.pictures = [(each, draw(**each)) for each in combinations]

    def _repr_html_(self) -> str:
        choices = {name: [str(value) for value in values] for name, values in self.choices.items()}
        data = {"choices": choices, "pictures": [_as_address(figure) for _, figure in self.pictures]}
        said = {"before": "", "after": "", "data": json.dumps(data).replace("<", "\\u003c")}
        if self.question:
            said["before"] = _BEFORE.format(question=escape(self.question), answer=escape(self.answer))
            said["after"] = "</details>"
        page = Path(__file__).with_name("templates") / "explore.html"
        return re.sub("%(before|after|data)%", lambda place: said[place[1]], page.read_text(encoding="utf-8"))

    def stills(self) -> Iterator[tuple[str, Figure]]:
        """Yield the first and the last picture, each with a text of its values."""
        for values, figure in (self.pictures[0], *self.pictures[1:][-1:]):
            yield ", ".join(f"{name} = {value}" for name, value in values.items()), figure

    def _ipython_display_(self) -> None:
        from IPython.display import HTML, Markdown, display

        display(HTML(self._repr_html_()))  # type: ignore[no-untyped-call]
        for said, figure in self.stills():
            display(Markdown(f"*{said}*"), figure)  # type: ignore[no-untyped-call]


def _as_address(figure: Figure) -> str:
    """Return a data URL with the picture: WebP, two pixels for each pixel of the page."""
    sheet: Any = importlib.import_module("hwfsdp.plot.sheet")
    drawn = BytesIO()
    sheet.rasterize(figure).convert("RGB").save(drawn, format="webp", lossless=True)
    return f"data:image/webp;base64,{base64.b64encode(drawn.getvalue()).decode()}"


def _shell() -> Any:
    """Return the running IPython, or None."""
    ipython: Any = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython else None


def _show_error(shell: Any, kind: type[BaseException], error: BaseException, trace: Any, **_: Any) -> None:
    """Show only the message of an error of this package: what was expected, what came, what to do."""
    shell._showtraceback(kind, error, [f"{kind.__name__}: {error}"])
