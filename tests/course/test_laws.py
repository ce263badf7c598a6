"""Laws of training steps, tried on the package itself: its `fully_shard` keeps all of them, and each wrong fact breaks the right one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial, reduce
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import hwfsdp
from hwfsdp.course import laws, scenarios
from hwfsdp.course.facts import bytes_held, torchs, trained
from hwfsdp.course.findings import Finding
from hwfsdp.course.scenarios import BF16, BREAKING, FP32, FROZEN, PLAIN, TIED, UNUSED, Scenario

SEED, RANKS = 7, 3
WIDE = Scenario("a stack of six blocks", "wide and stack")
SUMMED = Scenario("two micro-batches", "stack", micros=2, sync_last=True)
SHORTENED = Scenario("the last of four leaves layers out", "shortened", micros=4, sync_last=True)
OTHERS = [
    Scenario(name, name)
    for name in ("mixing", "gained and nested", "gained and frozen", "even and recomputed")
]
LOW = Scenario("bf16", "edges", policy=(("param_dtype", BF16), ("reduce_dtype", FP32)))
ONCE = "bfloat16, bfloat16, bool, int64"
ALIKE = [*BREAKING, SHORTENED, *OTHERS]  # trained as without sharding
UNITS = len(scenarios.build(PLAIN, SEED).units)


def shard(module: nn.Module, name: str, **options: Any) -> nn.Module:
    return hwfsdp.fully_shard(module, **options)


def train_all() -> dict[str, Any]:
    found = {each.name: trained(each, SEED, shard) for each in (PLAIN, SUMMED, LOW, *ALIKE)}
    return found | {"FSDP2's": trained(LOW, SEED, torchs(), is_observed=False)}


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    """What each rank found, by scenario, and the bytes that a step holds on a simulated machine."""
    by_rank = hwfsdp.launch(train_all, RANKS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hwfsdp.course.facts.students_shard", lambda: shard)
        held = bytes_held(WIDE, SEED)
    return {name: [each[name] for each in by_rank] for name in by_rank[0]} | {WIDE.name: held}


def numbers(scenario: Scenario, found: Any, all_facts: Any) -> None:
    laws.same_objects(found, scenario)
    laws.nothing_early(found, scenario)
    laws.same_numbers(found, scenario, SEED)


def rows(scenario: Scenario, found: Any, all_facts: Any) -> None:
    laws.same_rows(found, scenario, SEED)


def traffic(scenario: Scenario, found: Any, all_facts: Any) -> None:
    counts = partial(laws.counts, found, scenario, SEED)
    counts("forward", "all_gather", UNITS, "one-by-one", "not-gathered")
    counts("backward", "reduce_scatter", UNITS, "one-by-one", "not-reduced")
    laws.only(found, scenario, "all_gather", "reduce_scatter")
    laws.gathered(found, scenario, "backward")
    laws.reduces_what_has_a_gradient(found, scenario, SEED)


def precision(scenario: Scenario, found: Any, all_facts: Any) -> None:
    laws.dtypes(found, scenario, "all_gather", BF16, "gathered-in-wrong-dtype")
    laws.dtypes(found, scenario, "reduce_scatter", FP32, "reduced-in-wrong-dtype")
    laws.kept_in(found, scenario, FP32)
    laws.outputs(found, scenario, BF16)
    laws.inputs(found, scenario, {"blocks.0": [ONCE], "blocks.2": [ONCE, ONCE]})
    laws.same_bits(found, all_facts["FSDP2's"], scenario)


def memory(scenario: Scenario, found: Any, all_facts: Any) -> None:
    laws.few_whole(found, scenario, ahead=2)  # the next gather starts before the copy-out, as in FSDP2


LAWS = [
    (PLAIN, numbers),
    (PLAIN, rows),
    (PLAIN, traffic),
    (SUMMED, numbers),
    (LOW, precision),
    (WIDE, memory),
]
LAWS += [(each, law) for each in ALIKE for law in (rows, numbers)]


@pytest.mark.parametrize(("scenario", "law"), LAWS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_the_package_keeps_the_law(facts: Any, scenario: Scenario, law: Callable[..., None]) -> None:
    """A law that does not hold raises a Finding."""
    law(scenario, facts[scenario.name], facts)


# --- Wrong facts -------------------------------------------------------------------------------------------

Change = Callable[[Any], Any]


class Wrong(NamedTuple):
    """A fact that is wrong on every rank: the misconception that the law must name, where the fact is, and what it becomes."""

    misconception: str
    scenario: Scenario
    law: Callable[..., None]
    path: tuple[Any, ...]
    change: Change


WEIGHT, BIAS = "blocks.0.up.weight", "norm.bias"
GRAD = ("grads", 0, WEIGHT)
FROZEN_GRAD, UNUSED_GRAD = ("grads", 0, "inlet.weight"), ("grads", 0, "blocks.0.spare")


def times(factor: float) -> Change:
    return lambda value: value * factor


def becomes(value: Any) -> Change:
    return lambda _: value


def without(op: str) -> Change:
    return lambda moves: [each for each in moves if each[0] != op]


def another(op: str) -> Change:
    return lambda moves: [*moves, [op, "", 8, "float32"]]


def cut_in_two(moves: list[Any]) -> list[Any]:
    return [[op, owner, nbytes // 2, dtype] for op, owner, nbytes, dtype in moves for _ in range(2)]


def in_dtype(of_op: str, new: str) -> Change:
    return lambda moves: [[op, o, n, new if op == of_op else dtype] for op, o, n, dtype in moves]


MOVES = ("moves", "forward 0"), ("moves", "backward 0")
WRONG = [
    # numbers
    Wrong("summed-not-averaged", PLAIN, numbers, GRAD, times(RANKS)),
    Wrong("averaged-twice", PLAIN, numbers, GRAD, times(1 / RANKS)),
    Wrong("grad-kept", PLAIN, numbers, GRAD, times(5)),
    Wrong("grad-lost", PLAIN, numbers, GRAD, times(0)),
    Wrong("grad-lost", PLAIN, numbers, GRAD, becomes(None)),
    Wrong("used-before-wait", PLAIN, numbers, GRAD, times(float("nan"))),
    Wrong("wrong-rows", PLAIN, numbers, GRAD, lambda grad: grad[:1]),
    Wrong("wrong-value", PLAIN, numbers, GRAD, lambda grad: grad + grad.abs().max() * 1e-3),
    Wrong("wrong-value", PLAIN, numbers, ("losses", 0, 0), times(1.001)),
    Wrong("update-not-seen", PLAIN, numbers, ("losses", 1, 0), times(1.001)),
    Wrong("used-before-wait", PLAIN, numbers, ("losses", 0, 0), times(float("inf"))),
    Wrong("object-replaced", PLAIN, numbers, ("kept", WEIGHT), becomes(False)),
    Wrong("grad-too-early", SUMMED, numbers, ("early",), becomes([WEIGHT])),
    Wrong("accumulation-scaled", SUMMED, numbers, GRAD, times(1 / 2)),
    Wrong("grad-of-nothing", FROZEN, numbers, FROZEN_GRAD, becomes(torch.zeros(2, 3))),
    Wrong("flag-not-followed", FROZEN, numbers, FROZEN_GRAD, becomes(torch.ones(2, 3))),
    Wrong("grad-of-nothing", UNUSED, numbers, UNUSED_GRAD, becomes(torch.zeros(2, 3))),
    # rows
    Wrong(
        "not-registered", PLAIN, rows, ("rows",), lambda rows: {k: v for k, v in rows.items() if k != BIAS}
    ),
    Wrong("not-registered", PLAIN, rows, ("rows", BIAS, "rows"), becomes(None)),
    Wrong("not-registered", PLAIN, rows, ("rows", BIAS, "is_parameter"), becomes(False)),
    Wrong("flag-not-followed", PLAIN, rows, ("rows", BIAS, "requires_grad"), becomes(False)),
    Wrong("wrong-rows", PLAIN, rows, ("rows", BIAS, "rows"), times(2)),
    Wrong("wrong-rows", PLAIN, rows, ("rows", BIAS, "rows"), lambda rows: rows[1:]),
    Wrong("untied", TIED, rows, ("places",), lambda places: [[name] for names in places for name in names]),
    # collectives
    Wrong("not-freed", PLAIN, traffic, MOVES[0], lambda moves: []),
    Wrong("one-by-one", PLAIN, traffic, MOVES[0], cut_in_two),
    Wrong("gathered-again", PLAIN, traffic, MOVES[0], times(2)),
    Wrong("not-reduced", PLAIN, traffic, MOVES[1], without("reduce_scatter")),
    Wrong("not-freed", PLAIN, traffic, MOVES[1], without("all_gather")),
    Wrong("whole-gradients", PLAIN, traffic, MOVES[1], another("all_reduce")),
    Wrong("too-much-traffic", PLAIN, traffic, MOVES[0], another("broadcast")),
    Wrong("too-much-traffic", PLAIN, traffic, (*MOVES[1], -1, 2), times(2)),
    # dtypes
    Wrong("gathered-in-wrong-dtype", LOW, precision, MOVES[0], in_dtype("all_gather", "float32")),
    Wrong("reduced-in-wrong-dtype", LOW, precision, MOVES[1], in_dtype("reduce_scatter", "bfloat16")),
    Wrong("wrong-dtype", LOW, precision, ("grads", -1, "inlet.weight"), lambda grad: grad.bfloat16()),
    Wrong("wrong-dtype", LOW, precision, ("after", "inlet.weight", "rows"), lambda rows: rows.bfloat16()),
    Wrong("wrong-dtype", LOW, precision, ("output", 0), becomes("torch.float32")),
    Wrong("wrong-dtype", LOW, precision, ("seen", "blocks.2", 1), becomes("float32, bfloat16, bool, int64")),
    Wrong("reduced-in-wrong-dtype", LOW, precision, ("grads", 0, "inlet.weight"), times(1 + 2**-20)),
    Wrong("wrong-value", LOW, precision, ("grads", 0, "inlet.weight"), times(2)),
    Wrong("wrong-value", LOW, precision, ("losses", 0, 0), times(1 + 2**-20)),
    # memory
    Wrong("not-freed", WIDE, memory, ("between",), times(10)),
    Wrong("not-freed", WIDE, memory, ("forward",), times(4)),
    Wrong("not-freed", WIDE, memory, ("backward",), times(4)),
    Wrong("grad-not-freed", WIDE, memory, (), lambda held: held | dict.fromkeys(("after", "grads"), 10**6)),
    Wrong("replicated", WIDE, memory, ("rows",), times(16)),
]


def changed(facts: Any, path: tuple[Any, ...], change: Change) -> Any:
    """Return a copy of one rank's facts with a change."""
    new = copy.deepcopy(facts)
    if not path:
        return change(new)
    inner = reduce(lambda tree, key: tree[key], path[:-1], new)
    inner[path[-1]] = change(inner[path[-1]])
    return new


@pytest.mark.parametrize(
    "wrong", WRONG, ids=lambda w: f"{w.scenario} {w.misconception} {'-'.join(map(str, w.path))}"
)
def test_a_wrong_fact_breaks_the_law(facts: Any, wrong: Wrong) -> None:
    right = facts[wrong.scenario.name]
    each = right if isinstance(right, list) else [right]
    found = [changed(of_rank, wrong.path, wrong.change) for of_rank in each]
    with pytest.raises(Finding) as raised:
        wrong.law(wrong.scenario, found if isinstance(right, list) else found[0], facts)
    assert raised.value.misconception == wrong.misconception, raised.value
