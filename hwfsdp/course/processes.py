"""Limits for processes that run a learner's code, and an end to all that they leave behind.

Linux counts memory per process, but processes per user, and not at all for root. So memory, core dumps and file sizes
are limited by the system, and processes by a watcher, which ends everything when there are too many.
"""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

MEMORY = 4 << 30  # bytes of a rank, besides what it was forked with
FILE = 1 << 30  # bytes of the largest file
FILES = 2 << 30, 4_000  # bytes of all files of a run, and how many they may be
PROCESSES = 64  # that all ranks of a run, and what they start, may be at once
_STACKS = 1 << 30  # bytes of addresses for threads and their arenas
_THREADS = 16 * PROCESSES  # Linux counts threads, and torch has many
_PROC = Path("/proc")


def limit_this_process(own_user: bool = False) -> None:
    """Limit this process's resources, and make it the head of a session, to which everything that it starts belongs.

    Args:
        own_user: it is about to become a user whose processes are all of the same run, so that these can be counted.
    """
    os.setsid()
    limits = [(resource.RLIMIT_FSIZE, FILE), (resource.RLIMIT_CORE, 0)]
    statm = _PROC / "self/statm"
    mapped, used = 0, 0
    if statm.exists():
        pages = [int(field) for field in statm.read_text().split()]
        mapped, used = (pages[field] * os.sysconf("SC_PAGE_SIZE") for field in (0, 5))
        limits.append((resource.RLIMIT_AS, mapped + MEMORY + _STACKS))  # shared mappings are no data
    limits.append((resource.RLIMIT_DATA, used + MEMORY))
    if own_user:
        limits.append((resource.RLIMIT_NPROC, _THREADS))
    for what, limit in limits:
        _, most = resource.getrlimit(what)
        resource.setrlimit(what, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))


def close_pipes() -> None:
    """Close what this process could write to of others: the pipe to the tracker of shared memory, which trusts all it reads."""
    for name in os.listdir("/dev/fd") if os.path.isdir("/dev/fd") else ():
        with suppress(OSError):
            fd = int(name)
            mode, flags = os.fstat(fd).st_mode, fcntl.fcntl(fd, fcntl.F_GETFL)
            if fd > 2 and stat.S_ISFIFO(mode) and flags & os.O_ACCMODE != os.O_RDONLY:
                os.close(fd)


class Process(NamedTuple):
    """A process that has not ended, and its relatives."""

    pid: int
    parent: int
    group: int


def running() -> Iterator[Process]:
    """All processes; none if the system does not tell."""
    for path in _PROC.glob("[0-9]*/stat"):
        try:
            state, parent, group, *_ = path.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        if state != "Z":
            yield Process(int(path.parent.name), int(parent), int(group))


def descendants(pid: int) -> list[int]:
    """All descendants of a process; empty if the system does not tell."""
    children: dict[int, list[int]] = {}
    for process in running():
        children.setdefault(process.parent, []).append(process.pid)
    found, todo = [], [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def server_pid() -> int | None:
    """The process that ranks are forked from: the one child of this process that says so."""
    for process in running():
        if process.parent == os.getpid():
            with suppress(OSError):
                if b"multiprocessing.forkserver" in (_PROC / f"{process.pid}/cmdline").read_bytes():
                    return process.pid
    return None


def end_all_below(pid: int) -> None:
    """Kill everything that descends from a process, until nothing is left."""
    until = time.monotonic() + 5.0
    while (found := descendants(pid)) and time.monotonic() < until:
        for process in found:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)


class Watch:
    """A watcher's finding: too many "processes" or "files", or "" for neither."""

    def __init__(self) -> None:
        self.exceeded = ""


@contextmanager
def nothing_left_behind(folder: Path | None = None) -> Iterator[Watch]:
    """Around a run of ranks: ends them all when they are too many, and what is left after the block.

    Ranks of one run at a time: whatever the server of ranks has started is taken for this run's.

    Args:
        folder: where they may write; they are ended when too much is there.
    """
    watch, over = Watch(), threading.Event()

    def look() -> None:
        while not over.wait(0.2):
            server = server_pid()  # the first run of all starts it
            if server and len(descendants(server)) > PROCESSES:
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
    """Whether more is in a folder than may be (`FILES`); blocks that were never written do not count."""
    most, count = FILES
    nbytes = number = 0
    for here, folders, files in os.walk(folder):
        number += len(folders) + len(files)
        for name in (*folders, *files):
            with suppress(OSError):  # it has just gone
                nbytes += os.lstat(os.path.join(here, name)).st_blocks * 512
        if nbytes > most or number > count:
            return True
    return False
