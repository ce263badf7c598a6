"""The stations of `my_fsdp.py`, from a terminal: what `hwfsdp check`, `hint` and `catchup` will do when the course is this file.

python -m hwfsdp.learn.stations start DIR         write the starter and the pages to a folder; files that are there stay
python -m hwfsdp.learn.stations check NN [DIR]    check a station, and those before it (DIR: the current folder)
python -m hwfsdp.learn.stations hint NN           show the hints of a station
python -m hwfsdp.learn.stations catchup NN [DIR]  write the file as it is before a station; yours is kept beside it
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from hwfsdp.errors import UsageError
from hwfsdp.learn.grade import Options
from hwfsdp.learn.manifest import PACKAGE, Course
from hwfsdp.learn.report import Style, shown
from hwfsdp.learn.stations.course import STATIONS, Station
from hwfsdp.learn.stations.grading import FILE_NAME, TEXTS, exercise_of, grade_station
from hwfsdp.learn.stations.stages import stage


def main(arguments: Sequence[str]) -> int:
    """Do what the first argument says; return the exit status."""
    verb, *rest = arguments or ("",)
    try:
        if verb == "start" and len(rest) == 1:
            return start(Path(rest[0]))
        if verb in ("check", "catchup") and len(rest) in (1, 2):
            return (check if verb == "check" else catchup)(wanted(rest[0]), Path(*rest[1:]).resolve())
        if verb == "hint" and len(rest) == 1:
            print("\n\n".join(exercise_of(wanted(rest[0]), Path()).hints))
            return 0
    except UsageError as error:
        print(f"hwfsdp: {error}", file=sys.stderr)
        return 2
    print(__doc__, file=sys.stderr)
    return 2


def wanted(number: str) -> Station:
    """The station of a number.

    Raises:
        UsageError: there is none.
    """
    if number.isdecimal() and 1 <= int(number) <= len(STATIONS):
        return STATIONS[int(number) - 1]
    last = len(STATIONS)
    raise UsageError(f"station {number}", expected=f"1 to {last}", got=repr(number), remedy="Give a number.")


def start(folder: Path) -> int:
    """Write the starter and the stations' pages; files that are there stay as they are."""
    texts = {path.relative_to(TEXTS): path.read_text() for path in sorted(TEXTS.rglob("*.md"))}
    for name, text in {**texts, Path(FILE_NAME): stage(0)}.items():
        target = folder / name
        if target.exists():
            print(f"{target} is there already, and stays as it is.")
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
    print(f"Your file is {folder / FILE_NAME}. Begin with {folder / STATIONS[0].directory / 'README.md'}.")
    return 0


def check(station: Station, folder: Path) -> int:
    """Print the verdict."""
    grade = grade_station(station, folder, Course(PACKAGE.parent, ()), Options(mine=True))
    print(shown(grade, Path(os.path.relpath(folder / FILE_NAME)), Style()))
    return 0 if grade.status == "passed" else 1


def catchup(station: Station, folder: Path) -> int:
    """Write the file as it is before a station; the learner's own is kept beside it, and so are earlier ones."""
    file = folder / FILE_NAME
    if file.exists():
        kept = next(path for n in count(1) if not (path := file.with_name(f"my_fsdp.before_{n}.py")).exists())
        file.rename(kept)
        print(f"Your file is {kept} now.")
    file.write_text(stage(int(station.number) - 1))
    print(f"{file} is the file as it is before station {station.number}.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
