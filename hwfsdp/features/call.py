"""One call of `fully_shard`: its arguments, and the parts that will do the work.

The default of each part is the heart's own. A feature that needs another part puts it here (`choose`).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hwfsdp import features
from hwfsdp.core.context import FSDPCommContext
from hwfsdp.core.form import Form, Layout
from hwfsdp.core.group import ParamGroup
from hwfsdp.core.param import FSDPParam, Home
from hwfsdp.core.precision import MixedPrecisionPolicy
from hwfsdp.core.ranks import ShardMesh, shard_mesh
from hwfsdp.core.state import FSDPState
from hwfsdp.core.wrap import FSDPModule, Unclaimed
from hwfsdp.errors import UnsupportedError


def one_axis(mesh: DeviceMesh | None, dims: Any) -> ShardMesh:
    """Return a mesh with one axis, as the heart does.

    Raises:
        UnsupportedError: `dims` names axes. UsageError: the mesh has several axes.
    """
    if dims is not None:
        raise absent("dp_mesh_dims", "hybrid_sharding")
    return shard_mesh(mesh)


@dataclass
class Call:
    """The arguments of a call, then the parts that will do the work.

    Attributes:
        modules: the given modules, as a list. `door.fully_shard` describes the other arguments.
        resolve: takes a mesh and its data-parallel axes, and returns the `ShardMesh` of this process.
        ranks: the ranks over which parameters are sharded.
        found: the parameters to shard.
        meshes, layouts, policies: one for each parameter found.
        home: where shards live. make_param, make_form, make_group: make each parameter, its form, and the group.
        states: classes whose methods run before the methods of the heart's `FSDPState`, the outermost first.
    """

    modules: list[nn.Module]
    mesh: DeviceMesh | None
    reshard_after_forward: bool | int | None
    shard_placement_fn: Callable[[nn.Parameter], Any] | None
    mp_policy: MixedPrecisionPolicy
    offload_policy: Any
    ignored_params: set[nn.Parameter]
    dp_mesh_dims: Any
    comm_ctx: FSDPCommContext | None

    resolve: Callable[[DeviceMesh | None, Any], ShardMesh] = one_axis
    ranks: ShardMesh = field(init=False)
    found: list[Unclaimed] = field(default_factory=list)
    meshes: list[ShardMesh] = field(default_factory=list)
    layouts: list[Layout] = field(default_factory=list)
    policies: list[MixedPrecisionPolicy] = field(default_factory=list)
    home: Home = field(default_factory=Home)
    make_param: type[FSDPParam] = FSDPParam
    make_form: Callable[[FSDPParam], Form] = Form
    make_group: Callable[[list[FSDPParam], ShardMesh, FSDPCommContext], ParamGroup] = ParamGroup
    states: list[type] = field(default_factory=list)
    module_class: type[FSDPModule] = FSDPModule


@functools.cache
def state_class(parts: tuple[type, ...]) -> type[FSDPState]:
    """Return the class of a state: the heart's class, with the classes of features before it."""
    return type("FSDPState", (*parts, FSDPState), {}) if parts else FSDPState


def ask(what: str, *arguments: Any) -> None:
    """Call the function of this name of every feature that has one."""
    for name in features.FEATURES:
        function = getattr(importlib.import_module(f"hwfsdp.features.{name}"), what, None)
        if function is not None:
            function(*arguments)


def absent(given: str, feature: str) -> UnsupportedError:
    """Make the error for a call that needs a feature which was taken out."""
    return UnsupportedError(
        f"fully_shard({given})",
        expected=f"the feature {feature!r}",
        got=f"features without it: {', '.join(features.FEATURES)}",
        remedy="Put it back into hwfsdp.features.FEATURES, or call without it.",
    )
