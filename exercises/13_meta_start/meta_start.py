"""Exercise 13: Meta-device start"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hwfsdp.compat import local_of, replace_local
from hwfsdp.filling import Init, Part, require_memory, reshard_all
from hwfsdp.layout import compute_local_shape_and_global_offset
from hwfsdp.param import address_of
from hwfsdp.sharding import padded_local_shape

# The package's own, that the docstrings name:
#
# hwfsdp.compat
#     function   local_of(tensor: DTensor) -> Tensor
#     function   replace_local(tensor: DTensor, local: Tensor) -> None
# hwfsdp.layout
#     function   compute_local_shape_and_global_offset(global_shape: Sequence[int], mesh: DeviceMesh,
#                    placements: Sequence[Placement], skip_offset: bool = False) -> tuple[tuple[int, ...],
#                    tuple[int, ...]]
# hwfsdp.filling
#     class      Part(local: Tensor, offset: tuple[int, ...])
#     constant   Init = Callable[[str, Tensor, torch.Generator], object]
#     function   reshard_all(model: nn.Module) -> None
#     function   require_memory(fqn: str, param: Tensor) -> None
# hwfsdp.param
#     function   address_of(tensor: Tensor) -> tuple[int, int, torch.dtype]
#     method     FSDPParam._on_shard_device(tensor: Tensor) -> Tensor
#     attribute  FSDPParam.mesh: ShardMesh
#     attribute  FSDPParam.rows
#     attribute  FSDPParam.local_shape
#     attribute  FSDPParam.padded_numel
#     attribute  FSDPParam.padded_shard: Tensor
# hwfsdp.mesh
#     property   ShardMesh.size -> int
# hwfsdp.sharding
#     function   padded_local_shape(shape: Sequence[int], world_size: int) -> tuple[int, ...]


def row_generator(seed: int, fqn: str, number: int) -> torch.Generator:
    """A CPU generator for one row of one parameter.

    Args:
        seed: of the whole model, any integer. fqn: the parameter's name. number: the row's, in the whole parameter.

    Returns:
        A generator of its own, new, that depends on these three alone: the same numbers in every process on every machine,
        whatever was drawn before, and other numbers if any of the three is another. Its `manual_seed` takes integers of 64
        bits. Python's `hash` of a text differs from one process to the next; those of `hashlib` do not.
    """
    # TODO(13)
    raise NotImplementedError


def part_of(param: Tensor) -> Part:
    """What this rank holds of a parameter, which may be sharded or not.

    Returns:
        `Part(local, offset)`: the memory to fill, and the index of its first element in the whole, one integer for each dim.
        Of a DTensor, `local` is its local part itself (`compat.local_of(param)`), and `offset` the second of the two that
        `compute_local_shape_and_global_offset(shape, mesh, placements)` gives for its `shape`, `device_mesh` and `placements`.
        A parameter that is not sharded is all here: itself, at offset 0 in every dim.
    """
    # TODO(13)
    raise NotImplementedError


def fill_part(fqn: str, part: Part, shape: tuple[int, ...], init: Init, seed: int) -> None:
    """Fills a rank's part of a parameter, row by row. Called without gradients being recorded.

    Args:
        fqn: the parameter's. part: what this rank has, `part.local`, at `part.offset` in the whole (see `part_of`). It is
            filled in place; it may have no elements, and then there is nothing to do.
        shape: of the whole parameter, with as many dims as the part. A parameter without dims is one row of no dims.
        init: called as `init(fqn, row, generator)` once for each row that the part has elements of, first row first.
        seed: of the whole model.

    A row is a slice of the *whole* parameter along dim 0. For `init`, it is a new tensor of shape `shape[1:]`, in the part's
    dtype, on the CPU, contents undefined; its generator is `row_generator(seed, fqn, number)`, where `number` counts rows of
    the whole parameter. What `init` left in it is copied into the part; of a part that is cut along other dims as well, only
    those elements that belong to it, which `part.offset` and the part's shape say.

    Never is there memory for more than one row besides the part.
    """
    # TODO(13)
    raise NotImplementedError


@torch.no_grad()
def init_shards(model: nn.Module, init: Init, seed: int) -> None:
    """Initializes this rank's rows of every parameter; no communication.

    Args:
        model: sharded, after `to_empty`. Parameters that are not sharded are initialized too, buffers are not.
        init: called with a parameter's fqn, one of its rows, to be filled in place, and a CPU generator. The row has
            the parameter's shape without dimension 0, in its dtype; of a 1D parameter it is a scalar. Where a
            parameter is cut along another dimension, the whole row is drawn, and this rank's part of it kept.
        seed: of the whole model.

    First `reshard_all(model)`: where a forward left whole parameters, it is the shards that have to be filled. Then each
    parameter of the model, once, by the name that `named_parameters` gives it: `require_memory(fqn, param)`,
    `part_of(param)`, `fill_part(fqn, part, shape of the whole, init, seed)`. Nothing else in the process changes, its random
    numbers included.

    Raises:
        StateError: a parameter is still on the meta device (`require_memory` sees to that).
    """
    # TODO(13)
    raise NotImplementedError


class FSDPParam:
    """A parameter of the model, with its shard and its memory when whole.

    Attributes:
        fqn: fully qualified name from the root module.
        spread: how the parameter lies over the ranks, before and after sharding.
        mesh: the `ShardMesh` whose ranks cut it: `mesh.size` of them, this one is `mesh.rank`.
        shape: of what FSDP gathers: the whole parameter, or the part of it that tensor parallelism left to this rank.
        rows: `shape` with the ranks' rows in dim 0 (Note [Rows]).
        local_shape, local_numel: of this rank's rows; padded_numel: elements that it contributes to a gather.
        dtypes: original, param and reduce dtype.
        state: which form is registered.
        padded_shard: [ceil(d0 / W) * rest], original dtype: this rank's rows, then zeros. In host memory if offloaded.
        sharded_param: DTensor; its local part is a view of the front of `padded_shard`.
        gathered: [W * ceil(d0 / W) * rest], param dtype: memory of the whole parameter, its padding at the end.
        unsharded_param: `shape`, param dtype: an alias of the front of `gathered`; None before the first gather.
        gather_mesh: whose shards the next gather puts together: `mesh`, or the smaller one that forward resharded to.
        post_forward_shard: [ceil(d0 / S) * rest], param dtype: rows kept after forward by this rank of a smaller world
            of S ranks; None in other states.
        accumulated_grad: `shape`, reduce dtype: gradients of backwards that were not reduced; else None.
        partial_grad: this rank's rows, flat, reduce dtype: gradients that were reduced within the shard axis only.
        extension: the local part's own way to be gathered, if it has one.
    """

    @torch.no_grad()
    def hold_rows(self, param: DTensor) -> None:
        """Makes the memory of `param`, the registered parameter, the one that gathers read: `padded_shard`.

        `adopt_registered` calls it, for a parameter with this rank's rows, `local_shape`, in its local part (`local_of`).
        That comes from the user, or from `to_empty`, and knows nothing of padding.

        Afterwards, the local part is the front of `self.padded_shard` (Note [Padding lives in the shard]): an optimizer that
        updates the one updates the other. `padded_shard` is flat, of `self.padded_numel` elements in the dtype of the rows,
        where `self._on_shard_device(tensor)` puts it: the rows, as they were, then zeros. There are three cases.

        - The local part begins where `padded_shard` does (`address_of(tensor)` says where): nothing has changed, nothing to do.
        - The rows need no padding, are contiguous, and `_on_shard_device` returns the very tensor that it is given: their
          own memory becomes `padded_shard`, without a copy.
        - Otherwise there is new memory of shape `padded_local_shape(self.rows, self.mesh.size)`: `self.rows` is the shape
          that ranks cut along dim 0, `self.mesh.size` the number of these ranks. The rows are copied to its front, as many
          elements as `self.local_shape` has, and that front, in this shape, becomes the local part of `param`
          (`compat.replace_local(param, front)`), which stays the object that it is. Nobody keeps the memory where the rows
          were before.
        """
        # TODO(13)
        raise NotImplementedError
