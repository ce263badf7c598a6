"""Contenders take turns, so that a slow minute hurts all of them alike.

A round runs every contender once, and each round begins with the next one. Before each of them the ranks meet, so
that nobody waits for a rank that is still busy with the one before. A step is over when its last rank is:
`slowest` puts the ranks' times together.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

Laps = dict[str, float]  # what was timed → ms
Action = Callable[[], Laps]
Samples = dict[str, dict[str, list[float]]]  # what was timed → contender → ms, one per round

WARM_UP = 2  # rounds that do not count: first gathers allocate, DDP rebuilds its buckets after the first step


def stopwatch() -> float:
    """ms of a clock that only goes forward."""
    return time.perf_counter() * 1e3


def timed(name: str, function: Callable[[], None]) -> Action:
    """An action whose only lap, `name`, is a call of `function`."""

    def action() -> Laps:
        start = stopwatch()
        function()
        return {name: stopwatch() - start}

    return action


def steady() -> None:
    """One thread per rank, and no numbers so small that the processor takes a hundred times longer for them."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)


def meet() -> None:
    """Ranks wait for each other; a fake or missing group has nobody to wait for."""
    if dist.is_initialized() and dist.get_backend() != "fake":
        dist.barrier()


def take_turns(
    actions: Mapping[str, Action], rounds: int, warm_up: int = WARM_UP, repeat: int = 1
) -> Samples:
    """Runs every action once per round, in turn.

    Args:
        actions: by contender. All ranks have the same ones, in the same order.
        rounds: that count, after `warm_up` others.
        repeat: how often an action is run when it is its turn; the mean counts. More than once where an action is so
            short that the caches which the one before has emptied would be most of its time.
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
    """Per round, the time of the rank that took longest."""
    return {
        what: {
            name: [max(times) for times in zip(*(r[what][name] for r in ranks), strict=True)]
            for name in names
        }
        for what, names in ranks[0].items()
    }
