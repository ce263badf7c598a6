"""09 Forward prefetch: what must hold.

`host(model)` runs a step of your file on a virtual host, one rank of eight: a simulated machine that computes by itself, as a CPU does.
It starts nothing while it computes, so a gather hides only behind compute that comes after its start. Times are calculated, and the
same on every computer.

    host(WIDE)          a training step
    host(EVALUATION)    a forward without gradients
    ranks(3)            three processes that train with numbers
"""

import pytest

from hwfsdp.course import laws, timing
from hwfsdp.course.machines import EVALUATION, NARROW, WIDE
from hwfsdp.course.scenarios import Scenario

pytestmark = pytest.mark.exercise("09", title="Forward prefetch", file="my_fsdp.py")

CHANGING = Scenario("a layer that an evaluation leaves out", "changing", evaluated=True)
LEFT_OUT = Scenario("a step that leaves layers out", "wide and shortened", micros=4)
SIX_BLOCKS = Scenario("a stack of six blocks", "wide and stack")
SLOWER = 1.2  # times the best schedule, because a file also copies
WAYS = {  # to gather ahead → exposed ms of a forward's gathers, and MB alive at once
    "on demand": (69, 2.1),
    "one ahead": (14, 2.4),
    "two ahead": (14, 3.2),
    "all at once": (14, 5.3),
}


def gathers_start_ahead(step, narrow):
    """Nothing races, and in a forward, only the first unit's gather is exposed.

    A gather is exposed while it travels and no unit computes. Work whose result nobody needs hides nothing, and costs time.
    """
    for each in (narrow, step):
        timing.no_races(each, "forward")
        timing.computes_with_what_travels(each, "forward")
    timing.exposed(step, "forward", at_most=1.5 * step.gather_us, misconception="not-prefetched")
    best = step.compute_us("forward") + step.gather_us
    timing.duration(step, "forward", at_most=SLOWER * best, misconception="not-prefetched")


@pytest.mark.points(3, ask="What does the host do before it starts the next gather?")
def test_exposed(gpu, host, measured):
    """The next gather starts before this unit computes, with and without gradients."""
    narrow, step, evaluation = gpu(NARROW), host(WIDE), host(EVALUATION)
    measured("board of gathers ahead", timing.board(evaluation, WAYS))
    gathers_start_ahead(step, narrow)
    gathers_start_ahead(evaluation, narrow)


@pytest.mark.points(1, ask="Which rows did that gather send, and what has changed them since?")
def test_fresh(ranks, held, gpu, host, seed):
    """An unused gather is not used after the next update, and leaves no memory.

    Before each update, an evaluation leaves out one layer. So your file may gather a layer that does not run.
    """
    found, left, narrow, step = ranks(3).train(CHANGING, seed), held(LEFT_OUT), gpu(NARROW), host(WIDE)
    laws.same_numbers(found, CHANGING, seed)
    laws.few_alive(left, LEFT_OUT, "after", kind="kept-alive")
    gathers_start_ahead(step, narrow)  # a file that gathers nothing ahead has nothing left, which is no merit


@pytest.mark.points(1, ask="Which unit does your file expect after the last unit of a forward?")
def test_order(gpu, host):
    """Each unit is gathered once in a forward: a gather ahead is used, not repeated."""
    narrow, step = gpu(NARROW), host(WIDE)
    timing.gathered_once(step, "forward")
    gathers_start_ahead(step, narrow)


@pytest.mark.points(2, ask="How many units are whole, or on their way, while one computes?")
def test_peak(gpu, host, held):
    """One unit is gathered ahead, no more.

    `held` counts bytes besides rows, in units of a block of six. In a forward, two: the block that computes, and the buffer of its own
    gather or of the next one.
    """
    narrow, evaluation, found = gpu(NARROW), host(EVALUATION), held(SIX_BLOCKS)
    laws.few_alive(found, SIX_BLOCKS, "forward", 2, "unbounded-prefetch")
    gathers_start_ahead(evaluation, narrow)
