"""Limits for processes that run a learner's code, and an end to all that they leave behind.

Linux counts memory per process, but processes per user, and not at all for root. So memory, core dumps and file sizes
are limited by the system, and processes by a watcher, which ends everything when there are too many.
"""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MEMORY = 4 << 30  # bytes of a rank, besides what it was forked with
FILE = 1 << 30  # bytes of the largest file
PROCESSES = 64  # that all ranks of a run, and what they start, may be at once
_PROC = Path("/proc")


def limit_this_process() -> None:
    """Limits what this process may take, and makes it the head of a session, so that what it starts belongs to it."""
    os.setsid()
    used = (
        int((_PROC / "self/statm").read_text().split()[5]) * os.sysconf("SC_PAGE_SIZE") if _on_linux() else 0
    )
    for what, limit in (
        (resource.RLIMIT_DATA, used + MEMORY),
        (resource.RLIMIT_FSIZE, FILE),
        (resource.RLIMIT_CORE, 0),
    ):
        _, most = resource.getrlimit(what)
        resource.setrlimit(what, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))


def _on_linux() -> bool:
    return (_PROC / "self/statm").exists()


def descendants(pid: int) -> list[int]:
    """Processes that a process started, and those that they started; empty where the system does not tell."""
    children: dict[int, list[int]] = {}
    for path in _PROC.glob("[0-9]*/stat"):
        try:
            fields = path.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        if fields[0] != "Z":
            children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found, todo = [], [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def server_pid() -> int | None:
    """The process that ranks are forked from: the one child of this process that says so."""
    for pid in descendants(os.getpid()):
        try:
            command = (_PROC / f"{pid}/cmdline").read_bytes()
            if b"multiprocessing.forkserver" in command and _parent(pid) == os.getpid():
                return pid
        except OSError:
            continue
    return None


def _parent(pid: int) -> int:
    return int((_PROC / f"{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])


def end_all_below(pid: int, seconds: float = 5.0) -> int:
    """Kills everything that descends from a process, until nothing is left. Returns how many that were."""
    ended: set[int] = set()
    until = time.monotonic() + seconds
    while (found := descendants(pid)) and time.monotonic() < until:
        for process in found:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
            ended.add(process)
        time.sleep(0.01)
    return len(ended)


class Watch:
    """What a watcher saw: whether there were too many processes."""

    def __init__(self) -> None:
        self.exceeded = False


@contextmanager
def nothing_left_behind(limit: int = PROCESSES) -> Iterator[Watch]:
    """Around a run of ranks: ends them all when there are more than `limit`, and what is left after the block.

    Ranks of one run at a time: whatever the server of ranks has started is taken for this run's.
    """
    watch, over = Watch(), threading.Event()

    def look() -> None:
        while not over.wait(0.2):
            server = server_pid()  # the first run of all starts it
            if server and len(descendants(server)) > limit:
                watch.exceeded = True
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
