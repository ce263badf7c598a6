"""08 Streams: what must hold.

`gpu(model)` runs a step of your file on a virtual GPU, one rank of eight. Its times are calculated. Streams run at the same
time there, as on a real GPU, and the host never waits. Every operator, collective, wait and release of memory is an
event of `step.log`. So the tests see a race each time, and get the same times on every computer.

    gpu(NARROW)    small layers, and updates after one and after two micro-batches: all races of a step show
    gpu(WIDE)      five layers, which compute twice as long as their bytes travel: what overlaps, and for how long

Waits come first: a file that waits for nothing is fast. So times count only where nothing races, and only if the step computes with
what it gathered. A file that overlaps nothing cannot race, which is no merit.

    pytest exercises/08_streams -k races --pdb    stop where a race is found; `race.first` and `race.second` are its events
"""

import pytest

from hwfsdp.course import laws, timing
from hwfsdp.course.machines import NARROW, WIDE
from hwfsdp.course.scenarios import Scenario

pytestmark = pytest.mark.exercise("08", title="Streams", file="my_fsdp.py")

SIX_BLOCKS = Scenario("a stack of six blocks", "wide and stack")
SLOWER = 1.2  # times the best schedule, because a file also copies


def order_is_right(steps, part=""):
    """Every operator waits for what it needs, and the step computes with what travels."""
    for step in steps:
        timing.no_races(step, part)
    for step in steps:
        timing.computes_with_what_travels(step, part)


def gathers_hide(step):
    """In a forward, only the first unit's gather is exposed, and the time is the sum of this gather and the computation.

    A gather is exposed while it travels and no unit computes. Work whose result nobody needs hides nothing.
    """
    timing.exposed(step, "forward", at_most=1.5 * step.gather_us)
    timing.duration(step, "forward", at_most=SLOWER * (step.compute_us("forward") + step.gather_us))


@pytest.mark.points(4, ask="Draw an arrow from the write of a buffer to its read: which event is that arrow?")
def test_races(gpu):
    """Every read and write of memory waits for the ones before it, and no memory is given away while it is read."""
    steps = [gpu(NARROW), gpu(WIDE)]
    order_is_right(steps)
    gathers_hide(steps[1])


@pytest.mark.points(3, ask="What does compute wait for before this unit, and what does the gather wait for?")
def test_overlap(gpu):
    """The gathers of a forward travel while it computes."""
    steps = [gpu(NARROW), gpu(WIDE)]
    order_is_right(steps, "forward")
    gathers_hide(steps[1])


@pytest.mark.points(2, ask="How many buffers exist at once, and what frees each of them?")
def test_memory(gpu, held):
    """One unit is gathered ahead, no more, and few whole gradients wait for their reduction.

    `held` counts bytes besides rows, in units of a block of six. In a forward, two: the block that computes, and the buffer of its own
    gather or of the next one. In a backward, two more: the block's whole gradients, and the buffer of their reduction.
    """
    steps, found = [gpu(NARROW), gpu(WIDE)], held(SIX_BLOCKS)
    laws.few_alive(found, SIX_BLOCKS, "forward", 2, "unbounded-prefetch")
    laws.few_alive(found, SIX_BLOCKS, "backward", 4, "not-freed")
    order_is_right(steps, "forward")
    gathers_hide(steps[1])
