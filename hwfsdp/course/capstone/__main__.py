"""The homework's own files, written from our solution.

python -m hwfsdp.course.capstone write       writes the starter
python -m hwfsdp.course.capstone picture     draws the picture
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hwfsdp.course.capstone import picture
from hwfsdp.course.capstone.homework import FILE, FOLDER, read_homework, solution_path, starter_of
from hwfsdp.course.manifest import find_course
from hwfsdp.errors import UsageError
from hwfsdp.plot import sheet


def main(arguments: Sequence[str]) -> int:
    """Do what the argument says; return the exit status."""
    course = find_course()
    if list(arguments) == ["write"]:
        path = course.root / "exercises" / FOLDER / FILE
        text = starter_of(read_homework(course), solution_path(course).read_text())
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(f"wrote {path.relative_to(course.root)}")
        return 0
    if list(arguments) == ["picture"]:
        sheet.save(picture.draw(), course.root / "exercises" / FOLDER / "picture.png")
        return 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UsageError as unusable:
        sys.exit(f"hwfsdp: {unusable}")
