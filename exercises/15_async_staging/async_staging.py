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

# Names of the package that may help:
#
# hwfsdp.checkpoint.staging
#     constant   Storage = torch.UntypedStorage
#     attribute  StateDictStager._pools: WeakKeyDictionary[Storage, list[Storage]]
#     method     StateDictStager._allocate(size: int) -> Storage
#                  Make a buffer of `size` bytes, which no pool keeps.
#     method     StateDictStager._add(pool: list[Storage], size: int) -> Storage
#                  Make a buffer and keep it in the pool. Return it.
#     method     StateDictStager.stage(state_dict: T, non_blocking: bool = False) -> T
#                  Return a copy on the CPU. Later changes to `state_dict` do not change the copy. It is
#                  complete on return.
#     function   _over(storage: Storage, dtype: torch.dtype, offset: int, shape: Sequence[int],
#                    stride: Sequence[int]) -> Tensor
#                  Return a tensor over existing memory.
#     class      _Copy(target: Tensor, source: Tensor, waits: bool)
#                  One call of `copy_` to make.
#     function   _copy_of(block: Block, buffer: Storage, source: Storage, tensor: Tensor) -> _Copy
#                  Return the copy of the block into the buffer. `tensor` has the first view of the block, in
#                  the source.
#     function   _dressed(part: Tensor, like: Tensor) -> Tensor
#                  Return the staged part as a tensor of the same kind as `like`.
#     function   _copied(value: Any, tensors: list[Tensor], memo: dict[int, Any]) -> Any
#                  Make a deep copy. `memo` is a memo of `copy.deepcopy` that has the copies of these tensors.
#                  Copy the tensors' attributes, too.
# hwfsdp.checkpoint.views
#     class      View(begin: int, end: int, shape: tuple[int, ...], stride: tuple[int, ...],
#                    dtype: torch.dtype, lazy: tuple[bool, bool])
#                  The place of a tensor's elements in its storage. Tensors with equal views are one tensor in
#                  the copy.
#     function   view_of(tensor: Tensor) -> View
#                  Return the place of a tensor in its storage. The tensor has elements.
#     class      Block(views: list[View], begin: int, nbytes: int, closed_up: bool)
#                  The contents of one staged storage: `nbytes` bytes from byte `begin` on, or the elements of
#                  one view, closed up.
#     function   blocks_of(views: list[View]) -> list[Block]
#                  Find the views of one storage that are staged together.
#     function   place_of(view: View, block: Block) -> tuple[int, tuple[int, ...]]
#                  Return offset and stride of a view in the staged storage, in elements.
# hwfsdp.compat
#     function   is_referred_to_elsewhere(storages: list[torch.UntypedStorage], index: int) -> bool | None
#                  True if anything except this list refers to its storage at `index`. None if this version of
#                  torch cannot tell.
# hwfsdp.checkpoint.saving
#     class      Target(path: Path, overwrite: bool = False, keep: int | None = None)
#                  The place of a save, and its options; see `store.save`.
#     class      Unstaged(error: Exception)
#                  Stands for a state dict that could not be copied; `error` is the reason.
#     function   save_agreed(agreement: Agreement, state_dict: Any, target: Target) -> str
#                  Do the work of `store.save`, in an agreement that was made before.
# hwfsdp.checkpoint.agreement
#     class      Agreement(group: dist.ProcessGroup | None, what: str, *, alone: bool = False)
#                  One call of a function that all ranks of a group call. `what` names the function in errors.
# hwfsdp.checkpoint.background
#     attribute  SaveHandle._agreement: Agreement
#     attribute  SaveHandle._state_dict: Any
#                  the staged copy, or `Unstaged`; None when it is not needed any more.
#     attribute  SaveHandle._target: Target
#     attribute  SaveHandle._save_id: str
#                  the id of the save once it has succeeded, "" before.
#     attribute  SaveHandle._error: BaseException | None
#                  the reason if it has failed.
#     attribute  SaveHandle._heard: bool
#                  whether `wait` was called.
#     attribute  SaveHandle._thread
#                  runs `_run`; not a daemon, so that the interpreter waits for it.
#     attribute  SaveQueue.stager: StateDictStager
#                  makes all copies, because it owns the memory for them.
#     attribute  SaveQueue.last: SaveHandle | None
#                  the save that was started last, if there was one; it may have ended long ago.
#     method     SaveQueue.end_before(agreement: Agreement) -> None
#                  Wait for the previous save. If it failed, and a rank has not raised its error yet, raise
#                  the error on all ranks.
#     method     SaveQueue.begin(agreement: Agreement, staged: Any, target: Target) -> SaveHandle
#                  Start the thread of a save; `staged` is the result of `stage`.


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

    def _lay_out(self, tensors: dict[int, Tensor]) -> tuple[dict[int, Tensor], list[_Copy]]:
        """Lend memory for copies of these tensors, and list the copies to make, one for each block. `stage` makes them later.

        Args:
            tensors: by id; some share a storage, some are equal views of it, some have no elements.

        Returns:
            By the same ids, CPU tensors without values yet, which share memory as the given ones do; and the copies.
        """
        # TODO(15)
        raise NotImplementedError

    def _lend(self, source: Storage, sizes: list[int]) -> list[Storage]:
        """Lend an unused buffer of `source` for each of these sizes (bytes), all different. A free one is better than a new one.

        A buffer is free if only its pool refers to it; if torch cannot tell, it is not. Of the free buffers that are left, keep for each
        size as many as `sizes` has: the next copy needs them while these are written. Release the others.
        """
        # TODO(15)
        raise NotImplementedError


def _rebuilt(state_dict: Any, tensors: list[Tensor], staged: dict[int, Tensor]) -> Any:
    """Return a deep copy of the state dict. In it, staged tensors take the place of `tensors`, which are all tensors of the state dict.

    `staged`: by the id of a tensor, its copy. For a DTensor, the copy is of its local part (Note [A memo that answers tensors]).
    Raises UsageError if something cannot be copied.
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
        """Do the work of the save, in its own thread; keep its id, or its error of any kind. Then refer to the staged copy no more."""
        # TODO(15)
        raise NotImplementedError

    def wait(self) -> str:
        """Wait for the end of the save; return its id. The next save does not raise this save's error again.

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
        """Start a "save"; return its handle as soon as changes to the tensors can no longer change what is saved.

        Saves end in the order in which they began, and memory has room for one copy. The handle is kept as `last`.

        Raises:
            The error of the previous save, if no call has raised it yet. Then nothing was started.
        """
        # TODO(15)
        raise NotImplementedError

    def stage(self, state_dict: Any) -> Any:
        """Return a copy on the CPU. If that fails, return `Unstaged`: it tells the other ranks, which would otherwise wait."""
        # TODO(15)
        raise NotImplementedError
