"""15 Asynchronous staging: copy a state at one moment, and write the copy while training goes on.

    saver = Saver(write)           write(copy) takes long: it brings a state to the disk
    handle = saver.save(state)     returns when the values are copied
    train()                        changes every tensor of the state, in place
    handle.wait()                  returns when `write` has returned, or raises its error


A state is made of dicts, lists and tuples. In them are tensors, DTensors (`fully_shard` gives a model such parameters), numbers, and
any other objects that `copy.deepcopy` can copy.
"""

from __future__ import annotations

from collections.abc import Callable

from typing import Any


class Stager:
    """Copies states into memory that is allocated once."""

    def __init__(self) -> None:
        raise NotImplementedError("TODO(15): Stager")

    def stage(self, state: Any) -> Any:
        """Return a copy of a state on the CPU, which is complete on return: later changes of the state do not change it.

        Tensors that share memory in the state share it in the copy, at the same distances and with the same strides. A DTensor stays
        a DTensor. Everything else is copied, too.

        The memory of the copy is used again: the next call overwrites it. If the next state has storages of the same sizes, that call
        allocates no memory for tensors. Memory that the latest copy does not need is released.
        """
        raise NotImplementedError("TODO(15): stage")


class Handle:
    """A save that is under way, or has ended."""

    def wait(self) -> None:
        """Wait until `write` has returned.

        Raises:
            What `write` has raised, of any kind; in each call.
        """
        raise NotImplementedError("TODO(15): wait")


class Saver:
    """Writes states in another thread, one at a time."""

    def __init__(self, write: Callable[[Any], object]) -> None:
        raise NotImplementedError("TODO(15): Saver")

    def save(self, state: Any) -> Handle:
        """Begin to write a state. Return as soon as changes of the state can no longer change what is written.

        `write(copy)` runs in another thread, and does not keep the copy. It begins when the `write` of the previous save has ended, and
        so does the copy: there is memory for one. When it has ended, neither the handle nor the saver keep the state.

        Raises:
            The error of the previous save, if no call has raised it yet; then nothing begins, and the save after this one begins as
            usual. Or the error of the copy.
        """
        raise NotImplementedError("TODO(15): save")
