"""Launch ranks: results come back, failures are named, no process stays."""

from __future__ import annotations

import multiprocessing
import fcntl
import gc
import itertools
import os
import pickle
import re
import select
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import suites
import torch
import torch.distributed as dist
from torch import nn

from commands import run_python
from hwfsdp import FSDPError, RankError, UsageError, fully_shard, launch
from hwfsdp.launcher import supervisor
from hwfsdp.launcher import launch as launching
from hwfsdp.launcher import worker
from hwfsdp.launcher.launch import run_ranks
from hwfsdp.launcher.supervisor import RankOptions, read_message


def all_end(pids: list[int], seconds: float = 20) -> bool:
    """Return True if all these processes end within some seconds."""
    for pid in pids:
        try:
            process = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            if not select.select([process], [], [], seconds)[0]:
                return False
        finally:
            os.close(process)
    return True


def test_ranks_get_arguments_print_through_the_caller_and_return_results_in_rank_order(capsys):
    sizes = [0, 1, 1 << 16, 5 << 20]

    def describe(greeting: str, *, mark: str) -> tuple[str, int, list[bytes]]:
        print(f"rank {dist.get_rank()} speaks")
        return greeting + mark, dist.get_rank(), [b"x" * size for size in sizes]

    everything = [b"x" * size for size in sizes]
    assert launch(describe, 2, "hi", mark="!", timeout=60) == [("hi!", rank, everything) for rank in range(2)]
    assert sorted(capsys.readouterr().out.splitlines()) == ["rank 0 speaks", "rank 1 speaks"]


def test_ranks_are_new_processes_and_see_the_environment_of_the_call_not_that_of_the_server(monkeypatch):
    def look() -> tuple[int, int, str | None]:
        dist.calls = getattr(dist, "calls", 0) + 1  # type: ignore[attr-defined]
        return dist.calls, os.getpid(), os.getenv("HWFSDP_TEST_VARIABLE")  # type: ignore[attr-defined]

    [first] = launch(look, 1, timeout=60)
    monkeypatch.setenv("HWFSDP_TEST_VARIABLE", "late")
    [second] = launch(look, 1, timeout=60)
    assert (first[0], first[2], second[0], second[2]) == (1, None, 1, "late")
    assert first[1] != second[1]


def test_all_ranks_begin_with_the_seed_of_the_caller() -> None:
    def first_numbers() -> tuple[int, list[float]]:
        return torch.initial_seed(), torch.rand(3).tolist()

    own = torch.rand(3, generator=torch.Generator().manual_seed(torch.initial_seed())).tolist()
    assert launch(first_numbers, 2, timeout=60) == [(torch.initial_seed(), own)] * 2


FOREIGN_SERVER = """
    import multiprocessing, sys
    from hwfsdp import launch

    def child():
        pass

    def is_preloaded():
        return "hwfsdp.launcher.preload" in sys.modules

    if __name__ == "__main__":
        process = multiprocessing.get_context("forkserver").Process(target=child)
        process.start()
        process.join()
        print(launch(is_preloaded, 2, timeout=100))
"""


def test_ranks_import_what_they_need_if_the_script_has_started_the_server_itself(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(textwrap.dedent(FOREIGN_SERVER))
    done = run_python(tmp_path / "script.py", timeout=120)
    assert done.stdout == "[True, True]\n", done.stderr


def gloo_threads() -> list[int]:
    """Return the number of threads that run the collectives of the default group, and of a group that the rank makes."""
    groups = [dist.group.WORLD, dist.new_group(timeout=timedelta(seconds=77))]
    options = [group._get_backend(torch.device("cpu")).options for group in groups]
    assert options[1]._timeout == timedelta(seconds=77)
    return [each._threads for each in options]


def test_no_gloo_group_of_a_rank_runs_two_collectives_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's two threads free the same memory if gathers of DTensors end at the same time."""
    monkeypatch.delenv("HWFSDP_GLOO_THREADS", raising=False)
    for interface in ("", "lo"):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
        assert launch(gloo_threads, 2) == [[1, 1], [1, 1]]


def test_an_exception_names_the_rank_and_carries_its_traceback_and_cause() -> None:
    def fail_on_one() -> None:
        if dist.get_rank() == 1:
            raise KeyError("lost")
        dist.barrier()

    with pytest.raises(RankError, match="rank 1.*KeyError: 'lost'") as caught:
        launch(fail_on_one, 3, timeout=60)
    assert caught.value.rank == 1
    assert "in fail_on_one" in caught.value.traceback
    assert isinstance(caught.value.__cause__, KeyError)
    assert isinstance(caught.value, FSDPError)


@pytest.mark.parametrize(
    ("leave", "how"),
    [
        (lambda: os._exit(0), "exit with status 0 before the function returned"),
        (lambda: sys.exit(3), "SystemExit: 3"),
    ],
)
def test_a_rank_that_leaves_is_named_and_not_its_neighbors(leave: Callable[[], None], how: str) -> None:
    def leave_from_one() -> None:
        if dist.get_rank() == 1:
            leave()
        dist.all_reduce(torch.ones(1))

    with pytest.raises(RankError, match=how) as caught:
        launch(leave_from_one, 2, timeout=60)
    assert caught.value.rank == 1


def test_a_hang_ends_in_time_with_the_place_of_every_rank_and_no_process_left(tmp_path: Path) -> None:
    def hang() -> None:
        (tmp_path / str(dist.get_rank())).write_text(str(os.getpid()))
        model = fully_shard(nn.Linear(4, 4))
        if dist.get_rank() == 1:
            threading.Event().wait()
        model(torch.ones(1, 4))

    with pytest.raises(RankError) as caught:
        launch(hang, 2, timeout=4)
    assert caught.value.rank == 1
    assert "rank 0 waiting in all_gather of parameter group 'Linear'" in caught.value.got
    assert re.match("rank 0 waits in collective .*; rank 1 has not called it; ", str(caught.value))
    assert "rank 1 in no collective" in caught.value.got
    assert "in hang" in caught.value.traceback
    assert all_end([int((tmp_path / str(rank)).read_text()) for rank in range(2)], seconds=1)


def in_calls_of_its_own(folder: Path) -> None:
    """Wait in a call of torch.distributed that no other rank makes. Rank 3 raises when all others wait."""
    rank, pair = dist.get_rank(), dist.new_group([2, 3])

    def announce() -> None:
        while not worker.describe_wait():
            threading.Event().wait(0.01)
        (folder / str(rank)).touch()

    threading.Thread(target=announce, daemon=True).start()
    if rank == 0:
        dist.recv(torch.ones(2, 3))  # here 0
    if rank == 1:
        dist.broadcast_object_list([None], 0)  # here 1
    if rank == 2:
        work = dist.all_reduce(torch.ones(4), group=pair, async_op=True)
        work.wait()  # here 2
    if rank == 4:
        operation = dist.P2POp(dist.irecv, torch.ones(5), 0)
        dist.batch_isend_irecv([operation])[0].wait()  # here 4
    if rank == 5:
        dist.all_reduce(torch.ones(1), async_op=True)
        dist.barrier()  # here 5
    while len(list(folder.iterdir())) < 5:
        threading.Event().wait(0.01)
    worker.destroy_process_group = lambda: threading.Event().wait()  # type: ignore[assignment]  # keep connections
    raise KeyError("lost")


def test_the_table_names_the_users_own_call_in_which_each_rank_waits_its_shape_and_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "OFF")  # else torch waits in each call, to compare it
    with pytest.raises(RankError, match="rank 3 raised KeyError") as caught:
        launch(in_calls_of_its_own, 6, tmp_path, timeout=90)
    waits = {
        0: "recv (yours) of float32 [2, 3] from any rank",
        1: "broadcast (yours) of int64 [1] (broadcast_object_list)",
        2: "all_reduce (yours) of float32 [4] in ranks [2, 3]",
        4: "recv (yours) of float32 [5] from 0 (batch_isend_irecv)",
        5: "barrier (yours)",
    }
    text, lines = caught.value.table, Path(__file__).read_text().splitlines()
    for rank, wait in waits.items():
        line = 1 + next(number for number, line in enumerate(lines) if line.endswith(f"# here {rank}"))
        assert f"test_launch.py:{line}, in in_calls_of_its_own, waiting in {wait}\n" in f"{text}\n"
    rows = [line.split()[-6:] for line in text.splitlines() if re.search(r"all_reduce +\(yours\) ", line)]
    assert ["–", "–", "–", "–", "–", "open"] in rows  # nobody waited for it, and it holds the barrier up


class Broken:
    def __reduce__(self) -> object:
        return int, ("not a number",)


def test_a_result_that_cannot_come_back_is_named_with_its_rank() -> None:
    for give, said in [
        (Broken, "rank 1.*cannot be unpickled"),
        (threading.Lock, "the result of the function: expected a value that can be pickled.*lock"),
    ]:
        with pytest.raises(RankError, match=said) as caught:
            launch(lambda: give() if dist.get_rank() == 1 else None, 2, timeout=60)  # noqa: B023
        assert caught.value.rank == 1


def generate() -> Any:
    yield 1


async def wait_for_nothing() -> None:
    pass


REFUSED: list[tuple[Any, Any, dict[str, Any], str, type[Exception]]] = [
    (2, os.getpid, {}, "a function; got 2 .int.. Pass the function first", TypeError),
    (generate, 1, {}, "returns its result; got generate, a generator", TypeError),
    (wait_for_nothing, 1, {}, "returns its result; got wait_for_nothing, a ", TypeError),
    (os.getpid, "2", {}, "an int; got '2' .str.. Convert it", TypeError),
    (os.getpid, True, {}, "an int; got True", TypeError),
    (os.getpid, 0, {}, "1 or more; got 0", ValueError),
    (os.getpid, 1, {"timeout": "5"}, "a number of seconds, or None; got '5'", TypeError),
    (os.getpid, 1, {"timeout": 0}, "above 0 seconds; got 0", ValueError),
    (os.getpid, 1, {"timeout": float("nan")}, "a finite number .*Leave it out for no limit", ValueError),
    (os.getpid, 1, {"device": None}, "'cpu' or 'cuda'; got None", ValueError),
    (os.getpid, 1, {"device": "cuda:0"}, "Pass 'cuda' for GPUs .rank i runs on GPU i.", ValueError),
    (os.getpid, 1, {"device": "cuda"}, "without it. Install such a torch, or pass device='cpu'", ValueError),
    (print, 1, {"lock": threading.Lock()}, "argument lock of fn: .* can be pickled.*lock", TypeError),
]


def test_unusable_arguments_are_refused_before_a_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    monkeypatch.setattr(launching, "run_ranks", None)
    for fn, world_size, options, says, kind in REFUSED:
        with pytest.raises(UsageError, match=says) as caught:
            launch(fn, world_size, **options)
        assert isinstance(caught.value, kind)


NO_DRIVER = """
    import torch

    def asked(*_):
        raise AssertionError("a driver was asked for GPUs")

    torch.cuda.is_available = torch.cuda.device_count = asked
    if torch.version.cuda:
        torch._C._cuda_getDeviceCount = asked
    import hwfsdp.launcher.preload
"""


def test_ranks_can_use_a_gpu_because_their_server_never_counts_gpus() -> None:
    """CUDA refuses to start in a process whose parent asked for the number of GPUs before the fork."""
    done = run_python("-c", textwrap.dedent(NO_DRIVER), timeout=120)
    assert done.returncode == 0, done.stderr
    assert launch(lambda: getattr(torch._C, "_cuda_isInBadFork", bool)(), 1, timeout=60) == [False]


SCRIPT = """
    import os, sys, torch
    import torch.distributed as dist
    from torch import nn
    from hwfsdp import fully_shard, launch

    print("top level")

    class Net(nn.Linear):
        pass

    def step(scale):
        model = fully_shard(Net(4, 4))
        model(torch.full((2, 4), scale)).sum().backward()
        return os.getpid(), float(model.weight.grad.full_tensor().sum())

    for _ in range(8 if "RANK" in os.environ else 1):
        results = launch(step, int(os.environ.get("WORLD_SIZE", 2)), 2.0, timeout=90)
        assert [total for _, total in results] == [64.0, 64.0], results
    print("pids", *(pid for pid, _ in results), flush=True)
"""


STAY = """
    def stay():
        if dist.get_rank() == 0:
            print("ranks", os.getpid(), os.getppid(), flush=True)
        dist.barrier()
        import threading
        threading.Event().wait()

    launch(stay, 2)
"""


def script(tmp_path: Path, text: str = SCRIPT) -> str:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


def test_a_plain_script_without_a_main_guard_runs_once_and_leaves_no_process_even_when_it_is_killed(tmp_path):
    command = [sys.executable, script(tmp_path, SCRIPT + STAY)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        first, second, third = (started.stdout.readline().split() for _ in range(3))
        assert (first, second[0], third[0]) == (["top", "level"], "pids", "ranks")
        of_the_first_launch = [int(pid) for pid in second[1:]]
        assert len(of_the_first_launch) == 2
        assert all_end(of_the_first_launch, seconds=1)
        started.kill()
    assert all_end([int(pid) for pid in third[1:]])  # a rank, and the server


@pytest.mark.long
def test_the_same_script_runs_on_two_nodes(tmp_path: Path) -> None:
    """Two agents with one rank each meet on loopback. The first one chooses the port."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    path = script(tmp_path)
    common = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", port]
    command, pipe = [sys.executable, "-m", "torch.distributed.run", *common, "--node-rank"], subprocess.PIPE
    nodes = [
        subprocess.Popen([*command, str(node), path], stdout=pipe, stderr=pipe, text=True)
        for node in range(2)
    ]
    outputs = [node.communicate(timeout=180) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert all("pids" in out for out, _ in outputs)


def test_under_torchrun_another_world_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UsageError, match="4; got world_size=2"):
        launch(os.getpid, 2)


def test_ranks_that_torchrun_starts_again_do_not_read_addresses_of_ranks_that_are_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On one machine, all ranks know how often they were started. Torchruns of several machines count for themselves."""
    store = dist.HashStore()
    monkeypatch.setattr(worker, "_stores", [(store, 0, 1)])

    def meet(machines: int, restarts: int) -> Any:
        monkeypatch.setattr(worker, "_meetings", itertools.count())
        monkeypatch.setenv("GROUP_WORLD_SIZE", str(machines))
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
        ((below, *_),) = worker._meet_once_more("")
        return below

    meet(1, restarts=0).set("address of rank 0", "gone")
    assert not meet(1, restarts=1).check(["address of rank 0"])
    meet(2, restarts=3).set("address of rank 0", "there")
    assert meet(2, restarts=4).check(["address of rank 0"])


# --- Ranks that are not trusted ----------------------------------------------------------------------------


class Evil:
    """An object that would write a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.fixture
def evil(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "evil"
    assert not (tmp_path / "evil").exists()


def untrusted(fn: Callable[..., Any], *args: Any, timeout: float = 30.0) -> list[Any]:
    call = cloudpickle.dumps((fn, args, {}))
    return run_ranks(call, 1, RankOptions(timeout, write=lambda text: None, unpickle=None))


def own_connection() -> Connection:
    """Find the connection of this rank with its caller."""
    gc.unfreeze()
    (found,) = [o for o in gc.get_objects() if isinstance(o, Connection) and not o.closed]
    return found


def test_the_result_of_an_untrusted_rank_stays_bytes(evil: Path) -> None:
    (returned,) = untrusted(Evil, evil)
    assert isinstance(returned, bytes)
    with pytest.raises(pickle.UnpicklingError):
        read_message(returned)


def raise_evil(path: Path) -> None:
    error = ValueError("no")
    error.evil = Evil(path)  # type: ignore[attr-defined]
    raise error


def forge(path: Path) -> None:
    own_connection().send_bytes(pickle.dumps(("return", Evil(path))))


def begin_a_message(path: Path) -> None:
    os.write(own_connection().fileno(), b"\0\0\1\0half")
    threading.Event().wait()


@pytest.mark.parametrize(
    ("fn", "words", "reason", "timeout"),
    [
        (raise_evil, "ValueError: no", "raised", 30.0),
        (forge, "a message that cannot be read", "died", 30.0),
        (begin_a_message, "no return within 3 s", "late", 3.0),
    ],
)
def test_errors_and_forged_messages_of_an_untrusted_rank_are_text(fn, words, reason, timeout, evil):
    with pytest.raises(RankError, match=words) as caught:
        untrusted(fn, evil, timeout=timeout)
    assert caught.value.__cause__ is None and caught.value.reason == reason


# --- Processes ---------------------------------------------------------------------------------------------


def policies() -> set[int]:
    """Return the scheduling policies of all threads of this process."""
    return {os.sched_getscheduler(int(thread)) for thread in os.listdir("/proc/self/task")}


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no batch work")
def test_all_threads_of_a_rank_are_batch_work_so_none_interrupts_a_sender() -> None:
    before = policies()
    assert launch(policies, 2) == [{os.SCHED_BATCH}] * 2
    assert policies() == before


LONG_PATH = """
    import os
    from hwfsdp import launch
    from hwfsdp.launcher.fork_server import fork_here
    {begin}
    print(launch(os.getpid, 2), os.environ["TMPDIR"])
"""


@pytest.mark.parametrize("begin", ["", suites.long("fork_here()")], ids=["its own server", "a fork"])
def test_ranks_start_where_temporary_files_lie_in_a_folder_with_a_long_path(
    begin: str, tmp_path: Path
) -> None:
    """The path of a Unix socket has at most 107 bytes."""
    (folder := tmp_path / ("long" * 30)).mkdir()
    done = run_python(script(tmp_path, LONG_PATH.format(begin=begin)), TMPDIR=str(folder))
    assert done.returncode == 0 and done.stdout.endswith(f"{folder}\n"), done.stderr


def hold(path: Path, held: Any) -> None:
    """Lock a file, say so, and write to it if nobody ends this process first."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        held.set()
        threading.Event().wait(20)
        file.write("still there")


def start_a_helper(folder: Path) -> None:
    held, path = multiprocessing.Event(), folder / str(dist.get_rank())
    helper = multiprocessing.Process(target=hold, args=(path, held), daemon=True)
    helper.start()
    assert held.wait(60)


@pytest.mark.long
def test_daemons_of_ranks_such_as_loaders_of_data_end_with_the_call(tmp_path: Path) -> None:
    launch(start_a_helper, 2, tmp_path, timeout=120)
    for path in sorted(tmp_path.iterdir()):
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # the helper has ended
            assert file.read() == ""


@pytest.mark.parametrize(("rate", "is_still"), [(0.016, True), (0.2, False)], ids=["threads of gloo", "work"])
def test_ranks_that_sleep_are_still_although_threads_take_a_little_time(
    rate: float, is_still: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look finds the ranks asleep, and that they have woken; `rate`: the part of a processor that they take."""
    now = [0.0]

    def look(deadline: float | None) -> bool:
        now[0] += 0.5
        return now[0] > 60

    caller = supervisor.Caller([], RankOptions(100.0, lambda text: None, None, still=3.0))
    caller.deadline = None
    monkeypatch.setattr(caller, "read_messages", look)
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(supervisor, "_asleep", lambda ranks: ([str(now[0])], rate * now[0]))
    assert caller.read_until_still() is not is_still and (now[0] < 20) is is_still
