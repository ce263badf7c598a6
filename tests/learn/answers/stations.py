"""Wrong answers to the stations, read from `stations.txt`.

A wrong answer is an edit of the reference as it is at the station. The difference is the mistake:

    03.trains summed-not-averaged: the sum over the ranks        the check that must fail, what must be named, a name
        -         param.grad /= dist.get_world_size()            lines of the file, as they are
        +         pass                                           lines in their place
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hwfsdp.learn.stations.stages import stage

Edit = tuple[str, str]


class Wrong(NamedTuple):
    """A mistake: what is edited in the file of a station, and the verdict that it deserves."""

    check: str
    misconception: str
    name: str
    edits: list[Edit]

    @property
    def station(self) -> int:
        return int(self.check[:2])

    @property
    def text(self) -> str:
        text = stage(self.station)
        for old, new in self.edits:
            assert text.count(old) == 1, f"{self.check} {self.name}: {text.count(old)} times\n{old}"
            text = text.replace(old, new)
        return text


def read_wrong(text: str) -> Iterator[Wrong]:
    """The mistakes of a text."""
    for block in re.split(r"\n(?=\d\d\.)", text.strip()):
        head, *lines = block.splitlines()
        found = re.fullmatch(r"(\d\d\.\w+) ([\w-]+): (.+)", head)
        assert found, head
        edits, last = list[Edit](), "+"
        for line in filter(None, lines):
            sign, content = line[4], line[6:]
            if sign == "-" and last == "+":
                edits.append(("", ""))
            old, new = edits[-1]
            edits[-1] = (old + content + "\n", new) if sign == "-" else (old, new + content + "\n")
            last = sign
        yield Wrong(found[1], found[2], found[3], edits)


WRONG = list(read_wrong(Path(__file__).with_suffix(".txt").read_text()))
