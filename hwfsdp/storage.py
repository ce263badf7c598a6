"""Memory that comes and goes under a tensor that stays.

Note [Free by resizing, not by replacing]
    Autograd saves tensors of the forward for the backward, the weight of a linear layer among them. Had FSDP
    replaced the unsharded parameter by a new tensor after each gather, autograd would hold the old ones and no
    byte would ever be freed. So the parameter is one tensor object for the life of the model, and what is
    allocated and freed is the storage under it, by resizing. What autograd saved sees the memory return.

Note [Writing without being noticed]
    Autograd also counts in-place writes, and refuses to use a saved tensor that was written to since. Filling
    the storage again with the same values is such a write. `Tensor.data` is an alias of the same storage with a
    count of its own: we gather into the one tensor and register a parameter made from the alias.
"""

from __future__ import annotations

from torch import Tensor


def allocate(tensor: Tensor) -> None:
    """Gives the tensor's storage its full size, contents undefined; nothing happens if it has it.

    Args:
        tensor: all of its storage: contiguous, beginning at its first element. It is changed in place: afterwards it, and
            every alias of it, may be written and read again. The storage has the bytes of the tensor's elements.

    The storage is resized, not exchanged (Note [Free by resizing, not by replacing]).
    """
    storage, nbytes = tensor.untyped_storage(), tensor.numel() * tensor.element_size()
    if storage.nbytes() != nbytes:
        storage.resize_(nbytes)


def free(tensor: Tensor) -> None:
    """Gives the storage's memory back, by resizing it; nothing happens if that was done.

    The storage has 0 bytes afterwards. The tensor and every alias of it, such as one that autograd saved for backward, are
    the objects that they were, with their shapes; their elements must not be read until `allocate` and whoever fills
    the memory again.
    """
    storage = tensor.untyped_storage()
    if storage.nbytes() != 0:
        storage.resize_(0)


def is_allocated(tensor: Tensor) -> bool:
    """Whether the tensor's elements may be read."""
    return tensor.numel() == 0 or tensor.untyped_storage().nbytes() > 0
