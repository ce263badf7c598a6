"""04 It breaks: what must hold.

Each model of this station has something that an FSDP for simple models does not expect. `ranks(3)` trains it for two steps with your
file; the tests compare with the same model without sharding. `held(model)` counts the bytes of a step on a simulated machine. There
the models are wide and have six blocks.

    pytest exercises/04_it_breaks -k nested --pdb    one model; stop where it fails, with the facts of all ranks in `found`
"""

import pytest

from hwfsdp.course import laws
from hwfsdp.course.scenarios import BREAKING, FROZEN, NESTED, RECOMPUTED, TIED, TWICE, UNUSED

pytestmark = pytest.mark.exercise("04", title="It breaks", file="my_fsdp.py")

WIDE = [each._replace(model=f"wide and {each.model}") for each in BREAKING]


def trains_as_without_sharding(found, model, seed):
    """Names and rows are right, and so are the losses and gradients of all steps. Where there is no gradient, there is None."""
    laws.same_rows(found, model, seed)
    laws.same_numbers(found, model, seed)


@pytest.mark.points(2, ask="How many names did that weight have while it was one parameter?")
def test_tied(ranks, seed):
    """A tied parameter stays one parameter, and its gradient is the sum over all its uses."""
    trains_as_without_sharding(ranks(3).train(TIED, seed), TIED, seed)


@pytest.mark.points(2, ask="Which backward still reads a weight that gets no gradient?")
def test_frozen(ranks, seed):
    """Frozen weights are whole while they are needed; they get no gradient, not even zeros, and no reduction."""
    found = ranks(3).train(FROZEN, seed)
    trains_as_without_sharding(found, FROZEN, seed)
    laws.reduces_what_has_a_gradient(found, FROZEN, seed)


@pytest.mark.points(1, ask="How often does this layer's backward run, and which time is the last?")
def test_twice(ranks, seed):
    """A unit that runs twice has the gradients of both uses."""
    trains_as_without_sharding(ranks(3).train(TWICE, seed), TWICE, seed)


@pytest.mark.points(1, ask="Which code waits for a gradient that does not come?")
def test_unused(ranks, seed):
    """Parameters and units that the loss does not depend on disturb nothing, and their gradient is None."""
    trains_as_without_sharding(ranks(3).train(UNUSED, seed), UNUSED, seed)


@pytest.mark.points(2, ask="In which order do the forwards and backwards of a recomputed layer run?")
def test_recomputed(ranks, seed):
    """A layer may be recomputed in the backward (`torch.utils.checkpoint`, not reentrant)."""
    trains_as_without_sharding(ranks(3).train(RECOMPUTED, seed), RECOMPUTED, seed)


@pytest.mark.points(
    1, ask="Which unit does each parameter belong to, and which tensors of an output have a gradient?"
)
def test_nested(ranks, seed):
    """A unit may contain another, get its input by keyword, and return several tensors in a dict."""
    trains_as_without_sharding(ranks(3).train(NESTED, seed), NESTED, seed)


@pytest.mark.points(1, ask="Which code frees a unit whose backward did not end as usual?")
@pytest.mark.parametrize("model", WIDE, ids=str)
def test_memory(held, model):
    """In all these models, memory has the bound of station 03: few units are whole at once, and none after a step.

    The unit that computes is whole, and so are the units around it; besides, there is a buffer of a unit. A backward also has the whole
    gradients of these units, and a second buffer. Whole gradients do not wait for the end of the backward, nor do recomputed blocks.
    Where a layer runs twice, a file that gathers ahead may guess the order wrong, and have one buffer more.
    """
    laws.few_whole(held(model), model, ahead=2 if model.name == TWICE.name else 1)
