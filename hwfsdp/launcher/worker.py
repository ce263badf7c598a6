"""The process of one rank. Its caller is in `supervisor`.

Note [Nobody interrupts a sender]
    A thread of gloo holds a lock while it sends. On one machine, the message wakes a thread of another rank, which may at once take the
    processor from the sender. Meanwhile the sender's own rank looks at its sockets over and over, because gloo never waits for this lock:
    with fewer processors than threads, this takes most of the time of a collective. So threads of ranks on the CPU are batch work for
    Linux: a thread that wakes waits for a free processor, or for the end of another thread's turn.

Note [Time runs out]
    The main thread of a rank that hangs cannot say where it hangs. So each rank has another thread, which listens to the caller. It
    answers with the collective in which the rank waits, and with the stack. It also ends the rank when the caller is gone.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import importlib
import io
import itertools
import multiprocessing
import os
import pickle
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

from hwfsdp import compat
from hwfsdp.comm import flight_recorder, users_collectives
from hwfsdp.errors import CollectiveError, UsageError
from hwfsdp.launcher import pickling
from hwfsdp.launcher.pickling import Script, cannot_pickle, for_the_caller

stop_requested = threading.Event()  # see `launch`, Note [Asked to stop]


@dataclass(frozen=True)
class Task:
    """The task of every rank.

    Attributes:
        folder: the ranks meet here, and the files of their histories are here.
        modules: to import first (`fork_server.left_to_import`).
        prepare: a pickled function. It is called with the folder before anything else.
        script: the caller's `__main__`; None if the rank must not have its names.
        seed: of torch's random numbers on the CPU.
    """

    call: bytes
    world_size: int
    device: str
    collective_timeout: float
    folder: str
    environ: dict[str, str]
    threads: int
    isatty: bool
    seed: int
    modules: tuple[str, ...] = ()
    prepare: bytes | None = None
    script: Script | None = None

    def history_of(self, rank: int) -> str:
        """Return the file to which the rank writes its history. The caller has created it."""
        return f"{self.folder}/history-{rank}"


class _Relay(io.TextIOBase):
    """`sys.stdout` of a rank. Its output appears at the caller: in a terminal, a test or a notebook.

    This is true for Python's output. Standard error, and output of C++ and of child processes, go where the server's output goes.
    """

    def __init__(self, send: Callable[[Any], None], isatty: bool) -> None:
        self._send, self._isatty = send, isatty
        self._line = ""  # an unfinished line: only whole lines are sent, so lines of ranks do not mix

    def write(self, text: str) -> int:
        self._line += text
        if "\n" in text:
            lines, _, rest = self._line.rpartition("\n")
            self._send(("print", f"{lines}\n"))
            self._line = rest
        return len(text)

    def flush(self) -> None:
        """Send the unfinished line."""
        if self._line:
            self._send(("print", self._line))
            self._line = ""

    def isatty(self) -> bool:
        return self._isatty

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 1


def run_rank(rank: int, task: Task, connection: Connection) -> None:
    """Run the task's function in an initialized process group, and tell the caller how it ended."""
    for module in task.modules:
        importlib.import_module(module)
    if task.device == "cpu":
        interrupt_nobody()  # before it makes threads: each takes this over from the thread that makes it
    gc.freeze()  # a collection would write to the objects of the server, and so copy their memory
    gc.enable()
    if task.prepare is not None:
        pickle.loads(task.prepare)(task.folder)
    lock = threading.Lock()

    def send(message: Any) -> None:
        with lock:
            connection.send(message)

    faulthandler.enable()  # a rank that crashes in native code leaves its stack on standard error
    threading.Thread(target=_listen, args=(connection, send), daemon=True).start()
    os.environ.clear()
    os.environ.update(task.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(task.world_size))
    os.environ[flight_recorder.PATH] = task.history_of(rank)
    tempfile.tempdir = None  # the server has cached its own folder
    setattr(sys, "stdout", _Relay(send, task.isatty))
    torch.set_num_threads(task.threads)
    torch.default_generator.manual_seed(task.seed)
    if task.script is not None:
        pickling.become(task.script)
        users_collectives.note_from_now_on()
    try:
        fn, args, kwargs = pickle.loads(task.call)
        store = f"file://{task.folder}/store"
        init_process_group(task.device, task.collective_timeout, store, rank, task.world_size)
        result = fn(*args, **kwargs)
        finish_saves()
        sys.stdout.flush()
        send(("return", pickle_result(result, for_the_caller)))
    except BaseException as error:  # pytest's failures do not derive from Exception
        sys.stdout.flush()
        send(("raise", (_described(error), traceback.format_exc(), _pickled(error))))
    finally:
        destroy_process_group()


def interrupt_nobody() -> None:
    """Let the threads of this process wait for a processor when they wake (Note [Nobody interrupts a sender])."""
    if sys.platform == "linux":
        with suppress(OSError):  # some containers do not allow it
            for thread in os.listdir("/proc/self/task"):  # libraries may have made some
                os.sched_setscheduler(int(thread), os.SCHED_BATCH, os.sched_param(0))


def finish_saves() -> None:
    """Wait for background saves to end. If one failed and its error was not raised yet, raise it."""
    background = sys.modules.get("hwfsdp.checkpoint.saving")  # not imported: nothing is saving
    if background is not None:
        background.finish_saves()


def pickle_result(result: Any, pickled: Callable[[Any], bytes]) -> bytes:
    """Pickle the result of the function. Raise WrongTypeError if it cannot be pickled."""
    try:
        return pickled(result)
    except Exception as error:
        raise cannot_pickle("the result of the function", error) from error


def _described(error: BaseException) -> str:
    if isinstance(error, CollectiveError):
        return f"CollectiveError: {str(error).splitlines()[0]}"
    return "".join(traceback.format_exception_only(error)).strip()


def _pickled(error: BaseException) -> bytes | None:
    try:
        return for_the_caller(error)
    except Exception:
        return None  # some exceptions cannot be pickled; the traceback arrives as text


def _listen(connection: Connection, send: Callable[[Any], None]) -> None:
    """Tell the caller, when it asks, where this rank is. End the rank when the caller is gone."""
    while True:
        try:
            question = connection.recv()
        except (EOFError, OSError):
            for child in multiprocessing.active_children():
                if child.daemon:  # such as the workers of a DataLoader: they would outlive this process
                    child.kill()
            os._exit(1)
        if question == "stop":
            stop_requested.set()
            continue
        pending, stacks = describe_wait(), flight_recorder.stacks()
        if not pending:
            pending = _library_call(sys._current_frames().get(threading.main_thread().ident or 0))
        stacks += "".join(f"  {call}\n" for call in users_collectives.waits_and_lines())
        send(("where", (f"waiting in {pending}" if pending else "", stacks)))


def _pending() -> str:
    main = threading.main_thread()
    names = {thread.ident: f" (thread {thread.name})" for thread in threading.enumerate() if thread != main}
    return ", ".join(
        f"{named}{names.get(thread, '')}" for thread, named in list(flight_recorder.waiting.items())
    )


describe_wait: Callable[[], str] = _pending  # the collective that a rank waits in, or ""


def _library_call(frame: FrameType | None) -> str:
    """Name the function of `torch.distributed` that a stack ends in, such as "new_group of torch.distributed"; "" if it does not."""
    function = ""
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("torch.distributed."):
        function = frame.f_code.co_name
        frame = frame.f_back
    return f"{function} of torch.distributed" if function else ""


@functools.cache
def adapt_gloo() -> None:
    """Let each gloo group that this process makes from now on wait until all its ranks are connected, and use one thread.

    A rank that went on at once, and ended, would break connections that other ranks still make.

    Torch gives each group two threads. After a collective, its thread stores the name of the collective in a string of the group,
    without a lock. A name of more than 15 characters is on the heap, such as "ALLGATHER_COALESCED", the collective of
    `DTensor.full_tensor`. If both threads store such a name at once, both free the old one, and the process aborts.
    `HWFSDP_GLOO_THREADS=2` in the environment leaves torch's two threads.
    """
    gloo = getattr(dist, "ProcessGroupGloo", None)  # not declared; a build of torch may be without it
    if gloo is None:
        return
    make, one_thread = gloo.__init__, os.environ.get("HWFSDP_GLOO_THREADS") != "2"

    @functools.wraps(make)
    def init(group: Any, store: Any, rank: int, size: int, timeout: Any, **others: Any) -> None:
        has_options = not isinstance(timeout, timedelta) or any(others.values())
        if one_thread and not has_options:
            timeout, others = compat.one_gloo_thread(gloo, timeout), {}
        make(group, store, rank, size, timeout, **others)
        group.barrier().wait()

    gloo.__init__ = init


def init_process_group(
    device: str, timeout: float, init_method: str, rank: int = -1, world_size: int = -1
) -> None:
    """Initialize the process group of a rank, and choose its GPU.

    Args:
        timeout: seconds for each collective.

    Raises:
        UsageError: the machine has no GPU for this rank.
    """
    compat.read_debug_level()  # torch read the environment when the server imported it
    adapt_gloo()
    backend = {"cpu": "gloo", "cuda": "nccl"}[device]
    if device == "cuda":
        number, found = int(os.environ.get("LOCAL_RANK", rank)), torch.cuda.device_count()
        if number >= found:
            raise UsageError(
                "launch(device='cuda')",
                expected="a GPU for each rank of this machine",
                got=f"rank {number} and {found} GPUs",
                remedy="Ask for fewer ranks, or pass device='cpu'.",
            )
        torch.cuda.set_device(number)
    limit = timedelta(seconds=timeout)
    dist.init_process_group(backend, init_method, timeout=limit, rank=rank, world_size=world_size)


_meetings: Iterator[int] = itertools.count()  # all ranks call `launch` equally often
# torchrun's store, once it is connected, with the rank and the world size
_stores: list[tuple[Any, int, int]] = []


def _meet_once_more(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
    """Yield torchrun's store below a prefix that no earlier call has used, the rank, and the world size.

    A process group leaves the addresses of its ranks in the store. The next one has the same name, so a rank could read an old
    address, also one of ranks that torchrun has ended and started again. The connection stays open, because the store may live in
    rank 0.
    """
    if not _stores:
        _stores.append(next(iter(rendezvous("env://", **options))))
    store, rank, world_size = _stores[0]
    # only on one machine: torchruns of several count their own restarts, so ranks would have different prefixes
    alone = os.environ.get("GROUP_WORLD_SIZE") == "1"
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if alone else "0"
    prefixed = getattr(dist, "PrefixStore")  # not declared
    yield prefixed(f"hwfsdp launch {restarts} {next(_meetings)}", store), rank, world_size


@functools.cache
def address_under_torchrun() -> str:
    """Return the `init_method` by which the ranks of torchrun meet once more."""
    register_rendezvous_handler("hwfsdp-torchrun", _meet_once_more)
    return "hwfsdp-torchrun://"


def limit_collectives(seconds: float) -> None:
    """Set the timeout of collectives in the default process group. For this, the ranks meet again in the same store.

    torch's `_set_pg_timeout` would not do: a receive of gloo keeps the timeout that its process group began with.
    """
    backend, rank, ranks = dist.get_backend(), dist.get_rank(), dist.get_world_size()
    store, limit = compat.default_store_below("with a limit"), timedelta(seconds=seconds)
    dist.destroy_process_group()
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=limit)


def destroy_process_group() -> None:
    """End communication before the interpreter shuts down.

    A sharded model is a cycle of references that keeps its process group alive. If the cycle lives until the interpreter's exit,
    gloo's threads sometimes still run when their owner is destroyed. Then the process aborts.
    """
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
