"""Let Linux look like macOS to Python code. Every Python process whose PYTHONPATH has this folder imports this file.

What only Linux has is missing: /proc, /sys, /dev/shm, memfd, Landlock, prctl, namespaces, renameat2. `sys.platform` is "darwin".
Parts of the standard library that look at it when they are imported are imported before. A fork of a process with torch is refused: on
macOS it may crash.

Not pretended: the system's own libraries, its file systems, its network, and the limits of its processes.
"""

import multiprocessing.connection
import multiprocessing.forkserver
import multiprocessing.resource_tracker  # noqa: F401
import multiprocessing.spawn  # noqa: F401
import os
import shutil  # noqa: F401
import socket
import subprocess  # noqa: F401
import sys
import sysconfig
import urllib.request  # noqa: F401
from pathlib import PurePath

_MISSING = {
    os: "memfd_create O_PATH posix_fallocate setns unshare sched_getaffinity pidfd_open setresuid setresgid eventfd".split(),
    socket: ["AF_NETLINK", "SOCK_CLOEXEC", "SO_PEERCRED"],
}
_FUNCTIONS = ("prctl", "unshare", "setns", "capset", "renameat2")
_FOLDERS = ("/proc", "/sys", "/dev/shm")
_real_stat = os.stat


def _is_missing(path: object) -> bool:
    text = os.fsdecode(path) if isinstance(path, str | bytes | PurePath) else ""
    return any(text == folder or text.startswith(f"{folder}/") for folder in _FOLDERS)


def _refuse(event: str, args: tuple[object, ...]) -> None:
    if event in ("open", "os.listdir", "os.scandir", "os.mkdir") and _is_missing(args[0]):
        raise FileNotFoundError(2, "No such file or directory", args[0])
    if event == "ctypes.dlsym" and args[1] in _FUNCTIONS:
        raise AttributeError(f"dlsym({args[1]}): symbol not found")
    if event == "ctypes.dlsym" and args[1] == "syscall":
        raise SystemError("a number of Linux means another call of macOS")
    if event in ("os.fork", "os.forkpty") and "torch" in sys.modules:
        raise SystemError("a fork of a process with torch, which may crash on macOS")


def _stat(path: object, *args: object, **kwargs: object) -> os.stat_result:
    if _is_missing(path):
        raise FileNotFoundError(2, "No such file or directory", path)
    return _real_stat(path, *args, **kwargs)  # type: ignore[arg-type]


sysconfig.get_config_vars()  # from a file named after the system
sys.platform = "darwin"
for module, names in _MISSING.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
os.stat = _stat  # type: ignore[assignment]
sys.addaudithook(_refuse)
