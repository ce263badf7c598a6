"""Figures of a log, of a layout, of a table: one module per picture.

    What all share
    parts       what pictures are made of: classes of matplotlib and Pillow
    style       colors, hatches, units of bytes
    sheet       one page: places in inches, a head of title, text and keys, names that fit
    choice      the events that a picture shows
    lanes       one rank's streams as a band
    issued      what a rank issued, in order

    Of a log
    timeline    streams of every rank: what ran when, and what waited for what
    comparison  two runs on one axis of time
    overlap     compute, hidden and exposed communication of every rank
    lifetimes   each parameter group: sharded, gathering, full, freed
    memory      bytes alive over time, by kind
    traffic     bytes of each collective, against closed forms

    Of layouts and models
    grid        which part of each parameter each rank holds, and padding
    meshmap     which ranks communicate with each other, on which nodes
    cartoon     numbers of each rank before a collective and after it
    parameters  the table of a model's parameters
    states      memory of model states against the number of ranks

    Of several runs
    loss        loss curves on top of each other
    scaling     speed, time, memory, exposed communication against the number of GPUs

    player      a log as one page that plays the step: HTML
    export      a log as a picture, for a spreadsheet, for a viewer

Every function returns a `matplotlib.figure.Figure` and does nothing else: it opens no window, writes no file, and changes no
state of pyplot. `figure.savefig(path)` writes the figure. A notebook shows it as the value of a cell, after `%matplotlib inline`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hwfsdp.doors import lazy_door

if TYPE_CHECKING:
    from . import cartoon, choice, comparison, export, grid, issued, lanes, lifetimes, loss, memory, meshmap
    from . import overlap, parameters, parts, player, scaling, sheet, states, style, timeline, traffic
else:  # a type checker would accept every name
    __getattr__, __dir__ = lazy_door(__name__, {})
