"""Checks of 05: what a group does when it is told to, and when the hooks of the forward tell it.

One run shows everything (see `forward_runs`), and the oracle is the same model in one piece.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hwfsdp.eventlog import EventLog
from hwfsdp.learn.checks.forward_runs import FIRST, PAIR, Data, probe_forward
from hwfsdp.learn.checks.watched import Chain, Layer, Oracle, Tree
from hwfsdp.learn.diagnose import compare_counts, compare_gradients, compare_order, first_difference
from hwfsdp.learn.run import Ranks, Run, Unreported
from hwfsdp.learn.verdict import Check, Finding

RECOMPUTED = ("reentrant", "without reentry")
WORDS = {
    "chain": "four layers",
    "kept": "reshard_after_forward=False",
    "no grad": "a forward under no_grad",
    "tree": "nested modules",
    "pair": "two modules in one group",
    "left out": "two modules in one group, one of which does not run",
    "reentrant": "recomputation, reentrant",
    "without reentry": "recomputation",
}
TRAINED = ("chain", "kept", "tree", "pair", *RECOMPUTED)


def _same(actual: Any, expected: Tensor) -> bool:
    return isinstance(actual, Tensor) and actual.shape == expected.shape and torch.equal(actual, expected)


def _models(ranks: Ranks, seed: int, key: str, phase: str = "forward") -> Sequence[Data]:
    """What was reported of a model, by rank; says first what a layer had to refuse in this phase."""
    run = ranks.run(probe_forward, ranks.world_size, seed=seed)
    for rank, report in enumerate(run.reports):
        for layer, refused_in, what in (report.get(key) or {}).get("unusable", []):
            if refused_in == phase or refused_in == "forward":
                late = refused_in == "backward" and key in RECOMPUTED
                text = f"Rank {rank}, {WORDS[key]}: the weight of {layer} is {what} in its {refused_in}."
                raise Finding("freed-too-early" if late else "not-gathered", text, "whole", what)
    return run[key]


def _steps(
    ranks: Ranks, seed: int, key: str, fact: str, phase: str = "forward"
) -> list[tuple[str, int, Data]]:
    """(rank and model in words, step, facts) of every step that came so far as to report `fact`.

    Raises:
        Unreported: none did, on some rank; in backward: not all did.
    """
    found = list[tuple[str, int, Data]]()
    for rank, facts in enumerate(_models(ranks, seed, key, phase)):
        there = [fact in step for step in facts["steps"]]
        if not any(there) or (phase == "backward" and not all(there)):
            raise Unreported(fact, ranks.run(probe_forward, ranks.world_size, seed=seed))
        reached = [step for step in facts["steps"] if fact in step]
        found += [(f"Rank {rank}, {WORDS[key]}, step {i + 1}", i, step) for i, step in enumerate(reached)]
    return found


def _log(facts: Data, key: str) -> EventLog:
    return Run([{"log": facts[key]}]).log()


# --- Judges ------------------------------------------------------------------------------------------------


def judge_unshard(ranks: Ranks, seed: int) -> None:
    """A group by itself: gathered once, whole after the wait, and not before."""
    run = ranks.run(probe_forward, ranks.world_size, seed=seed)
    _check_same_calls([report.get("calls", []) for report in run.reports])
    for rank, calls in enumerate(run["calls"]):
        for number, (call, facts) in enumerate(calls[: len(FIRST.split())], 1):
            _check_call(
                f"Rank {rank}, call {number} of a lone group, {call}:", facts, number > 3, number == 1, seed
            )
    for rank, log in enumerate(run["first log"]):
        when = f"on rank {rank} for a group that was unsharded three times"
        events = _log({"log": log}, "log").events
        compare_counts(events, "all_gather", 1, more="gathered-again", fewer="not-gathered", when=when)
    for rank, kept in enumerate(run["kept until copied out"]):
        if kept[:1] != [True]:
            text = f"Rank {rank}: the flat buffer was let go while copies may still read it."
            raise Finding("freed-too-early", text, "keep_until_copied_out", "nothing")


def _check_same_calls(by_rank: Sequence[Sequence[Any]]) -> None:
    """Raises a Finding if one rank started a gather and another did not."""
    for number, calls in enumerate(zip(*by_rank, strict=False), 1):
        started = [facts["in flight"] for _, facts in calls]
        if any(started) != all(started):
            text = f"After call {number} of a lone group, {calls[0][0]}: rank {started.index(True)} has a gather in "
            raise Finding("order-diverged", f"{text}flight, rank {started.index(False)} has none.")


def _check_call(where: str, facts: Data, whole: bool, untouched: bool, seed: int) -> None:
    if whole:
        _check_whole(where, facts, Layer("alone", 3, 5, seed))
        if facts["in flight"]:
            raise Finding("gathered-again", f"{where} a gather is in flight, of a group that is whole.")
    elif not untouched and not facts["in flight"]:
        early = facts["states"] != ["SHARDED"] * 2
        name, what = ("no-overlap", "over") if early else ("not-gathered", "missing")
        raise Finding(name, f"{where} afterwards the gather is {what}, expected in flight.")


def _check_whole(where: str, facts: Data, layer: Layer) -> None:
    if facts["states"] != ["UNSHARDED"] * 2:
        raise Finding(
            "wrong-state", f"{where} the parameters are {facts['states']}.", "UNSHARDED", facts["states"]
        )
    for name, expected in (("weight", layer.weight), ("bias", layer.bias)):
        if not _same(facts[name], expected):
            raise Finding("wrong-value", f"{where} the {name} is not the whole one.", expected, facts[name])


def _check_sharded(where: str, facts: Data) -> None:
    if facts["bytes"]:
        raise Finding(
            "not-freed", f"{where} {facts['bytes']} B of whole parameters are alive.", 0, facts["bytes"]
        )
    if facts["states"] != ["SHARDED"] * 2 or not facts["sharded"]:
        raise Finding(
            "wrong-state", f"{where} the parameters are {facts['states']}.", "SHARDED", facts["states"]
        )


def judge_reshard(ranks: Ranks, seed: int) -> None:
    """A group by itself: freed, once or twice, and what becomes of a gather in flight."""
    run = ranks.run(probe_forward, ranks.world_size, seed=seed)
    layer = Layer("alone", 3, 5, seed)
    for rank, calls in enumerate(run["calls"]):
        for number, (call, facts) in enumerate(calls, 1):
            where = f"Rank {rank}, call {number} of a lone group, {call}:"
            if call == "reshard":
                _check_sharded(where, facts)
            else:
                _check_call(where, facts, number in (4, 5, 6, 7, 11), number == 1, seed)
    for rank, there in enumerate(run["still in flight"]):
        if not there:
            text = (
                f"Rank {rank}: reshard dropped a gather of the shards that stay; they will be gathered twice."
            )
            raise Finding("gathered-again", text, "in flight", "dropped")
        _check_whole(
            f"Rank {rank}, a gather that reshard met in flight:", run["gathered in flight"][rank], layer
        )
        if run["one parameter"][rank] != ["SHARDED"]:
            raise Finding(
                "wrong-state", f"Rank {rank}: a group of one parameter, sharded, is not after reshard."
            )
        if ranks.world_size == 1:  # no shards are larger than those of one rank
            continue
        kept, waited = run["stale"][rank]
        if kept:
            text = f"Rank {rank}: reshard freed the larger shards, and the gather of them is still in flight."
            raise Finding("wrong-state", text, "dropped", "in flight")
        if not waited:
            text = f"Rank {rank}: reshard freed larger shards, and compute had not waited for the gather of them."
            raise Finding("freed-too-early", text)
        _check_sharded(f"Rank {rank}, reshard from larger shards:", run["after stale"][rank])


def judge_outputs(ranks: Ranks, seed: int) -> None:
    """Every model's outputs, after a look at whether the gathers had been waited for."""
    for where, _, facts in _steps(ranks, seed, "chain", "forward"):
        _check_waits(where, _log(facts, "forward"))
    oracles = {"tree": Oracle(seed, ranks.world_size, Tree)}
    for key in TRAINED:
        oracle = oracles.get(key) or oracles.setdefault("chain", Oracle(seed, ranks.world_size))
        for where, step, facts in _steps(ranks, seed, key, "out"):
            _check_output(where, facts["out"], oracle.out(step, int(where[5])))
    for where, step, facts in _steps(ranks, seed, "left out", "out"):
        _check_output(where, facts["out"], oracles["chain"].out(step, int(where[5])))
    for rank, facts in enumerate(_models(ranks, seed, "no grad")):
        _check_output(f"Rank {rank}, {WORDS['no grad']}", facts.get("out"), oracles["tree"].out(0, rank))
    logs = [_log(facts, "forward") for _, step, facts in _steps(ranks, seed, "chain", "forward") if step == 0]
    compare_order(dict(enumerate(log.collectives() for log in logs)))


def _check_waits(where: str, log: EventLog) -> None:
    """Between a gather's issue and its copy-out, compute waits for it."""
    for copy in log.select("copy_out"):
        gathers = [e for e in log.select("all_gather", owner=copy.owner) if e.seq < copy.seq]
        if not gathers:
            raise Finding("not-gathered", f"{where}: {copy.owner} is copied out without a gather.")
        waits = [e.seq for e in log.select("wait", stream="compute") if gathers[-1].seq in e.after]
        if not any(seq < copy.seq for seq in waits):
            text = f"{where}: {copy.owner} is copied out, and compute never waited for its all-gather."
            raise Finding("used-before-wait", text, "all_gather, wait, copy_out", "all_gather, copy_out")


def _check_output(where: str, actual: Any, expected: Tensor) -> None:
    if not _same(actual, expected):
        same_shape = isinstance(actual, Tensor) and actual.shape == expected.shape
        at = f", {first_difference(actual, expected)}" if same_shape else ""
        raise Finding(
            "wrong-value", f"{where}: the output is not the unsharded model's{at}.", expected, actual
        )


def judge_memory(ranks: Ranks, seed: int) -> None:
    """Which groups have memory while each layer computes, between forward and backward, and after it."""
    for key in TRAINED:
        sizes = _group_sizes(Oracle(seed, ranks.world_size, Tree if key == "tree" else Chain), key)
        for rank, facts in enumerate(_models(ranks, seed, key)):
            for look in facts["looks"]:
                if not look["recomputed"]:
                    where = f"Rank {rank}, {WORDS[key]}, in the forward of {look['in']}"
                    _check_alive(where, look["alive"], _expected_in(key, look["in"], sizes), sizes)
        kept = {"kept": list(sizes), "tree": ["Tree"]}.get(key, [])
        for where, _, facts in _steps(ranks, seed, key, "alive"):
            _check_alive(f"{where}, after the forward", facts["alive"], kept, sizes)
            _check_let_go(f"{where}, after the forward", "flat buffers of gathers", facts.get("buffers", {}))
    for where, _, facts in _steps(ranks, seed, "left out", "alive"):
        _check_alive(f"{where}, after the forward", facts["alive"], [], {})
    sizes = _group_sizes(Oracle(seed, ranks.world_size, Tree), "tree")
    for rank, facts in enumerate(_models(ranks, seed, "no grad")):
        _check_alive(f"Rank {rank}, {WORDS['no grad']}, after it", facts.get("alive", {}), ["Tree"], sizes)


def _group_sizes(oracle: Oracle, key: str) -> dict[str, int]:
    """Bytes of each group when whole."""
    sizes: dict[str, int] = {}
    for layer, nbytes in oracle.sizes().items():
        group = _group_of(key, layer)
        sizes[group] = sizes.get(group, 0) + nbytes
    return sizes


def _group_of(key: str, layer: str) -> str:
    if key == "tree":
        return {"branch.own": "branch", "branch.leaf": "branch.leaf"}.get(layer, "Tree")
    return PAIR if key == "pair" and layer in PAIR.split(", ") else layer


def _expected_in(key: str, layer: str, sizes: Mapping[str, int]) -> list[str]:
    """Groups that have memory while this layer computes: its own, those around it, those that stay."""
    group = _group_of(key, layer)
    if key == "kept":
        return list(sizes)[: list(sizes).index(group) + 1]
    if key == "tree":
        return {"Tree": ["Tree"], "branch": ["Tree", "branch"]}.get(group, ["Tree", "branch", "branch.leaf"])
    return [group]


def _check_alive(
    where: str, alive: Mapping[str, int], expected: Sequence[str], sizes: Mapping[str, int]
) -> None:
    more, fewer = [g for g in alive if g not in expected], [g for g in expected if g not in alive]
    should = sum(sizes.get(group, 0) for group in expected)
    numbers = (
        f"{sum(alive.values()):,} B = {len(alive)} groups are whole; expected {should:,} B = {len(expected)}"
    )
    if more:
        raise Finding(
            "not-freed", f"{where}, not freed: {', '.join(more)}. {numbers}.", should, sum(alive.values())
        )
    if fewer:
        text = f"{where}, freed although to stay: {', '.join(fewer)}. {numbers}."
        raise Finding("resharded-anyway", text, should, sum(alive.values()))


def _check_let_go(where: str, what: str, left: Mapping[str, int]) -> None:
    if left:
        text = f"{where}: {what} are alive: {', '.join(left)}. {sum(left.values()):,} B, expected 0 B."
        raise Finding("kept-alive", text, 0, sum(left.values()))


def judge_order(ranks: Ranks, seed: int) -> None:
    """The order of forwards, noted once each and never in a recomputation, and phases afterwards."""
    for key in TRAINED:
        expected = [*dict.fromkeys(_group_of(key, f"layers.{i}") for i in range(4))]
        expected = ["branch.leaf", "branch", "Tree"] if key == "tree" else expected
        for where, _, facts in _steps(ranks, seed, key, "idle"):
            _check_idle(where, facts["idle"])
            if facts["order"] != expected:
                text = f"{where}: forwards noted: {', '.join(facts['order']) or 'none'}; expected {', '.join(expected)}."
                raise Finding("order-not-noted", text, expected, facts["order"])
            if facts.get("noted in backward"):
                text = (
                    f"{where}: in a recomputation noted as forwards: {', '.join(facts['noted in backward'])}."
                )
                raise Finding("order-not-noted", text, "none", facts["noted in backward"])
    for where, _, facts in _steps(ranks, seed, "left out", "idle"):
        _check_idle(where, facts["idle"])


def _check_idle(where: str, found: Mapping[str, Sequence[Any]]) -> None:
    for fqn, (phase, left) in found.items():
        if phase != "IDLE" or left:
            text = f"{where}: after the forward {fqn} is in phase {phase}, {left} modules to run."
            raise Finding("wrong-state", text, "IDLE, 0", f"{phase}, {left}")


def judge_backward(ranks: Ranks, seed: int) -> None:
    """Gathers of the backward, memory after it, gradients."""
    counts = {"kept": 0, "tree": 2, "pair": 3}
    for key in TRAINED:
        oracle = Oracle(seed, ranks.world_size, Tree if key == "tree" else Chain)
        found = _steps(ranks, seed, key, "grads", "backward")
        for where, _, facts in found:
            more = {"kept": "resharded-anyway"} | dict.fromkeys(RECOMPUTED, "freed-too-early")
            events = _log(facts, "backward").events
            name, when = more.get(key, "gathered-again"), f"in backward ({where})"
            compare_counts(
                events, "all_gather", counts.get(key, 4), more=name, fewer="never-resharded", when=when
            )
            _check_alive(f"{where}, after the backward", facts["after"], [], {})
            _check_let_go(
                f"{where}, after the backward", "outputs that the caller has dropped", facts["outputs"]
            )
        for step in range(len(found) // ranks.world_size):
            _check_grads(
                f"{WORDS[key]}, step {step + 1}", [f for _, i, f in found if i == step], oracle.grads(step)
            )
    for rank, facts in enumerate(_models(ranks, seed, "no grad", "backward")):
        events = _log(facts, "log").collectives() if "log" in facts else []
        if events or "log" not in facts:
            text = f"Rank {rank}: a forward under no_grad; later its input is used elsewhere, and that backward gathers."
            raise Finding("gathered-again", text, 0, len(events))


def _check_grads(where: str, found: Sequence[Data], oracle: Mapping[str, Tensor]) -> None:
    """Rows of all ranks, end to end, against the whole gradient."""
    for name, expected in oracle.items():
        rows = [facts["grads"].get(name) for facts in found]
        there = [part for part in rows if isinstance(part, Tensor)]
        whole = torch.cat(there) if len(there) == len(rows) else None
        compare_gradients(f"{name} ({where})", [whole], expected, len(found))


def judge_prefetch(ranks: Ranks, seed: int) -> None:
    """From the second forward on: own wait, next gather, own copy-out."""
    for key in ("chain", "pair"):
        for where, step, facts in _steps(ranks, seed, key, "grads", "backward"):
            log = _log(facts, "forward")
            order = [*dict.fromkeys(_group_of(key, f"layers.{i}") for i in range(4))]
            when = f"in the forward ({where})"
            compare_counts(
                log.events, "all_gather", len(order), more="gathered-again", fewer="not-gathered", when=when
            )
            for group, following in zip(order, order[1:], strict=False) if step else ():
                _check_prefetch(where, log, group, following)


def _check_prefetch(where: str, log: EventLog, group: str, following: str) -> None:
    [own], [gather] = log.select("all_gather", owner=group), log.select("all_gather", owner=following)
    [copy] = log.select("copy_out", owner=group)
    wait = min((e.seq for e in log.select("wait") if own.seq in e.after), default=-1)
    begun = min((e.seq for e in log.select("forward", owner=group)), default=copy.seq)
    issued = [(own.seq, "its gather"), (wait, "its wait"), (copy.seq, "its copy-out"), (begun, "its forward")]
    order = ", ".join(name for _, name in sorted([*issued, (gather.seq, f"the gather of {following}")]))
    text, expected = (
        f"{where}: for {group} the order is: {order}.",
        "gather, wait, next gather, copy-out, forward",
    )
    if gather.seq > begun:
        raise Finding("not-prefetched", text, expected, order)
    if gather.seq < wait:
        raise Finding("prefetched-too-early", text, expected, order)
    if gather.seq > copy.seq:
        raise Finding("prefetched-too-late", text, expected, order)


UNSHARD, RESHARD, OUTPUTS, ORDER = "05.unshard", "05.reshard", "05.outputs", "05.order"
CHECKS = (
    Check(UNSHARD, "a group is gathered once, and whole after the wait", 1, judge_unshard),
    Check(RESHARD, "a group is freed, whatever is in flight", 1, judge_reshard, (UNSHARD,)),
    Check(OUTPUTS, "outputs are those of the unsharded model", 1, judge_outputs, (UNSHARD,)),
    Check(
        "05.memory", "one group is whole at a time, and those that are to stay", 1, judge_memory, (OUTPUTS,)
    ),
    Check(ORDER, "the order of forwards is noted", 1, judge_order, (OUTPUTS,)),
    Check(
        "05.backward",
        "the backward finds what it needs, and gathers no more",
        1,
        judge_backward,
        (OUTPUTS, ORDER),
    ),
    Check(
        "05.prefetch",
        "the next gather starts after the own one, before the copies",
        1,
        judge_prefetch,
        (OUTPUTS,),
    ),
)
