"""01: integers against torch.chunk, every number of rows and ranks up to 64, and some large ones.

Still larger ones cannot be enumerated. There floats go wrong, and the oracle is integer arithmetic.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from hwfsdp import sharding
from hwfsdp.learn.run import Ranks, Report, attempt
from hwfsdp.learn.verdict import Check, Finding

MOST = 64
Case = tuple[int, int]  # rows, world size
Extents = list[tuple[int, int]]  # (start, length) by rank
FLOATS_ARE_EXACT = 2**53  # up to here, every integer is one
SHAPES = ([5], (7, 4), (6, 3, 5, 2), (9, 2, 4, 1, 3))  # of a bias, a linear layer, a convolution in 2D and 3D


def cases(seed: int) -> list[Case]:
    """All small ones, then some large ones."""
    draw = random.Random(seed)
    large = [(draw.randrange(65, 100_000), draw.randrange(2, 40)) for _ in range(40)]
    return [(n, world_size) for n in range(MOST + 1) for world_size in range(1, MOST + 1)] + large


def far_cases(seed: int) -> list[Case]:
    """More rows than a float can count, and so many ranks that few rows are hardly more than none per rank."""
    draw = random.Random(seed)
    rows = [draw.randrange(FLOATS_ARE_EXACT, 2**60) for _ in range(8)]
    many = [(draw.randrange(1, 8), draw.randrange(1001, 100_000)) for _ in range(8)]
    more = [(w * draw.randrange(1, 50) + 1, w) for w in (1024, 4099, 99_991)]
    return [
        *((FLOATS_ARE_EXACT + 1, 2), (10**17 + 1, 7), (3 * FLOATS_ARE_EXACT + 1, 3)),
        *((n, draw.randrange(2, 3000)) for n in rows),
        *((1, 1500), *many, *more),
    ]


def all_cases(seed: int) -> list[Case]:
    return cases(seed) + far_cases(seed)


def far_ranks(seed: int) -> list[tuple[int, int, int]]:
    """(rows, world size, rank): the first ranks, one in the middle, the last ones."""
    return [(n, w, rank) for n, w in far_cases(seed) for rank in sorted({0, 1, w // 2, w - 2, w - 1})]


# --- On the rank -------------------------------------------------------------------------------------------


def probe(report: Report, seed: int) -> None:
    """Every function on its own: one that raises hides nothing of the others."""
    attempt(report, "chunk", lambda: [_plain(sharding.chunk_length(*case)) for case in all_cases(seed)])
    attempt(report, "padded", lambda: [_plain(sharding.padded_length(*case)) for case in all_cases(seed)])
    attempt(report, "extents", lambda: _extent_numbers(seed))
    attempt(report, "far extents", lambda: [_far_extent(*case) for case in far_ranks(seed)])
    attempt(report, "shapes", lambda: _shapes(seed))
    attempt(report, "other shapes", lambda: [_plain(sharding.local_shape(shape, 2, 1)) for shape in SHAPES])
    attempt(report, "type", lambda: type(sharding.local_shape((4, 3), 2, 0)).__name__)


def _extent_numbers(seed: int) -> Tensor | dict[str, Any]:
    """start, length, start, length, …; if something is no Extent, or has no integers, the first of these."""
    numbers: list[Any] = []
    for n, w in cases(seed):
        for rank in range(w):
            extent = sharding.chunk_extent(n, w, rank)
            pair = [getattr(extent, name, None) for name in ("start", "length")]
            if any(type(number) is not int for number in pair):
                found = {"case": [n, w, rank], "shown": repr(extent)[:100], "type": type(extent).__name__}
                return {**found, "is": hasattr(extent, "start") and hasattr(extent, "length")}
            numbers += pair
    return torch.tensor(numbers)


def _far_extent(n: int, world_size: int, rank: int) -> list[Any]:
    extent = sharding.chunk_extent(n, world_size, rank)
    return [_plain(extent.start), _plain(extent.length)]


def _shapes(seed: int) -> list[Any]:
    return [
        [_plain(sharding.local_shape((n, 3, 2), w, rank)) for rank in range(w)] for n, w in cases(seed)[::7]
    ]


def _plain(value: Any) -> Any:
    """Integers as they are, anything else as text: a float is not a length."""
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value if type(value) is int else repr(value)


# --- Judges ------------------------------------------------------------------------------------------------


@functools.cache
def oracle(n: int, world_size: int) -> tuple[tuple[int, int], ...]:
    """What torch.chunk does: its pieces, then empty ones that start at the end."""
    pieces = torch.arange(n).chunk(world_size) if n else ()
    found = [(int(piece[0]), len(piece)) for piece in pieces]
    return (*found, *[(n, 0)] * (world_size - len(found)))


def full_chunk(n: int, world_size: int) -> int:
    """Rows of rank 0, in integers."""
    rows, more = divmod(n, world_size)
    return rows + 1 if more else rows


def far_extent(n: int, world_size: int, rank: int) -> tuple[int, int]:
    """start and length, in integers."""
    bounds = [sorted((0, r * full_chunk(n, world_size), n))[1] for r in (rank, rank + 1)]
    return bounds[0], bounds[1] - bounds[0]


def _case(n: int, world_size: int, rank: int | None = None) -> str:
    of = f"n={n}, world_size={world_size}"
    return of if rank is None else f"{of}, rank={rank}"


def judge_chunk_length(ranks: Ranks, seed: int) -> None:
    """The longest chunk is the full one."""
    answers = ranks.run(probe, 1, seed=seed)["chunk"][0]
    wrong = _first_wrong(seed, answers, full_chunk)
    if wrong is None:
        return
    floor = all(answer == n // w for answer, (n, w) in zip(answers, cases(seed), strict=False))
    more = all(answer == n // w + 1 for answer, (n, w) in zip(answers, cases(seed), strict=False))
    misconception = "floor-instead-of-ceil" if floor else "padded-always" if more else "wrong-value"
    raise _wrong_length("chunk_length", wrong, seed, misconception)


def judge_padded_length(ranks: Ranks, seed: int) -> None:
    """As many full chunks as there are ranks."""
    answers = ranks.run(probe, 1, seed=seed)["padded"][0]
    wrong = _first_wrong(seed, answers, lambda n, w: full_chunk(n, w) * w)
    if wrong is None:
        return
    n, w, actual, expected = wrong
    misconception = "wrong-value"
    if isinstance(actual, int) and actual < n:
        misconception = "floor-instead-of-ceil"
    elif isinstance(actual, int) and actual % w:
        misconception = "padding-dropped"
    elif isinstance(actual, int) and actual > expected:
        misconception = "padded-always"
    raise _wrong_length("padded_length", wrong, seed, misconception)


def _wrong_length(function: str, wrong: tuple[int, int, Any, int], seed: int, misconception: str) -> Finding:
    """What is right until numbers are far out is due to floats."""
    n, w, actual, expected = wrong
    if (n, w) in far_cases(seed):
        misconception = "float-for-integer"
    message = f"{function}({_case(n, w)}) is {actual}, expected {expected}."
    return Finding(misconception, message, expected, actual)


def _first_wrong(
    seed: int, answers: Sequence[Any], right: Callable[[int, int], int]
) -> tuple[int, int, Any, int] | None:
    for (n, w), answer in zip(all_cases(seed), answers, strict=True):
        if answer != right(n, w):
            return n, w, answer, right(n, w)
    return None


def _extents(ranks: Ranks, seed: int) -> Iterator[tuple[int, int, Extents]]:
    """Rows, world size, and every rank's extent of each case."""
    found = ranks.run(probe, 1, seed=seed)["extents"][0]
    if not isinstance(found, Tensor):
        returned = f"chunk_extent({_case(*found['case'])}) returned {found['shown']}"
        if found["is"]:
            message = f"{returned}: start and length are integers."
            raise Finding("wrong-value", message, "two integers", found["shown"])
        message = f"{returned}, of type {found['type']}, not an Extent."
        raise Finding("wrong-value", message, "Extent", found["type"])
    numbers = iter(found.view(-1, 2).tolist())
    for n, w in cases(seed):
        yield n, w, list(map(tuple, islice(numbers, w)))


def judge_rows(ranks: Ranks, seed: int) -> None:
    """Which rows; empty shards have none, wherever they start."""
    for n, w, extents in _extents(ranks, seed):
        expected = oracle(n, w)
        for rank, (actual, right) in enumerate(zip(extents, expected, strict=True)):
            if actual != right and not actual[1] == right[1] == 0:
                message = _different(_case(n, w, rank), actual, right)
                raise Finding(_extents_misconception(n, w, extents), message, expected, extents)
    for case, actual, right in _far_extents(ranks, seed):
        if actual != right and not actual[1] == right[1] == 0:
            raise Finding("float-for-integer", _different(_case(*case), actual, right), right, actual)


def _far_extents(ranks: Ranks, seed: int) -> Iterator[tuple[tuple[int, int, int], Any, tuple[int, int]]]:
    """Each case with what came of it, and what should have."""
    found = ranks.run(probe, 1, seed=seed)["far extents"][0]
    for case, actual in zip(far_ranks(seed), found, strict=True):
        yield case, tuple(actual), far_extent(*case)


def _different(case: str, actual: Sequence[Any], right: Sequence[int]) -> str:
    return (
        f"chunk_extent({case}) is start={actual[0]}, length={actual[1]}; "
        f"expected start={right[0]}, length={right[1]}."
    )


def _extents_misconception(n: int, w: int, extents: Extents) -> str:
    lengths = [length for _, length in extents]
    if w > 1 and all(extent == (0, n) for extent in extents):
        return "replicated"
    if any(length < 0 or (length and start + length > n) for start, length in extents):
        return "past-the-end"
    if lengths == [n // w + (rank < n % w) for rank in range(w)]:
        return "spread-evenly"
    if sum(lengths) < n and max(lengths) == n // w:
        return "floor-instead-of-ceil"
    return "wrong-rows"


def judge_empty(ranks: Ranks, seed: int) -> None:
    """Empty extents start at n."""
    for n, w, extents in _extents(ranks, seed):
        for rank, (start, length) in enumerate(extents):
            if length == 0 and start != n:
                message = f"chunk_extent({_case(n, w, rank)}) is empty and starts at {start}; expected {n}."
                raise Finding("empty-at-zero", message, n, start)
    for (n, w, rank), (start, length), _ in _far_extents(ranks, seed):
        if length == 0 and start != n:
            message = f"chunk_extent({_case(n, w, rank)}) is empty and starts at {start}; expected {n}."
            raise Finding("empty-at-zero", message, n, start)


def judge_shapes(ranks: Ranks, seed: int) -> None:
    """Rows of the rank, the other dimensions as they are."""
    run = ranks.run(probe, 1, seed=seed)
    for (n, w), shapes in zip(cases(seed)[::7], run["shapes"][0], strict=True):
        for rank, (actual, (_, length)) in enumerate(zip(shapes, oracle(n, w), strict=True)):
            if actual != [length, 3, 2]:
                message = f"local_shape((n, 3, 2), …) with {_case(n, w, rank)} is {actual}."
                padded = isinstance(actual, list) and actual == [oracle(n, w)[0][1], 3, 2]
                raise Finding("padding-leaked" if padded else "wrong-value", message, [length, 3, 2], actual)
    for shape, actual in zip(SHAPES, run["other shapes"][0], strict=True):
        expected = [oracle(shape[0], 2)[1][1], *shape[1:]]
        if actual != expected:
            message = (
                f"local_shape({shape}, world_size=2, rank=1) is {actual}: {len(shape)} dimensions go in."
            )
            raise Finding("wrong-value", message, expected, actual)
    if run["type"][0] != "tuple":
        raise Finding(
            "wrong-value", "local_shape returns something else than a tuple.", "tuple", run["type"][0]
        )


CHECKS = (
    Check("01.chunk", "a full chunk has ceil(n / W) rows", 1, judge_chunk_length),
    Check("01.padded", "the padded length is the next multiple of W", 1, judge_padded_length, ("01.chunk",)),
    Check("01.rows", "each rank has the rows that torch.chunk gives it", 1, judge_rows, ("01.chunk",)),
    Check("01.empty", "an empty extent starts at n", 1, judge_empty, ("01.rows",)),
    Check("01.shape", "a shard has the rank's rows and the other dimensions", 1, judge_shapes, ("01.rows",)),
)
