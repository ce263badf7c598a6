"""The notes of ranks about their collectives, against the event log of the same run."""

from __future__ import annotations

import contextlib
import functools
import os
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from commands import run_python
from hwfsdp import fully_shard, launch, record
from hwfsdp.collectives import all_gather_flat, reduce_scatter_flat
from hwfsdp.comm import flight_recorder
from hwfsdp.comm.flight_recorder import SIZE, SLOT, SLOTS, State
from hwfsdp.comm.transport import IssuedCall
from hwfsdp.errors import CollectiveError
from hwfsdp.streams import streams_for


class Group:
    group_name = "0"


GROUP: Any = Group()


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], list[flight_recorder.NotedCall]]:
    """Return a function that reads the notes of this process. They are in their own ring in a file."""
    file = tmp_path / "history"
    file.write_bytes(bytes(SIZE))
    monkeypatch.setenv(flight_recorder.PATH, str(file))
    monkeypatch.setattr(flight_recorder, "_ring", None)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    return lambda: flight_recorder.read(file.read_bytes())


def begin(number: int = 0) -> flight_recorder.Note:
    return flight_recorder.begin("all_gather", f"blocks.{number}", GROUP, torch.bfloat16, 4096)


class Broken:
    def wait(self) -> None:
        raise RuntimeError("Connection reset by peer")


def test_a_note_names_the_collective_its_owner_and_its_group(ring: Any) -> None:
    begin(3)
    assert [tuple(call) for call in ring()] == [
        (1, 1, False, "0:0-1/1", "all_gather", "bfloat16", 4096, "blocks.3", State.WAIT)
    ]


def test_a_full_ring_keeps_the_last_calls_in_order_and_old_notes_do_not_touch_them(ring: Any) -> None:
    old = begin()
    for number in range(2 * SLOTS + 7):
        begin(number)
    old.mark(State.FAILED)
    assert [call.owner for call in ring()] == [f"blocks.{n}" for n in range(SLOTS + 7, 2 * SLOTS + 7)]
    assert {call.state for call in ring()} == {State.WAIT}


def test_the_state_follows_the_work_and_its_errors(ring: Any) -> None:
    while_waiting: list[State] = []
    ends = mock.Mock(wait=lambda: while_waiting.append(ring()[-1].state))
    for work, async_op, issued, waited in [
        (ends, True, State.OPEN, State.DONE),
        (Broken(), True, State.OPEN, State.FAILED),
        (None, True, State.DONE, State.DONE),  # it kept the host until it was done
        (None, False, State.OPEN, State.OPEN),  # a device does it some time
    ]:
        note = begin()
        assert ring()[-1].state is State.WAIT
        followed = IssuedCall("all_gather", "group", note).follow(work, async_op)
        assert ring()[-1].state is issued
        if followed is not None:
            with mock.patch.object(dist, "get_rank", lambda: 0), contextlib.suppress(CollectiveError):
                followed.wait()
        assert ring()[-1].state is waited
    assert while_waiting == [State.WAIT]
    with pytest.raises(ValueError, match="no"), IssuedCall("all_gather", "group", begin()):
        raise ValueError("no")  # it cannot be issued
    assert ring()[-1].state is State.FAILED


def test_a_long_name_is_cut_and_leaves_the_neighbors_alone(ring: Any) -> None:
    for owner in ("first", "é" * 2 * SLOT, "last"):
        flight_recorder.begin("all_gather", owner, GROUP, torch.float32, 1)
    first, long, last = ring()
    assert (first.owner, last.owner) == ("first", "last")
    assert set(long.owner) <= {"é", "\N{REPLACEMENT CHARACTER}"}


@given(st.binary(max_size=2 * SIZE))
def test_reading_any_bytes_as_a_history_never_raises(memory: bytes) -> None:
    flight_recorder.read(memory)


@given(st.integers(0, SLOT - 1), st.binary(min_size=1, max_size=8))
def test_a_damaged_note_is_left_out_or_read_and_its_neighbors_stay(at: int, damage: bytes) -> None:
    notes = [f"d{n} {n} 0 0:0-1/1 all_gather float32 8 b.{n}".encode().ljust(SLOT, b"\0") for n in (1, 2)]
    damaged = (notes[0][:at] + damage)[:SLOT].ljust(SLOT, b"\0")
    assert any(call.owner == "b.2" for call in flight_recorder.read(damaged + notes[1]))


def test_the_ranks_of_a_group_are_read_out_of_its_name() -> None:
    for ranks in ([3], [0, 1, 2], [0, 4, 8, 12], [5, 1], [0, 1, 5, 6], [2, 2]):
        assert flight_recorder.members_of(f"any:name:{flight_recorder._as_text(ranks)}") == ranks


# --- On ranks ----------------------------------------------------------------------------------------------


def own_calls() -> list[flight_recorder.NotedCall]:
    return flight_recorder.read(Path(os.environ[flight_recorder.PATH]).read_bytes())


def shard(mesh: Any = None) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(4, 2))
    for block in model[:2]:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def users_collectives() -> list[tuple[str, int, int]]:
    odd = dist.new_group([0, 2])
    dist.all_reduce(torch.ones(1))
    with record():
        dist.all_reduce(torch.ones(3))
        if dist.get_rank() == 1:
            dist.send(torch.ones(1), 0)
        elif dist.get_rank() == 0:
            dist.recv(torch.empty(1), 1)
        if dist.get_rank() in (0, 2):
            work = dist.broadcast(torch.ones(5), 0, group=odd, async_op=True)
            work.wait()
            work.get_future().wait()
        fully_shard(nn.Linear(4, 4))(torch.ones(1, 4))
    return [
        (f"{c.op} of {flight_recorder.members_of(c.group)}", c.number, c.is_users, c.state)
        for c in own_calls()
    ]


def steps_logged_and_noted(mesh: Any) -> tuple[list[Any], list[Any], set[State]]:
    model = shard(mesh)
    model(torch.ones(2, 4)).sum().backward()
    before = len(own_calls())
    with record() as log:
        model(torch.ones(2, 4)).sum().backward()
    logged = log.select("all_gather", "reduce_scatter", "all_reduce")
    noted = own_calls()[before:]
    return (
        [(e.op, e.owner, e.dtype, e.bytes) for e in logged],
        [(c.op, c.owner, c.dtype, c.nbytes) for c in noted],
        {call.state for call in noted},
    )


def flat_collectives() -> list[tuple[str, str, str, int]]:
    before, streams = len(own_calls()), streams_for("cpu")
    part, whole = torch.ones(2, dtype=torch.float64), torch.ones(8, dtype=torch.float64)
    streams.compute.wait(all_gather_flat(whole, part, None, streams.all_gather, "unit"))
    streams.compute.wait(reduce_scatter_flat(part, whole, None, streams.reduce_scatter, "unit"))
    return [(c.op, c.owner, c.dtype, c.nbytes) for c in own_calls()[before:]]


def on_a_rank() -> dict[str, Any]:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s"))
    alone = init_device_mesh("cpu", (4, 1), mesh_dim_names=("r", "s"))["s"]
    return {
        "of the user": users_collectives(),
        "steps": [steps_logged_and_noted(mesh) for mesh in (None, grid)],
        "alone": steps_logged_and_noted(alone),
        "flat": flat_collectives(),
    }


@functools.cache
def noted() -> list[dict[str, Any]]:
    with mock.patch.dict(os.environ, TORCH_DISTRIBUTED_DEBUG="OFF"):
        return launch(on_a_rank, 4, timeout=60)


def test_after_a_step_the_notes_are_the_collectives_of_the_event_log_and_all_are_done() -> None:
    for rank in noted():
        for logged, found, states in rank["steps"]:
            assert found == logged and len(found) > 4
            assert states == {State.DONE}
        assert rank["alone"] == ([], [], set())  # one rank alone
        flat = [(op, "unit", "float64", 64) for op in ("all_gather", "reduce_scatter")]
        assert rank["flat"] == flat  # with the bytes of the whole


def test_a_world_of_one_rank_has_nothing_to_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(flight_recorder.PATH, raising=False)
    monkeypatch.setattr(flight_recorder, "_ring", None)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        flight_recorder.begin("all_gather", "blocks.0", None, torch.float32, 4096)
        assert flight_recorder.exchange() == {}
    finally:
        dist.destroy_process_group()


class AskedOnce(dict[str, bytes]):
    """A store in which a rank has asked once. Then the run ends."""

    set = dict.__setitem__

    def wait(self, keys: list[str], _: object) -> None:
        if keys != [flight_recorder._key(1, flight_recorder._ASKED)]:
            raise RuntimeError("the store is gone")


def test_a_rank_that_is_asked_tells_its_calls_under_its_own_key(ring: Any) -> None:
    begin(3)
    store = AskedOnce()
    flight_recorder._answer(flight_recorder._start(), store, 5)
    [(key, said)] = store.items()
    assert key == flight_recorder._key(1, 5) and flight_recorder._unpacked(said).calls == ring()


def test_the_users_collectives_are_noted_once_while_recording_or_not_and_numbered_with_fsdps() -> None:
    for rank, found in enumerate(noted()):
        everyone = "of [0, 1, 2, 3]"
        broadcast = [("broadcast(src=0) of [0, 2]", 1, True, State.DONE)] if rank in (0, 2) else []
        assert found["of the user"] == [
            (f"all_reduce {everyone}", 1, True, State.DONE),
            (f"all_reduce {everyone}", 2, True, State.DONE),
            *broadcast,
            (f"connect {everyone}", 1, False, State.DONE),
            (f"all_gather {everyone}", 3, False, State.DONE),
        ]


SCRIPT = """
    import sys, threading, torch, torch.distributed as dist
    from datetime import timedelta
    from pathlib import Path
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from hwfsdp import CollectiveError, fully_shard

    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, folder = dist.get_rank(), Path(sys.argv[1])

    def shard(seconds):
        mesh = DeviceMesh.from_group(dist.new_group(timeout=timedelta(seconds=seconds)), "cpu")
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
        for block in model:
            fully_shard(block, mesh=mesh)
        model = fully_shard(model, mesh=mesh)
        model(torch.ones(1, 4))
        return model

    model = shard(seconds=60)
    try:
        model[rank](torch.ones(1, 4 + 2 * rank))
    except CollectiveError as error:
        (folder / f"skip-{rank}").write_text(str(error))
    model = shard(seconds=2)
    if rank == 1:
        threading.Event().wait()  # here
    try:
        model(torch.ones(1, 4))
    except CollectiveError as error:
        (folder / "hang").write_text(str(error))
    sys.exit(3)
"""


@pytest.mark.long
def test_under_torchrun_the_error_of_each_rank_has_the_table_of_all_even_of_one_that_hangs(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run_python("-m", *torchrun, script, tmp_path, timeout=120, TORCH_DISTRIBUTED_DEBUG="OFF")
    first, second = ((tmp_path / f"skip-{rank}").read_text() for rank in (0, 1))
    assert "\n\nrank 1 called all_gather of '1' where rank 0 called all_gather of '0': " in first
    assert first.split("\n\n")[1] == second.split("\n\n")[1]
    line = 1 + next(n for n, text in enumerate(script.read_text().splitlines()) if "# here" in text)
    hang = (tmp_path / "hang").read_text()
    assert f"; rank 1 has not called it; rank 1 is in {script}:{line}, in <module>.\n" in hang
