"""03: one parameter of five rows on three ranks: where its rows are, and the memory that a gather takes and a free gives back."""

from __future__ import annotations

from typing import Any

import torch

from hwfsdp.core import layout as storage
from hwfsdp.core.sharding import padded_local_numel, padded_local_shape
from exercise_pictures.drawing import Panel, arrow, cells, chunk_extents, clear, headline, lay_out, say
from hwfsdp.plot import style
from hwfsdp.plot.style import Axes, Figure

SHAPE, RANKS = (5, 3), 3
CELL: dict[str, Any] = {"edgecolor": style.WHITE, "linewidth": 1.2, "fontsize": style.SMALL_SIZE + 1}


def draw(width: float) -> Figure:
    """The rows of each rank, then the bytes of one rank, moment after moment."""
    panels = [Panel(0.16, 0.1, 3.85, 2.95, 0.14), Panel(4.72, 0.68, 3.32, 2.48, 0.61)]
    figure, (rows, states) = lay_out(width, 3.6, panels)
    _draw_rows(rows)
    _draw_states(states)
    return figure


# --- Rows --------------------------------------------------------------------------------------------------


def _draw_rows(axes: Axes) -> None:
    clear(axes, (0, 11.6), (8.6, -1.3))
    headline(axes, "Where the rows are", weight="bold")
    extents, (chunk, columns) = chunk_extents(SHAPE[0], RANKS), padded_local_shape(SHAPE, RANKS)
    say(axes, (1.5, -0.45), f"whole: {SHAPE}", ha="center")
    for rank, extent in enumerate(extents):
        for row in range(extent.start, extent.stop):
            cells(axes, (0.0, row), [f"r{row}"] * columns, style.color_of(rank), **CELL)
    for rank, extent in enumerate(extents):
        top = rank * (chunk + 0.85)
        say(axes, (6.5, top - 0.35), f"rank {rank}", ha="center")
        for row in range(chunk):
            own = row < extent.length
            color, text = (style.color_of(rank), f"r{extent.start + row}") if own else (style.GREYS[0], "0")
            cells(axes, (5.0, top + row), [text] * columns, color, **CELL)
        middle = extent.start + 0.5 * extent.length
        arrow(axes, (3.2, middle), (4.8, top + 0.5 * chunk), style.GREYS[2], 1.0)
        _draw_bracket(axes, 8.25, top, extent.length, f"its rows: ({extent.length}, {columns})")
    last = (RANKS - 1) * (chunk + 0.85) + chunk
    text = f"With padding, every rank has {padded_local_numel(SHAPE, RANKS)} elements."
    text += "\nIts own rows come first."
    say(axes, (0.0, last + 0.75), text)


def _draw_bracket(axes: Axes, x: float, y: float, rows: int, text: str) -> None:
    axes.plot([x, x + 0.15, x + 0.15, x], [y, y, y + rows, y + rows], color=style.GREYS[3], linewidth=1)
    say(axes, (x + 0.35, y + rows / 2), text)


# --- States ------------------------------------------------------------------------------------------------


def moments() -> list[tuple[str, int]]:
    """The calls in forward and backward of a step, with the bytes that the storage itself reports after each."""
    gathered = torch.empty(RANKS * padded_local_numel(SHAPE, RANKS))
    found = list[tuple[str, int]]()
    for verb in ("", "gather", "free", "gather", "free"):
        (storage.allocate if verb == "gather" else storage.free)(gathered)
        found.append((verb, gathered.untyped_storage().nbytes()))
    return found


def _draw_states(axes: Axes) -> None:
    style.open_frame(axes)
    found, shard = moments(), padded_local_numel(SHAPE, RANKS) * 4
    most = max(nbytes for _, nbytes in found)
    headline(axes, "What one rank holds", weight="bold")
    axes.set_xlim(0, len(found))
    axes.set_ylim(0, 1.42 * (shard + most))
    axes.set_ylabel("bytes", fontsize=style.TEXT_SIZE)
    axes.set_xticks([1.5, 3.5], ["forward", "backward"])
    axes.tick_params(axis="x", length=0, labelsize=style.TEXT_SIZE)
    axes.set_yticks([0, shard, shard + most])
    own = style.look_of_kind("sharded_param")
    axes.bar(0, shard, len(found), align="edge", **style.filled(own))
    text = f"rows and padding: {shard} B, always there"
    style.draw_label(axes, (len(found) / 2, shard / 2), text, own.color, style.TEXT_SIZE)
    for index, (verb, nbytes) in enumerate(found):  # what comes and goes, on top of the shard
        axes.bar(index, nbytes, 1, shard, align="edge", **style.filled(style.look_of_kind("unsharded_param")))
        middle = index + 0.5, shard + max(nbytes / 2, most * 0.12)
        face = style.YELLOW if nbytes else style.WHITE
        say(
            axes,
            middle,
            f"whole\n{nbytes} B",
            ha="center",
            color=style.BLACK,
            path_effects=[style.Rim(0.0, face)],
        )
        if verb:
            top = (1.3 if index % 2 else 1.18) * (shard + most)
            arrow(axes, (index, top), (index, shard + most * 1.04), style.GREYS[2], 1.0)
            say(axes, (index, top), verb, ha="center", va="bottom", color=style.BLACK)
