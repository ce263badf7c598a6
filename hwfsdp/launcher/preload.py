"""The start of the server from which ranks are forked: it imports modules, and adopts orphans.

Only that server imports this module, before all others (`fork_server`). Nothing here may start threads or ask a driver for GPUs, because
both break in forked processes. After a single call of `torch.cuda.is_available`, CUDA refuses to start in every rank.

The server makes no garbage, and looks for none: its imports take a fifth less time. Ranks turn collection on again (`worker.run_rank`).

On Linux, processes that a rank leaves behind become children of the server. So they are not lost: `course.walls` can find and end
them.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import sys
import warnings

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def adopt_orphans() -> None:
    """Make this process the parent of its descendants' orphans. Do nothing on systems other than Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        warnings.filterwarnings("ignore", message="forkserver: waitpid returned unexpected pid")


def import_for_ranks() -> None:
    """Import the modules that every rank needs."""
    for module in ("hwfsdp.launcher.launch", "hwfsdp.features.api"):
        importlib.import_module(module)
    importlib.import_module(importlib.import_module("hwfsdp.compat").LATE_IMPORT)


adopt_orphans()
gc.disable()
import_for_ranks()
