"""Tests of ranks that fail, die or hang in a step, and of what the other ranks learn."""

from __future__ import annotations

import os
import signal
import threading
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_checks import every_rank_says, raised
from together import Together

from hwfsdp import CheckpointError, FSDPError, RankError, StateError, UsageError, launch
from hwfsdp.checkpoint import agreement as links
from hwfsdp.checkpoint.agreement import Agreement
from hwfsdp.compat import receive_bytes, send_bytes
from hwfsdp.launcher import supervisor

LATER = threading.Event()  # never set


on_ranks = Together(3)


def told_to_all(reports: list[Any]) -> list[list[Any]]:
    return [reports] * len(reports)


@on_ranks
def the_leader_answers_every_rank() -> None:
    agreement = Agreement(None, "test")
    for n in range(3):
        assert agreement.step(
            "adding",
            lambda: (agreement.rank, n),
            lambda reports: [[r, n, sum(a for a, _ in reports)] for r, n in reports],
        ) == [agreement.rank, n, 3]
    assert agreement.step("resting", lambda: None) is None


ERRORS = [
    UsageError("state_dict['x']", expected="a", got="b", remedy="C."),
    StateError("here", expected="a", got="b", remedy="C."),
    CheckpointError("a file", expected="a", got="b", remedy="C.").at("a file", "state_dict['x']", 7),
    OSError(28, "No space left on device", "/some/file"),
    ZeroDivisionError("division\nby zero"),
    MemoryError(),
]
PLACES = [(0, "work"), (1, "work"), (2, "work"), (0, "decide")]


@on_ranks
def the_error_of_one_is_the_error_of_all() -> None:
    """Raise the error on one rank, in its work or in the leader's decision."""
    for (rank, where), error in product(PLACES, ERRORS):
        agreement = Agreement(None, "test")

        def fail(here: str) -> None:
            if here == where and agreement.rank == rank:
                raise error

        def decide(reports: list[Any]) -> list[Any]:
            fail("decide")
            return reports

        kind = type(error) if isinstance(error, FSDPError) else CheckpointError
        with pytest.raises(kind) as info:
            agreement.step("failing", lambda: fail("work"), decide)
        cause, message = info.value.__cause__, str(info.value)
        assert agreement.rank != rank or cause is error or str(cause) == str(error)
        assert every_rank_says(message) == [message] * 3 and "\n" not in message
        told = not isinstance(error, FSDPError) or rank > 0  # any rank may meet an error of rank 0
        assert (f", rank {rank}:" in message) == told
        assert (getattr(error, "strerror", None) or str(error).split("\n")[0].split(": ")[0]) in message
        if isinstance(error, CheckpointError):
            assert [getattr(info.value, name) for name in ("file", "key", "offset")] == [
                "a file",
                "state_dict['x']",
                7,
            ]


@on_ranks
def ranks_that_still_work_are_stopped() -> None:
    """Check that the other ranks stop as soon as one has failed. Else they would run until the launch is over."""
    agreement = Agreement(None, "test")

    def work() -> None:
        if agreement.rank == 1:
            raise ValueError("stop")
        while True:
            LATER.wait(0.01)
            agreement.check()

    with pytest.raises(CheckpointError, match="rank 1"):
        agreement.step("working", work)


@on_ranks
def ranks_that_do_different_things_are_told_so() -> None:
    what = "thing 1" if dist.get_rank() == 1 else "thing"
    message = raised(lambda: Agreement(None, what).step("doing", lambda: None))
    assert message.startswith("thing, doing: expected rank 1 to be there, too; got 'thing 1, doing'.")


@on_ranks
def groups_and_agreements_do_not_mix() -> None:
    groups = [dist.new_group([0, 2]), dist.new_group([0, 1, 2])]
    for group in groups if dist.get_rank() != 1 else groups[1:]:
        several, ranks = [Agreement(group, "test") for _ in range(3)], dist.get_process_group_ranks(group)
        dist.all_reduce(torch.zeros(8), group=group)
        for agreement in reversed(several):
            assert agreement.step("asking", dist.get_rank, told_to_all) == ranks
    if dist.get_rank() == 1:
        with pytest.raises(UsageError, match="got one without rank 1"):
            Agreement(groups[0], "test")


test_on_ranks = on_ranks.test()


def test_a_process_alone_needs_no_group():
    assert Agreement(None, "test").step("adding", lambda: 1, lambda reports: [reports]) == [1]
    with pytest.raises(CheckpointError, match="test, adding: .* got KeyError: 'x'"):
        Agreement(None, "test").step("adding", lambda: {}["x"])


def go_on_after_a_failure(fifo: Path) -> Any:
    """Let the leader fail at once. The others end their part of this step when the leader is in the next step."""
    agreement = Agreement(None, "test")

    def fail_or_wait() -> None:
        if agreement.rank == 0:
            raise OSError(28, "No space left on device", "/some/file")
        fifo.read_text()

    def release() -> int:
        if agreement.rank == 0:
            fifo.write_text("go on")
        return agreement.rank

    overtaken = threading.Event()

    def send_late(group: Any, data: Any, rank: int, tag: int) -> None:
        said = data.numpy().tobytes()
        if b"failing" in said:  # after its size; the report of the next step goes between the two
            overtaken.wait()
        send_bytes(group, data, rank, tag)
        if b"going on" in said:
            overtaken.set()

    links.send_bytes = send_late if agreement.rank else send_bytes
    with pytest.raises(CheckpointError, match="No space left"):
        agreement.step("failing", fail_or_wait)
    return agreement.step("going on", release, told_to_all)


def test_a_late_report_of_a_failed_step_does_not_count_for_the_next_step(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    assert launch(go_on_after_a_failure, 2, tmp_path / "fifo", timeout=60) == [[0, 1]] * 2


def die(victim: int, point: str, path: Path) -> None:
    agreement = Agreement(None, "test")

    def kill(here: str) -> None:
        if agreement.rank == victim and here == point:
            os.kill(os.getpid(), signal.SIGKILL)

    def work() -> None:
        kill("work")
        while point == "work" and agreement.rank == 0:  # the leader must not wait for its own work to end
            LATER.wait(0.01)
            agreement.check()

    def decide(reports: list[Any]) -> list[Any]:
        kill("decide")
        return reports

    agreement.step("beginning", lambda: None)  # until all are connected to all
    kill("before")
    try:
        agreement.step("dying", work, decide)
    except CheckpointError as error:
        (path / str(agreement.rank)).write_text(str(error))
        LATER.wait(5)  # until launch ends this rank, so that launch does not take it for the first to end
        raise


@pytest.mark.parametrize(("victim", "point"), [(0, "before"), (1, "work"), (0, "decide")])
def test_all_survivors_name_the_dead(victim, point, tmp_path):
    with pytest.raises(RankError) as raised:
        launch(die, 3, victim, point, tmp_path, timeout=60)
    assert raised.value.rank == victim and "SIGKILL" in str(raised.value)
    for rank in {0, 1, 2} - {victim}:
        assert f"expected rank {victim} to do its part" in (tmp_path / str(rank)).read_text()


def die_unanswered(path: Path) -> None:
    """Let rank 2 die after its report. The leader's answer to it is one of the sends that gloo forgets."""

    def send_bytes_or_die(group: dist.ProcessGroup, data: torch.Tensor, rank: int, tag: int) -> None:
        if dying and dist.get_rank() == 0 and rank == 2:
            with pytest.raises(RuntimeError):  # raised as soon as rank 0 knows of the end
                receive_bytes(group, torch.empty(1, dtype=torch.uint8), rank, 7)
            threading.Event().wait()
        send_bytes(group, data, rank, tag)
        if dying and dist.get_rank() == 2 and data.numel() > 8:  # not the size alone
            os.kill(os.getpid(), signal.SIGKILL)

    dying = False
    agreement = Agreement(None, "test")
    agreement.step("beginning", lambda: None)
    links.send_bytes, dying = send_bytes_or_die, True
    try:
        agreement.step("dying", lambda: None)
        agreement.step("dying later", lambda: None)
    except CheckpointError as error:
        (path / str(agreement.rank)).write_text(str(error))
        raise


def test_the_leader_waits_for_no_answer_to_a_dead_rank(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "_GRACE", 60.0)  # time to wait for the other ranks
    with pytest.raises(RankError):
        launch(die_unanswered, 3, tmp_path, timeout=20)
    for rank in (0, 1):
        assert "expected rank 2 to do its part; got a broken" in (tmp_path / str(rank)).read_text()


def hang(base: Path) -> list[str]:
    """Return the errors of this rank when rank 0 hangs, and when rank 2 hangs."""
    found = []
    for sleeper in (0, 2):
        group = dist.new_group(timeout=timedelta(seconds=2), backend="gloo")
        agreement, done = Agreement(group, "test"), base / str(sleeper)
        done.mkdir(exist_ok=True)

        def work() -> None:
            while agreement.rank == sleeper and len(list(done.iterdir())) < 2:
                LATER.wait(0.01)

        with pytest.raises(CheckpointError) as raised:
            agreement.step("hanging", work)
        (done / str(agreement.rank)).touch()
        found.append(str(raised.value))
        dist.barrier()
        # and the group can still be used
        assert Agreement(group, "again").step("going on", lambda: 1, lambda reports: reports) == 1
    return found


def test_a_rank_that_hangs_is_named_by_the_others(tmp_path):
    for rank, found in enumerate(launch(hang, 3, tmp_path, timeout=60)):
        for sleeper, message in zip((0, 2), found, strict=True):
            named = f"expected rank {sleeper} to do its part; got no word" in message
            assert named or rank == sleeper


def agree_on_gpus(base: Path) -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("cuda:gloo", init_method=f"file://{base}/store", rank=rank, world_size=size)
    return Agreement(None, "test").step("adding", lambda: rank, told_to_all)


def test_ranks_agree_where_their_group_moves_tensors_of_gpus_only(tmp_path):
    """NCCL's group is such a group. The second group, for messages between ranks, has the same time limit."""
    assert launch(agree_on_gpus, 2, tmp_path, timeout=60) == [[0, 1]] * 2
