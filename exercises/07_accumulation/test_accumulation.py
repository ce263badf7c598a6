"""07 Accumulation and ZeRO-2: what must hold.

Each step of these models has four micro-batches. The collectives of the second step are recorded, micro-batch by micro-batch. In a
model that "leaves layers out", the last micro-batch skips all blocks except one, and does not use one of this block's parameters: their
gradients come from the earlier micro-batches alone.
"""

import pytest

from hwfsdp.course import laws, scenarios
from hwfsdp.course.scenarios import BF16, FP32, MICROS, Scenario

pytestmark = pytest.mark.exercise("07", title="Accumulation and ZeRO-2", file="my_fsdp.py")

SUMMED = Scenario(
    "micro-batches, reduced at last", "gpt of two layers", micros=MICROS, steps=2, sync_last=True
)
KEPT = SUMMED._replace(name="micro-batches, whole until the last", keep=True)
MIXED = SUMMED._replace(
    name="bf16 micro-batches, reduced at last in fp32", policy=(("param_dtype", BF16), ("reduce_dtype", FP32))
)
SHORTENED = SUMMED._replace(name="micro-batches, of which the last leaves layers out", model="shortened")
BOTH = SHORTENED._replace(name="whole until the last micro-batch, which leaves layers out", keep=True)
WHOLE = Scenario("reshard_after_forward=False", "gpt of two layers", steps=2, reshard=False)
ROOT = WHOLE._replace(name="reshard_after_forward=False for the root alone", of_root=True)
ONE_OFF = Scenario("a unit with set_requires_gradient_sync(False)", "gpt of two layers", one_off=True)
WIDE = BOTH._replace(model="wide and shortened")


@pytest.mark.points(1, ask="How does a unit know that a micro-batch is the last?")
@pytest.mark.parametrize("model", [SUMMED, ONE_OFF], ids=str)
def test_sync(ranks, seed, model):
    """Only the last micro-batch reduces, once per unit. A switch is one of its module and those below: other units reduce."""
    found = ranks(3).train(model, seed)
    units = len(scenarios.build(model, seed).units) - model.one_off
    for micro in range(model.micros):
        phase, number = f"backward {micro}", units if micro == model.micros - 1 else 0
        laws.counts(found, model, seed, phase, "reduce_scatter", number, "reduced-too-often", "not-reduced")


@pytest.mark.points(2, ask="Where does a whole gradient wait until it is reduced?")
@pytest.mark.parametrize("model", [SUMMED, KEPT, SHORTENED, BOTH, MIXED], ids=str)
def test_gradients(ranks, seed, model):
    """Gradients are sums over all micro-batches, in the dtype of the reduction. Until the last one, p.grad is not touched."""
    found = ranks(2 if model is MIXED else 3).train(model, seed)
    theirs = ranks(2).fsdp2(model, seed) if model is MIXED else None
    laws.nothing_early(found, model)
    if theirs:
        laws.same_bits(found, theirs, model)
    else:
        laws.same_numbers(found, model, seed)


@pytest.mark.points(1, ask="Which units are whole when the backward begins?")
@pytest.mark.parametrize("model", [WHOLE, ROOT], ids=str)
def test_whole(ranks, seed, model):
    """With reshard_after_forward=False, a backward does not gather a unit again. Other units are gathered as before."""
    found = ranks(3).train(model, seed)
    number = len(scenarios.build(model, seed).units) - 1 if model.of_root else 0
    laws.counts(found, model, seed, "backward", "all_gather", number, "resharded-anyway", "not-gathered")
    laws.same_numbers(found, model, seed)


@pytest.mark.points(1, ask="Which code frees the units after the last micro-batch?")
def test_keep(ranks, seed):
    """With set_reshard_after_backward(False), the next forward gathers nothing."""
    found = ranks(3).train(KEPT, seed)
    laws.counts(found, KEPT, seed, "forward 1", "all_gather", 0, "resharded-anyway", "not-gathered")
    laws.same_numbers(found, KEPT, seed)


@pytest.mark.points(1, ask="Which code frees a unit that the last micro-batch leaves out?")
def test_freed(held):
    """After the last micro-batch nothing is whole, and no whole gradient is left, also of layers that it leaves out."""
    for moment in ("before", "after"):
        laws.few_alive(held(WIDE), WIDE, moment)
