"""State dicts copied to the CPU while training waits.

An asynchronous save first takes a copy that training can no longer change, *staging*, and then writes that copy while
training goes on. So staging is the part that training pays for. A `StateDictStager` allocates nothing once it has been
used twice, and copies few large pieces instead of many small ones:

    lay out   where each tensor's elements lie in its storage, and which bytes are copied together
    lend      memory for them, of an earlier copy that nobody refers to any more
    copy      one `copy_` for each piece; from CUDA to pinned memory all at once, and then one wait per device

Note [Views stay views]
    Tensors that share memory, such as tied weights or slices of a flat parameter, share it in the copy, too. All
    views of a storage go into one staged storage, with the strides that they have and the distances between them, if
    more than half of the bytes from the first to the last of them are asked for. Otherwise each *run* of views whose
    extents overlap is treated alone, in the same way; and a run with more holes than elements, such as two columns
    of a wide matrix, falls apart into views that touch no common element. What is left over as a single view with holes
    is closed up: its elements lie densely, in the order in which they lay before. Several views with holes that do
    have elements in common are copied together with the holes.

    Conjugated and negated views hold other values than the memory under them. They are resolved, into memory of their
    own.

Note [Lent memory]
    Buffers belong to the source storage that they were made for: to the object, while it lives. An address would be
    that of another storage later, of another size. A weak dict forgets the buffers together with the source.

    A buffer is lent again when nothing but the pool refers to its storage. The staged dict itself says nothing about
    that, because a view, or an array made of one tensor, survives it. Of the free buffers that a call finds, it
    keeps what it needs and as much again, for a save that is still being written; the rest is released.

Note [A memo that answers tensors]
    A deep copy keeps a memo of what it has copied, by id, and looks there first. So the copies of the tensors are made
    before, all together, and put into the memo; `copy.deepcopy` then builds everything else around them: containers and
    objects of any class, that share things, or hold themselves. Which tensors it will meet, `_parts_of` tells: it goes
    from an object to what `copy.deepcopy` would copy of it, and copies nothing.

    An object may make a new tensor when it is asked for its state, or copy one without passing the memo on: its id is
    not in the memo. If it is a view that was staged, `_KnownViews` answers. What an object copied by itself, with
    `clone` for example, is found in the copy, and moved into staged memory then.

Left out: references that Python and torch do not count. Another process that mapped a staged tensor, and a copy from
one to a device that is still under way, see the next staging if the dict was dropped before they were done. What is
moved afterwards has new memory each time, and shares it with nothing that was found before.
"""

from __future__ import annotations

import copy
import copyreg
import threading
import types
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from hwfsdp.checkpoint.state_dict import check_data, create_cpu_state_dict
from hwfsdp.checkpoint.traverse import Attribute, Path, show
from hwfsdp.compat import (
    IS_PARAMETER,
    is_referred_to_elsewhere,
    is_sharded_tensor,
    local_of,
    quantized_over,
    replace_local,
    storage_key,
    wrap_like,
)
from hwfsdp.errors import FSDPError, UnsupportedError, UsageError
from hwfsdp.layout.extents import compute_local_stride

T = TypeVar("T")
Storage = torch.UntypedStorage
# what a deep copy returns as it is
ATOMIC: tuple[type, ...] = (int, float, bool, complex, bytes, str, range, property, type(None), type(...))
ATOMIC += (type(NotImplemented), types.FunctionType, types.BuiltinFunctionType, types.CodeType, ref)


class StateDictStager:
    """Copies state dicts to the CPU, over and over, into memory that it reuses (Note [Lent memory]).

    Calls from several threads wait for each other.

    Args:
        pin_memory: into page-locked memory, to which copies from CUDA devices are asynchronous. Without a CUDA device
            there is a warning, and ordinary memory.
        share_memory: into memory that other processes can map. Each staged storage takes a file descriptor. Keep
            the staged dict until they are done: they are not seen to refer to it.
    """

    def __init__(self, pin_memory: bool = False, share_memory: bool = False) -> None:
        if pin_memory and not torch.cuda.is_available():
            warnings.warn(
                "StateDictStager(pin_memory=True): expected a CUDA device; got none. The memory is not pinned.",
                stacklevel=2,
            )
            pin_memory = False
        self._pin, self._share = pin_memory, share_memory
        self._pools: WeakKeyDictionary[Storage, list[Storage]] = WeakKeyDictionary()  # by source
        self._lock = threading.RLock()

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that is kept, lent or not, for sources that live."""
        return sum(buffer.nbytes() for pool in list(self._pools.values()) for buffer in pool)

    def close(self) -> None:
        """Lets go of all memory; what is lent lives on with those who use it. The next `stage` starts afresh."""
        with self._lock:
            self._pools.clear()

    @torch.no_grad()
    def stage(self, state_dict: T) -> T:
        """A copy on the CPU that nothing done to `state_dict` later changes; it is complete on return.

        Everything is a deep copy: containers and objects of any class, which may share things and contain themselves.
        Tensors, wherever they are, keep shape, dtype and values, their class and their attributes; DTensors keep mesh and
        placements, quantized tensors scales and zero points. Gradients and their history are left behind, and an
        `nn.Parameter` becomes a plain tensor. Strides are the same, except where Note [Views stay views] says otherwise.

        Raises:
            UsageError: an object that cannot be copied, a tensor without data (on the meta device, freed, or not
                initialized), or a DTensor whose local shape is not what its placements say.
            UnsupportedError: a tensor that is sparse, nested, a ShardedTensor, of quantized elements smaller than a byte,
                or of a subclass that has no memory of its own.
        """
        with self._lock:
            tensors = _checked_tensors_of(state_dict)
            staged, copies = self._lay_out({id(tensor): _memory_of(tensor) for tensor in tensors})
            _run(copies, self._pin)
            result: T = _rebuilt(state_dict, tensors, staged)
            self._move_others(result, tensors, staged)
        return result

    def _move_others(self, result: Any, tensors: list[Tensor], staged: dict[int, Tensor]) -> None:
        """Moves tensors of the result that objects copied by themselves (Note [A memo that answers tensors])."""
        known = {storage_key(tensor) for tensor in staged.values()}
        found = []
        for path, value, _ in _objects_in(result):
            if isinstance(value, Tensor) and _storage_of(value) not in known:
                _check(path, value)
                found.append((path, value))
        sources = {_storage_of(tensor) for tensor in tensors}
        for path, tensor in found:
            if tensor.numel() and _storage_of(tensor) in sources:
                remedy = "Let its __deepcopy__ call copy.deepcopy(tensor, memo)."
                _refuse(
                    UsageError, path, "an object whose copy shares no tensor with it", "one that does", remedy
                )
            _check(path, tensor)
        moved, copies = self._lay_out({id(tensor): _memory_of(tensor) for _, tensor in found})
        _run(copies, self._pin)
        for _, tensor in found:
            part = moved[id(tensor)]
            if isinstance(tensor, DTensor):
                replace_local(tensor, part)
            else:
                tensor.data = quantized_over(part, tensor) if tensor.is_quantized else part

    def _lay_out(self, tensors: dict[int, Tensor]) -> tuple[dict[int, Tensor], list[_Copy]]:
        """Memory for the copies, lent, and what is to be copied there; `stage` makes the copies when all of it is known.

        What shares memory shares it in the copy, too: tied weights, slices of one buffer, a tensor and its transpose.

        Args:
            tensors: by id, the tensors of the state dict (of DTensors the local parts), with memory on any device. One
                tensor comes once, but several may have one storage, or be equal views of it.

        Returns:
            By the same ids, tensors on the CPU of the same shape, dtype and place among the others, in lent memory that holds
            nothing yet; and the copies to make, one for each block.

        What there is to do:
            A tensor without elements gets `_over(self._allocate(0), dtype, 0, shape, stride)`.
            The others are sorted by `untyped_storage()`, which can be a key of a dict, and within one by `_view_of(tensor)`,
            which can be one, too. Of all distinct views of a storage, `_blocks(views)` makes blocks: what is staged
            together. `self._lend(storage, sizes)` gives all buffers of a storage at once, one of `block.nbytes` for each.
            A block is copied by `_copy_of(block, buffer, storage, tensor)`, of which `tensor` is one that has the view
            `block.views[0]`. `_place_of(view, block)` says where a view lies in the buffer, as offset and stride; every tensor
            that has this view gets one there: `_over(buffer, view.dtype, offset, view.shape, stride)`.
        """
        staged: dict[int, Tensor] = {}
        copies: list[_Copy] = []
        sources: defaultdict[Storage, dict[_View, list[int]]] = defaultdict(dict)
        for key, tensor in tensors.items():
            if tensor.numel():
                sources[tensor.untyped_storage()].setdefault(_view_of(tensor), []).append(key)
            else:
                staged[key] = _over(self._allocate(0), tensor.dtype, 0, tensor.shape, tensor.stride())

        for source, views in sources.items():
            blocks = _blocks(list(views))
            for block, buffer in zip(blocks, self._lend(source, [block.nbytes for block in blocks])):
                copies.append(_copy_of(block, buffer, source, tensors[views[block.views[0]][0]]))
                for view in block.views:
                    offset, stride = _place_of(view, block)
                    for key in views[view]:
                        staged[key] = _over(buffer, view.dtype, offset, view.shape, stride)
        return staged, copies

    def _lend(self, source: Storage, sizes: list[int]) -> list[Storage]:
        """A buffer of each of these sizes that nobody refers to: one that is free, or a new one (Note [Lent memory]).

        Args:
            source: the storage that is staged. `self._pools[source]` is the list of all buffers ever made for it and not
                yet released, lent or not; it may not be there yet.
            sizes: bytes of each buffer; two may be equal.

        Returns:
            As many buffers as sizes, in their order, no two the same. `is_referred_to_elsewhere(pool, index)` is False for
            one in the pool that is free, True if anything else than the pool refers to it, directly or through a tensor, a
            view, an array (a name in this function does so, too), and None if this torch cannot tell: then it is not to
            be lent. A free one of the right size is lent before one is made; `self._add(pool, size)` makes one and keeps it in
            the pool.

        Of the buffers that were free when the call began, the pool keeps those that it now lends, and of each size as many
        more as `sizes` asks for: as many as will be wanted again while these are being written. The rest is released.
        """
        pool = self._pools.setdefault(source, [])
        free: defaultdict[int, list[int]] = defaultdict(list)
        for index in range(len(pool)):
            if is_referred_to_elsewhere(pool, index) is False:
                free[pool[index].nbytes()].append(index)
        lent = [pool[free[size].pop()] if free[size] else None for size in sizes]

        spares = Counter(sizes)
        for index in sorted((i for size in free for i in free[size][spares[size] :]), reverse=True):
            del pool[index]
        return [self._add(pool, size) if buffer is None else buffer for size, buffer in zip(sizes, lent)]

    def _add(self, pool: list[Storage], size: int) -> Storage:
        pool.append(self._allocate(size))
        # where references cannot be counted, it would never be lent again
        return pool.pop() if is_referred_to_elsewhere(pool, -1) is None else pool[-1]

    def _allocate(self, size: int) -> Storage:
        like = {"buffer": torch.empty(size, dtype=torch.uint8, device="meta")}
        buffer: Tensor = create_cpu_state_dict(like, self._pin, self._share)["buffer"]
        return buffer.untyped_storage()


# --- Find and check ----------------------------------------------------------------------------------------


class _Found(NamedTuple):
    """An object in a state dict, and one of the paths to it; uncertain if a `__deepcopy__` decides whether it is copied."""

    path: Path
    value: Any
    certain: bool = True


def _checked_tensors_of(state_dict: Any) -> list[Tensor]:
    """All tensors of the state dict, each once, in the order in which they are met."""
    tensors = []
    for path, value, certain in _objects_in(state_dict):
        if isinstance(value, Tensor):
            try:
                _check(path, value)
                tensors.append(value)
            except FSDPError:  # of an uncertain one, the copy tells
                if certain:
                    raise
    return tensors


def _objects_in(tree: Any) -> Iterator[_Found]:
    """All objects that a deep copy of `tree` would copy, each once, an object before its parts."""
    seen: dict[int, Any] = {}  # holds what it knows by id, so ids stay valid
    todo = [_Found((), tree)]
    while todo:
        path, value, certain = found = todo.pop()
        if type(value) in ATOMIC or id(value) in seen:
            continue
        seen[id(value)] = value
        yield found
        try:
            parts = _parts_of(value)
        except Exception as error:
            if certain:
                raise _not_copied(path, value, error) from error
            continue
        certain = certain and (isinstance(value, Tensor) or getattr(value, "__deepcopy__", None) is None)
        inner = [_Found((*path, *steps), part, certain) for steps, part in parts if type(part) not in ATOMIC]
        todo += reversed(inner)


Parts = list[tuple[Path, Any]]


def _parts_of(value: Any) -> Parts:
    """What `copy.deepcopy` copies when it copies the value, with the steps that lead there."""
    if isinstance(value, type):
        return []
    if isinstance(value, Tensor):
        return _attributes_of(value)
    if isinstance(value, tuple) or type(value) in (dict, list, set, frozenset):
        return _items_of(value) + _attributes_of(value)
    if getattr(value, "__deepcopy__", None) is not None:  # does what it likes, with these probably
        return _items_of(value) + _attributes_of(value)
    reduce = copyreg.dispatch_table.get(type(value))
    reduced = reduce(value) if reduce is not None else value.__reduce_ex__(4)
    if isinstance(reduced, str):  # a global object
        return []
    _, args, state, items, pairs = (*reduced, None, None, None)[:5]
    states = state if isinstance(state, tuple) and len(state) == 2 else (state,)
    parts: Parts = [((), arg) for arg in args]
    for each in states:
        named = isinstance(each, dict)
        parts += [((Attribute(key),), part) for key, part in each.items()] if named else [((), each)]
    return parts + _items_of(list(items or ())) + _items_of(dict(pairs or ()))


def _items_of(value: Any) -> Parts:
    if isinstance(value, Mapping):
        return [((key,), part) for item in value.items() for key, part in zip(item[:1] * 2, item)]
    if isinstance(value, np.ndarray):
        return _items_of(value.ravel().tolist()) if value.dtype.hasobject else []
    if isinstance(value, list | tuple | set | frozenset):
        return [((index,), item) for index, item in enumerate(value)]
    return []


def _attributes_of(value: Any) -> Parts:
    """What is in the object's `__dict__`, and in the slots that are no part of what torch made of it."""
    classes = [kind for kind in type(value).__mro__ if kind is not DTensor]
    members = [(name, member) for kind in classes for name, member in vars(kind).items()]
    slots = [name for name, member in members if isinstance(member, types.MemberDescriptorType)]
    found = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    found |= {name: part for name, part in getattr(value, "__dict__", {}).items() if name != IS_PARAMETER}
    return [((Attribute(name),), part) for name, part in found.items()]


def _memory_of(tensor: Tensor) -> Tensor:
    """What has to be copied for it: of a DTensor the local part, of a quantized tensor its integers."""
    if isinstance(tensor, DTensor):
        return local_of(tensor)
    if tensor.is_quantized:
        offset, stride = int(tensor.storage_offset()), tensor.stride()
        return _over(tensor.untyped_storage(), _INTEGERS[tensor.dtype], offset, tensor.shape, stride)
    return tensor


def _storage_of(tensor: Tensor) -> int | None:
    """Which storage its memory is in; None if it has no memory of its own."""
    dense = tensor.layout == torch.strided and not tensor.is_nested
    return storage_key(_memory_of(tensor)) if dense else None


_INTEGERS = {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32}


def _check(path: Path, tensor: Tensor) -> None:
    if is_lazy(tensor):
        _refuse(UsageError, path, "a tensor with data", "an uninitialized one", "Run a forward pass first.")
    if is_sharded_tensor(tensor):
        _refuse(UnsupportedError, path, "a Tensor or DTensor", "a ShardedTensor", "Make it a DTensor.")
    if tensor.is_quantized and tensor.dtype not in _INTEGERS:
        remedy = "Store dequantize() instead."
        _refuse(UnsupportedError, path, "elements of whole bytes", str(tensor.dtype), remedy)
    check_data(path, tensor)
    _check_memory(path, local_of(tensor) if isinstance(tensor, DTensor) else tensor)
    if isinstance(tensor, DTensor) and local_of(tensor).is_quantized:
        _refuse(
            UnsupportedError,
            path,
            "local parts that are not quantized",
            str(tensor.dtype),
            "Call dequantize().",
        )


def _check_memory(path: Path, tensor: Tensor) -> None:
    if tensor.layout != torch.strided or tensor.is_nested:
        kind = "a nested tensor" if tensor.is_nested else str(tensor.layout)
        _refuse(
            UnsupportedError, path, "a dense tensor", kind, "Store to_dense(), or its values and indices."
        )
    if not _has_memory(tensor):
        remedy = "Store the tensors that it is made of instead."
        _refuse(UnsupportedError, path, "a tensor with memory of its own", type(tensor).__name__, remedy)


def _refuse(kind: Any, path: Path, expected: str, got: str, remedy: str) -> None:
    raise kind(show(path), expected=expected, got=got, remedy=remedy)


def _has_memory(tensor: Tensor) -> bool:
    """Whether it has a storage that holds its elements; subclasses may have one for show."""
    try:
        storage = tensor.untyped_storage()
        return storage.device == tensor.device and (storage.data_ptr() != 0 or storage.nbytes() == 0)
    except RuntimeError:
        return False


# --- Lay out -----------------------------------------------------------------------------------------------


class _View(NamedTuple):
    """Where a tensor's elements lie in its storage; tensors with equal views are the same in the copy."""

    begin: int  # byte of the first element
    end: int  # byte after the last one
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # elements
    dtype: torch.dtype
    lazy: tuple[bool, bool]  # conjugated, negated when read

    @property
    def stored(self) -> tuple[int, ...]:
        """Its shape without repetition: expanded dims have size 1."""
        if 0 not in self.stride:
            return self.shape
        return tuple(n if step else 1 for n, step in zip(self.shape, self.stride))

    @property
    def nbytes(self) -> int:
        """Of its elements, without repetition."""
        return prod(self.stored) * self.dtype.itemsize


class _Block(NamedTuple):
    """What goes into one staged storage: `nbytes` from byte `begin` on, or the elements of one view closed up."""

    views: list[_View]
    begin: int
    nbytes: int
    closed_up: bool


def _view_of(tensor: Tensor) -> _View:
    shape, stride, size = tensor.shape, tensor.stride(), tensor.element_size()
    begin = int(tensor.storage_offset())
    end = begin + 1 + sum((n - 1) * step for n, step in zip(shape, stride))
    return _View(begin * size, end * size, shape, stride, tensor.dtype, (tensor.is_conj(), tensor.is_neg()))


def _blocks(views: list[_View]) -> list[_Block]:
    """Which views of one storage are staged together (Note [Views stay views])."""
    blocks = [_close_up(view) for view in views if any(view.lazy)]
    plain = sorted((view for view in views if not any(view.lazy)), key=lambda view: view[:2])
    if len(plain) < 2:
        return [*blocks, *(_block([view]) for view in plain)]
    runs: list[list[_View]] = []
    end = -1
    for view in plain:
        if view.begin >= end:
            runs.append([])
        runs[-1].append(view)
        end = max(end, view.end)
    if 2 * sum(map(_wanted, runs)) > _span(plain):
        return [*blocks, _block(plain)]
    return [*blocks, *(block for run in runs for block in _split(run))]


def _span(views: Iterable[_View]) -> int:
    """Bytes from the first to the last."""
    return max(view.end for view in views) - min(view.begin for view in views)


def _wanted(views: list[_View]) -> int:
    """At most so many of these bytes belong to elements."""
    return min(_span(views), sum(view.nbytes for view in views))


def _split(run: list[_View]) -> list[_Block]:
    """The run, or if most of it is holes, groups that have no element in common."""
    if len(run) == 1 or 2 * _wanted(run) > _span(run):
        return [_block(run)]
    groups: list[list[_View]] = []
    for view in run:
        touched = [group for group in groups if any(_may_share(view, other) for other in group)]
        groups = [group for group in groups if group not in touched]
        groups.append([*(other for group in touched for other in group), view])
    blocks = [_block(group) for group in groups]
    return blocks if sum(block.nbytes for block in blocks) < _span(run) else [_block(run)]


def _may_share(a: _View, b: _View) -> bool:
    """Whether two views may have an element in common; they do not if some pitch keeps them in separate columns."""
    if a.end <= b.begin or b.end <= a.begin:
        return False
    pitches = {
        step * v.dtype.itemsize for v in (a, b) for n, step in zip(v.shape, v.stride) if n > 1 and step
    }
    return not any(
        (b.begin - a.begin) % pitch >= _width(a, pitch) and (a.begin - b.begin) % pitch >= _width(b, pitch)
        for pitch in pitches
    )


def _width(view: _View, pitch: int) -> int:
    """Bytes from the view's first to its last element in a row, if rows begin every `pitch` bytes."""
    steps = [(n, step * view.dtype.itemsize) for n, step in zip(view.stored, view.stride)]
    return view.dtype.itemsize + sum((n - 1) * step for n, step in steps if step % pitch)


def _block(views: list[_View]) -> _Block:
    begin, end = min(view.begin for view in views), max(view.end for view in views)
    if len(views) == 1 and views[0].nbytes < end - begin and not _overlaps_itself(views[0]):
        return _close_up(views[0])
    # Offsets are counted in elements, so the largest of them has to fit between the beginning and each view.
    begin -= begin % max(view.dtype.itemsize for view in views)
    return _Block(views, begin, end - begin, closed_up=False)


def _close_up(view: _View) -> _Block:
    return _Block([view], view.begin, view.nbytes, closed_up=True)


def _overlaps_itself(view: _View) -> bool:
    """Whether two indices may lead to the same element, expanded dims aside."""
    reach = 0
    for step, n in sorted((step, n) for n, step in zip(view.stored, view.stride) if n > 1):
        if step <= reach:
            return True
        reach += step * (n - 1)
    return False


def _place_of(view: _View, block: _Block) -> tuple[int, tuple[int, ...]]:
    """Offset and stride, in elements, in the staged storage."""
    if not block.closed_up:
        return (view.begin - block.begin) // view.dtype.itemsize, view.stride
    dense = compute_local_stride(view.stride, view.stored)
    return 0, tuple(step if old else 0 for step, old in zip(dense, view.stride))


def _over(
    storage: Storage, dtype: torch.dtype, offset: int, shape: Sequence[int], stride: Sequence[int]
) -> Tensor:
    """A tensor over memory that is there."""
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, stride)


# --- Copy --------------------------------------------------------------------------------------------------


class _Copy(NamedTuple):
    """One `copy_` to be made."""

    target: Tensor
    source: Tensor
    waits: bool  # must not be asynchronous: lazy ones are resolved on the CPU, after they have arrived


def _copy_of(block: _Block, buffer: Storage, source: Storage, tensor: Tensor) -> _Copy:
    """Copies the block into the buffer. `tensor` has the block's first view of the source."""
    if not block.closed_up:
        shape, step = [block.nbytes], [1]
        target = _over(buffer, torch.uint8, 0, shape, step)
        return _Copy(target, _over(source, torch.uint8, block.begin, shape, step), waits=False)
    view = block.views[0]
    _, stride = _place_of(view, block)
    # In the order of the target's memory: copies from a device would otherwise go through a temporary on the CPU.
    order = sorted(range(len(stride)), key=lambda dim: -stride[dim])
    shape, step = [view.stored[dim] for dim in order], [stride[dim] for dim in order]
    elements = tensor[tuple(slice(n) for n in view.stored)].permute(order)
    return _Copy(_over(buffer, view.dtype, 0, shape, step), elements, waits=any(view.lazy))


def _run(copies: list[_Copy], pinned: bool) -> None:
    """Makes the copies, those from CUDA to pinned memory asynchronously, and waits for them."""
    devices = set()
    try:
        for target, source, waits in copies:
            starts_only = pinned and source.is_cuda and not waits
            if starts_only:
                devices.add(source.device)
            target.copy_(source, non_blocking=starts_only)
    finally:
        for device in devices:
            torch.cuda.current_stream(device).synchronize()


# --- Rebuild -----------------------------------------------------------------------------------------------


def _rebuilt(state_dict: Any, tensors: list[Tensor], staged: dict[int, Tensor]) -> Any:
    """The state dict again: a deep copy, with the staged tensors in it (Note [A memo that answers tensors]).

    Args:
        state_dict: any object. tensors: all tensors in it, each once, also those inside of objects. staged: by `id` of a
            tensor, the staged tensor; of a DTensor that of the local part.

    Returns:
        What `_copied(state_dict, tensors, memo)` returns. `memo` is as of `copy.deepcopy`: a dict from the `id` of an object
        to its copy. Deep copying looks there before it copies an object, and adds what it has copied, so that one object
        at two places stays one. All tensors have to be there from the beginning: the copy of a tensor is what
        `_dressed(staged part, tensor)` returns, which makes a DTensor of the part of a DTensor, for example.

    Raises:
        UsageError: something that cannot be copied.
    """
    memo: dict[int, Any] = {id(tensor): _dressed(staged[id(tensor)], tensor) for tensor in tensors}
    return _copied(state_dict, tensors, memo)


def _dressed(part: Tensor, like: Tensor) -> Tensor:
    """The staged part as a tensor of the same kind."""
    if isinstance(like, DTensor):
        return wrap_like(part, like)
    if like.is_quantized:
        return quantized_over(part, like)
    return part if type(like) in (Tensor, nn.Parameter) else part.as_subclass(type(like))


def _copied(value: Any, tensors: list[Tensor], memo: dict[int, Any]) -> Any:
    """A deep copy. `memo`, as of `copy.deepcopy`, has the copies of these tensors; they get copies of attributes here."""
    try:
        with _KnownViews(tensors, memo):
            result = copy.deepcopy(value, memo)
            for tensor in tensors:
                for path, attribute in _attributes_of(tensor):
                    setattr(memo[id(tensor)], path[-1], copy.deepcopy(attribute, memo))
    except Exception as error:
        raise _culprit(value, memo, error) from error
    return result


class _KnownViews(TorchFunctionMode):
    """Within it, the deep copy of a tensor that the memo does not know is a staged tensor, if it is an equal view."""

    def __init__(self, tensors: list[Tensor], memo: dict[int, Any]) -> None:
        super().__init__()
        self.staged = {self.key_of(tensor): memo[id(tensor)] for tensor in tensors}

    def key_of(self, tensor: Tensor) -> Any:
        storage = _storage_of(tensor)
        return (
            None if storage is None else (isinstance(tensor, DTensor), storage, _view_of(_memory_of(tensor)))
        )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            staged = self.staged.get(self.key_of(args[0]))
            if staged is not None:
                return staged
        return func(*args, **(kwargs or {}))


def _culprit(tree: Any, memo: dict[int, Any], error: Exception) -> UsageError:
    """The error that names the innermost object in `tree` that cannot be copied."""
    path: Path = ()
    found, tensors = tree, {key: value for key, value in memo.items() if isinstance(value, Tensor)}
    for steps, value, _ in _objects_in(tree):
        try:
            copy.deepcopy(value, dict(tensors))
        except Exception as inner:
            path, found, error = steps, value, inner
    return _not_copied(path, found, error)


def _not_copied(path: Path, value: Any, error: Exception) -> UsageError:
    got = f"{type(value).__name__} ({' '.join(str(error).split())})"
    remedy = "Take it out, or store what it is made of instead."
    return UsageError(show(path), expected="what can be copied", got=got, remedy=remedy)
