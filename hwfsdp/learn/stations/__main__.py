"""The stations of `my_fsdp.py`, from a terminal.

python -m hwfsdp.learn.stations start [DIR]     write the starter, and what to read, to a folder (default: here)
python -m hwfsdp.learn.stations check NN [DIR]  check a station, and all before it
python -m hwfsdp.learn.stations hint NN         show the hints of a station, one more each time
python -m hwfsdp.learn.stations catchup NN [DIR]  write the file as it is before station NN; yours becomes my_fsdp.before.py
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
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
        if verb == "start":
            return start(Path(*rest[:1]))
        if verb in ("check", "catchup") and rest:
            return (check if verb == "check" else catchup)(wanted(rest[0]), Path(*rest[1:2]).resolve())
        if verb == "hint" and rest:
            print("\n\n".join(exercise_of(wanted(rest[0]), Path()).hints[: int(*rest[1:2] or ["1"])]))
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
    """Write the starter and the stations' pages; a file that is there stays."""
    shutil.copytree(TEXTS, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.toml"))
    if (folder / FILE_NAME).exists():
        print(f"{folder / FILE_NAME} is there already, and stays as it is.")
    else:
        (folder / FILE_NAME).write_text(stage(0))
        print(f"Wrote {folder / FILE_NAME}. Read {folder / 'README.md'} first.")
    return 0


def check(station: Station, folder: Path) -> int:
    """Print the verdict."""
    grade = grade_station(station, folder, Course(PACKAGE.parent, ()), Options(mine=True))
    print(shown(grade, Path(os.path.relpath(folder / FILE_NAME)), Style()))
    return 0 if grade.status == "passed" else 1


def catchup(station: Station, folder: Path) -> int:
    """Write the file as it is before a station; the learner's own is kept beside it."""
    file = folder / FILE_NAME
    if file.exists():
        file.replace(file.with_suffix(".before.py"))
    file.write_text(stage(int(station.number) - 1))
    print(
        f"Wrote {file} as it is before station {station.number}. Yours is {file.with_suffix('.before.py')}."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
