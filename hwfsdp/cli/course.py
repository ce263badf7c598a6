"""`hwfsdp course`: write the course to a folder, for users who installed the package without its repository.

An installed package carries the exercises (`setup.py`). They lie among Python's own files, where nobody should work, so this
verb copies them. In a checkout there is nothing to copy.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil

from hwfsdp.course.manifest import PACKAGE, carried_course, find_course
from hwfsdp.course.refusals import check_new_folder
from hwfsdp.errors import UsageError


def course(args: argparse.Namespace) -> int:
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
    first = carried.exercises[0]
    if args.json:
        print(
            json.dumps(
                {"folder": str(args.out), "exercises": [e.number for e in carried.exercises]}, indent=2
            )
        )
        return 0
    print(f"{len(carried.exercises)} exercises, the homework and the lab are in {target}.")
    print(f"First read {target / first.directory / 'README.md'}. Then:")
    print(f"  cd {shlex.quote(str(args.out))} && hwfsdp check {first.short_number}")
    return 0
