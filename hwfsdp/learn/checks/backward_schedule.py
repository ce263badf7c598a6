"""06: the collectives of a backward, in order, from the event log."""

from __future__ import annotations

from collections.abc import Sequence

from hwfsdp.events import Event
from hwfsdp.learn.checks.backward_runs import runs_of
from hwfsdp.learn.diagnose import compare_order
from hwfsdp.learn.run import Ranks, Run
from hwfsdp.learn.verdict import Finding

# "+0": blocks.0 is gathered, "-0": its gradients are reduced; in backward
ORDERS = {
    "Chain": ("three blocks", "+2 +1 -2 +0 -1 -0"),
    "recomputed": ("three blocks, forwards computed again in backward", "+2 +1 -2 +0 -1 -0"),
    "listed": ("three blocks, and a root that is to prefetch blocks.1", "+1 +2 -2 +0 -1 -0"),
    "Untied": ("three blocks after an embedding with unshard_in_backward off", "+2 +1 -2 +0 -1 -0 -embed"),
    "Tied": ("a model that runs blocks.1 twice", "+2 +1 -2 +1 +0 -1 -0 -Tied"),
}


def check_gathered(run: Run) -> None:
    for rank, missing in enumerate(run["not_gathered"]):
        if missing:
            text = f"pre_backward leaves {missing[0]} without whole parameters on rank {rank}"
            raise Finding("not-gathered", f"{text}; its backward would have read freed memory.")


def judge_schedule(ranks: Ranks, seed: int) -> None:
    """Gathers and reductions in backward, in the order of issue, the same on every rank."""
    for run in runs_of(ranks, seed):
        world_size = len(run.reports)
        check_gathered(run)
        for key, (what, expected) in ORDERS.items():
            log = run.log(f"{key} log")
            by_rank = {rank: log.of_rank(rank).collectives() for rank in range(world_size)}
            compare_order(by_rank)
            backward = [e for e in by_rank[0] if e.phase == "backward"]
            _check_order(backward, expected.split(), f"{what}, {world_size} ranks")
            _check_waits(log.of_rank(0).events)
            _check_overlap(log.of_rank(0).events)
        _check_ahead(run.log("Chain log").of_rank(0).events)
        _check_first_calls(run)


def words_of(events: Sequence[Event]) -> list[str]:
    signs = {"all_gather": "+", "reduce_scatter": "-"}
    return [signs.get(e.op, f"{e.op} ") + e.owner.replace("blocks.", "") for e in events]


def _check_order(events: Sequence[Event], expected: list[str], what: str) -> None:
    """The misconception is that of the first collective that is not where it should be."""
    found = words_of(events)
    if found == expected:
        return
    message = f"Backward of {what}: {' '.join(found) or 'no collective'}; expected {' '.join(expected)}"
    legend = "(+2: blocks.2 is gathered, -2: its gradients are reduced)"
    raise Finding(
        _order_misconception(found, expected), f"{message} {legend}.", " ".join(expected), " ".join(found)
    )


def _order_misconception(found: list[str], expected: list[str]) -> str:
    def count(words: list[str], sign: str) -> int:
        return sum(word.startswith(sign) for word in words)

    if count(found, "-") != count(expected, "-"):
        return "not-reduced" if count(found, "-") < count(expected, "-") else "reduced-too-often"
    if not count(found, "+"):
        return "never-resharded"
    if count(found, "+") > count(expected, "+"):
        return "gathered-again" if set(found) <= set(expected) else "too-much-traffic"
    if count(found, "+") < count(expected, "+"):
        return "not-freed"
    at = next(i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
    if not found[at].startswith("+"):
        return "not-prefetched"
    return "prefetched-too-early" if expected[at].startswith("+") else "unbounded-prefetch"


def _check_waits(events: Sequence[Event]) -> None:
    """Before what was gathered is copied out, compute has waited for the gather."""
    gathers: dict[str, int] = {}
    waited = set[int]()
    for event in events:
        if event.op == "all_gather":
            gathers[event.owner] = event.seq
        elif event.op == "wait" and event.stream == "compute":
            waited |= {*event.after}
        elif event.op == "copy_out" and gathers.get(event.owner, -1) not in {*waited, -1}:
            text = f"{event.owner} is copied out (event {event.seq}) before compute waited for its gather"
            raise Finding("used-before-wait", f"{text} (event {gathers[event.owner]}).")


def _check_ahead(events: Sequence[Event]) -> None:
    """The next gather travels while this group is copied out."""
    gathers = [e for e in events if e.op == "all_gather"]
    copies = {e.owner: e.seq for e in events if e.op == "copy_out"}
    for gather, ahead in zip(gathers, gathers[1:], strict=False):
        if copies.get(gather.owner, ahead.seq) < ahead.seq:
            text = f"{gather.owner} is copied out (event {copies[gather.owner]}) before the gather of {ahead.owner}"
            raise Finding("prefetched-too-late", f"{text} (event {ahead.seq}) is started.")


def _check_overlap(events: Sequence[Event]) -> None:
    """A reduction is not waited for before the next group's backward can begin."""
    for reduction in (e for e in events if e.op == "reduce_scatter"):
        next_group = next((e.seq for e in events if e.op == "copy_out" and e.seq > reduction.seq), None)
        waits = (
            e.seq for e in events if e.op == "wait" and e.stream == "compute" and reduction.seq in e.after
        )
        waited = next(waits, None)
        if next_group is not None and waited is not None and waited < next_group:
            text = f"Compute waits for the reduction of {reduction.owner} (event {waited}) before it goes on"
            raise Finding("no-overlap", f"{text} with the next group (event {next_group}).")


def _check_first_calls(run: Run) -> None:
    """Blocks return two tensors: pre-backward is called twice for each, and the first call says so."""
    for rank, returned in enumerate(run["first calls"]):
        for name, values in returned.items():
            if values != [True, *[False] * (len(values) - 1)]:
                text = f"pre_backward of {name} on rank {rank} was called {len(values)} times and returned {values}"
                raise Finding("wrong-value", f"{text}.", "True at the first call, then False", values)
