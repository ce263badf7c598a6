"""Read answers to exercises from texts. An answer edits the reference: the edit is the mistake.

    03.trains summed-not-averaged: the sum over the ranks        the check that must fail, the misconception, a name
              rows = self.grad                                   a line before the change
        -     param.grad /= dist.get_world_size()                lines of the reference
        +     pass                                               lines in their place

Edits of one answer follow each other, or have an empty line between them. Lines that replace nothing go to the end of the file.
A right answer that is written differently names no misconception: `11 right: partial gradients as new tensors`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from hwfsdp.course.stages import END, stage
from mutants import extract

RIGHT = "right"
SOLUTION = Path(__file__).parents[3] / "solutions" / "my_fsdp.py"
SHARED = (
    "padded_rows rows_of ring_all_gather ring_reduce_scatter pass_on replicate traffic tree_map tree_leaves"
)


class Edit(NamedTuple):
    """Lines of the reference, and lines in their place."""

    old: list[str]
    new: list[str]


class Answer(NamedTuple):
    """The edits of the reference, and the verdict that they deserve. `check` of a right answer is the exercise's number."""

    check: str
    misconception: str
    name: str
    edits: list[Edit]

    @property
    def exercise(self) -> str:
        return self.check.partition(".")[0]

    def text(self, reference: str) -> str:
        """Return the reference with all edits. Each edit applies to the original reference."""
        found, added = [], ""
        for old, new in self.edits:
            before, after = "".join(f"\n{line}" for line in old), "".join(f"\n{line}" for line in new)
            if not old:
                added += after
                continue
            assert f"\n{reference}".count(f"{before}\n") == 1, f"{self.check} {self.name}:{before}"
            found.append((f"\n{reference}".index(f"{before}\n"), len(before), after))
        text = f"\n{reference}"
        for place, length, after in sorted(found, reverse=True):
            text = text[:place] + after + text[place + length :]
        return text[1:].removesuffix("\n") + added + "\n"


def of_another_make(path: Path) -> str:
    """Return a file in `right/` as a learner would write it: with the solution's functions in place of their import."""
    solution = stage(SOLUTION.read_text(), END)
    shared = "\n\n".join(extract(solution, name) for name in SHARED.split())
    return re.sub("from my_fsdp import .*\n", "", path.read_text()) + f"\n\n{shared}"


def read(name: str) -> list[Answer]:
    """Read all answers of a text in this folder."""
    text = Path(__file__).with_name(name).read_text().rstrip("\n")
    return [_answer(block.splitlines()) for block in re.split(r"\n\n(?=\S)", text)]


def _answer(lines: Sequence[str]) -> Answer:
    found = re.fullmatch(r"(\w+(?:\.\w+)?) ([\w-]+): (.+)", lines[0])
    assert found, lines[0]
    return Answer(found[1], found[2], found[3], list(_edits(lines[1:])))


def _edits(lines: Sequence[str]) -> Iterator[Edit]:
    edit, last = Edit([], []), ""
    for line in lines:
        sign, content = line[4:5], line[6:]
        if last and (
            sign == "" or last == "" or (last != " " and sign == " ") or (last == "+" and sign == "-")
        ):
            yield edit
            edit = Edit([], [])
        if sign in (" ", "-"):
            edit.old.append(content)
        if sign in (" ", "+"):
            edit.new.append(content)
        last = sign
    yield edit
