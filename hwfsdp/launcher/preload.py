"""The start of a process from which ranks are forked: it imports modules, and adopts orphans.

Only such a process imports this module (`fork_server`), or a rank that was not forked. Nothing here may start threads or ask a driver
for GPUs, because both break in forked processes. After a single call of `torch.cuda.is_available`, CUDA refuses to start in every rank.

The server makes no garbage, and looks for none: its imports take a fifth less time. Ranks turn collection on again (`worker.run_rank`).

On Linux, processes that a rank leaves behind become children of the server. So they are not lost: `course.walls` can find and end
them.
"""

from __future__ import annotations

import gc
import importlib

from hwfsdp.launcher.fork_server import adopt_orphans


def import_for_ranks() -> None:
    """Import the modules that every rank needs."""
    for module in ("hwfsdp.launcher.launch", "hwfsdp.features.fully_shard"):
        importlib.import_module(module)
    importlib.import_module(importlib.import_module("hwfsdp.compat").LATE_IMPORT)


adopt_orphans()
gc.disable()
import_for_ranks()
