"""09: order by a rule that is said once more here; streams by times of a virtual clock; and numbers of the unsharded model.

A forward on virtual GPUs has a target, which the README states: what the package itself takes, and 3 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hwfsdp.eventlog import EventLog
from hwfsdp.learn.checks.forward_prefetch_runs import (
    Path,
    Paths,
    data,
    drawn_orders,
    drawn_paths,
    listed_at,
    probe_alone,
    probe_paths,
    update,
)
from hwfsdp.learn.checks.lone_streams import work_of
from hwfsdp.learn.checks.overlap import Targets, check_ahead, check_figures, check_ordered, log_of
from hwfsdp.learn.diagnose import compare_order, first_difference
from hwfsdp.learn.run import Ranks
from hwfsdp.learn.verdict import Check, Finding

TARGETS = Targets(exposed_us=770.0, step_ms=7.8, peak_gib=1.13)  # stated in the README
NEAR = 1e-6  # µs


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= NEAR * max(1.0, abs(a), abs(b))


# --- Order -------------------------------------------------------------------------------------------------


def follower(last: Sequence[int], place: int, current: int) -> int | None:
    """What came after `current` last time, if it was at this place then."""
    known = place + 1 < len(last) and last[place] == current
    return last[place + 1] if known else None


def judge_order(ranks: Ranks, seed: int) -> None:
    """Which group comes next: by the function, and by what a forward has noted."""
    run = ranks.run(probe_alone, 1, seed=seed)
    for (last, taken), answers in zip(drawn_orders(seed), run["decisions"][0], strict=True):
        _compare_guesses("next_in_forward", last, taken, answers)
    for (last, taken), of_forwards in zip(drawn_orders(seed), run["learned"][0], strict=True):
        for before, path, answers in zip(([], last, taken), (last, taken, taken), of_forwards, strict=True):
            _compare_guesses("ForwardOrder.enter", before, path, answers)


def _compare_guesses(what: str, last: Path, taken: Path, answers: Sequence[int | None]) -> None:
    expected = [follower(last, place, n) for place, n in enumerate(taken)]
    if list(answers) == expected:
        return
    place = next(i for i, (a, b) in enumerate(zip(answers, expected, strict=True)) if a != b)
    text = (
        f"{what}: the last forward entered {_letters(last)}, this one {_letters(taken)}. At {_letters(taken[place : place + 1])}, "
        f"place {place}, it says {_letters([answers[place]])}; expected {_letters([expected[place]])}."
    )
    missing = all(answer is None for answer in answers)
    raise Finding(
        "not-prefetched" if missing else "guessed-wrong", text, _letters(expected), _letters(answers)
    )


def _letters(groups: Sequence[int | None]) -> str:
    return " ".join("nothing" if n is None else "ABCDE"[n] for n in groups) or "no group"


# --- Streams by themselves ---------------------------------------------------------------------------------


def judge_streams(ranks: Ranks, seed: int) -> None:
    """Packing and gathering, each on its stream; the one before the other, and nobody else held up."""
    for facts in ranks.run(probe_alone, 1, seed=seed)["streams"][0]:
        _check_streams(facts["number"], facts)


def _check_streams(number: int, facts: dict[str, Any]) -> None:
    done, busy = work_of(facts), "busy" if facts["busy"] else "idle"
    where = f"pack_then_gather, call {number + 1}, while compute is {busy}"
    names = {"copy": f"pack {number}", "all_gather": f"gather {number}"}
    for stream, name in names.items():
        calls = [each[0] for each in facts["issued"]].count(name)
        if calls != 1:
            raise Finding("wrong-value", f"{where}: `{name.split()[0]}` was called {calls} times.", 1, calls)
        if done[name].stream != stream:
            text = f"{where}: `{name.split()[0]}` runs on the stream {done[name].stream}, expected {stream}."
            raise Finding("wrong-stream", text, stream, done[name].stream)
    pack, gather = done[names["copy"]], done[names["all_gather"]]
    if gather.begin < pack.end - NEAR:
        text = (
            f"{where}: the gather begins at {gather.begin:.0f} µs, packing what it sends ends at {pack.end:.0f} µs; "
            "the all-gather stream does not wait for the copy stream."
        )
        raise Finding("used-before-wait", text, f"after {pack.end:.0f} µs", f"{gather.begin:.0f} µs")
    stream, us = facts["event"]
    if us < gather.end - NEAR:
        text = f"{where}: the event returned is of the stream {stream} at {us:.0f} µs; the gather ends at {gather.end:.0f} µs."
        raise Finding("used-before-wait", text, f"{gather.end:.0f} µs", f"{us:.0f} µs")
    _check_nobody_waits(where, facts, ("copy", "all_gather"))
    free = max(pack.end, facts["before"]["ends"]["all_gather"])
    if (
        gather.begin > free + 100.0
        or pack.begin > max(facts["before"]["ends"]["copy"], facts["before"]["host"]) + 100.0
    ):
        text = f"{where}: packing begins at {pack.begin:.0f} µs, the gather at {gather.begin:.0f} µs; it could at {free:.0f} µs."
        raise Finding("no-overlap", text, f"{free:.0f} µs", f"{gather.begin:.0f} µs")
    if not _close(us, gather.end):
        text = f"{where}: the event returned is over at {us:.0f} µs; the gather ends at {gather.end:.0f} µs."
        raise Finding("no-overlap", text, f"{gather.end:.0f} µs", f"{us:.0f} µs")


def _check_nobody_waits(where: str, facts: dict[str, Any], but: Sequence[str] = ()) -> None:
    """Neither the host nor a stream other than these is held up."""
    if facts["host waited"] or facts["host"] - facts["before"]["host"] > 100.0:
        raise Finding("no-overlap", f"{where}: the host waits for the device; it issues nothing meanwhile.")
    for stream, before in facts["before"]["ends"].items():
        after = facts["ends"][stream]
        if stream not in but and not _close(before, after):
            text = f"{where}: {stream} waits until {after:.0f} µs; it has no use for these bytes yet."
            raise Finding("no-overlap", text, f"{before:.0f} µs", f"{after:.0f} µs")


def judge_buffers(ranks: Ranks, seed: int) -> None:
    """A gather's buffer is kept for its copy-out, and for nothing else."""
    run = ranks.run(probe_alone, 1, seed=seed)
    found = run["buffers"][0]
    held = {"keep 0": [True], "keep 1": [False, True], "release": [False, False]}
    for facts in found["facts"]:
        where = f"Two gathers copied out, after `{facts['call']}`"
        copies = [each for each in facts["issued"] if each[0].startswith("copy-out")]
        done = len(copies) - (
            1 if facts["call"].startswith("keep") else 0
        )  # copy-outs whose buffers are let go
        until = copies[done - 1][3] if done else 0.0
        expected = held.get(facts["call"], facts["kept"] and [False, False])
        _check_kept(where, facts["kept"], expected)
        _check_copy_stream(where, facts["ends"]["copy"], until)
    if found["host waited"]:
        text = f"The host waits for the stream {found['host waited'][0]} to keep or release a buffer."
        raise Finding("no-overlap", f"{text} It is the copy stream that has to.")
    if run["host buffer"][0]:
        text = "On the CPU, where the copy-out is over when keep_until_copied_out is called, the buffer is still kept."
        raise Finding("kept-alive", text, "let go", "kept")


def _check_kept(where: str, kept: Sequence[bool], expected: Sequence[bool]) -> None:
    if list(kept) == list(expected):
        return
    number = next(i for i, (a, b) in enumerate(zip(kept, expected, strict=True)) if a != b)
    if kept[number]:
        raise Finding("kept-alive", f"{where}: buffer {number} is still referred to.", "let go", "kept")
    text = f"{where}: nobody refers to buffer {number}, which its copy-out still reads."
    raise Finding("freed-too-early", text, "kept", "let go")


def _check_copy_stream(where: str, end: float, until: float) -> None:
    if end < until - NEAR:
        text = (
            f"{where}: the copy stream may write at {end:.0f} µs into a buffer that its copy-out reads until {until:.0f} µs; "
            "it has not waited for that."
        )
        raise Finding("freed-too-early", text, f"{until:.0f} µs", f"{end:.0f} µs")
    if end > until + NEAR:
        text = f"{where}: the copy stream waits until {end:.0f} µs, the copy-out it has to wait for is over at {until:.0f} µs."
        raise Finding("no-overlap", text, f"{until:.0f} µs", f"{end:.0f} µs")


def judge_waits(ranks: Ranks, seed: int) -> None:
    """One group's wait, then a forward in which everything that is read has been waited for."""
    run = ranks.run(probe_alone, 1, seed=seed)
    facts = run["wait"][0]
    own, compute = work_of(facts)["own gather"], facts["ends"]["compute"]
    if facts["host waited"]:
        text = f"wait_for_gather: the host waits for the stream {facts['host waited'][0]}, and issues nothing meanwhile."
        raise Finding("no-overlap", text, "compute waits", "the host waits")
    if compute < own.end - NEAR:
        text = f"wait_for_gather: compute goes on at {compute:.0f} µs, the gather ends at {own.end:.0f} µs on all_gather."
        raise Finding("used-before-wait", text, f"{own.end:.0f} µs", f"{compute:.0f} µs")
    if compute > own.end + NEAR:
        text = f"wait_for_gather: compute goes on at {compute:.0f} µs, when the group's own gather has ended at {own.end:.0f} µs."
        raise Finding("no-overlap", text, f"{own.end:.0f} µs", f"{compute:.0f} µs")
    for stream in ("copy", "reduce_scatter", "all_reduce"):
        if not _close(facts["ends"][stream], facts["before"]["ends"][stream]):
            raise Finding("no-overlap", f"wait_for_gather: {stream} waits, which has no use for the gather.")
    if not facts["in flight"]:
        text = "wait_for_gather: the gather is forgotten, and nobody can copy it out."
        raise Finding("not-gathered", text, "in flight", "none")
    check_ordered(log_of(run["simulated"][0]), "A forward on virtual GPUs")


def judge_hidden(ranks: Ranks, seed: int) -> None:
    """On virtual GPUs: the next gather under this compute, one at a time, within time and memory."""
    run = ranks.run(probe_alone, 1, seed=seed)
    found = run["simulated"][0]
    if found["host waited"]:
        text = (
            f"In a forward on virtual GPUs, the host waits {len(found['host waited'])} times for the stream "
        )
        raise Finding("no-overlap", f"{text}{found['host waited'][0]}; nothing is issued meanwhile.")
    check_ahead(log_of(found), "forward", found, TARGETS)
    check_figures(found, TARGETS, "A forward")


# --- Paths on real ranks -----------------------------------------------------------------------------------


def expected_words(last: Path, taken: Path, listed: dict[int, Path]) -> list[str]:
    """Gathers (+) and forwards (=) in the order of issue; the root, R, comes first and stays whole.

    Args:
        last: what the forward before entered, without the root; empty for the first. listed: what the user lists for a layer.
    """
    words: list[str] = []
    flying = set[str]()

    def gather(name: str) -> None:
        if name not in flying:
            words.append(f"+{name}")
            flying.add(name)

    order = ["R", *map(str, last)] if last else []
    for place, name in enumerate(["R", *map(str, taken)]):
        gather(name)
        known = place + 1 < len(order) and order[place] == name
        user = listed.get(taken[place - 1], []) if place else []
        for ahead in map(str, user) if user else order[place + 1 : place + 2] if known else []:
            gather(ahead)
        words.append(f"={name}")
        if name != "R":
            flying.discard(name)
    return words


def words_of(log: EventLog) -> list[str]:
    """The same from a log: a gather is seen where it is packed, which it is for a single rank, too."""
    found = []
    for event in log.events:
        name = "R" if event.owner == "Paths" else event.owner.rpartition(".")[2]
        if event.op == "copy_in" and event.stream == "copy":
            found.append(f"+{name}")
        elif event.op == "forward" and name != "stack":
            found.append(f"={name}")
    return found


def judge_guesses(ranks: Ranks, seed: int) -> None:
    """What is gathered ahead on changing paths, and that nothing of it outlives the forward."""
    run = ranks.run(probe_paths, ranks.world_size, seed=seed)
    for name, paths in drawn_paths(seed).items():
        by_rank = run[name]
        compare_order(
            {rank: [e for f in steps for e in log_of(f).collectives()] for rank, steps in enumerate(by_rank)}
        )
        for rank, steps in enumerate(by_rank):
            for step, facts in enumerate(steps):
                where = f"Rank {rank}, {WORDS[name]}, forward {step + 1}"
                _check_nothing_left(where, facts)
                listed = listed_at(paths[0], step) if name == "listed" else {}
                last = paths[step - 1] if step else []
                _check_words(where, words_of(log_of(facts)), expected_words(last, paths[step], listed))


WORDS = {
    "changing": "a path that changes",
    "listed": "a layer with forward prefetches listed in its second forward, and others in its third",
    "recomputed": "layers that are recomputed in backward",
}


def _check_nothing_left(where: str, facts: dict[str, Any]) -> None:
    if facts["in flight"]:
        names = ", ".join(facts["in flight"])
        text = f"{where}: a gather of {names} outlives it. Nobody came for it, and after the next update it would be old."
        raise Finding("stale-gather", text, "none in flight", names)
    if facts["entered"]:
        names = ", ".join(f"{count} of {fqn}" for fqn, count in facts["entered"].items())
        text = f"{where}: after the backward, groups are noted of a forward that is not over: {names}."
        raise Finding("order-not-noted", text, "none", names)


def _check_words(where: str, found: Sequence[str], expected: Sequence[str]) -> None:
    if list(found) == list(expected):
        return
    at = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), len(expected))
    there, right = (words[at] if at < len(words) else "the end" for words in (found, expected))
    legend = "(+2: layer 2 is gathered, =2: its forward begins, R: the root)"
    text = f"{where}: {' '.join(found)}; expected {' '.join(expected)} {legend}."
    if right.startswith("+"):
        misconception = "guessed-wrong" if there.startswith("+") else "not-prefetched"
    else:
        again = there in expected[:at]
        misconception = (
            "unbounded-prefetch" if there in expected[at:] else "gathered-again" if again else "guessed-wrong"
        )
    raise Finding(misconception, text, " ".join(expected), " ".join(found))


def judge_numbers(ranks: Ranks, seed: int) -> None:
    """Outputs of every step are those of the unsharded model, updated alike."""
    run = ranks.run(probe_paths, ranks.world_size, seed=seed)
    for name, paths in drawn_paths(seed).items():
        model: Any = Paths(seed)
        for step, path in enumerate(paths):
            outs = [model(data(seed, step, rank), path) for rank in range(ranks.world_size)]
            for rank, expected in enumerate(outs):
                _check_output(
                    f"Rank {rank}, {WORDS[name]}, step {step + 1}", run[name][rank][step]["out"], expected
                )
            torch.stack([out.sum() for out in outs]).sum().backward()
            with torch.no_grad():
                for param in model.parameters():
                    update(param, param.grad)
                    param.grad = None


def _check_output(where: str, actual: Any, expected: Tensor) -> None:
    if not isinstance(actual, Tensor) or actual.shape != expected.shape:
        raise Finding(
            "wrong-value", f"{where}: the output is no tensor of the right shape.", expected, actual
        )
    if not torch.equal(actual, expected):
        text = (
            f"{where}: the output is not that of the unsharded model, {first_difference(actual, expected)}."
        )
        raise Finding("wrong-value", text, expected, actual)


CHECKS = (
    Check("09.order", "what ran next last time is gathered next, where the paths agree", 1, judge_order),
    Check("09.streams", "packing and gathering run beside compute, one after the other", 1, judge_streams),
    Check("09.buffers", "a gather's buffer is kept until it is copied out, and no longer", 1, judge_buffers),
    Check(
        "09.waits",
        "nothing is read before it was waited for",
        1,
        judge_waits,
        ("09.streams",),  # the log takes each of these for what runs on its own stream
    ),
    Check(
        "09.hidden",
        "on virtual GPUs, gathers are hidden: within the targets of time and memory",
        2,
        judge_hidden,
        ("09.waits",),  # who does not wait is fast
    ),
    Check("09.guesses", "one group is gathered ahead; a wrong guess is dropped", 1, judge_guesses),
    Check(
        "09.numbers",
        "whatever path it takes, the model computes what it did",
        1,
        judge_numbers,
        ("09.waits",),
    ),
)
