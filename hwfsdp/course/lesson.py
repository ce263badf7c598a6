"""Help for notebooks: a first cell that names missing packages, figures, short errors, sliders.

    lesson.begin()                                             # in the first cell
    lesson.explore(lambda rank: plot_memory(log, rank=rank), rank=range(2))      # as the value of a cell

A notebook of the course defines no algorithm. It calls the package, on real ranks (`launch`), on virtual ones (`simulate`), or
on paper (`accounting`, `layout`), and shows what comes back.

Note [A slider that is read on paper]
    Notebooks are read more often than they are run: on a web page, in a review, as a PDF. There nothing slides. So `explore`
    leaves one picture behind for a few of the choices, and only someone at a living kernel, with ipywidgets, gets the controls.
    HWFSDP_STATIC=1 says that nobody is there.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from hwfsdp.errors import FSDPError, UsageError

STATIC = "HWFSDP_STATIC"
OLDEST = (3, 11)  # of Python


def begin() -> None:
    """Prepare a notebook: figures as PNG, errors of this package in one line, few threads so that ranks have room.

    Raises:
        UsageError: the kernel's Python is too old, or this is no notebook.
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
        raise UsageError(
            "this notebook",
            expected=f"a kernel with Python {OLDEST[0]}.{OLDEST[1]} or newer",
            got=f"Python {sys.version_info[0]}.{sys.version_info[1]}",
            remedy="In a terminal, at the root of the repository: make setup. Then choose the kernel of its .venv.",
        )
    backend: Any = importlib.import_module("matplotlib_inline.backend_inline")  # of the notebook, and untyped
    sheet: Any = importlib.import_module("hwfsdp.plot.sheet")
    backend.set_matplotlib_formats("retina", dpi=sheet.DPI, bbox_inches=None)  # shown at half its pixels


def explore(draw: Callable[..., Any], **choices: Sequence[Any]) -> Any:
    """Let the reader choose what `draw` draws. See Note [A slider that is read on paper].

    Args:
        draw: called with one value for each name; returns a figure, or anything else that a cell shows.
        choices: for each name the values to choose from, for example `rank=range(4)`.

    Returns:
        The controls with the picture below them; on paper a `Pages`, which shows the first and the last choice.
    """
    empty = [name for name, values in choices.items() if not len(values)]
    if empty or not choices:
        raise UsageError(
            "lesson.explore",
            expected="values to choose from",
            got=f"none for {empty[0]!r}" if empty else "no name at all",
            remedy="Pass them by name: explore(draw, rank=range(4)).",
        )
    if os.environ.get(STATIC) == "1" or importlib.util.find_spec("ipywidgets") is None:
        return Pages(draw, choices)
    ipywidgets: Any = importlib.import_module("ipywidgets")
    controls = {
        name: ipywidgets.SelectionSlider(options=list(values), description=name, continuous_update=False)
        for name, values in choices.items()
    }
    return ipywidgets.interactive(draw, **controls)


class Pages:
    """Pictures of the first and of the last choice, one below the other.

    Args:
        draw, choices: as for `explore`.
    """

    def __init__(self, draw: Callable[..., Any], choices: dict[str, Sequence[Any]]) -> None:
        ends = [{name: values[end] for name, values in choices.items()} for end in (0, -1)]
        self.chosen = ends[:1] if ends[0] == ends[1] else ends
        self.pictures = [draw(**each) for each in self.chosen]

    def _ipython_display_(self) -> None:
        from IPython.display import Markdown, display

        for each, picture in zip(self.chosen, self.pictures, strict=True):
            said = ", ".join(f"{name} = {value}" for name, value in each.items())
            display(Markdown(f"*{said}*"), picture)  # type: ignore[no-untyped-call]


def _shell() -> Any:
    """The running IPython, or None."""
    ipython: Any = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython else None


def _show_error(shell: Any, kind: type[BaseException], error: BaseException, trace: Any, **_: Any) -> None:
    """Show an error of this package by its message: what was expected, what was got, what to do."""
    shell._showtraceback(kind, error, [f"{kind.__name__}: {error}"])
