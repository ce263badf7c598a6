"""Which bytes of a storage are copied to the CPU (*staged*, see `staging`), and which of them together: integers only.

Note [Views stay views]
    Tensors that share memory, such as tied weights or slices of a flat parameter, share it in the copy, too. If more than half
    of the bytes from the first to the last view of a storage are needed, all its views go into one staged storage, with their
    strides and the distances between them. Otherwise each *run* of views whose extents overlap is treated alone, in the same
    way. A run with more holes than elements, such as two columns of a wide matrix, is separated into groups of views without
    common elements. If a group is a single view with holes, it is closed up: its elements lie densely, in the same order as
    before. Several views with holes that have elements in common are copied together with the holes.

    Conjugated and negated views have other values than the memory under them. They are resolved into their own memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from hwfsdp.layout.extents import compute_local_stride


class View(NamedTuple):
    """The place of a tensor's elements in its storage. Tensors with equal views are one tensor in the copy."""

    begin: int  # byte of the first element
    end: int  # byte after the last one
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # elements
    dtype: torch.dtype
    lazy: tuple[bool, bool]  # conjugated, negated when read

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape without repetition: expanded dims have size 1."""
        if 0 not in self.stride:
            return self.shape
        return tuple(n if step else 1 for n, step in zip(self.shape, self.stride))

    @property
    def nbytes(self) -> int:
        """The bytes of the elements, without repetition."""
        return prod(self.stored) * self.dtype.itemsize


class Block(NamedTuple):
    """The contents of one staged storage: `nbytes` bytes from byte `begin` on, or the elements of one view, closed up."""

    views: list[View]
    begin: int
    nbytes: int
    closed_up: bool


def view_of(tensor: Tensor) -> View:
    """Return the place of a tensor in its storage. The tensor has elements."""
    begin, lazy = int(tensor.storage_offset()) * tensor.element_size(), (tensor.is_conj(), tensor.is_neg())
    return View(begin, end_of(tensor), tensor.shape, tensor.stride(), tensor.dtype, lazy)


def end_of(tensor: Tensor) -> int:
    """Return the byte of its storage at which a tensor ends. The tensor has elements."""
    end = int(tensor.storage_offset())
    if tensor.is_contiguous():  # as most are: this is faster
        end += tensor.numel()
    else:
        end += 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride()))
    return end * tensor.element_size()


def blocks_of(views: list[View]) -> list[Block]:
    """Find the views of one storage that are staged together (Note [Views stay views])."""
    if len(views) == 1:
        return [_close_up(views[0]) if any(views[0].lazy) else _block(views)]
    blocks = [_close_up(view) for view in views if any(view.lazy)]
    plain = sorted((view for view in views if not any(view.lazy)), key=lambda view: view[:2])
    if len(plain) < 2:
        return [*blocks, *(_block([view]) for view in plain)]
    runs: list[list[View]] = []
    end = -1
    for view in plain:
        if view.begin >= end:
            runs.append([])
        runs[-1].append(view)
        end = max(end, view.end)
    if 2 * sum(map(_wanted, runs)) > _span(plain):
        return [*blocks, _block(plain)]
    return [*blocks, *(block for run in runs for block in _split(run))]


def _span(views: Iterable[View]) -> int:
    """Return the number of bytes from the first to the last view."""
    return max(view.end for view in views) - min(view.begin for view in views)


def _wanted(views: list[View]) -> int:
    """Return an upper bound of the bytes that belong to elements."""
    return min(_span(views), sum(view.nbytes for view in views))


def _split(run: list[View]) -> list[Block]:
    """Return the run as one block. If most of it is holes, return groups of views that have no element in common."""
    if len(run) == 1 or 2 * _wanted(run) > _span(run):
        return [_block(run)]
    groups: list[list[View]] = []
    for view in run:
        touched = [group for group in groups if any(_may_share(view, other) for other in group)]
        groups = [group for group in groups if group not in touched]
        groups.append([*(other for group in touched for other in group), view])
    blocks = [_block(group) for group in groups]
    return blocks if sum(block.nbytes for block in blocks) < _span(run) else [_block(run)]


def _may_share(a: View, b: View) -> bool:
    """True if two views may have an element in common. It is False if some pitch keeps them in separate columns."""
    if a.end <= b.begin or b.end <= a.begin:
        return False
    pitches = {
        step * v.dtype.itemsize for v in (a, b) for n, step in zip(v.shape, v.stride) if n > 1 and step
    }
    return not any(
        (b.begin - a.begin) % pitch >= _width(a, pitch) and (a.begin - b.begin) % pitch >= _width(b, pitch)
        for pitch in pitches
    )


def _width(view: View, pitch: int) -> int:
    """Return the bytes from the view's first to its last element in a row, if rows begin every `pitch` bytes."""
    steps = [(n, step * view.dtype.itemsize) for n, step in zip(view.stored, view.stride)]
    return view.dtype.itemsize + sum((n - 1) * step for n, step in steps if step % pitch)


def _block(views: list[View]) -> Block:
    if len(views) == 1:
        view, span = views[0], views[0].end - views[0].begin
        has_holes = view.nbytes < span and not overlaps_itself(view)
        return _close_up(view) if has_holes else Block(views, view.begin, span, closed_up=False)
    begin, end = min(view.begin for view in views), max(view.end for view in views)
    # torch counts offsets in elements. So the distance to each view must be a multiple of its element's size.
    begin -= begin % max(view.dtype.itemsize for view in views)
    return Block(views, begin, end - begin, closed_up=False)


def _close_up(view: View) -> Block:
    return Block([view], view.begin, view.nbytes, closed_up=True)


def overlaps_itself(view: View) -> bool:
    """True if two indices may lead to the same element. Expanded dims are ignored."""
    reach = 0
    for step, n in sorted((step, n) for n, step in zip(view.stored, view.stride) if n > 1):
        if step <= reach:
            return True
        reach += step * (n - 1)
    return False


def place_of(view: View, block: Block) -> tuple[int, tuple[int, ...]]:
    """Return offset and stride of a view in the staged storage, in elements."""
    if not block.closed_up:
        return (view.begin - block.begin) // view.dtype.itemsize, view.stride
    dense = compute_local_stride(view.stride, view.stored)
    return 0, tuple(step if old else 0 for step, old in zip(dense, view.stride))
