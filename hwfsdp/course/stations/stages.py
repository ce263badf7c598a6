"""The reference file at each station, made from one text with marks.

`my_fsdp.py` beside this module is the file after station 10, and it runs as it is. Its marks keep the earlier versions:

    # @08                       from station 08 on
    stream.wait(event)
    # @03                       from 03 to 07
    # | wait()
    # @end                      before 03: nothing

The first lines of a block are the newest. Older lines follow below, each after `# | `. A block may hold other blocks: a mark with
a larger number than the lines around it begins one. Station 00 is the starter.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

LAST = 10
LONG = 4  # statements; two people do not write such a function alike by chance
SOURCE = Path(__file__).with_name("my_fsdp.py")
_MARK = re.compile(r"\s*# @(\d\d|end)$")
_OLD = re.compile(r"\s*# \|(?: (.*))?$")


def given(number: str) -> str:
    """Return the line that declares, in a file, that a station is not the learner's own."""
    return f"# Station {number} was written by hwfsdp catchup."


def is_given(number: str, text: str) -> bool:
    """True if a file declares so."""
    return given(number) in map(str.strip, text.splitlines())


def undeclared(text: str) -> dict[str, int]:
    """Count, by station, the long functions of a file that equal the reference's word for word, without that line in the file.

    Comments and docstrings do not count. A learner can delete the line of a station, but the functions still show it.
    """
    found: dict[str, int] = {}
    try:
        bodies = _long_bodies(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return found
    for body in bodies:
        number = _reference_bodies().get(body)
        if number and not is_given(number, text):
            found[number] = found.get(number, 0) + 1
    return dict(sorted(found.items()))


@cache
def _reference_bodies() -> dict[str, str]:
    """Return, by its statements, the station at which each long function of the reference begins."""
    found = dict.fromkeys(_long_bodies(stage(0)), "")
    for number in range(1, LAST + 1):
        for body in _long_bodies(stage(number)):
            found.setdefault(body, f"{number:02}")
    return found


def _long_bodies(text: str) -> list[str]:
    """Return the statements of each long function, without its docstring."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            body = node.body[ast.get_docstring(node) is not None :]
            if sum(isinstance(each, ast.stmt) for one in body for each in ast.walk(one)) >= LONG:
                found.append("".join(ast.dump(one) for one in body))
    return found


def earlier_than(number: str) -> list[str]:
    """Return the numbers of the stations before this one."""
    return [f"{n:02}" for n in range(1, min(int(number), LAST + 1))]


def caught_up(number: str, kept: Iterable[str]) -> str:
    """Return the file before a station, with a line for each earlier station that is not the learner's own.

    Args:
        kept: numbers of the stations that count as the learner's own.
    """
    lines = [given(earlier) for earlier in earlier_than(number) if earlier not in kept]
    return "\n".join([*lines, stage(int(number) - 1)])


def stage(number: int, marked: str | None = None) -> str:
    """Return the file after a station, 0 to 10, without marks.

    Raises:
        ValueError: the marks do not fit together.
    """
    lines = (SOURCE.read_text() if marked is None else marked).splitlines()
    return _spaced(_lines(iter(enumerate(lines, 1)), number, None))


def _lines(
    lines: Iterator[tuple[int, str]], number: int, since: int | None, keep: bool = True
) -> Iterator[str]:
    """Yield the lines at a station, up to the end of the block that began at station `since`."""
    taken = since is None or since <= number  # true if the next lines belong to this station
    done = taken and since is not None
    for place, line in lines:
        mark = _MARK.match(line)
        if mark is None:
            old = _OLD.match(line)
            if keep and taken:
                yield (old[1] or "") if old else line
        elif mark[1] == "end":
            if since is None:
                raise ValueError(f"line {place}: an end without a block")
            return
        elif since is None or int(mark[1]) > since:
            yield from _lines(lines, number, int(mark[1]), keep and taken)
        elif int(mark[1]) == since:
            raise ValueError(f"line {place}: {mark[1]} again")
        else:
            since = int(mark[1])
            taken, done = not done and since <= number, done or since <= number
    if since is not None:
        raise ValueError(f"a block of station {since:02} does not end")


def _spaced(lines: Iterator[str]) -> str:
    """Put two blank lines before text that begins in the first column, and one before a method. Remove other repeated blank lines."""
    found: list[str] = []
    blank = 0
    for line in lines:
        if not line:
            blank += 1
            continue
        before = found[-1] if found else ""
        indent = len(line) - len(line.lstrip())
        begins = re.match(r"\s*(class |def |@|# ---)", line) is not None
        goes_on = before.lstrip().startswith(("@", "#")) or before.endswith(":")
        if found and begins and not goes_on:
            blank = 2 if indent == 0 else max(blank, 1 if indent == 4 else 0)
        elif indent == 0 and before.startswith(" ") and not line.startswith((")", "]", "}", '"')):
            blank = 2
        found += [""] * min(blank, 2 if indent == 0 else 1)
        found.append(line)
        blank = 0
    return "\n".join(found) + "\n"
