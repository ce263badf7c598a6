"""Exercise 11: Grouped buffers"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from hwfsdp import compat
from hwfsdp.claim import Unclaimed
from hwfsdp.collectives import Gathered, all_gather
from hwfsdp.compat import outside_autograd
from hwfsdp.hooks import state_of
from hwfsdp.param import FSDPParam, Slot

# The package's own, that the docstrings name:
#
# hwfsdp.hooks
#     function   state_of(module: nn.Module) -> FSDPState | None
# hwfsdp.claim
#     class      Unclaimed(param: nn.Parameter, fqn: str, slots: list[Slot])
# hwfsdp.param
#     class      Slot(module: nn.Module, name: str)
#     method     FSDPParam.gather_inputs() -> list[Tensor]
#     property   FSDPParam.gather_dtypes -> list[torch.dtype]
#     attribute  FSDPParam.gather_mesh: ShardMesh
#     method     FSDPParam.take_grad() -> Tensor | None
#     attribute  FSDPParam.sharded_param: nn.Parameter
#     attribute  FSDPParam.unsharded_param: nn.Parameter | None
#     attribute  FSDPParam.partial_grad: Tensor | None
#     attribute  FSDPParam.dtypes: Dtypes
#     attribute  FSDPParam.local_shape
#     attribute  FSDPParam.padded_numel
# hwfsdp.precision
#     class      Dtypes(orig: torch.dtype, param: torch.dtype | None, reduce: torch.dtype | None)
#     property   Dtypes.gathered -> torch.dtype
# hwfsdp.group
#     attribute  ParamGroup.comm_ctx: FSDPCommContext
#     attribute  ParamGroup.channel: Channel
#     attribute  ParamGroup.mesh: ShardMesh
#     attribute  ParamGroup.reduce_unused: bool
#     attribute  ParamGroup.all_reduce_grads: bool
#     attribute  FSDPCommContext.streams
#     method     FSDPCommContext.release_gather_buffer() -> None
# hwfsdp.streams
#     attribute  StreamSet.copy: Stream
#     method     Stream.run() -> AbstractContextManager[Any]
# hwfsdp.mesh
#     attribute  ShardMesh.shard: Axis
#     attribute  ShardMesh.device: torch.device
# hwfsdp.collectives
#     function   all_gather(shards: Sequence[Tensor], dtypes: Sequence[torch.dtype], axis: Axis,
#                    channel: Channel) -> Gathered
#     class      Gathered(flat: Tensor, sizes: list[int], done: StreamEvent, module_fqn: str = '')


def managed_modules(modules: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """The modules whose parameters a call of `fully_shard` is about, with their prefixes.

    These are `modules` themselves, and all modules below them, down to those that have a state already (`state_of(module)`
    is not None): an earlier call has sharded these, and they and everything below them are left to it.

    In the order of `nn.Module.named_modules`: a module comes before what is below it, children in the order of
    registration (`named_children`), everything below one child before the next one. A module that is reached twice, since it
    is registered at two places, comes once, where it is reached first.

    Args:
        modules: not sharded yet; none of them is below another.

    Yields:
        (prefix, module). A prefix is what to put before the name of a module's parameter: "" for `modules` themselves, and
        "blocks.0.mlp." for what is called `blocks.0.mlp` in the one of `modules` that it is in.
    """
    seen = set[nn.Module]()
    stack = [("", module) for module in reversed(modules)]
    while stack:
        prefix, current = stack.pop()
        if current in seen:
            continue
        seen.add(current)
        yield prefix, current
        children = [(f"{prefix}{name}.", c) for name, c in current.named_children() if state_of(c) is None]
        stack.extend(reversed(children))


def parameters_to_claim(modules: Sequence[nn.Module], ignored: set[nn.Parameter]) -> list[Unclaimed]:
    """The parameters that a call of `fully_shard` makes one group of, frozen ones included.

    They are those of `managed_modules`, without those in `ignored`, in the order in which modules and their parameters were
    registered. Every rank makes this list for itself, and the flat buffers of all ranks have to fit together, so the
    order must follow from the model alone.

    A parameter may be registered at several places, in two modules or twice in one: a *tied* parameter, one object with
    several names. It is listed once, where it comes first, with all its places: whoever exchanges it later has to
    exchange it at every one of them. `module.named_parameters(recurse=False, remove_duplicate=False)` lists a
    module's own parameters with all their names.

    Returns:
        For each an `Unclaimed(param, fqn, slots)`: the fqn is the prefix that `managed_modules` gives and the name in that
        module, of its first place; slots are its places (`Slot(module, name)`), each once, in order.
    """
    found: dict[nn.Parameter, Unclaimed] = {}
    for prefix, module in managed_modules(modules):
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if param not in ignored:
                unclaimed = found.setdefault(param, Unclaimed(param, prefix + name, []))
                unclaimed.slots.append(Slot(module, name))
    return list(found.values())


def copy_columns(flat: Tensor, sizes: Sequence[int], wholes: Sequence[Tensor]) -> None:
    """Copies each tensor's columns of a gather's buffer to that tensor's own memory.

    In the buffer rank is the outer index and tensor the inner one. A tensor's own memory wants all ranks' parts of it one
    after the other, so this is the transposition that undoes what copy-in did on every rank.

    Args:
        flat: [W, n], row r being what rank r contributed: its parts of all tensors, end to end, without gaps. Only read.
        sizes: elements of a row that each tensor has, in order; they sum to n.
        wholes: per tensor, in the same order, [W, *rest], with any strides: row r becomes the part of rank r, elements in
            their logical order; written completely, in place. If all have one dtype, `flat` has it, too, and W * sizes[i]
            is the number of elements of `wholes[i]`. If their dtypes differ, `flat` is uint8 and holds their bytes
            (`whole.view(torch.uint8)` is the same memory, seen so), and sizes count bytes. A piece of `flat` may begin at
            any byte, so it cannot be seen in every other dtype.
    """
    if flat.dtype == torch.uint8:
        wholes = [whole.view(torch.uint8) for whole in wholes]
    if all(whole.is_contiguous() for whole in wholes):
        rows = [
            whole if whole.ndim == 2 else whole.view(len(flat), -1) for whole in wholes
        ]  # [W, of a shard]
        torch.split_with_sizes_copy(flat, sizes, dim=1, out=rows)
    else:
        columns = flat.split(list(sizes), dim=1)
        compat.copy_each(wholes, [c.view(w.shape) for c, w in zip(columns, wholes, strict=True)])


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

    @outside_autograd
    def _gather(self) -> Gathered:
        """Starts to gather all parameters of the group, in one collective; returns the gather in flight.

        - First `comm_ctx.release_gather_buffer()` lets go of the buffer of the gather before.
        - What travels are the tensors that `FSDPParam.gather_inputs()` returns, of all parameters, in the order of `params`: a
          list of one tensor each, or of more where the parameter has an extension. Since an extension may compute them,
          they are asked for on the copy stream: `with comm_ctx.streams.copy.run():`.
        - Each in the dtype that `FSDPParam.gather_dtypes` (a property) says, a list as long.
        - `collectives.all_gather` takes both lists, the axis to gather over, and `channel`. That axis is `gather_mesh.shard` of
          the parameters, which all have the same `gather_mesh`: between forward and backward it may be smaller than `mesh`.
          Frozen parameters travel like others: forward needs them.
        """
        self.comm_ctx.release_gather_buffer()
        with self.comm_ctx.streams.copy.run():  # extensions compute what they gather
            shards = [shard for p in self.params for shard in p.gather_inputs()]
        dtypes = [dtype for p in self.params for dtype in p.gather_dtypes]
        return all_gather(shards, dtypes, self.params[0].gather_mesh.shard, self.channel)

    def take_grads(self) -> tuple[list[FSDPParam], list[Tensor]]:
        """The parameters that have a gradient to reduce, and those gradients, no longer referred to from elsewhere.

        Every parameter is asked for its gradient (`FSDPParam.take_grad`, which hands it over, or returns None). One without
        is left out: autograd leaves none on a frozen parameter, and nobody is to move zeros for it. In two cases, though,
        others count on this rank, and zeros stand for the gradient:

        - `reduce_unused` is on, the parameter is trained (`sharded_param.requires_grad`), and it was gathered at least once
          (`unsharded_param` is not None). Other ranks may have a gradient of it.
        - There is a `partial_grad` from earlier micro-batches, and this backward reduces over the replicas too
          (`all_reduce_grads`): the partial gradient is still to go there.

        Zeros are new, of the parameter's `shape`, in the dtype `dtypes.gathered`, on the device of `mesh`.

        Returns:
            Two lists of the same length, in the order of `params`.
        """
        pairs: list[tuple[FSDPParam, Tensor]] = []
        for param in self.params:
            grad = param.take_grad()
            gathered = param.unsharded_param is not None  # once at least: nobody has run it otherwise
            unused = self.reduce_unused and gathered and param.sharded_param.requires_grad
            if grad is None and (unused or (param.partial_grad is not None and self.all_reduce_grads)):
                grad = torch.zeros(param.shape, dtype=param.dtypes.gathered, device=self.mesh.device)
            if grad is not None:
                pairs.append((param, grad))
        return [p for p, _ in pairs], [grad for _, grad in pairs]

    def pieces(self, params: Sequence[FSDPParam], result: Tensor) -> list[tuple[FSDPParam, Tensor]]:
        """Views of a reduction's result: each parameter's rows of this rank.

        Args:
            result: [n]: this rank's padded chunk of every parameter of `params`, end to end, each `padded_numel` elements
                long. The rows of this rank are at the front of a chunk; the rest of it is padding.

        Returns:
            Each parameter with its rows, `local_shape`, in the order of `params`; no copies.
        """
        chunks = result.split_with_sizes([p.padded_numel for p in params])
        return [
            (p, (chunk if p.local_numel == p.padded_numel else chunk[: p.local_numel]).view(p.local_shape))
            for p, chunk in zip(params, chunks, strict=True)
        ]
