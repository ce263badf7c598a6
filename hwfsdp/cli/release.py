"""`hwfsdp release`: write the student's edition of the course, without the answers."""

from __future__ import annotations

import argparse
import json

from hwfsdp.course.manifest import find_course
from hwfsdp.course.release.edition import write_edition


def release(args: argparse.Namespace) -> int:
    course = find_course()
    files = write_edition(course, args.out, args.upto)
    exercises = sorted(path.name for path in (args.out / "exercises").glob("[0-9][0-9]_*"))
    if args.json:
        print(
            json.dumps(
                {"folder": str(args.out), "files": len(files), "exercises": exercises, "leaks": 0}, indent=2
            )
        )
        return 0
    print(f"{len(files):,} files in {args.out}: exercises {exercises[0][:2]} to {exercises[-1][:2]}.")
    print("Their TODOs are empty in the package. No file contains the text of an answer.")
    print("The edition needs this version of Python. Grade with your own edition, not with this one.")
    return 0
