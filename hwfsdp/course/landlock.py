"""Landlock: a process gives up the file system except for some paths. It cannot undo this, and all processes that it starts inherit it.

Landlock needs no privilege (Linux 5.13 or later). The numbers here are from https://docs.kernel.org/userspace-api/landlock.html. The
standard library has no function for it, so this module makes system calls by number. The numbers are the same on every architecture.
"""

from __future__ import annotations

import ctypes
import functools
import os
import stat
import struct
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

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


def version() -> int:
    """Return the version of the system's Landlock; 0 if the system does not have it, or forbids it."""
    if sys.platform != "linux":
        return 0
    found: int = libc().syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION))
    return max(0, found)


def restrict_files(read: Iterable[Path], write: Iterable[Path], look: Iterable[Path] = ()) -> None:
    """Restrict this thread, and everything that it starts, to files at or below these paths.

    If the system supports it, the thread also cannot send signals to processes that are not restricted with it.

    Args:
        read: paths to read and execute. write: paths with all rights. look: folders whose entries may only be listed. Paths that
            do not exist are left out.

    Raises:
        OSError: the system refuses.
    """
    known = version()
    every = (1 << _RIGHTS.get(known, 16)) - 1
    attributes = struct.pack("QQQ", every, 0, _SCOPES if known >= 6 else 0)
    size = 8 if known < 4 else 16 if known < 6 else 24
    ruleset = _call(_CREATE_RULESET, attributes[:size], ctypes.c_size_t(size), ctypes.c_uint32(0))
    try:
        for path in read:
            _allow(ruleset, path, _READ & every)
        for path in write:
            _allow(ruleset, path, every)
        for path in look:
            _allow(ruleset, path, _READ_DIR)
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


@functools.cache
def libc() -> ctypes.CDLL:
    """Return the C library. Its functions leave their error number in `ctypes.get_errno`."""
    return ctypes.CDLL(None, use_errno=True)


def _call(number: int, *arguments: object) -> int:
    result: int = libc().syscall(number, *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
