"""Exercise 13: Meta-device start"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hwfsdp.core import compat
from hwfsdp.core.compat import address_of, local_of
from hwfsdp.layout.extents import compute_local_shape_and_global_offset
from hwfsdp.layout.init_shards import Init, Part, generator_of, require_memory, reshard_all

# Names of the package that may help:
#
# hwfsdp.core.compat
#     function   local_of(tensor: Tensor) -> Tensor
#                  Return this rank's part of a DTensor. Unlike `to_local`, this adds no autograd node. Return
#                  other tensors unchanged.
#     function   replace_local(tensor: DTensor, local: Tensor) -> None
#                  Replace the rank's part of a DTensor that optimizers and users already hold.
# hwfsdp.layout.extents
#     function   compute_local_shape_and_global_offset(global_shape: Sequence[int], mesh: DeviceMesh,
#                    placements: Sequence[Placement], skip_offset: bool = False) -> tuple[tuple[int, ...],
#                    tuple[int, ...]]
#                  Return (shape, offset) of this rank's part (`local_extent_of`), or ((0,), ()) if this rank
#                  is not in the mesh.
# hwfsdp.layout.init_shards
#     class      Part(local: Tensor, offset: tuple[int, ...])
#                  A rank's part of a parameter: the memory to fill, and the index of its first element in the
#                  whole parameter.
#     constant   Init = Callable[[str, Tensor, torch.Generator], object]
#     function   generator_of(seed: int) -> torch.Generator
#                  Make a CPU generator from all 64 bits of a seed. torch's `manual_seed` keeps only 32, and a
#                  model has millions of rows.
#     function   reshard_all(model: nn.Module) -> None
#                  Register the shards of all groups below `model`. Values in whole parameters would be lost
#                  at the next gather.
#     function   require_memory(fqn: str, param: Tensor) -> None
#                  Raise StateError if the parameter is still on the meta device.
# hwfsdp.core.compat
#     function   address_of(tensor: Tensor) -> tuple[int, int, torch.dtype]
#                  Return where a tensor begins (storage and offset), and its dtype. Unlike `data_ptr`, this
#                  works for fake and freed memory.
# hwfsdp.core.param
#     attribute  FSDPParam.layout: Layout
#                  how it is cut.
#     attribute  FSDPParam.memory: ShardMemory
#                  where its shard lives.
#     attribute  FSDPParam.local_numel
#     attribute  FSDPParam.padded_numel
#     attribute  FSDPParam.padded_shard: Tensor
#                  [ceil(d0 / W) * rest], flat, original dtype: this rank's rows, then zeros.
#     method     ShardMemory.place(shard: Tensor) -> Tensor
#                  Return `shard`, or a copy of it in this memory.
# hwfsdp.core.layout
#     attribute  Layout.local_shape
#                  the shape of this rank's part.
#     attribute  Layout.padded_shape
#                  the shape of a full chunk of rows.


def row_generator(seed: int, fqn: str, number: int) -> torch.Generator:
    """Make a CPU generator for one row: row `number` of the whole parameter `fqn`, in a model with any integer as `seed`.

    Its numbers depend on these three alone: they are the same in every process on every machine.
    """
    digest = hashlib.blake2b(f"{seed}/{fqn}/{number}".encode(), digest_size=8).digest()
    return generator_of(int.from_bytes(digest, "little"))


def part_of(param: Tensor) -> Part:
    """Return this rank's part of a parameter, sharded or not: the memory itself, not a copy, and where in the whole it begins."""
    if not isinstance(param, DTensor):
        return Part(param, (0,) * param.ndim)
    _, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    return Part(local_of(param), offset)


def fill_part(fqn: str, part: Part, shape: tuple[int, ...], init: Init, seed: int) -> None:
    """Fill a part in place: call `init(fqn, row, generator)` once for each row that has elements here, first row first.

    A row is a new CPU tensor of the part's dtype: a whole parameter of this `shape` without dim 0, even if the part has only some
    columns. Its generator is the one of its number in the whole. A parameter without dims is one row. Besides the part, at most one
    row has memory. Autograd is off.
    """
    local, offset = part
    if local.numel() == 0:
        return
    first = offset[0] if offset else 0
    kept = tuple(slice(o, o + n) for o, n in zip(offset[1:], local.shape[1:], strict=True))
    for number, target in enumerate(local if local.ndim else local.view(1), first):
        row = torch.empty(shape[1:], dtype=local.dtype)
        init(fqn, row, row_generator(seed, fqn, number))
        target.copy_(row[kept])


@torch.no_grad()
def init_shards(model: nn.Module, init: Init, seed: int) -> None:
    """Initialize this rank's rows of every parameter, without communication, with equal weights at any number of ranks.

    Args:
        model: sharded, after `to_empty`; a forward may have left parameters whole. Parameters that are not sharded are
            initialized, too; buffers are not.
        init: `init(fqn, row, generator)` fills one row of a parameter in place, with a CPU generator. The row has the parameter's
            shape without dimension 0, and its dtype; for a 1D parameter it is a scalar.
        seed: of the whole model. No other random numbers of the process change.

    Raises:
        StateError: a parameter is still on the meta device.
    """
    reshard_all(model)
    for fqn, param in model.named_parameters():
        require_memory(fqn, param)
        fill_part(fqn, part_of(param), tuple(param.shape), init, seed)


class FSDPParam:
    """A parameter of the model, with its shard and its memory when whole. Extension point.

    Attributes:
        name: its name from the root module, or from the given module until there is a root. places: where it is registered.
        layout: how it is cut. memory: where its shard lives.
        dtypes: see `precision.Dtypes`.
        state: the form that is registered.
        padded_shard: [ceil(d0 / W) * rest], flat, original dtype: this rank's rows, then zeros.
        sharded_param: DTensor; its local part is a view of the front of `padded_shard`.
        unsharded_param: whole, compute dtype; None before the first gather.
        gathered: [W * ceil(d0 / W) * rest], compute dtype: memory of the whole parameter, with padding at the end; None before
            the first gather.
        accumulated_grad: whole, reduce dtype: the sum of gradients of backwards that did not reduce; None if there is none.
    """

    @torch.no_grad()
    def hold_rows(self, param: DTensor) -> None:
        """Let `padded_shard`, the memory that gathers read, hold the rows of `param`, which the caller has registered.

        The user may have replaced the parameter or its memory. If gathers already read these rows, do nothing. If the rows need no
        padding and are in `memory`, they become `padded_shard`. Otherwise `param`, the same object, gets the front of a new
        `padded_shard` as its memory.
        """
        rows, layout = local_of(param), self.layout
        if address_of(rows) == address_of(self.padded_shard):
            return
        if rows.numel() == self.padded_numel and rows.is_contiguous() and self.memory.place(rows) is rows:
            self.padded_shard = rows.view(-1)
            return
        self.padded_shard = self.memory.place(rows.new_zeros(layout.padded_shape)).view(-1)
        front = self.padded_shard[: self.local_numel].view(layout.local_shape)
        front.copy_(rows)
        compat.replace_local(param, front)
