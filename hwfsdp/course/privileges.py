"""Give up rights: another user, no capabilities, no network. Linux only; its manual pages describe the system calls.

A process of root can do all of this, and most of it in an ordinary container. Another process keeps its user; it does not have these
rights anyway.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys
import threading
from contextlib import suppress
from pathlib import Path

from hwfsdp.course.landlock import libc

_CLONE_NEWIPC, _CLONE_NEWNET = 0x08000000, 0x40000000  # linux/sched.h
_SET_MEMORY, _ENVIRONMENT_END = 35, 11  # PR_SET_MM, PR_SET_MM_ENV_END in linux/prctl.h
_SIOCSIFFLAGS = 0x8914  # linux/sockios.h
_UP_AND_RUNNING = 0x41  # IFF_UP | IFF_RUNNING
_SET_DUMPABLE, _KEEP_CAPABILITIES, _DROP_BOUND = 4, 8, 24  # linux/prctl.h
_CAPABILITY_VERSION = 0x20080522  # the third, of 64 bits
_MAY_READ_ALL = 2  # CAP_DAC_READ_SEARCH
_CAPABILITIES = 64


def may_change_user() -> bool:
    """True if this process can become another user."""
    return sys.platform == "linux" and os.geteuid() == 0


def become(uid: int, reads_all: bool) -> None:
    """Make this process another user, without a name, groups or capabilities.

    Args:
        reads_all: the process keeps the right to read files of other users. This is for machines where Python itself is in a
            folder that only root may enter. Restrict the process's files first (`landlock`).

    Raises:
        OSError: the system refuses.
    """
    kept = 1 << _MAY_READ_ALL if reads_all else 0
    for capability in range(_CAPABILITIES):
        if not kept >> capability & 1:
            # an unknown capability gives an error without effect
            libc().prctl(_DROP_BOUND, capability, 0, 0, 0)
    libc().prctl(_KEEP_CAPABILITIES, 1, 0, 0, 0)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    header = struct.pack("Ii", _CAPABILITY_VERSION, 0)
    if libc().capset(header, struct.pack("6I", kept, kept, 0, 0, 0, 0)):
        raise OSError(ctypes.get_errno(), "capset")
    libc().prctl(_SET_DUMPABLE, 1, 0, 0, 0)  # otherwise root would own its files in /proc


def leave_shared_memory() -> None:
    """Give this process its own shared memory and message queues of System V, which end with it."""
    libc().unshare(_CLONE_NEWIPC)  # if the system forbids this, the process keeps the shared ones


def hide_environment() -> None:
    """Hide this process's environment in /proc. Before this call, /proc shows the grader's environment, which the process inherited."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin = int(fields[47])  # env_start; see proc_pid_stat(5), whose field 3 is the first here
    # some containers forbid this, and Landlock does not help; but the grader gives ranks few variables
    libc().prctl(_SET_MEMORY, _ENVIRONMENT_END, ctypes.c_ulong(begin), 0, 0)


def make_network() -> int | None:
    """Make a network with only the loopback interface, and return its file descriptor; None where the system forbids that.

    A network namespace belongs to a thread, so a new thread makes it. The network lasts as long as the descriptor.
    """
    if not may_change_user():
        return None
    made: list[int] = []

    def make() -> None:
        with suppress(OSError):
            if libc().unshare(_CLONE_NEWNET) == 0:
                _start_loopback()
                made.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    return made[0] if made else None


def _start_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _UP_AND_RUNNING))


def enter_network(path: str) -> None:
    """Move this process to the network that a path in /proc names. New sockets use this network.

    Raises:
        OSError: the system refuses.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc().setns(fd, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(fd)
