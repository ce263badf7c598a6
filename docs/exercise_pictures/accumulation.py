"""07: three micro-batches under three settings, recorded on two ranks; events in the order in which rank 0 issued them.

A collective reaches from its call to the wait for it (`order_of_issue`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from exercise_pictures.drawing import headline
from order_of_issue import Issued, draw_issued, issued
from hwfsdp.features.fully_shard import fully_shard
from hwfsdp.features.module import FSDPModule
from hwfsdp.launcher.launch import launch
from hwfsdp.observe.events import Event, active
from hwfsdp.observe.recording import record
from hwfsdp.plot import sheet, style
from hwfsdp.plot.style import Axes, Figure

LAYERS, MICRO_BATCHES, WIDTH = 3, 3, 8
GROUP_BYTES = (WIDTH * WIDTH + WIDTH) * 4
WHOLE, TITLE = style.Look(style.YELLOW), style.TEXT_SIZE + 1.0
OPS = ("all_gather", "forward", "backward", "reduce_scatter")  # of the legend


class Setting(NamedTuple):
    """`reshard`: after forward. keep: not after backward, but for the last."""

    title: str
    reshard: bool
    keep: bool


SETTINGS = (
    Setting("ZeRO-3: reshard_after_forward=True", True, False),
    Setting("ZeRO-2: reshard_after_forward=False", False, False),
    Setting("ZeRO-2, and set_reshard_after_backward(False) before the last micro-batch", False, True),
)


class Recorded(NamedTuple):
    """`events` of rank 0; `ends`: how many there were after each micro-batch."""

    events: list[Event]
    ends: list[int]


def record_settings() -> list[Recorded]:
    """On a rank: every setting once to warm up, so that all memory is there to be allocated again, and once recorded."""
    found = []
    for setting in SETTINGS:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        for module in (*model, model):
            fully_shard(module, reshard_after_forward=setting.reshard)
        _step(model, setting)
        with record() as log:
            ends = _step(model, setting)
        found.append(Recorded(log.events, ends))
    return found


def _step(model: nn.Module, setting: Setting) -> list[int]:
    assert isinstance(model, FSDPModule)
    ends = []
    for micro in range(MICRO_BATCHES):
        last = micro == MICRO_BATCHES - 1
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last or not setting.keep)
        model(torch.ones(2, WIDTH, requires_grad=True)).sum().backward()
        recorder = active()
        ends.append(len(recorder.drafts) if recorder else 0)
    return ends


def draw() -> Figure:
    """A strip for each setting, and below it how many groups were whole."""
    recordings = launch(record_settings, 2)[0]
    found = [_drawn(recorded) for recorded in recordings]
    keys = [sheet.key(style.look_of_op(op), op) for op in OPS] + [sheet.key(WHOLE, "whole groups")]
    text = "Order of issue on rank 0, from left to right. A collective reaches to the wait for it."
    left, strip, alive, gap = 1.1, 0.72, 0.5, 0.62  # inches
    head = sheet.head("Three micro-batches of three layers", text, keys, sheet.PAGE - left - sheet.MARGIN)
    bottom = len(SETTINGS) * (strip + alive + gap) + 0.1
    figure = sheet.new_figure(sheet.PAGE, head.height + bottom)
    head.draw(figure, left)
    width, longest = sheet.PAGE - left - sheet.MARGIN, max(map(len, found))
    for setting, recorded, events in zip(SETTINGS, recordings, found, strict=True):
        bottom -= strip + gap
        axes = sheet.axes_at(figure, left, bottom, width, strip)
        draw_issued(axes, events, longest)
        counts = [sum(each.event.op == op for each in events) for op in ("all_gather", "reduce_scatter")]
        headline(axes, f"{setting.title}: {counts[0]} gathers, {counts[1]} reductions", 18, fontsize=TITLE)
        bottom -= alive
        below = sheet.axes_at(figure, left, bottom, width, alive)
        _draw_alive(below, recorded, events, longest)
        _draw_micro_batches((axes, below), recorded, events)
    return figure


def _drawn(recorded: Recorded) -> list[Issued]:
    """Collectives, and the compute of the layers, without the root's span around it."""
    return issued([e for e in recorded.events if e.owner.isdecimal()])


def _draw_micro_batches(strips: tuple[Axes, Axes], recorded: Recorded, events: Sequence[Issued]) -> None:
    places = [sum(each.event.seq < end for each in events) for end in (0, *recorded.ends)]
    for micro, (start, stop) in enumerate(zip(places, places[1:], strict=False)):
        sheet.note(strips[0], f"micro-batch {micro + 1}", ((start + stop) / 2, 0.0), (0, 6), ha="center")
        for axes in strips:
            axes.axvline(stop, color=style.GREYS[2], linewidth=0.8, linestyle=(0, (4, 3)), clip_on=False)


def _draw_alive(axes: Axes, recorded: Recorded, events: Sequence[Issued], places: int) -> None:
    heights = [_alive(recorded, each.event) for each in events] + [0]
    axes.fill_between(range(len(heights)), 0, heights, step="post", color=WHOLE.color, linewidth=0)
    axes.set_xlim(0, places)
    axes.set_ylim(0, LAYERS + 0.3)
    style.open_frame(axes)
    axes.spines[["left"]].set_visible(False)
    axes.set_xticks([])
    axes.set_yticks([LAYERS / 2], ["whole groups\n(0 to 3)"])
    axes.tick_params(length=0)


def _alive(recorded: Recorded, event: Event) -> int:
    """Whole groups when this event was issued."""
    signs = {"alloc": 1, "free": -1}
    held = sum(signs.get(e.op, 0) * e.bytes for e in recorded.events if e.seq < event.seq)
    return round(held / GROUP_BYTES)
