"""Boxes: parts of a tensor, as offsets and shapes. Integers only.

A checkpoint holds a tensor in chunks. Each chunk is a box that a saving rank had. A rank that loads the tensor needs another
box. This module tells whether chunks make up the whole tensor, which elements two boxes share, and how to split a large box.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple


class Box(NamedTuple):
    """A part of a tensor: the index of its first element, and its shape."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The slices that cut the box out of the whole tensor."""
        return tuple(slice(start, start + n) for start, n in zip(self.offset, self.shape))

    def __str__(self) -> str:
        return f"[{', '.join(f'{start}:{start + n}' for start, n in zip(self.offset, self.shape))}]"


def whole(shape: Sequence[int]) -> Box:
    """Return the box that contains a whole tensor."""
    return Box((0,) * len(shape), tuple(shape))


def intersection(one: Box, other: Box) -> Box | None:
    """Return the box of the elements that two parts of one tensor share; None if there are none. Parts may be empty, or without dims."""
    starts = tuple(max(a, b) for a, b in zip(one.offset, other.offset))
    ends = [min(a + n, b + m) for a, n, b, m in zip(one.offset, one.shape, other.offset, other.shape)]
    shape = tuple(end - start for start, end in zip(starts, ends))
    return Box(starts, shape) if all(n > 0 for n in shape) else None


def within(box: Box, outer: Box) -> Box:
    """Return the same box, counted from the first element of `outer`, in which it lies."""
    return Box(tuple(a - b for a, b in zip(box.offset, outer.offset)), box.shape)


def find_fault(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Say in one phrase why the boxes do not cover a tensor of this shape, each element once; None if they do.

    The phrase names a box or counts elements: "the part [4:6] outside the shape [5]" (`str` of a Box gives the brackets). Boxes come in
    any order. They may be wrong in any way: in size, in place, in the number of dims. An empty box is a fault. There may be
    thousands of boxes, with billions of elements.
    """
    for box in boxes:
        if len(box.shape) != len(shape) or len(box.offset) != len(shape):
            return f"a part with {len(box.shape)} dims of a tensor with {len(shape)}"
        if not all(0 <= a and 0 < n and a + n <= size for a, n, size in zip(box.offset, box.shape, shape)):
            return f"the part {box} outside the shape {list(shape)}"
    pair = find_overlap(boxes)
    if pair:
        return f"the parts {pair[0]} and {pair[1]}, which overlap"
    covered = sum(box.numel for box in boxes)
    return None if covered == prod(shape) else f"{covered} of {prod(shape)} elements"


def find_overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Return two boxes of one tensor that have an element in common; None if there are none.

    It compares boxes along the dim in which most of them begin at different places. So the boxes of a sharded tensor, however
    many, are compared only with their neighbors.
    """
    dims = range(len(boxes[0].shape) if boxes else 0)
    dim = max(dims, key=lambda d: len({box.offset[d] for box in boxes}), default=None)
    if dim is None:
        return (boxes[0], boxes[1]) if len(boxes) > 1 else None
    ordered = sorted(boxes, key=lambda box: box.offset[dim])
    for i, box in enumerate(ordered):
        for other in ordered[i + 1 :]:
            if other.offset[dim] >= box.offset[dim] + box.shape[dim]:
                break
            if intersection(box, other):
                return box, other
    return None


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the distance in elements between neighbors along each dim, in row-major order."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def span_of(box: Box, shape: Sequence[int]) -> tuple[int, int]:
    """Return the range [from, to) from the first to the last element of a box, in the row-major order of a tensor of this shape."""
    strides = strides_of(shape)
    first = sum(start * step for start, step in zip(box.offset, strides))
    return first, first + sum((n - 1) * step for n, step in zip(box.shape, strides)) + 1


def slices_of(box: Box, parts: int) -> list[Box]:
    """Cut a box into at most `parts` boxes, along its first dim that has more than one element."""
    dim = next((d for d, n in enumerate(box.shape) if n > 1), None)
    if dim is None or parts < 2:
        return [box]
    step = -(-box.shape[dim] // parts)
    cut = []
    for start in range(0, box.shape[dim], step):
        offset, shape = list(box.offset), list(box.shape)
        offset[dim], shape[dim] = offset[dim] + start, min(step, shape[dim] - start)
        cut.append(Box(tuple(offset), tuple(shape)))
    return cut


def pieces_of(box: Box, shape: Sequence[int], limit: int) -> Iterator[Box]:
    """Yield the box in pieces whose spans have at most `limit` elements. Each cut halves a piece along its outermost dim."""
    first, last = span_of(box, shape)
    dim = next((d for d, n in enumerate(box.shape) if n > 1), None)
    if last - first <= limit or dim is None:
        yield box
        return
    for half in slices_of(box, 2):
        yield from pieces_of(half, shape, limit)
