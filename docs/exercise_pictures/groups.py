"""05: what five strategies cost, by `accounting`: bytes of model states on a rank, and bytes that it sends in a step."""

from __future__ import annotations


from exercise_pictures.drawing import caption, headline, stacks
from hwfsdp.observe.accounting import GroupSizes, StateBytes, Strategy, bytes_sent, mesh_shape
from hwfsdp.observe.accounting import model_state_bytes, strategy_traffic
from hwfsdp.plot import sheet, style
from hwfsdp.plot.style import Figure

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
    left, right = (figure.add_axes((x, 0.155, 0.40, 0.62)) for x in (0.07, 0.56))
    headline(left, "Model states of a rank, GiB", 40, loc="center", weight="bold")
    stacks(left, {NAMES[strategy]: _states(strategy) for strategy in Strategy}, STATES)
    headline(right, "Sent by a rank in a step, GiB", 40, loc="center", weight="bold")
    looks = {op.replace("_", "-"): style.look_of_op(op) for op in COLLECTIVES}
    stacks(right, {NAMES[strategy]: _sent(strategy) for strategy in Strategy}, looks)
    text = f"{PARAMETERS / 1e9:g} billion parameters on {RANKS} ranks, mixed precision with Adam"
    caption(figure, text, 0.02, style.TEXT_SIZE)
    return figure


def _states(strategy: Strategy) -> list[float]:
    held = model_state_bytes(SHAPES, strategy, RANKS, SHARDS, per_element=MIXED)
    return [nbytes / GIB for nbytes in held]


def _sent(strategy: Strategy) -> list[float]:
    traffic = strategy_traffic([GroupSizes(SHAPES, 2, 2)], strategy, RANKS, SHARDS)
    sent = bytes_sent(traffic, mesh_shape(strategy, RANKS, SHARDS))
    return [sent[collective] / GIB for collective in COLLECTIVES]
