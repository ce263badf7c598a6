"""The start of the server from which ranks are forked: it imports, it adopts orphans, and it leaves memory alone.

Imported by that server alone (`ranks`). Nothing here may start threads or ask a driver for GPUs: forks survive neither. One call of
`torch.cuda.is_available` is enough, and CUDA refuses to start in every rank.

Where the system has it (Linux), processes that a rank leaves behind become children of the server, instead of
getting lost, so that `course.processes` can find and end them.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import sys
import warnings

from hwfsdp import compat

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def adopt_orphans() -> None:
    """Make this process the parent of its descendants' orphans; do nothing where the system does not know this."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        warnings.filterwarnings("ignore", message="forkserver: waitpid returned unexpected pid")


def import_for_ranks() -> None:
    """Import the modules that every rank needs."""
    for module in ("torch.distributed.tensor", "hwfsdp.features.door", compat.LATE_IMPORT):
        importlib.import_module(module)


def leave_to_all() -> None:
    """Keep what is there now out of garbage collections: one in a rank would write to, and so copy, all of this memory."""
    gc.collect()
    gc.freeze()


adopt_orphans()
import_for_ranks()
leave_to_all()
