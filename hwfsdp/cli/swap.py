"""`hwfsdp swap`: run an unchanged program that imports FSDP2 from torch. It then uses hwfsdp."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path
from types import TracebackType

import hwfsdp
from hwfsdp.errors import UsageError

# The folder with the `sitecustomize` that exchanges the names when Python starts.
STARTUP = Path(hwfsdp.__file__).parent / "startup"


def swap(args: argparse.Namespace) -> int:
    """Run the program. Show its error as Python shows it.

    Raises:
        UsageError: there is no such file.
    """
    if not args.m and not Path(args.script).exists():
        raise UsageError(
            "swap",
            expected="a Python file",
            got=f"{args.script!r}, which does not exist",
            remedy="Check the path, or give a module: swap -m NAME.",
        )
    hwfsdp.install()
    behind = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(STARTUP), behind]))
    sys.argv = [args.script, *args.args]
    if not sys.flags.safe_path:  # the first entry is the folder of this command
        sys.path[0] = os.getcwd() if args.m else str(Path(args.script).resolve().parent)
    try:
        if args.m:
            runpy.run_module(args.script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(args.script, run_name="__main__")
    except Exception as error:  # an error of the program
        error.with_traceback(within_the_program(error.__traceback__))
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def within_the_program(frames: TracebackType | None) -> TracebackType | None:
    """Return the traceback without the frames of `hwfsdp swap` and `runpy`."""
    while frames is not None and frames.tb_frame.f_globals.get("__name__") in (__name__, "runpy"):
        frames = frames.tb_next
    return frames
