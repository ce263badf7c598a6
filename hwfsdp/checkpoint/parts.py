"""The PART checkpoint format, version 2.0.0: a directory with one `torch.save` file per rank, PART_000.pt and so on.

    save("ckpt", model, optimizer, others={"step": 7})     # on every rank
    load("ckpt")                                           # anywhere: {"model": …, "optimizer": …, "step": 7}
    load_into("ckpt", model, optimizer)                    # on every rank: into shards

Other programs write and read this format, too. `partition` describes the contents of a part. Sharded models are written as whole
tensors, so that any reader can load them. For this, DTensors are gathered one at a time. A rank needs memory for its part and for
one more tensor. `load_into` maps the files into memory, and makes a whole tensor only for the entry that it is cutting.

Note [One save or the other]
    The ranks write into a new directory beside the old one. When all of them have finished, rank 0 exchanges the two
    directories, in one step on Linux. On other systems, there is a moment at which no directory has the name; then `load` says
    where the old one is. A rank that fails while it writes tells the others. All ranks raise its error, and the old checkpoint
    stays as it was. The directory is replaced as a whole. So no old part can be left in it, and it may hold nothing but parts.
    Each save has an id, which every part holds under a key that other readers ignore. So parts of two saves do not mix.

`part_files` describes which damage is noticed. `part_targets` describes which checkpoint can be loaded into which target.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from hwfsdp.checkpoint import partition
from hwfsdp.checkpoint.agreement import Agreement, check_alike
from hwfsdp.checkpoint.archives import check_loadable, replaced
from hwfsdp.checkpoint.messages import damaged, path_of, refuse, show, with_size
from hwfsdp.checkpoint.part_files import check_part, check_replaceable, part_name, read
from hwfsdp.checkpoint.part_targets import (
    Loading,
    buffers_of,
    check_tensor,
    describe_entry,
    refuse_kind,
    several,
    state_of,
)
from hwfsdp.checkpoint.per_rank import PerRank
from hwfsdp.checkpoint.traverse import containers_in, leaves_of
from hwfsdp.errors import CheckpointError

LARGE_BYTES = 256 * 2**20  # larger tensors are cut


@torch.no_grad()
def save(
    fname: str | os.PathLike[str],
    model: Any,
    optimizer: Any = None,
    others: Mapping[Any, Any] | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write a checkpoint with one part per rank of the group. Without a process group, write one part.

    A collective over `group`. Every rank has the same models and optimizers, sharded or not. Tensors are written as plain tensors,
    on the CPU.

    Args:
        fname: the directory. An existing directory is replaced, and may hold nothing but parts.
        model: a module or its state dict, or a list or tuple of them. A list of one is loaded as this one.
        optimizer: an optimizer or its state dict, or a list or tuple of them.
        others: more entries; rank 0's entries are saved. torch.load must accept the values with weights_only=True. DTensors are
            not allowed.

    Raises:
        UsageError: on all ranks, if an argument of any rank does not fit the description above, or if the entries differ between
            ranks. If an argument has a wrong type, it is a WrongTypeError, which is also a TypeError.
        UnsupportedError: on all ranks, for a ShardedTensor.
        CheckpointError: on all ranks, if one rank could not write. An existing checkpoint stays as it was.
    """
    save_agreed(_agreement(group), fname, model, optimizer, others, group)


def save_agreed(
    agreement: Agreement,
    fname: str | os.PathLike[str],
    model: Any,
    optimizer: Any = None,
    others: Mapping[Any, Any] | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Do the work of `save`, in an agreement that was made before."""
    target = Path(os.path.realpath(path_of(fname, "save")))
    mine = _Save(agreement, group)
    remedy = "Save the same models and optimizers on all ranks, or pass the group of the ranks that do."
    same = partial(check_alike, remedy=remedy)
    agreement.step("planning", lambda: mine.plan(model, optimizer, others), same)
    check = partial(check_replaceable, target)
    with replaced(target, agreement, check, mine.check_complete) as (directory, save_id):
        part = mine.part(save_id)
        agreement.step("writing", lambda: mine.write(part, directory))


def load(fname: str | os.PathLike[str], nthreads: int = 8, **kwargs: Any) -> dict[Any, Any]:
    """Read a checkpoint of any number of parts, in any process.

    Args:
        nthreads: the number of parts that are read at the same time. 0: one after the other, without a thread.
        kwargs: for torch.load, for example map_location or mmap.

    Returns:
        "model": {name: tensor}. "optimizer": its state dict, or [] if there is none. Each is a list if there are several. The
        other entries of the checkpoint, and the format's own "__nshards__" and "__version__".

    Raises:
        UsageError: an argument is wrong, for example weights_only=False.
        CheckpointError: a part is missing, stale, damaged, or of another save or version; a part holds a value that cannot be
            loaded safely; an entry is in two parts, or incomplete.
    """
    contents = read(path_of(fname, "load"), nthreads, kwargs)
    states = [optimizer["state"].values() for optimizer in contents.optimizers]
    dicts = [entry for state in states for entry in state if isinstance(entry, dict)]
    for entries in (*contents.models, *dicts):
        for key, entry in entries.items():
            entries[key] = partition.whole_entry(entry)  # in place, so that the chunks are freed
    head = {partition.COUNT_KEY: contents.part_count, partition.VERSION_KEY: partition.VERSION}
    return head | {"model": _bare(contents.models), "optimizer": _bare(contents.optimizers)} | contents.others


def _bare(several: list[dict[str, Any]]) -> Any:
    return several[0] if len(several) == 1 else several


@torch.no_grad()
def load_into(
    fname: str | os.PathLike[str],
    model: Any,
    optimizer: Any = None,
    *,
    group: dist.ProcessGroup | None = None,
    nthreads: int = 8,
    device: torch.device | None = None,
) -> dict[Any, Any]:
    """Load models and optimizers, sharded or not. Each rank loads its shards. Any number of ranks may have saved the checkpoint.

    A collective over `group`; without a process group, one process calls it alone. Every rank reads every part.

    Args:
        model: a module or a state dict to fill, or a list or tuple of them, as many as were saved. None: models stay as they
            are.
        optimizer: an optimizer over the same parameters, or a list or tuple of them, as many as were saved. None: as for
            `model`. If the optimizer does not have a saved state yet, the state is sharded like its parameter, provided that it
            has the same shape.
        device: where tensors on the meta device get memory; see `meta.init_state_dict`.

    Returns:
        The other entries of the checkpoint.

    Raises:
        UsageError: on all ranks, if on any of them keys, shapes or dtypes differ, or an argument is wrong. Nothing was loaded.
        UnsupportedError: on all ranks, if any of them has a `Partial` placement. Nothing was loaded.
        CheckpointError: on all ranks, for the reasons that `load` has, or if ranks read different saves.
    """
    agreement, loading = _agreement(group), list[Loading]()
    fname = path_of(fname, "load_into")
    with ExitStack() as held:

        def prepare() -> str | None:
            contents = read(fname, nthreads, {"map_location": "cpu", "mmap": True})
            loading.append(Loading(contents, model, optimizer, device, held))
            return contents.save_id

        ids = agreement.gather("preparing", prepare)
        if len(set(ids)) > 1:
            remedy = "Give all ranks the same directory, while no other job saves to it."
            refuse("load_into", "one save on all ranks", f"{len(set(ids))} of them", remedy, CheckpointError)
        loading[0].fill()
    others: dict[Any, Any] = partition.kept(loading[0].contents.others, True)
    return others


# --- All ranks ---------------------------------------------------------------------------------------------


def _agreement(group: Any) -> Agreement:
    if not isinstance(group, dist.ProcessGroup | None) and group != dist.GroupMember.NON_GROUP_MEMBER:
        refuse_kind("group", group, "a process group, or None for all ranks")
    return Agreement(group, "PART checkpoint")


# --- Saving ------------------------------------------------------------------------------------------------


class _Save:
    """One save on one rank. Its methods are the steps, in this order."""

    def __init__(self, agreement: Agreement, group: dist.ProcessGroup | None) -> None:
        self.rank, self.ranks = agreement.rank, [0]
        if not agreement.alone:
            self.ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        self.models: list[dict[str, Any]] = []
        self.optimizers: list[dict[str, Any]] = []
        self.others: dict[Any, Any] = {}
        self.deals: tuple[list[partition.Division], list[partition.Division]] = ([], [])

    @property
    def tree(self) -> dict[Any, Any]:
        return {"model": self.models, "optimizer": self.optimizers}

    def plan(self, model: Any, optimizer: Any, others: Mapping[Any, Any] | None) -> list[tuple[str, str]]:
        """Check the entries to save, and divide them among the ranks. Return a list of everything that must be the same on all ranks."""
        if model is None:
            refuse_kind("model", model)
        modules = several(model)
        self.models = [state_of(module, f"model[{i}]") for i, module in enumerate(modules)]
        self.optimizers = [state_of(o, f"optimizer[{i}]") for i, o in enumerate(several(optimizer))]
        if not isinstance(others, Mapping | None):
            refuse_kind("others", others, "a dict")
        self.others = dict(others or {})
        self._check_entries()
        loads = [0] * len(self.ranks)
        named = zip(self.models, map(buffers_of, modules))
        self.deals = (
            [partition.divide_model(state, buffers, loads, LARGE_BYTES) for state, buffers in named],
            [partition.divide_optimizer(state["state"], loads, LARGE_BYTES) for state in self.optimizers],
        )
        listing = [(show(path), describe_entry(value)) for path, value in leaves_of(self.tree)]
        dealt = [(each.holders, sorted(map(repr, each.cut))) for each in (*self.deals[0], *self.deals[1])]
        return [*listing, ("who writes which entry", hashlib.sha256(repr(dealt).encode()).hexdigest())]

    def _check_entries(self) -> None:
        for i, state in enumerate(self.optimizers):
            if not isinstance(state.get("state"), Mapping) or not isinstance(state.get("param_groups"), list):
                expected = 'an optimizer\'s state dict, with "state" and "param_groups"'
                refuse_kind(f"optimizer[{i}]", state, expected)
        self._check_others()
        for path, value in (*leaves_of(self.tree), *leaves_of(self.others)):
            if isinstance(value, Tensor):
                check_tensor(path, value, self.ranks)
        for i, state in enumerate(self.models):
            for name in state:
                if not isinstance(name, str):
                    refuse_kind(show(("model", i, name)), name, "a name that is a str")
        check_loadable((), {**self.tree, **self.others})

    def _check_others(self) -> None:
        for key in self.others:
            if key in partition.RESERVED:
                expected = f"a key that the format does not use; it uses {list(partition.RESERVED)}"
                refuse(f"others[{key!r}]", expected, repr(key), "Rename it.")
        for path, value in leaves_of(self.others):
            if isinstance(value, DTensor):
                refuse_kind(show(path), value, "no DTensor among others, which are rank 0's alone")
        for path, value in containers_in({**self.tree, "others": self.others}).items():
            if isinstance(value, PerRank):
                expected, remedy = "what rank 0 has for all", "Save it with checkpoint.save or dcp.save."
                refuse(show(path).removeprefix("state_dict"), expected, "a PerRank", remedy)

    def part(self, save_id: str) -> dict[Any, Any]:
        """Make this rank's part. All ranks gather DTensors in it."""
        head = {partition.COUNT_KEY: len(self.ranks), partition.VERSION_KEY: partition.VERSION}
        at = self.rank, len(self.ranks)
        models, states = ([partition.part_of(each, *at) for each in deals] for deals in self.deals)
        optimizers: list[Any] = []
        for state_dict, (whole, chunks) in zip(self.optimizers, states):
            rest = {key: partition.kept(value, True) for key, value in state_dict.items() if key != "state"}
            optimizers.append(({"state": whole, **rest}, chunks))
        part: dict[Any, Any] = {**head, partition.ID_KEY: save_id, "model": models, "optimizer": optimizers}
        return part | (partition.kept(self.others, True) if self.rank == 0 else {})

    def write(self, part: dict[Any, Any], directory: Path) -> None:
        path, with_crcs = directory / part_name(self.rank), torch.serialization.get_crc32_options()
        check_part(part, str(path))
        try:
            torch.serialization.set_crc32_options(True)
            with open(path, "xb") as file:
                torch.save(part, file)
                file.flush()
                os.fsync(file.fileno())
        except Exception as error:
            raise with_size(error, path, partition.bytes_in(part)) from error
        finally:
            torch.serialization.set_crc32_options(with_crcs)

    def check_complete(self, directory: Path) -> None:
        """Raise an error unless every rank's part is in the directory."""
        for rank in range(len(self.ranks)):
            path = directory / part_name(rank)
            if not path.is_file():
                remedy = "Give all ranks the same directory, in a file system that they share."
                raise damaged(path, f"the part that rank {rank} wrote", "none", remedy=remedy)
