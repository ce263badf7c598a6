"""The process that ranks are forked from, started ahead of need.

It imports torch once, for all ranks (`preload`). This module does not, so that a command can start the server first and
import torch itself while the server does.
"""

from __future__ import annotations

import multiprocessing as mp
from multiprocessing import forkserver


def start_server() -> None:
    """Start the server if it does not run yet, and return at once."""
    mp.get_context("forkserver").set_forkserver_preload(["hwfsdp.launcher.ranks", "hwfsdp.launcher.preload"])
    forkserver.ensure_running()
