"""Explain reads of parameters that are freed or sharded. Seam: the parameter.

A whole parameter is the same object for the life of the model, also while its memory is freed (`core.form`). Code that kept it, or a
view of it, may read it then. torch answers with "setStorage: … storage of size 0", or crashes. So a freed parameter has another
class, `FreedParameter`, whose operations raise an error that names the parameter. While the parameter is whole, its class is
`nn.Parameter`, and costs nothing.

The class does not see what autograd saved, nor views. An error that torch raises about them in a backward, or in the forward of
the outermost module, is explained, too. Such reads elsewhere end in torch's own error.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from hwfsdp.core.group import ParamGroup
from hwfsdp.core.param import ShardedState
from hwfsdp.core.state import Args, FSDPState
from hwfsdp.errors import MissingParameterError, StateError, UnsupportedError
from hwfsdp.features import compat
from hwfsdp.features.call import Call
from hwfsdp.features.lookup import parameter_of
from hwfsdp.features.param_changes import WatchedParam

_FREED = ("out of bounds for storage of size 0", "data is not allocated yet")
_SHARDED = "mixed torch.Tensor and DTensor"
_BYTES = re.compile(r"requiring a storage size of (\d+)")
_CAUSES = (
    "Likely causes: (1) Code outside the module's forward computes with the parameter, or with a view of it: compute inside, or keep "
    "a copy, weight.clone(). (2) A method other than forward uses it: register_fsdp_forward_method(module, name). (3) Another "
    "module uses it: shard both in one call, fully_shard([a, b]), or leave this one to the group of the module around both. "
    "Or keep it whole: fully_shard(module, reshard_after_forward=False), or unshard() before the read and reshard() after it."
)
_groups: WeakSet[ParamGroup] = WeakSet()


def choose(call: Call) -> None:
    """Guard the parameters. Explain errors of this module's forwards, and of backwards from now on."""
    compat.watch_backwards(explain=explained_in_backward)
    call.states.insert(0, ExplainingState)
    call.make_param = GuardedParam


def joined(call: Call, state: FSDPState) -> None:
    """Remember the groups, because errors name them."""
    _groups.update(state.groups)


# --- Parameters ----------------------------------------------------------------------------------------------


class GuardedParam(WatchedParam):
    """A parameter whose whole tensor refuses to be read while its memory is freed."""

    @property
    def group_name(self) -> str:
        group = self.group()
        return group.fqn if group else ""

    def to_unsharded(self) -> None:
        if type(self.unsharded_param) is FreedParameter:
            compat.become(self.unsharded_param, nn.Parameter)
        super().to_unsharded()

    def to_sharded(self) -> None:
        super().to_sharded()
        if type(self.unsharded_param) is nn.Parameter and not self.keeps_memory:
            compat.become(self.unsharded_param, FreedParameter)

    def take_grad(self) -> Tensor | None:
        """Return the whole gradient.

        Raises:
            UnsupportedError: the gradient is sparse, and cannot be cut into rows.
        """
        grad = self.unsharded_param.grad if self.unsharded_param is not None else None
        if grad is not None and grad.layout is not torch.strided:
            raise UnsupportedError(
                f"gradient of parameter {self.fqn!r}",
                expected="a dense gradient",
                got=f"one of layout {grad.layout}",
                remedy="Build the layer with sparse=False, or leave it out: fully_shard(…, ignored_params={its weight}).",
            )
        return super().take_grad()

    def adopt_registered(self) -> None:
        """Adopt the parameter that is registered now.

        Raises:
            MissingParameterError: there is none. UsageError: it is cut in another way.
        """
        for module, name in self.places if self.state is ShardedState.SHARDED else ():
            if not isinstance(compat.registered_at(module, name), nn.Parameter):
                got, remedy = what_is_at(module, name)
                expected = f"the DTensor that fully_shard registered as {name!r} of {type(module).__name__}"
                raise MissingParameterError(
                    f"parameter {self.fqn!r}", expected=expected, got=got, remedy=remedy
                )
        super().adopt_registered()


def what_is_at(module: nn.Module, name: str) -> tuple[str, str]:
    """Return what a module has in place of a parameter, and what to do."""
    if name in getattr(module, "parametrizations", ()):
        return (
            "a parametrization, registered after fully_shard",
            "Register parametrizations before fully_shard.",
        )
    found = compat.registered_at(module, name)
    if found is None:
        return "none", "Delete or replace parameters (weight_norm does it, too) before fully_shard."
    return (
        f"a {type(found).__name__} that is no parameter",
        "Call the model with its own parameters: load others by load_state_dict, instead of torch.func.functional_call. Use "
        "weight_norm, spectral_norm and prune before fully_shard.",
    )


READABLE = frozenset(  # of a freed parameter
    "__get__ __set__ __delete__ __len__ size dim ndimension numel nelement element_size stride storage_offset is_contiguous "
    "is_floating_point is_complex is_shared get_device data_ptr untyped_storage requires_grad_ register_hook "
    "register_post_accumulate_grad_hook empty_like zeros_like ones_like new_empty new_zeros new_ones".split()
)
UNREADABLE = frozenset("T mT H mH real imag data".split())  # properties that read, or give the memory away


class FreedParameter(nn.Parameter):
    """The class of a whole parameter while its memory is freed. Operations that read elements raise StateError."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        of = getattr(getattr(func, "__self__", None), "__name__", "")  # the name of a property
        if name not in READABLE or of in UNREADABLE:
            raise refused_read(list(freed_in((args, kwargs))), of or name.strip("_"))
        with compat.plain_class():
            return func(*args, **kwargs or {})

    grad = property(compat.grad_of, compat.set_grad_of)  # every step looks at it, so it must be quick

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return f"<freed parameter {parameter_of(self).fqn!r} of shape {tuple(self.shape)}>"


def freed_in(arguments: Any) -> Iterator[GuardedParam]:
    """Yield the freed parameters among the arguments of an operation."""
    if type(arguments) is FreedParameter:
        yield parameter_of(arguments)
    elif isinstance(arguments, dict | list | tuple):
        for each in arguments.values() if isinstance(arguments, dict) else arguments:
            yield from freed_in(each)


# --- Errors --------------------------------------------------------------------------------------------------


def refused_read(params: Sequence[GuardedParam], operation: str) -> StateError:
    """Make the error of an operation that reads freed or sharded parameters."""
    names = sorted({f"{param.fqn!r} of group {param.group_name!r}" for param in params})
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return StateError(
        f"parameter {', '.join(names[:3])}{more}",
        expected="reads only while the group is gathered: in the forward of its module, and in its backward",
        got=f"{operation}, while its memory is freed and the rank has only its shard",
        remedy=_CAUSES,
    )


def explained_in_backward(error: RuntimeError) -> StateError | None:
    """Return our error in place of torch's about freed memory; None for any other error."""
    if not any(part in str(error) for part in _FREED):
        return None
    freed = [p for p in params() if type(p.unsharded_param) is FreedParameter]
    size = _BYTES.search(str(error))
    exact = [p for p in freed if size and p.layout.shape.numel() * p.dtypes.compute.itemsize == int(size[1])]
    return refused_read(exact or freed, "a backward") if freed else None


def explain_in_forward(error: BaseException | None, module: nn.Module) -> None:
    """Replace the text of torch's error about freed or sharded parameters. `error` leaves a forward of `module`."""
    if not isinstance(error, RuntimeError) or not any(part in str(error) for part in (*_FREED, _SHARDED)):
        return
    is_freed = _SHARDED not in str(error)
    by_object = {id(param.unsharded_param if is_freed else param.sharded_param): param for param in params()}
    found = list(named_in(error.__traceback__, by_object))
    if found:
        error.args = (str(refused_read(found, "a forward")),)


def named_in(traceback: TracebackType | None, by_object: dict[int, GuardedParam]) -> list[GuardedParam]:
    """Return the parameters that the innermost frame of a traceback uses, of those frames that use any.

    Args:
        by_object: the parameters to look for, by the id of their tensor.
    """
    found: list[GuardedParam] = []
    while traceback is not None:
        used = list(used_in(traceback.tb_frame, by_object))
        found, traceback = used or found, traceback.tb_next
    return found


def used_in(frame: FrameType, by_object: dict[int, GuardedParam]) -> Iterator[GuardedParam]:
    """Yield the parameters that a frame holds in a variable, or reaches from a module by names that its code has."""
    names = {*frame.f_code.co_names}
    for value in frame.f_locals.values():
        if isinstance(value, Tensor) and id(value) in by_object:
            yield by_object[id(value)]
        elif isinstance(value, nn.Module):
            for fqn, param in value.named_parameters():
                parts = {part for part in fqn.split(".") if not part.isdigit()}
                if id(param) in by_object and parts <= names:
                    yield by_object[id(param)]


def params() -> Iterator[GuardedParam]:
    """Yield the parameters of all models of this process."""
    for group in _groups:
        yield from (param for param in group.params if isinstance(param, GuardedParam))


class ExplainingState(FSDPState):
    """A state that explains errors which leave its module's forward."""

    always_call = True

    def post_forward(self, module: nn.Module, args: Args, output: Any) -> Any:
        explain_in_forward(sys.exc_info()[1], module)
        return super().post_forward(module, args, output)
