"""One call of `fully_shard`: what is asked for, and the parts that will do it.

Each part has the heart's own as its default. A feature that wants another puts it here (`choose`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
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
    """The heart's mesh.

    Raises:
        UnsupportedError: `dims` names axes, or the mesh has several.
    """
    if dims is not None:
        raise absent("dp_mesh_dims", "hybrid_sharding")
    return shard_mesh(mesh)


@dataclass
class Call:
    """What is asked for, then the parts.

    Attributes:
        modules: the given ones, as a list. `door.fully_shard` describes the other arguments.
        resolve: what a mesh, and the names of its data-parallel axes, are to this process. ranks: over which parameters are sharded.
        found: the parameters to shard.
        meshes, layouts, policies: of the parameters found. reshard: whether they are freed after forward.
        home, make_form, make_group: for each parameter, and for the group.
        states: classes whose methods go before those of the heart's `FSDPState`, the outermost first.
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
    ranks: ShardMesh | None = None
    found: list[Unclaimed] = field(default_factory=list)
    meshes: list[ShardMesh] = field(default_factory=list)
    layouts: list[Layout] = field(default_factory=list)
    policies: list[MixedPrecisionPolicy] = field(default_factory=list)
    reshard: bool = True
    home: Home = field(default_factory=Home)
    make_form: Callable[[FSDPParam], Form] = Form
    make_group: Callable[[list[FSDPParam], ShardMesh, FSDPCommContext], ParamGroup] = ParamGroup
    states: list[type] = field(default_factory=list)
    module_class: type[FSDPModule] = FSDPModule

    @property
    def device(self) -> torch.device:
        """Of the mesh."""
        assert self.ranks is not None
        return self.ranks.device

    def state_class(self) -> type[FSDPState]:
        """The class of the state: the heart's with what features put before it."""
        parts = tuple(self.states)
        if parts not in _classes:
            _classes[parts] = type("FSDPState", (*parts, FSDPState), {}) if parts else FSDPState
        return _classes[parts]


_classes: dict[tuple[type, ...], type[FSDPState]] = {}


def ask(what: str, *arguments: Any) -> None:
    """Call the function of this name of every feature that has one."""
    for name in features.FEATURES:
        function = getattr(importlib.import_module(f"hwfsdp.features.{name}"), what, None)
        if function is not None:
            function(*arguments)


def absent(given: str, feature: str) -> UnsupportedError:
    """The error for what only a feature can do that was taken out."""
    return UnsupportedError(
        f"fully_shard({given})",
        expected=f"the feature {feature!r}",
        got=f"features without it: {', '.join(features.FEATURES)}",
        remedy="Put it back into hwfsdp.features.FEATURES, or call without it.",
    )
