"""Explain reads of parameters that are freed or sharded.

A whole parameter is the same object for the life of the model, also while its memory is freed (`core.layout`). Code that kept it, or a
view of it, may read it then. torch answers with "setStorage: … storage of size 0", or crashes. So a freed parameter has another
class, `FreedParameter`, whose operations raise an error that names the parameter. While the parameter is whole, its class is
`WholeParameter`, which notices when the program takes or sets `data`. DTensors, and classes that a program derived from
`nn.Parameter`, keep their class.

The class does not see what autograd saved, nor views. An error that torch raises about them in a backward, or in the forward of
the outermost module, is explained, too. Such reads elsewhere end in torch's own error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hwfsdp.errors import StateError, UnsupportedError, UsageError
from hwfsdp.features import private_autograd
from hwfsdp.features.lookup import all_groups, parameter_of

if TYPE_CHECKING:
    from hwfsdp.features.feature_param import FSDPParam

_FREED = ("out of bounds for storage of size 0", "data is not allocated yet")
_SHARDED = "mixed torch.Tensor and DTensor"
_BYTES = re.compile(r"requiring a storage size of (\d+)")
_CAUSES = (
    "Likely causes: (1) Code outside the module's forward computes with the parameter, or with a view of it: compute inside, or keep "
    "a copy, weight.clone(). (2) A method other than forward uses it: register_fsdp_forward_method(module, name). (3) Another "
    "module uses it: shard both in one call, fully_shard([a, b]), or leave this one to the group of the module around both. "
    "(4) state_dict() or load_state_dict() ran in the forward, which puts the shards back: call it outside. "
    "Or keep it whole: fully_shard(module, reshard_after_forward=False), or unshard() before the read and reshard() after it."
)
_WATCHED_INPUT = ("CallInBackward", "is a view and is being modified inplace")
_IN_PLACE = UnsupportedError(
    "forward of a sharded module with several inputs that need a gradient",
    expected="inputs that it only reads, because autograd watches them together",
    got="an operation in place on one of them",
    remedy="Write x = x + y in place of x += y, or change a copy, x.clone().",
)

# --- Parameters ----------------------------------------------------------------------------------------------


class WholeParameter(nn.Parameter):
    """The class of a whole parameter. It notices that the program takes or sets its `data` (`user_changes`, Note [Writes to whole parameters])."""

    @property
    def data(self) -> Tensor:
        # a compiler cannot trace the look-up
        param = None if torch.compiler.is_compiling() else parameter_of(self)
        if param is not None:
            param.group.seen.given.add(param)
        return super().data

    @data.setter
    def data(self, value: Tensor) -> None:
        """Copy the values into the memory that gathers fill. It cannot be replaced."""
        param = parameter_of(self)
        if value.shape != self.shape:
            raise UsageError(
                f"data of parameter {param.name if param else ''!r}",
                expected=f"a tensor of shape {tuple(self.shape)}",
                got=str(tuple(value.shape)),
                remedy="Change shapes before fully_shard.",
            )
        if param and (value.dtype, value.device) != (self.dtype, self.device):
            param.warn_once(
                f"is whole, and stays {self.dtype} on {self.device}: only the values that it got as {value.dtype} on {value.device} "
                "are copied. To convert a module, call reshard() on the sharded one first."
            )
        self.data.copy_(value.detach().clone())  # `value` may be a view of this memory

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return repr(nn.Parameter(self.detach(), requires_grad=self.requires_grad))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied = memo.setdefault(id(self), nn.Parameter(self.detach().clone(), self.requires_grad))
        assert isinstance(copied, nn.Parameter)
        return copied


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
        with private_autograd.plain_class():
            return func(*args, **kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        param = parameter_of(self)
        return f"<freed parameter {param.name if param else ''!r} of shape {tuple(self.shape)}>"


def freed_in(arguments: Any) -> Iterator[FSDPParam]:
    """Yield the freed parameters among the arguments of an operation."""
    if type(arguments) is FreedParameter and (param := parameter_of(arguments)):
        yield param
    elif isinstance(arguments, dict | list | tuple):
        for each in arguments.values() if isinstance(arguments, dict) else arguments:
            yield from freed_in(each)


# --- Errors --------------------------------------------------------------------------------------------------


def refused_read(params: Sequence[FSDPParam], operation: str) -> StateError:
    """Make the error of an operation that reads freed or sharded parameters."""
    names = sorted({f"{param.name!r} of group {param.group.name!r}" for param in params})
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return StateError(
        f"parameter {', '.join(names[:3])}{more}",
        expected="reads only while the group is gathered: in the forward of its module, and in its backward",
        got=f"{operation}, while its memory is freed and the rank has only its shard",
        remedy=_CAUSES,
    )


def explained_in_backward(error: RuntimeError, inputs: private_autograd.Inputs) -> Exception | None:
    """Return our error in place of torch's about freed memory, or about `inputs` that it did not find; None for any other error."""
    if "not have been used in the graph" in str(error):
        return explained_grad(inputs)
    return explained_read(error, "a backward", guess=True)


def explain_in_forward(error: BaseException | None) -> None:
    """Replace the text of torch's error about freed or sharded parameters, or about inputs. `error` leaves a forward."""
    if isinstance(error, RuntimeError):
        is_watched = all(part in str(error) for part in _WATCHED_INPUT)
        explained = _IN_PLACE if is_watched else explained_read(error, "a forward", guess=False)
        error.args = error.args if explained is None else (str(explained),)


def explained_read(error: RuntimeError, operation: str, guess: bool) -> StateError | None:
    """Return our error in place of torch's about a read of freed or sharded parameters; None for any other error.

    It names the parameters that the code in the traceback uses. If there are none, as in a backward, it names the freed ones of the
    size in torch's message, of models whose forward or backward is running. If there are none either, it names all freed ones of these
    models, if it may `guess`.
    """
    is_sharded, is_freed = _SHARDED in str(error), any(part in str(error) for part in _FREED)
    if not is_sharded and not is_freed:
        return None
    found = named_in(
        error.__traceback__, {id(p.sharded_param if is_sharded else p.unsharded_param): p for p in params()}
    )
    if is_freed and not found:
        freed = [p for p in params() if type(p.unsharded_param) is FreedParameter and is_running(p)]
        size = _BYTES.search(str(error))
        exact = [
            p for p in freed if size and p.layout.shape.numel() * p.dtypes.compute.itemsize == int(size[1])
        ]
        found = exact or (freed if guess else [])
    return refused_read(found, operation) if found else None


def is_running(param: FSDPParam) -> bool:
    """True if a forward or a backward of the parameter's model is running, or an exception has ended it."""
    root, callbacks = param.group.state.root, param.group.comm_ctx.callbacks
    return root.forward_root is not None or any(root is of for of, _ in callbacks)


def named_in(traceback: TracebackType | None, by_object: dict[int, FSDPParam]) -> list[FSDPParam]:
    """Return the parameters that the innermost frame of a traceback uses, of those frames that use any.

    Args:
        by_object: the parameters to look for, by the id of their tensor.
    """
    found: list[FSDPParam] = []
    while traceback is not None:
        used = list(used_in(traceback.tb_frame, by_object))
        found, traceback = used or found, traceback.tb_next
    return found


def used_in(frame: FrameType, by_object: dict[int, FSDPParam]) -> Iterator[FSDPParam]:
    """Yield the parameters that a frame holds in a variable, or reaches from a module by names that its code has."""
    names = {*frame.f_code.co_names}
    for value in frame.f_locals.values():
        if isinstance(value, Tensor) and id(value) in by_object:
            yield by_object[id(value)]
        elif isinstance(value, nn.Module):
            for name, param in value.named_parameters():
                parts = {part for part in name.split(".") if not part.isdigit()}
                if id(param) in by_object and parts <= names:
                    yield by_object[id(param)]


def params() -> Iterator[FSDPParam]:
    """Yield the parameters of all models of this process."""
    for group in all_groups():
        yield from group.params


def with_wholes(inputs: private_autograd.Inputs) -> private_autograd.Inputs:
    """Return the `inputs` of a backward, and the whole parameter of each sharded one. The graph of a forward has the whole ones."""
    wholes = {id(p.sharded_param): p.unsharded_param for p in params() if p.unsharded_param is not None}
    found = [wholes.get(id(tensor)) for tensor in inputs if isinstance(tensor, DTensor)]
    return (*inputs, *(whole for whole in found if whole is not None))


def explained_grad(inputs: private_autograd.Inputs) -> UnsupportedError | None:
    """Return our error in place of torch's if `torch.autograd.grad` did not find sharded parameters in the graph."""
    names = {id(param.sharded_param): param.name for param in params()}
    asked = [names[id(tensor)] for tensor in inputs if id(tensor) in names]
    if not asked:
        return None
    return UnsupportedError(
        f"torch.autograd.grad: parameter {asked[0]!r}",
        expected="whole tensors as inputs, which the graph of a forward has",
        got="a sharded parameter, whose gradient is known only after a reduction over all ranks",
        remedy="Call backward(), and read .grad. For this rank's gradient alone, use reshard_after_forward=False, and pass the "
        "parameter that the module has after the forward.",
    )
