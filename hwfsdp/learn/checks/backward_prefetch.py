"""10: order by a rule that is said once more here; reductions by times of a virtual clock; gradients of the unsharded model.

A step on virtual GPUs has a target, which the README states: what the package itself takes, and 3 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hwfsdp.eventlog import EventLog
from hwfsdp.learn.checks.backward_prefetch_runs import (
    CASES,
    all_reduced,
    backwards_of,
    drawn_orders,
    drawn_path,
    listed_at,
    made,
    one_after_the_other,
    places_in,
    probe_alone,
    probe_backwards,
)
from hwfsdp.learn.checks.forward_prefetch_runs import Path, data
from hwfsdp.learn.checks.gradients import compare_shards
from hwfsdp.learn.checks.lone_streams import Issued, work_of
from hwfsdp.learn.checks.overlap import (
    Targets,
    check_ahead,
    check_figures,
    check_ordered,
    check_reductions,
    log_of,
)
from hwfsdp.learn.diagnose import compare_order
from hwfsdp.learn.run import Ranks
from hwfsdp.learn.verdict import Check, Finding

TARGETS = Targets(exposed_us=3030.0, step_ms=24.0, peak_gib=2.12)  # stated in the README
NEAR = 1e-3  # µs
WORDS = {
    "usual": "four layers",
    "repeated": "a layer that runs twice",
    "listed": "a layer with backward prefetches listed",
    "embedding": "an embedding with unshard_in_backward off",
    "two in flight": "two reductions allowed in flight",
    "replicated": "replicas only",
    "not the last": "two backwards, the first not the last",
}


def judge_order(ranks: Ranks, seed: int) -> None:
    """Which group comes next in backward."""
    run = ranks.run(probe_alone, 1, seed=seed)
    for order, answers in zip(drawn_orders(seed), run["decisions"][0], strict=True):
        for index, answer in zip(places_in(order), answers, strict=True):
            expected = order[index - 1] if index in range(1, len(order)) else None
            if answer != expected:
                text = f"next_in_backward: forwards ended in the order {_letters(order)}; for index {index} it says "
                text += f"{_letters([answer])}, expected {_letters([expected])}."
                missing = answer is None
                raise Finding(
                    "not-prefetched" if missing else "guessed-wrong",
                    text,
                    _letters([expected]),
                    _letters([answer]),
                )


def _letters(groups: Sequence[int | None]) -> str:
    return " ".join("nothing" if n is None else "ABCDE"[n] for n in groups) or "of no group"


# --- Streams by themselves ---------------------------------------------------------------------------------


def judge_streams(ranks: Ranks, seed: int) -> None:
    """A reduction begins when its input is packed, on its stream; nobody else is held up."""
    for number, facts in enumerate(ranks.run(probe_alone, 1, seed=seed)["streams"][0]):
        where = f"reduce_after_packing, call {number + 1}"
        calls = [Issued(*each) for each in facts["issued"] if each[0] == f"reduce {number}"]
        if len(calls) != 1:
            raise Finding("wrong-value", f"{where}: `reduce` was called {len(calls)} times.", 1, len(calls))
        if calls[0].stream != "reduce_scatter":
            text = f"{where}: `reduce` runs on the stream {calls[0].stream}, expected reduce_scatter."
            raise Finding("wrong-stream", text, "reduce_scatter", calls[0].stream)
        _check_reduction(where, facts, calls[0])
        if not facts["same result"]:
            raise Finding(
                "wrong-value", f"{where}: the tensor returned is not the one that `reduce` returned."
            )


def _check_reduction(where: str, facts: dict[str, Any], reduction: Issued) -> None:
    """Its times, and those of everybody else."""
    if reduction.begin < facts["packed"] - NEAR:
        text = (
            f"{where}: the reduction begins at {reduction.begin:.0f} µs, packing its input ends at {facts['packed']:.0f} µs; "
            "the reduce-scatter stream does not wait for compute."
        )
        raise Finding("used-before-wait", text, f"{facts['packed']:.0f} µs", f"{reduction.begin:.0f} µs")
    stream, us = facts["event"]
    if us < reduction.end - NEAR:
        text = f"{where}: the event returned is of the stream {stream} at {us:.0f} µs; the reduction ends at {reduction.end:.0f} µs."
        raise Finding("used-before-wait", text, f"{reduction.end:.0f} µs", f"{us:.0f} µs")
    if facts["host waited"] or facts["host"] - facts["before"]["host"] > 100.0:
        raise Finding("no-overlap", f"{where}: the host waits for the device; it issues nothing meanwhile.")
    for name, before in facts["before"]["ends"].items():
        after = facts["ends"][name]
        if name != "reduce_scatter" and after > before + NEAR:
            text = f"{where}: {name} waits until {after:.0f} µs; the next backward is to run beside the reduction."
            raise Finding("no-overlap", text, f"{before:.0f} µs", f"{after:.0f} µs")


def judge_reductions(ranks: Ranks, seed: int) -> None:
    """Which buffers are kept, and until when compute waits."""
    run = ranks.run(probe_alone, 1, seed=seed)
    kept = {
        "add_reduction, four times": ([0, 1, 2, 3], 0),
        "wait_for_reductions(leave=4)": ([0, 1, 2, 3], 0),
        "wait_for_reductions(leave=2)": ([2, 3], 2),
        "wait_for_reductions(leave=1)": ([3], 3),
        "wait_for_reductions()": ([], 5),
        "finish_reductions()": ([], 7),
        "finish_reductions(), again": ([], 7),
    }
    found = run[one_after_the_other.__name__][0]
    for facts in found["facts"]:
        inputs, count = kept[facts["call"]]
        last = work_of(facts)[f"rest {count - 1}"] if count else None  # casts are on the reduction's stream
        _check_queue(facts, inputs, inputs, last, "Four reductions")
    _check_host(found)
    _judge_all_reduced(run[all_reduced.__name__][0])
    done = run["put off"][0]["after"]
    left = [name for name in ("reduce_scatter", "all_reduce") if name not in done]
    if left:
        text = f"On the CPU, after `finish_reductions()`: what was put off on {' and '.join(left)} is still to be done."
        raise Finding("left-in-flight", text, "done on reduce_scatter, all_reduce", ", ".join(done) or "none")


def _judge_all_reduced(found: dict[str, Any]) -> None:
    what = "Three reductions that go on on other streams"
    kept = {
        "add_reduction, three times": ([0, 1, 2], [0, 1, 2], ""),
        "wait_for_reductions(leave=1)": ([2], [0, 1, 2], "reduce 1"),
        "finish_reductions()": ([], [], "rest"),
    }
    for facts in found["facts"]:
        inputs, results, until = kept[facts["call"]]
        rests = [work for name, work in work_of(facts).items() if name.startswith("rest")]
        last = max(rests, key=lambda work: work.end) if until == "rest" else work_of(facts).get(until)
        _check_queue(facts, inputs, results, last, what)
    _check_host(found)


def _check_queue(
    facts: dict[str, Any], inputs: Sequence[int], results: Sequence[int], last: Issued | None, what: str
) -> None:
    """Of one moment: too many buffers, the wrong ones, then a wait that is too short or too long, then too few buffers."""
    where = f"{what}, after `{facts['call']}`"
    kept = [("inputs", facts["inputs"], inputs), ("results", facts["results"], results)]
    for name, found, expected in kept:
        if len(found) > len(expected):
            text = f"{where}: {name} of reductions {_numbers(found)} are kept; expected {_numbers(expected)}."
            bounded = facts["call"].startswith("wait") and name == "inputs"
            kind = "unbounded-reductions" if bounded else "kept-alive"
            raise Finding(kind, text, _numbers(expected), _numbers(found))
    if inputs and len(facts["inputs"]) == len(inputs) and max(facts["inputs"]) < max(inputs):
        text = f"{where}: reductions {_numbers(facts['inputs'])} are left in flight, the oldest; expected {_numbers(inputs)}."
        raise Finding("newest-first", text, _numbers(inputs), _numbers(facts["inputs"]))
    _check_compute(where, facts, last)
    for name, found, expected in kept:
        if list(found) != list(expected):
            text = f"{where}: {name} of reductions {_numbers(found)} are kept; expected {_numbers(expected)}."
            raise Finding("freed-too-early", text, _numbers(expected), _numbers(found))


def _numbers(found: Sequence[int]) -> str:
    return ", ".join(map(str, found)) or "none"


def _check_compute(where: str, facts: dict[str, Any], last: Issued | None) -> None:
    """Compute has waited until `last` is over, and for nothing else."""
    compute, until = facts["ends"]["compute"], last.end if last else 0.0
    if last is not None and compute < until - NEAR:
        text = f"{where}: compute goes on at {compute:.0f} µs; {last.stream} is busy with a reduction until {until:.0f} µs."
        kind = "left-in-flight" if facts["call"].startswith("finish") else "used-before-wait"
        raise Finding(kind, text, f"{until:.0f} µs", f"{compute:.0f} µs")
    if compute > until + NEAR:
        text = f"{where}: compute waits until {compute:.0f} µs; what it has to wait for is over at {until:.0f} µs."
        raise Finding("no-overlap", text, f"{until:.0f} µs", f"{compute:.0f} µs")


def _check_host(found: dict[str, Any]) -> None:
    if found["host waited"]:
        text = f"The host waits for the stream {found['host waited'][0]}; it issues nothing meanwhile."
        raise Finding("no-overlap", text, "compute waits", "the host waits")


# --- A step on virtual GPUs --------------------------------------------------------------------------------


def judge_waits(ranks: Ranks, seed: int) -> None:
    """Everything that is read, by the optimizer too, has been waited for."""
    found = ranks.run(probe_alone, 1, seed=seed)["simulated"][0]
    check_ordered(log_of(found), "A step on virtual GPUs")


def judge_hidden(ranks: Ranks, seed: int) -> None:
    """On virtual GPUs: gathers and reductions under backward, a bounded number, within time and memory."""
    found = ranks.run(probe_alone, 1, seed=seed)["simulated"][0]
    log = log_of(found)
    if found["host waited"]:
        text = f"In a step on virtual GPUs, the host waits {len(found['host waited'])} times for the stream "
        raise Finding("no-overlap", f"{text}{found['host waited'][0]}; nothing is issued meanwhile.")
    check_ahead(log, "backward", found, TARGETS)
    check_reductions(log, 1, "A step on virtual GPUs")
    check_figures(found, TARGETS, "A step")


# --- Real ranks --------------------------------------------------------------------------------------------


def expected_words(case: str, path: Path) -> list[str]:
    """Gathers (+) and reductions (-) of a backward, in the order of issue: R is the root, E the embedding."""
    outer = "E" if case == "embedding" else "R"
    order = [outer, *map(str, path)] if outer == "E" else [*map(str, path), outer]
    listed = {str(at): [str(n) for n in after] for at, after in listed_at(case, path).items()}
    words, there = list[str](), {outer}  # the root is whole, the embedding's backward needs nothing

    def gather(name: str) -> None:
        if name not in there:
            words.append(f"+{name}")
            there.add(name)

    for index in reversed(range(len(order))):
        name = order[index]
        gather(name)
        for ahead in listed.get(name, order[index - 1 : index] if index else []):
            gather(ahead)
        if name != outer:
            there.discard(name)
            if name not in order[:index]:
                words.append(f"-{name}")
    return [*words, f"-{outer}"]


def words_of(log: EventLog) -> list[str]:
    """The same from a log: both are seen where they are packed, which they are for a single rank, too."""
    signs, found = {"copy": "+", "compute": "-"}, []
    for event in log.select("copy_in"):
        name = {"Paths": "R", "embed": "E"}.get(event.owner, event.owner.rpartition(".")[2])
        found.append(signs[event.stream] + name)
    return found


def judge_paths(ranks: Ranks, seed: int) -> None:
    """Gathers and reductions of all cases, in the order of issue."""
    run = ranks.run(probe_backwards, ranks.world_size, seed=seed)
    for case in CASES:
        path = drawn_path(case, seed)
        for number in range(backwards_of(case)):
            logs = [log_of({"log": facts[f"log {number}"]}) for facts in run[case]]
            compare_order({rank: log.collectives() for rank, log in enumerate(logs)})
            for rank, log in enumerate(logs):
                _check_words(f"Rank {rank}, {WORDS[case]}", words_of(log), expected_words(case, path))
        for rank, facts in enumerate(run[case]):
            left = facts[f"places {backwards_of(case) - 1}"] or facts["places 0"]
            if left:
                text = f"Rank {rank}, {WORDS[case]}: after backward, {', '.join(left)} still has a place in the order."
                raise Finding("guessed-wrong", f"{text} Its next backward would take that for its own.")


def _check_words(where: str, found: Sequence[str], expected: Sequence[str]) -> None:
    if list(found) == list(expected):
        return
    at = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), len(expected))
    there, right = (words[at] if at < len(words) else "the end" for words in (found, expected))
    legend = "(+2: layer 2 is gathered, -2: its gradients are packed for the reduction, R: the root, E: the embedding)"
    text = f"{where}: {' '.join(found)}; expected {' '.join(expected)} {legend}."
    if right.startswith("+"):
        misconception = "guessed-wrong" if there.startswith("+") else "not-prefetched"
    elif there.startswith("+"):
        misconception = "unbounded-prefetch" if there in expected[at:] else "gathered-again"
    else:
        misconception = "not-reduced"
    raise Finding(misconception, text, " ".join(expected), " ".join(found))


def judge_numbers(ranks: Ranks, seed: int) -> None:
    """Each rank's gradients are its rows of the mean."""
    run = ranks.run(probe_backwards, ranks.world_size, seed=seed)
    for case in CASES:
        parts = _parts(case, seed, ranks.world_size)
        rows = 1 if case == "replicated" else ranks.world_size
        actual = [facts["grads"] for facts in run[case]]
        compare_shards(actual, _means(parts, rows), parts, WORDS[case])


def _parts(case: str, seed: int, world_size: int) -> list[list[dict[str, Tensor]]]:
    """By rank and backward, the gradients without sharding."""
    model, path = made(case, seed), drawn_path(case, seed)
    found = []
    for rank in range(world_size):
        of_rank = []
        for number in range(backwards_of(case)):
            model.zero_grad()
            model(data(seed, number, rank), path).sum().backward()
            of_rank.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        found.append(of_rank)
    return found


def _means(parts: Sequence[Sequence[dict[str, Tensor]]], shards: int) -> list[dict[str, Tensor | None]]:
    """By rank, its rows of the mean over the ranks; one backward's after the other added, as a rank does."""
    found: list[dict[str, Tensor | None]] = [{} for _ in parts]
    for name in parts[0][0]:
        means = [
            torch.stack([of_rank[number][name].double() for of_rank in parts]).mean(0).float()
            for number in range(len(parts[0]))
        ]
        whole = sum(means[1:], means[0])
        pieces = [*whole.chunk(shards), *[whole[:0]] * shards] if shards > 1 else [whole] * len(parts)
        for mine, rows in zip(found, pieces, strict=False):
            mine[name] = rows.contiguous()
    return found


CHECKS = (
    Check("10.order", "the group before in the order of forwards is gathered next", 1, judge_order),
    Check("10.streams", "a reduction runs beside compute, after its input was packed", 1, judge_streams),
    Check(
        "10.reductions",
        "the oldest reductions are waited for, as many as have to be; buffers live that long",
        1,
        judge_reductions,
    ),
    Check(
        "10.waits",
        "nothing is read, and no step taken, before it was waited for",
        1,
        judge_waits,
        ("10.streams",),  # the log takes each of these for what runs on its own stream
    ),
    Check(
        "10.hidden",
        "on virtual GPUs, gathers and reductions are hidden: within the targets of time and memory",
        2,
        judge_hidden,
        ("10.waits",),  # who does not wait is fast
    ),
    Check("10.paths", "whatever ran in forward, one group is gathered ahead in reverse", 1, judge_paths),
    Check("10.numbers", "gradients are those of the whole batch", 1, judge_numbers),
)
