"""Exercise 13: Meta-device start"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hwfsdp.core import compat
from hwfsdp.core.compat import address_of, local_of
from hwfsdp.layout.extents import compute_local_shape_and_global_offset
from hwfsdp.layout.init_shards import Init, Part, require_memory, reshard_all

# Names of the package that the docstrings mention:
#
# hwfsdp.core.compat
#     function   local_of(tensor: Tensor) -> Tensor
#     function   replace_local(tensor: DTensor, local: Tensor) -> None
# hwfsdp.layout.extents
#     function   compute_local_shape_and_global_offset(global_shape: Sequence[int], mesh: DeviceMesh,
#                    placements: Sequence[Placement], skip_offset: bool = False) -> tuple[tuple[int, ...],
#                    tuple[int, ...]]
# hwfsdp.layout.init_shards
#     class      Part(local: Tensor, offset: tuple[int, ...])
#     constant   Init = Callable[[str, Tensor, torch.Generator], object]
#     function   reshard_all(model: nn.Module) -> None
#     function   require_memory(fqn: str, param: Tensor) -> None
# hwfsdp.core.compat
#     function   address_of(tensor: Tensor) -> tuple[int, int, torch.dtype]
# hwfsdp.core.param
#     attribute  FSDPParam.layout: Layout
#     attribute  FSDPParam.home: Home
#     attribute  FSDPParam.local_numel
#     attribute  FSDPParam.padded_numel
#     attribute  FSDPParam.padded_shard: Tensor
#     method     Home.keep(shard: Tensor) -> Tensor
# hwfsdp.core.form
#     attribute  Layout.local_shape
#     attribute  Layout.padded_shape


def row_generator(seed: int, fqn: str, number: int) -> torch.Generator:
    """Make a CPU generator for one row of one parameter.

    Args:
        seed: of the whole model, any integer. fqn: the parameter's name. number: the row's number in the whole parameter.

    Returns:
        A new generator that depends only on these three arguments. It gives the same numbers in every process on every machine,
        no matter what was drawn before. If one of the three is different, it gives different numbers. Its `manual_seed` takes
        integers of 64 bits. Python's `hash` of a text differs from one process to the next; a hash of `hashlib` does not.
    """
    digest = hashlib.blake2b(f"{seed}/{fqn}/{number}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def part_of(param: Tensor) -> Part:
    """Return this rank's part of a parameter, sharded or not.

    Returns:
        `Part(local, offset)`: the memory to fill, and the index of its first element in the whole, one integer for each dim.
        For a DTensor, `local` is its local part itself (`local_of(param)`), and `offset` is the second of the two results of
        `compute_local_shape_and_global_offset(shape, mesh, placements)` for its `shape`, `device_mesh` and `placements`.
        A parameter that is not sharded is its own part, at offset 0 in every dim.
    """
    if not isinstance(param, DTensor):
        return Part(param, (0,) * param.ndim)
    _, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    return Part(local_of(param), offset)


def fill_part(fqn: str, part: Part, shape: tuple[int, ...], init: Init, seed: int) -> None:
    """Fill a rank's part of a parameter, row by row. Called with autograd off.

    Args:
        fqn: the parameter's. part: the part of this rank, `part.local`, at `part.offset` in the whole (see `part_of`). Fill it
            in place. It may have no elements; then there is nothing to do.
        shape: of the whole parameter, with as many dims as the part. A parameter without dims is one row without dims.
        init: call it as `init(fqn, row, generator)` once for each row of which the part has elements, first row first.
        seed: of the whole model.

    A row is a slice of the *whole* parameter along dim 0. For `init`, it is a new tensor of shape `shape[1:]`, in the part's
    dtype, on the CPU, contents undefined. Its generator is `row_generator(seed, fqn, number)`, where `number` counts the rows of
    the whole parameter. Then copy the row into the part. If the part is cut along other dims as well, copy only the elements that
    belong to the part, as `part.offset` and the part's shape say.

    At any time, there is memory for the part and for at most one row.
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
    """Initialize this rank's rows of every parameter, without communication.

    Args:
        model: sharded, after `to_empty`. Parameters that are not sharded are initialized, too; buffers are not.
        init: called with a parameter's fqn, one of its rows, which it fills in place, and a CPU generator. The row has the
            shape of the parameter without dimension 0, and its dtype; for a 1D parameter it is a scalar. If a parameter is
            cut along another dimension, the whole row is drawn, and this rank keeps its part of the row.
        seed: of the whole model.

    First call `reshard_all(model)`: a forward may have left whole parameters, and the shards must be filled. Then go through the
    parameters of the model, each once, by the name that `named_parameters` gives it: `require_memory(fqn, param)`,
    `part_of(param)`, `fill_part(fqn, part, shape of the whole, init, seed)`. Nothing else in the process changes, not even its
    random numbers.

    Raises:
        StateError: a parameter is still on the meta device (`require_memory` raises this).
    """
    reshard_all(model)
    for fqn, param in model.named_parameters():
        require_memory(fqn, param)
        fill_part(fqn, part_of(param), tuple(param.shape), init, seed)


class FSDPParam:
    """A parameter of the model, with its shard and its memory when whole.

    Attributes:
        fqn: fully qualified name from the root module. places: where it is registered.
        layout: how it is cut. form: how it travels. home: where its shard lives.
        dtypes: see `precision.Dtypes`.
        state: the form that is registered.
        padded_shard: [ceil(d0 / W) * rest], flat, original dtype: this rank's rows, then zeros.
        sharded_param: DTensor; its local part is a view of the front of `padded_shard`.
        unsharded_param: whole, compute dtype; None before the first gather.
        accumulated_grad: whole, reduce dtype: the sum of gradients of backwards that did not reduce; None if there is none.
        keeps_memory: if True, the memory of the whole parameter stays allocated even while the parameter is sharded.
    """

    @torch.no_grad()
    def hold_rows(self, param: DTensor) -> None:
        """Let `padded_shard`, the memory that gathers read, hold the rows of `param` (Note [Padding lives in the shard]).

        Called when the user may have replaced the parameter or its memory. Rows that need no padding stay where they are. Other
        rows are copied to the front of new, padded memory, which then is the memory of `param`'s local part. `param` stays the
        same object.
        """
        rows, layout = local_of(param), self.layout
        if address_of(rows) == address_of(self.padded_shard):
            return
        if rows.numel() == self.padded_numel and rows.is_contiguous() and self.home.keep(rows) is rows:
            self.padded_shard = rows.view(-1)
            return
        self.padded_shard = self.home.keep(rows.new_zeros(layout.padded_shape)).view(-1)
        front = self.padded_shard[: self.local_numel].view(layout.local_shape)
        front.copy_(rows)
        compat.replace_local(param, front)
