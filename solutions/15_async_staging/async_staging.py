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

# The package's own, that the docstrings name:
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
            The others are sorted by `untyped_storage()`, which can be a key of a dict, and within one by `view_of(tensor)`,
            which can be one, too. Of all distinct views of a storage, `blocks_of(views)` makes blocks: what is staged
            together. `self._lend(storage, sizes)` gives all buffers of a storage at once, one of `block.nbytes` for each.
            A block is copied by `_copy_of(block, buffer, storage, tensor)`, of which `tensor` is one that has the view
            `block.views[0]`. `place_of(view, block)` says where a view lies in the buffer, as offset and stride; every tensor
            that has this view gets one there: `_over(buffer, view.dtype, offset, view.shape, stride)`.
        """
        staged: dict[int, Tensor] = {}
        copies: list[_Copy] = []
        sources: defaultdict[Storage, dict[View, list[int]]] = defaultdict(dict)
        for key, tensor in tensors.items():
            if tensor.numel():
                sources[tensor.untyped_storage()].setdefault(view_of(tensor), []).append(key)
            else:
                staged[key] = _over(self._allocate(0), tensor.dtype, 0, tensor.shape, tensor.stride())

        for source, views in sources.items():
            blocks = blocks_of(list(views))
            for block, buffer in zip(blocks, self._lend(source, [block.nbytes for block in blocks])):
                copies.append(_copy_of(block, buffer, source, tensors[views[block.views[0]][0]]))
                for view in block.views:
                    offset, stride = place_of(view, block)
                    for key in views[view]:
                        staged[key] = _over(buffer, view.dtype, offset, view.shape, stride)
        return staged, copies

    def _lend(self, source: Storage, sizes: list[int]) -> list[Storage]:
        """Lend an unused buffer of each of these sizes: a free one, or a new one (Note [Lent memory]).

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


class SaveHandle:
    """A save that is under way.

    Attributes:
        _state_dict: the staged copy, or `Unstaged`; None when nobody needs it any more.
        _save_id: of the save that has succeeded, "" before. _error: why it has failed. _heard: `wait` was called.
        _thread: runs `_run`; not a daemon, so that the interpreter waits for it.
    """

    def _run(self) -> None:
        """The save, in a thread of its own.

        `save_agreed(agreement, state_dict, target)` does it, with what the handle was made with, `self._agreement`,
        `self._state_dict` and `self._target`, and returns the save's id, which goes to `_save_id`. Whatever it raises (any
        BaseException) goes to `_error`, and no further: nobody would see an exception of this thread. However it ends,
        `_state_dict` is then None: the handle may live long, and buffers that it refers to could not be lent to the next
        save.
        """
        try:
            self._save_id = save_agreed(self._agreement, self._state_dict, self._target)
        except BaseException as error:
            self._error = error
        finally:
            self._state_dict = None  # its buffers are free for the next

    def wait(self) -> str:
        """Wait for the end of the save (of `_thread`); return its id.

        From then on `_heard` is True: the next save does not raise the error of this one again.

        Raises:
            What `store.save` does, each time it is called.
        """
        self._thread.join()
        self._heard = True
        if self._error is not None:
            raise self._error
        return self._save_id


class SaveQueue:
    """The saves of this process, one under way at a time.

    Attributes:
        stager: makes the copies, all of them, because the memory to copy into is its. last: the save that was started last,
            if there was one; it may have ended long ago.
    """

    def start(self, state_dict: Any, group: dist.ProcessGroup | None, target: Target) -> SaveHandle:
        """`store.async_save`: returns as soon as changes to the tensors cannot change the save any more.

        In this order: an `Agreement(group, "save")`, which every rank has to make at the same place of its program; the end
        of the save before (`self.end_before(agreement)`), since its copy and a new one would take twice the memory, and saves
        are to end in the order in which they began; the copy (`self.stage(state_dict)`), here, in the thread that trains, as
        it is the one that would change the values meanwhile; and the handle (`self.begin(agreement, staged, target)` returns
        it), whose thread does the rest. That is not waited for.

        Args:
            state_dict, group: as for `store.async_save`. target: where the save goes.

        Returns:
            The handle, which is `last`, too, so that the next save finds it.

        Raises:
            The error of the save before, if nobody has heard of it; then nothing was started.
        """
        agreement = Agreement(group, "save")
        self.end_before(agreement)
        self.last = self.begin(agreement, self.stage(state_dict), target)
        return self.last

    def stage(self, state_dict: Any) -> Any:
        """A copy on the CPU; if there can be none, something that tells the other ranks why.

        Returns:
            What `stager.stage(state_dict)` returns. If that raises an Exception: `Unstaged(error)`. For the other ranks may
            have their copies and wait for this one: `save_agreed` raises the error of an `Unstaged` on all of them.
        """
        try:
            return self.stager.stage(state_dict)
        except Exception as error:
            return Unstaged(error)
