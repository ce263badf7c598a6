"""07: three micro-batches under three settings, recorded on two ranks; events in the order in which rank 0 issued them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import nn

from hwfsdp.course.pictures.drawing import box, clear, headline
from hwfsdp.features.door import fully_shard
from hwfsdp.features.steering import FSDPModule
from hwfsdp.launcher.ranks import launch
from hwfsdp.observe.events import Event, active
from hwfsdp.observe.recording import record
from hwfsdp.plot import style

LAYERS, MICRO_BATCHES, WIDTH = 3, 3, 8
GROUP_BYTES = (WIDTH * WIDTH + WIDTH) * 4
ROWS = {"all_gather": 2.0, "forward": 1.0, "backward": 1.0, "reduce_scatter": 0.0}  # y of the bars
ALIVE = -1.75  # y of the line for no whole group


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
    """A strip for each setting."""
    recordings = launch(record_settings, 2)[0]
    figure = Figure(figsize=(10.0, 8.2), dpi=140)
    longest = max(len(_drawn(recorded)) for recorded in recordings)
    for index, (setting, recorded) in enumerate(zip(SETTINGS, recordings, strict=True)):
        axes = figure.add_axes((0.125, 0.695 - 0.315 * index, 0.865, 0.235))
        _draw_strip(axes, setting, recorded, longest)
    larger: dict[str, Any] = {"fontsize": style.TEXT_SIZE + 1, "color": style.GREYS[3]}
    figure.text(0.125, 0.018, "order of issue on rank 0 →", **larger)
    return figure


def _drawn(recorded: Recorded) -> list[Event]:
    """What has a bar: collectives, and the compute of the layers, without the root's span around it."""
    return [e for e in recorded.events if e.op in ROWS and e.owner.isdecimal()]


def _draw_strip(axes: Axes, setting: Setting, recorded: Recorded, longest: int) -> None:
    events = _drawn(recorded)
    counts = [sum(e.op == op for e in events) for op in ("all_gather", "reduce_scatter")]
    title = f"{setting.title}: {counts[0]} gathers, {counts[1]} reductions"
    clear(axes, (0, longest), (ALIVE, 3.1))
    headline(axes, title, 20)
    for place, event in enumerate(events):
        at, color = (place + 0.06, ROWS[event.op]), style.look_of_op(event.op).color
        box(axes, at, color, event.owner, size=(0.88, 0.8), fontsize=9, edgecolor="none")
    places = [sum(e.seq < end for e in events) for end in (0, *recorded.ends)]
    for micro, (start, stop) in enumerate(zip(places, places[1:], strict=False)):
        name = f"micro-batch {micro + 1}" + (", synchronized" if micro == MICRO_BATCHES - 1 else "")
        axes.text((start + stop) / 2, 3.15, name, ha="center", va="bottom", fontsize=style.TEXT_SIZE + 1)
        axes.plot([stop, stop], [ALIVE, 3.4], color=style.GREYS[2], linewidth=0.8, linestyle=(0, (4, 3)))
    heights = [ALIVE + 0.42 * _alive(recorded, event) for event in events] + [ALIVE]
    look: dict[str, Any] = {"step": "post", "color": style.SKY_BLUE, "linewidth": 0}
    axes.fill_between(range(len(heights)), ALIVE, heights, **look)
    names = ("all-gather", "compute", "reduce-scatter", "whole groups\nalive (0 to 3)")
    axes.set_yticks((2.4, 1.4, 0.4, ALIVE + 0.6), names, fontsize=style.TEXT_SIZE + 1)
    axes.tick_params(length=0)
    axes.axhline(ALIVE, color=style.GREYS[2], linewidth=0.8)


def _alive(recorded: Recorded, event: Event) -> int:
    """Whole groups when this event was issued."""
    signs = {"alloc": 1, "free": -1}
    held = sum(signs.get(e.op, 0) * e.bytes for e in recorded.events if e.seq < event.seq)
    return round(held / GROUP_BYTES)
