"""Exercise 15: Asynchronous staging"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import torch.distributed as dist
from torch import Tensor

from hwfsdp.checkpoint.agreement import Agreement
from hwfsdp.checkpoint.saving import Target, Unstaged, save_agreed
from hwfsdp.checkpoint.staging import Storage, _Copy, _copied, _copy_of, _dressed, _over
from hwfsdp.checkpoint.views import View, blocks_of, place_of, view_of
from hwfsdp.compat import is_referred_to_elsewhere

# Names of the package that the docstrings mention:
#
# hwfsdp.checkpoint.staging
#     constant   Storage = torch.UntypedStorage
#     attribute  StateDictStager._pools: WeakKeyDictionary[Storage, list[Storage]]
#     method     StateDictStager._allocate(size: int) -> Storage
#     method     StateDictStager._add(pool: list[Storage], size: int) -> Storage
#     method     StateDictStager.stage(state_dict: T) -> T
#     function   _over(storage: Storage, dtype: torch.dtype, offset: int, shape: Sequence[int],
#                    stride: Sequence[int]) -> Tensor
#     class      _Copy(target: Tensor, source: Tensor, waits: bool)
#     function   _copy_of(block: Block, buffer: Storage, source: Storage, tensor: Tensor) -> _Copy
#     function   _dressed(part: Tensor, like: Tensor) -> Tensor
#     function   _copied(value: Any, tensors: list[Tensor], memo: dict[int, Any]) -> Any
# hwfsdp.checkpoint.views
#     class      View(begin: int, end: int, shape: tuple[int, ...], stride: tuple[int, ...],
#                    dtype: torch.dtype, lazy: tuple[bool, bool])
#     function   view_of(tensor: Tensor) -> View
#     class      Block(views: list[View], begin: int, nbytes: int, closed_up: bool)
#     function   blocks_of(views: list[View]) -> list[Block]
#     function   place_of(view: View, block: Block) -> tuple[int, tuple[int, ...]]
# hwfsdp.compat
#     function   is_referred_to_elsewhere(storages: list[torch.UntypedStorage], index: int) -> bool | None
# hwfsdp.checkpoint.saving
#     class      Target(path: Path, overwrite: bool = False, keep: int | None = None)
#     class      Unstaged(error: Exception)
#     function   save_agreed(agreement: Agreement, state_dict: Any, target: Target) -> str
# hwfsdp.checkpoint.agreement
#     class      Agreement(group: dist.ProcessGroup | None, what: str)
# hwfsdp.checkpoint.background
#     attribute  SaveHandle._agreement: Agreement
#     attribute  SaveHandle._state_dict: Any
#     attribute  SaveHandle._target: Target
#     attribute  SaveHandle._save_id: str
#     attribute  SaveHandle._error: BaseException | None
#     attribute  SaveHandle._heard: bool
#     attribute  SaveHandle._thread
#     attribute  SaveQueue.stager: StateDictStager
#     attribute  SaveQueue.last: SaveHandle | None
#     method     SaveQueue.end_before(agreement: Agreement) -> None
#     method     SaveQueue.begin(agreement: Agreement, staged: Any, target: Target) -> SaveHandle


class StateDictStager:
    """Copies state dicts to the CPU, over and over, into memory that it reuses (Note [Lent memory]).

    Calls from several threads wait for each other.

    Args:
        pin_memory: into page-locked memory, to which copies from CUDA devices are asynchronous. Without a CUDA device
            there is a warning, and ordinary memory.
        share_memory: into memory that other processes can map. Each staged storage takes a file descriptor. Keep
            the staged dict until they are done: they are not seen to refer to it.
    """

    def _lay_out(self, tensors: dict[int, Tensor]) -> tuple[dict[int, Tensor], list[_Copy]]:
        """Find memory for the copies, and list what to copy there. `stage` makes the copies after this function returns.

        Tensors that share memory also share it in the copy: tied weights, slices of one buffer, a tensor and its transpose.

        Args:
            tensors: by id, the tensors of the state dict (for a DTensor the local part), with memory on any device. Each tensor
                comes once, but several may have one storage, or be equal views of it.

        Returns:
            First, by the same ids, tensors on the CPU with the same shape, dtype and place relative to each other, in lent memory
            without values yet. Second, the copies to make, one for each block.

        What to do:
            A tensor without elements gets `_over(self._allocate(0), dtype, 0, shape, stride)`.
            Sort all other tensors by `untyped_storage()`, and those of one storage by `view_of(tensor)`. Both can be keys of a
            dict. For all distinct views of a storage, `blocks_of(views)` makes blocks: the parts that are copied together.
            `self._lend(storage, sizes)` gives all buffers of a storage at once, one of `block.nbytes` for each block.
            `_copy_of(block, buffer, storage, tensor)` is the copy of a block; `tensor` is a tensor that has the view
            `block.views[0]`. `place_of(view, block)` gives the place of a view in the buffer, as offset and stride. Every tensor
            that has this view gets one there: `_over(buffer, view.dtype, offset, view.shape, stride)`.
        """
        # TODO(15)
        raise NotImplementedError

    def _lend(self, source: Storage, sizes: list[int]) -> list[Storage]:
        """Lend an unused buffer for each of these sizes: a free one or a new one (Note [Lent memory]).

        Args:
            source: the storage that is staged. `self._pools[source]` is the list of all buffers that were made for it and not
                released yet, lent or free. This list may not exist yet.
            sizes: the bytes of each buffer; some may be equal.

        Returns:
            As many buffers as sizes, in the same order, all different. `is_referred_to_elsewhere(pool, index)` is False if this
            buffer of the pool is free. It is True if anything except the pool refers to the buffer, directly or through a
            tensor, a view, or an array (a name in this function counts, too). It is None if this torch cannot tell; do not lend
            such a buffer. Lend a free buffer of the right size before you make a new one. `self._add(pool, size)` makes a buffer
            and keeps it in the pool.

        Of the buffers that were free when the call began, the pool keeps the buffers that this call lends. It also keeps spare
        ones: for each size, at most as many as `sizes` asks for, because the next copy needs them while the buffers of this copy
        are being written. Release all other free buffers.
        """
        # TODO(15)
        raise NotImplementedError


def _rebuilt(state_dict: Any, tensors: list[Tensor], staged: dict[int, Tensor]) -> Any:
    """Build the state dict again: a deep copy, with the staged tensors in it (Note [A memo that answers tensors]).

    Args:
        state_dict: any object. tensors: all tensors in it, each once, also those inside objects. staged: by the `id` of a
            tensor, its staged tensor; for a DTensor, the staged tensor of its local part.

    Returns:
        The result of `_copied(state_dict, tensors, memo)`. `memo` is the memo of `copy.deepcopy`: a dict from the `id` of an
        object to its copy. A deep copy looks there before it copies an object, and adds each copy that it makes. So one
        object at two places stays one object. All tensors must be in the memo from the beginning. The copy of a tensor is
        `_dressed(staged part, tensor)`, which, for example, makes a DTensor of the part of a DTensor.

    Raises:
        UsageError: something cannot be copied.
    """
    # TODO(15)
    raise NotImplementedError


class SaveHandle:
    """A save that is under way.

    Attributes:
        _state_dict: the staged copy, or `Unstaged`; None when it is not needed any more.
        _save_id: the id of the save once it has succeeded, "" before. _error: the reason if it has failed. _heard: whether
            `wait` was called.
        _thread: runs `_run`; not a daemon, so that the interpreter waits for it.
    """

    def _run(self) -> None:
        """Run the save, in its own thread.

        Call `save_agreed(agreement, state_dict, target)` with the handle's `self._agreement`, `self._state_dict` and
        `self._target`. It does the save and returns its id: store the id in `_save_id`. If it raises any BaseException, store it
        in `_error` and do not raise it again, because no code sees an exception of this thread. In both cases, set `_state_dict`
        to None at the end: the handle may live long, and a buffer to which it refers cannot be lent to the next save.
        """
        # TODO(15)
        raise NotImplementedError

    def wait(self) -> str:
        """Wait for the end of the save (of `_thread`); return its id.

        From then on `_heard` is True, so that the next save does not raise the error of this one again.

        Raises:
            The error of the save, as `store.save` raises it, at each call.
        """
        # TODO(15)
        raise NotImplementedError


class SaveQueue:
    """The saves of this process, one under way at a time.

    Attributes:
        stager: makes all copies, because it owns the memory for them. last: the save that was started last, if there was one;
            it may have ended long ago.
    """

    def start(self, state_dict: Any, group: dist.ProcessGroup | None, target: Target) -> SaveHandle:
        """Start a save for `store.async_save`. Return as soon as changes to the tensors can no longer change the save.

        Do these in order:
            1. Make an `Agreement(group, "save")`. Every rank has to make it at the same place of its program.
            2. Wait for the end of the previous save (`self.end_before(agreement)`). Its copy and a new copy would take twice the
               memory, and saves must end in the order in which they began.
            3. Make the copy (`self.stage(state_dict)`), here, in the thread that trains, because only this thread changes the
               values.
            4. Make the handle: `self.begin(agreement, staged, target)` returns it. Its thread does the rest. Do not wait for it.

        Args:
            state_dict, group: as for `store.async_save`. target: where the save goes.

        Returns:
            The handle. It is also kept as `last`, so that the next save finds it.

        Raises:
            The error of the previous save, if no call has raised it yet. Then nothing was started.
        """
        # TODO(15)
        raise NotImplementedError

    def stage(self, state_dict: Any) -> Any:
        """Make a copy on the CPU. If this fails, return an object that tells the other ranks why.

        Returns:
            The result of `stager.stage(state_dict)`, or `Unstaged(error)` if that raises an Exception. The other ranks may have
            made their copies, and would wait for this rank. `save_agreed` raises the error of an `Unstaged` on all ranks.
        """
        # TODO(15)
        raise NotImplementedError
