"""16 Race: what must hold.

`cluster(model)` runs a step of your file on 64 virtual H100s, one rank of them. `FSDP2` has the figures of the same step with
`hwfsdp.fully_shard`, which moves the same bytes in the same order as FSDP2. Both are calculated, and the same on every computer.
"""

import pytest

from hwfsdp.course import timing
from hwfsdp.course.machines import NARROW, RACE, WIDE

pytestmark = pytest.mark.exercise("16", title="Race", file="my_fsdp.py")

BOUND = 1.15  # times FSDP2's step, and its peak
FSDP2 = {  # by model
    "wide": timing.Pace(122_167, 2_268_359_944, computes_us=120_461, alone_us=1_691, operators=251),
    "deep": timing.Pace(12_213, 584_398_920, computes_us=11_556, alone_us=643, operators=631),
    "vocab": timing.Pace(28_375, 1_509_422_728, computes_us=25_597, alone_us=2_762, operators=251),
}


@pytest.mark.points(1, ask="Which bytes does no compute hide on 64 GPUs, and could they start earlier?")
@pytest.mark.parametrize("model", RACE.values(), ids=str)
def test_step(gpu, cluster, measured, model):
    """On each model a step takes at most 1.15 times as long as FSDP2's, without races."""
    step, theirs = right_step(gpu, cluster, model), FSDP2[model.name]
    mine = (step.step_us / 1e3, step.peak_bytes / 1e9)
    measured(
        f"{model}, 64 GPUs",
        f"step {mine[0]:.1f} ms (FSDP2 {theirs.step_us / 1e3:.1f}), peak {mine[1]:.2f} GB (FSDP2 {theirs.peak_bytes / 1e9:.2f})",
    )
    timing.as_fast(step, theirs, BOUND)


@pytest.mark.points(1, ask="Which buffers does your file keep that FSDP2 frees?")
@pytest.mark.parametrize("model", RACE.values(), ids=str)
def test_peak(gpu, cluster, model):
    """On each model, the peak of memory is at most 1.15 times FSDP2's, and the step is right and fast enough."""
    step, theirs = right_step(gpu, cluster, model), FSDP2[model.name]
    timing.as_small(step, theirs, BOUND)
    timing.as_fast(step, theirs, BOUND)


def right_step(gpu, cluster, model):
    """Run a step on 64 GPUs. It has no races and computes with what travels, and so do steps of two small models with an optimizer."""
    narrow, wide, step = gpu(NARROW), gpu(WIDE), cluster(model)
    for each in (narrow, wide, step):
        timing.no_races(each)
        timing.computes_with_what_travels(each)
    return step
