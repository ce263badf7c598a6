"""`hwfsdp release`: write the student's edition of the course, without the answers."""

from __future__ import annotations

from argparse import Namespace

from hwfsdp.cli.options import answer
from hwfsdp.course.manifest import find_course
from hwfsdp.course.release.edition import write_edition


def release(args: Namespace) -> int:
    """Write the edition."""
    files = write_edition(find_course(), args.out, args.upto)
    exercises = sorted(path.name for path in (args.out / "exercises").glob("[0-9][0-9]_*"))
    found = {"folder": str(args.out), "files": len(files), "exercises": exercises, "leaks": 0}
    text = f"""{len(files):,} files in {args.out}: exercises {exercises[0][:2]} to {exercises[-1][:2]}.
Their TODOs are empty in the package. No file contains the text of an answer.
The edition needs this version of Python. Grade with your own edition, not with this one."""
    return answer(args, found, text)
