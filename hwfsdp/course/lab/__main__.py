"""Write the lab files that are made from other files, or check them; see `workshop`."""

from __future__ import annotations

import sys

from hwfsdp.course.lab import workshop
from hwfsdp.course.manifest import find_course
from hwfsdp.errors import UsageError


def main(arguments: list[str]) -> int:
    """Return the exit status."""
    course = find_course()
    if arguments == ["check"]:
        found = list(workshop.problems(course))
        for problem in found:
            print(problem, file=sys.stderr)
        return 1 if found else 0
    if arguments:
        print(workshop.__doc__, file=sys.stderr)
        return 2
    for path in workshop.write(course):
        print(f"wrote {path.relative_to(course.root)}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UsageError as unusable:
        sys.exit(f"hwfsdp: {unusable}")
