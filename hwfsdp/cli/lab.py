"""`hwfsdp lab`: the broken lab. It lists bugs, shows one, runs its script, checks answers."""

from __future__ import annotations

import argparse

from hwfsdp.course.lab import commands
from hwfsdp.course.lab.bugs import find_bug, read_bugs
from hwfsdp.course.manifest import find_course
from hwfsdp.errors import UsageError
from hwfsdp.launcher.fork_server import start_server


def lab(args: argparse.Namespace) -> int:
    _refuse_misplaced(args)
    number = args.number if args.what == "check" else args.what
    if number is not None:
        find_bug(read_bugs(find_course()), number)  # refused here, before torch is imported
    if args.what == "check" or args.run:
        start_server()  # it imports torch, as the verbs below do
    if args.what == "check":
        return commands.check(args.number, args.submission, args.json)
    if args.what is None:
        return commands.list_bugs(args.json)
    if args.run:
        return commands.run(args.what, args.out, args.json)
    return commands.show(args.what, args.json)


def _refuse_misplaced(args: argparse.Namespace) -> None:
    """Raise UsageError for an option that this use of the verb does not have."""
    checks = args.what == "check"
    misplaced = [
        ("a second number", args.number is not None and not checks, "hwfsdp lab check N"),
        ("--submission", args.submission is not None and not checks, "hwfsdp lab check --submission DIR"),
        ("--run", args.run and (checks or args.what is None), "hwfsdp lab N --run"),
        ("--out", args.out is not None and not args.run, "hwfsdp lab N --run --out DIR"),
    ]
    for name, is_there, instead in misplaced:
        if is_there:
            raise UsageError(
                "lab",
                expected=f"{name} only in {instead}",
                got=f"{name} without that",
                remedy="See: hwfsdp lab --help",
            )
