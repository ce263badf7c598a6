"""06: one weight and its gradient in a step, under three policies: in what dtype they are where, and how many bytes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hwfsdp.core.precision import MixedPrecisionPolicy
from exercise_pictures.drawing import headline, say
from hwfsdp.features.fully_shard import fully_shard
from hwfsdp.features.schedule import checked_state
from hwfsdp.launcher.launch import launch
from hwfsdp.observe.recording import record
from hwfsdp.plot import sheet, style
from hwfsdp.plot.style import Axes, Figure

WIDTH, RANKS = 512, 2
FP32, BF16 = torch.float32, torch.bfloat16
POLICIES = {
    "no policy": MixedPrecisionPolicy(),
    "param bf16": MixedPrecisionPolicy(BF16),
    "param bf16, reduce fp32": MixedPrecisionPolicy(BF16, FP32),
}
LOOKS = {"float32": style.Look(style.BLUE), "bfloat16": style.Look(style.ORANGE, "///")}
NAMES = {
    "shard": "shard,\nwhich is kept",
    "all_gather": "all-gather",
    "whole": "whole weight,\nwhile it is there",
    "gradient": "whole gradient",
    "reduce_scatter": "reduce-scatter",
    "sharded gradient": "gradient of the shard,\nfor the optimizer",
}


class Stop(NamedTuple):
    """Where a weight or its gradient comes by: the dtype there, and bytes."""

    name: str
    dtype: str
    nbytes: int


def record_stops() -> list[list[Stop]]:
    """On a rank: what a weight and its gradient come by under each policy, in order."""
    return [_stops(policy) for policy in POLICIES.values()]


def _stops(policy: MixedPrecisionPolicy) -> list[Stop]:
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    fully_shard(layer, mp_policy=policy, reshard_after_forward=True)
    [group] = checked_state(layer, "record_stops").groups
    x, found = torch.ones(2, WIDTH), []
    layer(x)  # now there is a whole parameter to watch
    whole = group.params[0].unsharded_param
    assert whole is not None and isinstance(layer.weight, nn.Parameter)
    handle = whole.register_hook(lambda grad: found.append(_stop("gradient", grad)))
    with record() as log:
        layer(x).sum().backward()
    handle.remove()
    moved = {e.op: Stop(e.op, e.dtype, e.bytes) for e in log.select("all_gather", "reduce_scatter")}
    grad = layer.weight.grad
    assert isinstance(grad, DTensor)
    return [
        _stop("shard", group.params[0].local),
        moved["all_gather"],
        _stop("whole", whole),
        *found,
        moved["reduce_scatter"],
        _stop("sharded gradient", grad.to_local()),
    ]


def _stop(name: str, tensor: Tensor) -> Stop:
    return Stop(name, str(tensor.dtype).removeprefix("torch."), tensor.numel() * tensor.element_size())


def draw() -> Figure:
    """A column for each policy, a bar for each stop, as long as it has bytes."""
    columns = launch(record_stops, RANKS)[0]
    longest = max(stop.nbytes for stops in columns for stop in stops)
    left, each, height = 1.5, 2.12, 3.0  # inches
    text = f"nn.Linear({WIDTH}, {WIDTH}, bias=False) on {RANKS} ranks, recorded on rank 0; time goes down."
    keys = [sheet.key(look, name, style.WHITE) for name, look in LOOKS.items()]
    head = sheet.head("One weight in a step, under three policies", text, keys, 6.0)
    figure = sheet.new_figure(sheet.PAGE, head.height + height + 0.35)
    head.draw(figure, left)
    for index, (title, stops) in enumerate(zip(POLICIES, columns, strict=True)):
        axes = sheet.axes_at(figure, left + index * (each + 0.08), 0.1, each, height)
        _draw_column(axes, title, stops, longest, named=index == 0)
    return figure


def _draw_column(axes: Axes, title: str, stops: list[Stop], longest: int, named: bool) -> None:
    headline(axes, title, 4, fontsize=style.TEXT_SIZE + 1)
    for place, stop in enumerate(stops):
        look = LOOKS[stop.dtype]
        axes.barh(-place, stop.nbytes, 0.62, color=look.color, hatch=look.hatch, edgecolor=style.WHITE)
        text = f" {style.format_bytes(stop.nbytes)}"
        say(axes, (stop.nbytes, -place), text, color=style.BLACK)
    axes.set_yticks([-place for place in range(len(stops))], [NAMES[s.name] if named else "" for s in stops])
    axes.set_xticks([])
    axes.set_xlim(0, 1.4 * longest)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.spines["left"].set_color(style.GREYS[2])
    axes.tick_params(length=0, labelsize=style.TEXT_SIZE)
