"""14, on ranks: a small model with parameters of all kinds, saved and loaded by process groups of several sizes, killed, and damaged."""

from __future__ import annotations

import gc
import os
import random
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any
from zlib import crc32

import facts_crashes as crashes
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

from hwfsdp import fully_shard
from hwfsdp.compat import default_store_below, local_of
from hwfsdp.course.probing import Report, load_again, simulates, submitted
from hwfsdp.observe.events import COLLECTIVES
from hwfsdp.observe.recording import record

SIZES = (1, 2, 3, 4)
UNSHARDED = "scale"
MOMENTS = ("exp_avg", "exp_avg_sq")
OLD, NEW, LATER = 0, 1, 2  # added to the seed: the values of one save after the other
LR = {OLD: 0.5, NEW: 0.25, LATER: 0.125}
Found = dict[str, Any]


class Model(nn.Module):
    """Parameters of all kinds: uneven, of one row, cut along dim 1, bf16, tied, frozen, not sharded."""

    def __init__(self, seed: int, width: int, is_turned: bool = False) -> None:
        super().__init__()
        draw = random.Random(seed)
        layers = {
            "wide": nn.Linear(width, 10 * width),
            "uneven": nn.Linear(width, draw.choice([5, 7, 9, 11])),
            "single": nn.Linear(width, 1),
            "columns": nn.Linear(12, draw.choice([3, 5]), bias=False),
            "coarse": nn.Linear(4, draw.choice([5, 6]), dtype=torch.bfloat16),
        }
        for name in reversed(layers) if is_turned else layers:
            self.add_module(name, layers[name])
        self.embed, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.single.bias.requires_grad_(False)
        self.scale = nn.Parameter(torch.zeros(()))


class Small(nn.Module):
    """Two parameters: a killed save is loaded very often."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3 + seed % 3)


class Middle(nn.Module):
    """Parts that are longer than what a careless checksum looks at."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layer = nn.Linear(40, 30 + seed % 3)


class Wide(nn.Module):
    """One large weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 512)


def key_values(model: nn.Module, seed: int) -> dict[str, Tensor]:
    """Return the whole values of every parameter and state, by name: "wide.weight", "wide.weight exp_avg" and so on."""
    found = dict[str, Tensor]()
    for name, param in model.named_parameters():
        for key in ("", *MOMENTS, "step") if param.requires_grad else ("",):
            shape, dtype = (torch.Size(), torch.float32) if key == "step" else (param.shape, param.dtype)
            generator = torch.Generator().manual_seed(crc32(f"{seed} {name} {key}".encode()))
            drawn = torch.randn(shape, generator=generator)
            drawn = drawn.abs() + 1 if key in ("step", "exp_avg_sq") else drawn
            found[f"{name} {key}".strip()] = drawn.to(dtype)
    return found


def sharded(model: nn.Module, shape: tuple[int, ...] = ()) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Shard a model by `fully_shard` on all ranks, on a mesh of this shape if there is one; return it with a new optimizer."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")) if shape else None
    ignored = {model.scale} if hasattr(model, UNSHARDED) else set()
    if hasattr(model, "columns"):
        fully_shard(model.columns, mesh=mesh, shard_placement_fn=lambda param: Shard(1))
    fully_shard(model, mesh=mesh, ignored_params=ignored)
    params = list(model.parameters())
    groups = [{"params": params[:2], "weight_decay": 0.0}, {"params": params[2:]}]
    return model, torch.optim.AdamW(groups, lr=0.01, foreach=False)


@torch.no_grad()
def fill(
    model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, which: int, has_state: bool = True
) -> None:
    """Give parameters, states and the learning rate the values of a save."""
    values = key_values(model, seed + which)
    for name, param in model.named_parameters():
        if has_state and param.requires_grad:
            state = {key: torch.zeros_like(param) for key in MOMENTS}
            optimizer.state[param] = {"step": torch.tensor(0.0), **state}
    for name, tensor in tensors_of(model, optimizer).items():
        whole = values[name]
        if isinstance(tensor, DTensor):
            whole = local_of(
                distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
            )
        local_of(tensor).copy_(whole)
    optimizer.param_groups[1]["lr"] = LR[which]


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = dict[str, Tensor]()
    for name, param in model.named_parameters():
        found |= {name: param} | {
            f"{name} {key}": value for key, value in optimizer.state.get(param, {}).items()
        }
    return found


# --- Process groups ----------------------------------------------------------------------------------------


class Meetings:
    """The ranks of a launch, and where they meet between two process groups: in the store of the first group, by no collective."""

    def __init__(self) -> None:
        self.store, self.number = default_store_below("exercise 14"), 0
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def meet(self, said: str = "here") -> None:
        """Wait for all ranks. Raise an error if one of them has failed."""
        self.number += 1
        self.store.set(f"{self.number} {self.rank}", said)
        if said == "here":
            keys = [f"{self.number} {rank}" for rank in range(self.ranks)]
            pause = 0.001  # seconds; torch's own wait looks so often that a rank seems to be at work
            while not self.store.check(keys):
                time.sleep(pause)
                pause = min(2 * pause, 0.25)
            if any(self.store.get(key) != b"here" for key in keys):
                raise RuntimeError("Connection closed by peer")


meetings = cache(Meetings)


def meet() -> None:
    meetings().meet()


@contextmanager
def group_of(world_size: int) -> Iterator[bool]:
    """In the block, the first ranks are the process group, like new processes: they load the student's file again. True on these ranks."""
    meet()
    leave()
    here, is_in = meetings(), meetings().rank < world_size
    try:
        if is_in:
            os.environ["WORLD_SIZE"] = str(world_size)
            store = dist.PrefixStore(f"group {here.number}", here.store)
            dist.init_process_group("gloo", store=store, rank=here.rank, world_size=world_size)
            load_again()
        yield is_in
    except BaseException:  # the others must not wait
        leave()
        here.meet("failed")
        raise


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()  # connections are closed when nothing refers to the group


def new_folder(name: str) -> Path:
    """Return a folder that all ranks share."""
    folder = Path.cwd() / "checkpoints" / name / "saved"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


# --- Saves and loads ---------------------------------------------------------------------------------------


def saved(folder: Path, model: nn.Module, seed: int, which: int, shape: tuple[int, ...] = ()) -> None:
    """Save the values `which` of a model."""
    model, optimizer = sharded(model, shape)
    fill(model, optimizer, seed, which)
    submitted().save(folder, model, optimizer)


def loaded(folder: Path, model: nn.Module, seed: int, is_new: bool = True) -> Found:
    """Load into a model with other values. Return this rank's parts, and what the optimizer's next step raises."""
    model, optimizer = sharded(model)
    fill(model, optimizer, seed, LATER, has_state=not is_new)
    objects = [id(param) for param in model.parameters()]
    submitted().load(folder, model, optimizer)
    tensors = tensors_of(model, optimizer)
    # a step may be a number
    locals_of = {key: local_of(torch.as_tensor(value)) for key, value in tensors.items()}
    found: Found = {"tensors": {key: tensor.detach().clone() for key, tensor in locals_of.items()}}
    found["kinds"] = {key: isinstance(tensor, DTensor) for key, tensor in tensors.items()}
    for key in ("lr", "weight_decay"):
        found[key] = [number_in(group[key]) for group in optimizer.param_groups]
    found["objects"] = objects == [id(param) for param in model.parameters()]
    for param in model.parameters():
        param.grad = torch.zeros_like(param) if param.requires_grad else None
    try:
        optimizer.step()
        found["step"] = ""
    except Exception as error:
        found["step"] = f"{type(error).__name__}: {error}"[:200]
    return found


def number_in(value: Any) -> float | str:
    """Return a number as a float, anything else as its text, with its type."""
    return float(value) if isinstance(value, float | int | Tensor) else f"{type(value).__name__} {value!r}"


def outcome(folder: Path, seed: int, kind: type[nn.Module] = Small) -> Found:
    """Load a small model on one rank: its values, or the error that was raised."""
    try:
        return loaded(folder, kind(seed), seed)
    except Exception as error:
        if isinstance(error, NotImplementedError):
            raise
        return {"raised": f"{type(error).__name__}: {error}"[:200]}


@simulates
def probe_pairs(report: Report, seed: int) -> None:
    """Save with each number of ranks, move the folder, and load each save with each number of ranks; "2 → 3" is the key."""
    for before in SIZES:
        with group_of(before) as is_in:
            if is_in:
                saved(new_folder(f"new {before}"), Model(seed, 8), seed, OLD)
        meet()
        if int(os.environ["RANK"]) == 0:
            new_folder(f"new {before}").rename(new_folder(f"pairs {before}"))
    meet()
    found = dict[str, Found]()
    for after in SIZES:
        with group_of(after) as is_in:
            for before in SIZES if is_in else ():
                model, folder = Model(seed, 8, is_turned=before % 2 == 0), new_folder(f"pairs {before}")
                try:
                    found[f"{before} → {after}"] = loaded(folder, model, seed, is_new=before != after)
                except Exception as error:
                    error.add_note(f"saved by {before}, moved, loading on {after}")
                    raise
    report["pairs"] = found


@simulates
def probe_bytes(report: Report, seed: int) -> None:
    """Report bytes: of the files that two shards in two replicas saved, and that four ranks did; read by a rank; and on the wire."""
    found: Found = {"sent": 0, "written": {}}
    for name, shape in (("replicas", (2, 2)), ("shards", ())):
        folder = new_folder(name)
        with group_of(4), record() as log:
            saved(folder, Wide(), seed, OLD, shape)
        meet()
        found["written"][name] = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        found["sent"] = max(found["sent"], sum(e.bytes for e in log.events if e.op in COLLECTIVES))
    with group_of(4), record() as log:
        steps = crashes.Steps(folder)
        with steps.watched(submitted()):
            tensors = loaded(folder, Wide(), seed)["tensors"]
        found["read"], found["kept"] = steps.nbytes, sum(tensor.nbytes for tensor in tensors.values())
    found["sent"] = max(found["sent"], sum(e.bytes for e in log.events if e.op in COLLECTIVES))
    report["bytes"] = found


# --- Saves that end too early ------------------------------------------------------------------------------


def first_save(folder: Path, seed: int, world_size: int, kind: type[nn.Module] = Small) -> crashes.Tree:
    with group_of(world_size) as is_in:
        if is_in:
            saved(folder, kind(seed), seed, OLD)
    meet()
    return crashes.read(folder)


def stopped(folder: Path, seed: int, steps: crashes.Steps) -> str:
    """Save new values under watch. Return the error that `save` raised; "" if it returned, or if the rank was killed."""
    try:
        model, optimizer = sharded(Small(seed))
        fill(model, optimizer, seed, NEW)
        with steps.watched(submitted()):
            submitted().save(folder, model, optimizer)
    except crashes.Killed:
        pass
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    return ""


@simulates
def probe_crashes(report: Report, seed: int, world_size: int, has_old: bool) -> None:
    """Report what a load finds after a crash of all ranks at each moment of a save, and whether a later save succeeds."""
    folder = new_folder(f"crashes {world_size} {has_old}")
    notes = folder.parent / "notes"
    notes.mkdir(exist_ok=True)
    if has_old:
        first_save(folder, seed, world_size)
    with group_of(world_size) as is_in:
        if is_in:
            steps = crashes.Steps(folder, notes)
            if error := stopped(folder, seed, steps):
                raise RuntimeError(f"the second save raised {error}" if has_old else error)
            dist.barrier()
            if dist.get_rank() == 0:
                steps.note("the end")
    found = list[Any]()
    with group_of(1) as is_in:
        for crash in crashes.crashes(crashes.read_moments(notes)) if is_in else ():
            crashes.write(folder, crash.tree)
            found.append([list(crash[:4]), outcome(folder, seed), None])
            if not crash.power:
                found[-1][2] = again(folder, seed)
    report["crashes"] = found


def again(folder: Path, seed: int) -> str:
    """Save once more after a crash, then load. Return what is wrong; "" if nothing is."""
    try:
        saved(folder, Small(seed), seed, NEW)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    got, right = outcome(folder, seed), key_values(Small(seed), seed + NEW)
    is_right = "tensors" in got and all(
        torch.equal(got["tensors"].get(key, torch.empty(0)), right[key]) for key in right
    )
    return "" if is_right else "a load does not find it"


@simulates
def probe_ended(report: Report, seed: int, how: str) -> None:
    """End a second save at each step of one of two ranks, by a kill or by an OSError. Report what both said, and what a load finds."""
    folder = new_folder(f"ended {how}")
    old, rank, trees = first_save(folder, seed, 2), int(os.environ["RANK"]), list[Any]()
    for victim in range(2):
        for number in count():
            meet()
            if rank == 0:
                crashes.write(folder, old)
            if how == "kill" or not trees:  # the others of a killed process go on in no group
                with group_of(2):
                    pass
            meet()
            stop = number if rank == victim else None
            steps = crashes.Steps(folder, stop=stop, is_killed=how == "kill")
            error = stopped(folder, seed, steps)
            if steps.is_dead:  # the other one learns it in its next collective
                leave()
            (folder.parent / f"last {rank}").write_text(steps.last)
            meet()
            last = (folder.parent / f"last {victim}").read_text()
            trees.append([victim, last, error, crashes.read(folder)])
            if not last:  # nothing has ended this save
                break
    found = list[Any]()
    with group_of(1) as is_in:
        for victim, last, error, tree in trees:
            if is_in:
                crashes.write(folder, tree)
            found.append([victim, last, error, outcome(folder, seed) if is_in else None])
    report["ended"] = found


# --- Damaged files -----------------------------------------------------------------------------------------


def damages(content: bytes, draw: random.Random) -> Iterator[tuple[str, bytes | None]]:
    """Yield descriptions of damage to a file, and what is left of it; None for a file that is gone."""
    yield "is gone", None
    for left in sorted({0, len(content) // 2, len(content) - 1}):
        yield f"has only its first {left} B of {len(content)}", content[:left]
    places = {
        0: 1,
        len(content) - 1: 1,
        **{draw.randrange(len(content)): 1 << draw.randrange(7) for _ in range(12)},
    }
    numbers = {found[0]: found.end() - 1 for found in re.finditer(rb"\d\.\d+", content) if content.isascii()}
    places |= {last: 1 for last in list(numbers.values())[:8]}  # in a text, still a number
    for place, bit in sorted(places.items()):
        changed = bytearray(content)
        changed[place] ^= bit
        yield f"has another byte {place} of {len(content)}", bytes(changed)


@simulates
def probe_damaged(report: Report, seed: int) -> None:
    """Damage each file of a save by two ranks in several ways, and report what a load finds."""
    folder, draw, found = new_folder("damaged"), random.Random(seed), list[Any]()
    tree = first_save(folder, seed, 2, Middle)
    with group_of(1) as is_in:
        for name, content in tree.items() if is_in else ():
            if not found:
                crashes.write(folder, tree)
                found.append(["nothing", False, outcome(folder, seed, Middle)])
            for words, left in damages(content, draw) if content else ():
                damaged = (
                    {**tree, name: left} if left is not None else {k: v for k, v in tree.items() if k != name}
                )
                crashes.write(folder, damaged)
                is_short = left is None or len(left) < len(content)
                found.append([f"{name} {words}", is_short, outcome(folder, seed, Middle)])
    report["damaged"] = found
