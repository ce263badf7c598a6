"""16 Race: what must hold.

`cluster(model)` runs a step of your file on 64 virtual H100s, one rank of them. `FSDP2` has the figures of the same step with
`hwfsdp.fully_shard`, which moves the same bytes in the same order as FSDP2. Both are calculated, and the same on every computer.
"""

import pytest

from hwfsdp.course import timing
from hwfsdp.course.machines import NARROW, RACE, WIDE

pytestmark = pytest.mark.exercise("16", title="Race", file="my_fsdp.py")

BOUND = 1.15  # times FSDP2's step, and its peak
FSDP2 = {  # model → µs of a step, and bytes alive at once
    "wide": (122_167, 2_268_359_944),
    "deep": (12_213, 584_398_920),
    "vocab": (28_375, 1_509_422_728),
}


@pytest.mark.points(1, ask="Which bytes does no compute hide on 64 GPUs, and could they start earlier?")
@pytest.mark.parametrize("model", RACE.values(), ids=str)
def test_step(gpu, cluster, measured, model):
    """On each model a step takes at most 1.15 times as long as FSDP2's, without races."""
    narrow, wide, step = gpu(NARROW), gpu(WIDE), cluster(model)
    for each in (narrow, wide, step):
        timing.no_races(each)
        timing.computes_with_what_travels(each)
    us, nbytes = FSDP2[model.name]
    measured(
        f"{model}, 64 GPUs",
        f"step {step.step_us / 1e3:.1f} ms (FSDP2 {us / 1e3:.1f}), peak {step.peak_bytes / 1e9:.2f} GB (FSDP2 {nbytes / 1e9:.2f})",
    )
    timing.raced(step, "step_us", us, BOUND, "no-overlap")


@pytest.mark.points(1, ask="Which buffers does your file keep that FSDP2 frees?")
@pytest.mark.parametrize("model", RACE.values(), ids=str)
def test_peak(cluster, model):
    """On each model, the peak of memory is at most 1.15 times FSDP2's, and the step is not slower."""
    step, (us, nbytes) = cluster(model), FSDP2[model.name]
    timing.raced(step, "peak_bytes", nbytes, BOUND, "not-freed")
    timing.raced(step, "step_us", us, BOUND, "no-overlap")
