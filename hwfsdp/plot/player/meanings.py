"""Colors and hatches of the page. All pictures have the same ones (`plot.style`)."""

from __future__ import annotations

from hwfsdp.observe.memory import KINDS
from hwfsdp.plot import style

OPS = {op: style.look_of_op(op) for op in style.DRAWN_OPS}
MEMORY = {kind: style.look_of_kind(kind) for kind in KINDS}
STATES = {
    "sharded": MEMORY["sharded_param"],
    "freed": MEMORY["sharded_param"],
    "gathering": OPS["all_gather"],
    "full": MEMORY["unsharded_param"],
    "reducing": OPS["reduce_scatter"],
}
