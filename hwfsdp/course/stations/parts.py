"""The parts of stations 01, 02 and 05 that are separate functions: rows, rings, closed forms.

Rings work on whole numbers, so sums are exact in any order. The wire is watched below every function that a file may call.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hwfsdp.course.checks import plain
from hwfsdp.course.findings import expect, told
from hwfsdp.course.run import Ranks, Report, attempt
from hwfsdp.course.stations.sharders import learners
from hwfsdp.course.verdict import Finding
from hwfsdp.course.wire import watch_wire
from hwfsdp.observe.accounting import GroupSizes, Strategy, strategy_traffic

MOST = 64
SIZES = (3, 2, 4, 1)  # numbers of ranks of a ring
N = 5  # elements of a piece
STRATEGIES = {"ddp": Strategy.DDP, "zero1": Strategy.ZERO1, "zero2": Strategy.ZERO2, "zero3": Strategy.ZERO3}
STRATEGIES["hybrid"] = Strategy.HSDP


# --- 01 Rows -----------------------------------------------------------------------------------------------


def cases() -> list[tuple[int, int]]:
    """Return pairs of rows and ranks: all small ones, and some that a float cannot count exactly."""
    return [(n, w) for n in range(MOST + 1) for w in range(1, MOST + 1)] + [(2**53 + 1, 2), (10**17 + 1, 7)]


def probe_rows(report: Report, seed: int) -> None:
    attempt(report, "padded", lambda: [plain(learners().padded_rows(n, w)) for n, w in cases()])
    attempt(report, "rows", lambda: [_rows(n, w) for n, w in cases()])


def _rows(n: int, world_size: int) -> list[Any]:
    return [plain(learners().rows_of(n, world_size, rank)) for rank in range(world_size)]


@cache
def chunks(n: int, world_size: int) -> tuple[tuple[int, int], ...]:
    """Return extents by nested chunking: (start, stop) of each rank; (n, n) for ranks without rows."""
    if n <= MOST:
        pieces = torch.arange(n).chunk(world_size) if n else ()
        found = [(int(piece[0]), int(piece[-1]) + 1) for piece in pieces]
    else:
        length = (n + world_size - 1) // world_size
        found = [(min(r * length, n), min((r + 1) * length, n)) for r in range(world_size)]
    return (*found, *[(n, n)] * (world_size - len(found)))


def judge_padded(ranks: Ranks, seed: int) -> None:
    answers = ranks.run(probe_rows, 1, seed=seed)["padded"][0]
    pairs = list(zip(cases(), answers, strict=True))
    always = all(given == n // w + 1 for (n, w), given in pairs if n <= MOST)
    for (n, w), answer in pairs:
        start, stop = chunks(n, w)[0]
        if answer != stop - start:
            misconception = "floor-instead-of-ceil" if answer == n // w else "wrong-value"
            misconception = "padded-always" if always else misconception
            if "." in str(answer) or n > MOST:
                misconception = "float-for-integer"
            said = "returns nothing" if answer == "None" else f"is {answer}"
            raise Finding(misconception, f"padded_rows({n}, {w}) {said}.", stop - start, answer)


def judge_rows(ranks: Ranks, seed: int) -> None:
    answers = ranks.run(probe_rows, 1, seed=seed)["rows"][0]
    for (n, w), given in zip(cases(), answers, strict=True):
        expected = [list(pair) for pair in chunks(n, w)]
        if given == expected:
            continue
        rank = next(rank for rank in range(w) if given[rank] != expected[rank])
        got, want = given[rank], expected[rank]
        misconception, more = "wrong-rows", ""
        if not isinstance(got, list) or len(got) != 2 or any(isinstance(number, str) for number in got):
            misconception = "float-for-integer" if "." in str(got) else "wrong-value"
        elif n > MOST:
            misconception, more = "float-for-integer", " A float cannot count so many rows."
        elif want[0] == want[1] and got[0] > n:
            misconception, more = "past-the-end", " It begins after the last row."
        elif want[0] == want[1] and got[0] == got[1]:
            misconception = "empty-at-zero" if got[0] == 0 else "past-the-end"
            more = " This rank has no rows; its place is the end."
        elif got[1] > n:
            misconception = "past-the-end"
        elif all(
            [a, b] == [start, stop - start] for (a, b), (start, stop) in zip(given, expected, strict=True)
        ):
            more = " The second number is how many rows there are; asked for is the row after the last."
        elif [b - a for a, b in given] == sorted((n // w + (r < n % w) for r in range(w)), reverse=True):
            misconception = "spread-evenly"
        shown = tuple(got) if isinstance(got, list) else got
        said = "returns nothing" if got == "None" else f"is {shown}"
        raise Finding(misconception, f"rows_of({n}, {w}, {rank}) {said}.{more}", tuple(want), shown)


# --- 02 Rings ----------------------------------------------------------------------------------------------


def given(seed: int, world_size: int) -> Tensor:
    """Return [W, W * N]: the input of each rank, in whole numbers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 1000, (world_size, world_size * N), generator=generator).float()


def probe_rings(report: Report, seed: int) -> None:
    for name, run in (("gather", _gather), ("reduce", _reduce)):
        attempt(report, name, partial(run, given(seed, dist.get_world_size())))


def _gather(whole: Tensor) -> dict[str, Any]:
    output = torch.full((dist.get_world_size() * N,), -1.0)
    return _watched(learners().ring_all_gather, output, whole[dist.get_rank(), :N].clone())


def _reduce(whole: Tensor) -> dict[str, Any]:
    return _watched(learners().ring_reduce_scatter, torch.full((N,), -1.0), whole[dist.get_rank()].clone())


def _watched(ring: Callable[[Tensor, Tensor], None], output: Tensor, mine: Tensor) -> dict[str, Any]:
    dist.barrier()
    with watch_wire() as wire:
        ring(output, mine)
    sent = torch.cat([torch.empty(0, dtype=torch.uint8), *wire.sent])
    return {"output": output, "input": mine, "moves": wire.moves, "sent": sent, "others": wire.others}


def judge_gather(ranks: Ranks, seed: int) -> None:
    for size in SIZES:
        found, whole = ranks.run(probe_rings, size, seed=seed)["gather"], given(seed, size)
        mirrored = all(
            _owners(result["output"], whole[:, :N]) == [(2 * rank - block) % size for block in range(size)]
            for rank, result in enumerate(found)
        )
        for rank, result in enumerate(found):
            where = f"ring_all_gather, rank {rank} of {size}"
            _refuse_others(where, result)
            expected = whole[:, :N].flatten()
            if not torch.equal(result["output"], expected):
                raise _wrong_blocks(where, result["output"].view(size, N), whole[:, :N], mirrored)
            _compare_wire(where, result, whole[rank, :N], rank, size)
            _compare_sent(where, result, [whole[(rank - step) % size, :N] for step in range(size - 1)])


def _owners(got: Tensor, pieces: Tensor) -> list[int | None]:
    """Return the owner of each piece; None for a piece that is no rank's."""
    return [
        next((rank for rank, piece in enumerate(pieces) if torch.equal(block, piece)), None)
        for block in got.view(len(pieces), N)
    ]


def _wrong_blocks(where: str, got: Tensor, expected: Tensor, mirrored: bool) -> Finding:
    """Explain pieces at the wrong places. `mirrored`: on every rank, pieces lie as if they came from the other neighbor."""
    owners = _owners(got, expected)
    shown = ", ".join("no rank's" if owner is None else f"rank {owner}'s" for owner in owners)
    name = "02.neighbor_blocks" if mirrored else "02.blocks"
    if None in owners:
        name = "02.block_missing" if (got == -1).any() else "02.no_block"
    return told(name, f"{where}:", shown, last=len(expected) - 1)


def judge_reduce(ranks: Ranks, seed: int) -> None:
    for size in SIZES:
        found, whole = ranks.run(probe_rings, size, seed=seed)["reduce"], given(seed, size)
        totals = whole.sum(0).view(size, N)
        for rank, result in enumerate(found):
            where = f"ring_reduce_scatter, rank {rank} of {size}"
            _refuse_others(where, result)
            if not torch.equal(result["output"], totals[rank]):
                raise _wrong_sum(where, result["output"], totals, rank)
            _compare_wire(where, result, whole[rank], rank, size)
            pieces = whole.view(size, size, N)
            sums = [pieces[[rank - back for back in range(step)], rank - step] for step in range(1, size)]
            _compare_sent(where, result, [each.sum(0) for each in sums])


def _wrong_sum(where: str, got: Tensor, totals: Tensor, rank: int) -> Finding:
    for other, total in enumerate(totals):
        if torch.equal(got, total):
            return told("02.sum_for", f"{where}:", other, rank)
    mean = torch.allclose(got * len(totals), totals[rank])
    return told("02.mean" if mean else "02.sum", f"{where}:", got, totals[rank])


def _refuse_others(where: str, result: Mapping[str, Any]) -> None:
    if result["others"]:
        raise told("02.calls", f"{where}:", ", ".join(dict.fromkeys(result["others"])), "send and receive")


def _compare_wire(where: str, result: Mapping[str, Any], kept: Tensor, rank: int, size: int) -> None:
    """Check that the input is unchanged, and that this rank sent only the necessary bytes, and only to its neighbor."""
    expect("02.input", f"{where}:", result["input"], kept)
    for kind, peer in (("send", (rank + 1) % size), ("recv", (rank - 1) % size)):
        peers = [p for what, p, _ in result["moves"] if what == kind]
        bytes_ = [nbytes for what, _, nbytes in result["moves"] if what == kind]
        for each in peers:
            expect("02.stranger", f"{where}: {kind}s", f"rank {each}", f"rank {peer}")
        words = {"steps": len(bytes_), "piece": 4 * N, "enough": size - 1}
        expect("02.wire", f"{where}: {kind}", sum(bytes_), (size - 1) * N * 4, **words)


def _compare_sent(where: str, result: Mapping[str, Any], right: Sequence[Tensor]) -> None:
    """Check that the messages consist of these tensors, in any order and cut in any way: nothing else goes around a ring."""
    expected = torch.cat([torch.empty(0, dtype=torch.uint8), *(each.view(torch.uint8) for each in right)])
    if not torch.equal(result["sent"].sort().values, expected.sort().values):
        raise told("02.sent", f"{where}:")


# --- 05 Closed forms ---------------------------------------------------------------------------------------


class Setup(NamedTuple):
    """A call of `traffic`; only the hybrid strategy has the argument `shards`."""

    shapes: list[tuple[int, ...]]
    strategy: str
    world_size: int
    shards: int

    @property
    def options(self) -> dict[str, int]:
        return {"shards": self.shards} if self.strategy == "hybrid" else {}

    def __str__(self) -> str:
        more = "".join(f", {name}={value}" for name, value in self.options.items())
        return f"traffic({self.shapes}, {self.strategy!r}, {self.world_size}{more})"


def setups(seed: int) -> list[Setup]:
    draw = random.Random(seed)
    found = [Setup([(8, 3)], name, 4, 2) for name in STRATEGIES]
    for name in STRATEGIES:
        for _ in range(12):
            lengths = range(draw.randint(1, 4))
            shapes = [tuple(draw.randint(1, 9) for _ in range(draw.randint(1, 3))) for _ in lengths]
            replicas, shards = draw.randint(1, 4), draw.randint(1, 5)
            found.append(Setup(shapes, name, replicas * shards, shards))
    return found


def probe_traffic(report: Report, seed: int) -> None:
    attempt(report, "traffic", lambda: [_traffic(setup) for setup in setups(seed)])


def _traffic(setup: Setup) -> dict[str, Any]:
    found = learners().traffic(setup.shapes, setup.strategy, setup.world_size, **setup.options)
    return {str(op): plain(nbytes) for op, nbytes in dict(found).items()}


def probe_own_traffic(report: Report, seed: int, shapes: list[tuple[int, ...]], size: int) -> None:
    """Report the learner's closed form for one model."""
    attempt(report, "own", lambda: _traffic(Setup(shapes, "zero3", size, 1)))


def judge_traffic(ranks: Ranks, seed: int) -> None:
    answers = ranks.run(probe_traffic, 1, seed=seed)["traffic"][0]
    for setup, answer in zip(setups(seed), answers, strict=True):
        strategy, groups = STRATEGIES[setup.strategy], [GroupSizes(setup.shapes)]
        expected = strategy_traffic(groups, strategy, setup.world_size, setup.options.get("shards"))
        for op, nbytes in expected.items():
            got = answer.get(op, 0)
            if got != nbytes:
                raise Finding(_wrong_traffic(setup, got, nbytes), f"{setup}: {op} is {got} B.", nbytes, got)


def _wrong_traffic(setup: Setup, got: Any, expected: int) -> str:
    if not isinstance(got, int):
        return "bytes-for-numbers"
    plain = 4 * sum(torch.Size(shape).numel() for shape in setup.shapes)
    shards = {"ddp": 1, "hybrid": setup.shards}.get(setup.strategy, setup.world_size)
    if got in (plain, 2 * plain) and any(shape[0] % shards for shape in setup.shapes):
        return "evenness-assumed"
    if expected and got * 4 == expected:
        return "elements-for-bytes"
    return "formula-too-large" if got > expected else "formula-too-small"
