"""The cases for the homework: scenarios of the stations' kit.

The cases of the tasks and of the first bonuses need no more than the homework's skeleton: rows that the ranks divide, and modules
sharded side by side. The cases of our own bonuses have a sharded root, and sizes that the ranks do not divide.
"""

from __future__ import annotations

from hwfsdp.course.stations.course import BF16, FP32, Together
from hwfsdp.course.stations.scenarios import Scenario

LOW = (("param_dtype", BF16), ("reduce_dtype", FP32))

PLAIN = Scenario("an even model", "even")
MIXED = Scenario("bf16, reduced in fp32", "even", policy=LOW)
DEEP = Scenario("a deep model", "even and deep")
RECOMPUTED = Scenario("checkpointing, non-reentrant", "even and recomputed", steps=2)
REENTRANT = Scenario("checkpointing, reentrant", "even and recomputed, reentrant", steps=2)
WHOLE = Scenario("reshard_after_forward=False", "even", reshard=False, steps=2)
KEPT = Scenario("set_reshard_after_backward(False)", "even", micros=4, keep=True, steps=2)
SUMMED = Scenario("set_requires_gradient_sync(False)", "even", micros=4, sync_last=True, steps=2)
SUMMED_MIXED = SUMMED._replace(name=f"{SUMMED.name}, bf16 reduced in fp32", policy=LOW)
EVALUATED = Scenario("an even model, evaluated in between", "even", steps=2, peeked=True)
UNEVEN = Scenario("an uneven model", "gained", peeked=True)
CASTS = Scenario("an uneven model in bf16", "gained", peeked=True, policy=(*LOW, ("output_dtype", FP32)))
FROZEN = Scenario("frozen parameters", "gained and frozen")
TIED = Scenario("tied parameters", "tied")
NESTED = Scenario("nested modules", "gained and nested")

TASKS = Together((PLAIN, MIXED))
BONUSES = Together(
    (
        *(RECOMPUTED, REENTRANT, WHOLE, KEPT, SUMMED, SUMMED_MIXED),
        *(UNEVEN, CASTS, FROZEN, TIED, NESTED, EVALUATED),
    )
)
