"""Compare boxes with the indexing of tensors."""

from __future__ import annotations

from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from hwfsdp.checkpoint.boxes import (
    Box,
    boxes_between,
    find_fault,
    intersection,
    halves_of,
    span_of,
    whole,
    within,
)

shapes = st.lists(st.integers(1, 6), min_size=0, max_size=4).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offset = tuple(draw(st.integers(0, n - 1)) for n in shape)
    return Box(offset, tuple(draw(st.integers(1, n - a)) for a, n in zip(offset, shape)))


@st.composite
def cases(draw: st.DrawFn, boxes: int = 2) -> tuple[tuple[int, ...], list[Box]]:
    shape = draw(shapes)
    return shape, [draw(boxes_in(shape)) for _ in range(boxes)]


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """Draw a shape that is cut again and again at random places."""
    shape = draw(shapes)
    boxes = [whole(shape)]
    for _ in range(draw(st.integers(0, 5))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dims = [d for d, n in enumerate(box.shape) if n > 1]
        if not dims:
            boxes.append(box)
            continue
        dim = draw(st.sampled_from(dims))
        cut = draw(st.integers(1, box.shape[dim] - 1))
        for start, n in ((0, cut), (cut, box.shape[dim] - cut)):
            offset, part = list(box.offset), list(box.shape)
            offset[dim], part[dim] = offset[dim] + start, n
            boxes.append(Box(tuple(offset), tuple(part)))
    return shape, draw(st.permutations(boxes))


def counts(shape: tuple[int, ...], boxes: list[Box]) -> torch.Tensor:
    """Count for each element the boxes that have it."""
    found = torch.zeros(shape, dtype=torch.int64)
    for box in boxes:
        found[box.slices] += 1
    return found


@given(cases())
def test_an_intersection_has_the_elements_of_both_boxes(case):
    shape, (one, other) = case
    inner = intersection(one, other)
    assert torch.equal(counts(shape, [inner] if inner else []), (counts(shape, [one, other]) == 2).long())
    if inner:
        numbers = torch.arange(prod(shape)).view(shape)
        assert torch.equal(numbers[one.slices][within(inner, one).slices], numbers[inner.slices])


@given(tilings(), st.data())
def test_a_tiling_has_no_fault_unless_a_box_is_missing_or_doubled(case, data):
    shape, boxes = case
    assert find_fault(shape, boxes) is None
    i = data.draw(st.integers(0, len(boxes) - 1))
    assert find_fault(shape, boxes[:i] + boxes[i + 1 :])
    assert find_fault(shape, [*boxes, boxes[i]])


@given(cases(boxes=3))
def test_boxes_without_a_fault_have_every_element_once(case):
    shape, boxes = case
    assert (find_fault(shape, boxes) is None) == bool((counts(shape, boxes) == 1).all())


def test_boxes_that_are_cut_along_very_many_dims_are_a_fault_at_once():
    halves = [Box((0,) * d + (1,) + (0,) * (59 - d), (1,) * (d + 1) + (2,) * (59 - d)) for d in range(60)]
    assert find_fault((2,) * 60, [*halves, Box((0,) * 60, (1,) * 60)]) == "parts that are cut along 60 dims"


def test_a_box_outside_is_a_fault_and_a_tensor_without_elements_needs_no_box():
    for box in (Box((0,), (4,)), Box((-1, 0), (4, 3)), Box((1, 0), (4, 3)), Box((0, 4), (4, 0))):
        assert find_fault((4, 3), [box])
    assert find_fault((0, 3), []) is None
    assert find_fault((), [Box((), ())]) is None
    assert find_fault((), []) and find_fault((), [Box((), ())] * 2)


@given(cases(boxes=1), st.integers(1, 40))
def test_a_box_has_a_span_and_pieces_within_a_limit(case, limit):
    shape, (box,) = case
    found = torch.arange(prod(shape)).view(shape)[box.slices].flatten()
    assert span_of(box, shape) == (int(found[0]), int(found[-1]) + 1)
    pieces = list(halves_of(box, shape, limit))
    assert torch.equal(counts(shape, pieces), counts(shape, [box]))
    for piece in pieces:
        first, last = span_of(piece, shape)
        assert last - first <= limit or piece.numel == 1


@given(st.data(), shapes)
def test_a_range_of_elements_is_a_few_boxes(data, shape):
    start = data.draw(st.integers(0, prod(shape)))
    stop = data.draw(st.integers(start, prod(shape)))
    numbers, found = torch.arange(prod(shape)).view(shape), []
    boxes = [*boxes_between(shape, start, stop)]
    for first, box in boxes:
        assert first == start + len(found)
        found += numbers[box.slices].flatten().tolist()
    assert found == [*range(start, stop)] and len(boxes) <= max(1, 2 * len(shape))
