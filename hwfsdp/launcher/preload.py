"""The start of the server from which ranks are forked: it imports modules, adopts orphans, and keeps memory shared.

Only that server imports this module (`ranks`). Nothing here may start threads or ask a driver for GPUs, because both
break in forked processes. After a single call of `torch.cuda.is_available`, CUDA refuses to start in every rank.

On Linux, processes that a rank leaves behind become children of the server. So they are not lost: `course.processes` can find and
end them.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import sys
import warnings

from hwfsdp import compat

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def adopt_orphans() -> None:
    """Make this process the parent of its descendants' orphans. Do nothing on systems other than Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        warnings.filterwarnings("ignore", message="forkserver: waitpid returned unexpected pid")


def import_for_ranks() -> None:
    """Import the modules that every rank needs."""
    for module in ("torch.distributed.tensor", "hwfsdp.features.api", compat.LATE_IMPORT):
        importlib.import_module(module)


def leave_to_all() -> None:
    """Exclude the current objects from garbage collection. A collection in a rank would write to their memory and so copy it."""
    gc.collect()
    gc.freeze()
    # libraries that look for leaks when the server ends would report these objects
    atexit.register(gc.unfreeze)


adopt_orphans()
import_for_ranks()
leave_to_all()
