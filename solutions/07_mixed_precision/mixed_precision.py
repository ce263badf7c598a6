"""Exercise 07: Mixed precision"""

from __future__ import annotations

import torch
from collections.abc import Sequence
from torch import Tensor
from typing import Any

from hwfsdp import compat
from hwfsdp.compat import outside_autograd
from hwfsdp.errors import UsageError
from hwfsdp.hooks import Args, Kwargs
from hwfsdp.nested import map_tensors
from hwfsdp.param import FSDPParam
from hwfsdp.precision import Dtypes, MixedPrecisionPolicy


def resolve_dtypes(orig: torch.dtype, policy: MixedPrecisionPolicy) -> Dtypes:
    """The dtypes of a parameter of dtype `orig` under `policy`, casts that change nothing left out.

    Returns:
        `orig` as given. `param`: the policy's; None if it equals `orig`, or if `orig` is not floating-point: an integer
        parameter is never cast. `reduce`: the policy's; None if it equals the policy's param dtype, since gradients come in
        that dtype already. A policy without any dtype gives (orig, None, None).
    """
    reduce = None if policy.reduce_dtype == policy.param_dtype else policy.reduce_dtype
    param = None if policy.param_dtype == orig or not orig.is_floating_point else policy.param_dtype
    return Dtypes(orig, param, reduce)


def cast_floating(tree: Any, dtype: torch.dtype) -> Any:
    """`tree` with every floating-point tensor in `dtype`.

    Args:
        tree: a tensor, or lists, tuples, dicts, dataclasses, … of them, as forwards take and return; `map_tensors` maps a
            function over the tensors in it.

    Integer, boolean and complex tensors, floating-point ones that have the dtype already, and whatever is no tensor come
    back as the same object. Autograd sees through the cast.
    """

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor

    return map_tensors(cast, tree)


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
    if part.dtype == torch.uint8:
        shards = [s.to(d).view(torch.uint8) for s, d in zip(shards, dtypes, strict=True)]
    if shards and all(s.dtype == part.dtype and s.device == part.device for s in shards):
        torch.cat(list(shards), out=part)
    else:
        compat.copy_each(part.split(list(sizes)), shards)


class FSDPState:
    def cast_inputs(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """The inputs of a forward in the dtype of its parameters.

        Floating-point tensors anywhere in `args` and `kwargs` come back in the policy's `param_dtype`, if it has one and
        `cast_forward_inputs` is on; everything else, and everything otherwise, is the same object as before.
        """
        if self.policy.param_dtype is None or not self.policy.cast_forward_inputs:
            return args, kwargs
        cast: tuple[Args, Kwargs] = cast_floating((args, kwargs), self.policy.param_dtype)
        return cast

    def cast_outputs(self, output: Any) -> Any:
        """The output of a forward, floating-point tensors in the policy's `output_dtype`.

        Without an output dtype it is returned as it is, the same object.
        """
        dtype = self.policy.output_dtype
        return output if dtype is None else cast_floating(output, dtype)


class ParamGroup:
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
        dtypes = {p.dtypes.reduce or grad.dtype for p, grad in zip(params, grads, strict=True)}
        if len(dtypes) > 1:
            raise UsageError(
                f"parameter group {self.fqn!r}",
                expected="gradients of one dtype, or a reduce_dtype",
                got=" and ".join(sorted(map(str, dtypes))),
                remedy="Wrap the modules with the other dtype in a fully_shard of their own.",
            )
        return dtypes.pop()

    @outside_autograd
    def add_sharded_grads(self, params: Sequence[FSDPParam], result: Tensor) -> None:
        """Adds the result of a reduction to the sharded parameters' gradients, in the dtype of the shards.

        Args:
            params: those that were reduced. result: [n], reduce dtype; see `pieces`, which cuts it.

        Each piece is cast to its parameter's original dtype (`dtypes.orig`), in which the optimizer computes, and handed
        to `FSDPParam.add_sharded_grad`. Where all parameters have one original dtype, a single cast of `result` does.
        """
        dtypes = {p.dtypes.orig for p in params}
        if len(dtypes) == 1:  # one cast for all
            result = result.to(params[0].dtypes.orig)
        for param, grad in self.pieces(params, result):
            param.add_sharded_grad(grad if grad.dtype == param.dtypes.orig else grad.to(param.dtypes.orig))
