"""10 Backward prefetch, reductions behind: what must hold.

`host(model)` runs a step of your file on a virtual host, one rank of eight: a simulated machine that computes by itself, as a CPU does.
It starts nothing while it computes, so bytes hide only behind compute that comes after their start. Times are calculated, and the same
on every computer.

    host(WIDE)      five blocks
    host(NESTED)    five blocks, each with a unit inside
    gpu(NARROW)     a virtual GPU, which shows every race
    ranks(3)        three processes that train with numbers
"""

import pytest

from hwfsdp.course import laws, timing
from hwfsdp.course.machines import NARROW, NESTED, WIDE
from hwfsdp.course.scenarios import Scenario

pytestmark = pytest.mark.exercise("10", title="Backward prefetch", file="my_fsdp.py")

FROZEN_INLET = Scenario("a frozen inlet", "frozen inlet", steps=2)
LOOKED_AT = FROZEN_INLET._replace(name="a frozen inlet, after a look at the loss", peeked=True)
SIX_BLOCKS = Scenario("a stack of six blocks", "wide and stack")
SLOWER = 1.2  # times the best schedule, because a file also copies


def gathers_hide(step, narrow):
    """In a backward, each unit is gathered once, and only the last unit's gather, the first of the backward, is exposed.

    A gather is exposed while it travels and no unit computes. Work whose result nobody needs hides nothing, and costs time. Reductions
    may all be exposed here.
    """
    for each in (narrow, step):
        timing.no_races(each, "backward")
        timing.computes_with_what_travels(each, "backward")
    timing.gathered_once(step, "backward")
    timing.exposed(step, "backward", at_most=1.5 * step.gather_us, misconception="not-prefetched")
    best = step.compute_us("backward") + step.gather_us + step.units * step.reduce_us
    timing.duration(step, "backward", at_most=SLOWER * best, misconception="not-prefetched")


def reductions_hide(step, narrow):
    """Only the first unit's reduction, the last of the backward, is exposed. Gathers may all be exposed here."""
    for each in (narrow, step):
        timing.no_races(each, "reduction")
        timing.computes_with_what_travels(each, "reduction")
    timing.exposed(step, "reduction", at_most=1.5 * step.reduce_us)
    best = step.compute_us("backward") + step.reduce_us + step.units * step.gather_us
    timing.duration(step, "backward", at_most=SLOWER * best)


@pytest.mark.points(3, ask="Which unit's backward comes next, and how can a unit know?")
def test_gathers(gpu, host, ranks, seed):
    """In a backward, each unit is gathered once, before the compute that hides the gather, also with units inside units."""
    narrow, step, nested = gpu(NARROW), host(WIDE), host(NESTED)
    plain, looked_at = ranks(3).train(FROZEN_INLET, seed), ranks(3).train(LOOKED_AT, seed)
    gathers_hide(step, narrow)
    timing.exposed(nested, "backward", at_most=1.15 * nested.gather_us, misconception="guessed-wrong")
    # a forward without a backward leaves nothing behind: the next backward gathers no more than without this forward
    needed = len(laws.moved(plain[0], "backward", "all_gather"))
    laws.counts(looked_at, LOOKED_AT, seed, "backward", "all_gather", needed, "guessed-wrong", "not-gathered")


@pytest.mark.points(3, ask="What does compute do while a gradient travels?")
def test_reductions(gpu, host):
    """While a unit's gradients are reduced, the next unit's backward computes."""
    narrow, step = gpu(NARROW), host(WIDE)
    reductions_hide(step, narrow)


@pytest.mark.points(2, ask="What must be over before one more reduction starts?")
def test_bound(gpu, host):
    """At most two reductions are in flight behind compute."""
    narrow, step = gpu(NARROW), host(WIDE)
    timing.in_flight(step, at_most=2)
    reductions_hide(step, narrow)


@pytest.mark.points(1, ask="Which buffers are alive at the moment of the peak?")
def test_peak(gpu, host, held, measured):
    """The memory of a step stays below its bound: one unit ahead, one reduction.

    `held` counts bytes besides rows, in units of a block of six. In a forward, two: the block that computes, and the buffer of its own
    gather or of the next one. In a backward, two more: the block's whole gradients, and the buffer of the reduction behind it.
    """
    narrow, step, found = gpu(NARROW), host(WIDE), held(SIX_BLOCKS)
    measured("virtual host", step.figures())
    laws.few_alive(found, SIX_BLOCKS, "backward", 4, "unbounded-reductions")
    laws.few_alive(found, SIX_BLOCKS, "forward", 2, "unbounded-prefetch")
    gathers_hide(step, narrow)
    reductions_hide(step, narrow)
