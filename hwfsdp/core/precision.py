"""The dtypes of parameters and gradients, and casts of everything that a forward takes or returns.

A parameter has three dtypes. The shard, which the optimizer updates, has the *original* dtype. Gathers and modules use the
*compute* dtype. Gradients are summed in the *reduce* dtype. The usual choice is to gather in bf16, and to reduce and step in
fp32. Then gathers move half the bytes, where precision matters little, and sums have full precision, where errors would add up.
A user may ask for a fourth dtype, for the gradient that the optimizer sees: `Tensor.grad_dtype`.

Modules take and return tensors wrapped in tuples, lists, dicts, named tuples and dataclasses. `map_tensors` rebuilds such a
structure with every tensor replaced. A part in which nothing changed is handed back as the same object, so structures without
tensors pass through untouched. A caller may map lists, dicts and the like in another way, for example in place.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from hwfsdp.core import private_torch

Fn = Callable[[Tensor], Tensor]
MapTree = Callable[[Fn, Any], Any]


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
    if private_torch.REDUCES_IN_GRAD_DTYPE:
        return Dtypes(orig, compute or orig, reduce or param.grad_dtype, param.grad_dtype)
    needs_no_cast = reduce == compute  # both None, or gradients already come out in this dtype
    return Dtypes(orig, compute or orig, None if needs_no_cast else reduce, orig)


def cast_floating(tree: Any, dtype: torch.dtype, map_tree: MapTree) -> Any:
    """Return `tree` with every floating-point tensor in `dtype`; everything else is the same object as before.

    `map_tree` replaces the tensors, as `map_tensors` does. Autograd records the cast.
    """

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor

    return map_tree(cast, tree)


# --- Tensors inside structures -------------------------------------------------------------------------------


def map_tensors(fn: Fn, tree: Any, map_mutable: MapTree | None = None) -> Any:
    """Return `tree` with `fn(t)` in place of every tensor t, visited from left to right.

    Dict keys, sets, strings and objects of unknown types are leaves and stay as they are. If `map_mutable` is given, it is called
    for every list, dict and dataclass that is not frozen: `map_mutable(fn, container)` returns what takes the container's place.
    """
    if isinstance(tree, Tensor):
        return fn(tree)
    if map_mutable and is_mutable(tree):
        return map_mutable(fn, tree)
    if type(tree) in (tuple, list):  # most trees are, and this is the quickest test
        return _map_sequence(fn, tree, map_mutable)
    if isinstance(tree, PackedSequence):  # its batch sizes stay on the CPU
        moved = {n: map_tensors(fn, getattr(tree, n)) for n in ("data", "sorted_indices", "unsorted_indices")}
        return tree if moved["data"] is tree.data else tree._replace(**moved)
    if isinstance(tree, dict):  # before dataclasses: the output classes of model libraries are both
        return _map_dict(fn, tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return _map_dataclass(fn, tree, map_mutable)
    if isinstance(tree, list | tuple):
        return _map_sequence(fn, tree, map_mutable)
    return tree


def is_mutable(tree: Any) -> bool:
    """True for a container that a module may write into: a list, a dict, or a dataclass that is not frozen."""
    if isinstance(tree, list | dict):
        return True
    return hasattr(type(tree), "__dataclass_fields__") and not type(tree).__dataclass_params__.frozen


def _map_dict(fn: Fn, tree: dict[Any, Any]) -> Any:
    new = {key: map_tensors(fn, value) for key, value in tree.items()}
    if all(new[key] is tree[key] for key in tree):
        return tree
    result = copy.copy(tree)  # of the same class, with its default factory, its order and its attributes
    for key, value in new.items():
        set_item(result, key, value)
    return result


def set_item(tree: dict[Any, Any], key: Any, value: Any) -> None:
    """Replace an item of a dict, also where items are attributes, too."""
    attributes = getattr(tree, "__dict__", {})
    is_attribute = key in attributes and attributes[key] is tree[key]
    dict.__setitem__(tree, key, value)  # a class may forbid its own method
    if is_attribute:
        setattr(tree, key, value)


def _map_dataclass(fn: Fn, tree: Any, map_mutable: MapTree | None) -> Any:
    old = fields_of(tree)
    new = {name: map_tensors(fn, value, map_mutable) for name, value in old.items()}
    if all(new[name] is old[name] for name in old):
        return tree
    result = copy.copy(tree)  # not `replace`: fields may be init=False, and __post_init__ ran already
    for name, value in new.items():
        object.__setattr__(result, name, value)
    return result


def fields_of(tree: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that are set."""
    return {f.name: getattr(tree, f.name) for f in dataclasses.fields(tree) if hasattr(tree, f.name)}


def _map_sequence(fn: Fn, tree: list[Any] | tuple[Any, ...], map_mutable: MapTree | None) -> Any:
    new = [map_tensors(fn, value, map_mutable) for value in tree]
    if all(map(operator.is_, new, tree)):
        return tree
    if hasattr(tree, "_fields"):  # a named tuple
        return type(tree)(*new)
    return type(tree)(new)


def tensors_with_grad(tree: Any, map_tree: MapTree = map_tensors) -> list[Tensor]:
    """Return the tensors in `tree` that a backward may reach, from left to right. They require grad (`private_torch.may_need_grad`)."""
    found: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        if private_torch.may_need_grad(tensor):
            found.append(tensor)
        return tensor

    map_tree(collect, tree)
    return found


def replace_tensors_with_grad(tree: Any, new: Iterable[Tensor], map_tree: MapTree = map_tensors) -> Any:
    """Return `tree` with `new` in place of its tensors that a backward may reach, in the order of `tensors_with_grad`."""
    queue = iter(new)
    return map_tree(lambda tensor: next(queue) if private_torch.may_need_grad(tensor) else tensor, tree)
