"""01: integers against nested chunking, every number of rows and ranks up to 64, and some large ones."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from hwfsdp import sharding
from hwfsdp.learn.diagnose import Finding
from hwfsdp.learn.grade import Check
from hwfsdp.learn.run import Ranks, Report, attempt

MOST = 64
Case = tuple[int, int]  # rows, world size
Extents = list[tuple[int, int]]  # (start, length) by rank


def cases(seed: int) -> list[Case]:
    """All small ones, then some large ones."""
    draw = random.Random(seed)
    large = [(draw.randrange(65, 100_000), draw.randrange(2, 40)) for _ in range(40)]
    return [(n, world_size) for n in range(MOST + 1) for world_size in range(1, MOST + 1)] + large


# --- On the rank -------------------------------------------------------------------------------------------


def probe(report: Report, seed: int) -> None:
    """Every function on its own: one that raises hides nothing of the others."""
    attempt(report, "chunk", lambda: [_plain(sharding.chunk_length(n, w)) for n, w in cases(seed)])
    attempt(report, "padded", lambda: [_plain(sharding.padded_length(n, w)) for n, w in cases(seed)])
    attempt(report, "extents", lambda: _extent_numbers(seed))
    attempt(report, "shapes", lambda: _shapes(seed))
    attempt(report, "vector", lambda: _plain(sharding.local_shape([5], 2, 1)))
    attempt(report, "type", lambda: type(sharding.local_shape((4, 3), 2, 0)).__name__)


def _extent_numbers(seed: int) -> Tensor | str:
    """start, length, start, length, …; if one of them is no integer, that one as text."""
    found = [sharding.chunk_extent(n, w, rank) for n, w in cases(seed) for rank in range(w)]
    numbers = [number for extent in found for number in (extent.start, extent.length)]
    odd = next((number for number in numbers if type(number) is not int), None)
    return torch.tensor(numbers) if odd is None else repr(odd)


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


def _case(n: int, world_size: int, rank: int | None = None) -> str:
    of = f"n={n}, world_size={world_size}"
    return of if rank is None else f"{of}, rank={rank}"


def judge_chunk_length(ranks: Ranks, seed: int) -> None:
    """The longest chunk is the full one."""
    answers = ranks.run(probe, 1, seed=seed)["chunk"][0]
    wrong = _first_wrong(seed, answers, lambda n, w: oracle(n, w)[0][1])
    if wrong is None:
        return
    n, w, actual, expected = wrong
    floor = all(answer == n // w for answer, (n, w) in zip(answers, cases(seed), strict=True))
    more = all(answer == n // w + 1 for answer, (n, w) in zip(answers, cases(seed), strict=True))
    misconception = "floor-instead-of-ceil" if floor else "padded-always" if more else "wrong-value"
    raise Finding(
        misconception, f"chunk_length({_case(n, w)}) is {actual}, expected {expected}.", expected, actual
    )


def judge_padded_length(ranks: Ranks, seed: int) -> None:
    """As many full chunks as there are ranks."""
    answers = ranks.run(probe, 1, seed=seed)["padded"][0]
    wrong = _first_wrong(seed, answers, lambda n, w: oracle(n, w)[0][1] * w)
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
    raise Finding(
        misconception, f"padded_length({_case(n, w)}) is {actual}, expected {expected}.", expected, actual
    )


def _first_wrong(
    seed: int, answers: Sequence[Any], right: Callable[[int, int], int]
) -> tuple[int, int, Any, int] | None:
    for (n, w), answer in zip(cases(seed), answers, strict=True):
        if answer != right(n, w):
            return n, w, answer, right(n, w)
    return None


def _extents(ranks: Ranks, seed: int) -> Iterator[tuple[int, int, Extents]]:
    """Rows, world size, and every rank's extent of each case."""
    found = ranks.run(probe, 1, seed=seed)["extents"][0]
    if not isinstance(found, Tensor):
        raise Finding("wrong-value", f"start and length are integers; one of them is {found}.", "int", found)
    numbers = iter(found.view(-1, 2).tolist())
    for n, w in cases(seed):
        yield n, w, list(map(tuple, islice(numbers, w)))


def judge_rows(ranks: Ranks, seed: int) -> None:
    """Which rows; empty shards have none, wherever they start."""
    for n, w, extents in _extents(ranks, seed):
        expected = oracle(n, w)
        for rank, (actual, right) in enumerate(zip(extents, expected, strict=True)):
            if actual != right and not actual[1] == right[1] == 0:
                message = (
                    f"chunk_extent({_case(n, w, rank)}) is start={actual[0]}, length={actual[1]}; "
                    f"expected start={right[0]}, length={right[1]}."
                )
                raise Finding(_extents_misconception(n, w, extents), message, expected, extents)


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


def judge_shapes(ranks: Ranks, seed: int) -> None:
    """Rows of the rank, the other dimensions as they are."""
    run = ranks.run(probe, 1, seed=seed)
    for (n, w), shapes in zip(cases(seed)[::7], run["shapes"][0], strict=True):
        for rank, (actual, (_, length)) in enumerate(zip(shapes, oracle(n, w), strict=True)):
            if actual != [length, 3, 2]:
                message = f"local_shape((n, 3, 2), …) with {_case(n, w, rank)} is {actual}."
                padded = isinstance(actual, list) and actual == [oracle(n, w)[0][1], 3, 2]
                raise Finding("padding-leaked" if padded else "wrong-value", message, [length, 3, 2], actual)
    if run["vector"][0] != [2]:
        raise Finding(
            "wrong-value", "local_shape([5], 2, 1): a bias has one dimension.", [2], run["vector"][0]
        )
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
