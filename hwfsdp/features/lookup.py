"""Look-ups that several features need: the state of a module, its groups, the axes of a mesh."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakIdKeyDictionary

from hwfsdp import compat
from hwfsdp.core import wrap
from hwfsdp.core.group import ParamGroup
from hwfsdp.core.ranks import Axis, ShardMesh
from hwfsdp.core.state import FSDPState, state_of
from hwfsdp.errors import UsageError

CLAIMED = "_hwfsdp_claimed"  # attribute of a parameter that a sharded parameter has replaced: its name
IGNORED = "_hwfsdp_ignored"  # attribute of a parameter that the user has excluded from sharding
# A parameter that modules have in place of the sharded one, such as the whole one → a weak reference to its FSDPParam. Sharded
# parameters must not be keys: torch cannot convert a DTensor to which there are weak references.
STAND_INS: Any = WeakIdKeyDictionary()


def parameter_of(whole: Tensor) -> Any:
    """Return the `FSDPParam` of a parameter that modules had in place of the sharded one; None for any other tensor."""
    owner = STAND_INS.get(whole)
    return owner and owner()


def checked_state(module: Any, caller: str) -> FSDPState:
    """Return the state of a module, or raise UsageError if there is none."""
    state = state_of(module)
    if state is None:
        raise UsageError(
            caller,
            expected="a module that fully_shard was called on",
            got=type(module).__name__,
            remedy="Call fully_shard on it first.",
        )
    return state


class MethodsOfState(wrap.FSDPModule):
    """A base of classes whose methods of sharded modules need the module's state."""

    def _state(self) -> Any:
        """Return the state, or raise UsageError if there is none."""
        return checked_state(self, type(self).__name__)


def the_only(groups: Sequence[ParamGroup], subject: str) -> Sequence[ParamGroup]:
    """Return a module's groups: one at most.

    Raises:
        UsageError: its parameters have several meshes, and the setting belongs to one mesh.
    """
    if len(groups) > 1:
        raise UsageError(
            subject,
            expected="a module whose parameters have one mesh",
            got=", ".join(repr(group.fqn) for group in groups),
            remedy="Shard the modules of each mesh in separate calls.",
        )
    return groups


def replicas_of(mesh: ShardMesh) -> Axis:
    """Return the ranks that hold the same rows."""
    return getattr(mesh, "replicate", Axis())


def shard_axis(mesh: ShardMesh) -> DeviceMesh:
    """Return the 1D mesh of the ranks that hold different rows."""
    names = mesh.mesh.mesh_dim_names
    return mesh.mesh[names[-1]] if mesh.mesh.ndim == 2 and names else mesh.mesh


def flat_axis(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """Return the 1D mesh of these axes of `mesh`; several axes become one."""
    return mesh[names[0]] if len(names) == 1 else compat.flatten_mesh(mesh[names])


# --- The stack ----------------------------------------------------------------------------------------------


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
