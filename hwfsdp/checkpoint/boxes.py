"""Boxes: which part of which tensor; and questions about one tensor: does it have data, which memory and bytes belong to this rank?

A checkpoint holds a tensor in chunks. Each chunk is a box that a saving rank had. A rank that loads the tensor needs another
box. The first part of this module is integers only: do chunks make up the whole tensor, which elements do two boxes share, how is
a large box split? The second part is about tensors: which box of it this rank has (`pieces_of`), and whether values can be read from
it or written to it.

Note [Corners]
    A function that is 1 in a box and 0 elsewhere is a sum of steps, each from one corner of the box on towards higher indices: plus
    for the first corner, minus for its neighbors, and so on in turn. No other sum of steps gives this function. So boxes tile a
    tensor exactly if their corners, counted with these signs, are the corners of the tensor. No two boxes need be compared.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement
from torch.nn.parameter import is_lazy

from hwfsdp.checkpoint.error_messages import KeyPath, refuse
from hwfsdp.compat import is_sharded_tensor, is_traceable_wrapper_subclass, local_of
from hwfsdp.errors import UnsupportedError
from hwfsdp.layout.extents import are_striped, compute_local_shape_and_global_offset, held_extent
from hwfsdp.layout.extents import stripes_of


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


def box_from(json_value: Any) -> Box:
    """Return the box that was sent or written as JSON: [offset, shape]."""
    offset, shape = json_value
    return Box(tuple(offset), tuple(shape))


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


_MOST_CUT = 8  # dims; more than any mesh cuts


def find_fault(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Say in one phrase why the boxes do not cover a tensor of this shape, each element once; None if they do.

    The phrase names a box, an index or a number of elements: "the part [4:6] outside the shape [5]" (`str` of a Box gives the brackets).
    Boxes come in any order. They may be wrong in any way: in size, in place, in the number of dims. An empty box is a fault. There may be
    thousands of boxes, with billions of elements. See Note [Corners].
    """
    for box in boxes:
        if len(box.shape) != len(shape) or len(box.offset) != len(shape):
            return f"a part with {len(box.shape)} dims of a tensor with {len(shape)}"
        if not all(0 <= a and 0 < n and a + n <= size for a, n, size in zip(box.offset, box.shape, shape)):
            return f"the part {box} outside the shape {list(shape)}"
    covered, numel = sum(box.numel for box in boxes), prod(shape)
    if covered != numel:
        return f"{covered} of {numel} elements{', in parts that overlap' if covered > numel else ''}"
    cut = [dim for dim, n in enumerate(shape) if any(box.shape[dim] < n for box in boxes)]
    if len(cut) > _MOST_CUT:
        return f"parts that are cut along {len(cut)} dims"
    corners: Counter[tuple[int, ...]] = Counter()
    for box, count in ((whole(shape), -1), *((box, 1) for box in boxes)) if numel else ():
        for ends in product((0, 1), repeat=len(cut)):
            corner = tuple(box.offset[dim] + end * box.shape[dim] for dim, end in zip(cut, ends))
            corners[corner] += count * (-1) ** sum(ends)
    odd = next((corner for corner, count in corners.items() if count), None)
    return None if odd is None else f"parts that overlap, and a gap, near index {list(odd)} of the dims {cut}"


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


def boxes_between(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, Box]]:
    """Yield boxes that make up the elements from `start` to `stop`, in row-major order, and the number of each box's first element."""
    strides = strides_of(shape)
    while start < stop:
        index = [start // step % n for step, n in zip(strides, shape)]
        # the outermost dim along which whole slices begin here, and fit
        dim = next(
            (d for d, step in enumerate(strides) if start % step == 0 and start + step <= stop), len(shape)
        )
        count = min((stop - start) // strides[dim], shape[dim] - index[dim]) if shape else 1
        size = [*[1] * dim, count, *shape[dim + 1 :]] if shape else []
        yield start, Box(tuple(index), tuple(size))
        start += prod(size)


def halves_of(box: Box, shape: Sequence[int], limit: int) -> Iterator[Box]:
    """Yield the box in pieces whose spans have at most `limit` elements. Each cut halves a piece along its outermost dim."""
    first, last = span_of(box, shape)
    dim = next((d for d, n in enumerate(box.shape) if n > 1), None)
    if last - first <= limit or dim is None:
        yield box
        return
    for half in slices_of(box, 2):
        yield from halves_of(half, shape, limit)


# --- Tensors -----------------------------------------------------------------------------------------------


def part_of(tensor: Tensor) -> Tensor:
    """Return the tensor with this rank's values, detached from autograd."""
    return local_of(tensor).detach()


def local_shape_of(tensor: DTensor) -> tuple[int, ...]:
    """Return the shape that this rank's part has by the placements. Outside the mesh, it is the shape that the part has."""
    if tensor.device_mesh.get_coordinate() is None:
        return tuple(local_of(tensor).shape)
    return compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[0]


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the values as bytes, in row-major order. If the memory has this order already, the result is a view."""
    dense: Tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # a single element may have any stride, and still counts as contiguous
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def packed(tensor: Tensor) -> Tensor:
    """Return the values on the CPU, row-major, without the rest of their storage, which torch.save would write, too."""
    if tensor.layout != torch.strided:
        return tensor.detach().cpu()
    values: Tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return values.clone() if values.untyped_storage().nbytes() > values.nbytes else values


def view_bytes(tensor: Tensor) -> memoryview:
    """Return the values as bytes on the CPU, row-major. If the tensor's memory has this order already, it is a view; else a copy."""
    data = bytes_of(tensor.cpu())
    return data.numpy().data


def end_of(tensor: Tensor) -> int:
    """Return the byte of its storage at which a tensor ends. The tensor has elements."""
    end = int(tensor.storage_offset())
    if tensor.is_contiguous():  # as most are: this is faster
        end += tensor.numel()
    else:
        end += 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride()))
    return end * tensor.element_size()


def is_expanded(tensor: Tensor) -> bool:
    """True if several elements share one place in memory. Such a tensor cannot be written to."""
    has_strides = tensor.layout == torch.strided and not tensor.is_nested
    return has_strides and any(step == 0 and n > 1 for n, step in zip(tensor.shape, tensor.stride()))


def check_data(path: KeyPath, tensor: Tensor) -> None:
    """Raise an error if the values of the tensor are not available, or if it is a ShardedTensor."""
    if is_sharded_tensor(tensor):
        refuse_sharded_tensor(path)
    if is_lazy(tensor):
        _refuse_without_memory(path, "a parameter that is not initialized yet")
    if tensor.is_meta:
        got = f"one on the meta device, of shape {tuple(tensor.shape)}"
        refuse(path, "a tensor with data", got, "Materialize it first: to_empty, then initialize or load.")
    local = local_of(tensor)
    if isinstance(tensor, DTensor) and tuple(local.shape) != local_shape_of(tensor):
        expected = f"the local shape {local_shape_of(tensor)} that {list(tensor.placements)} give this rank"
        remedy = "Cut it with hwfsdp.layout.shard_of, or give from_local the global shape."
        refuse(path, expected, f"{tuple(local.shape)}", remedy)
    wraps: bool = is_traceable_wrapper_subclass(local)  # then the tensor has no memory of its own
    if local.layout == torch.strided and not (wraps or local.is_nested) and local.numel():
        if local.untyped_storage().nbytes() < end_of(local):
            _refuse_without_memory(path, "one whose memory was freed")


def _refuse_without_memory(path: KeyPath, got: str) -> NoReturn:
    remedy = "Take the state dict of the sharded model, or initialize it first."
    refuse(path, "a tensor with memory", got, remedy)


def refuse_sharded_tensor(path: KeyPath) -> NoReturn:
    remedy = "Make it a DTensor, or call gather_state_dict for the whole."
    refuse(path, "a Tensor or DTensor", "a ShardedTensor", remedy, UnsupportedError)


def check_no_sum(path: KeyPath, tensor: Tensor) -> None:
    """Raise an error if the tensor is a DTensor with a `Partial` placement, whose parts are not summed yet."""
    if isinstance(tensor, DTensor) and any(isinstance(p, Partial) for p in tensor.placements):
        remedy, got = "Redistribute Partial to Replicate first.", f"{list(tensor.placements)}"
        refuse(path, "placements that say which values a rank has", got, remedy, UnsupportedError)


def check_kind(path: KeyPath, tensor: Tensor) -> None:
    """Raise `UnsupportedError` if a tensor's values are not plain numbers in memory, or are not summed yet."""
    inner = part_of(tensor)
    wrapper: bool = is_traceable_wrapper_subclass(inner)
    kind = "a quantized tensor" if inner.is_quantized else "a nested tensor" if inner.is_nested else ""
    if inner.layout != torch.strided:
        kind = f"a sparse tensor ({inner.layout})"
    elif wrapper or type(inner).__name__ == "FakeTensor":
        kind = f"a {type(inner).__name__}"
    elif not _can_be_copied(inner.dtype):
        kind = f"one of {inner.dtype}, which torch cannot copy"
    if kind:
        remedy = "Save its parts, or what to_dense() or dequantize() returns."
        refuse(path, "a dense tensor", kind, remedy, UnsupportedError)
    check_no_sum(path, tensor)


def check_writable(path: KeyPath, tensor: Tensor) -> None:
    """Raise an error if values cannot be written into this rank's part of the tensor."""
    local = part_of(tensor)
    if is_expanded(local):
        refuse(path, "memory for every element", "an expanded tensor", "Pass a clone of it.")
    if local.is_inference() and not torch.is_inference_mode_enabled():
        remedy = "Load in inference mode, too, or make it outside."
        refuse(path, "a tensor that can be changed", "one that was made in inference mode", remedy)


@functools.cache
def _can_be_copied(dtype: torch.dtype) -> bool:
    """True if torch can copy this dtype. Some dtypes have a name but no kernels."""
    one = torch.empty(1, dtype=dtype)
    try:
        torch.empty(1, dtype=dtype).copy_(one)
    except (NotImplementedError, RuntimeError):
        return False
    return True


_CAST_AT_ONCE = 1 << 20  # values that are checked at once after a cast


def cast(path: KeyPath, part: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values in another dtype. Raise an error if a value changes by more than rounding."""
    if part.dtype == dtype:
        return part
    cast, eps, tiny = part.to(dtype), 2.0**-52, 0.0
    if dtype.is_floating_point or dtype.is_complex:
        eps, tiny = torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal
    for values, new in zip(part.view(-1).split(_CAST_AT_ONCE), cast.view(-1).split(_CAST_AT_ONCE)):
        before, after = map(_as_pairs, (values, new))
        kept = (after - before).abs() <= before.abs() * eps + tiny
        same = (after == before) | (after.isnan() & before.isnan())
        kept = torch.where(before.isfinite(), kept, same)  # some dtypes have no infinity
        if not bool(kept.all()):
            value = values[int((~kept).any(-1).nonzero()[0])].item()
            remedy = "Load into a tensor of the saved dtype."
            refuse(path, f"values that {dtype} can hold", f"{value}", remedy)
    return cast


def _as_pairs(values: Tensor) -> Tensor:
    """Return numbers of any dtype as float64: [n, 2], real and imaginary part."""
    return torch.view_as_real((values if values.is_complex() else values.double()).to(torch.complex128))


def identity_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return a key. Two tensors with equal keys have the same values in the same memory, at the same place of the whole."""
    part = part_of(tensor)
    place = part.data_ptr(), part.device, tuple(part.shape), part.stride()
    placed: tuple[Any, ...] = ()
    if isinstance(tensor, DTensor):
        placed = tensor.device_mesh, tuple(tensor.placements), tuple(tensor.shape)
    return *place, part.dtype, part.is_conj(), part.is_neg(), *placed


# --- The boxes of a tensor ---------------------------------------------------------------------------------


def pieces_of(tensor: Tensor) -> list[tuple[Box, Box]]:
    """Return the boxes that this rank has: each in the whole tensor, and in this rank's part. Only stripes are more than one.

    Every rank has all of a plain tensor. A rank outside a tensor's mesh has none of it, and padding belongs to no box.
    """
    if not isinstance(tensor, DTensor):
        return pieces_at(tensor.shape, (), (), ())
    coordinate = tensor.device_mesh.get_coordinate()
    mesh_shape, placements = tensor.device_mesh.shape, tensor.placements
    return [] if coordinate is None else pieces_at(tensor.shape, mesh_shape, placements, coordinate)


def values_in(tensor: Tensor, box: Box) -> Tensor:
    """Return the values in a box of the whole tensor, which lies within a box of this rank's part. It is a view."""
    if not box.numel:
        return part_of(tensor).new_empty(box.shape)
    outer, own = next(piece for piece in pieces_of(tensor) if intersection(box, piece[0]))
    return part_of(tensor)[own.slices][within(box, outer).slices]


def pieces_at(
    shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Placement], at: Sequence[int]
) -> list[tuple[Box, Box]]:
    """Return the boxes of the rank at this coordinate of a mesh, as `pieces_of` does. See Note [Stripes] in `layout.extents`."""
    if are_striped(mesh_shape, placements):
        stripes = stripes_of(shape, mesh_shape, placements, at)
        found = [(Box(offset, size), Box(start, size)) for size, offset, start in stripes]
    else:
        size, offset = held_extent(shape, mesh_shape, placements, at)
        found = [(Box(tuple(offset), tuple(size)), whole(size))]
    return [(box, own) for box, own in found if box.numel]
