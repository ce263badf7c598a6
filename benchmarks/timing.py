"""Contenders take turns, so that a slow minute slows them all down equally.

A round runs every contender once, and each round begins with the next contender. Before each contender the ranks meet, so that no
rank waits for another rank that is still busy with the previous contender. A step is over when its last rank has finished: `slowest` takes
the ranks' longest time.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

Laps = dict[str, float]  # the timed part → ms
Action = Callable[[], Laps]
Samples = dict[str, dict[str, list[float]]]  # the timed part → contender → ms, one per round

WARM_UP = 2  # rounds that do not count: first gathers allocate, DDP rebuilds its buckets after the first step


def stopwatch() -> float:
    """Return ms of a monotonic clock."""
    return time.perf_counter() * 1e3


def timed(name: str, function: Callable[[], None]) -> Action:
    """Return an action whose only lap, `name`, is a call of `function`."""

    def action() -> Laps:
        start = stopwatch()
        function()
        return {name: stopwatch() - start}

    return action


def steady() -> None:
    """Use one thread per rank. Flush denormal numbers to zero: they can take a processor a hundred times longer."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)


def meet() -> None:
    """Let ranks wait for each other. With a fake or missing group, return at once."""
    if dist.is_initialized() and dist.get_backend() != "fake":
        dist.barrier()


def take_turns(
    actions: Mapping[str, Action], rounds: int, warm_up: int = WARM_UP, repeat: int = 1
) -> Samples:
    """Run every action once per round, in turn.

    Args:
        actions: by contender. All ranks have the same ones, in the same order.
        rounds: number of rounds that count, after `warm_up` others.
        repeat: how often an action runs in its turn; the mean counts. Use more than 1 for an action so short that most of its
            time would refill the caches that the previous action emptied.
    """
    samples: Samples = {}
    names = list(actions)
    gc.collect()
    for number in range(-warm_up, rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            meet()
            runs = [actions[name]() for _ in range(repeat)]
            for what in runs[0] if number >= 0 else ():
                mean = sum(laps[what] for laps in runs) / repeat
                samples.setdefault(what, {}).setdefault(name, []).append(mean)
    return samples


def slowest(ranks: Sequence[Samples]) -> Samples:
    """Return, by round, the time of the slowest rank."""
    return {
        what: {
            name: [max(times) for times in zip(*(r[what][name] for r in ranks), strict=True)]
            for name in names
        }
        for what, names in ranks[0].items()
    }
