"""Exercise 05: Forward"""

from __future__ import annotations

from typing import Any

import torch

from hwfsdp import compat
from hwfsdp.collectives import copy_out
from hwfsdp.compat import outside_autograd
from hwfsdp.hooks import Phase
from hwfsdp.param import ShardedState
from hwfsdp.watch import WatchedOutputs

# The package's own, that the docstrings name:
#
# hwfsdp.group
#     property   ParamGroup.is_unsharded -> bool
#     attribute  ParamGroup._gathered: Gathered | None
#     method     ParamGroup._gather() -> Gathered
#     method     ParamGroup.wait_for_gather() -> None
#     method     ParamGroup.drop_gather() -> None
#     method     ParamGroup.reshard_after_forward() -> None
#     method     FSDPCommContext.keep_until_copied_out(gathered: Gathered) -> None
#     method     FSDPCommContext.note_forward(group: ParamGroup) -> None
# hwfsdp.param
#     method     FSDPParam.allocate() -> list[Tensor]
#     method     FSDPParam.to_unsharded() -> None
#     method     FSDPParam.to_sharded() -> None
#     attribute  FSDPParam.state
#     attribute  FSDPParam.gather_mesh: ShardMesh
# hwfsdp.collectives
#     class      Gathered(flat: Tensor, sizes: list[int], done: StreamEvent, module_fqn: str = '')
#     function   copy_out(gathered: Gathered, wholes: Sequence[Tensor], owner: str) -> None
# hwfsdp.hooks
#     property   FSDPState.groups -> list[ParamGroup]
#     attribute  FSDPState.comm_ctx: FSDPCommContext
#     method     FSDPState.prefetch_forward() -> None
#     attribute  FSDPState.phase
#     attribute  FSDPState.to_run: set[nn.Module]
#     attribute  FSDPState.root: RootContext
#     attribute  RootContext.backwards: int
# hwfsdp.compat
#     function   in_backward() -> bool
# hwfsdp.watch
#     class      WatchedOutputs(before_backward: Callable[[], None], backwards: Callable[[], int])
#     method     WatchedOutputs.watch(output: Any) -> None


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

    def unshard(self) -> None:
        """Starts to gather the parameters, and returns before they are there.

        Does nothing if they are whole (`is_unsharded`), or on their way: then `_gathered` holds the gather in flight, a
        `Gathered`, which `_gather` returns.
        """
        if self._gathered is None and not self.is_unsharded:
            self._gathered = self._gather()

    @outside_autograd
    def finish_unshard(self) -> None:
        """Puts what was gathered into the modules' parameters; compute has waited for the gather.

        Does nothing if no gather is in flight (`_gathered` is None). Otherwise, in this order:
        - The gather is this group's no more: `_gathered` is None, so that the next `unshard` may start another.
        - Every parameter, in order, allocates its memory (`FSDPParam.allocate` returns a list of tensors to write to), and
          `copy_out` spreads the flat buffer over all of them, in that order.
        - The flat buffer, which the copies still read, is kept until they are over (`comm_ctx.keep_until_copied_out`).
        - Every parameter registers its whole form (`FSDPParam.to_unsharded`).
        """
        if self._gathered is None:
            return
        gathered, self._gathered = self._gathered, None
        copy_out(gathered, [memory for p in self.params for memory in p.allocate()], self.fqn)
        self.comm_ctx.keep_until_copied_out(gathered)
        for param in self.params:
            param.to_unsharded()

    @outside_autograd
    def reshard(self) -> None:
        """The modules have the shards afterwards; the whole parameters' memory is free.

        Every parameter that is not in state SHARDED goes there (`FSDPParam.to_sharded`). One that is stays as it is, so
        that calling this twice does no harm.

        Before that, if the next gather is one of larger shards (`gather_mesh` of the parameters is not the group's
        `mesh`): those shards are about to go, and a gather in flight may still read them, so compute waits for it
        (`wait_for_gather`) and it is forgotten (`drop_gather`). A gather over `mesh` reads the shards that stay, and
        remains in flight.
        """
        if (
            self.params[0].gather_mesh is not self.mesh
        ):  # larger shards are about to go; a gather may be reading them
            self.wait_for_gather()
            self.drop_gather()
        for param in self.params:
            if param.state is not ShardedState.SHARDED:
                param.to_sharded()


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

    def gather_for_forward(self, prefetch: bool) -> None:
        """Gives the modules their whole parameters, before one of them computes with them.

        Four steps. The gather of every group in `groups` (one, or none where other states claimed all parameters) is
        started (`ParamGroup.unshard`, which knows whether it was started ahead), and compute waits for it
        (`wait_for_gather`). Then, if `prefetch`, the gather of the group expected next is started (`prefetch_forward`, whether
        or not there is a group here): not earlier, or this group would share the wire with it; not later, or it would miss
        the time that the copy-out takes. At last the unshards are finished (`finish_unshard`): the gathered bytes are copied
        out and the whole parameters registered.

        Args:
            prefetch: off in a recomputation, and for further modules of a group whose forward is open.
        """
        for group in self.groups:
            group.unshard()
            group.wait_for_gather()
        if prefetch:
            self.prefetch_forward()
        for group in self.groups:
            group.finish_unshard()

    def complete_forward(self, output: Any) -> None:
        """After the forward of all modules of this state: gives the memory back and prepares the backward.

        Args:
            output: what the last of the modules returned: a tensor, or anything that holds some. It is only read.

        In this order:
        - The group, if there is one, is freed if it is to be (`ParamGroup.reshard_after_forward` knows), and its forward
          is noted with `comm_ctx.note_forward`: the backward gathers ahead in the reverse order. Neither happens while a
          backward runs (`compat.in_backward`), that is, in a recomputation, whose parameters the backward needs next.
        - The phase is IDLE, and `to_run` empty.
        - If gradients are enabled, the tensors in `output` that need one will call `on_pre_backward` when theirs is
          there: `WatchedOutputs(self.on_pre_backward, lambda: self.root.backwards).watch(output)`.
        """
        if self.group and not compat.in_backward():
            self.group.reshard_after_forward()
            self.comm_ctx.note_forward(self.group)
        self.phase = Phase.IDLE
        self.to_run.clear()
        if torch.is_grad_enabled():
            WatchedOutputs(self.on_pre_backward, lambda: self.root.backwards).watch(output)
