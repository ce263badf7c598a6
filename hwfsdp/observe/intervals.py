"""Intervals of time, as sorted lists of (start, end) without overlaps: their union, intersection, difference and length."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same points as disjoint intervals in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def intersect(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """Return the points that are in `a` and in `b`. Both are sorted and disjoint, as `union` returns them."""
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            found.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def subtract(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """Return the points of `a` that are not in `b`. Both are sorted and disjoint, as `union` returns them."""
    edges = [-inf, *(us for interval in b for us in interval), inf]
    return intersect(a, list(zip(edges[::2], edges[1::2], strict=True)))


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
