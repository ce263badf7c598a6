"""`hwfsdp release`: write the student's edition of the course, without the answers."""

from __future__ import annotations

from argparse import Namespace

from hwfsdp.cli.options import answer
from hwfsdp.course.manifest import find_course
from hwfsdp.course.release.edition import untracked, write_edition

SHOWN = 5  # untracked files that the command names


def release(args: Namespace) -> int:
    """Write the edition."""
    course = find_course()
    files, left_out = write_edition(course, args.out, args.upto), untracked(course.root)
    exercises = sorted(path.name for path in (args.out / "exercises").glob("[0-9][0-9]_*"))
    found = {
        "folder": str(args.out),
        "files": len(files),
        "exercises": exercises,
        "leaks": 0,
        "untracked": left_out,
    }
    text = f"""{len(files):,} files in {args.out}: exercises {exercises[0][:2]} to {exercises[-1][:2]}.
Their TODOs are empty in the package. No file contains the text of an answer.
The edition needs this version of Python. Grade with your own edition, not with this one."""
    if left_out:
        text += f"\nNot copied, because git does not track them: {', '.join(left_out[:SHOWN])}"
        text += f", and {len(left_out) - SHOWN} more." if len(left_out) > SHOWN else "."
    return answer(args, found, text)
