"""01 Rows: what must hold.

Your functions are called for all numbers of rows and ranks up to 64, and for some numbers of rows that a float cannot count. The
answers are compared with `torch.chunk`, which cuts as DTensors are cut.

    pytest exercises/01_rows               all of this
    pytest exercises/01_rows -k padded     one test
"""

from functools import cache

import pytest
import torch
from facts_rows import probe_rows

from hwfsdp.course.findings import Finding

pytestmark = pytest.mark.exercise("01", title="Rows", file="my_fsdp.py")

MOST = 64
CASES = [(n, w) for n in range(MOST + 1) for w in range(1, MOST + 1)] + [(2**53 + 1, 2), (10**17 + 1, 7)]


@cache
def chunks(n, world_size):
    """The rows of each rank, as (start, stop), equal the rows that `torch.chunk` gives it. A rank without rows has (n, n)."""
    if n <= MOST:
        pieces = [piece.tolist() for piece in torch.arange(n).chunk(world_size) if n]
        found = [(piece[0], piece[-1] + 1) for piece in pieces]
    else:
        chunk = (n + world_size - 1) // world_size
        found = [(min(rank * chunk, n), min((rank + 1) * chunk, n)) for rank in range(world_size)]
    return found + [(n, n)] * (world_size - len(found))


@pytest.mark.points(2, ask="Every rank sends the same number of rows. Which rank needs the most?")
def test_padded(ranks):
    """A full chunk has as many rows as the first chunk of torch.chunk."""
    answers = ranks(1).ask(probe_rows, "padded", cases=CASES)[0]
    one_more = all(found == n // w + 1 for (n, w), found in zip(CASES, answers) if n <= MOST)
    for (n, w), found in zip(CASES, answers):
        start, stop = chunks(n, w)[0]
        if found == stop - start:
            continue
        why = "wrong-value"
        if "." in str(found) or n > MOST:
            why = "float-for-integer"
        elif found == n // w:
            why = "floor-instead-of-ceil"
        elif one_more:
            why = "padded-always"
        raise Finding(why, f"padded_rows({n}, {w}) {said(found)}.", stop - start, found)


@pytest.mark.points(3, ask="Which row comes first on rank r if every rank before it has a full chunk?")
def test_rows(ranks):
    """Every rank keeps the rows that torch.chunk gives it."""
    answers = ranks(1).ask(probe_rows, "rows", cases=CASES)[0]
    for (n, w), found in zip(CASES, answers):
        right = chunks(n, w)
        for rank in range(w):
            if found[rank] != list(right[rank]):
                why, more = why_wrong(n, w, found, right, rank)
                got = tuple(found[rank]) if isinstance(found[rank], list) else found[rank]
                raise Finding(why, f"rows_of({n}, {w}, {rank}) {said(got)}.{more}", right[rank], got)


def why_wrong(n, w, found, right, rank):
    """The likely misconception, and a sentence about it. `rank` is the first one whose rows are wrong."""
    got, (start, stop) = found[rank], right[rank]
    if not isinstance(got, list) or len(got) != 2 or any(isinstance(number, str) for number in got):
        return ("float-for-integer" if "." in str(got) else "wrong-value"), ""
    if n > MOST:
        return "float-for-integer", " A float cannot count so many rows."
    if start == stop and got[0] > n:
        return "past-the-end", " It begins after the last row."
    if start == stop and got[0] == got[1]:
        return (
            "empty-at-zero" if got[0] == 0 else "past-the-end"
        ), " This rank has no rows; its place is the end."
    if got[1] > n:
        return "past-the-end", ""
    if all([a, b] == [first, last - first] for (a, b), (first, last) in zip(found, right)):
        return (
            "wrong-rows",
            " The second number is how many rows there are; asked for is the row after the last.",
        )
    if [b - a for a, b in found] == sorted((n // w + (r < n % w) for r in range(w)), reverse=True):
        return "spread-evenly", ""
    return "wrong-rows", ""


def said(found):
    return "returns nothing" if found == "None" else f"is {found}"
