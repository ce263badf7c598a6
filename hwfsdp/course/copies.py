"""Functions that a file shares with the reference, with the package, or with another student's file.

The instructor reads these remarks; students never do. Two functions are alike if they compile to the same instructions: layout,
comments, docstrings, annotations and the names of local variables do not count. A short function is alike only if its docstring is,
too: two people write `rows // ranks` alike by chance. What a starter holds, nobody copied. No code runs here.
"""

from __future__ import annotations

import hashlib
import types
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from hwfsdp.course.stages import is_marked, stages

LONG = 30  # instructions of a function that is compared by them; about four statements
TELLING = 40  # characters of a docstring that two people do not write alike
NAMED = 8  # functions that a remark names
ALIKE = 100  # instructions that two students share, before anyone is told
# folders of the package without answers
NO_FSDP = set("course cli plot observe virtual train launcher startup".split())


class Function(NamedTuple):
    """A function of a file: its name, and its number of instructions."""

    name: str
    length: int


def functions(text: str) -> dict[str, Function]:
    """Return the functions of a file that can be compared, by a digest of what they do or say."""
    found: dict[str, Function] = {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in strings
            todo = [compile(text, "", "exec", dont_inherit=True)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    while todo:
        code = todo.pop()
        todo += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        says = code.co_consts[0] if code.co_consts else None
        function = Function(code.co_name, len(code.co_code[::2].replace(b"\0", b"")))
        if code.co_flags & 1 and not code.co_name.startswith("<"):  # its variables are local: a function
            if isinstance(says, str) and len(says) >= TELLING:
                found[_digest(" ".join(says.split()))] = function
            if function.length >= LONG:
                found[_digest(_done_by(code))] = function
    return found


def _done_by(code: types.CodeType) -> str:
    """Describe the instructions of a function, without its docstring and the names of its variables."""
    constants = [
        _done_by(each) if isinstance(each, types.CodeType) else repr(each) for each in code.co_consts[1:]
    ]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def known(exercises: Path) -> dict[str, str]:
    """Return where each function of ours stands, by its digest: the solutions (if they are there), and the package."""
    found: dict[str, str] = {}
    package = Path(__file__).parents[1]
    solutions = sorted(exercises.parent.glob("solutions/**/*.py"))
    modules = sorted(
        path for path in package.rglob("*.py") if path.relative_to(package).parts[0] not in NO_FSDP
    )
    for path in (*solutions, *modules):
        place = path.relative_to(
            package.parent if path.is_relative_to(package) else exercises.parent
        ).as_posix()
        text = path.read_text()
        for text in stages(text) if path in solutions and is_marked(text) else (text,):
            for digest in functions(text):
                found.setdefault(digest, place)
    for path in exercises.rglob("*.py"):
        for digest in functions(path.read_text()):
            found[digest] = ""  # a starter's
    return found


def compare(files: Mapping[str, str], exercises: Path) -> tuple[list[str], dict[str, Function]]:
    """Compare a submission's files with ours.

    Args:
        files: path → text.

    Returns:
        One remark for each file of ours from which functions come, and the functions that are the student's own.
    """
    ours, own, remarks = known(exercises), dict[str, Function](), list[str]()
    for path, text in files.items():
        from_ours: dict[str, set[str]] = {}
        for digest, function in functions(text).items():
            if digest not in ours:
                own[digest] = function
            elif ours[digest]:
                from_ours.setdefault(ours[digest], set()).add(function.name)
        given = (
            " (the file says that hwfsdp catchup wrote a part)"
            if "was written by hwfsdp catchup" in text
            else ""
        )
        remarks += [
            f"{path} has functions of {place}{given}: {_listed(names)}" for place, names in from_ours.items()
        ]
    return remarks, own


def shared(classes: Mapping[str, Mapping[str, Sequence[object]]]) -> dict[str, list[str]]:
    """Return a remark for each student and each other student with whom they share functions.

    Args:
        classes: student → digest → (name of the function, number of instructions).
    """
    owners: dict[str, list[str]] = {}
    for student, own in classes.items():
        for digest in own:
            owners.setdefault(digest, []).append(student)
    pairs: dict[tuple[str, str], list[Function]] = {}
    for digest, students in owners.items():
        for one in students:
            for other in students:
                if one != other:
                    name, length = classes[one][digest]
                    pairs.setdefault((one, other), []).append(Function(str(name), int(str(length))))
    found: dict[str, list[str]] = {}
    for (one, other), alike in sorted(pairs.items()):
        if sum(each.length for each in alike) >= ALIKE:
            names = _listed({each.name for each in alike})
            found.setdefault(one, []).append(f"has functions in common with {other}: {names}")
    return found


def _listed(names: set[str]) -> str:
    """List names; of many, some and how many more there are."""
    first = sorted(names, key=lambda name: (name.startswith("_"), name))
    return ", ".join(first if len(first) <= NAMED else [*first[:NAMED], f"{len(first) - NAMED} more"])
