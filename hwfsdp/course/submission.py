"""Find, read and examine a learner's submission as text. No code of the submission runs here."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

from hwfsdp.course import holes, starters
from hwfsdp.course.manifest import CARRIED, Exercise
from hwfsdp.course.overlay import Submitted
from hwfsdp.course.refusals import read_text, unusable
from hwfsdp.course.stations.stages import LAST, stage
from hwfsdp.course.verdict import Finding

KEPT_STARTER = ".starter.py"  # beside a learner's file, in a student's edition
LARGEST = 1 << 20  # bytes of the largest file that is read
NOT_PYTHON = (SyntaxError, ValueError, RecursionError, MemoryError)  # errors of the parser


@dataclass(frozen=True)
class Source:
    """A learner's file for one exercise: its path, and its text; the text is None if there is no such file."""

    path: Path
    text: str | None


def find_source(exercise: Exercise, folder: Path) -> Source:
    """Find the file of one exercise in the folder itself, or, for an elective, in `NN_topic/` below it.

    Raises:
        UsageError: the file cannot be read as text.
    """
    nested, flat = folder / exercise.target, folder / exercise.file_name
    path = nested if nested.exists() or not flat.exists() else flat
    if not path.exists():
        return Source(path, None)
    return Source(path, read_text(path, "submission.text", LARGEST))


def check_folder(folder: Path, exercises: tuple[Exercise, ...]) -> None:
    """Raise UsageError if a submission's folder holds no file of any exercise."""
    if not folder.is_dir():
        raise unusable("submission.file" if folder.exists() else "submission.missing", path=folder)
    if not any((folder / e.target).exists() or (folder / e.file_name).exists() for e in exercises):
        raise unusable("submission.empty", path=folder, target=exercises[0].target)


def is_started(exercise: Exercise, text: str) -> bool:
    """True if a hole is filled, or if other code in the file may fill one when the file is loaded.

    A file that is not valid Python counts as started. The file of the stations counts as started if it differs from the starter.
    """
    if exercise.is_station:
        return text.splitlines() != starter(exercise).splitlines()
    try:
        found = _defined(exercise, text)
        if any(not _is_blank(node) for node in found.values()):
            return True
        if exercise.is_homework:
            return not found
        return bool(_effects(exercise, text) - _effects(exercise, starter(exercise)))
    except NOT_PYTHON:
        return True


def starter(exercise: Exercise) -> str:
    """Return the text of the starter."""
    kept = exercise.path.parent / KEPT_STARTER
    if kept.exists():  # a student's edition cannot make it: its package has no bodies
        return kept.read_text()
    carried = CARRIED / "exercises" / exercise.target
    if exercise.is_homework and carried.exists():  # an installed package does not have our homework
        return carried.read_text()
    if exercise.is_station:
        return stage(0)
    if exercise.is_homework:
        text = solution(exercise)
        for task in exercise.tasks:
            for name in task.holes:
                text = holes.blank(text, name, task.label)
        return text
    return _cut_out(exercise, solved=False)


def solution(exercise: Exercise) -> str:
    """Return the starter with all holes filled: the package's bodies, the file after the last station, or our homework.

    Raises:
        UsageError: this is a student's edition.
    """
    is_missing = exercise.is_homework and not exercise.solution_path.exists()
    if is_missing or (exercise.path.parent / KEPT_STARTER).exists():
        raise unusable("submission.solution", number=exercise.number)
    if exercise.is_station:
        return stage(LAST)
    if exercise.is_homework:
        return exercise.solution_path.read_text()
    return _cut_out(exercise, solved=True)


def _cut_out(exercise: Exercise, solved: bool) -> str:
    title = f"Exercise {exercise.number}: {exercise.title}"
    return starters.render(exercise.holes, exercise.number, title, solved=solved, calls=exercise.provided)


def inspect(exercise: Exercise, source: Source) -> Submitted:
    """Check a file, and return it in the form that ranks run.

    Raises:
        Finding: the file is not Python, or lacks a function, or has a signature that the package cannot call.
    """
    assert source.text is not None, "a file that is there"
    path = str(source.path)
    try:
        compile(source.text, path, "exec", dont_inherit=True)
        found = _defined(exercise, source.text)
    except NOT_PYTHON as error:
        raise not_python(source, error) from None
    wanted = _defined(exercise, starter(exercise))
    for place in exercise.places:
        node = found.get(place.name)
        if node is None:
            message = f"{source.path.name} does not define {place.name}."
            raise Finding("missing", message, place.name, "nothing")
        expected, actual = _signature(wanted[place.name]), _signature(node)
        if not _can_stand_for(wanted[place.name], node):
            raise Finding("wrong-signature", f"{place.name} has other parameters.", expected, actual)
    return Submitted(exercise.number, path, source.text, exercise.places)


def not_python(source: Source, error: BaseException) -> Finding:
    """Return the finding with the parser's message about a file."""
    line = getattr(error, "lineno", None)
    where = f"line {line}: `{(getattr(error, 'text', '') or '').strip()}`: " if line else ""
    what = getattr(error, "msg", None) or str(error) or "nested too deeply"
    return Finding("not-python", f"{source.path.name}, {where}{what}.")


def _defined(exercise: Exercise, text: str) -> dict[str, ast.FunctionDef]:
    """Return the exercise's functions that a file defines, by name; the last definition of a name counts."""
    names, found = set(exercise.hole_names), holes.definitions(text)
    return {name: node for name, node in found if name in names and isinstance(node, ast.FunctionDef)}


def _effects(exercise: Exercise, text: str) -> set[str]:
    """Return the code, besides functions, that may bind the names of the holes.

    Examples are `chunk_length = m.chunk_length`, decorators, base classes, imports of these names, and all other statements that run.
    Comments, constants and other imports do not count.
    """
    names = {part for place in exercise.places for part in place.name.split(".")} | {"*"}
    waiting: list[ast.stmt] = list(ast.parse(text).body)
    found: list[ast.AST] = []
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            found += [alias for alias in node.names if (alias.asname or alias.name) in names]
        elif isinstance(node, ast.ClassDef):
            found += [*node.decorator_list, *node.bases, *node.keywords]
            waiting += node.body
        elif isinstance(node, ast.FunctionDef):
            found += node.decorator_list
        elif isinstance(node, ast.AsyncFunctionDef):
            found.append(node)
        elif not isinstance(node, ast.Pass) and not isinstance(getattr(node, "value", None), ast.Constant):
            found.append(node)
    return {ast.unparse(node) for node in found}


def _is_blank(node: ast.FunctionDef) -> bool:
    """True if the function holds only a docstring, `pass` and `raise NotImplementedError`."""
    body = [s for s in node.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
    if not all(isinstance(statement, ast.Raise | ast.Pass) for statement in body):
        return False
    raised = [ast.unparse(s.exc) for s in body if isinstance(s, ast.Raise) and s.exc]
    return all(name.startswith("NotImplementedError") for name in raised)


def _signature(node: ast.FunctionDef) -> str:
    return f"{node.name}({', '.join(name for name, _ in parameters(node))})"


def parameters(node: holes.Function) -> list[tuple[str, bool]]:
    """Return the names in order, with `*` and `**`, each with True if a call may leave it out."""
    found = holes.parameters(node.args)
    return [(each.stars + each.node.arg, each.stars != "" or each.default is not None) for each in found]


def _can_stand_for(wanted: ast.FunctionDef, given: ast.FunctionDef) -> bool:
    """True if every call of `wanted` also fits `given`: the same names in order; further parameters must be optional."""
    if any(name[:1] == "*" for name, _ in parameters(given)) and not wanted.args.vararg:
        names = [name for name, _ in parameters(given)]
        return names[-2:] == ["*args", "**kwargs"] or _prefix(wanted, given)
    return _prefix(wanted, given) and _kind(wanted) == _kind(given)


def _prefix(wanted: ast.FunctionDef, given: ast.FunctionDef) -> bool:
    ours, theirs = parameters(wanted), parameters(given)
    head, rest = theirs[: len(ours)], theirs[len(ours) :]
    same = [name for name, _ in ours] == [name for name, _ in head]
    optional = all(may or not could for (_, may), (_, could) in zip(head, ours, strict=False))
    return same and optional and all(may for _, may in rest)


def _kind(node: ast.FunctionDef) -> set[str]:
    """Return the decorators that make a function a property, a static method or a class method."""
    names = {ast.unparse(decorator) for decorator in node.decorator_list}
    return names & {"property", "staticmethod", "classmethod"}
