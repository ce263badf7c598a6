"""15 Asynchronous staging: copy a state at one moment, and write the copy while training goes on.

    saver = Saver(write)           write(copy) takes long: it brings a state to the disk
    handle = saver.save(state)     returns when the values are copied
    train()                        changes every tensor of the state, in place
    handle.wait()                  returns when `write` has returned, or raises its error

A state is made of dicts, lists and tuples. In them are tensors, DTensors (`fully_shard` gives a model such parameters), numbers, and
any other objects that `copy.deepcopy` can copy.
"""

from __future__ import annotations

# @15
import copy
import threading

# @end
from collections.abc import Callable

# @15
from collections.abc import Iterator

# @end
from typing import Any

# @15
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

# @end


class Stager:
    """Copies states into memory that is allocated once."""

    def __init__(self) -> None:
        # @15
        self.buffers: list[torch.UntypedStorage] = []
        # @00
        # |         raise NotImplementedError("TODO(15): Stager")
        # @end

    def stage(self, state: Any) -> Any:
        """Return a copy of a state on the CPU, which is complete on return: later changes of the state do not change it.

        Tensors that share memory in the state share it in the copy, at the same distances and with the same strides. A DTensor stays
        a DTensor. Everything else is copied, too.

        The memory of the copy is used again: the next call overwrites it. If the next state has storages of the same sizes, that call
        allocates no memory for tensors. Memory that the latest copy does not need is released.
        """
        # @15
        free, self.buffers = self.buffers, []
        copied: dict[int, torch.UntypedStorage] = {}  # by the address of the source
        memo: dict[int, Any] = {}
        for tensor in tensors_in(state):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            source = local.untyped_storage()
            if source.data_ptr() not in copied:
                fitting = [i for i, buffer in enumerate(free) if buffer.nbytes() == source.nbytes()]
                buffer = free.pop(fitting[0]) if fitting else torch.UntypedStorage(source.nbytes())
                self.buffers.append(buffer)
                copied[source.data_ptr()] = buffer.copy_(source)
            memo[id(tensor)] = laid_over(copied[source.data_ptr()], local.detach(), tensor)
        return copy.deepcopy(state, memo)
        # @00
        # |         raise NotImplementedError("TODO(15): stage")
        # @end


# @15
def tensors_in(state: Any) -> Iterator[Tensor]:
    """Yield the tensors of a state."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict | list | tuple):
        for value in state.values() if isinstance(state, dict) else state:
            yield from tensors_in(value)


def laid_over(buffer: torch.UntypedStorage, local: Tensor, tensor: Tensor) -> Tensor:
    """Return a tensor that lies over a buffer as `local`, the memory of `tensor` on this rank, lies over its storage."""
    staged = torch.empty(0, dtype=local.dtype).set_(
        buffer, local.storage_offset(), local.shape, local.stride()
    )
    if not isinstance(tensor, DTensor):
        return staged
    mesh, placements = tensor.device_mesh, tensor.placements
    return DTensor.from_local(
        staged, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


# @end


class Handle:
    """A save that is under way, or has ended."""

    # @15
    def __init__(self, write: Callable[[Any], object], staged: Any) -> None:
        self.error: BaseException | None = None
        self.is_heard = False  # somebody has been told the error
        self.thread = threading.Thread(target=self.run, args=(write, staged))
        self.thread.start()

    def run(self, write: Callable[[Any], object], staged: Any) -> None:
        try:
            write(staged)
        except BaseException as error:
            self.error = error

    # @end

    def wait(self) -> None:
        """Wait until `write` has returned.

        Raises:
            What `write` has raised, of any kind; in each call.
        """
        # @15
        self.thread.join()
        self.is_heard = True
        if self.error is not None:
            raise self.error
        # @00
        # |         raise NotImplementedError("TODO(15): wait")
        # @end


class Saver:
    """Writes states in another thread, one at a time."""

    def __init__(self, write: Callable[[Any], object]) -> None:
        # @15
        self.write, self.stager = write, Stager()
        self.last: Handle | None = None
        # @00
        # |         raise NotImplementedError("TODO(15): Saver")
        # @end

    def save(self, state: Any) -> Handle:
        """Begin to write a state. Return as soon as changes of the state can no longer change what is written.

        `write(copy)` runs in another thread, and does not keep the copy. It begins when the `write` of the previous save has ended, and
        so does the copy: there is memory for one. When it has ended, neither the handle nor the saver keep the state.

        Raises:
            The error of the previous save, if no call has raised it yet; then nothing begins, and the save after this one begins as
            usual. Or the error of the copy.
        """
        # @15
        last, self.last = self.last, None
        if last is not None and not last.is_heard:
            last.wait()
        elif last is not None:
            last.thread.join()
        self.last = Handle(self.write, self.stager.stage(state))
        return self.last
        # @00
        # |         raise NotImplementedError("TODO(15): save")
        # @end
