"""Limit the processes that run a learner's code, and end every process that they leave behind.

Linux counts memory per process. It counts processes per user, and it does not count root's processes. So the system limits memory, core
dumps and file sizes. A watcher limits the number of processes: it ends all of them when there are too many.
"""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import stat
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

MEMORY = 4 << 30  # bytes that a rank may use, besides the memory that it was forked with
FILE = 1 << 30  # bytes of the largest file
FILES = 2 << 30, 4_000  # largest total size in bytes, and largest number, of a run's files
PROCESSES = 64  # largest number of processes of a run at once: its ranks and all that they start
_STACKS = 1 << 30  # bytes of addresses for threads and their arenas
_THREADS = 16 * PROCESSES  # Linux counts threads, and torch has many
_PROC = Path("/proc")


def limit_this_process(own_user: bool = False) -> None:
    """Limit this process's resources, and make it the leader of a session. All processes that it starts belong to the session.

    Args:
        own_user: the process will become a user that has only processes of this run, so the system can count them.
    """
    os.setsid()
    limits = [(resource.RLIMIT_FSIZE, FILE), (resource.RLIMIT_CORE, 0)]
    statm = _PROC / "self/statm"
    mapped, used = 0, 0
    if statm.exists():
        pages = [int(field) for field in statm.read_text().split()]
        mapped, used = (pages[field] * os.sysconf("SC_PAGE_SIZE") for field in (0, 5))
        limits.append((resource.RLIMIT_AS, mapped + MEMORY + _STACKS))  # RLIMIT_DATA omits shared mappings
    limits.append((resource.RLIMIT_DATA, used + MEMORY))
    if own_user:
        limits.append((resource.RLIMIT_NPROC, _THREADS))
    for what, limit in limits:
        _, most = resource.getrlimit(what)
        resource.setrlimit(what, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))


def close_pipes() -> None:
    """Close the pipes to other processes that this process could write to.

    One of them leads to the tracker of shared memory, which trusts everything that it reads.
    """
    for name in os.listdir("/dev/fd") if os.path.isdir("/dev/fd") else ():
        with suppress(OSError):
            fd = int(name)
            mode, flags = os.fstat(fd).st_mode, fcntl.fcntl(fd, fcntl.F_GETFL)
            if fd > 2 and stat.S_ISFIFO(mode) and flags & os.O_ACCMODE != os.O_RDONLY:
                os.close(fd)


class Process(NamedTuple):
    """A process that has not ended: its id, its parent's id and its process group."""

    pid: int
    parent: int
    group: int


def running() -> Iterator[Process]:
    """Yield all processes; none if the system does not list them."""
    for name in os.listdir(_PROC) if _PROC.exists() else ():
        if name.isdigit():
            try:
                # not a Path, which is slow: a watcher calls this all the time
                with open(f"{_PROC}/{name}/stat", "rb") as file:
                    state, parent, group, *_ = file.read().rpartition(b")")[2].split()
            except OSError:
                continue  # it has just ended
            if state != b"Z":
                yield Process(int(name), int(parent), int(group))


def descendants(pid: int, processes: Iterable[Process] | None = None) -> list[int]:
    """Return the ids of all descendants of a process; an empty list if the system does not list processes.

    Args:
        processes: what `running` has just returned.
    """
    children: dict[int, list[int]] = {}
    for process in running() if processes is None else processes:
        children.setdefault(process.parent, []).append(process.pid)
    found, todo = [], [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def server_pid(processes: Iterable[Process] | None = None) -> int | None:
    """Return the id of the fork server of ranks, which is a child of this process; None if there is none."""
    for process in running() if processes is None else processes:
        if process.parent == os.getpid():
            with suppress(OSError):
                if b"multiprocessing.forkserver" in (_PROC / f"{process.pid}/cmdline").read_bytes():
                    return process.pid
    return None


def end_all_below(pid: int) -> None:
    """Kill all descendants of a process until none is left, for at most 5 s."""
    until = time.monotonic() + 5.0
    while (found := descendants(pid)) and time.monotonic() < until:
        for process in found:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)


class Watch:
    """The finding of a watcher. `exceeded` is "processes" or "files" if there were too many, else ""."""

    def __init__(self) -> None:
        self.exceeded = ""


@contextmanager
def nothing_left_behind(folder: Path | None = None) -> Iterator[Watch]:
    """Watch a run of ranks in a `with` block: end all of them if there are too many, and end all that are left after the block.

    Use it for one run at a time, because it treats every process of the server of ranks as part of this run.

    Args:
        folder: the folder that the ranks may write to. They are ended if it holds too much (`FILES`).
    """
    watch, over = Watch(), threading.Event()

    def look() -> None:
        while not over.wait(0.2):
            processes = list(running())
            server = server_pid(processes)  # the very first run starts this server
            if server and len(descendants(server, processes)) > PROCESSES:
                watch.exceeded = "processes"
            elif folder is not None and _is_full(folder):
                watch.exceeded = "files"
            if server and watch.exceeded:
                end_all_below(server)

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield watch
    finally:
        over.set()
        watcher.join()
        if server := server_pid():
            end_all_below(server)


def _is_full(folder: Path) -> bool:
    """True if a folder holds more than `FILES` allows. Blocks that were never written do not count."""
    most, count = FILES
    nbytes = number = 0
    for here, folders, files in os.walk(folder):
        number += len(folders) + len(files)
        for name in (*folders, *files):
            with suppress(OSError):  # it was just deleted
                nbytes += os.lstat(os.path.join(here, name)).st_blocks * 512
        if nbytes > most or number > count:
            return True
    return False
