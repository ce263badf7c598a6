"""What the operating system takes away from a rank that runs a student's file.

    time, memory, file sizes, processes    limits of the process, and a watcher
    a session of its own                   whatever a rank starts is found and ended when the run ends
    a user of its own                      if the grader is root: the rank cannot touch processes or files of other users
    a network of its own                   if the grader is root: only loopback, through which the ranks talk
    the files of Python only               Landlock: not the solutions, the tests, the course's own modules, other submissions

Each limit is set where the system supports it; `in_force` lists which ones are. The grader makes a plan (`plan`) and sends it to each
rank. `Walls.enter` runs before anything else on the rank, `Walls.close_files` after the rank has loaded what it needs and before it
runs the student's file. Neither can be undone, and all processes that a rank starts inherit them.

Linux only has these system calls; its manual pages and https://docs.kernel.org/userspace-api/landlock.html describe them. The standard
library has no functions for them, so this module makes them by number. The numbers are the same on every architecture.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import functools
import math
import os
import resource
import secrets
import signal
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import NamedTuple

import hwfsdp

PACKAGE = Path(hwfsdp.__file__).parent
MEMORY = 4 << 30  # bytes that a rank may use, besides the memory that it was forked with
FILE = 1 << 30  # bytes of the largest file
FILES = 2 << 30, 4_000  # largest total size in bytes, and largest number, of a run's files
DEEPEST = 100  # folders within folders
PROCESSES = 64  # largest number of processes of a run at once: its ranks and all that they start
_STACKS = 1 << 30  # bytes of addresses for threads and their arenas
_THREADS = 16 * PROCESSES  # Linux counts threads, and torch has many
_FIRST_USER, _USERS = 60_600, 500  # user ids that no distribution assigns; one for each grader here
_LOOK = 0.5  # seconds between two looks at a run
_PROC = Path("/proc")
_SYSTEM = tuple(
    """/usr /lib /lib32 /lib64 /bin /sbin /opt /sys /dev /proc/self /proc/cpuinfo /proc/meminfo /proc/stat /proc/sys /proc/net
    /etc/ld.so.cache /etc/localtime /etc/hosts /etc/host.conf /etc/nsswitch.conf /etc/resolv.conf /etc/gai.conf /etc/passwd
    /etc/group /etc/protocols /etc/services""".split()
)
_WRITABLE = ("/dev/null", "/dev/zero")


# --- The plan, and how a rank carries it out ---------------------------------------------------------------


@dataclass(frozen=True)
class Walls:
    """The rights that a rank gives up. This object is sent to the rank by value.

    Attributes:
        read, write: paths that the rank may read and write, if the system has Landlock. The rank starts in the first writable path.
        look: folders whose entries the rank may list.
        user: the user that the rank becomes; None: it keeps the grader's user. reads_all: see `_become`.
        network: a path in /proc; None: the rank keeps the grader's network.
    """

    read: tuple[Path, ...]
    write: tuple[Path, ...]
    look: tuple[Path, ...]
    user: int | None
    reads_all: bool
    network: str | None

    def enter(self, folder: str) -> None:
        """Give up all rights except file access. `folder`: where the ranks of the run meet; the new user becomes its owner."""
        import torch

        # The course computes on the CPU. torch asks CUDA once and keeps the answer; under the limits, CUDA fails and torch warns.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        torch.cuda.is_available()
        _limit_this_process(own_user=self.user is not None)
        close_pipes()
        os.chdir(self.write[0])
        if self.network is not None:
            _enter_network(self.network)
        if self.user is not None:
            # shared memory of System V ends with the rank, unless the system forbids this
            libc().unshare(_CLONE_NEWIPC)
            _hide_environment()
            for path in (*self.write, Path(folder)):
                _give(path, self.user)
            _become(self.user, self.reads_all)

    def close_files(self, folder: str) -> None:
        """Restrict the rank to the files of Python and of the run."""
        if landlock_version():
            _restrict_files(self.read, (*self.write, Path(folder)), self.look)


def plan(folder: Path, hidden: Iterable[Path] = (), shared: Sequence[Path] = ()) -> Walls:
    """Return the plan for the ranks of one run.

    Args:
        folder: the folder of the run, which the ranks may write to. shared: further such folders, which outlive the run.
        hidden: paths that the ranks must not see, besides the course's own.
    """
    import torch  # only here and on ranks: `pool` imports this module before torch

    # the laws, and what a student writes, in other words
    answers = PACKAGE / "course", Path(torch.__file__).parent / "distributed/fsdp/_fully_shard"
    read, look = _readable(frozenset((*answers, *hidden)))
    reads_all = not all(_is_open_to_all(path) for path in (Path(sys.base_prefix), Path(sys.prefix), PACKAGE))
    own_user = _is_root() and (landlock_version() or not reads_all)
    user = _FIRST_USER + os.getpid() % _USERS if own_user else None
    return Walls(read, (folder, *shared, *map(Path, _WRITABLE)), look, user, reads_all, _network())


@functools.lru_cache(8)  # launches of one file ask the same, and it takes a fifth of a second
def _readable(hidden: frozenset[Path]) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """Return the readable paths (Python, its libraries and the package, without hidden ones), and the folders that hold hidden files."""
    roots = [*map(Path, _SYSTEM), Path(sys.base_prefix), Path(sys.prefix), PACKAGE]
    roots += [Path(entry) for entry in sys.path if entry and not PACKAGE.is_relative_to(entry)]
    read, look = list[Path](), list[Path]()
    present = {path.resolve() for path in hidden if path.exists()}
    for root in dict.fromkeys(path.resolve() for path in roots if path.exists()):
        if not any(root.is_relative_to(each) for each in present):
            _split(root, present, read, look)
    return tuple(read), tuple(look)


def _split(path: Path, hidden: set[Path], read: list[Path], look: list[Path]) -> None:
    """Add a path to `read`. If something hidden is below it, add its entries one by one."""
    if not any(each.is_relative_to(path) for each in hidden):
        read.append(path)
    elif path not in hidden and path.is_dir():
        look.append(path)
        for entry in path.iterdir():
            _split(entry, hidden, read, look)


def _is_open_to_all(path: Path) -> bool:
    """True if any user can read this path, by the permissions of the path and of all folders above it."""
    folders_open = all(folder.stat().st_mode & 0o001 for folder in (path, *path.parents))
    return folders_open and bool(path.stat().st_mode & 0o004)


class Limit(NamedTuple):
    """One limit of a student's file. If the limit is not in force, `why_not` gives the reason."""

    name: str
    in_force: bool
    why_not: str = ""


def in_force() -> list[Limit]:
    """Return every limit, and whether this machine enforces it."""
    walls = plan(Path(os.devnull))
    linux = "needs Linux"
    no_root = "only root can, and the grader is not root" if os.geteuid() else "the system forbids it"
    unreadable = "Python lies in a folder that only root may enter, and there is no Landlock"
    old = "needs Landlock, of Linux 5.13 or later, and not forbidden"
    if sys.platform != "linux":
        no_root = old = linux
    counted = f"at most {PROCESSES} processes, {MEMORY >> 30} GiB of memory each, files of {FILE >> 30} GiB"
    limits = [  # name, whether it is in force, why it would not be
        ("time, memory, and a session of its own", True, ""),
        (counted, sys.platform == "linux", linux),
        ("a user of its own", walls.user is not None, unreadable if _is_root() else no_root),
        ("no network", walls.network is not None, no_root),
        ("no files but Python's and its own", bool(landlock_version()), old),
    ]
    return [Limit(name, holds, "" if holds else why_not) for name, holds, why_not in limits]


# --- Time, memory, processes -------------------------------------------------------------------------------


def _limit_this_process(own_user: bool) -> None:
    """Limit this process's resources, and make it the leader of a session. All processes that it starts belong to the session.

    Linux counts memory per process. It counts processes per user, and it does not count root's.

    Args:
        own_user: the process will become a user that has only processes of this grader, so the system can count them.
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
        limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.setrlimit(what, (limit, limit))  # the second one, so that the process cannot raise the first


def limit_processor(seconds: float) -> None:
    """Let this process die, with its stack on standard error, when it has computed for so many more seconds."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    faulthandler.register(signal.SIGXCPU, file=2, all_threads=False, chain=True)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used.ru_utime + used.ru_stime + seconds), most))


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
    """A process that has not ended: its id, its parent's id and its session."""

    pid: int
    parent: int
    session: int


def running() -> Iterator[Process]:
    """Yield all processes; none if the system does not list them."""
    for name in os.listdir(_PROC) if _PROC.exists() else ():
        if name.isdigit():
            try:
                # not a Path, which is slow: a watcher calls this all the time
                with open(f"{_PROC}/{name}/stat", "rb") as file:
                    state, parent, _, session, *_ = file.read().rpartition(b")")[2].split()
            except OSError:
                continue  # it has just ended
            if state != b"Z":
                yield Process(int(name), int(parent), int(session))


def descendants(pids: Iterable[int], processes: Iterable[Process]) -> set[int]:
    """Return the ids of all descendants of some processes."""
    children: dict[int, list[int]] = {}
    for process in processes:
        children.setdefault(process.parent, []).append(process.pid)
    found, todo = set[int](), list(pids)
    while todo:
        below = children.get(todo.pop(), [])
        found |= set(below)
        todo += below
    return found


def server_pid() -> int | None:
    """Return the id of the process that ranks are forked from, a child of this process; None if there is none."""
    return getattr(forkserver, "_forkserver")._forkserver_pid  # type: ignore[no-any-return]


class Watch:
    """Watch a run of ranks in a `with` block, and leave none of its processes behind.

    A process belongs to the run if it is a rank, a rank started it, or it is in a rank's session. A process that has left its session
    and lost its parent becomes a child of the server of ranks. It is ended when the last run ends that is going on at the same time.

    Args:
        folders: the folders that the ranks may write to.

    Attributes:
        exceeded: "processes" or "files" if there were too many (then the run was ended), else "".
    """

    _going_on: set[Watch] = set()
    _lock = threading.Lock()

    def __init__(self, *folders: Path) -> None:
        self.folders, self.exceeded = folders, ""
        self._ranks, self._seen = set[int](), set[int]()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        with self._lock:
            self._going_on.add(self)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        with self._lock:
            self._going_on.remove(self)
            if not self._going_on and (server := server_pid()):
                self._ranks.add(server)
            self.end()

    def started(self, pids: Iterable[int]) -> None:
        """Take note of the ranks."""
        self._ranks |= set(pids)

    def end(self) -> None:
        """Kill all processes of the run until none is left, for at most 5 s."""
        until = time.monotonic() + 5.0
        while (found := self._mine()) and time.monotonic() < until:
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        # without a list of processes, end those in the ranks' own groups
        for rank in () if _PROC.exists() else self._ranks:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(rank, signal.SIGKILL)

    def _mine(self) -> set[int]:
        processes = list(running())
        # ids may be used again, for processes elsewhere
        below = descendants([server_pid() or os.getpid()], processes)
        found = descendants(self._ranks, processes) | self._ranks | self._seen
        found |= {process.pid for process in processes if process.session in self._ranks}
        self._seen = found & below
        return self._seen

    def _look(self) -> None:
        while not self._over.wait(_LOOK):
            if len(self._mine()) > PROCESSES:
                self.exceeded = "processes"
            elif any(map(is_full, self.folders)):
                self.exceeded = "files"
            if self.exceeded:
                self.end()


def is_full(folder: Path) -> bool:
    """True if a folder holds more than `FILES` allows, or folders too deep to count. Blocks that were never written do not count."""
    most, count = FILES
    nbytes = number = 0
    todo = [(str(folder), 0)]
    while todo:
        here, depth = todo.pop()
        try:
            entries = list(os.scandir(here))
        except (FileNotFoundError, NotADirectoryError):
            continue  # it was just deleted
        except OSError:  # its path is too long
            return True
        number += len(entries)
        for entry in entries:
            with suppress(OSError):  # it was just deleted
                nbytes += entry.stat(follow_symlinks=False).st_blocks * 512
            if entry.is_dir(follow_symlinks=False):
                todo.append((entry.path, depth + 1))
        if nbytes > most or number > count or depth > DEEPEST:
            return True
    return False


def read_from_rank(path: Path, most: int) -> bytes:
    """Read a file that a rank wrote, at most so many bytes. A rank may have made a link or a pipe instead.

    Raises:
        OSError: it is no file, or has more bytes.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > most:
            raise OSError(f"not a file of at most {most:,} bytes")
        return file.read(most)


def remove(folder: Path) -> None:
    """Delete a folder that ranks could write to. Paths in it may be longer than the system allows, and folders deeper than the stack."""
    while entries := list(os.scandir(folder)):
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry)
                continue
            for inner in os.listdir(entry):  # one level up, so that no path gets long
                os.rename(os.path.join(entry, inner), folder / secrets.token_hex(16))
            os.rmdir(entry)
    folder.rmdir()


# --- User and network --------------------------------------------------------------------------------------

_CLONE_NEWIPC, _CLONE_NEWNET = 0x08000000, 0x40000000  # linux/sched.h
_SET_MEMORY, _ENVIRONMENT_END = 35, 11  # PR_SET_MM, PR_SET_MM_ENV_END in linux/prctl.h
_SIOCSIFFLAGS = 0x8914  # linux/sockios.h
_UP_AND_RUNNING = 0x41  # IFF_UP | IFF_RUNNING
_SET_DUMPABLE, _KEEP_CAPABILITIES, _DROP_BOUND = 4, 8, 24  # linux/prctl.h
_CAPABILITY_VERSION = 0x20080522  # the third, of 64 bits
_MAY_READ_ALL = 2  # CAP_DAC_READ_SEARCH
_CAPABILITIES = 64


def _is_root() -> bool:
    """True if this process can become another user."""
    return sys.platform == "linux" and os.geteuid() == 0


def _give(folder: Path, user: int) -> None:
    """Make the user the owner of a run's folder and all that is in it. Devices keep their owners."""
    if folder.is_dir() and not str(folder).startswith("/dev"):
        for here, folders, files in os.walk(folder):
            for path in (here, *(os.path.join(here, name) for name in (*folders, *files))):
                os.chown(path, user, user, follow_symlinks=False)


def _become(uid: int, reads_all: bool) -> None:
    """Make this process another user, without a name, groups or capabilities.

    Args:
        reads_all: the process keeps the right to read files of other users. This is for machines where Python itself is in a
            folder that only root may enter. Landlock then restricts the process's files.

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


def _hide_environment() -> None:
    """Hide this process's environment in /proc. Before this call, /proc shows the grader's environment, which the process inherited."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin = int(fields[47])  # env_start; see proc_pid_stat(5), whose field 3 is the first here
    # some containers forbid this, and Landlock does not help; but the grader gives ranks few variables
    libc().prctl(_SET_MEMORY, _ENVIRONMENT_END, ctypes.c_ulong(begin), 0, 0)


@functools.cache
def _network() -> str | None:
    """Make a network with only the loopback interface, and return its path in /proc; None where the system forbids that.

    A network namespace belongs to a thread, so a new thread makes it. The network lasts as long as this process.
    """
    made: list[int] = []

    def make() -> None:
        with suppress(OSError):
            if libc().unshare(_CLONE_NEWNET) == 0:
                with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
                    fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _UP_AND_RUNNING))
                made.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC))

    if _is_root():
        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
    return f"/proc/{os.getpid()}/fd/{made[0]}" if made else None


def _enter_network(path: str) -> None:
    """Move this process to a network. New sockets use it. Raise OSError if the system refuses."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc().setns(fd, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(fd)


# --- Files: Landlock ---------------------------------------------------------------------------------------

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION = 1  # flag: return the version of the interface, create nothing
_PATH_BENEATH = 1
_NO_NEW_PRIVILEGES = 38  # linux/prctl.h
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = (1 << bit for bit in range(4))
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE  # rights that exist for paths that are not folders
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # number of rights over files, by version
_TRUNCATE = 1 << 14
_SCOPES = 0b11  # restrict abstract sockets and signals to outside processes; from version 6 on


@functools.cache
def libc() -> ctypes.CDLL:
    """Return the C library. Its functions leave their error number in `ctypes.get_errno`."""
    return ctypes.CDLL(None, use_errno=True)


def _call(number: int, *arguments: object) -> int:
    result: int = libc().syscall(number, *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def landlock_version() -> int:
    """Return the version of the system's Landlock; 0 if the system does not have it, or forbids it."""
    if sys.platform != "linux":
        return 0
    found: int = libc().syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION))
    return max(0, found)


def _restrict_files(read: Iterable[Path], write: Iterable[Path], look: Iterable[Path]) -> None:
    """Restrict this thread, and everything that it starts, to files at or below these paths.

    If the system supports it, the thread also cannot send signals to processes that are not restricted with it.

    Args:
        read: paths to read and execute. write: paths with all rights. look: folders whose entries may only be listed. Paths that
            do not exist are left out.

    Raises:
        OSError: the system refuses.
    """
    known = landlock_version()
    every = (1 << _RIGHTS.get(known, 16)) - 1
    attributes = struct.pack("QQQ", every, 0, _SCOPES if known >= 6 else 0)
    size = 8 if known < 4 else 16 if known < 6 else 24
    ruleset = _call(_CREATE_RULESET, attributes[:size], ctypes.c_size_t(size), ctypes.c_uint32(0))
    try:
        for paths, rights in ((read, _READ & every), (write, every), (look, _READ_DIR)):
            for path in paths:
                _allow(ruleset, path, rights)
        if libc().prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl")
        _call(_RESTRICT_SELF, ruleset, ctypes.c_uint32(0))
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: Path, rights: int) -> None:
    with suppress(FileNotFoundError, PermissionError):
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            if not stat.S_ISDIR(os.fstat(fd).st_mode):
                rights &= _OF_FILES | _TRUNCATE
            rule = struct.pack("=Qi", rights, fd)
            _call(_ADD_RULE, ruleset, ctypes.c_int(_PATH_BENEATH), rule, ctypes.c_uint32(0))
        finally:
            os.close(fd)
