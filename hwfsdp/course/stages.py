"""Starters, stages and solutions, made from one text with marks.

`solutions/` has the solved files, and they run as they are. Their marks keep the earlier versions; `exercises/` has the earliest one.

    # @08                       from exercise 08 on
    stream.wait(event)
    # @03                       from 03 to 07
    # | wait()
    # @00                       before 03: the starter
    # | raise NotImplementedError("TODO(03): wait")
    # @end

The first lines of a block are the newest. Older lines follow below, each after `# | `. Before the last of them there is nothing. A
block may hold other blocks: a mark that is later than the lines around it begins one. The homework's tasks have the marks `# @h1`,
`# @h2`, `# @h3`, which are later than all numbers.

    python -m hwfsdp.course.stages write        write the starters (make exercises)
    python -m hwfsdp.course.stages check        name the starters that differ (make check)
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from hwfsdp.errors import UsageError
from hwfsdp.files import write_whole

OWN_FILE = "my_fsdp.py"  # the student's file for all stations
START, END = "00", "zz"  # the first and the last stage of a file
# in an installed package: the starters, as they were
CARRIED = Path(__file__).parents[1] / "_course" / "exercises"
_MARK = re.compile(r"^\s*# @(\d\d|h\d|end)$", re.MULTILINE)
_OLD = re.compile(r"\s*# \|(?: (.*))?$")
_BEGINS = re.compile(r"\s*(class |def |@|# ---)")


def is_marked(text: str) -> bool:
    """True if a text has marks."""
    return _MARK.search(text) is not None


def starter(text: str) -> str:
    """Return the file as students get it."""
    return stage(text, START)


def stages(text: str) -> list[str]:
    """Return all versions of a file without marks, the starter first, the solution last."""
    marks = sorted({START, *_MARK.findall(text)} - {"end"})
    return list(dict.fromkeys(stage(text, mark) for mark in marks))


def stage(text: str, upto: str) -> str:
    """Return the file without marks, after an exercise or a task, such as "03" or "h1".

    Raises:
        UsageError: the marks do not fit together.
    """
    return _spaced(_lines(iter(enumerate(text.splitlines(), 1)), upto, None))


def _lines(
    lines: Iterator[tuple[int, str]], upto: str, since: str | None, is_kept: bool = True
) -> Iterator[str]:
    """Yield the lines of a stage, up to the end of the block that began with the mark `since`."""
    taken = since is None or since <= upto  # true if the next lines belong to this stage
    done = taken and since is not None
    for place, line in lines:
        mark = _MARK.match(line)
        if mark is None:
            old = _OLD.match(line)
            if is_kept and taken:
                yield (old[1] or "") if old else line
        elif mark[1] == "end":
            if since is None:
                raise _misplaced(place, "a block before its end", "# @end alone")
            return
        elif since is None or mark[1] > since:
            yield from _lines(lines, upto, mark[1], is_kept and taken)
        elif mark[1] == since:
            raise _misplaced(place, "an earlier mark than the one above", f"# @{since} again")
        else:
            since = mark[1]
            taken, done = not done and since <= upto, done or since <= upto
    if since is not None:
        raise _misplaced(0, f"# @end after # @{since}", "the end of the file")


def _misplaced(line: int, expected: str, got: str) -> UsageError:
    where = f"line {line} of a file with marks" if line else "a file with marks"
    return UsageError(
        where, expected=expected, got=got, remedy="hwfsdp/course/stages.py describes the marks."
    )


def _spaced(lines: Iterable[str]) -> str:
    """Put two blank lines before text in the first column that follows a body, and one before a method; drop repeated blank lines."""
    found: list[str] = []
    blank = 0
    for line in lines:
        if not line:
            blank += 1
            continue
        before = found[-1] if found else ""
        indent = len(line) - len(line.lstrip())
        goes_on = before.lstrip().startswith(("@", "#")) or before.endswith(":")
        if found and _BEGINS.match(line) and not goes_on:
            blank = 2 if indent == 0 else max(blank, 1 if indent == 4 else 0)
        elif indent == 0 and before.startswith(" ") and not line.startswith((")", "]", "}", '"')):
            blank = 2
        found += [""] * min(blank, 2 if indent == 0 else 1)
        found.append(line)
        blank = 0
    return "\n".join(found) + "\n"


# --- The file before a station -------------------------------------------------------------------------------


def given(number: str) -> str:
    """Return the line that says, in a file, that a station is not the student's own."""
    return f"# Station {number} was written by hwfsdp catchup."


def is_given(number: str, text: str) -> bool:
    """True if a file says so."""
    return given(number) in map(str.strip, text.splitlines())


def caught_up(text: str, earlier: Iterable[str], own: Iterable[str]) -> str:
    """Return the file after some stations, with a line for each that the student has not written.

    Args:
        text: the reference, with marks. earlier: numbers of the stations, in order. own: numbers of the student's own ones.
    """
    done = list(earlier)
    lines = [given(number) for number in done if number not in own]
    return "\n".join([*lines, stage(text, done[-1])])


# --- Folders -------------------------------------------------------------------------------------------------


def sources(root: Path) -> dict[Path, str]:
    """Return the marked texts of a course, by path below `solutions/`."""
    folder = root / "solutions"
    texts = {
        path.relative_to(folder): path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))
    }
    return {path: text for path, text in texts.items() if is_marked(text)}


def starter_of(root: Path, path: Path) -> str | None:
    """Return the starter of a file below `exercises/`; None if neither a solution nor an installed package has it."""
    source, carried = root / "solutions" / path, CARRIED / path
    if source.is_file():
        return starter(source.read_text(encoding="utf-8"))
    return carried.read_text(encoding="utf-8") if carried.is_file() else None


def files(root: Path) -> dict[Path, str]:
    """Return the right text of each starter, by its path.

    Raises:
        UsageError: the marks of a solution do not fit together, or one of its stages is not Python.
    """
    for path, text in sources(root).items():
        try:
            for version in stages(text):
                compile(version, str(path), "exec", dont_inherit=True)
        except (UsageError, SyntaxError) as error:
            remedy = "Mend its marks."
            raise UsageError(f"solutions/{path}", expected="stages", got=str(error), remedy=remedy) from None
    return {root / "exercises" / path: starter(text) for path, text in sources(root).items()}


def write(root: Path) -> list[Path]:
    """Write the starters that differ, and return their paths."""
    changed = {path: text for path, text in files(root).items() if _text(path) != text}
    for path, text in changed.items():
        write_whole(path, text)
    return list(changed)


def differences(root: Path) -> list[str]:
    """Return a line for each starter that is not what its solution gives, and for each that no solution gives."""
    try:
        right = files(root)
    except UsageError as error:
        return [str(error)]
    own = {
        path for path in (root / "exercises").rglob("*.py") if not path.name.startswith(("test_", "facts"))
    }
    changed = [path for path, text in right.items() if _text(path) != text]
    alone = sorted(path for path in own - set(right) if "lab" not in path.parts)
    return [
        f"{path.relative_to(root)} is not what solutions/ gives. Run: make exercises" for path in changed
    ] + [f"{path.relative_to(root)} has no source with marks in solutions/." for path in alone]


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def main(arguments: list[str]) -> int:
    """Run the command of the first argument in the current folder, and return the exit status."""
    root = Path.cwd()
    if arguments == ["write"]:
        for path in write(root):
            print(f"wrote {path.relative_to(root)}")
        return 0
    found = differences(root)
    print(*found, sep="\n", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
