"""Definitions for learners who fill a hole: names of the package that may help.

Each name has its signature and the first line of its docstring:

    # Names of the package that may help:
    #
    # hwfsdp.streams
    #     property   FSDPParam.local -> Tensor
    #     method     Stream.record() -> StreamEvent
    #                    Return an event after all work that was issued here so far.
    #     attribute  StreamSet.copy: Stream

A manifest lists the names as `module:name`. Everything else comes from the package, so it cannot be out of date. A type is shown only if
the source states it. So an attribute that a function of another module makes has no type here.
"""

from __future__ import annotations

import ast
import functools
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from hwfsdp.course import holes
from hwfsdp.course.refusals import suggestion, unusable

WIDTH = 110  # of a line
TITLE = "# Names of the package that may help:"
_TIED = "\0"  # stands for a space at which no line may break
_SHORT = 60  # characters of a value; a longer value is not shown
_NOTE = re.compile(r" \(Note \[.*?\]\)")  # of the module, which a learner does not see


class Definition(NamedTuple):
    """Something that a module of the package defines.

    Attributes:
        module: for example "hwfsdp.streams". source: the module's text. name: the name of a function or class, or of a
            method, property or attribute of a class, as in "FSDPParam.local".
    """

    module: str
    source: str
    name: str

    @property
    def owner(self) -> str:
        """The class of a method or attribute; "" for a definition at the top of the module."""
        return self.name.rpartition(".")[0]


def block(names: Sequence[Definition]) -> list[str]:
    """Return comment lines with all names, below their modules; an empty list if there are no names.

    Raises:
        UsageError: a name is not in its module.
    """
    lines = []
    for module, group in groupby(names, key=lambda name: name.module):
        lines.append(f"# {module}")
        for name in group:
            lines += [*_wrapped(described(name)), *_explained(summary(name))]
    return [TITLE, "#", *lines] if lines else []


def _wrapped(text: str) -> list[str]:
    """Wrap a text to lines of `WIDTH`. Lines break between parameters and before an arrow."""
    kind, _, rest = text.partition(" ")
    tied = rest.replace(" ", _TIED).replace(f",{_TIED}", ", ").replace(f"{_TIED}->{_TIED}", f" ->{_TIED}")
    wrapper = textwrap.TextWrapper(WIDTH, break_long_words=False, break_on_hyphens=False)
    wrapper.initial_indent, wrapper.subsequent_indent = f"#     {kind:<9}  ", "#" + " " * 20
    return [line.replace(_TIED, " ") for line in wrapper.wrap(tied)]


def _explained(text: str) -> list[str]:
    indent = "#" + " " * 18
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def summary(name: Definition) -> str:
    """Return the first line of a definition's docstring, or what its class says about the attribute; "" if there is neither."""
    if node := _defined(name):
        return _NOTE.sub("", (ast.get_docstring(node) or "").partition("\n")[0])
    last = name.name.rpartition(".")[2]
    told = " ".join((ast.get_docstring(_scope(name)) or "").partition("Attributes:")[2].split())
    found = re.search(rf"(?:^|[.] ){last}: (.*?[.])(?: |$)", told) if name.owner else None
    return _NOTE.sub("", found[1]) if found else ""


def _scope(name: Definition) -> ast.Module | ast.ClassDef:
    """Return the module or the class that a definition is in; an empty module if there is no such class."""
    scope: ast.Module | ast.ClassDef = holes.parsed(name.source)
    for part in name.owner.split(".") if name.owner else ():
        classes = (node for node in scope.body if isinstance(node, ast.ClassDef) and node.name == part)
        scope = next(classes, ast.Module([], []))
    return scope


def _defined(name: Definition) -> ast.FunctionDef | ast.ClassDef | None:
    """Return the function or class of this name; None if it is a variable, or not there."""
    last = name.name.rpartition(".")[2]
    found = (node for node in _scope(name).body if isinstance(node, ast.FunctionDef | ast.ClassDef))
    return next((node for node in found if node.name == last), None)


@functools.lru_cache(maxsize=1024)
def described(name: Definition) -> str:
    """Return the kind of a definition in one word, then its signature or type.

    Raises:
        UsageError: the name is not in its module.
    """
    owner, last = name.owner, name.name.rpartition(".")[2]
    node, body = _defined(name), _scope(name).body
    if isinstance(node, ast.FunctionDef):
        return _function(node, name.name, is_method=bool(owner))
    if isinstance(node, ast.ClassDef):
        return _class(node, name.name)
    types = dict(_attributes(body)) if owner else dict(_values(body))
    if last in types:
        return f"{'attribute' if owner else 'constant'} {name.name}{types[last]}"
    known = [n.name for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef)] + list(types)
    raise unusable("manifest.call", module=name.module, name=name.name, remedy=suggestion(last, known))


def _function(node: ast.FunctionDef, name: str, *, is_method: bool) -> str:
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    decorators = {ast.unparse(each).rpartition(".")[2] for each in node.decorator_list}
    if decorators & {"property", "cached_property"}:
        return f"property {name}{returns}"
    is_bound = is_method and "staticmethod" not in decorators
    arguments = ", ".join(_parameters(node.args))
    own = arguments.partition(", ")[2] if is_bound else arguments
    return f"{'method' if is_method else 'function'} {name}({own}){returns}"


def _parameters(arguments: ast.arguments) -> Iterator[str]:
    for each in holes.parameters(arguments):
        if each.node in arguments.kwonlyargs[:1] and not arguments.vararg:
            yield "*"
        yield each.stars + ast.unparse(each.node) + _default(each.default)


def _default(value: ast.expr | None) -> str:
    return "" if value is None else f" = {'…' if isinstance(value, ast.Call) else ast.unparse(value)}"


def _class(node: ast.ClassDef, name: str) -> str:
    """Return the class with the parameters of its `__init__`, or with the fields of a record."""
    inits = [s for s in node.body if isinstance(s, ast.FunctionDef) and s.name == "__init__"]
    if inits:
        return f"class {name}({', '.join([*_parameters(inits[0].args)][1:])})"
    makers = [ast.unparse(each) for each in (*node.bases, *node.decorator_list)]
    is_record = any("NamedTuple" in each or "dataclass" in each for each in makers)
    fields = [
        f"{ast.unparse(s.target)}: {ast.unparse(s.annotation)}{_default(s.value)}"
        for s in node.body
        if is_record and isinstance(s, ast.AnnAssign) and not ast.unparse(s.annotation).startswith("ClassVar")
    ]
    return f"class {name}({', '.join(fields)})"


def _values(body: Sequence[ast.stmt]) -> Iterator[tuple[str, str]]:
    """Yield the variables of a module, each with its type, or with its value if that is short."""
    for each in _assignments(body):
        value = ast.unparse(each.value) if each.value else ""
        of_value = f" = {value}" if 0 < len(value) < _SHORT else ""
        yield ast.unparse(each.target), f": {each.type}" if each.type else of_value


def variables(body: Sequence[ast.stmt]) -> Iterator[tuple[str, str]]:
    """Yield the names that statements assign, with their types; "" if the source states no type."""
    found = _assignments(body)
    return ((each.target.id, each.type) for each in found if isinstance(each.target, ast.Name))


def _attributes(body: Sequence[ast.stmt]) -> Iterator[tuple[str, str]]:
    """Yield the attributes of a class: declared in it, or assigned in its methods. The first stated type counts."""
    found = dict(variables(body))
    methods = [statement for statement in body if isinstance(statement, ast.FunctionDef)]
    returned = {f"self.{method.name}": method.returns for method in methods}
    made = {name: ast.unparse(returns) for name, returns in returned.items() if returns}
    for method in methods:
        arguments = [*method.args.args, *method.args.kwonlyargs]
        types = {arg.arg: ast.unparse(arg.annotation) for arg in arguments if arg.annotation}
        for each in _assignments(ast.walk(method)):
            if isinstance(each.target, ast.Attribute) and ast.unparse(each.target.value) == "self":
                name = each.target.attr
                found[name] = found.get(name) or each.type or _type_of(each.value, made | types)
    yield from ((name, of and f": {of}") for name, of in found.items())


class _Assignment(NamedTuple):
    """An assignment to one target. The value is None if it is unknown; the type is "" if the source states none."""

    target: ast.expr
    value: ast.expr | None
    type: str


def _assignments(nodes: Iterable[ast.AST]) -> Iterator[_Assignment]:
    """Yield the assignments among these nodes. `a, b = c, d` gives two. `a, b = c` gives two with unknown values."""
    for node in nodes:
        if isinstance(node, ast.AnnAssign):
            yield _Assignment(node.target, node.value, ast.unparse(node.annotation))
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if not isinstance(target, ast.Tuple):
                    yield _Assignment(target, node.value, "")
                elif isinstance(node.value, ast.Tuple):
                    pairs = zip(target.elts, node.value.elts, strict=True)
                    yield from (_Assignment(each, value, "") for each, value in pairs)
                else:
                    yield from (_Assignment(each, None, "") for each in target.elts)


def _type_of(value: ast.expr | None, types: dict[str, str]) -> str:
    """Return the type of a parameter, a literal, a new object, or the result of a method in `types`; "" for all other values."""
    if isinstance(value, ast.Name):
        return types.get(value.id, "")
    if isinstance(value, ast.Constant):
        return "" if value.value in (None, ...) else type(value.value).__name__
    if isinstance(value, ast.Call):
        name = ast.unparse(value.func)
        return name if name.isidentifier() and name[0].isupper() else types.get(name, "")
    return ""
