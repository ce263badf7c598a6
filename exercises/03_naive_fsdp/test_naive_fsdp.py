"""03 Naive FSDP: what must hold.

`ranks(3)` starts three processes with your file. They train a small model and send back what they saw: losses, gradients, rows,
collectives. The tests compare this with the same model without sharding. `held(model)` counts the bytes of a step on a simulated
machine. Sizes and numbers change with the seed, and the ranks can rarely share the rows evenly.

    pytest exercises/03_naive_fsdp                   all of this
    pytest exercises/03_naive_fsdp -k trains --pdb   one test; stop where it fails, with the facts of all ranks in `found`
    pytest exercises/03_naive_fsdp -s                see what the ranks print
"""

import pytest

from hwfsdp.course import laws
from hwfsdp.course.scenarios import PLAIN, Scenario

pytestmark = pytest.mark.exercise("03", title="Naive FSDP", file="my_fsdp.py")

ADDED = Scenario("gradients of two backwards", "stack", steps=2, micros=2)
DEEP = Scenario("a stack of six blocks", "wide and stack")


@pytest.mark.points(2, ask="What does a rank need from the other ranks' batches, and when can it get this?")
def test_replicate(ranks, seed):
    """With whole parameters, every rank gets the mean gradient."""
    found = ranks(3).replicate(PLAIN, seed)
    laws.same_whole_gradients(found, PLAIN, seed)
    laws.returned("replicate", found)


@pytest.mark.points(2, ask="What does an optimizer find under each name, on each rank?")
def test_rows(ranks, seed):
    """Every parameter keeps its names, and is now this rank's rows of the old parameter."""
    found = ranks(3).shard(PLAIN, seed)
    laws.same_rows(found, PLAIN, seed)
    laws.returned("fully_shard", found)


@pytest.mark.points(
    2, ask="With which parameters does a module compute, and which are under its names before and after?"
)
def test_forward(ranks, seed):
    """A forward gathers what it needs, and gives the unsharded model's loss."""
    found = ranks(3).train(PLAIN, seed)
    laws.same_losses(found, PLAIN, seed)
    laws.gathered(found, PLAIN, "forward")


@pytest.mark.points(
    4, ask="Follow one gradient from autograd to the rows of one rank: what happens to it on the way?"
)
@pytest.mark.parametrize(("model", "world_size"), [(PLAIN, 3), (ADDED, 3), (PLAIN, 2), (PLAIN, 1)], ids=str)
def test_trains(ranks, seed, model, world_size):
    """It trains: losses and gradients of all steps equal the unsharded model's, and the optimizer's objects stay."""
    found = ranks(world_size).train(model, seed)
    laws.same_objects(found, model)
    laws.same_numbers(found, model, seed)


@pytest.mark.points(
    2, ask="Draw a line for the life of each whole parameter: where does it begin, and where does it end?"
)
def test_memory(held):
    """Few units are whole at a time, with few whole gradients; after a step, nothing is whole.

    The bound: in a forward, the unit that computes and those around it, and a buffer as large as a unit. In a backward, the same, the
    whole gradients of these units, and a second buffer. A file that frees, or reduces, only at the end of the backward misses it by far.
    """
    laws.few_whole(held(DEEP), DEEP)
