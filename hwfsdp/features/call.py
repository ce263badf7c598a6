"""One call of `fully_shard`: what is asked for, and the parts that will do it.

Each part has the heart's own as its default. A feature that wants another puts it here (`choose`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hwfsdp.core.context import FSDPCommContext
from hwfsdp.core.form import Form, Layout
from hwfsdp.core.group import ParamGroup
from hwfsdp.core.param import FSDPParam, Home
from hwfsdp.core.precision import MixedPrecisionPolicy
from hwfsdp.core.ranks import ShardMesh
from hwfsdp.core.state import FSDPState
from hwfsdp.core.wrap import FSDPModule, Unclaimed


@dataclass
class Call:
    """What is asked for, then the parts.

    Attributes:
        modules: the given ones, as a list. `door.fully_shard` describes the other arguments.
        ranks: over which parameters are sharded. found: the parameters to shard.
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
