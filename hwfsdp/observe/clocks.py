"""Whose time a log is in, and how logs of several clocks are put on one axis.

Times in a log count from the beginning of its recording. What the host's clock said then is kept with the log
(`RankClock`), so that logs can be put on one axis afterwards. Processes of one machine share that clock (`perf_counter` is
the time since the machine was started), and nothing has to be measured. Between machines `measure_offset` compares the
clocks by messages.

Note [Round trips]
    A rank asks another for its time, and has the answer a round trip later. The other one looked at its clock in between, so
    the middle of the round trip is off by half of it at most, whichever way was slower. Of several round trips
    the shortest says most. (This is Cristian's algorithm: F. Cristian, Probabilistic clock synchronization, 1989.) What
    drifts apart during a recording, some µs per second between good clocks, is left out.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hwfsdp.observe.events import HostMark
from hwfsdp.observe.validate import MOST_RANKS, many, named, shown, text, time_us, whole

ROUND_TRIPS = 32


class RankClock(NamedTuple):
    """What a rank's times count from.

    Attributes:
        origin_us: µs, what the machine's clock said when the recording began.
        machine: tells clocks apart; ranks of one machine share it.
    """

    origin_us: float
    machine: str


def read_clocks(about: Mapping[str, Any]) -> dict[int, RankClock]:
    """The clocks that `EventLog.about` has, by rank; none in logs made by hand. Raises ValueError if they are no clocks."""
    found = {}
    for key, clock in named("clocks", about.get("clocks", {})).items():
        where = f"clocks[{shown(key)}]"
        parts = many(where, clock)
        if not re.fullmatch(_NUMBER, str(key)) or len(parts) != 2:
            raise ValueError(f"{where} is {shown(clock)}, not [µs, machine] by the number of a rank")
        rank = whole(where, int(key), 0, MOST_RANKS - 1)
        found[rank] = RankClock(float(time_us(f"{where}[0]", parts[0])), text(f"{where}[1]", parts[1]))
    return found


_NUMBER = r"[0-9]{1,8}"


def this_machine() -> str:
    """What tells this machine, since it was started, from others."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()


def shifts_to_one_axis(clocks: Mapping[int, RankClock]) -> dict[int, float]:
    """What to add to the times of each rank, in µs, so that all count from the earliest origin.

    Ranks on another clock than the first one cannot be compared with it (`measure_offset` was not asked); they are not
    shifted against each other either, and count from their own origin.
    """
    if not clocks:
        return {}
    common = clocks[min(clocks)].machine
    zero = min(clock.origin_us for clock in clocks.values() if clock.machine == common)
    shifts = {rank: clock.origin_us - zero for rank, clock in clocks.items()}
    return {rank: us if clocks[rank].machine == common else 0.0 for rank, us in shifts.items()}


class Offset(NamedTuple):
    """How far the other rank's clock is ahead of this one's, in µs; wrong by `error_us` at most."""

    us: float
    error_us: float


@contextmanager
def pair_of(first: int, second: int, group: dist.ProcessGroup | None) -> Iterator[dist.ProcessGroup]:
    """A group of two ranks of `group`, which call this together; messages between others leave theirs out of step."""
    around: Any = group or dist.group.WORLD
    ranks = [dist.get_global_rank(around, rank) for rank in (first, second)]
    pair: Any = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    try:
        yield pair
    finally:
        dist.destroy_process_group(pair)


def measure_offset(
    peer: int, group: dist.ProcessGroup | None, now: Callable[[], float] = lambda: HostMark().us()
) -> Offset:
    """Asks a rank for its time; meanwhile that one answers (`answer_with_time`). Note [Round trips].

    Args:
        peer: number of the rank in `group`, which sends CPU tensors; None: of all ranks.
        now: this rank's clock, µs.
    """
    question, answer = torch.zeros(1), torch.zeros(1, dtype=torch.float64)
    best = Offset(0.0, float("inf"))
    for _ in range(ROUND_TRIPS):
        asked = now()
        dist.send(question, group=group, group_dst=peer)
        dist.recv(answer, group=group, group_src=peer)
        heard = now()
        if heard - asked < 2 * best.error_us:
            best = Offset(answer.item() - (asked + heard) / 2, (heard - asked) / 2)
    return best


def answer_with_time(
    peer: int, group: dist.ProcessGroup | None, now: Callable[[], float] = lambda: HostMark().us()
) -> None:
    """Answers the questions of a rank that measures its offset to this one; arguments as there."""
    question = torch.zeros(1)
    for _ in range(ROUND_TRIPS):
        dist.recv(question, group=group, group_src=peer)
        dist.send(torch.tensor([now()], dtype=torch.float64), group=group, group_dst=peer)
