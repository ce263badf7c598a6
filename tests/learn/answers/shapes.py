"""What answers to an exercise are written as: functions that take the place of the package's own."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import NamedTuple

from hwfsdp.learn import holes


class Wrong(NamedTuple):
    """A plausible wrong answer, the check that has to fail, and the misconception that has to be named.

    `functions`: by the hole's name, the text of the function instead. `also`: text added at the end of the file.
    """

    name: str
    functions: Mapping[str, str]
    check: str
    misconception: str
    also: str = ""


class Right(NamedTuple):
    """A right answer, written differently from the package's."""

    name: str
    functions: Mapping[str, str]
    also: str = ""


def answer(text: str, functions: Mapping[str, str], also: str = "") -> str:
    """A solution's text with other functions in it."""
    for name, function in functions.items():
        text = holes.splice(text, name, indented(name, function))
    return text + textwrap.dedent(also)


def indented(name: str, function: str) -> str:
    """A function's text as it has to stand in a file, by its dotted name."""
    return textwrap.indent(textwrap.dedent(function).strip("\n") + "\n", "    " * name.count("."))
