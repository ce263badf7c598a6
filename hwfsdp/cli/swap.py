"""`hwfsdp swap`: run a program that imports FSDP2 from torch on hwfsdp, unchanged."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from hwfsdp import __file__ as package


def add_swap(verbs: Any) -> None:
    """Add the verb `swap`."""
    swap: argparse.ArgumentParser = verbs.add_parser(
        "swap",
        help="run a program that uses torch's FSDP2 on hwfsdp, unchanged",
        description="Run a script unchanged. When it imports FSDP2 from torch, it gets hwfsdp instead. So do the processes that it starts. "
        "Under torchrun: torchrun OPTIONS -m hwfsdp swap train.py ARGS",
        epilog=f"If another program starts your script, set PYTHONPATH={startup()}. This swaps FSDP2 in every process.",
    )
    swap.set_defaults(run=_swap)
    swap.add_argument("-m", action="store_true", dest="is_module", help="SCRIPT is a module's name")
    swap.add_argument("script", metavar="SCRIPT", help="a Python file, or with -m a module")
    swap.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS", help="arguments of the script")


def startup() -> Path:
    """The folder with the `sitecustomize` that exchanges the names when Python starts."""
    return Path(package).parent / "startup"


def _swap(args: argparse.Namespace) -> int:
    import hwfsdp

    hwfsdp.install()
    behind = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(startup()), behind]))
    sys.argv = [args.script, *args.args]
    if not sys.flags.safe_path:  # the first entry is what Python took this command from
        sys.path[0] = os.getcwd() if args.is_module else str(Path(args.script).resolve().parent)
    try:
        if args.is_module:
            runpy.run_module(args.script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(args.script, run_name="__main__")
    except Exception as error:  # the program's own, as Python shows it
        error.with_traceback(within_the_program(error.__traceback__))
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def within_the_program(frames: TracebackType | None) -> TracebackType | None:
    """Return the traceback without the frames of `hwfsdp swap` and `runpy`."""
    while frames is not None and frames.tb_frame.f_globals.get("__name__") in (__name__, "runpy"):
        frames = frames.tb_next
    return frames
