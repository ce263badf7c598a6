"""02: what ring collectives give, and what passes between neighbors for that, on all ranks and on rings of some of four.

All inputs are whole numbers, multiples of the number of ranks where they are summed, so that sums and means are exact in any
order. One more input is all zeros but for a one of each rank in each block: what comes out are the weights with which
shares entered a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hwfsdp import ring
from hwfsdp.events import COLLECTIVES
from hwfsdp.learn.guard import collectives_of
from hwfsdp.learn.run import Ranks, Report, Run
from hwfsdp.learn.verdict import Check, Finding
from hwfsdp.recording import record

WORLD_SIZE = (
    4  # of rings of some of the ranks; and of all, where two are asked for, as both neighbors of two are one
)
GUARD = 3  # elements before and after a tensor that are not its own
CASES = ((torch.float32, 5), (torch.int64, 3), (torch.bfloat16, 1), (torch.float64, 64))  # dtype, n
FLOATING = [number for number, (dtype, _) in enumerate(CASES) if dtype.is_floating_point]
GATHERS = ("gather", "gather in place", "gather in rings")  # what the probe reports of them
REDUCTIONS = ("weights of sum", "sum", "weights of mean", "mean", "reduce in rings")
# Of some of the ranks. Each rank is in one of the first two, and in one of the others.
RINGS = ((0, 2), (1, 3), (0, 2, 3), (1,))


def blocks(seed: int, number: int, world_size: int) -> list[Tensor]:
    """What each rank gives to gather number `number`: no element twice, none of them 0."""
    dtype, n = CASES[number]
    generator = torch.Generator().manual_seed(97 * seed + number)
    return list((torch.randperm(world_size * n, generator=generator) + 1).to(dtype).view(world_size, n))


def shares(seed: int, number: int, world_size: int) -> Tensor:
    """[W, W * n], what each rank gives to reduction number `number`: all multiples of `world_size`."""
    dtype, n = CASES[number]
    generator = torch.Generator().manual_seed(89 * seed + number)
    whole = torch.randint(-8, 9, (world_size, world_size * n), generator=generator)
    return (world_size * whole).to(dtype)


# --- On the rank -------------------------------------------------------------------------------------------


@contextmanager
def watch_wire() -> Iterator[tuple[list[list[Any]], list[str]]]:
    """What this rank sends and receives, by whatever function: ["send" or "recv", peer in the group, bytes] of each.

    Also names of what it does with process groups besides, whether or not a recording sees that.
    """
    moves, others = list[list[Any]](), list[str]()
    originals = {name: getattr(dist.ProcessGroup, name) for name in collectives_of(dist.ProcessGroup)}

    def watched(name: str) -> Any:
        def move(group: Any, tensors: Sequence[Tensor], peer: int, *rest: Any) -> Any:
            moves.append([name, int(peer), sum(t.numel() * t.element_size() for t in tensors)])
            return originals[name](group, tensors, peer, *rest)

        def other(*args: Any, **kwargs: Any) -> Any:
            others.append(name.lstrip("_"))
            return originals[name](*args, **kwargs)

        return move if name in ("send", "recv") else other

    try:
        for name in originals:
            setattr(dist.ProcessGroup, name, watched(name))
        yield moves, others
    finally:
        for name, original in originals.items():
            setattr(dist.ProcessGroup, name, original)


def guarded(n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Memory full of zeros, and the n elements in its middle."""
    memory = torch.zeros(n + 2 * GUARD, dtype=dtype)
    return memory, memory[GUARD:-GUARD]


def _gather(group: Any, seed: int, number: int, in_place: bool = False) -> dict[str, Any]:
    """One gather over a group: the memory around its output, its input afterwards, and what travelled."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    given = blocks(seed, number, world_size)[rank].clone()
    memory, output = guarded(world_size * len(given), given.dtype)
    if in_place:
        own = output[rank * len(given) : (rank + 1) * len(given)]
        given = own.copy_(given)
    dist.barrier(group)  # nothing of one case meets what is left of another
    with watch_wire() as (moves, unlogged), record() as log:
        ring.ring_all_gather(output, given, group)
    others = [e.op for e in log.select(*COLLECTIVES) if e.op not in ("send", "recv")] or unlogged
    return {"memory": memory.clone(), "input": given.clone(), "moves": moves, "others": others}


def _reduce(group: Any, whole: Tensor, mean: bool) -> dict[str, Any]:
    """One reduction over a group of this rank's `whole`; the same is told of it."""
    given = whole.clone()
    memory, output = guarded(len(whole) // dist.get_world_size(group), whole.dtype)
    dist.barrier(group)  # nothing of one case meets what is left of another
    with watch_wire() as (moves, unlogged), record() as log:
        ring.ring_reduce_scatter(output, given, group, mean)
    others = [e.op for e in log.select(*COLLECTIVES) if e.op not in ("send", "recv")] or unlogged
    return {"memory": memory.clone(), "input": given.clone(), "moves": moves, "others": others}


def unit_shares(rank: int, world_size: int) -> Tensor:
    """[W * W * W]: in block b, the element that stands for this rank and b is one."""
    ones = torch.zeros(world_size, world_size, world_size, dtype=torch.float64)
    ones[range(world_size), rank, range(world_size)] = 1
    return ones.view(-1)


def some_of_the_ranks() -> list[Any]:
    """The groups of `RINGS` that this rank is in."""
    groups = [(members, dist.new_group(list(members))) for members in RINGS]
    return [group for members, group in groups if dist.get_rank() in members]


def probe(report: Report, seed: int) -> None:
    """Both collectives; if the first one is a hole, the second is looked at all the same."""
    groups = some_of_the_ranks() if dist.get_world_size() == WORLD_SIZE else []
    hole: NotImplementedError | None = None
    try:
        _observe_gathers(report, groups, seed)
    except NotImplementedError as error:
        hole = error
    _observe_reductions(report, groups, seed)
    if hole:
        raise hole


def _observe_gathers(report: Report, groups: Sequence[Any], seed: int) -> None:
    numbers = range(len(CASES))
    report["gather"] = [_gather(None, seed, number) for number in numbers]
    report["gather in place"] = [_gather(None, seed, number, in_place=True) for number in numbers]
    report["gather in rings"] = [_or_error(_gather, group, seed, 0) for group in groups]


def _observe_reductions(report: Report, groups: Sequence[Any], seed: int) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    wholes = [shares(seed, number, world_size)[rank] for number in range(len(CASES))]
    report["weights of sum"] = _reduce(None, unit_shares(rank, world_size), False)
    report["sum"] = [_reduce(None, whole, False) for whole in wholes]
    report["weights of mean"] = _reduce(None, unit_shares(rank, world_size), True)
    report["mean"] = [_reduce(None, wholes[number], True) for number in FLOATING]
    report["reduce in rings"] = [
        _or_error(_reduce, group, shares(seed, 0, dist.get_world_size(group))[dist.get_rank(group)], mean)
        for group in groups
        for mean in (False, True)
    ]


def _or_error(observe: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any] | str:
    """What is seen, or what is raised, as text."""
    try:
        return observe(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


# --- Judges ------------------------------------------------------------------------------------------------


def judge(compare: Callable[[Run, int], None], ranks: Ranks, seed: int) -> None:
    """All ranks in one ring."""
    world_size = WORLD_SIZE if ranks.world_size == 2 else ranks.world_size
    run = ranks.run(probe, world_size, seed=seed)
    refuse_other_collectives(run)
    compare(run, seed)


def refuse_other_collectives(run: Run) -> None:
    """No check passes that owes its result to a collective of somebody else's; what a rank did not come to report calls none."""
    for place, report in zip(world(run), run.reports, strict=True):
        for what, keys in (("All-gather", GATHERS), ("Reduce-scatter", REDUCTIONS)):
            for result in (result for key in keys for result in listed_results(report.get(key, ()))):
                if result["others"]:
                    called = ", ".join(result["others"])
                    message = f"{what} {place.words}: calls {called}."
                    raise Finding("not-a-ring", message, "send and recv", result["others"])


def listed_results(found: Any) -> list[dict[str, Any]]:
    """What `_gather` or `_reduce` returned, once or several times, without what is told of an exception."""
    return [each for each in (found if isinstance(found, list) else [found]) if isinstance(each, dict)]


class Place(NamedTuple):
    """Where a result belongs: number of the rank in its ring, how many ranks that has, and words for both."""

    rank: int
    world_size: int
    words: str


def world(run: Run) -> list[Place]:
    """Of all ranks, one after the other."""
    world_size = len(run.reports)
    return [Place(rank, world_size, f"on rank {rank} of {world_size}") for rank in range(world_size)]


def rings_of(rank: int) -> list[Place]:
    """In the order in which that rank reports."""
    return [
        Place(
            m.index(rank),
            len(m),
            f"on rank {rank} in the ring of {'rank' if len(m) == 1 else 'ranks'} {listed(m)}",
        )
        for m in RINGS
        if rank in m
    ]


def listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def judge_gather(run: Run, seed: int) -> None:
    """Every block, in rank order, in several dtypes."""
    found, world_size = run["gather"], len(run.reports)
    for number in range(len(CASES)):
        outputs = [inner(of_rank[number]) for of_rank in found]
        given = blocks(seed, number, world_size)
        mirrored = all(
            owners(output, given) == [(2 * rank - b) % world_size for b in range(world_size)]
            for rank, output in enumerate(outputs)
        )
        for place, output in zip(world(run), outputs, strict=True):
            compare_blocks(output, given, place, mirrored)


def inner(result: dict[str, Any]) -> Tensor:
    """The output, without what is around it."""
    memory: Tensor = result["memory"]
    return memory[GUARD:-GUARD]


def owners(actual: Tensor, given: Sequence[Tensor]) -> list[int | None]:
    """Whose block each is; -1 if nothing was written there, None if it is nobody's."""
    return [
        next(
            (rank for rank, theirs in enumerate(given) if torch.equal(block, theirs)),
            None if block.any() else -1,
        )
        for block in actual.view(len(given), -1)
    ]


def compare_blocks(actual: Tensor, given: Sequence[Tensor], place: Place, mirrored: bool = False) -> None:
    """Raises a Finding that says which rank's block lies where another should.

    Args:
        mirrored: on every rank, blocks lie as if they had come from the other side.
    """
    if torch.equal(actual, torch.cat(list(given))):
        return
    found, right = owners(actual, given), list(range(len(given)))
    held = ", ".join("nothing" if o == -1 else "no rank's" if o is None else f"rank {o}'s" for o in found)
    first = next(owner for owner, block in zip(found, right, strict=True) if owner != block)
    misconception = "wrong-block"
    if mirrored:
        misconception = "wrong-neighbour"
    elif first == -1:
        misconception = "block-missing"
    elif first is None:
        misconception = "wrong-value"
    message = (
        f"All-gather {place.words}: the blocks are {held}; expected rank 0's to rank {right[-1]}'s in order."
    )
    raise Finding(misconception, message, right, found)


def judge_sum(run: Run, seed: int) -> None:
    """Every rank's share once, of the rank's own block."""
    for place, result in zip(world(run), run["weights of sum"], strict=True):
        compare_weights(inner(result), place, mean=False)
    for place, found in zip(world(run), run["sum"], strict=True):
        for number, result in enumerate(found):
            compare_sum(inner(result), shares(seed, number, place.world_size), place, mean=False)


def judge_mean(run: Run, seed: int) -> None:
    """The sum, divided by W once. Sums are right by now."""
    for place, result in zip(world(run), run["weights of mean"], strict=True):
        compare_rounding(inner(result), run["mean"][place.rank], seed, place)
        compare_weights(inner(result), place, mean=True)
    for place, found in zip(world(run), run["mean"], strict=True):
        for number, result in zip(FLOATING, found, strict=True):
            compare_sum(inner(result), shares(seed, number, place.world_size), place, mean=True)


def compare_rounding(ones: Tensor, found: Sequence[dict[str, Any]], seed: int, place: Place) -> None:
    """Raises a Finding if means of 1/W come out as whole numbers, although whole means are right.

    Args:
        ones: the mean of `unit_shares`. found: the means of `shares`, all of them whole numbers.
    """
    if ones.any():
        return
    try:
        for number, result in zip(FLOATING, found, strict=True):
            compare_sum(inner(result), shares(seed, number, place.world_size), place, mean=True)
    except Finding:
        return  # more is wrong than the last digits
    right = f"1/{place.world_size}"
    message = (
        f"Reduce-scatter, mean=True, {place.words}: the sum is right, the mean is not. Sums that {place.world_size} divides "
        f"give the right mean, but a sum of 1 gives 0; expected {right}. The division rounds to whole numbers."
    )
    raise Finding("wrong-value", message, right, 0)


def compare_sum(actual: Tensor, given: Tensor, place: Place, mean: bool) -> None:
    """Raises a Finding if a block is not the sum, or mean, of what was given."""
    total = given.view(place.world_size, place.world_size, -1).sum(0, dtype=given.dtype)[place.rank]
    expected = total // place.world_size if mean else total
    if not torch.equal(actual, expected):
        what = "mean" if mean else "sum"
        message = f"Reduce-scatter {place.words}: not the {what} of all shares of block {place.rank}."
        raise Finding("wrong-value", f"{message} They are {given.dtype}.", expected, actual)


def compare_weights(actual: Tensor, place: Place, mean: bool) -> None:
    """Raises a Finding that says which shares entered a sum how often.

    Args:
        actual: [W * W], the weight of rank q's share of block b at q * W + b.
    """
    weights = actual.view(place.world_size, place.world_size)
    expected = torch.zeros_like(weights)
    expected[:, place.rank] = 1 / place.world_size if mean else 1
    if torch.allclose(weights, expected, rtol=1e-12, atol=0):
        return
    entered = [(q, b, w) for q, row in enumerate(weights.tolist()) for b, w in enumerate(row) if w]
    listed = ", ".join(f"{w:g} × rank {q}'s of block {b}" for q, b, w in entered) or "nothing"
    each = "1/W" if mean else "1"
    result = "the sum is right, the mean is not: it is" if mean else "the result is"
    message = (
        f"Reduce-scatter, mean={mean}, {place.words}: {result} {listed}. Expected {each} × every rank's of "
    )
    message += f"block {place.rank}."
    raise Finding(_weights_misconception(weights, place, mean), message)


def _weights_misconception(weights: Tensor, place: Place, mean: bool) -> str:
    world_size = place.world_size
    rows, columns = weights.ne(0).sum(1).tolist(), weights.ne(0).sum(0)
    values = weights[weights != 0]
    if any(row == 0 for row in rows):
        return "block-missing"
    if any(row > 1 for row in rows) or int(columns[place.rank]) != world_size:
        return "wrong-block"
    if len(set(values.tolist())) > 1:
        return "divided-every-step" if mean and float(values.max()) < 1 else "share-twice"
    if mean:
        return {1.0: "summed-not-averaged", world_size**-2.0: "averaged-twice"}.get(
            float(values[0]), "wrong-value"
        )
    return "averaged-not-summed" if float(values[0]) * world_size == 1 else "wrong-value"


def judge_traffic(run: Run, seed: int) -> None:
    """W - 1 blocks to the right, W - 1 blocks from the left."""
    for what, key, numbers in (
        ("All-gather", "gather", range(len(CASES))),
        ("Reduce-scatter", "sum", range(len(CASES))),
        ("Reduce-scatter, mean=True,", "mean", FLOATING),
    ):
        for place, found in zip(world(run), run[key], strict=True):
            for number, result in zip(numbers, found, strict=True):
                dtype, n = CASES[number]
                compare_moves(what, result, place, n * dtype.itemsize)


def compare_moves(what: str, result: dict[str, Any], place: Place, block: int) -> None:
    """Raises a Finding unless a rank of all exchanged W - 1 blocks of `block` bytes with its neighbors."""
    moves, world_size = result["moves"], place.world_size
    where = f"{what} {place.words}:"
    right, left = (place.rank + 1) % world_size, (place.rank - 1) % world_size
    for op, neighbour, other, way in (("send", right, left, "to"), ("recv", left, right, "from")):
        peers = sorted({peer for name, peer, _ in moves if name == op})
        nbytes = sum(n for name, _, n in moves if name == op)
        expected = (world_size - 1) * block
        if peers == [other] != [neighbour]:
            message = f"{where} {op} {way} rank {other}, expected {way} rank {neighbour}."
            raise Finding("wrong-neighbour", message, neighbour, other)
        if any(peer != neighbour for peer in peers):
            raise Finding(
                "not-a-ring",
                f"{where} {op} {way} ranks {peers}, expected {neighbour} only.",
                [neighbour],
                peers,
            )
        if nbytes != expected:
            misconception = "too-much-traffic" if nbytes > expected else "too-little-traffic"
            message = f"{where} {op} of {nbytes:,} B in all; expected {world_size - 1} blocks of {block:,} B = {expected:,} B."
            raise Finding(misconception, message, expected, nbytes)


def judge_memory(run: Run, seed: int) -> None:
    """Inputs as they were; nothing around outputs; an input that is part of the output."""
    for place, gathers, in_place in zip(world(run), run["gather"], run["gather in place"], strict=True):
        for number in range(len(CASES)):
            given = blocks(seed, number, place.world_size)
            compare_memory("All-gather", gathers[number], given[place.rank], place)
            compare_in_place(in_place[number], gathers[number], given, place)
    for key, numbers in (("sum", range(len(CASES))), ("mean", FLOATING)):
        for place, found in zip(world(run), run[key], strict=True):
            for number, result in zip(numbers, found, strict=True):
                share = shares(seed, number, place.world_size)[place.rank]
                compare_memory("Reduce-scatter", result, share, place)


def compare_memory(what: str, result: dict[str, Any], given: Tensor, place: Place) -> None:
    """Raises a Finding if an input was changed, or memory next to an output."""
    where = f"{what} {place.words}:"
    if not torch.equal(result["input"], given):
        raise Finding("input-changed", f"{where} its input has changed.", given, result["input"])
    memory: Tensor = result["memory"]
    around = torch.cat([memory[:GUARD], memory[-GUARD:]])
    if around.any():
        raise Finding(
            "past-the-end", f"{where} memory next to the output was written.", [0] * len(around), around
        )


def compare_in_place(
    result: dict[str, Any], beside: dict[str, Any], given: Sequence[Tensor], place: Place
) -> None:
    """Raises a Finding if a gather from elsewhere is right, and one from a block of its own output is not."""
    right = torch.cat(list(given))
    if torch.equal(inner(beside), right) and not torch.equal(inner(result), right):
        message = f"All-gather {place.words}: its input is block {place.rank} of its output; it is lost."
        raise Finding("input-changed", message, right, inner(result))


def judge_rings(ranks: Ranks, seed: int) -> None:
    """Rings of one, two and three of four ranks, however many are asked for; first, again, all of these."""
    run = ranks.run(probe, WORLD_SIZE, seed=seed)
    refuse_other_collectives(run)
    for again in (judge_gather, judge_sum, judge_mean):
        again(run, seed)
    for rank, found in enumerate(run["gather in rings"]):
        for place, result in zip(rings_of(rank), found, strict=True):
            _in_ring("All-gather", compare_blocks, result, blocks(seed, 0, place.world_size), place)
    for rank, found in enumerate(run["reduce in rings"]):
        expected = [(place, mean) for place in rings_of(rank) for mean in (False, True)]
        for (place, mean), result in zip(expected, found, strict=True):
            _in_ring("Reduce-scatter", compare_sum, result, shares(seed, 0, place.world_size), place, mean)


def _in_ring(
    what: str, compare: Callable[..., None], result: Any, given: Any, place: Place, *more: Any
) -> None:
    """All ranks together have right results by now: what is wrong is due to the ring being one of some of them."""
    if isinstance(result, str):
        raise Finding("wrong-group", f"{what} {place.words} raised {result[:300]}")
    try:
        compare(inner(result), given, place, *more)
    except Finding as finding:
        raise Finding("wrong-group", finding.message, finding.expected, finding.actual) from None


GATHER, SUM, MEAN, TRAFFIC, MEMORY = (
    partial(judge, each) for each in (judge_gather, judge_sum, judge_mean, judge_traffic, judge_memory)
)
CHECKS = (
    Check("02.gather", "all-gather gives every rank all blocks, in rank order", 1, GATHER),
    Check("02.reduce", "reduce-scatter gives each rank the sum of all shares of its block", 1, SUM),
    Check("02.mean", "the mean is the sum divided by W, once", 1, MEAN, ("02.reduce",)),
    Check("02.traffic", "each rank sends W - 1 blocks, to its right neighbor only", 1, TRAFFIC),
    Check("02.memory", "nothing but the output is written, even if the input is part of it", 1, MEMORY),
    Check(
        "02.rings",
        "rings of one, two or three of the ranks work, too",
        1,
        judge_rings,
        ("02.gather", "02.mean"),
    ),
)
