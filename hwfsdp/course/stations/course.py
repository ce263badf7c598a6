"""The stations: what is checked, on which scenarios, by which laws.

A check looks only at behavior: numbers at several world sizes, bytes, collectives, waits. A file passes if its `fully_shard` keeps
its promises, however it is written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any, NamedTuple

import torch

from hwfsdp.course.findings import compare, expect, told
from hwfsdp.course.run import Ranks, Unreported
from hwfsdp.course.stations import laws, machines, parts, scenarios
from hwfsdp.course.stations.facts import probe_fsdp2, probe_memory, probe_replicate, probe_shards
from hwfsdp.course.stations.facts import probe_training
from hwfsdp.course.stations.scenarios import MICROS, Scenario
from hwfsdp.course.verdict import Finding

THREE = 3  # ranks: with two ranks, a sum over the ranks looks like a gradient that counts twice
MOMENTS = ("rest", "after", "between")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# its gain has fewer rows than there are ranks
PLAIN = Scenario("a GPT", "gained")
DEEP = Scenario("a deep GPT", "deep")
BREAKING = (
    Scenario("tied weights", "tied"),
    Scenario("frozen layers", "frozen"),
    Scenario("a layer that runs twice", "twice"),
    Scenario("unused parameters", "unused"),
    Scenario("recomputed layers", "recomputed"),
    Scenario("nested units", "nested"),
)
WIDE = tuple(Scenario(each.name, f"wide and {each.model}") for each in BREAKING)
CHANGING = Scenario("a layer that an evaluation leaves out", "changing", evaluated=True)
LEFT_OUT = Scenario("a step that leaves layers out", "wide and shortened")
MIXED = Scenario("bf16, reduced in fp32", policy=(("param_dtype", BF16), ("reduce_dtype", FP32)))
CASTS = Scenario("bf16, output in fp32", policy=(*MIXED.policy, ("output_dtype", FP32)))
NUMBERS = Scenario("bf16, numbers as inputs and by keyword", "nested", policy=MIXED.policy)
REDUCED_LOW = Scenario("fp32, reduced in bf16", policy=(("reduce_dtype", BF16),))
AS_THEY_ARE = Scenario(
    "bf16, inputs and gradients as they are",
    "mixing",
    policy=(("param_dtype", BF16), ("cast_forward_inputs", False)),
)
PRECISIONS = (MIXED, CASTS, NUMBERS, REDUCED_LOW, AS_THEY_ARE)
ADDED = Scenario("micro-batches, reduced each time", micros=MICROS, steps=2)
SUMMED = Scenario("micro-batches, reduced at last", micros=MICROS, steps=2, sync_last=True)
KEPT = SUMMED._replace(name="micro-batches, whole until the last", keep=True)
SUMMED_MIXED = SUMMED._replace(name="bf16 micro-batches, reduced at last in fp32", policy=MIXED.policy)
WHOLE = Scenario("reshard_after_forward=False", steps=2, reshard=False)
SHORTENED = SUMMED._replace(name="micro-batches, of which the last leaves layers out", model="shortened")
LOOKED_AT = Scenario("a frozen inlet, after a look at the loss", "frozen inlet", steps=2, peeked=True)
ACCUMULATED = (SUMMED, KEPT, WHOLE, SHORTENED)


# --- Facts, by scenario ------------------------------------------------------------------------------------


RAISED = {  # a pattern of what a rank raises → the misconception, and the course's words for it
    r"unexpected .* '(mp_policy|reshard_after_forward)'": ("not-yet", "fully_shard has no argument {0} yet."),
    r"no attribute '(set_re\w+)'": ("not-yet", "sharded modules have no method {0} yet."),
    # autograd saved a tensor, and it was written to
    "modified by an inplace operation": ("counted-write", "{at} {said:.200}"),
    "(?:same|mixed) dtype": ("wrong-dtype", "{at} a unit computes with inputs of another dtype: {said:.120}"),
    "a gradient with dtype": ("wrong-dtype", "{at} a gradient has another dtype than its rows: {said:.120}"),
    # of `WeightGone`
    "reads memory that is free; .* so far: 0$": ("not-gathered", "{at} {said}."),
    "reads memory that is free": ("read-while-freed", "{at} {said}."),
}


@contextmanager
def plainly() -> Iterator[None]:
    """Translate errors of ranks into the course's words: functions not written yet, and weights that are not there.

    Raises:
        Finding: in place of `Unreported`, if the error is one of these.
    """
    try:
        yield
    except Unreported as unreported:
        for raised, pattern in product(unreported.run.raised, RAISED):
            if found := re.search(pattern, raised.message):
                kind, words = RAISED[pattern]
                at, said = f"{unreported.key}, rank {raised.rank}:", raised.message.splitlines()[0]
                raise Finding(kind, words.format(*found.groups(), at=at, said=said)) from None
        raise


class Together(NamedTuple):
    """Scenarios that run in one launch, unless a single check is judged."""

    scenarios: tuple[Scenario, ...]

    def found(self, ranks: Ranks, seed: int, scenario: Scenario, size: int = THREE) -> list[Any]:
        chosen = (scenario,) if ranks.narrow else self.scenarios
        with plainly():
            return ranks.run(probe_training, size, seed=seed, scenarios_=chosen)[scenario.name]

    def fsdp2(self, ranks: Ranks, seed: int, scenario: Scenario, size: int) -> list[Any]:
        return ranks.reference(probe_fsdp2, size, seed=seed, scenarios_=self.scenarios)[scenario.name]


NAIVE, BROKEN, CHANGED = Together((PLAIN, ADDED)), Together(BREAKING), Together((CHANGING,))
PRECISE, GRADUAL = Together(PRECISIONS), Together(ACCUMULATED)
GRADUAL_MIXED = Together((SUMMED_MIXED,))
LOOKED = Together((LOOKED_AT._replace(name="a frozen inlet", peeked=False), LOOKED_AT))


def memory_of(
    ranks: Ranks, seed: int, scenario: Scenario, *others: Scenario, moments: Sequence[str] = MOMENTS
) -> list[Any]:
    with plainly():
        chosen = others or (scenario,)
        found = ranks.run(probe_memory, THREE, seed=seed, scenarios_=chosen, moments=moments)
        return found[f"{scenario.name}, memory"]


# --- 03 Naive FSDP -----------------------------------------------------------------------------------------


def judge_replicate(ranks: Ranks, seed: int) -> None:
    found = ranks.run(probe_replicate, THREE, seed=seed, scenario=PLAIN)["replicate"]
    oracle = laws.unsharded(PLAIN, seed, THREE)["grads"][0]
    for rank, facts in enumerate(found):
        for name, right in oracle.items():
            where = f"{name}, rank {rank}, replicated"
            laws.compare_whole_gradient(where, facts["grads"][name], right, THREE)
    compare("replicate", found[0], {"laws.returned": True})


def judge_rows(ranks: Ranks, seed: int) -> None:
    found = ranks.run(probe_shards, THREE, seed=seed, scenario=PLAIN)["shards"]
    laws.same_rows(found, PLAIN, seed)
    compare("fully_shard", found[0], {"laws.returned": True})


def judge_forward(ranks: Ranks, seed: int) -> None:
    found = NAIVE.found(ranks, seed, PLAIN)
    laws.same_losses(found, PLAIN, seed)
    laws.gathered(found, PLAIN, "forward")


def judge_trains(ranks: Ranks, seed: int) -> None:
    for scenario in NAIVE.scenarios:
        laws.same_objects(NAIVE.found(ranks, seed, scenario), scenario)
        laws.same_numbers(NAIVE.found(ranks, seed, scenario), scenario, seed)
    for size in (1, 2):
        laws.same_numbers(NAIVE.found(ranks, seed, PLAIN, size), PLAIN, seed)


def judge_memory(ranks: Ranks, seed: int) -> None:
    """Check that nothing stays whole between forward and backward or between steps, and few units are whole at once in a forward."""
    laws.freed(memory_of(ranks, seed, DEEP), DEEP, *MOMENTS)
    machines.judge_forward_peak("not-freed", ranks, seed)


# --- 04 It breaks ------------------------------------------------------------------------------------------


def judge_model(model: str, ranks: Ranks, seed: int) -> None:
    [scenario] = [each for each in BREAKING if each.model == model]
    found = BROKEN.found(ranks, seed, scenario)
    laws.same_rows(found, scenario, seed)
    laws.same_numbers(found, scenario, seed)


def judge_freed(ranks: Ranks, seed: int) -> None:
    """Check for every model that nothing stays whole after a step."""
    # there are no rows without sharding
    laws.same_rows(BROKEN.found(ranks, seed, BREAKING[0]), BREAKING[0], seed)
    for scenario in WIDE:
        found = memory_of(ranks, seed, scenario, *WIDE, moments=("rest", "after"))
        laws.freed(found, scenario, "rest", "after")


# --- 05 Groups ---------------------------------------------------------------------------------------------


def judge_one(ranks: Ranks, seed: int) -> None:
    found = NAIVE.found(ranks, seed, PLAIN)
    units = len(scenarios.build(PLAIN, seed).units)
    laws.counts(found, PLAIN, "forward", "all_gather", units, "one-by-one", "not-gathered")
    laws.counts(found, PLAIN, "backward", "reduce_scatter", units, "one-by-one", "not-reduced")
    # the model itself is still whole when the backward begins, or is gathered again
    laws.counts(found, PLAIN, "backward", "all_gather", (units - 1, units), "one-by-one", "never-resharded")


def judge_bytes(ranks: Ranks, seed: int) -> None:
    """Check that the learner's own function gives the measured bytes."""
    found = NAIVE.found(ranks, seed, PLAIN)
    shapes = [tuple(p.shape) for p in scenarios.build(PLAIN, seed).model.parameters()]
    said = ranks.run(parts.probe_own_traffic, 1, seed=seed, shapes=shapes, size=THREE)["own"][0]
    for op in ("reduce_scatter", "all_gather"):
        measured = sum(each[2] for each in laws.moved(found[0], "", op))
        of = f"{laws.NAMES[op]} of a step, a GPT of {sum(math.prod(shape) for shape in shapes):,} parameters"
        ranks.measured[of] = f"{measured:,} B; traffic() says {said[op]:,} B"
        where = f"{PLAIN.name}, {THREE} ranks:"
        if not measured:
            raise told(laws.NONE[op], where, "none", laws.NAMES[op])
        first, again = (laws.moved(found[0], phase, op) for phase in ("forward", "backward"))
        if len(first) == len(again) + 1 > 1:  # the model is still whole in its backward (`judge_one`)
            measured = 2 * sum(each[2] for each in first)
        expect("laws.said", where, said[op], measured, what=laws.NAMES[op])


def judge_numbers(group: str, ranks: Ranks, seed: int) -> None:
    """Check that every scenario of a group of this module gives the unsharded model's numbers."""
    together: Together = globals()[group]
    for scenario in together.scenarios:
        laws.same_numbers(together.found(ranks, seed, scenario), scenario, seed)


# --- 06 Mixed precision ------------------------------------------------------------------------------------


def judge_wire(ranks: Ranks, seed: int) -> None:
    for scenario in PRECISIONS:
        policy = {"param_dtype": FP32, **dict(scenario.policy)}
        found = PRECISE.found(ranks, seed, scenario, 2)
        laws.dtypes(found, scenario, "all_gather", policy["param_dtype"], "gathered-in-wrong-dtype")
        reduced = policy.get("reduce_dtype", policy["param_dtype"])
        laws.dtypes(found, scenario, "reduce_scatter", reduced, "reduced-in-wrong-dtype")


def judge_precise(ranks: Ranks, seed: int) -> None:
    for scenario in PRECISIONS:
        found, oracle = PRECISE.found(ranks, seed, scenario, 2), PRECISE.fsdp2(ranks, seed, scenario, 2)
        laws.same_bits(found, oracle, scenario)


def judge_casts(ranks: Ranks, seed: int) -> None:
    for scenario, expected in ((NUMBERS, BF16), (MIXED, BF16), (CASTS, FP32), (AS_THEY_ARE, FP32)):
        for rank, facts in enumerate(PRECISE.found(ranks, seed, scenario, 2)):
            compare(f"{scenario.name}, rank {rank}:", facts, {"laws.output": str(expected)})


def judge_masters(ranks: Ranks, seed: int) -> None:
    for scenario in PRECISIONS:
        found = PRECISE.found(ranks, seed, scenario, 2)
        laws.kept_in(found, scenario, FP32)
        laws.same_rows(found, scenario, seed)


LOUD = Scenario("loud gradients", "loud", steps=1, policy=(("param_dtype", FP16), ("reduce_dtype", FP32)))
LOUDLY = Together((LOUD,))


def judge_overflow(ranks: Ranks, seed: int) -> None:
    """Check a gradient whose mean fits into fp16, while its sum does not."""
    found = LOUDLY.found(ranks, seed, LOUD)
    for rank, facts in enumerate(found):
        for name, grad in facts["grads"][0].items():
            if grad is not None and not grad.isfinite().all():
                where = f"{LOUD.name}, rank {rank}: the gradient of {name}"
                raise told("laws.overflowed", where, str(grad.flatten()[0].item()), "finite numbers")
    laws.same_numbers(found, LOUD._replace(policy=()), seed, tolerance=0.05)


# --- 07 Accumulation ---------------------------------------------------------------------------------------


def judge_sync(ranks: Ranks, seed: int) -> None:
    found = GRADUAL.found(ranks, seed, SUMMED)
    units = len(scenarios.build(SUMMED, seed).units)
    for micro in range(SUMMED.micros):
        phase, number = f"backward {micro}", units if micro == SUMMED.micros - 1 else 0
        laws.counts(found, SUMMED, phase, "reduce_scatter", number, "reduced-too-often", "not-reduced")


def judge_summed(ranks: Ranks, seed: int) -> None:
    for scenario in (SUMMED, KEPT, SHORTENED):
        laws.same_numbers(GRADUAL.found(ranks, seed, scenario), scenario, seed)
    found = GRADUAL_MIXED.found(ranks, seed, SUMMED_MIXED, 2)
    laws.same_bits(found, GRADUAL_MIXED.fsdp2(ranks, seed, SUMMED_MIXED, 2), SUMMED_MIXED)


def judge_whole(scenario: str, phase: str, ranks: Ranks, seed: int) -> None:
    """Check that nothing is gathered in this phase of a scenario of this module: its parameters are still whole."""
    case: Scenario = globals()[scenario]
    found = GRADUAL.found(ranks, seed, case)
    laws.counts(found, case, phase, "all_gather", 0, "resharded-anyway", "not-gathered")
    laws.same_numbers(found, case, seed)


# --- 09 Forward prefetch -----------------------------------------------------------------------------------


def judge_fresh(ranks: Ranks, seed: int) -> None:
    """Check that an unused gather changes no number, and that after a step nothing of it is left."""
    judge_numbers("CHANGED", ranks, seed)
    found = memory_of(ranks, seed, LEFT_OUT, moments=("after",))
    laws.freed(found, LEFT_OUT, "after", kind="kept-alive")


# --- 10 Backward prefetch ----------------------------------------------------------------------------------


def judge_backward_gathers(ranks: Ranks, seed: int) -> None:
    """Check that gathers start early, and that a forward without a backward leaves nothing behind: the next backward gathers no more."""
    machines.judge_backward_prefetch(ranks, seed)
    plain, looked_at = (LOOKED.found(ranks, seed, scenario) for scenario in LOOKED.scenarios)
    needed = len(laws.moved(plain[0], "backward", "all_gather"))
    laws.counts(looked_at, LOOKED_AT, "backward", "all_gather", needed, "guessed-wrong", "not-gathered")
