"""What a log says about the run it is of: enough to compute what should have been moved.

A log holds what happened. Whether that was right follows from shapes, dtypes and meshes, which no event shows. So a
recording ends by writing them down, for the parameter groups that ran in it; the log carries them as plain JSON
(`EventLog.about`), through its file too, and `read_about` gives them back as records.

Left out: what tensor extensions gather, which is a form of their own.
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
from hwfsdp.core.param import FSDPParam
from hwfsdp.core.state import state_of
from hwfsdp.features.hybrid_sharding import replicas_of
from hwfsdp.observe.accounting import GroupSizes
from hwfsdp.observe.validate import MOST_RANKS, flag, many, named, text, whole


@dataclass(frozen=True)
class ParamAbout:
    """One parameter.

    Attributes:
        fqn: its name. shape: as rows, the dimension that is cut first (`param`, Note [Rows]).
        dtype: of the shard; gather_dtype, reduce_dtype: of what travels; *_itemsize: bytes of one element there.
        trained: whether it gets a gradient.
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
        shards, replicas: ranks that hold different rows, and ranks that hold the same.
        gathered_again_from: of how many ranks the backward gathers it, 0 if it stays whole from the forward.
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
        """The group for `accounting`: one entry for each pair of itemsizes in it."""
        pairs = dict.fromkeys((p.gather_itemsize, p.reduce_itemsize) for p in self.params)
        return [
            GroupSizes(
                [
                    p.shape
                    for p in self.params
                    if (p.gather_itemsize, p.reduce_itemsize) == pair and (p.trained or not trained_only)
                ],
                *pair,
                resharded_after_forward=self.gathered_again_from > 0,
            )
            for pair in pairs
        ]


@dataclass(frozen=True)
class About:
    """A run.

    Attributes:
        world_size: ranks of the process group; torch: its version; device: type of what computed.
        groups: that ran during the recording, in the order of their first forward there.
    """

    world_size: int
    torch: str
    device: str
    groups: tuple[GroupAbout, ...]


def describe_run(modules: Iterable[nn.Module], told: Iterable[GroupAbout] = ()) -> dict[str, Any]:
    """What `EventLog.about` holds after a recording in which these modules ran: `About` as JSON-ready values.

    Args:
        told: groups of modules that cannot be asked (`onlooker`).
    """
    states = dict.fromkeys(state for module in modules if (state := state_of(module)) is not None)
    groups = [group for state in states for group in state.groups]
    device = groups[0].mesh.device.type if groups else "cpu"
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    about = About(world_size, torch.version.__version__, device, (*map(_about_group, groups), *told))
    found: dict[str, Any] = json.loads(
        json.dumps(asdict(about))
    )  # lists for tuples, as they come back from a file
    return found


def _about_group(group: ParamGroup) -> GroupAbout:
    smaller = getattr(group, "smaller", None) or group.mesh
    again = smaller.size if group.reshard_after_forward and group.unshard_in_backward else 0
    params = tuple(map(_about_param, group.params))
    return GroupAbout(group.fqn, group.mesh.size, replicas_of(group.mesh).size, again, params)


def _about_param(param: FSDPParam) -> ParamAbout:
    gathered = param.dtypes.compute
    reduced = param.dtypes.reduce or gathered
    return ParamAbout(
        param.fqn,
        tuple(param.layout.rows),
        _name(param.dtypes.orig),
        _name(gathered),
        gathered.itemsize,
        _name(reduced),
        reduced.itemsize,
        param.sharded_param.requires_grad,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def read_about(about: Mapping[str, Any]) -> About | None:
    """`EventLog.about` as records; None if it is empty, as for logs made by hand.

    Raises:
        KeyError, TypeError, ValueError: it was not written by `describe_run`; the field is named.
    """
    if "groups" not in about:
        return None
    groups = tuple(
        _read_group(f"groups[{i}]", group) for i, group in enumerate(many("groups", about["groups"]))
    )
    world_size = whole("world_size", about["world_size"], 1, MOST_RANKS)
    return About(world_size, text("torch", about["torch"]), text("device", about["device"]), groups)


def _read_group(where: str, group: Any) -> GroupAbout:
    group = named(where, group)
    params = [
        _read_param(f"{where}.params[{i}]", p) for i, p in enumerate(many(f"{where}.params", group["params"]))
    ]
    return GroupAbout(
        text(f"{where}.fqn", group["fqn"]),
        whole(f"{where}.shards", group["shards"], 1, MOST_RANKS),
        whole(f"{where}.replicas", group["replicas"], 1, MOST_RANKS),
        whole(f"{where}.gathered_again_from", group["gathered_again_from"], 0, MOST_RANKS),
        tuple(params),
    )


def _read_param(where: str, param: Any) -> ParamAbout:
    param = named(where, param)
    shape = tuple(
        whole(f"{where}.shape[{i}]", n) for i, n in enumerate(many(f"{where}.shape", param["shape"]))
    )
    if not shape:
        raise ValueError(f"{where}.shape is [], but a parameter that is cut has a dimension")
    return ParamAbout(
        text(f"{where}.fqn", param["fqn"]),
        shape,
        text(f"{where}.dtype", param["dtype"]),
        text(f"{where}.gather_dtype", param["gather_dtype"]),
        whole(f"{where}.gather_itemsize", param["gather_itemsize"], 1, _MOST_ITEMSIZE),
        text(f"{where}.reduce_dtype", param["reduce_dtype"]),
        whole(f"{where}.reduce_itemsize", param["reduce_itemsize"], 1, _MOST_ITEMSIZE),
        flag(f"{where}.trained", param["trained"]),
    )


_MOST_ITEMSIZE = 64  # bytes; complex128, the largest, has 16
