"""05 Groups: what must hold.

`ranks(3)` trains a model with your file and records the collectives of the second step: which unit, how many bytes. Your `traffic` is
called for many sizes, and compared with closed forms.

Is what travels what computes? `gpu(NARROW)` runs two updates on a simulated GPU, where every operator is seen with the memory that it
reads and writes. A gather counts only if the model computes with what it brings, and a reduction only if the optimizer reads it.
"""

import math
import random

import pytest
from facts_groups import probe_traffic

from hwfsdp.course import laws, scenarios, timing
from hwfsdp.course.findings import Finding
from hwfsdp.course.machines import NARROW
from hwfsdp.course.scenarios import BREAKING, FROZEN, PLAIN
from hwfsdp.observe.accounting import GroupSizes, Strategy, strategy_traffic

pytestmark = pytest.mark.exercise("05", title="Groups", file="my_fsdp.py")

STRATEGIES = {
    "ddp": Strategy.DDP,
    "zero1": Strategy.ZERO1,
    "zero2": Strategy.ZERO2,
    "zero3": Strategy.ZERO3,
    "hybrid": Strategy.HSDP,
}


def calls_of(seed):
    """Arguments of `traffic`: first the arguments for the model that trains, then many small ones."""
    draw = random.Random(seed)
    params = scenarios.build(PLAIN, seed).model.parameters()
    found = [{"shapes": [list(p.shape) for p in params], "strategy": "zero3", "world_size": 3}]
    for strategy in STRATEGIES:
        for number in range(13):
            shapes = [
                [draw.randint(1, 9) for _ in range(draw.randint(1, 3))] for _ in range(draw.randint(1, 4))
            ]
            replicas, shards = (draw.randint(1, 4), draw.randint(1, 5)) if number else (2, 2)
            more = {"shards": shards} if strategy == "hybrid" else {}
            found.append(
                {
                    "shapes": shapes if number else [[8, 3]],
                    "strategy": strategy,
                    "world_size": replicas * shards,
                    **more,
                }
            )
    return found


@pytest.mark.points(2, ask="Where does each parameter's part begin in the buffer of one rank?")
def test_one(ranks, seed):
    """Each unit makes one all-gather per forward and per backward, and one reduce-scatter. Nothing else travels."""
    found = ranks(3).train(PLAIN, seed)
    units = len(scenarios.build(PLAIN, seed).units)
    laws.counts(found, PLAIN, seed, "forward", "all_gather", units, "one-by-one", "not-gathered")
    laws.counts(found, PLAIN, seed, "backward", "reduce_scatter", units, "one-by-one", "not-reduced")
    # the model itself is still whole when the backward begins, or is gathered again
    laws.counts(
        found, PLAIN, seed, "backward", "all_gather", (units - 1, units), "one-by-one", "never-resharded"
    )
    laws.only(found, PLAIN, "all_gather", "reduce_scatter")


@pytest.mark.points(1, ask="Which memory does a unit compute with, and which collective wrote there?")
def test_travels(gpu):
    """What is gathered is what computes, and what is reduced is what the optimizer gets."""
    timing.computes_with_what_travels(gpu(NARROW))


@pytest.mark.points(3, ask="How often does each byte of a parameter travel in a step with this strategy?")
def test_closed_forms(ranks, seed):
    """The bytes of DDP, ZeRO-1, 2, 3 and hybrid sharding in one step, in closed form."""
    calls = calls_of(seed)
    answers = ranks(1).ask(probe_traffic, "traffic", calls=calls)[0]
    for call, answer in zip(calls, answers):
        groups = [GroupSizes([tuple(shape) for shape in call["shapes"]])]
        right = strategy_traffic(groups, STRATEGIES[call["strategy"]], call["world_size"], call.get("shards"))
        for op, nbytes in right.items():
            found = answer.get(op, 0)
            if found != nbytes:
                said = ", ".join(map(repr, [call["shapes"], call["strategy"], call["world_size"]]))
                said += f", shards={call['shards']}" if "shards" in call else ""
                raise Finding(
                    why_wrong(call, found, nbytes), f"traffic({said}): {op} is {found} B.", nbytes, found
                )


def why_wrong(call, found, right):
    """The likely misconception."""
    if not isinstance(found, int):
        return "float-for-integer"
    exact = 4 * sum(math.prod(shape) for shape in call["shapes"])
    shards = {"ddp": 1, "hybrid": call.get("shards")}.get(call["strategy"], call["world_size"])
    if found in (exact, 2 * exact) and any(shape[0] % shards for shape in call["shapes"]):
        return "evenness-assumed"
    if right and found * 4 == right:
        return "elements-for-bytes"
    return "formula-too-large" if found > right else "formula-too-small"


@pytest.mark.points(
    2, ask="Which bytes travel that your formula does not count? Which does it count that do not travel?"
)
def test_bytes(ranks, seed, measured):
    """A step moves exactly the bytes that your own traffic returns. Frozen parameters do not travel in reductions."""
    found = ranks(3).train(PLAIN, seed)
    said = ranks(1).ask(probe_traffic, "traffic", calls=calls_of(seed))[0][0]
    for op in ("reduce_scatter", "all_gather"):
        nbytes = sum(each[2] for each in laws.moved(found[0], "", op))
        if not isinstance(said.get(op, 0), int):
            raise Finding(
                "float-for-integer", f"traffic() says {said[op]} B of {laws.NAMES[op]}.", nbytes, said[op]
            )
        measured(
            f"{laws.NAMES[op]} of a step of {PLAIN.name}",
            f"{nbytes:,} B; traffic() says {said.get(op, 0):,} B",
        )
        if not nbytes:
            kind = {"all_gather": "not-gathered", "reduce_scatter": "not-reduced"}[op]
            raise Finding(
                kind, f"{PLAIN.name}, 3 ranks: there are no {laws.NAMES[op]}.", laws.NAMES[op], "none"
            )
        first, again = (laws.moved(found[0], phase, op) for phase in ("forward", "backward"))
        if len(first) == len(again) + 1 > 1:  # the model stayed whole until its backward
            nbytes = 2 * sum(each[2] for each in first)
        if said.get(op, 0) != nbytes:
            kind = "formula-too-large" if said.get(op, 0) > nbytes else "formula-too-small"
            words = f"traffic() says {said.get(op, 0):,} B of {laws.NAMES[op]}; the step moves {nbytes:,} B."
            raise Finding(kind, f"{PLAIN.name}, 3 ranks: {words}", nbytes, said.get(op, 0))
    laws.reduces_what_has_a_gradient(ranks(3).train(FROZEN, seed), FROZEN, seed)


@pytest.mark.points(1, ask="Which rows of each parameter are in rank r's part of the buffer?")
@pytest.mark.parametrize("model", BREAKING, ids=str)
def test_numbers(ranks, seed, model):
    """The models of station 04 still have the losses and gradients of the unsharded models."""
    laws.same_numbers(ranks(3).train(model, seed), model, seed)
