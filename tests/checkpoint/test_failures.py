"""Saves that fail: full disks, disks with errors, ranks that raise, hang or are killed; and failures in the background.

A fault may hit any call on any rank. Then either all ranks raise the same error and the save before is unchanged, or the save counts
on all ranks. The next save works, and nothing of the failed one is left. Ranks start once for many faults, one after the other, so
damage by one fault makes the next one fail, too.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from faults import CURRENT, contents_of, error_of, exactly, loaded_from, saves_in, state_dict_of, tripwire
from rank_checks import every_rank_says, is_last, raised
from samples import cut, line
from together import Together
from torch.distributed.tensor import Shard

from hwfsdp import launch
from hwfsdp.checkpoint import (
    agreement,
    async_save,
    dcp,
    finish_saves,
    inspect,
    load,
    parts,
    save,
    saving,
    verify,
)
from hwfsdp.checkpoint.agreement import ALONE, Agreement
from hwfsdp.checkpoint.convert import convert
from hwfsdp.checkpoint.error_messages import of_disk, with_size
from hwfsdp.errors import CheckpointError, RankError, UsageError

three = Together(3)


def save_with(path: Path, victim: int, fault: Any, seed: int) -> str:
    """On a rank: save while `fault` is active on one rank, and save once more. Return the error, the same on all ranks; "": none."""
    with fault if dist.get_rank() == victim else nullcontext():
        error = error_of(lambda: save(state_dict_of(seed), path, overwrite=True))
    message = str(error or "")
    assert every_rank_says(message) == [message] * dist.get_world_size()
    if error:
        assert type(error) is CheckpointError, error
        assert f"rank {victim}" in message or not victim  # any rank may meet an error of rank 0
    assert loaded_from(path, ALONE) == (seed - 1 if error else seed), message
    dist.barrier()
    save(state_dict_of(seed + 1), path, overwrite=True)
    dist.barrier()
    assert loaded_from(path, ALONE) == seed + 1 and sorted(os.listdir(path)) == sorted(
        [*saves_in(path), CURRENT]
    )
    assert len(saves_in(path)) == 1, message
    dist.barrier()
    return message


def raise_disk_error(*args: Any, **kwargs: Any) -> Any:
    raise OSError(errno.EIO, "Input/output error")


@three
def an_error_of_the_disk_at_any_call_of_any_rank_ends_well(base: Path) -> None:
    with tripwire(None, raise_disk_error) as calls:
        save(state_dict_of(0), base / "disk", overwrite=True)
    points = [(rank, *call) for rank, names in enumerate(every_rank_says(calls)) for call in enumerate(names)]
    failed = set()
    for i, (rank, at, name) in enumerate(points):
        if message := save_with(base / "disk", rank, tripwire(at, raise_disk_error), 2 * i + 1):
            assert "Input/output error" in message
            failed.add(name)
    assert failed >= {"open", "write", "fsync", "replace", "mkdir"}


# --- Ranks that are killed --------------------------------------------------------------------------------------


def two_of(value: float) -> dict[str, torch.Tensor]:
    """Return two tensors. Each of two ranks writes one."""
    return {key: torch.full((4,), value) for key in "ab"}


def die_while_writing(name: str, path: Path) -> None:
    with mock.patch.object(os, "fsync", lambda _: os._exit(9)) if is_last() else nullcontext():
        WRITERS[name](two_of(0), path)


def test_a_rank_that_is_killed_leaves_the_old_checkpoint_of_any_format(tmp_path: Path) -> None:
    for name, read in READERS.items():
        path, target = tmp_path / name, two_of(0)
        WRITERS[name](two_of(1), path)
        with pytest.raises(RankError, match="rank 1"):
            launch(die_while_writing, 2, name, path, timeout=60)
        read(target, path)
        assert exactly(target) == exactly(two_of(1))
        WRITERS[name](two_of(2), path)
        read(target, path)
        assert exactly(target) == exactly(two_of(2))
    assert sorted(os.listdir(tmp_path)) == sorted(READERS)  # nothing is left of the attempts


# --- Ranks that take long ---------------------------------------------------------------------------------------


def take_long_together() -> list[str]:
    """On a rank: run a step in which all ranks need far longer than the group's timeout, then one in which only the leader does."""
    group = dist.new_group(timeout=timedelta(seconds=60))
    leads, late, clock = dist.get_rank() == 0, 0.0, time.monotonic

    def work(reported_before: bool) -> Callable[[], None]:
        def run() -> None:
            nonlocal late
            if not leads and reported_before:
                return
            if reported_before:
                while steps._inbox.empty():  # the report of the other rank is there
                    pass
            late += 1000.0
            if not reported_before:
                dist.barrier()  # the others work as long as the leader

        return run

    steps, told = Agreement(group, "work"), []
    with mock.patch.object(agreement.time, "monotonic", lambda: clock() + late):
        for reported_before in (False, True):
            told.append(str(error_of(lambda: steps.step("working", work(reported_before)))))
    return told


def test_a_step_may_take_long_if_it_does_on_all_ranks() -> None:
    one, other = launch(take_long_together, 2, timeout=60)
    assert one == other
    assert one[0] == "None" and "rank 0" in one[1] and "no word" in one[1]


# --- In the background -----------------------------------------------------------------------------------------


def fail_and_leave(path: Path) -> int:
    with mock.patch.object(saving.commit, "write_file", side_effect=OSError(errno.ENOSPC, "full")):
        handle = async_save(state_dict_of(5), path, overwrite=True)
        handle.failed()
    return 1


def test_a_failed_save_without_a_wait_fails_the_launch(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="full") as caught:
        launch(fail_and_leave, 2, tmp_path / "c", timeout=60)
    assert isinstance(caught.value.__cause__, CheckpointError)


# Import torch once, and run each program in a fork, with a folder. Print the exit statuses.
PROGRAMS = """
import json, os, sys
import torch
from hwfsdp.checkpoint import async_save, save, saving

children = []
for program, folder in zip(sys.argv[1::2], sys.argv[2::2]):
    children.append(os.fork())
    if not children[-1]:
        os.chdir(folder)
        os.dup2(os.open("stderr", os.O_CREAT | os.O_WRONLY), 2)
        exec(program)
        break
else:
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]))
"""
FAILS_UNHEARD = """
open("file", "w").close()
for path in ("new", "file"):
    async_save({"a": torch.ones(3)}, path)
"""
FORKS_WHILE_IT_SAVES = """
import threading

may_end, agreed = threading.Event(), saving.save_agreed
saving.save_agreed = lambda *args: (may_end.wait(), agreed(*args))[1]
handle = async_save({"a": torch.ones(2)}, "1")
child = os.fork()
if not child:
    saving.save_agreed = agreed
    save({"a": torch.zeros(2)}, "2")
    sys.exit(7)
status = os.waitpid(child, 0)[1]
may_end.set()
handle.wait()
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_at_exit_a_failed_save_is_reported_and_a_fork_does_not_wait_for_a_save_of_its_parent(
    tmp_path: Path,
) -> None:
    fails, forks = tmp_path / "fails", tmp_path / "forks"
    fails.mkdir(), forks.mkdir()
    programs = [FAILS_UNHEARD, str(fails), FORKS_WHILE_IT_SAVES, str(forks)]
    command = [sys.executable, "-W", "ignore", "-c", PROGRAMS, *programs]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ended.stdout == "[1, 7]\n", ended.stderr
    said = (fails / "stderr").read_text()
    assert "a save that nobody waited for has failed" in said and str(fails / "file") in said
    for path, value in ((fails / "new", [1.0] * 3), (forks / "1", [1.0] * 2), (forks / "2", [0.0] * 2)):
        assert load({"a": torch.full((len(value),), 5.0)}, path)["a"].tolist() == value


# --- On three ranks ---------------------------------------------------------------------------------------------


class Sharded(torch.nn.Module):
    """A module with a sharded weight. Its state dict cannot be taken while `fails` is set."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.fails = fails
        self.weight = torch.nn.Parameter(cut(torch.zeros(6), line(), Shard(0)))
        self.register_state_dict_pre_hook(self.hook)

    def hook(self, *_: Any) -> None:
        if self.fails:
            raise OSError("a hook that failed")


@three
def the_next_call_raises_a_failure_of_the_background(base: Path) -> None:
    path = base / "surface"

    def fail() -> Any:
        with mock.patch.object(saving.commit, "write_file", side_effect=OSError(errno.ENOSPC, "full")):
            handle = async_save(state_dict_of(5), path, overwrite=True)
            handle.failed()
        return handle

    def save_one() -> str:
        return save(state_dict_of(1), path, overwrite=True)

    save(state_dict_of(0), path)
    for call in (save_one, lambda: async_save(state_dict_of(1), path, overwrite=True).wait(), finish_saves):
        fail()
        assert "full" in raised(call, CheckpointError)
        call()
    assert "full" in raised(fail().wait, CheckpointError)
    finish_saves()
    fail()
    if dist.get_rank() == 0:
        with pytest.raises(CheckpointError, match="full"):
            finish_saves()
    # rank 0 has heard of it, the others have not
    assert "full" in raised(save_one, CheckpointError)
    save_one()
    assert loaded_from(path) == 1


@three
def a_save_has_two_steps_and_one_in_the_background_asks_first_for_failures(base: Path) -> None:
    with mock.patch.object(Agreement, "step", autospec=True, side_effect=Agreement.step) as step:
        save(state_dict_of(0), base / "counted")
        async_save(state_dict_of(1), base / "counted", keep=1).wait()
    phases = [call.args[1] for call in step.call_args_list]
    assert phases == ["planning", "writing", "ending the save before", "planning", "writing"]


@three
def saves_in_the_background_hold_the_values_of_their_moment(base: Path) -> None:
    """Save in the background, and train during the saves, all in the same group."""
    state_dict, handles, summed = state_dict_of(0), [], torch.ones(1)
    for seed in range(4):
        for key, value in state_dict_of(seed).items():
            if key == "step":
                state_dict["step"] = value
            else:
                state_dict[key].copy_(value)
        handles.append(async_save(state_dict, base / "moments", keep=4))
        state_dict["a"].fill_(-1)
        for _ in range(3):
            dist.all_reduce(summed)
    assert summed.item() == dist.get_world_size() ** 12
    assert [loaded_from(base / "moments" / handle.wait()) for handle in handles] == [0, 1, 2, 3]


@three
def a_rank_without_a_state_dict_fails_one_save_and_the_next_is_of_one_step(base: Path) -> None:
    module = Sharded()
    for step in (1, 2):
        module.fails = step == 1 and is_last()
        with torch.no_grad():
            module.weight.to_local().fill_(step)
        handle = async_save(module, base / "steps", keep=3)
        if step == 1:
            assert "rank 2" in raised(handle.wait, CheckpointError)
    handle.wait()
    module.fails = False
    load(module, base / "steps")
    assert module.weight.full_tensor().eq(2).all()


@three
def a_failed_save_of_some_ranks_is_no_obstacle_to_the_others(base: Path) -> None:
    pair = dist.new_group([0, 1])
    if not is_last():
        with mock.patch.object(saving.commit, "write_file", side_effect=OSError(errno.ENOSPC, "full")):
            async_save({"x": torch.ones(2)}, base / "pair", process_group=pair).failed()
    assert "full" in raised(lambda: save({"x": torch.ones(2)}, base / "all"), CheckpointError)
    save({"x": torch.ones(2)}, base / "all")


@three
def what_one_rank_does_not_have_fails_all(base: Path) -> None:
    for name, read in READERS.items():
        path = base / name
        WRITERS[name](Sharded(), path)
        dist.barrier()
        before = contents_of(path)
        for call in (WRITERS[name], read):
            said = raised(lambda: call(Sharded(is_last()), path), CheckpointError)
            assert "a hook that failed" in said
            assert "a path" in raised(lambda: call(Sharded(), None if is_last() else path), UsageError)
        dist.barrier()
        assert contents_of(path) == before


WRITERS: dict[str, Callable[[Any, Path], Any]] = {
    "store": lambda state, path: save(state, path, overwrite=True),
    "parts": lambda state, path: parts.save(path, state),
    "dcp": lambda state, path: dcp.save(state, path, overwrite=True),
    "safetensors": lambda state, path: convert(state, path, to="safetensors", overwrite=True),
}
READERS = {"store": load, "parts": lambda state, path: parts.load_into(path, state), "dcp": dcp.load}


@pytest.mark.parametrize("check", three.checks)
def test_on_ranks(check: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    three.assert_holds(check, tmp_path_factory.getbasetemp() / "failing")


# --- Disks that do not take the bytes ----------------------------------------------------------------------


@pytest.mark.parametrize("name", WRITERS)
def test_a_disk_that_takes_no_more_is_named_with_the_bytes_and_the_old_checkpoint_stays(name, tmp_path):
    old, new = {"w": torch.ones(1000)}, {"w": torch.ones(1_000_000)}
    if name == "safetensors":
        for source, state in (("old", old), ("new", new)):
            save(state, tmp_path / source)
        old, new = tmp_path / "old", tmp_path / "new"
    WRITERS[name](old, tmp_path / "c.safetensors")
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)  # the system refuses larger files, as a full disk does
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(CheckpointError) as info:
            WRITERS[name](new, tmp_path / "c.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = str(info.value)
    assert re.search(rf"File too large \({tmp_path}/.*4,000,\d\d\d bytes are to be written there", said), said
    assert "What was there before is as it was. Choose a path on another disk." in said
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_a_full_disk_is_called_full_whatever_the_writer_says_in_its_place(tmp_path):
    full = RuntimeError("unexpected pos 896 vs 790")
    full.__context__ = OSError(errno.ENOSPC, "No space left on device")
    got, remedy = of_disk(with_size(full, tmp_path / "f", 12))
    assert got == f"No space left on device ({tmp_path}/f); 12 bytes are to be written there"
    assert "Free space" in remedy
    unrelated = RuntimeError("x")
    unrelated.__context__ = FileNotFoundError(errno.ENOENT, "of somebody else")
    assert with_size(unrelated, "f", 1) is unrelated


def test_an_empty_path_is_not_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    calls = [*WRITERS.values(), *READERS.values(), *(lambda _, path, f=f: f(path) for f in (verify, inspect))]
    for call in calls:
        state = tmp_path if call is WRITERS["safetensors"] else {"w": torch.ones(1)}
        for path in ("", {"w": 1}, None, "a\0b"):
            with pytest.raises(
                UsageError, match="a path; got (an empty one|a dict|a NoneType|one with a NUL)"
            ):
                call(state, path)
    assert not list(tmp_path.iterdir())
