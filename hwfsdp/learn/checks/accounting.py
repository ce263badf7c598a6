"""03: bytes predicted, against bytes measured on four ranks, and against closed forms written another way.

A wrong prediction is compared with *theories*: what it would be if, for example, padding were left out. The one that explains
the most wrong predictions is the verdict.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from hwfsdp import accounting
from hwfsdp.accounting import GroupSizes, MeshShape, Strategy
from hwfsdp.learn.checks.accounting_runs import AXIS, GROUPS, ROWS, WORLD_SIZE, probe_measure
from hwfsdp.learn.checks.accounting_theories import (
    Setup,
    Wrong,
    all_reduce_sizes,
    gather_sizes,
    scatter_sizes,
    sent_sizes,
    state_sizes,
    verdict,
    wire_sizes,
)
from hwfsdp.learn.run import Ranks, Report, attempt
from hwfsdp.learn.verdict import Check, Finding

Walk = tuple[str, int, int]  # collective, bytes, ranks
Amount = tuple[dict[str, int], MeshShape]  # bytes by collective, and the mesh that they travel over
STATES = ("params", "grads", "optimizer")
FIXED, DRAWN = 80, 40  # cases by chance: the same in every grading, and others in each
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
MEASURED = (
    {  # by name of the run: strategy, itemsize of gathers, what is resharded after forward: blocks, root
        "DDP": (Strategy.DDP, 4, True, False),
        "ZERO1": (Strategy.ZERO1, 4, True, False),
        "ZERO2": (Strategy.ZERO2, 4, True, False),
        "ZERO3": (Strategy.ZERO3, 4, True, False),
        "ZERO3 in bf16": (Strategy.ZERO3, 2, True, False),
        "ZERO3, whole until backward": (Strategy.ZERO3, 4, False, False),
        "HSDP": (Strategy.HSDP, 4, True, False),
    }
)


def llama_8b() -> list[GroupSizes]:
    """The shapes of Llama 3 8B, a group for each of 32 layers and one for the rest: 8,030,261,248 parameters."""
    width, kv, hidden, vocabulary = 4096, 1024, 14336, 128256
    layer = [(width, width), (kv, width), (kv, width), (width, width)]
    layer += [(hidden, width), (hidden, width), (width, hidden)]
    norms = [(width,), (width,)]
    rest = [(vocabulary, width), (width,), (vocabulary, width)]
    return [GroupSizes([*layer, *norms], 2, 4)] * 32 + [GroupSizes(rest, 2, 4, resharded_after_forward=False)]


def setups(seed: int) -> list[Setup]:
    """Those that are measured, then large ones, then small ones by chance, some of them from the seed."""
    found = []
    for run, (strategy, gathered, blocks, root) in MEASURED.items():
        groups = [GroupSizes(s, gathered, 4, b) for s, b in zip(GROUPS, (blocks, blocks, root), strict=True)]
        shards = AXIS if strategy is Strategy.HSDP else None
        for rank in range(WORLD_SIZE):
            words = f"the model of the runs, {run}, {WORLD_SIZE} ranks"
            found.append(Setup(words, groups, strategy, WORLD_SIZE, shards, rank, accounting.FP32_ADAM, run))
    for strategy in Strategy:
        shards = 8 if strategy is Strategy.HSDP else None
        found.append(Setup(f"Llama 3 8B, {strategy.name}, 512 ranks", llama_8b(), strategy, 512, shards, 509))
    found += [_small(random.Random(n)) for n in range(FIXED)]
    return found + [_small(random.Random(f"{seed}, {n}"))._replace(drawn=True) for n in range(DRAWN)]


def _small(draw: random.Random) -> Setup:
    strategy, replicas, shards = draw.choice(list(Strategy)), draw.randint(1, 4), draw.randint(1, 5)
    groups = [
        GroupSizes(
            [tuple(draw.randint(1, 9) for _ in range(draw.randint(1, 3))) for _ in range(draw.randint(1, 3))],
            draw.choice((2, 4, 8)),
            draw.choice((1, 4)),
            draw.random() < 0.5,
        )
        for _ in range(draw.randint(1, 3))
    ]
    world_size = replicas * shards
    words = (
        f"{strategy.name}, {world_size} ranks, shapes {[shape for group in groups for shape in group.shapes]}"
    )
    return Setup(words, groups, strategy, world_size, shards, draw.randrange(world_size))


def fixed_walks() -> list[Walk]:
    """Cases for `on_the_wire` that are the same in every grading; some are too large for floats."""
    sizes = [(96, 4), (1 << 20, 2), (1000, 1), (7, 1), (10**17 + 1, 7), (10**18 + 3, 512)]
    return [(collective, n, w) for n, w in sizes for collective in COLLECTIVES] + _walks(random.Random(0))


def _walks(draw: random.Random) -> list[Walk]:
    sizes = [(draw.randint(0, 1000), draw.randint(2, 9)) for _ in range(20)]
    return [(collective, n, w) for n, w in sizes for collective in COLLECTIVES]


def walks(seed: int) -> list[Walk]:
    return fixed_walks() + _walks(random.Random(f"walks {seed}"))


def fixed_amounts() -> list[Amount]:
    """Cases for `bytes_sent`: those measured on rings, some with keys missing, some by chance, always the same."""
    measured = dict.fromkeys(COLLECTIVES, 4 * ROWS)
    cases = [(measured, MeshShape(1, WORLD_SIZE)), (measured, MeshShape(AXIS, AXIS))]
    cases += [({}, MeshShape(2, 2)), ({"all_reduce": 90, "all_gather": 60}, MeshShape(3, 5))]
    return cases + _amounts(random.Random(0))


def _amounts(draw: random.Random) -> list[Amount]:
    cases = []
    for _ in range(20):
        traffic = {collective: draw.randint(0, 5000) for collective in COLLECTIVES}
        cases.append((traffic, MeshShape(draw.randint(1, 6), draw.randint(1, 6))))
    return cases


def amounts(seed: int) -> list[Amount]:
    return fixed_amounts() + _amounts(random.Random(f"amounts {seed}"))


# --- On the rank -------------------------------------------------------------------------------------------


def probe(report: Report, seed: int) -> None:
    """What is predicted, function by function."""
    attempt(report, "wire", lambda: [_plain(accounting.on_the_wire(*case)) for case in walks(seed)])
    attempt(report, "states", lambda: [_states(setup) for setup in setups(seed)])
    attempt(report, "step", lambda: [_of_dict(accounting.step_traffic(*case)) for case in steps(seed)])
    attempt(report, "strategies", lambda: [_traffic(setup) for setup in setups(seed)])
    attempt(report, "sent", lambda: [_of_dict(accounting.bytes_sent(*case)) for case in amounts(seed)])


def steps(seed: int) -> list[tuple[Sequence[GroupSizes], int]]:
    """Cases for `step_traffic`: (groups, ranks)."""
    return [(setup.groups, setup.world_size) for setup in steps_of(seed)]


def steps_of(seed: int) -> list[Setup]:
    return [setup._replace(strategy=Strategy.ZERO3) if not setup.run else setup for setup in setups(seed) if
            not setup.run or setup.strategy is Strategy.ZERO3]  # fmt: skip


def _states(setup: Setup) -> Any:
    return _plain(
        accounting.model_state_bytes(
            setup.shapes, setup.strategy, setup.world_size, setup.shards, setup.rank, setup.per_element
        )
    )


def _traffic(setup: Setup) -> Any:
    found = accounting.strategy_traffic(setup.groups, setup.strategy, setup.world_size, setup.shards)
    return _of_dict(found)


def _of_dict(found: Any) -> Any:
    return (
        {str(key): _plain(value) for key, value in found.items()}
        if isinstance(found, Mapping)
        else repr(found)
    )


def _plain(value: Any) -> Any:
    """Integers as they are, anything else as text: bytes are whole."""
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value if type(value) is int else repr(value)


# --- Judges ------------------------------------------------------------------------------------------------


def _values(found: Any, keys: Sequence[str], what: str) -> dict[str, Any]:
    """A prediction by name; raises a Finding if it has other keys."""
    if not isinstance(found, dict) or set(found) != set(keys):
        shown = sorted(found) if isinstance(found, dict) else found
        raise Finding("wrong-formula", f"{what} returns other keys.", list(keys), shown)
    return found


def judge_wire(ranks: Ranks, seed: int) -> None:
    """Blocks passed on around a ring."""
    wrong = []
    found, fixed = ranks.run(probe, 1, seed=seed)["wire"][0], len(fixed_walks())
    for number, ((collective, n, w), actual) in enumerate(zip(walks(seed), found, strict=True)):
        (_, expected), *theories = wire_sizes(collective, n, w)
        if actual != expected:
            words = f"on_the_wire({collective!r}, {n:,}, {w})"
            wrong.append(Wrong(words, expected, actual, theories, drawn=number >= fixed))
    verdict(wrong)


def judge_states(ranks: Ranks, seed: int) -> None:
    """The ledger on four ranks; sizes counted row by row."""
    wrong = []
    found = ranks.run(probe, 1, seed=seed)["states"][0]
    for setup, actual in zip(setups(seed), found, strict=True):
        if not isinstance(actual, list) or len(actual) != len(STATES):
            raise Finding(
                "wrong-formula", "model_state_bytes returns no StateBytes.", "three numbers", actual
            )
        expected = [sizes[0][1] for sizes in state_sizes(setup)]
        words = f"model_state_bytes, {setup.words}, rank {setup.rank}"
        if setup.run:
            expected = ranks.reference(probe_measure, WORLD_SIZE)[setup.run][setup.rank]["states"]
            words += ", measured by the ledger"
        rights = zip(STATES, expected, actual, state_sizes(setup), strict=True)
        wrong += [Wrong(f"{words}, {s}", e, a, sizes[1:], setup.drawn) for s, e, a, sizes in rights if e != a]
    verdict(wrong)


def judge_step(ranks: Ranks, seed: int) -> None:
    """The event log of four ranks; groups added up one by one."""
    wrong = []
    keys = COLLECTIVES[:2]
    found = ranks.run(probe, 1, seed=seed)["step"][0]
    for setup, predicted in zip(steps_of(seed), found, strict=True):
        wrong += _wrong_traffic(ranks, "step_traffic", setup, _values(predicted, keys, "step_traffic"))
    verdict(wrong)


def judge_strategies(ranks: Ranks, seed: int) -> None:
    """The same for every strategy."""
    wrong = []
    found = ranks.run(probe, 1, seed=seed)["strategies"][0]
    for setup, predicted in zip(setups(seed), found, strict=True):
        values = _values(predicted, COLLECTIVES, "strategy_traffic")
        wrong += _wrong_traffic(ranks, "strategy_traffic", setup, values)
    verdict(wrong)


def _wrong_traffic(ranks: Ranks, function: str, setup: Setup, predicted: Mapping[str, Any]) -> list[Wrong]:
    wrong = []
    theories = {"all_gather": gather_sizes, "reduce_scatter": scatter_sizes, "all_reduce": all_reduce_sizes}
    for collective, actual in predicted.items():
        (_, expected), *others = theories[collective](setup)
        words = f"{function}, {setup.words}, {collective}"
        if setup.run:
            measured = ranks.reference(probe_measure, WORLD_SIZE)[setup.run][0]["traffic"]
            expected, words = measured.get(collective, 0), f"{words}, measured by the event log"
        if actual != expected:
            wrong.append(Wrong(words, expected, actual, others, setup.drawn))
    return wrong


def judge_sent(ranks: Ranks, seed: int) -> None:
    """Bytes of sends around real rings; blocks passed on along each axis."""
    wrong = []
    found, fixed = ranks.run(probe, 1, seed=seed)["sent"][0], len(fixed_amounts())
    for number, ((traffic, mesh), predicted) in enumerate(zip(amounts(seed), found, strict=True)):
        values = _values(predicted, list(traffic), "bytes_sent")
        measured = ranks.reference(probe_measure, WORLD_SIZE)["sent"][0].get(str(tuple(mesh)), {})
        for collective, n in traffic.items():
            (_, expected), *theories = sent_sizes(collective, n, mesh)
            words = f"bytes_sent over {mesh}, {collective} of {n:,} B"
            if n == 4 * ROWS and measured:
                expected, words = measured[collective], f"{words}, measured on real rings"
            if values[collective] != expected:
                wrong.append(Wrong(words, expected, values[collective], theories, drawn=number >= fixed))
    verdict(wrong)


CHECKS = (
    Check("03.wire", "a ring sends all blocks but one in each round", 1, judge_wire),
    Check("03.step", "a step gathers whole groups once or twice and reduces them once", 1, judge_step),
    Check("03.states", "model states take the bytes that the ledger finds", 1, judge_states),
    Check(
        "03.traffic", "strategies move the bytes that the event log has", 1, judge_strategies, ("03.step",)
    ),
    Check("03.sent", "each collective is sent along its own axis of the mesh", 1, judge_sent, ("03.wire",)),
)
