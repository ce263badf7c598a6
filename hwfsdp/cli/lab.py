"""`hwfsdp lab`: the broken lab. It lists bugs, shows one, runs its script, checks answers."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hwfsdp.errors import UsageError
from hwfsdp.launcher.fork_server import start_server


def add_lab(verbs: Any) -> None:
    """Add the verb `lab`."""
    lab: argparse.ArgumentParser = verbs.add_parser(
        "lab",
        help="find the cause and the fix of real bugs, with evidence",
        description="Find out why scripts train wrongly. hwfsdp lab lists the scripts. hwfsdp lab N shows one; with --run it runs under the "
        "recorder. hwfsdp lab check N judges your answers in exercises/lab/answers.toml.",
        usage="hwfsdp lab [N [--run] | check [N] [--submission DIR]] [options]",
        epilog="Exit status of a check: 0 if every answer is right, 1 if not, 2 if the file cannot be used.",
    )
    lab.set_defaults(run=_lab)
    lab.add_argument(
        "what", metavar="N|check", nargs="?", help="number or folder of a script; or check, to judge answers"
    )
    lab.add_argument(
        "number", metavar="N", nargs="?", help="after check: number or folder of the script (default: all)"
    )
    lab.add_argument(
        "--run",
        action="store_true",
        dest="run_script",
        help="run the script under the recorder, and write its trace, a player of it, and pictures",
    )
    lab.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for trace, player and pictures (default runs/lab/NN_name)",
    )
    lab.add_argument(
        "--submission",
        type=Path,
        metavar="DIR",
        help="folder with lab/answers.toml (default: exercises/ of the course)",
    )
    lab.add_argument("--json", action="store_true", help="print JSON instead of text")


def _lab(args: argparse.Namespace) -> int:
    _refuse_misplaced(args)
    from hwfsdp.course.lab import commands
    from hwfsdp.course.lab.bugs import find_bug, read_bugs
    from hwfsdp.course.manifest import find_course

    number = args.number if args.what == "check" else args.what
    if number is not None:
        find_bug(read_bugs(find_course()), number)  # refused here, before torch is imported
    if args.what == "check" or args.run_script:
        start_server()  # it imports torch, as the verbs below do
    if args.what == "check":
        return commands.check(args.number, args.submission, args.json)
    if args.what is None:
        return commands.list_bugs(args.json)
    if args.run_script:
        return commands.run(args.what, args.out, args.json)
    return commands.show(args.what, args.json)


def _refuse_misplaced(args: argparse.Namespace) -> None:
    """Raise UsageError for an option that this use of the verb does not have."""
    checks = args.what == "check"
    misplaced = [
        ("a second number", args.number is not None and not checks, "hwfsdp lab check N"),
        ("--submission", args.submission is not None and not checks, "hwfsdp lab check --submission DIR"),
        ("--run", args.run_script and (checks or args.what is None), "hwfsdp lab N --run"),
        ("--out", args.out is not None and not args.run_script, "hwfsdp lab N --run --out DIR"),
    ]
    for name, is_there, instead in misplaced:
        if is_there:
            raise UsageError(
                "lab",
                expected=f"{name} only in {instead}",
                got=f"{name} without that",
                remedy="See: hwfsdp lab --help",
            )
