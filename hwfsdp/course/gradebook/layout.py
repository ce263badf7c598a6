"""Find out which file of a submission answers which exercise. This module looks only at names, and opens no file.

A submission has a root. The root holds `my_fsdp.py`, `NN_topic/topic.py` or `topic.py`, or a folder `exercises/` with these files. It
may be deeper than the top of the submission: a zip of a folder has that folder inside. So the root is the shallowest folder with an
exercise. Deeper files with the same names are ignored, for example in a copy of the package. Upper and lower case do not matter, but an
exact name wins. If there are two files for one exercise, the report says so, and neither is graded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hwfsdp.course.manifest import Exercise

# folders and files that students did not write, in lower case
JUNK = frozenset(
    """__macosx .git __pycache__ .venv venv node_modules .ipynb_checkpoints .idea .vscode .mypy_cache
    .pytest_cache .ds_store thumbs.db""".split()
)
EXTRAS = ("capstone", "lab")  # folders beside the exercises
EXTRA_FLAT = {"hw_fsdp.py": "capstone", "answers.toml": "lab"}  # files that may lie outside of these folders
EXTRA_SUFFIXES = (".py", ".toml", ".json", ".txt", ".md")
EXTRA_FILES = 200  # largest number of files of one extra


class Match(NamedTuple):
    """A file that may answer an exercise.

    Attributes:
        root: the folders above the exercise's own folder. target: the path where graders look for it, below the submission's folder.
        rank: (outside the exercise's own folder, not the exact name). A lower rank is better.
    """

    path: str
    root: tuple[str, ...]
    target: str
    rank: tuple[bool, bool]


@dataclass
class Choice:
    """The chosen files of a submission.

    Attributes:
        taken: target → path. ambiguous: target → the paths that could answer it.
        renamed: target → path, if the case or the folder differs.
        deeper: paths that are deeper than the chosen files, for targets without a chosen file.
    """

    taken: dict[str, str] = field(default_factory=dict)
    ambiguous: dict[str, list[str]] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    deeper: list[str] = field(default_factory=list)


def is_junk(name: str) -> bool:
    """True if a student did not write a file or folder with this name."""
    return name.casefold() in JUNK or name.startswith("._")


def choose(paths: Iterable[str], exercises: Sequence[Exercise]) -> Choice:
    """Choose the files to grade from all paths of a submission (relative, with `/`)."""
    found = [match for path in paths for match in _matches(path.split("/"), exercises)]
    depth = min((len(match.root) for match in found), default=0)
    by_target: dict[str, list[Match]] = {}
    for match in found:
        if len(match.root) == depth:
            by_target.setdefault(match.target, []).append(match)
    choice = Choice()
    for target, matches in sorted(by_target.items()):
        best = [match for match in matches if match.rank == min(m.rank for m in matches)]
        if len(best) > 1:
            choice.ambiguous[target] = sorted(match.path for match in best)
            continue
        choice.taken[target] = best[0].path
        if best[0].rank[1]:
            choice.renamed[target] = best[0].path
    choice.deeper = [match.path for match in found if match.target not in by_target]
    return choice


def is_submission(paths: Iterable[str], exercises: Sequence[Exercise]) -> bool:
    """True if a folder with these paths is a submission itself. False if it is a folder of submissions."""
    return any(not match.root for path in paths for match in _matches(path.split("/"), exercises))


def _matches(parts: Sequence[str], exercises: Sequence[Exercise]) -> list[Match]:
    if any(is_junk(part) for part in parts):
        return []
    one_each = {exercise.target: exercise for exercise in exercises}.values()  # stations share one file
    found = [match for exercise in one_each if (match := _exercise_match(parts, exercise, exercises))]
    return found or [match for name in EXTRAS if (match := _extra_match(parts, name))]


def _exercise_match(parts: Sequence[str], exercise: Exercise, exercises: Sequence[Exercise]) -> Match | None:
    *folders, name = parts
    if name.casefold() != exercise.file_name.casefold():
        return None
    own = exercise.target.split("/")
    nested = len(own) > 1 and bool(folders) and folders[-1].casefold() == exercise.directory.casefold()
    others = {each.directory.casefold(): each for each in exercises}
    inside = others.get(folders[-1].casefold()) if folders else None
    is_near = nested or inside is None or exercise.is_station and inside.is_station
    if not is_near or set(map(str.casefold, folders)) & set(EXTRAS):
        return None  # in the folder of another exercise
    own = own if nested else own[-1:]
    root, exact = _root(folders[:-1] if inside else folders)
    exact = exact and list(parts[-len(own) :]) == own and not (inside and exercise.is_station)
    return Match("/".join(parts), root, exercise.target, (not nested, not exact))


def _extra_match(parts: Sequence[str], name: str) -> Match | None:
    folders = [part.casefold() for part in parts[:-1]]
    if not set(EXTRAS) & set(folders) and EXTRA_FLAT.get(parts[-1].casefold()) == name:
        target = f"{name}/{parts[-1].casefold()}"
        return Match("/".join(parts), tuple(parts[:-1]), target, (True, f"{name}/{parts[-1]}" != target))
    if name not in folders or not parts[-1].casefold().endswith(EXTRA_SUFFIXES):
        return None
    at = folders.index(name)
    root, exact = _root(parts[:at])
    target = "/".join([name, *parts[at + 1 :]])
    return Match("/".join(parts), root, target, (False, not (exact and parts[at] == name)))


def _root(folders: Sequence[str]) -> tuple[tuple[str, ...], bool]:
    """Return the folders without `exercises` at the end, and True if it had the right case or was not there."""
    if folders and folders[-1].casefold() == "exercises":
        return tuple(folders[:-1]), folders[-1] == "exercises"
    return tuple(folders), True
