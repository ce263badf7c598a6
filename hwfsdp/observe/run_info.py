"""The description of a run inside its log, which is enough to compute the bytes that the run should have moved.

A log holds events. To check their bytes, you need shapes, dtypes and meshes, which no event shows. So at its end, a recording
describes the parameter groups that ran. The log and its file hold this description as plain JSON (`EventLog.about`), and
`read_about` returns it as records.

Left out: bytes of tensor extensions, which gather tensors of another form.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.version
import torch.distributed as dist
from torch import nn

from hwfsdp.core.group import ParamGroup
from hwfsdp.core.mesh import Axis
from hwfsdp.core.param import FSDPParam
from hwfsdp.core.precision import Dtypes
from hwfsdp.core.state import state_of
from hwfsdp.observe.accounting import GroupSizes
from hwfsdp.observe.validate import fields_of, shown

VIRTUAL = "virtual "  # the beginning of the device's name in the log of a simulation


@dataclass(frozen=True)
class ParamAbout:
    """A parameter.

    Attributes:
        fqn: its name. shape: its shape as rows: the dimension that is cut comes first (`layouts`, Note [Rows]).
        dtype: dtype of the shard. gather_dtype, reduce_dtype: dtypes of the collectives. *_itemsize: their bytes per element.
        trained: True if it gets a gradient.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: str
    gather_dtype: str
    gather_itemsize: int
    reduce_dtype: str
    reduce_itemsize: int
    trained: bool


@dataclass(frozen=True)
class GroupAbout:
    """One parameter group.

    Attributes:
        fqn: its name, the owner of its events.
        shards, replicas: number of ranks that hold different rows, and number of ranks that hold the same rows.
        gathered_again_from: number of ranks over which the backward gathers it again; 0 if it stays whole after the forward.
    """

    fqn: str
    shards: int
    replicas: int
    gathered_again_from: int
    params: tuple[ParamAbout, ...]

    @property
    def is_trained(self) -> bool:
        return any(p.trained for p in self.params)

    def sizes(self, trained_only: bool = False) -> list[GroupSizes]:
        """Return the group for `accounting`: one entry for each pair of itemsizes in the group."""
        shapes: dict[tuple[int, int], list[tuple[int, ...]]] = {}
        for p in self.params:
            of_pair = shapes.setdefault((p.gather_itemsize, p.reduce_itemsize), [])
            of_pair += [p.shape] if p.trained or not trained_only else []
        again = self.gathered_again_from > 0
        return [GroupSizes(found, *pair, resharded_after_forward=again) for pair, found in shapes.items()]


@dataclass(frozen=True)
class About:
    """A run.

    Attributes:
        world_size: number of ranks in the process group. torch: torch's version.
        device: type of the device that computed; `VIRTUAL` and a name if a simulation has predicted all times.
        groups: the parameter groups that ran during the recording, in the order of their first forwards.
    """

    world_size: int
    torch: str
    device: str
    groups: tuple[GroupAbout, ...]


def describe_run(modules: Iterable[nn.Module], told: Iterable[GroupAbout] = ()) -> dict[str, Any]:
    """Describe a recording in which these modules ran. The result is an `About` as JSON-ready values, for `EventLog.about`.

    Args:
        told: the parameter groups of modules without instruments (`module_hooks`).
    """
    states = dict.fromkeys(state for module in modules if (state := state_of(module)) is not None)
    groups = [group for state in states for group in state.groups]
    device = groups[0].mesh.device.type if groups else "cpu"
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    about = About(world_size, torch.version.__version__, device, (*map(_about_group, groups), *told))
    # This turns tuples into lists, as a file returns them.
    return json.loads(json.dumps(asdict(about)))  # type: ignore[no-any-return]


def _about_group(group: ParamGroup) -> GroupAbout:
    smaller = getattr(group, "smaller", None) or group.mesh
    replicas = getattr(group.mesh, "replicate", Axis())  # the core's has no replicas
    again = smaller.size if group.reshard_after_forward and group.unshard_in_backward else 0
    params = tuple(map(_about_param, group.params))
    return GroupAbout(group.name, group.mesh.size, replicas.size, again, params)


def _about_param(param: FSDPParam) -> ParamAbout:
    trained = param.sharded_param.requires_grad
    return about_param(param.name, param.layout.rows, param.dtypes, trained)


def about_param(fqn: str, shape: Iterable[int], dtypes: Dtypes, trained: bool) -> ParamAbout:
    """Describe one parameter. Without a dtype for reductions, gradients are reduced in the dtype of the computation."""
    gathered, reduced = dtypes.compute, dtypes.reduce or dtypes.compute
    own, *names = (str(each).removeprefix("torch.") for each in (dtypes.orig, gathered, reduced))
    sizes = gathered.itemsize, reduced.itemsize
    return ParamAbout(fqn, tuple(shape), own, names[0], sizes[0], names[1], sizes[1], trained)


def read_about(about: Mapping[str, Any]) -> About | None:
    """Return `EventLog.about` as records, or None if it describes no groups, as in logs made by hand.

    Raises:
        KeyError, TypeError, ValueError: `describe_run` did not write it. The message names the field.
    """
    if "groups" not in about:
        return None
    found = About(**fields_of(About, "", about))
    for group in found.groups:
        for param in group.params:
            if not param.shape:
                raise ValueError(
                    f"the shape of {shown(param.fqn)} is [], but a parameter that is cut has a dimension"
                )
    return found
