"""Exercise 08: Accumulation and ZeRO-2"""

from __future__ import annotations

from hwfsdp import advice
from hwfsdp.compat import outside_autograd

# The package's own, that the docstrings name:
#
# hwfsdp.group
#     attribute  ParamGroup.mesh: ShardMesh
#     attribute  ParamGroup.reshard_mesh: ShardMesh | None
#     method     ParamGroup.reshard() -> None
#     method     ParamGroup._reshard_to(mesh: ShardMesh) -> None
#     method     ParamGroup.take_grads() -> tuple[list[FSDPParam], list[Tensor]]
#     method     ParamGroup.reduce(params: Sequence[FSDPParam], grads: list[Tensor]) -> None
# hwfsdp.param
#     method     FSDPParam.take_grad() -> Tensor | None
#     attribute  FSDPParam.dtypes: Dtypes
# hwfsdp.precision
#     class      Dtypes(orig: torch.dtype, param: torch.dtype | None, reduce: torch.dtype | None)
# hwfsdp.advice
#     function   note_unsynchronized(group: Any, unsynchronized: bool) -> None


class ParamGroup:
    """Parameters that travel together.

    Attributes:
        fqn: of the modules that the group was made for; names it in errors, traces and pictures.
        params: in the order in which they lie in the flat buffers.
        mesh: over whose ranks they are sharded. comm_ctx: what the model's groups share, streams among it.
        channel: how collectives of this group are run (`collectives.Channel`).
        reshard_mesh: over whose ranks parameters are sharded after forward, to be gathered again for backward: `mesh`,
            or a smaller one. None: they stay whole.
        reshard_after_backward: free them after backward; off, they stay for the next micro-batch.
        reduce_grads: reduce in backward; off, gradients add up in the whole parameters' gradients.
        all_reduce_grads: reduce over replicas, too; off, partial gradients add up (Note [Partial gradients]).
        reduce_unused: parameters without a gradient are reduced as zeros, since other ranks may have one.
        unshard_in_backward: off for a group whose backward needs no parameters, such as an embedding.
        accumulated: whether the last backward that ended left gradients that are not reduced over all ranks.
        max_reductions: see `FSDPCommContext`, which takes the largest of its groups.
        post_forward_indices: this group's places in `FSDPCommContext.post_forward_order`.
    """

    def reshard_after_forward(self) -> None:
        """Frees the parameters after forward, in part, or not at all: what `reshard_mesh` asks for.

        - It is the group's own `mesh`: they are sharded over all its ranks again (`reshard`), and backward gathers them a
          second time. This is ZeRO-3.
        - It is a smaller mesh: they are sharded over its ranks only (`_reshard_to`), so that backward gathers from fewer.
        - It is None: they stay whole until backward has used them. One gather less, all the memory. This is ZeRO-2.
        """
        if self.reshard_mesh is self.mesh:
            self.reshard()
        elif self.reshard_mesh is not None:
            self._reshard_to(self.reshard_mesh)

    @outside_autograd
    def finish_gradients(self) -> None:
        """After the group's backward: frees the whole parameters, and reduces the gradients or keeps them for later.

        In the backward of the last micro-batch (`reduce_grads` is on) the gradients are taken from the parameters
        (`take_grads` returns two lists: the parameters that have one, and their gradients), and reduced (`reduce`), if
        there are any: a group that was not used communicates nothing. In those before (`reduce_grads` is off) nothing is
        communicated; every parameter keeps its whole gradient (`FSDPParam.accumulate_grad`) for the last one.

        The parameters are freed (`reshard`) if `reshard_after_backward` is on, when the gradients were taken and before
        the reduction starts, which allocates as much as they have held; off, they stay whole for the next micro-batch.

        First of all, `advice.note_unsynchronized(self, flag)` is told whether gradients will be left unreduced, so that an
        optimizer step that comes too early warns.
        """
        advice.note_unsynchronized(self, not self.reduce_grads)
        with self.profiled("post_backward_reshard"):
            params, grads = self.take_grads() if self.reduce_grads else ([], [])
            if self.reshard_after_backward:
                self.reshard()
        if grads:
            self.reduce(params, grads)
        with self.profiled("post_backward_accumulate"):
            if not self.reduce_grads:
                for param in self.params:
                    param.accumulate_grad()


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

    def accumulate_grad(self) -> None:
        """After a backward that is not reduced: keeps the whole gradient, in the reduce dtype.

        Where no reduce dtype is set (`dtypes.reduce` is None) or the gradient has it already, it may stay where it is, in
        `unsharded_param.grad`, and autograd itself adds the next one to it. Otherwise sums of many micro-batches would
        suffer from the param dtype: then the gradient is taken (`take_grad`, which adds to what there is) and kept as
        `accumulated_grad` in the reduce dtype. Once there is an `accumulated_grad`, it takes in all further gradients.

        Does nothing if the backward left no gradient. Nothing is communicated.
        """
        grad = self.unsharded_param.grad if self.unsharded_param is not None else None
        if grad is None or (self.accumulated_grad is None and self.dtypes.reduce in (None, grad.dtype)):
            return
        taken = self.take_grad()
        assert taken is not None
        self.accumulated_grad = taken if self.dtypes.reduce is None else taken.to(self.dtypes.reduce)
