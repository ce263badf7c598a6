"""The process that ranks are forked from, started ahead of need.

It imports torch once, for all ranks (`preload`). This module does not, so that a command can start the server first and
import torch itself while the server does.

Only Linux forks a process safely that has loaded torch. Elsewhere there is no server, and each rank is a new Python process that
imports torch itself (`start_method`): it starts in seconds, not in a tenth of one.
"""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing as mp
import os
import socket
import sys
import tempfile
import warnings
from multiprocessing import forkserver, util

from hwfsdp.errors import UsageError

_PRELOAD = "hwfsdp.launcher.preload"
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_LONGEST = 60  # bytes of a folder's path in which a socket of the server still has room: it has at most 107 with what comes below
_ahead: list[str] = []


def start_method() -> str:
    """Return how processes with torch start: "forkserver", or "spawn" on systems other than Linux.

    `HWFSDP_START_METHOD` in the environment chooses one of the two.
    """
    asked = os.environ.get("HWFSDP_START_METHOD", "")
    if asked not in ("", "forkserver", "spawn"):
        raise UsageError(
            "HWFSDP_START_METHOD",
            expected="forkserver or spawn",
            got=asked,
            remedy="Set one of them, or unset it.",
        )
    return asked or ("forkserver" if sys.platform == "linux" else "spawn")


def import_ahead(*modules: str) -> None:
    """Let the server import these as well, if it does not run yet, so that ranks find them there."""
    _ahead.extend(name for name in modules if name not in _ahead)


def left_to_import() -> tuple[str, ...]:
    """Return the modules that each rank imports first. An import takes no time if the server has made it before.

    A script may have started the server itself, without these modules.
    """
    return (_PRELOAD, *_ahead) if start_method() == "spawn" else (_PRELOAD,)


def start_server(*modules: str) -> None:
    """Start the server if it does not run yet, and return at once. `modules`: to import ahead."""
    import_ahead(*modules)
    if start_method() == "spawn":
        return
    mp.get_context("forkserver").set_forkserver_preload([_PRELOAD, *_ahead])
    before = tempfile.tempdir
    try:
        if len(tempfile.gettempdir()) > _LONGEST:
            tempfile.tempdir = "/tmp"
        forkserver.ensure_running()
    finally:
        tempfile.tempdir = before


def adopt_orphans() -> None:
    """Make this process the parent of its descendants' orphans. Do nothing on systems other than Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        warnings.filterwarnings("ignore", message="forkserver: waitpid returned unexpected pid")


def fork() -> int:
    """Fork this process. Python 3.12 warns if there are threads. The threads of libraries only wait for work, so a fork is safe."""
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def fork_here(*modules: str) -> None:
    """Start the server as a fork of this process, if none runs yet. `modules`: to import before, so that they are imported only once.

    Only for a process without threads that compute. `start_server` then finds this server.
    """
    import_ahead(*modules)
    server = getattr(forkserver, "_forkserver")  # the module has no public way
    if server._forkserver_pid is not None or start_method() == "spawn":
        return
    for module in modules:
        importlib.import_module(module)
    adopt_orphans()  # if the server is killed, its ranks are children of this process
    # a socket's path has at most 107 bytes, and this one is short wherever the folder is
    folder = os.open(util.get_temp_dir(), os.O_RDONLY | os.O_DIRECTORY)
    address = f"/proc/self/fd/{folder}/ranks-{os.getpid()}"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    os.chmod(address, 0o600)
    listener.listen()
    alive, keep_alive = os.pipe()
    pid = fork()
    if pid == 0:
        status = 1
        try:
            os.close(keep_alive)
            adopt_orphans()
            importlib.import_module(_PRELOAD)  # while the caller goes on
            forkserver.main(listener.fileno(), alive, [])
        except SystemExit:
            status = 0
        finally:
            sys.stderr.flush()
            os._exit(status)
    listener.close()
    os.close(alive)
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, keep_alive, pid
