"""Exercise 07: Mixed precision"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hwfsdp import compat
from hwfsdp.compat import outside_autograd
from hwfsdp.errors import UsageError
from hwfsdp.hooks import Args, Kwargs
from hwfsdp.nested import map_tensors
from hwfsdp.param import FSDPParam
from hwfsdp.precision import Dtypes, MixedPrecisionPolicy

# The package's own, that the docstrings name:
#
# hwfsdp.precision
#     class      Dtypes(orig: torch.dtype, param: torch.dtype | None, reduce: torch.dtype | None)
#     class      MixedPrecisionPolicy(param_dtype: torch.dtype | None = None,
#                    reduce_dtype: torch.dtype | None = None, output_dtype: torch.dtype | None = None,
#                    cast_forward_inputs: bool = True)
# hwfsdp.nested
#     function   map_tensors(fn: Callable[[Tensor], Tensor], tree: Any) -> Any
# hwfsdp.hooks
#     attribute  FSDPState.policy: MixedPrecisionPolicy
# hwfsdp.param
#     attribute  FSDPParam.dtypes: Dtypes
#     method     FSDPParam.add_sharded_grad(grad: Tensor) -> None
# hwfsdp.group
#     method     ParamGroup.pieces(params: Sequence[FSDPParam], result: Tensor) -> list[tuple[FSDPParam,
#                    Tensor]]
# hwfsdp.errors
#     class      UsageError(subject: str, *, expected: str, got: str, remedy: str)


def resolve_dtypes(orig: torch.dtype, policy: MixedPrecisionPolicy) -> Dtypes:
    """The dtypes of a parameter of dtype `orig` under `policy`, casts that change nothing left out.

    Returns:
        `orig` as given. `param`: the policy's; None if it equals `orig`, or if `orig` is not floating-point: an integer
        parameter is never cast. `reduce`: the policy's; None if it equals the policy's param dtype, since gradients come in
        that dtype already. A policy without any dtype gives (orig, None, None).
    """
    # TODO(07)
    raise NotImplementedError


def cast_floating(tree: Any, dtype: torch.dtype) -> Any:
    """`tree` with every floating-point tensor in `dtype`.

    Args:
        tree: a tensor, or lists, tuples, dicts, dataclasses, … of them, as forwards take and return; `map_tensors` maps a
            function over the tensors in it.

    Integer, boolean and complex tensors, floating-point ones that have the dtype already, and whatever is no tensor come
    back as the same object. Autograd sees through the cast.
    """
    # TODO(07)
    raise NotImplementedError


def copy_in(
    shards: Sequence[Tensor], dtypes: Sequence[torch.dtype], part: Tensor, sizes: Sequence[int]
) -> None:
    """Lays shards end to end in `part`, each cast to its dtype: what this rank contributes to a gather.

    Casting here, before anything travels, is what makes a bf16 gather move half the bytes of an fp32 one. The shards
    themselves stay in their dtype.

    Args:
        shards: 1D, of any dtype; only read. dtypes: what to gather each in.
        part: [sum(sizes)], written completely. If all `dtypes` are the same, it has that dtype. If they differ it is uint8,
            and each shard's elements, cast to its dtype, lie there as bytes (`tensor.view(torch.uint8)`).
        sizes: elements of `part` that each shard fills.
    """
    # TODO(07)
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

    def cast_inputs(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """The inputs of a forward in the dtype of its parameters.

        Floating-point tensors anywhere in `args` and `kwargs` come back in the policy's `param_dtype`, if it has one and
        `cast_forward_inputs` is on; everything else, and everything otherwise, is the same object as before.
        """
        # TODO(07)
        raise NotImplementedError

    def cast_outputs(self, output: Any) -> Any:
        """The output of a forward, floating-point tensors in the policy's `output_dtype`.

        Without an output dtype it is returned as it is, the same object.
        """
        # TODO(07)
        raise NotImplementedError


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

    def reduce_dtype(self, params: Sequence[FSDPParam], grads: Sequence[Tensor]) -> torch.dtype:
        """What to reduce these gradients in.

        Each parameter's reduce dtype (`dtypes.reduce`), or, where that is None, the dtype in which autograd left its
        gradient. A group is reduced in one buffer, so there has to be one answer for all.

        Args:
            params, grads: of the same length, not empty: parameters and their whole gradients.

        Raises:
            UsageError: there are several answers, because no reduce dtype was set and gradients differ. It is made of texts:
                `UsageError(what it is about, expected=…, got=…, remedy=…)`.
        """
        # TODO(07)
        raise NotImplementedError

    @outside_autograd
    def add_sharded_grads(self, params: Sequence[FSDPParam], result: Tensor) -> None:
        """Adds the result of a reduction to the sharded parameters' gradients, in the dtype of the shards.

        Args:
            params: those that were reduced. result: [n], reduce dtype; see `pieces`, which cuts it.

        Each piece is cast to its parameter's original dtype (`dtypes.orig`), in which the optimizer computes, and handed
        to `FSDPParam.add_sharded_grad`. Where all parameters have one original dtype, a single cast of `result` does.
        """
        # TODO(07)
        raise NotImplementedError
