"""Two forwards of four layers as one rank issued them: the first, and one that knows the order of the last."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import nn

from hwfsdp.events import Event
from hwfsdp.plot import style
from hwfsdp.ranks import launch
from hwfsdp.recording import record
from hwfsdp.wrap import fully_shard

LAYERS = 4
WIDTHS = {"all_gather": 0.35, "wait": 0.8, "copy_out": 0.8, "forward": 1.9, "free": 0.45}  # of drawn events
GATHER, COMPUTE, BYTES = 2.5, 1.35, 0.0  # where the lanes begin, from below


def draw() -> Figure:
    """Above the first forward, below the second; events stand in the order in which the host issued them."""
    first, second = launch(two_forwards, 2)[0]
    figure = Figure(figsize=(9.6, 5.2), dpi=150)
    for bottom, events, title in (
        (0.55, first, "First forward: each layer's gather starts when the layer needs it"),
        (0.085, second, "Every later forward: the next gather travels under this layer's copies and compute"),
    ):
        _draw_forward(figure.add_axes((0.1, bottom, 0.89, 0.37)), events, title)
    caption = "Left to right: the order of issue, not time. A number is the layer's. One layer's bytes are whole at a time."
    figure.text(0.5, 0.025, caption, ha="center", fontsize=style.TEXT_SIZE, color=style.GREYS[3])
    return figure


# --- On the rank -------------------------------------------------------------------------------------------


def two_forwards() -> list[list[Event]]:
    """The events of a first forward and of a second one."""
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(LAYERS)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    found = []
    for _ in range(2):
        with record() as log, torch.no_grad():
            model(torch.zeros(1, 16))
        found.append([e for e in log.events if e.op != "free" or _was_given(log.events, e)])
    return found


def _was_given(events: Sequence[Event], free: Event) -> bool:
    """Whether the memory came by resizing; what a first gather makes is freed before that, and nobody sees it whole."""
    return any(e.op == "alloc" and e.writes == free.writes and e.seq < free.seq for e in events)


# --- Drawing -----------------------------------------------------------------------------------------------


def _draw_forward(axes: Axes, events: Sequence[Event], title: str) -> None:
    """Three lanes: gathers from their issue to the wait for them, compute, bytes of whole parameters."""
    axes.set_title(title, fontsize=style.TEXT_SIZE + 1.5, weight="bold", loc="left", pad=5)
    axes.spines[:].set_visible(False)
    axes.set_ylim(-0.1, 3.5)
    axes.set_yticks([GATHER + 0.4, COMPUTE + 0.4, BYTES + 0.4], ["all-gather", "compute", "bytes whole"])
    axes.tick_params(length=0, labelsize=style.TEXT_SIZE, labelcolor=style.GREYS[3])
    axes.set_xticks([])
    places = _places(events)
    right = max(x + width for x, width in places.values())
    axes.set_xlim(-0.1, right + 0.1)
    for event in events:
        if event.seq not in places:
            continue
        x, width = places[event.seq]
        if event.op == "all_gather":
            wait = next(e for e in events if e.op == "wait" and event.seq in e.after)
            end = sum(places[wait.seq])
            _draw_box(axes, x, end - x, GATHER, event, f"gather {_number(event)}")
        elif event.op != "free":
            words = {"wait": "wait", "copy_out": "copy", "forward": f"forward {_number(event)}"}
            _draw_box(axes, x, width, COMPUTE, event, words[event.op])
    _draw_bytes(axes, events, places, right)


def _places(events: Sequence[Event]) -> dict[int, tuple[float, float]]:
    """By seq, where an event is drawn: its left end and its width; the root's own forward is not."""
    places, x = dict[int, tuple[float, float]](), 0.0
    for event in events:
        if event.op in WIDTHS and event.owner[-1:].isdigit():
            places[event.seq] = x, WIDTHS[event.op]
            x += WIDTHS[event.op]
    return places


def _number(event: Event) -> str:
    return event.owner.rpartition(".")[2]


def _draw_box(axes: Axes, x: float, width: float, y: float, event: Event, text: str) -> None:
    look = style.look_of_op(event.op)
    axes.add_patch(
        Rectangle(
            (x + 0.03, y),
            width - 0.06,
            0.8,
            facecolor=look.color,
            edgecolor=style.mixed(look.color, style.BLACK, 0.4),
            hatch=look.hatch if event.op == "wait" else None,
            linewidth=0.8,
        )
    )
    box = {"facecolor": style.WHITE, "edgecolor": "none", "pad": 0.6} if event.op == "wait" else None
    ink = style.BLACK if event.op == "wait" else style.ink_on(look.color)
    axes.text(
        *(x + width / 2, y + 0.4, text),
        ha="center",
        va="center",
        fontsize=style.SMALL_SIZE + 0.5,
        color=ink,
        bbox=box,
    )


def _draw_bytes(
    axes: Axes, events: Sequence[Event], places: dict[int, tuple[float, float]], right: float
) -> None:
    """A step for every allocation and every freeing, where the next drawn event, or the freeing itself, is."""
    alive, heights, xs = dict[int, int](), [0], [0.0]
    for event in events:
        if event.op in ("alloc", "free"):
            alive[event.writes[0]] = event.bytes if event.op == "alloc" else 0
            xs.append(
                next((places[e.seq][0] for e in events if e.seq >= event.seq and e.seq in places), right)
            )
            heights.append(sum(alive.values()))
    top = max(heights)
    scaled = [BYTES + 0.75 * height / top for height in [*heights, heights[-1]]]
    axes.fill_between(
        [*xs, right], BYTES, scaled, step="post", color=style.look_of_kind("unsharded_param").color
    )
    axes.plot([*xs, right], scaled, drawstyle="steps-post", color=style.GREYS[3], linewidth=0.8)
    for index, height in enumerate(heights):
        if height == top:
            middle = (xs[index] + xs[index + 1]) / 2
            axes.text(middle, BYTES + 0.37, f"{top:,} B", ha="center", va="center", fontsize=style.SMALL_SIZE)
