"""The process that ranks are forked from, started ahead of need.

It imports torch once, for all ranks (`preload`). This module does not, so that a command can start the server first and
import torch itself while the server does.
"""

from __future__ import annotations

import multiprocessing as mp
from multiprocessing import forkserver

_ahead: list[str] = []


def import_ahead(*modules: str) -> None:
    """Let the server import these as well, if it does not run yet, so that ranks find them there."""
    _ahead.extend(name for name in modules if name not in _ahead)


def start_server(*modules: str) -> None:
    """Start the server if it does not run yet, and return at once. `modules`: to import ahead."""
    import_ahead(*modules)
    preloaded = ["hwfsdp.launcher.ranks", *_ahead, "hwfsdp.launcher.preload"]  # the last one freezes memory
    mp.get_context("forkserver").set_forkserver_preload(preloaded)
    forkserver.ensure_running()
