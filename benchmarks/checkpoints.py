"""Save and load a sharded state dict, compared with torch's DCP: seconds, and memory beyond the state dict.

Both write to the same disk and sync it. hwfsdp computes a checksum of every block, and verifies it when it loads; DCP does
neither. "async" is the time for which training stops: until the call returns. The background work ends before the next
turn. Each turn has its own directory, which is removed while nothing is measured.

Memory is the resident set's peak during the call, minus its size before the call (Linux only). It includes the tensors that the call
reads and writes, but not the system's page cache.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import warnings
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from benchmarks.records import Check, Record, Spread, ratio
from benchmarks.timing import Action, Laps, Samples, meet, slowest, stopwatch, take_turns
from hwfsdp import checkpoint, launch

MIB = 2**20
WORLD_SIZE = 2
TOTAL = 128 * MIB
TENSORS = 32
ROUNDS = 9
TARGETS = {"save": 1.25, "verified load": 1.6, "async": 0.5}
EXTRA = TOTAL // WORLD_SIZE // MIB + 64  # MiB beyond the state dict
HWFSDP, DCP = "hwfsdp", "DCP"


def run(rounds: int | None, total: int = TOTAL) -> list[Record]:
    """Return two records: times and memory."""
    with tempfile.TemporaryDirectory() as directory:
        ranks = launch(measure, WORLD_SIZE, Path(directory), rounds or ROUNDS, total)
        memory = launch(peaks, WORLD_SIZE, Path(directory), total)
    samples = slowest(ranks)
    values = {f"{who}, {what}": Spread.of(ms) for what, found in samples.items() for who, ms in found.items()}
    checks = {
        f"{what}, hwfsdp / DCP": ratio(samples[what][HWFSDP], samples[what][DCP], t)
        for what, t in TARGETS.items()
    }
    case: dict[str, str | int] = {"state": f"{total // MIB} MiB", "ranks": WORLD_SIZE}
    extra = {what: max(found[what] for found in memory) for what in memory[0]}
    return [
        Record("checkpoints", case, "ms", values, checks),
        Record(
            "checkpoints",
            {**case, "what": "memory beyond the state dict, per rank"},
            "MiB",
            {what: Spread.of([mib]) for what, mib in extra.items()},
            {
                f"{what}, hwfsdp [MiB]": Check(Spread.of([extra[f"hwfsdp, {what}"]]), EXTRA)
                for what in TARGETS
            },
        ),
    ]


def state_of(total: int) -> dict[str, DTensor]:
    """Return float32 tensors of `total` bytes together, sharded by rows."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = 256
    columns = total // 4 // TENSORS // rows
    generator = torch.Generator().manual_seed(0)
    wholes = (torch.rand(rows, columns, generator=generator) for _ in range(TENSORS))
    return {f"w{i}": distribute_tensor(whole, mesh, [Shard(0)]) for i, whole in enumerate(wholes)}


class _Turns:
    """Saves and loads of both libraries; each save goes to a new directory."""

    def __init__(self, directory: Path, total: int) -> None:
        self.directory, self.numbers, self.state = directory, count(), state_of(total)
        self.saved = {who: directory / f"saved by {who}" for who in (HWFSDP, DCP)}
        checkpoint.save(self.state, self.saved[HWFSDP])
        state_dict_saver.save(self.state, checkpoint_id=self.saved[DCP])
        self.expected = [tensor.to_local().clone() for tensor in self.state.values()]

    def new_path(self) -> Path:
        return self.directory / str(next(self.numbers))

    def calls(self, what: str) -> dict[str, Callable[[Path], Any]]:
        """Return, by library, the call to time. The call returns a function that waits for its background work, or None."""
        return {
            "save": {
                HWFSDP: lambda path: checkpoint.save(self.state, path) and None,
                DCP: lambda path: state_dict_saver.save(self.state, checkpoint_id=path) and None,
            },
            "verified load": {
                HWFSDP: lambda path: checkpoint.load(self.state, self.saved[HWFSDP]) and None,
                DCP: lambda path: state_dict_loader.load(self.state, checkpoint_id=self.saved[DCP]),
            },
            "async": {
                HWFSDP: lambda path: checkpoint.async_save(self.state, path).wait,
                DCP: lambda path: state_dict_saver.async_save(self.state, checkpoint_id=path).result,  # type: ignore[union-attr]
            },
        }[what]

    def action(self, what: str, call: Callable[[Path], Any]) -> Action:
        def act() -> Laps:
            path = self.new_path()
            if what == "verified load":
                for tensor in self.state.values():
                    tensor.to_local().zero_()
                meet()
            start = stopwatch()
            wait = call(path)
            took = stopwatch() - start
            if wait is not None:
                wait()
            if what == "verified load":
                for tensor, expected in zip(self.state.values(), self.expected, strict=True):
                    assert torch.equal(tensor.to_local(), expected), "loaded something else"
            meet()
            if dist.get_rank() == 0:
                shutil.rmtree(path, ignore_errors=True)
            return {what: took}

        return act


def measure(directory: Path, rounds: int, total: int) -> Samples:
    """Return this rank's ms, by action and library."""
    warnings.simplefilter("ignore")  # torch warns about its own internals
    turns = _Turns(directory, total)
    samples: Samples = {}
    for what in TARGETS:
        actions = {who: turns.action(what, call) for who, call in turns.calls(what).items()}
        samples.update(take_turns(actions, rounds))
    return samples


def peaks(directory: Path, total: int) -> dict[str, float]:
    """Return this rank's peak MiB beyond its memory before, by library and action. Everything runs once to warm up."""
    warnings.simplefilter("ignore")
    if dist.get_rank() == 0:
        for old in directory.iterdir():
            shutil.rmtree(old)
    meet()
    turns = _Turns(directory, total)
    found = {}
    for what in TARGETS:
        for who, call in turns.calls(what).items():
            act = turns.action(what, call)
            act()
            found[f"{who}, {what}"] = max(_resident_growth(act), 0.0)
    return found


def _resident_growth(act: Callable[[], Any]) -> float:
    """Return the largest growth of the resident set, in MiB, while `act` runs."""
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = _status("VmRSS")
    act()
    return (_status("VmHWM") - before) / 1024


def _status(name: str) -> int:
    """Return an entry of /proc/self/status in kB; 0 if there is none."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1]) if found else 0
