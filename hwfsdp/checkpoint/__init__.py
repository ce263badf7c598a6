"""Move, compare and save state dicts.

    from hwfsdp import checkpoint

    checkpoint.save(state_dict, path)           # on every rank; an incomplete save does not count
    checkpoint.load(state_dict, path)           # in place, into any sharding, at any world size
    handle = checkpoint.async_save(state_dict, path)
    checkpoint.verify(path), checkpoint.inspect(path)

Modules, in reading order:

    messages      errors, and the names of their subjects
    traverse      the tree of a state dict: leaves at paths, in containers that keep their types
    boxes         parts of tensors: integers only
    views         bytes of a storage that are copied together
    tensors       questions about one tensor; ShardedTensor, torch's class before DTensor
    state_dict    gather, offload, copy and compare state dicts
    links         messages between two ranks
    agreement     steps that succeed on all ranks, or on none
    distribute    whole tensors into shards, on every rank or from one
    objects       the values that a deep copy would copy
    staging       copies to save from, while training goes on
    per_rank      values that each rank has for itself
    values        values that are not tensors, as JSON
    manifest      the list of a save's contents, and their places
    blocks        files of a save, each block with a checksum
    plan          which rank writes which part
    saves         the directory of a checkpoint: its current save, and old saves to remove
    optimizer_state  the state that an optimizer will have
    meta          from the meta device straight into shards
    matching      comparison of a save with the state dict to fill
    reading       values of a save, checked, in new memory
    saving        a save, step by step
    background    a save, while training goes on
    store         the public functions: save, load, async_save, verify, inspect
    archives      checks of torch.save's zip files; directories of them, replaced as a whole
    partition     the PART format: which rank holds which part
    part_files    files of the PART format, checked
    part_targets  models and optimizers that a PART checkpoint fills
    parts         its public functions: save, load, load_into
    dcp_metadata  metadata of torch's own format, read without running code
    dcp           its public functions: save, load
    convert       from one format to another
    commands      the output of `hwfsdp checkpoint`

A module is imported at its first use. So a process that only reads a checkpoint does not import the code that gathers one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hwfsdp.doors import lazy_door

if TYPE_CHECKING:
    from . import agreement, archives, background, blocks, boxes, commands, convert, dcp, dcp_metadata
    from . import distribute, links, manifest, matching, messages, meta, objects, optimizer_state, part_files
    from . import part_targets, partition, parts, per_rank, plan, reading, saves, saving, staging, state_dict
    from . import store, tensors, traverse, values, views
    from hwfsdp.checkpoint.per_rank import PerRank as PerRank
    from hwfsdp.checkpoint.staging import StateDictStager as StateDictStager
    from hwfsdp.checkpoint.store import Inspection as Inspection
    from hwfsdp.checkpoint.store import SaveHandle as SaveHandle
    from hwfsdp.checkpoint.store import async_save as async_save
    from hwfsdp.checkpoint.store import finish_saves as finish_saves
    from hwfsdp.checkpoint.store import inspect as inspect
    from hwfsdp.checkpoint.store import load as load
    from hwfsdp.checkpoint.store import save as save
    from hwfsdp.checkpoint.store import verify as verify

_HOME = {"PerRank": "per_rank", "StateDictStager": "staging"} | dict.fromkeys(
    ["Inspection", "SaveHandle", "async_save", "finish_saves", "inspect", "load", "save", "verify"], "store"
)
__all__ = sorted(_HOME)
if not TYPE_CHECKING:  # a type checker would accept every name
    __getattr__, __dir__ = lazy_door(__name__, _HOME)
