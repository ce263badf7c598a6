"""The file that a student opens: the holes of one exercise, and the imports that they need.

A starter and its solution are the same file except for the bodies. Both are made from the package:

    imports      the imports of names that the functions use; the file imports names of the functions' own module from it
    functions    signature, decorators, docstring; then a hole, or the package's body
    methods      inside a class of the same name, with the package's docstring; one per class of the package
    comment      names of the package that may help and that are not in the file (`provided`)

So a starter shows only the holes of a module. An import at its top is a hint at most.
"""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from hwfsdp.course import holes, provided
from hwfsdp.course.provided import Definition


class Import(NamedTuple):
    """One imported name, as it stands in a module.

    Attributes:
        module: the name after `from`; "" for a plain import. name: the imported name. alias: its name in this module.
    """

    module: str
    name: str
    alias: str

    @property
    def renamed(self) -> str:
        """The name, followed by `as` and the alias if that is different."""
        is_own = self.alias in (self.name, self.name.split(".")[0])
        return self.name if is_own else f"{self.name} as {self.alias}"


def render(
    chosen: Sequence[Definition],
    label: str,
    title: str,
    *,
    solved: bool,
    calls: Sequence[Definition] = (),
) -> str:
    """Return the text of a starter, or of its solution.

    Args:
        chosen: the holes in the order in which learners fill them; holes of one class follow each other.
        label: the label of the exercise, for example "04". title: the first line of the file.
        calls: names of the package that may help; names of one module follow each other.

    Raises:
        UsageError: a hole, or one of `calls`, is not in its module.
    """
    lines = [f'"""{title}"""', "", "from __future__ import annotations", "", *_import_lines(chosen)]
    if calls:
        lines += ["", *provided.block(calls)]
    for (_, owner), group in groupby(chosen, key=lambda hole: (hole.module, hole.owner)):
        lines += ["", ""]
        if owner:
            lines += [f"class {owner}:", *_class_docstring(chosen, owner)]
        texts = [_text(hole, label, solved).strip("\n").splitlines() for hole in group]
        for number, text in enumerate(texts):
            lines += [*([] if number == 0 else [""] if owner else ["", ""]), *text]
    return "\n".join(lines) + "\n"


def _class_docstring(chosen: Sequence[Definition], owner: str) -> list[str]:
    """Return the docstring of a class as in its module, because it lists the attributes."""
    source = next(hole.source for hole in chosen if hole.owner == owner)
    for node in ast.walk(holes.parsed(source)):
        if isinstance(node, ast.ClassDef) and node.name == owner and ast.get_docstring(node):
            first = node.body[0]
            return [*source.splitlines()[first.lineno - 1 : first.end_lineno], ""]
    return []


def _text(hole: Definition, label: str, solved: bool) -> str:
    source = hole.source if solved else holes.blank(hole.source, hole.name, label)
    return holes.extract(source, hole.name)


def _import_lines(chosen: Sequence[Definition]) -> list[str]:
    """Return the lines of imports: Python's first, then other packages', then this package's; sorted, one line per module."""
    needed = sorted({found for hole in chosen for found in _imports(hole, chosen)})
    lines = [f"import {found.renamed}" for found in needed if not found.module]
    for module, group in groupby((found for found in needed if found.module), key=lambda found: found.module):
        names = [found.renamed for found in group]
        line = f"from {module} import {', '.join(names)}"
        wrapped = "".join(f"    {name},\n" for name in names)
        lines.append(line if len(line) <= provided.WIDTH else f"from {module} import (\n{wrapped})")
    blocks = [list(block) for _, block in groupby(sorted(lines, key=_origin), key=_origin)]
    return [line for block in blocks for line in ["", *block]][1:]


def _origin(line: str) -> int:
    """Return the owner of an imported module: 0 for Python, 1 for other packages, 2 for this package."""
    package = line.split()[1].split(".")[0]
    return 2 if package == "hwfsdp" else int(package not in sys.stdlib_module_names)


def _imports(hole: Definition, chosen: Sequence[Definition]) -> Iterator[Import]:
    """Yield the imports that a hole's function needs, body included."""
    tree = holes.parsed(hole.source)
    imported = {found.alias: found for found in _imported(tree)}
    defined = {name for statement in tree.body for name in _defined(statement)}
    here = {other.owner.partition(".")[0] or other.name for other in chosen}
    for name in _used(hole) - here:
        if name in imported:
            yield imported[name]
        elif name in defined:
            yield Import(hole.module, name, name)


def _used(hole: Definition) -> set[str]:
    """Return the names that the function's text uses, without built-in names."""
    text = holes.extract(hole.source, hole.name)
    indented = "if True:\n" + text if text[:1].isspace() else text
    loaded = {node.id for node in ast.walk(ast.parse(indented)) if isinstance(node, ast.Name)}
    return loaded - set(vars(builtins))


def _imported(tree: ast.AST) -> Iterator[Import]:
    """Yield the imports of a module, including those under a condition, but not those inside functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If | ast.Try):
            yield from _imported(node)
        if isinstance(node, ast.ImportFrom) and node.module != "__future__":
            for name in node.names:
                yield Import(node.module or "", name.name, name.asname or name.name)
        elif isinstance(node, ast.Import):
            for name in node.names:
                yield Import("", name.name, name.asname or name.name.split(".")[0])


def _defined(statement: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement of a module defines."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
    yield from (name for name, _ in provided.variables([statement]))
