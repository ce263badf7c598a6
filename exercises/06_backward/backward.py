"""Exercise 06: Backward"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from hwfsdp import compat
from hwfsdp.collectives import Scaling, _chunk_numel
from hwfsdp.compat import local_of
from hwfsdp.hooks import Phase
from hwfsdp.sharding import chunk_length

# The package's own, that the docstrings name:
#
# hwfsdp.sharding
#     function   chunk_extent(n: int, world_size: int, rank: int) -> Extent
#     function   chunk_length(n: int, world_size: int) -> int
#     function   padded_local_numel(shape: Sequence[int], world_size: int) -> int
# hwfsdp.collectives
#     class      Scaling(before: float, scatter: Any, all_reduce: Any, after: float)
# hwfsdp.param
#     method     FSDPParam._own_part(grad: DTensor) -> Tensor
#     method     FSDPParam._to_memory_of_grads(grad: Tensor, used_at_once: bool) -> Tensor
# hwfsdp.compat
#     function   wrap_like(local: Tensor, like: DTensor) -> DTensor
#     function   local_of(tensor: DTensor) -> Tensor
#     function   post_accumulate_grad_hooks(param: Tensor) -> list[Callable[[Tensor], None]]
# hwfsdp.hooks
#     property   FSDPState.groups -> list[ParamGroup]
#     attribute  FSDPState.phase
#     attribute  FSDPState.comm_ctx: FSDPCommContext
#     method     FSDPState.queue_final_callback() -> None
#     method     FSDPState.prefetch_backward() -> None
# hwfsdp.group
#     attribute  ParamGroup.unshard_in_backward: bool
#     method     ParamGroup.unshard() -> None
#     method     ParamGroup.wait_for_gather() -> None
#     method     ParamGroup.finish_unshard() -> None
#     method     ParamGroup.finish_gradients() -> None
#     method     FSDPCommContext.finish_reductions() -> None


def copy_in_grads(grads: Sequence[Tensor], flat: Tensor) -> None:
    """Cuts gradients into the chunks of the ranks, so that row r of `flat` is what rank r shall get.

    Args:
        grads: each [d0, *rest], any strides and dtype; only read. d0 may be less than W, or no multiple of it.
        flat: [W, n], contiguous, in the reduce dtype, contents undefined; written completely. In row r, gradient after
            gradient, lie the rows of rank r (`sharding.chunk_extent`), cast to the dtype of `flat`, then zeros up to
            `chunk_length(d0, W)` rows: as many columns for each gradient as `padded_local_numel(shape, W)` says.
    """
    # TODO(06)
    raise NotImplementedError


@functools.cache
def mean_scaling(
    shards: int,
    replicas: int,
    reduce_dtype: torch.dtype,
    factor: float | None = None,
    force_sum: bool = False,
) -> Scaling:
    """How to sum over `shards * replicas` ranks in this dtype and divide by `factor` (None: their number).

    fp32 and bf16 have range to spare, and the backend divides where it can, unless `force_sum` forbids it or there is one
    rank only: by the number of all ranks (`factor` is None) if both collectives average; by the number of shards (`factor`
    equals it, and it is more than 1) if the reduce-scatter averages and the all-reduce sums. Then nothing is left to
    divide: `before` and `after` are 1.

    Otherwise both collectives sum, and `before * after` is the divisor. fp32 and bf16 divide afterwards. Other dtypes, such
    as fp16, overflow in the sum and underflow when divided first, so about a square root of the divisor is taken out on
    each side: `before` starts at 1 and is doubled as long as it divides the divisor and its square is below it.

    Returns:
        `dist.ReduceOp.AVG` and `dist.ReduceOp.SUM` as operations, floats as divisors. For 8 shards, 1 replica: in fp32
        (1, AVG, AVG, 1); in fp16 (4, SUM, SUM, 2).
    """
    # TODO(06)
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

    def take_grad(self) -> Tensor | None:
        """The gradient to reduce, handed over: nobody but the caller refers to it afterwards, so that it can be freed.

        There are two places for it. Autograd leaves the gradient of a backward in `unsharded_param.grad`
        (`unsharded_param` may be None, if it was never gathered); under tensor parallelism that is a DTensor, and
        `_own_part` makes a tensor of it. Earlier backwards that were not reduced may have left `accumulated_grad`. Both
        are None afterwards.

        Returns:
            `shape`: the sum, made in place of `accumulated_grad` and so in its dtype, the reduce dtype, if there are two;
            if there is one, that one as it is; None if the parameter got no gradient.
        """
        # TODO(06)
        raise NotImplementedError

    def add_sharded_grad(self, grad: Tensor) -> None:
        """Adds the reduced gradient of this rank's rows to `sharded_param.grad`.

        Args:
            grad: `local_shape`, original dtype: the mean over all ranks. It may become the gradient's memory.

        `sharded_param.grad` is a DTensor laid out as the parameter (`compat.wrap_like(grad, sharded_param)`). If there is
        none yet, that of `grad` is it, without a copy; if there is one, of an earlier reduction that the user has not
        cleared, `grad` is added to its local part (`local_of`) in place.

        Before that, `_to_memory_of_grads(grad, used_at_once)` gives what takes the place of `grad`: itself, or its copy where
        gradients live. `used_at_once` says whether its elements are read before this returns, that is, whether there is a
        gradient to add them to, or a hook. After all, the parameter's post-accumulate-grad hooks
        (`compat.post_accumulate_grad_hooks` lists them), which autograd does not call here, are called with the parameter.
        """
        # TODO(06)
        raise NotImplementedError


class FSDPState:
    """The schedule of the modules of one `fully_shard` call.

    Attributes:
        modules: those given to `fully_shard`; fqn: their names from the root, the root's is its class.
        parent: the state of the closest sharded module above; None at the root.
        root: what all states below one root share, the same object (`RootContext`). comm_ctx: what their groups share.
        group: its parameters; None if every parameter below it was claimed by others.
        auto_reshard: `reshard_after_forward` was None: true below the root, false at the root.
        to_run: modules whose forward the one in progress waits for (Note [Several modules, one group]).
        forward_prefetch, backward_prefetch: states whose groups to gather next, if the user said so; else empty.
        forward_order: the order in which groups ran when this state's forward was the outermost one.
    """

    def pre_backward(self) -> bool:
        """Before the modules' backward; autograd calls it once per output that gets a gradient.

        Each call makes sure that the root is called when the backward is over (`queue_final_callback`). Only the first
        call of a backward, which finds another phase than PRE_BACKWARD, does more, and in this order:
        - The phase becomes PRE_BACKWARD.
        - The group, if there is one and its backward needs parameters (`unshard_in_backward`), starts its gather
          (`unshard`), and compute waits for it (`wait_for_gather`).
        - The gather of the group whose backward is expected next is started (`prefetch_backward`, group or not): not
          before this group's own, which it would delay.
        - The unshard of the group, if there is one, is finished (`finish_unshard`): the modules have their whole parameters.

        Returns:
            Whether this was the first call of this backward.
        """
        # TODO(06)
        raise NotImplementedError

    def post_backward(self) -> None:
        """After the modules' backward: frees the parameters, and reduces the gradients or accumulates them.

        Called when autograd has computed the gradients of the modules' inputs, and by the root, when the backward is
        over, for states that autograd did not come to. The phase becomes POST_BACKWARD, and every group in `groups`
        finishes its gradients (`ParamGroup.finish_gradients`), which starts reductions and does not wait for them.

        A module that was called by itself, outside the root's forward, finds the phase FORWARD here; then nobody comes to
        wait later, so all reductions are finished before this returns (`comm_ctx.finish_reductions`).
        """
        # TODO(06)
        raise NotImplementedError
