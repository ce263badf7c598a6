"""The process that ranks are forked from, started ahead of need.

It imports torch once, for all ranks (`preload`). This module does not, so that a command can start the server first and
import torch itself while the server does.
"""

from __future__ import annotations

import importlib
import multiprocessing as mp
import os
import socket
import sys
import warnings
from multiprocessing import connection, forkserver

_PRELOAD = "hwfsdp.launcher.preload"
_ahead: list[str] = []


def import_ahead(*modules: str) -> None:
    """Let the server import these as well, if it does not run yet, so that ranks find them there."""
    _ahead.extend(name for name in modules if name not in _ahead)


def start_server(*modules: str) -> None:
    """Start the server if it does not run yet, and return at once. `modules`: to import ahead."""
    import_ahead(*modules)
    mp.get_context("forkserver").set_forkserver_preload([_PRELOAD, *_ahead])
    forkserver.ensure_running()


def fork_here(*modules: str) -> None:
    """Start the server as a fork of this process, if none runs yet. `modules`: to import before, so that they are imported only once.

    Only for a process without threads that compute. `start_server` then finds this server.
    """
    server = getattr(forkserver, "_forkserver")  # the module has no public way
    if server._forkserver_pid is not None:
        return
    for module in (_PRELOAD, *modules):
        importlib.import_module(module)
    from hwfsdp.launcher.preload import adopt_orphans

    address = getattr(connection, "arbitrary_address")("AF_UNIX")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    os.chmod(address, 0o600)
    listener.listen()
    alive, keep_alive = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns if there are threads. Those of libraries wait for work, so a fork is safe.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(keep_alive)
            adopt_orphans()
            forkserver.main(listener.fileno(), alive, [])
        except SystemExit:
            status = 0
        finally:
            sys.stderr.flush()
            os._exit(status)
    listener.close()
    os.close(alive)
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, keep_alive, pid
