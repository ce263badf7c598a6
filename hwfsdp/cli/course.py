"""The course's verbs that have work to do before `hwfsdp.course` does: course, check, watch, lab.

`course` writes the course to a folder. An installed package carries the exercises (`setup.py`). They lie among Python's own files,
where nobody should work, so this verb copies them. In a checkout there is nothing to copy.

The others refuse at once what does not exist. `check` answers at once for an untouched starter, too. Then the server of ranks starts,
which imports torch while this process imports it, too.
"""

from __future__ import annotations

import shlex
import shutil
import time
from argparse import Namespace

from hwfsdp.cli.options import answer
from hwfsdp.course import NEEDED_BY_RANKS, checking
from hwfsdp.course.lab import commands
from hwfsdp.course.lab.bugs import find_bug, read_bugs
from hwfsdp.course.manifest import PACKAGE, Course, carried_course, find_course
from hwfsdp.course.refusals import check_new_folder
from hwfsdp.errors import UsageError
from hwfsdp.launcher.fork_server import start_server

_BEGAN = time.monotonic()


def course(args: Namespace) -> int:
    """Write the course to a folder."""
    carried = carried_course()
    if carried is None:
        root = find_course(PACKAGE).root
        raise UsageError(
            f"course {args.out}",
            expected="an installed package",
            got=f"a checkout, with its course in {root / 'exercises'}",
            remedy="Work there. hwfsdp reset N writes a starter again.",
        )
    check_new_folder("course", args.out)
    target = args.out / "exercises"
    shutil.copytree(carried.root / "exercises", target, ignore=shutil.ignore_patterns("__pycache__"))
    first, count = carried.exercises[0], len(carried.exercises)
    found = {"folder": str(args.out), "exercises": [exercise.number for exercise in carried.exercises]}
    text = f"""{count} exercises, the homework and the lab are in {target}.
First read {target / first.directory / 'README.md'}. Then:
  cd {shlex.quote(str(args.out))} && hwfsdp check {first.short_number}"""
    return answer(args, found, text)


def check(args: Namespace) -> int:
    """Check one exercise."""
    return checking.check(args.number, args.submission, args.mine, args.seed, args.json, _BEGAN)


def watch(args: Namespace) -> int:
    """Check again whenever a file is saved."""
    if args.number is not None:
        Course.exercise(find_course(), args.number, "watch")
    start_server(NEEDED_BY_RANKS)
    return checking.watch(args.number, args.mine)


def lab(args: Namespace) -> int:
    """List the bugs of the lab, show one, run its script, or check answers."""
    _refuse_misplaced(args)
    verb, number = ("lab check", args.number) if args.what == "check" else ("lab", args.what)
    if number is not None:
        find_bug(read_bugs(find_course()), number, verb)  # refused here, before torch is imported
    if args.what == "check" or args.run:
        start_server()
    if args.what == "check":
        return commands.check(args.number, args.submission, args.json)
    if args.what is None:
        return commands.list_bugs(args.json)
    if args.run:
        return commands.run(args.what, args.out, args.json)
    return commands.show(args.what, args.json)


def _refuse_misplaced(args: Namespace) -> None:
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
