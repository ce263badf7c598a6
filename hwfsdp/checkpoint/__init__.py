"""State dicts that are moved, compared, saved.

    from hwfsdp import checkpoint

    checkpoint.save(state_dict, path)           # every rank; whole or not at all
    checkpoint.load(state_dict, path)           # in place, into any sharding, at any world size
    handle = checkpoint.async_save(state_dict, path)
    checkpoint.verify(path), checkpoint.inspect(path)

Rooms, in reading order:

    traverse      what a state dict is: leaves at paths, in containers that keep their types
    tensors       questions about one tensor; ShardedTensor, which torch had before DTensor
    state_dict    gathered, offloaded, copied, compared
    links         messages between two ranks
    agreement     all ranks, or none
    distribute    whole tensors into shards, on every rank or from one
    views         which bytes of a storage are copied together
    objects       what a deep copy would copy
    staging       copies to save from, while training goes on
    boxes         parts of tensors: integers only
    values        what is not a tensor, as JSON
    manifest      what is in a save, and where
    blocks        its files, each block with a checksum
    plan          who writes what
    saves         the directory: which save counts, and which may go
    optimizer_state  the state that an optimizer will have
    meta          from the meta device straight into shards
    matching      a save and a state dict to load it into
    reading       its values, checked, in new memory
    saving        a save, step by step
    background    a save, while training goes on
    verification  looking at a checkpoint without loading it
    store         the public functions: save, load, async_save, verify, inspect
    archives      zip files of torch.save, intact or not; directories of them, replaced as a whole
    partition     the PART format: who holds what
    part_files    its files, checked
    part_targets  what they are loaded into
    parts         its public functions: save, load, load_into
    dcp_metadata  torch's own format: what it says about itself, read without running any of it
    dcp           its public functions: save, load
    convert       from one format to another
    commands      what `hwfsdp checkpoint` prints

Nothing is imported before it is asked for: a process that only reads a checkpoint need not know how to gather one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hwfsdp.doors import lazy_door

if TYPE_CHECKING:
    from hwfsdp.checkpoint.staging import StateDictStager as StateDictStager
    from hwfsdp.checkpoint.store import Inspection as Inspection
    from hwfsdp.checkpoint.store import SaveHandle as SaveHandle
    from hwfsdp.checkpoint.store import async_save as async_save
    from hwfsdp.checkpoint.store import finish_saves as finish_saves
    from hwfsdp.checkpoint.store import inspect as inspect
    from hwfsdp.checkpoint.store import load as load
    from hwfsdp.checkpoint.store import save as save
    from hwfsdp.checkpoint.store import verify as verify

_HOME = {
    "Inspection": "store",
    "SaveHandle": "store",
    "StateDictStager": "staging",
    "async_save": "store",
    "finish_saves": "store",
    "inspect": "store",
    "load": "store",
    "save": "store",
    "verify": "store",
}

__all__ = sorted(_HOME)
__getattr__, __dir__ = lazy_door(__name__, _HOME)
