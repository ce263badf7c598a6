"""02: two walks around a ring of four ranks: what each rank holds after every step, as four real ranks had it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from hwfsdp.comm import ring
from exercise_pictures.drawing import Panel, arrow, box, clear, headline, lay_out, name_ranks
from hwfsdp.launcher.launch import launch
from hwfsdp.plot import style
from hwfsdp.plot.style import Axes, Figure

RANKS, BLOCKS = 4, "abcd"
TEXTS = (
    "A color is the rank that gave the part, or the piece. Pieces with the same letter are added up.",
    f"In each of W − 1 = {RANKS - 1} rounds, each rank sends once. What leaves at the right enters at the left.",
)
PITCH, ROW = 5.0, 2.3  # from one rank to the next, from one step to the next; a block is 1 wide


def draw(width: float) -> Figure:
    """An all-gather, then a reduce-scatter; a row is a step, a column is a rank."""
    walks = launch(walk, RANKS)
    figure, (left, right) = lay_out(
        width, 3.8, [Panel(x, 0.56, 3.44, 2.77, 0.46) for x in (0.62, 4.72)], TEXTS
    )
    steps = ["start", *(f"round {step}" for step in range(1, RANKS))]
    _frame(left, "All-gather: parts are passed on", steps)
    _frame(right, "Reduce-scatter: sums are passed on", steps)
    for rank in range(RANKS):
        for step in range(RANKS):
            _draw_memory(left, rank, step, walks[rank]["held"][step], BLOCKS)
            pieces = walks[rank]["sums"][step]
            block = int(pieces.sum(0).argmax())  # the one that this rank has a sum of
            _draw_memory(right, rank, step, pieces[:, block], BLOCKS[block] * RANKS)
    for step in range(RANKS - 1):
        for rank in range(RANKS):
            receiver = walks[(rank + 1) % RANKS]["held"]
            new = (receiver[step + 1] - receiver[step]).nonzero().item()
            _draw_arrow(left, rank, step, float(new) + 0.5, style.color_of(int(new)))
            _draw_arrow(right, rank, step, 2.0, style.GREYS[3])
    return figure


# --- On the rank -------------------------------------------------------------------------------------------


def walk() -> dict[str, list[Tensor]]:
    """What this rank held before each exchange, and at the end.

    Returns:
        "held": [W] each, r + 1 where the part of rank r is, 0 where nothing is yet. "sums": [W, W] each, one where the
        piece of rank q for rank b is in the sum.
    """
    rank = dist.get_rank()
    gathered, own = torch.zeros(RANKS), torch.tensor([rank + 1.0])
    pieces = torch.zeros(RANKS, RANKS, RANKS)
    pieces[range(RANKS), rank, range(RANKS)] = 1
    reduced = torch.zeros(RANKS * RANKS)
    held, sums = list[Tensor](), list[Tensor]()
    exchange = ring.exchange

    def watched(send: Tensor, receive: Tensor, group: Any) -> None:
        if send.numel() == 1:
            held.append(gathered.clone())
        else:
            sums.append(send.clone())
        exchange(send, receive, group)

    with mock.patch.object(ring, "exchange", watched):
        ring.ring_all_gather(gathered, own, None)
        ring.ring_reduce_scatter(reduced, pieces.view(-1), None, mean=False)
    return {"held": [*held, gathered], "sums": [s.view(RANKS, RANKS) for s in [*sums, reduced]]}


# --- Drawing -----------------------------------------------------------------------------------------------


def _frame(axes: Axes, title: str, rows: list[str]) -> None:
    clear(axes, (-0.6, RANKS * PITCH - 0.4), (RANKS * ROW - 0.9, -0.75))
    headline(axes, title, 24, loc="center", weight="bold")
    name_ranks(axes, [rank * PITCH + 2 for rank in range(RANKS)], ROW, rows)


def _draw_memory(axes: Axes, rank: int, step: int, there: Tensor, letters: str) -> None:
    """Draw a rank's memory: one cell for each rank. A cell has the color and letter of its rank if what that rank gave has arrived."""
    for giver, (is_there, letter) in enumerate(zip(there.tolist(), letters, strict=True)):
        color, text = (style.color_of(giver), letter) if is_there else (style.GREYS[0], "")
        box(axes, (rank * PITCH + giver, step * ROW), color, text, edgecolor=style.GREYS[2])


def _draw_arrow(axes: Axes, rank: int, step: int, x: float, color: str) -> None:
    """From a rank's block after a step to the next rank's after the next step; the last rank's enters at the left."""
    shade = style.mixed(color, style.BLACK, 0.2)
    top, bottom = step * ROW + 1.05, (step + 1) * ROW - 0.05
    for place in (rank, -1) if rank == RANKS - 1 else (rank,):
        left = place * PITCH + x
        arrow(axes, (left, top), (left + PITCH, bottom), shade, mutation_scale=9)
