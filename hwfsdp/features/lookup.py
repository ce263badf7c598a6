"""Look-ups that several features need: the groups and parameters of the process, what the stack says."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakSet, ref

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from hwfsdp.features.feature_param import FSDPParam
    from hwfsdp.features.feature_group import ParamGroup

CLAIMED = "_hwfsdp_claimed"  # attribute of a parameter that a sharded parameter has replaced: its name
IGNORED = "_hwfsdp_ignored"  # attribute of a parameter that the user has excluded from sharding
# A parameter that modules have in place of the sharded one, such as the whole one → a weak reference to its FSDPParam. Sharded
# parameters must not be keys: torch cannot convert a DTensor to which there are weak references.
STAND_INS: Any = WeakIdKeyDictionary()
T = TypeVar("T")


class Living(Generic[T]):
    """Objects of this process, as long as they live. Threads may train models at the same time, so one may add while another lists."""

    def __init__(self) -> None:
        self._objects: WeakSet[T] = WeakSet()
        self._lock = threading.Lock()

    def add(self, found: T) -> None:
        with self._lock:
            self._objects.add(found)

    def listed(self) -> list[T]:
        with self._lock:
            return list(self._objects)


_groups: Living[ParamGroup] = Living()
remember, all_groups = _groups.add, _groups.listed  # the groups of all models


def parameter_of(whole: Tensor) -> FSDPParam | None:
    """Return the `FSDPParam` of a parameter that modules had in place of the sharded one; None for any other tensor."""
    owner = STAND_INS.get(whole)
    return owner and owner()  # type: ignore[no-any-return]


# by the id of the sharded parameter, as it was when it was looked up last
_by_shard: dict[int, ref[FSDPParam]] = {}


def owners_of(shards: Iterable[Tensor]) -> list[FSDPParam]:
    """Return the `FSDPParam`s of sharded parameters. Other tensors have none, and are left out."""
    global _by_shard
    shards = list(shards)
    found = [param for shard in shards if (param := _known_owner(shard)) is not None]
    if len(found) < len(shards):  # new models, or parameters that the user has replaced
        _by_shard = {id(param.sharded_param): ref(param) for group in all_groups() for param in group.params}
        found = [param for shard in shards if (param := _known_owner(shard)) is not None]
    return found


def _known_owner(shard: Tensor) -> FSDPParam | None:
    known = _by_shard.get(id(shard))
    param = known() if known is not None else None
    return param if param is not None and param.sharded_param is shard else None


# --- The stack ----------------------------------------------------------------------------------------------


def warn(message: str) -> None:
    """Warn at the line of the program that led here: the innermost one outside of this package and of torch."""
    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("hwfsdp", "torch"):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)


def methods_in_progress() -> Iterator[tuple[str, nn.Module]]:
    """Yield the methods of modules that run in this thread, the innermost first: the name of the method, and the module."""
    frame = sys._getframe().f_back
    while frame is not None:
        # Before Python 3.13, a frame whose variables were read keeps their values alive until it ends: a trainer's first batch.
        module = frame.f_locals.get("self") if _may_be_of_a_module(frame) else None
        if isinstance(module, nn.Module):
            yield frame.f_code.co_name, module
        frame = frame.f_back


def _may_be_of_a_module(frame: FrameType) -> bool:
    """True unless a frame is known to belong to a function, or to a method of another class."""
    code = frame.f_code
    owner = frame.f_globals.get(
        code.co_qualname.rpartition(".")[0]
    )  # None: perhaps a class inside a function
    is_other = isinstance(owner, type) and not issubclass(owner, nn.Module)
    return code.co_varnames[:1] == ("self",) and not is_other


def calls_in_progress(modules: Sequence[nn.Module]) -> int:
    """Count the calls of the modules, or of their forward methods, that are in progress in this thread."""
    names = ("_call_impl", "call_as_forward")  # a compiled one has the same name
    return sum(
        name in names and any(module is each for each in modules) for name, module in methods_in_progress()
    )


def outermost_caller(module: nn.Module) -> nn.Module:
    """Return the outermost module above `module` of which a method runs in this thread; `module` itself if there is none."""
    callers = [*dict.fromkeys(caller for _, caller in methods_in_progress())]
    return next((caller for caller in reversed(callers) if module in {*caller.modules()}), module)
