"""Move, compare and save state dicts.

    from hwfsdp import checkpoint

    checkpoint.save(state_dict, path)           # on every rank; an incomplete save does not count
    checkpoint.load(state_dict, path)           # in place, into any sharding, at any world size
    handle = checkpoint.async_save(state_dict, path)
    checkpoint.verify(path), checkpoint.inspect(path)

Modules, in reading order:

    error_messages  errors, and the names of their subjects
    traverse        the walks: leaves at paths in containers that keep their types; objects of any class
    boxes           which part of which tensor, and questions about one tensor
    manifest        the list of a save's contents, and their places
    state_dict      gather, offload, copy and compare state dicts
    agreement       steps that succeed on all ranks, or on none
    distribute      whole tensors into shards, on every rank or from one
    staging         copies to save from, while training goes on
    commit          files: written, brought to the disk, put in place in one step, read with checks and without running code
    meta            memory for targets on the meta device, and the state that an optimizer will have
    saving          save and async_save: describe, plan, write, commit
    loading         load, and the steps that load every format: match, read, fill
    part_files      the files of the PART format: which rank writes what, and a source of a load
    parts           the PART format: save, load, load_into
    dcp             torch's own format: save, load
    convert         checkpoints without a state dict: inspect, verify, convert; the output of `hwfsdp checkpoint`

A module is imported at its first use. So a process that only reads a checkpoint does not import the code that gathers one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hwfsdp.lazy_imports import lazy_names

if TYPE_CHECKING:
    from . import agreement, boxes, commit, convert, dcp, distribute, loading, manifest
    from . import error_messages, meta
    from . import part_files, parts, saving, staging, state_dict, traverse
    from hwfsdp.checkpoint.convert import Inspection as Inspection
    from hwfsdp.checkpoint.convert import inspect as inspect
    from hwfsdp.checkpoint.loading import load as load
    from hwfsdp.checkpoint.convert import verify as verify
    from hwfsdp.checkpoint.saving import SaveHandle as SaveHandle
    from hwfsdp.checkpoint.saving import async_save as async_save
    from hwfsdp.checkpoint.saving import finish_saves as finish_saves
    from hwfsdp.checkpoint.saving import save as save
    from hwfsdp.checkpoint.staging import StateDictStager as StateDictStager
    from hwfsdp.checkpoint.traverse import PerRank as PerRank

_HOME = {"PerRank": "traverse", "StateDictStager": "staging", "load": "loading"}
_HOME |= dict.fromkeys(["Inspection", "inspect", "verify"], "convert")
_HOME |= dict.fromkeys(["SaveHandle", "async_save", "finish_saves", "save"], "saving")
__all__ = sorted(_HOME)
if not TYPE_CHECKING:  # a type checker would accept every name
    __getattr__, __dir__ = lazy_names(__name__, _HOME)
