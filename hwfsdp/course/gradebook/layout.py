"""Which of the files that were handed in answers which exercise. Names only: nothing is opened here.

A submission has a root: the folder in which `my_fsdp.py`, `NN_topic/topic.py` or `topic.py` is, or `exercises/` with these. It may
lie deeper than what was handed in (a zip of a folder has that folder inside), so the root is the shallowest folder that
holds an exercise; what looks like one deeper down, in a copy of the package say, is not looked at. Letters' case does not
matter, but an exact name wins. Two files for one exercise are told, and neither is graded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hwfsdp.course.manifest import Exercise

# folders and files that no one wrote, in lower case
JUNK = frozenset(
    """__macosx .git __pycache__ .venv venv node_modules .ipynb_checkpoints .idea .vscode .mypy_cache
    .pytest_cache .ds_store thumbs.db""".split()
)
EXTRAS = ("capstone", "lab")  # folders beside the exercises
EXTRA_FLAT = {"hw_fsdp.py": "capstone", "answers.toml": "lab"}  # files that may lie outside of these folders
EXTRA_SUFFIXES = (".py", ".toml", ".json", ".txt", ".md")
EXTRA_FILES = 200  # of one extra that are taken


class Match(NamedTuple):
    """A file that may answer an exercise.

    Attributes:
        root: the folders above the exercise's own. target: where graders look for it, below the submission's folder.
        rank: the better the lower: (outside a folder of its own, not the exact name).
    """

    path: str
    root: tuple[str, ...]
    target: str
    rank: tuple[bool, bool]


@dataclass
class Choice:
    """A choice of files.

    Attributes:
        taken: target → path. ambiguous: target → the paths that it could be.
        renamed: target → path, where case differs, or the folder. deeper: files for targets that nothing was taken for, which
            lie deeper than what was taken.
    """

    taken: dict[str, str] = field(default_factory=dict)
    ambiguous: dict[str, list[str]] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    deeper: list[str] = field(default_factory=list)


def is_junk(name: str) -> bool:
    """Whether a file or folder of this name is none that a student wrote."""
    return name.casefold() in JUNK or name.startswith("._")


def choose(paths: Iterable[str], exercises: Sequence[Exercise]) -> Choice:
    """The files to grade, of all paths (with `/`, relative) that were handed in."""
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
    """Whether a folder with these paths is a submission itself, and not one with submissions in it."""
    return any(not match.root for path in paths for match in _matches(path.split("/"), exercises))


def _matches(parts: Sequence[str], exercises: Sequence[Exercise]) -> list[Match]:
    if any(is_junk(part) for part in parts):
        return []
    one_each = {exercise.target: exercise for exercise in exercises}.values()  # stations share theirs
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
    """Without `exercises` at the end, and whether that was written as it should be."""
    if folders and folders[-1].casefold() == "exercises":
        return tuple(folders[:-1]), folders[-1] == "exercises"
    return tuple(folders), True
