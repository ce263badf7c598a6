"""Figures of a log, of a layout, of several runs: one module per kind of picture.

    What all share
    style       colors, hatches, units of bytes; classes of matplotlib and Pillow
    sheet       one page: places in inches, a head of title, text and keys, names that fit

    Of a log
    timeline    streams of every rank, or of several runs: what ran when, and what waited for what
    memory      bytes alive over time, by kind

    Of layouts
    grid        which part of each parameter each rank holds, and padding

    Of several runs
    loss        loss curves on top of each other
    scaling     speed, time, memory, exposed communication against the number of GPUs

    player      a log as one page that plays the step: HTML
    export      a log as a picture, for a spreadsheet, for a viewer

Every `plot_...` function returns a `matplotlib.figure.Figure` and does nothing else: it opens no window, writes no file, and changes
no state of pyplot. `figure.savefig(path)` writes the figure. A notebook shows it as the value of a cell, after `%matplotlib inline`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hwfsdp.lazy_imports import lazy_names

if TYPE_CHECKING:
    from . import export, grid, loss, memory, player, scaling, sheet, style, timeline
else:  # a type checker would accept every name
    __getattr__, __dir__ = lazy_names(__name__, {})
