"""`hwfsdp lab`: one verb for four commands of `hwfsdp.course`; options that a command does not have are refused."""

from __future__ import annotations

from argparse import Namespace

from hwfsdp.course import lab as bugs
from hwfsdp.errors import UsageError


def lab(args: Namespace) -> int:
    """List the bugs of the lab, show one, run its script, or check answers."""
    _refuse_misplaced(args)
    if args.what == "check":
        return bugs.check(args.number, args.submission, args.json)
    if args.what is None:
        return bugs.list_bugs(args.json)
    if not args.run:
        return bugs.show(args.what, args.json)
    bugs.find_bug(args.what)  # refused here, before torch is imported
    from hwfsdp.course import lab_runs

    return lab_runs.run(args.what, args.out, args.json)


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
