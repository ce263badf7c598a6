"""The lab's worked example: the whole parameters of six layers over one step that frees none after its forward."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from hwfsdp.features.fully_shard import fully_shard
from hwfsdp.observe.eventlog import EventLog
from hwfsdp.plot import sheet, style
from hwfsdp.plot.style import Axes, Figure
from hwfsdp.virtual.run import simulate

LAYERS, WIDTH, ROWS, RANKS, DEVICE = 6, 256, 64, 2, "h100"
LEFT, ROW, BELOW = 0.8, 0.32, 0.5  # inches: names of the rows, a row, the axis of time
HEIGHT, INNER = 0.7, 0.36  # of a bar, of the boxes on it, in rows


def start() -> Callable[[], None]:
    """Make the step of exercises/lab/example/train.py."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    for layer in model:
        fully_shard(layer, reshard_after_forward=False)
    fully_shard(model)
    model.to_empty(device="cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.zeros(ROWS, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def draw(width: float) -> Figure:
    log = simulate(start, RANKS, DEVICE).log
    head = sheet.head(
        "Whole parameters of the layers of rank 0, over one step",
        f"In the middle, all {LAYERS} layers are whole at the same time.",
        [
            sheet.key(style.look_of_op("all_gather"), "being gathered"),
            sheet.key(style.look_of_kind("unsharded_param"), "whole"),
            sheet.key(style.look_of_op("forward"), "its forward"),
            sheet.key(style.look_of_op("backward"), "its backward"),
            sheet.line_key("freed", color=style.GREYS[3], marker="v", linestyle="none"),
        ],
        width - sheet.head_left(width, LEFT) - sheet.MARGIN,
    )
    figure = head.figure(width, LAYERS * ROW + BELOW, sheet.head_left(width, LEFT))
    axes = sheet.axes_at(figure, LEFT, BELOW, width - LEFT - sheet.MARGIN, LAYERS * ROW)
    begin = min(e.start_us for e in log.events)
    for layer in range(LAYERS):
        _draw_layer(axes, log, layer, begin)
    style.open_frame(axes)
    axes.set_ylim(LAYERS - 0.5, -0.6)
    axes.set_yticks(range(LAYERS), [f"layer {layer}" for layer in range(LAYERS)])
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0.0, (max(e.end_us for e in log.events) - begin) / 1e3)
    axes.set_xlabel("ms since the step began, on a virtual GPU", fontsize=style.TEXT_SIZE)
    return figure


def _draw_layer(axes: Axes, log: EventLog, layer: int, begin: float) -> None:
    own = [e for e in log.events if e.owner == str(layer)]
    (gather,) = (e for e in own if e.op == "all_gather")
    freed = max(e.end_us for e in own if e.op == "free")
    axes.axhline(layer, color=style.GREYS[2], linewidth=0.8, zorder=0.5)
    _bar(axes, layer, HEIGHT, gather.start_us - begin, gather.end_us - begin, style.look_of_op("all_gather"))
    _bar(axes, layer, HEIGHT, gather.end_us - begin, freed - begin, style.look_of_kind("unsharded_param"))
    for event in own:
        if event.op in ("forward", "backward"):
            _bar(axes, layer, INNER, event.start_us - begin, event.end_us - begin, style.look_of_op(event.op))
    axes.plot([(freed - begin) / 1e3], [layer - 0.5], "v", color=style.GREYS[3], markersize=5, clip_on=False)


def _bar(axes: Axes, layer: int, height: float, begin: float, end: float, look: style.Look) -> None:
    at, size = (begin / 1e3, layer - height / 2), ((end - begin) / 1e3, height)
    sheet.add_box(axes, at, size, look, f"layer {layer}", zorder=2.0 + (height == INNER))
