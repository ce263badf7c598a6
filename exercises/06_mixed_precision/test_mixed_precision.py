"""06 Mixed precision: what must hold.

Two ranks train small models with your file and a policy, and send back the dtypes that they saw. FSDP2 trains the same models on two
other ranks. Both must have the same losses and gradients, bit for bit: so it matters where your file casts, and where it adds.
"""

import pytest

from hwfsdp.course import laws
from hwfsdp.course.findings import Finding
from hwfsdp.course.scenarios import BF16, FP16, FP32, Scenario

pytestmark = pytest.mark.exercise("06", title="Mixed precision", file="my_fsdp.py")

LOW = (("param_dtype", BF16), ("reduce_dtype", FP32))
MIXED = Scenario("bf16, reduced in fp32", "gpt of two layers", policy=LOW)
CASTS = MIXED._replace(name="bf16, output in fp32", policy=(*LOW, ("output_dtype", FP32)))
NUMBERS = Scenario(
    "bf16, numbers as inputs and by keyword", "nested", policy=LOW, about="Its blocks get x by keyword."
)
REDUCED_LOW = Scenario("fp32, reduced in bf16", "gpt of two layers", policy=(("reduce_dtype", BF16),))
AS_THEY_ARE = Scenario(
    "bf16, inputs and gradients as they are",  # without a reduce_dtype, gradients travel in the dtype that the backward gave them
    "mixing",
    policy=(("param_dtype", BF16), ("cast_forward_inputs", False)),
)
EDGES = Scenario(
    "bf16, tensors in dicts and tuples",
    "edges",
    policy=(*LOW, ("output_dtype", FP32)),
    about="Units get and return nested dicts and tuples; blocks.1 has no parameters, and blocks.2 is recomputed.",
)
ALL = (MIXED, CASTS, NUMBERS, REDUCED_LOW, AS_THEY_ARE, EDGES)
LOUD = Scenario("loud gradients", "loud", steps=1, policy=(("param_dtype", FP16), ("reduce_dtype", FP32)))


@pytest.mark.points(2, ask="In which dtype is the buffer that the collective is given?")
@pytest.mark.parametrize("model", ALL, ids=str)
def test_wire(ranks, seed, model):
    """Gathers are in param_dtype and reductions in reduce_dtype."""
    found = ranks(2).train(model, seed)
    policy = {"param_dtype": FP32, **dict(model.policy)}
    laws.dtypes(found, model, "all_gather", policy["param_dtype"], "gathered-in-wrong-dtype")
    reduced = policy.get("reduce_dtype", policy["param_dtype"])
    laws.dtypes(found, model, "reduce_scatter", reduced, "reduced-in-wrong-dtype")


@pytest.mark.points(2, ask="What is cast before a collective, and what after it?")
@pytest.mark.parametrize("model", ALL, ids=str)
def test_numbers(ranks, seed, model):
    """Losses and gradients equal FSDP2's, bit for bit."""
    found, theirs = ranks(2).train(model, seed), ranks(2).fsdp2(model, seed)
    laws.same_bits(found, theirs, model)


@pytest.mark.points(1, ask="Which tensors enter a unit, and which leave it?")
@pytest.mark.parametrize("model", [NUMBERS, MIXED, CASTS, AS_THEY_ARE, EDGES], ids=str)
def test_casts(ranks, seed, model):
    """Inputs and outputs are cast as the policy says, wherever they are, in each unit and in a recomputation; nothing else is."""
    found = ranks(2).train(model, seed)
    laws.outputs(found, model, BF16 if model in (NUMBERS, MIXED) else FP32)
    if model is EDGES:
        once = "bfloat16, bfloat16, bool, int64"
        laws.inputs(found, model, {"blocks.0": [once], "blocks.1": [once], "blocks.2": [once, once]})


@pytest.mark.points(1, ask="In which dtype does the optimizer add its update?")
@pytest.mark.parametrize("model", ALL, ids=str)
def test_shards(ranks, seed, model):
    """Rows, gradients and the optimizer stay in fp32."""
    found = ranks(2).train(model, seed)
    laws.kept_in(found, model, FP32)
    laws.same_rows(found, model, seed)


@pytest.mark.points(1, ask="How large can the sum over all ranks become before it is divided?")
def test_overflow(ranks, seed):
    """A sum that overflows in fp16 is reduced in fp32."""
    found = ranks(3).train(LOUD, seed)
    for rank, facts in enumerate(found):
        for name, grad in facts["grads"][0].items():
            if grad is not None and not grad.isfinite().all():
                said = f"{LOUD.name}, rank {rank}: the gradient of {name} is not finite."
                raise Finding("overflowed", said, "finite numbers", str(grad.flatten()[0].item()))
    laws.same_numbers(found, LOUD._replace(policy=()), seed, tolerance=0.05)
