"""`hwfsdp check` and `hwfsdp watch`: refuse an unknown exercise at once, and import torch in two processes at a time."""

from __future__ import annotations

import time
from argparse import Namespace

from hwfsdp.course.commands import wanted_exercise
from hwfsdp.course.manifest import Course, find_course
from hwfsdp.launcher.fork_server import start_server

_BEGAN = time.monotonic()


def check(args: Namespace) -> int:
    """Check one exercise."""
    wanted_exercise(find_course(), args.number)
    start_server()  # it imports torch, and so does the next line
    from hwfsdp.course import checking

    return checking.check(args.number, args.submission, args.mine, args.seed, args.json, _BEGAN)


def watch(args: Namespace) -> int:
    """Check again whenever a file is saved."""
    if args.number is not None:
        Course.exercise(find_course(), args.number)
    start_server()
    from hwfsdp.course import checking

    return checking.watch(args.number, args.mine)
