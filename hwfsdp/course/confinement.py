"""The rights of a rank that runs a learner's code: as few as the system can enforce.

    time, memory, processes, files    the system and a watcher limit them (`processes`)
    a session of its own              the grader can find and end every process that the rank starts
    a user of its own                 if the grader is root: the rank cannot touch processes or files of other users
    a network of its own              if the grader is root: only loopback, through which the ranks talk
    the files of Python only          Landlock: not the solutions, tests, other submissions, nor the modules that are graded

Each limit is set where the system supports it; `limits_in_force` lists which ones are. `guard` is a further line of defense: it also
reports what the code tried.

The grader makes a plan (`confine`) and sends it to each rank. The rank carries it out in two steps. `Confinement.enter` runs before
anything else. `Confinement.close_files` restricts files: it runs after the rank has loaded what it needs, and before it runs the
learner's file.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed.fsdp

from hwfsdp.course import landlock, privileges
from hwfsdp.course.manifest import PACKAGE
from hwfsdp.course.oracles import ROOMS
from hwfsdp.course.processes import FILE, MEMORY, PROCESSES, close_pipes, limit_this_process

_SYSTEM = tuple(
    """/usr /lib /lib32 /lib64 /bin /sbin /opt /sys /dev /proc/self /proc/cpuinfo /proc/meminfo /proc/stat /proc/sys /proc/net
    /etc/ld.so.cache /etc/localtime /etc/hosts /etc/host.conf /etc/nsswitch.conf /etc/resolv.conf /etc/gai.conf /etc/passwd
    /etc/group /etc/protocols /etc/services""".split()
)
_WRITABLE = ("/dev/null", "/dev/zero")
_CHECKS = tuple(PACKAGE.joinpath(*room.split(".")[1:]) for room in ROOMS)
# the guard closes these paths, too
HIDDEN = (*_CHECKS, Path(torch.distributed.fsdp.__path__[0]) / "_fully_shard")
_FIRST_USER, _USERS = 60_600, 500  # user ids that no distribution assigns; one for each grader here


class Limit(NamedTuple):
    """One limit of a submission. If the limit is not in force, `why_not` gives the reason."""

    name: str
    in_force: bool
    why_not: str = ""


@dataclass(frozen=True)
class Confinement:
    """The rights that a rank gives up. This object is sent to the rank by value.

    Attributes:
        read, write: paths that the rank may read and write, if the system has Landlock. The rank starts in the first writable path.
        look: folders whose entries the rank may list.
        user: the user that the rank becomes; None: it keeps the grader's user. reads_all: see `privileges.become`.
        network: a path in /proc; None: the rank keeps the grader's network.
    """

    read: tuple[Path, ...]
    write: tuple[Path, ...]
    look: tuple[Path, ...]
    user: int | None
    reads_all: bool
    network: str | None

    def enter(self, folder: str) -> None:
        """Give up all rights except file access, in the process of a rank.

        Args:
            folder: the folder where the ranks of the run meet. The new user becomes the owner of its files.
        """
        # The course computes on the CPU. torch asks CUDA once and keeps the answer; under the limits, CUDA fails and torch warns.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        torch.cuda.is_available()
        limit_this_process(own_user=self.user is not None)
        close_pipes()
        os.chdir(self.write[0])
        if self.network is not None:
            privileges.enter_network(self.network)
        if self.user is not None:
            privileges.leave_shared_memory()
            privileges.hide_environment()
            for path in (*self.write, Path(folder)):
                _give(path, self.user)
            privileges.become(self.user, self.reads_all)

    def close_files(self, folder: str) -> None:
        """Restrict the rank to the files of Python. It cannot read the checks any more; it has loaded the parts that it needs."""
        if landlock.version():
            landlock.restrict_files(self.read, (*self.write, Path(folder)), self.look)


def _give(folder: Path, user: int) -> None:
    """Make the user the owner of a run's folder and its files. Devices keep their owners."""
    if folder.is_dir() and not str(folder).startswith("/dev"):
        for path in (folder, *folder.iterdir()):
            os.chown(path, user, user, follow_symlinks=False)


def confine(folder: Path, modules: Iterable[str], off_limits: Iterable[Path] = ()) -> Confinement:
    """Return the plan for the ranks of one run.

    Args:
        folder: the folder that the ranks may write to.
        modules: modules of the package whose text the ranks must not see. off_limits: other paths that they must not see.
    """
    texts = {path for module in modules for path in files_of(module)}
    read, look = _readable(texts | {*_CHECKS, *off_limits})
    reads_all = not all(_is_open_to_all(path) for path in (Path(sys.base_prefix), Path(sys.prefix), PACKAGE))
    write, own = (folder, *map(Path, _WRITABLE)), privileges.may_change_user()
    user = _FIRST_USER + os.getpid() % _USERS if own and (landlock.version() or not reads_all) else None
    return Confinement(read, write, look, user, reads_all, _network())


@functools.cache
def _network() -> str | None:
    fd = privileges.make_network()
    return None if fd is None else f"/proc/{os.getpid()}/fd/{fd}"


def files_of(module: str) -> Iterator[Path]:
    """Yield the path of a module's text, and the paths of its compiled files."""
    path = PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py")
    yield path
    yield from (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc")


def _readable(hidden: set[Path]) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """Return the readable paths (Python, its libraries and the package, without hidden ones), and the folders that hold hidden files."""
    roots = [*map(Path, _SYSTEM), Path(sys.base_prefix), Path(sys.prefix), PACKAGE]
    roots += [Path(entry) for entry in sys.path if entry and not PACKAGE.is_relative_to(entry)]
    read, look = list[Path](), list[Path]()
    present = {path.resolve() for path in hidden if path.exists()}
    for root in dict.fromkeys(path.resolve() for path in roots if path.exists()):
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


def limits_in_force() -> list[Limit]:
    """Return every limit of a submission, and whether this machine enforces it."""
    plan = confine(Path(os.devnull), ())
    no_root = "only root can, and the grader is not root" if os.geteuid() else "the system forbids it"
    unreadable = "Python lies in a folder that only root may enter, and there is no Landlock"
    no_user = unreadable if privileges.may_change_user() else no_root
    old = "needs Landlock, of Linux 5.13 or later, and not forbidden"
    counted = f"at most {PROCESSES} processes, {MEMORY >> 30} GiB of memory each, files of {FILE >> 30} GiB"
    limits = [  # name, whether it is in force, why it would not be
        ("time, memory, and a session of its own", True, ""),
        (counted, sys.platform == "linux", "needs Linux, to count them"),
        ("a user of its own", plan.user is not None, no_user),
        ("no network", plan.network is not None, no_root),
        ("no files but Python's and its own", bool(landlock.version()), old),
    ]
    return [Limit(name, in_force, "" if in_force else why_not) for name, in_force, why_not in limits]
