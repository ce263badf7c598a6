"""05: what five strategies cost, by `accounting`: bytes of model states on a rank, and bytes that it sends in a step."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hwfsdp.course.pictures.drawing import caption, headline, patches
from hwfsdp.observe.accounting import GroupSizes, StateBytes, Strategy, bytes_sent, mesh_shape
from hwfsdp.observe.accounting import model_state_bytes, strategy_traffic
from hwfsdp.plot import sheet, style

# ranks; of them in one host, for HSDP; the ZeRO paper's example
RANKS, SHARDS, PARAMETERS = 64, 8, 7_500_000_000
SHAPES = [(PARAMETERS,)]
GIB = 2**30
MIXED = StateBytes(2, 2, 12)  # bytes per element: bf16 parameters and gradients, Adam with an fp32 copy
NAMES = {
    Strategy.DDP: "DDP",
    Strategy.ZERO1: "ZeRO-1",
    Strategy.ZERO2: "ZeRO-2",
    Strategy.ZERO3: "ZeRO-3",
    Strategy.HSDP: f"HSDP\n{RANKS // SHARDS} × {SHARDS}",
}
STATES = {  # looks of the kinds of memory that they are
    "parameters": style.look_of_kind("sharded_param"),
    "gradients": style.look_of_kind("sharded_grad"),
    "optimizer": style.look_of_kind("optimizer_state"),
}
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")


def draw() -> Figure:
    """Left bytes that a rank holds, right bytes that it sends; a bar for each strategy."""
    figure = sheet.new_figure(sheet.PAGE, 3.9)
    left = figure.add_axes((0.07, 0.155, 0.40, 0.62))
    right = figure.add_axes((0.56, 0.155, 0.40, 0.62))
    held = [_states(strategy) for strategy in Strategy]
    _draw_bars(left, "Model states of a rank, GiB", held, STATES)
    sent = [_sent(strategy) for strategy in Strategy]
    looks = {op.replace("_", "-"): style.look_of_op(op) for op in COLLECTIVES}
    _draw_bars(right, "Sent by a rank in a step, GiB", sent, looks)
    text = f"{PARAMETERS / 1e9:g} billion parameters on {RANKS} ranks, mixed precision with Adam"
    caption(figure, text, 0.02, style.TEXT_SIZE)
    return figure


def _states(strategy: Strategy) -> list[int]:
    return list(model_state_bytes(SHAPES, strategy, RANKS, SHARDS, per_element=MIXED))


def _sent(strategy: Strategy) -> list[int]:
    traffic = strategy_traffic([GroupSizes(SHAPES, 2, 2)], strategy, RANKS, SHARDS)
    sent = bytes_sent(traffic, mesh_shape(strategy, RANKS, SHARDS))
    return [sent[collective] for collective in COLLECTIVES]


def _draw_bars(axes: Axes, title: str, stacks: list[list[int]], looks: dict[str, style.Look]) -> None:
    """One bar per strategy, its parts from the bottom up, the sum above; the names of the parts above all."""
    style.open_frame(axes)
    headline(axes, title, 40, loc="center", weight="bold")
    for place, parts in enumerate(stacks):
        bottom = 0.0
        for part, look in zip(parts, looks.values(), strict=True):
            drawn: dict[str, Any] = {
                "color": look.color,
                "edgecolor": style.edge_of(look),
                "hatch": look.hatch,
            }
            axes.bar(place, part / GIB, 0.7, bottom, linewidth=0.5, **drawn)
            bottom += part / GIB
        above: dict[str, Any] = {
            "textcoords": "offset points",
            "ha": "center",
            "fontsize": style.TEXT_SIZE + 1,
        }
        axes.annotate(f"{bottom:.3g}", (place, bottom), (0, 3), **above)
    axes.set_xticks(range(len(stacks)), list(NAMES.values()))
    axes.tick_params(axis="x", length=0, labelsize=style.TEXT_SIZE + 0.5)
    axes.set_xlim(-0.6, len(stacks) - 0.4)
    axes.set_ylim(0.0, 1.1 * max(map(sum, stacks)) / GIB)
    axes.legend(
        handles=patches(looks), loc="lower center", bbox_to_anchor=(0.5, 1.03), ncol=3, frameon=False,
        fontsize=style.TEXT_SIZE, columnspacing=1.0, handletextpad=0.4, handlelength=1.4,
    )  # fmt: skip
