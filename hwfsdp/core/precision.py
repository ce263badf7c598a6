"""The dtypes of parameters and gradients, and casts of everything that a forward takes or returns.

A parameter has three dtypes. The shard, which the optimizer updates, has the *original* dtype. Gathers and modules use the
*compute* dtype. Gradients are summed in the *reduce* dtype. The usual choice is to gather in bf16, and to reduce and step in
fp32. Then gathers move half the bytes, where precision matters little, and sums have full precision, where errors would add up.
A user may ask for a fourth dtype, for the gradient that the optimizer sees: `Tensor.grad_dtype`.

Modules take and return tensors wrapped in tuples, lists, dicts, named tuples and dataclasses. `map_tensors` rebuilds such a
structure with every tensor replaced. A part in which nothing changed is handed back as the same object, so structures without
tensors pass through untouched.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from hwfsdp.core import compat


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes of one module.

    Attributes:
        param_dtype: the dtype of unsharded parameters, and so of gathers and computation. None: the original dtype.
        reduce_dtype: the dtype of the gradient reduction. None: with torch 2.15, the `grad_dtype` of each parameter, which is its
            original dtype unless set; with older torch, the dtype of the gradients, which is the param dtype.
        output_dtype: floating-point outputs of forward are cast to it. None: no cast.
        cast_forward_inputs: if True, floating-point inputs of forward are cast to `param_dtype`.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


class Dtypes(NamedTuple):
    """The dtypes of one parameter.

    Attributes:
        orig: its shard's dtype. compute: the dtype in which it is gathered.
        reduce: the dtype of the reduction; None: gradients keep their dtype.
        grad: the dtype of the shard's gradient; None: the dtype in which it was reduced.
    """

    orig: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype | None
    grad: torch.dtype | None


def resolve_dtypes(param: Tensor, policy: MixedPrecisionPolicy) -> Dtypes:
    """Return the dtypes of a parameter under `policy`. The policy does not apply to a parameter that is not floating-point."""
    orig = param.dtype
    compute, reduce = (policy.param_dtype, policy.reduce_dtype) if orig.is_floating_point else (None, None)
    if compat.REDUCES_IN_GRAD_DTYPE:
        return Dtypes(orig, compute or orig, reduce or param.grad_dtype, param.grad_dtype)
    needs_no_cast = reduce == compute  # gradients have this dtype already, or no other is asked for
    return Dtypes(orig, compute or orig, None if needs_no_cast else reduce, orig)


def cast_floating(tree: Any, dtype: torch.dtype) -> Any:
    """Return `tree` with every floating-point tensor in `dtype`; everything else is the same object as before.

    Autograd records the cast.
    """

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor

    return map_tensors(cast, tree)


# --- Tensors inside structures -------------------------------------------------------------------------------


def map_tensors(fn: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Return `tree` with `fn(t)` in place of every tensor t, visited from left to right.

    Dict keys, sets, strings and objects of unknown types are leaves and stay as they are.
    """
    if isinstance(tree, Tensor):
        return fn(tree)
    if type(tree) in (tuple, list):  # most trees are, and this is the quickest test
        return _map_sequence(fn, tree)
    if isinstance(tree, PackedSequence):  # its batch sizes stay on the CPU
        moved = {n: map_tensors(fn, getattr(tree, n)) for n in ("data", "sorted_indices", "unsorted_indices")}
        return tree if moved["data"] is tree.data else tree._replace(**moved)
    if isinstance(tree, dict):  # before dataclasses: the output classes of model libraries are both
        return _map_dict(fn, tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return _map_dataclass(fn, tree)
    if isinstance(tree, list | tuple):
        return _map_sequence(fn, tree)
    return tree


def _map_dict(fn: Callable[[Tensor], Tensor], tree: dict[Any, Any]) -> Any:
    new = {key: map_tensors(fn, value) for key, value in tree.items()}
    if all(new[key] is tree[key] for key in tree):
        return tree
    result = copy.copy(tree)  # of the same class, with its default factory, its order and its attributes
    attributes = getattr(tree, "__dict__", {})
    for key, value in new.items():
        result[key] = value
        if key in attributes and attributes[key] is tree[key]:  # where items are attributes, too
            setattr(result, key, value)
    return result


def _map_dataclass(fn: Callable[[Tensor], Tensor], tree: Any) -> Any:
    old = {f.name: getattr(tree, f.name) for f in dataclasses.fields(tree) if hasattr(tree, f.name)}
    new = {name: map_tensors(fn, value) for name, value in old.items()}
    if all(new[name] is old[name] for name in old):
        return tree
    result = copy.copy(tree)  # not `replace`: fields may be init=False, and __post_init__ ran already
    for name, value in new.items():
        object.__setattr__(result, name, value)
    return result


def _map_sequence(fn: Callable[[Tensor], Tensor], tree: list[Any] | tuple[Any, ...]) -> Any:
    new = [map_tensors(fn, value) for value in tree]
    if all(map(operator.is_, new, tree)):
        return tree
    if hasattr(tree, "_fields"):  # a named tuple
        return type(tree)(*new)
    return type(tree)(new)


def tensors_with_grad(tree: Any) -> list[Tensor]:
    """Return the tensors in `tree` that require grad, from left to right."""
    found: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            found.append(tensor)
        return tensor

    map_tensors(collect, tree)
    return found


def replace_tensors_with_grad(tree: Any, replacements: list[Tensor]) -> Any:
    """Return `tree` with its tensors that require grad replaced, in the order of `tensors_with_grad`."""
    queue = iter(replacements)
    return map_tensors(lambda tensor: next(queue) if tensor.requires_grad else tensor, tree)
