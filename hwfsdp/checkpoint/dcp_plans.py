"""What of a state dict goes where in a DCP checkpoint: keys, boxes, and the planners that tell DCP.

DCP asks a planner on every rank what the rank has, or wants. Its own ask torch where a DTensor's local part lies in the
whole, which is wrong for some strided and uneven cuts; these ask `layout`. So neighbors' boxes fit together, and the
checkpoint can be read by anyone. Parts without elements are left out, except that a tensor without elements is written
once, because its shape has to be known.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.tensor import DTensor, Partial

from hwfsdp.checkpoint.dcp_metadata import Manifest
from hwfsdp.checkpoint.state_dict import check_data
from hwfsdp.checkpoint.traverse import Path as Keys
from hwfsdp.checkpoint.traverse import leaves_of, show
from hwfsdp.compat import local_of
from hwfsdp.errors import UnsupportedError, UsageError
from hwfsdp.layout.extents import compute_local_shape_and_global_offset


class Entry(NamedTuple):
    """A value of the state dict, as DCP sees it: a tensor, or something to be stored as it is.

    Attributes:
        noted: the path as DCP notes it: keys of dicts as str, so that an int is a position in a list.
    """

    keys: Keys
    value: Any
    noted: tuple[str | int, ...]


# --- Keys --------------------------------------------------------------------------------------------------


def entries_of(state_dict: dict[Any, Any]) -> dict[str, Entry]:
    """DCP's key of every entry."""
    leaves_of(state_dict)  # refuses what contains itself
    entries: dict[str, Entry] = {}

    def visit(keys: Keys, value: Any, noted: tuple[str | int, ...]) -> None:
        if isinstance(value, Mapping):
            if not isinstance(value, MutableMapping):
                refuse(
                    keys,
                    "dicts that entries can be assigned to",
                    f"a {type(value).__name__}",
                    "Make it a dict.",
                )
            for key, child in value.items():
                visit((*keys, key), child, (*noted, str(key)))
            return
        if isinstance(value, list) and _is_taken_apart(value):
            for position, child in enumerate(value):
                visit((*keys, position), child, (*noted, position))
            return
        name = ".".join(map(str, keys))
        if name in entries:
            got = f"{name!r}, which is also that of {show(entries[name].keys)}"
            refuse(keys, "a flat key of its own", got, "Rename one of the two.")
        entries[name] = Entry(keys, value, noted)

    visit((), state_dict, ())
    return entries


def _is_taken_apart(items: list[Any]) -> bool:
    """Whether DCP gives the items of a list keys of their own."""
    return any(
        isinstance(item, Tensor | Mapping) or (isinstance(item, list) and _is_taken_apart(item))
        for item in items
    )


def refuse(keys: Keys, expected: str, got: str, remedy: str) -> None:
    raise UsageError(show(keys), expected=expected, got=got, remedy=remedy)


# --- Boxes -------------------------------------------------------------------------------------------------


def box_of(tensor: Tensor) -> ChunkStorageMetadata | None:
    """The part of the whole that this rank has; None if it has no element of it."""
    shape, offset = tuple(tensor.shape), (0,) * tensor.ndim
    if isinstance(tensor, DTensor):
        if tensor.device_mesh.get_coordinate() is None:
            return None
        shape, offset = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
    return ChunkStorageMetadata(torch.Size(offset), torch.Size(shape)) if 0 not in shape else None


def memory_of(tensor: Tensor) -> Tensor:
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor


def check_tensor(keys: Keys, tensor: Tensor) -> None:
    check_data(keys, tensor)
    if tensor.layout != torch.strided:
        refuse(keys, "a dense tensor", str(tensor.layout), "Call to_dense.")
    if isinstance(tensor, DTensor) and any(isinstance(p, Partial) for p in tensor.placements):
        raise UnsupportedError(
            show(keys),
            expected="placements that say which values a rank has",
            got=f"{list(tensor.placements)}",
            remedy="Redistribute Partial to Replicate first.",
        )


def kind_of(value: Any) -> str:
    return f"a tensor {value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else "a value"


# --- Planners ---------------------------------------------------------------------------------------------


class BoxSavePlanner(DefaultSavePlanner):
    """Writes boxes as `layout` knows them; parts without elements are not written."""

    def __init__(self, paths: dict[str, tuple[Any, ...]]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.paths = paths

    def create_local_plan(self) -> SavePlan:
        items = [item for key, value in self.state_dict.items() for item in _write_items(key, value)]
        self.plan = SavePlan(items, planner_data=self.paths)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        paths: dict[str, Any] = {}
        for plan in all_plans:
            paths |= plan.planner_data
        return plans, dataclasses.replace(metadata, planner_data=paths)

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        if not isinstance(value, Tensor):
            return value
        if value.numel() == 0:
            return torch.empty(value.shape, dtype=value.dtype)
        return memory_of(value).detach().resolve_conj().resolve_neg()


def _write_items(key: str, value: Any) -> list[WriteItem]:
    if not isinstance(value, Tensor):
        return [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO)]
    box = box_of(value)
    if value.numel() == 0:  # written nevertheless, once: its shape has to be known
        box = ChunkStorageMetadata(torch.Size([0] * value.ndim), torch.Size(value.shape))
    if box is None:
        return []
    kind = WriteItemType.SHARD if isinstance(value, DTensor) else WriteItemType.TENSOR
    data = TensorWriteData(box, TensorProperties(dtype=value.dtype), torch.Size(value.shape))
    return [WriteItem(MetadataIndex(key, box.offsets), kind, tensor_data=data)]


class CheckedReader(FileSystemReader):
    """Believes the metadata that was checked, and does not unpickle it again."""

    def __init__(self, manifest: Manifest) -> None:
        super().__init__(manifest.directory)
        self.manifest = manifest

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.manifest.metadata


class CheckedLoadPlanner(LoadPlanner):
    """Reads what was checked, into the local parts."""

    def __init__(self, entries: Mapping[str, Entry], items: list[ReadItem]) -> None:
        self.entries, self.items = entries, items

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        pass

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan(self.items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError("values were read before")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        memory = memory_of(self.entries[read_item.dest_index.fqn].value).detach()
        box = zip(read_item.dest_offsets, read_item.lengths)
        return memory[tuple(slice(start, start + n) for start, n in box)]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass
