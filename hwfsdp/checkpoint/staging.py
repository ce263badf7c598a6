"""State dicts copied to the CPU while training waits.

An asynchronous save first makes a copy that training can no longer change. This is *staging*. Then it writes the copy while
training goes on. So training waits only for the staging. From its third use on, a `StateDictStager` allocates nothing, and it
copies a few large pieces instead of many small ones:

    lay out   find where each tensor's elements lie in its storage, and which bytes are copied together
    lend      find memory for them: the buffers of an earlier copy that nothing refers to any more
    copy      call `copy_` once for each piece; from CUDA to pinned memory all at once, with one wait per device at the end

Note [Lent memory]
    Buffers belong to the source storage for which they were made: to the object, as long as it lives. An address cannot replace
    the object, because later another storage of another size may have the same address. A weak dict forgets the buffers together
    with the source.

    A buffer is lent again when nothing except the pool refers to its storage. It is not enough that the staged dict is gone: a
    view, or an array made of one tensor, may still exist. A call keeps the free buffers that it needs, and
    as many again for a save that is still being written. It releases the rest.

Note [Views stay views]
    Tensors that share memory, such as tied weights or slices of a flat parameter, share it in the copy, too. Views of one storage whose
    extents overlap, or are close to each other, are a *run*. A run goes into one staged storage, with the strides of its views and the
    distances between them, and with the bytes between them. So views of a flat parameter are one copy, and what lies before, behind and
    far between them is not copied. If a run is a single view with holes, such as a column of a matrix, it is closed up: its elements
    lie densely, in the same order as before.

    Conjugated and negated views have other values than the memory under them. They are resolved into their own memory.

Note [A memo that answers tensors]
    A deep copy keeps a memo of everything that it has copied, by id, and looks there first. So we first copy all tensors
    together and put the copies into the memo. Then `copy.deepcopy` builds everything else around them: containers and
    objects of any class, which may share things and contain themselves. `objects_in` finds the tensors beforehand: it goes from
    an object to everything that `copy.deepcopy` would copy of it, and copies nothing.

    An object may make a new tensor when it returns its state, or copy a tensor without passing the memo on. The id of such a
    tensor is not in the memo. If it is a view that was staged, `_KnownViews` finds the copy. A tensor that an object copies by itself,
    for example with `clone`, is where the object puts it.

Left out: references that Python and torch do not count. Another process may have mapped a staged tensor, or a copy from it to a
device may still be under way. If the staged dict was dropped before this was done, the process or the copy sees the values of the
next staging. The traceback of a failed save refers to its copy, so its buffers are not lent again as long as someone keeps the error or the handle.
"""

from __future__ import annotations

import copy
import threading
import warnings
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cached_property
from math import prod
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from hwfsdp.checkpoint.boxes import check_data, end_of
from hwfsdp.checkpoint.error_messages import KeyPath, refuse
from hwfsdp.checkpoint.state_dict import cpu_room
from hwfsdp.checkpoint.traverse import attributes_of, culprit, objects_in
from hwfsdp.compat import is_referred_to_elsewhere, is_sharded_tensor, local_of, quantized_over, storage_key
from hwfsdp.compat import wrap_like
from hwfsdp.errors import FSDPError, UnsupportedError
from hwfsdp.layout.extents import compute_local_stride

T = TypeVar("T")
Storage = torch.UntypedStorage


class StateDictStager:
    """Copies state dicts to the CPU, over and over, into memory that it reuses (Note [Lent memory]).

    Calls from several threads wait for each other.

    Args:
        pin_memory: into page-locked memory, to which copies from CUDA devices are asynchronous. Without a CUDA device
            there is a warning, and ordinary memory.
        share_memory: into memory that other processes can map. Each staged storage takes a file descriptor. Keep
            the staged dict until these processes are done: the stager cannot see that they use its memory.
        pin_memory_min_bytes: buffers of fewer bytes are not pinned, because pinning would take longer than it saves.
    """

    def __init__(
        self, pin_memory: bool = False, share_memory: bool = False, pin_memory_min_bytes: int = 5
    ) -> None:
        if pin_memory and not torch.cuda.is_available():
            warnings.warn(
                "StateDictStager(pin_memory=True): expected a CUDA device; got none. The memory is not pinned.",
                stacklevel=2,
            )
            pin_memory = False
        self.pin_memory, self.share_memory = pin_memory, share_memory
        self.pin_memory_min_bytes = pin_memory_min_bytes
        self._pools: WeakKeyDictionary[Storage, list[Storage]] = WeakKeyDictionary()  # by source
        self._lock = threading.RLock()

    @property
    def nbytes(self) -> int:
        """The bytes of all buffers, lent or not, whose sources are alive."""
        return sum(buffer.nbytes() for pool in list(self._pools.values()) for buffer in pool)

    def close(self) -> None:
        """Release all memory. Lent memory lives as long as it is used. The next `stage` allocates again."""
        with self._lock:
            self._pools.clear()

    @torch.no_grad()
    def stage(self, state_dict: T, non_blocking: bool = False) -> T:
        """Return a copy on the CPU. Later changes to `state_dict` do not change the copy. It is complete on return.

        Everything is a deep copy: containers and objects of any class, which may share things and contain themselves.
        Tensors in any place keep shape, dtype and values, their class and their attributes. DTensors keep mesh and placements, and
        quantized tensors keep scales and zero points. Gradients and their history are not copied, and an `nn.Parameter` becomes a plain
        tensor. Strides are the same, with the exceptions in Note [Views stay views]. A storage in the state dict stays the storage
        of its tensors.

        Args:
            non_blocking: do not wait for copies from CUDA devices to pinned memory. The copy is complete when the present stream of
                each device has done them.

        Raises:
            UsageError: an object cannot be copied, a tensor has no data (it is on the meta device, freed, or not initialized), or a
                DTensor's local shape differs from the shape that its placements give.
            UnsupportedError: a tensor is sparse, nested, a ShardedTensor, has quantized elements smaller than a byte, or is of a
                subclass that has no memory of its own.
        """
        with self._lock:
            tensors = _checked_tensors_of(state_dict)
            staged, copies = self._lay_out({id(tensor): _memory_of(tensor) for tensor in tensors})
            _run(copies, self.pin_memory, wait=not non_blocking)
            result: T = _copied(state_dict, tensors, staged)
        return result

    def _lay_out(self, tensors: dict[int, Tensor]) -> tuple[dict[int, Tensor], list[_Copy]]:
        """Lend memory for copies of these tensors, and list the copies to make, one for each block. `stage` makes them later.

        Args:
            tensors: by id; some share a storage, some are equal views of it, some have no elements.

        Returns:
            By the same ids, CPU tensors without values yet, which share memory as the given ones do; and the copies.
        """
        staged: dict[int, Tensor] = {}
        copies: list[_Copy] = []
        sources: defaultdict[Storage, dict[View, list[int]]] = defaultdict(dict)
        for key, tensor in tensors.items():
            if tensor.numel():
                sources[tensor.untyped_storage()].setdefault(view_of(tensor), []).append(key)
            else:
                staged[key] = _over(self._new([], 0), tensor.dtype, 0, tensor.shape, tensor.stride())

        for source, views in sources.items():
            blocks = blocks_of(list(views))
            for block, buffer in zip(blocks, self._lend(source, [block.nbytes for block in blocks])):
                copies.append(_copy_of(block, buffer, source, tensors[views[block.views[0]][0]]))
                for view in block.views:
                    offset, stride = staged_place(view, block)
                    for key in views[view]:
                        staged[key] = _over(buffer, view.dtype, offset, view.shape, stride)
        return staged, copies

    def _lend(self, source: Storage, sizes: list[int]) -> list[Storage]:
        """Lend an unused buffer of `source` for each of these sizes (bytes), all different. A free one is better than a new one.

        A buffer is free if only its pool refers to it; if torch cannot tell, it is not. Of the free buffers that are left, keep for each
        size as many as `sizes` has: the next copy needs them while these are written. Release the others.
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
        return [self._new(pool, size) if buffer is None else buffer for size, buffer in zip(sizes, lent)]

    def _new(self, pool: list[Storage], size: int) -> Storage:
        """Make a buffer of `size` bytes, and keep it in the pool."""
        pin = self.pin_memory and size >= self.pin_memory_min_bytes
        pool.append(cpu_room((size,), torch.uint8, pin, self.share_memory).untyped_storage())
        # If references cannot be counted, the pool never lends this buffer again, so it need not keep it.
        return pool.pop() if is_referred_to_elsewhere(pool, -1) is None else pool[-1]


# --- Find and check ----------------------------------------------------------------------------------------


def _checked_tensors_of(state_dict: Any) -> list[Tensor]:
    """Return all tensors of the state dict, each once, in the order in which they are found. `_Bytes` stand for its storages."""
    tensors: list[Tensor] = []
    for path, value, certain in objects_in(state_dict):
        if isinstance(value, Storage) and value.device.type != "meta" and value.nbytes():
            tensors.append(_over(value, torch.uint8, 0, [value.nbytes()], [1]).as_subclass(_Bytes))
        elif isinstance(value, Tensor):
            try:
                _check(path, value)
                tensors.append(value)
            except FSDPError:  # an uncertain tensor may not be copied at all; the copy shows it
                if certain:
                    raise
    return tensors


class _Bytes(Tensor):
    """All bytes of a storage that is in the state dict by itself, and not only as the memory of tensors."""


def _memory_of(tensor: Tensor) -> Tensor:
    """Return the tensor whose memory is copied: the local part of a DTensor, the integers of a quantized tensor, or the tensor itself."""
    if tensor.is_quantized and not isinstance(tensor, DTensor):
        offset, stride = int(tensor.storage_offset()), tensor.stride()
        return _over(tensor.untyped_storage(), _INTEGERS[tensor.dtype], offset, tensor.shape, stride)
    return local_of(tensor)


def _storage_of(tensor: Tensor) -> int | None:
    """Return the key of the storage that holds the tensor's memory; None if the tensor has no memory of its own."""
    dense = tensor.layout == torch.strided and not tensor.is_nested
    return storage_key(_memory_of(tensor)) if dense else None


_INTEGERS = {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32}


def _check(path: KeyPath, tensor: Tensor) -> None:
    if not is_sharded_tensor(tensor) and tensor.is_quantized and tensor.dtype not in _INTEGERS:
        remedy = "Store dequantize() instead."
        refuse(path, "elements of whole bytes", str(tensor.dtype), remedy, UnsupportedError)
    check_data(path, tensor)
    local = local_of(tensor)
    if local.layout != torch.strided or local.is_nested:
        kind = "a nested tensor" if local.is_nested else str(local.layout)
        refuse(path, "a dense tensor", kind, "Store to_dense(), or its values and indices.", UnsupportedError)
    if not _has_memory(local):
        remedy = "Store the tensors that it is made of instead."
        refuse(path, "a tensor with memory of its own", type(local).__name__, remedy, UnsupportedError)
    if isinstance(tensor, DTensor) and local.is_quantized:
        expected, remedy = "local parts that are not quantized", "Call dequantize()."
        refuse(path, expected, str(tensor.dtype), remedy, UnsupportedError)


def _has_memory(tensor: Tensor) -> bool:
    """True if the tensor has a storage that holds its elements. The storage of some subclasses holds nothing."""
    try:
        storage = tensor.untyped_storage()
        return storage.device == tensor.device and (storage.data_ptr() != 0 or storage.nbytes() == 0)
    except RuntimeError:
        return False


# --- Lay out -----------------------------------------------------------------------------------------------


def _over(
    storage: Storage, dtype: torch.dtype, offset: int, shape: Sequence[int], stride: Sequence[int]
) -> Tensor:
    """Return a tensor over existing memory."""
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, stride)


# --- Copy --------------------------------------------------------------------------------------------------


class _Copy(NamedTuple):
    """One call of `copy_` to make."""

    target: Tensor
    source: Tensor
    waits: bool  # must not be asynchronous: the CPU resolves lazy views after the data has arrived


def _copy_of(block: Block, buffer: Storage, source: Storage, tensor: Tensor) -> _Copy:
    """Return the copy of the block into the buffer. `tensor` has the first view of the block, in the source."""
    if len(block.views) == 1 and tensor.is_contiguous() and not any(block.views[0].lazy):
        return _Copy(_over(buffer, tensor.dtype, 0, tensor.shape, tensor.stride()), tensor, waits=False)
    if not block.closed_up:
        shape, step = [block.nbytes], [1]
        target = _over(buffer, torch.uint8, 0, shape, step)
        return _Copy(target, _over(source, torch.uint8, block.begin, shape, step), waits=False)
    view = block.views[0]
    _, stride = staged_place(view, block)
    # Use the order of the target's memory. Otherwise copies from a device go through a temporary on the CPU.
    order = sorted(range(len(stride)), key=lambda dim: -stride[dim])
    shape, step = [view.stored[dim] for dim in order], [stride[dim] for dim in order]
    elements = tensor[tuple(slice(n) for n in view.stored)].permute(order)
    return _Copy(_over(buffer, view.dtype, 0, shape, step), elements, waits=any(view.lazy))


def _run(copies: list[_Copy], pinned: bool, wait: bool = True) -> None:
    """Make the copies. Those from CUDA to pinned memory are asynchronous; `wait` for them at the end."""
    devices = set()
    try:
        for target, source, waits in copies:
            starts_only = pinned and source.is_cuda and not waits
            if starts_only:
                devices.add(source.device)
            target.copy_(source, non_blocking=starts_only)
    finally:
        for device in devices if wait else ():
            torch.cuda.current_stream(device).synchronize()


# --- Rebuild -----------------------------------------------------------------------------------------------


def _copied(state_dict: Any, tensors: list[Tensor], staged: dict[int, Tensor]) -> Any:
    """Return a deep copy. In it, staged tensors take the place of `tensors`, which are all tensors of the state dict.

    `staged`: by the id of a tensor, its copy. For a DTensor, the copy is of its local part (Note [A memo that answers tensors]).
    Raises UsageError if something cannot be copied.
    """
    memo: dict[int, Any] = {id(tensor): _dressed(staged[id(tensor)], tensor) for tensor in tensors}
    for tensor in tensors:
        if type(tensor) is _Bytes:
            memo[id(tensor.untyped_storage())] = memo[id(tensor)].untyped_storage()
    try:
        with _KnownViews(tensors, memo):
            result = copy.deepcopy(state_dict, memo)
            for tensor in tensors:
                for path, attribute in attributes_of(tensor):
                    setattr(memo[id(tensor)], path[-1], copy.deepcopy(attribute, memo))
    except Exception as error:
        raise culprit(state_dict, memo, error) from error
    return result


def _dressed(part: Tensor, like: Tensor) -> Tensor:
    """Return the staged part as a tensor of the same kind as `like`."""
    if isinstance(like, DTensor):
        return wrap_like(part, like)
    if like.is_quantized:
        return quantized_over(part, like)
    return part if type(like) in (Tensor, nn.Parameter) else part.as_subclass(type(like))


class _KnownViews(TorchFunctionMode):
    """Within this context, a deep copy of a tensor returns the staged tensor of an equal view, if there is one.

    This applies to tensors that are not in the memo.
    """

    def __init__(self, tensors: list[Tensor], memo: dict[int, Any]) -> None:
        super().__init__()
        self.tensors, self.memo = tensors, memo

    @cached_property
    def staged(self) -> dict[Any, Tensor]:
        """The staged tensors by the views that they are copies of. Few state dicts need this."""
        whole = [tensor for tensor in self.tensors if type(tensor) is not _Bytes]
        return {self.key_of(tensor): self.memo[id(tensor)] for tensor in whole}

    def key_of(self, tensor: Tensor) -> Any:
        storage = _storage_of(tensor)
        return storage and (isinstance(tensor, DTensor), storage, view_of(_memory_of(tensor)))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            staged = self.staged.get(self.key_of(args[0]))
            if staged is not None:
                return staged
        return func(*args, **(kwargs or {}))


# --- Which bytes are copied together: integers only --------------------------------------------------------


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


_NEAR = 4096  # bytes; to copy so many costs less than one more copy


def blocks_of(views: list[View]) -> list[Block]:
    """Find the views of one storage that are staged together (Note [Views stay views])."""
    runs: list[list[View]] = []
    end = 0
    for view in sorted((view for view in views if not any(view.lazy)), key=lambda view: view[:2]):
        if not runs or view.begin > end + _NEAR:
            runs.append([])
        runs[-1].append(view)
        end = max(end, view.end)
    return [*(_close_up(view) for view in views if any(view.lazy)), *map(_block, runs)]


def _block(views: list[View]) -> Block:
    begin, end = views[0].begin, max(view.end for view in views)
    if len(views) == 1 and views[0].nbytes < end - begin and not overlaps_itself(views[0]):
        return _close_up(views[0])
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


def staged_place(view: View, block: Block) -> tuple[int, tuple[int, ...]]:
    """Return offset and stride of a view in the staged storage, in elements."""
    if not block.closed_up:
        return (view.begin - block.begin) // view.dtype.itemsize, view.stride
    dense = compute_local_stride(view.stride, view.stored)
    return 0, tuple(step if old else 0 for step, old in zip(dense, view.stride))
