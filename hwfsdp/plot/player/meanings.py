"""Colors and hatches of the page: one color per meaning, over all panes, because the panes are read side by side.

    blue        compute: forward pale, backward dark
    yellow      parameters
    orange      gradients
    purple      the optimizer and its state
    green       a gather: the collective, a group on its way, the buffer that it fills
    vermilion   a reduction of gradients: the collective, a group's gradients on their way, the buffer that it empties
    grey        copies; pale green: other communication

Parameters and gradients that are whole are plain; a rank's part of them is hatched. The other pictures are read one at a time,
and have blue for parameters, too (`plot.style`).
"""

from __future__ import annotations

from hwfsdp.observe.memory import KINDS
from hwfsdp.plot import style
from hwfsdp.plot.style import Look

_GATHER, _REDUCE = style.look_of_op("all_gather"), style.look_of_op("reduce_scatter")
_PART, _WHOLE = Look(style.YELLOW, "///"), Look(style.YELLOW)
_OTHER = style.mixed(style.GREEN, style.WHITE, 0.6)


def _of_op(op: str) -> Look:
    look = style.look_of_op(op)
    if op == "all_reduce":
        return look._replace(color=_REDUCE.color)
    return look._replace(color=_OTHER) if look.color == style.YELLOW else look


OPS = {op: _of_op(op) for op in style.DRAWN_OPS}
_PARAMS = {"sharded_param": _PART, "unsharded_param": _WHOLE}
_GRADS = {"sharded_grad": Look(style.ORANGE, "///"), "unsharded_grad": Look(style.ORANGE)}
MEMORY = {kind: style.look_of_kind(kind) for kind in KINDS} | _PARAMS | _GRADS
STATES = {"sharded": _PART, "freed": _PART, "gathering": _GATHER, "full": _WHOLE, "reducing": _REDUCE}
