"""Definitions for learners who fill a hole: names of the package that may help, each with its signature and the first line of its docstring.

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
from collections.abc import Iterator, Sequence
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
    last = name.name.rpartition(".")[2]
    for node in _scope(name).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == last:
            return _NOTE.sub("", (ast.get_docstring(node) or "").partition("\n")[0])
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


@functools.lru_cache(maxsize=1024)
def described(name: Definition) -> str:
    """Return the kind of a definition in one word, then its signature or type.

    Raises:
        UsageError: the name is not in its module.
    """
    owner, last = name.owner, name.name.rpartition(".")[2]
    body = _scope(name).body
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name == last:
            return _function(node, name.name, is_method=bool(owner))
        if isinstance(node, ast.ClassDef) and node.name == last:
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
    for name, of in variables(body):
        yield name, of and f": {of}"
    for statement in body:
        if isinstance(statement, ast.Assign):
            for each, value in _pairs(statement.targets[0], statement.value):
                text = ast.unparse(value)
                yield ast.unparse(each), f" = {text}" if len(text) < _SHORT else ""


def variables(body: Sequence[ast.stmt]) -> Iterator[tuple[str, str]]:
    """Yield the names that statements assign, with their types; "" if the source states no type."""
    for statement in body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id, ast.unparse(statement.annotation)
        elif isinstance(statement, ast.Assign):
            for target in statement.targets:
                yield from ((node.id, "") for node in ast.walk(target) if isinstance(node, ast.Name))


def _attributes(body: Sequence[ast.stmt]) -> Iterator[tuple[str, str]]:
    """Yield the attributes of a class: declared in it, or assigned in its methods. The first stated type counts."""
    found = dict(variables(body))
    methods = [statement for statement in body if isinstance(statement, ast.FunctionDef)]
    returned = {f"self.{method.name}": method.returns for method in methods}
    made = {name: ast.unparse(returns) for name, returns in returned.items() if returns}
    for method in methods:
        arguments = [*method.args.args, *method.args.kwonlyargs]
        types = {each.arg: ast.unparse(each.annotation) for each in arguments if each.annotation}
        for name, of in _assigned(method, made | types):
            found[name] = found.get(name) or of
    yield from ((name, of and f": {of}") for name, of in found.items())


def _assigned(method: ast.FunctionDef, types: dict[str, str]) -> Iterator[tuple[str, str]]:
    for node in ast.walk(method):
        if isinstance(node, ast.AnnAssign):
            yield from ((name, ast.unparse(node.annotation)) for name in _of_self(node.target))
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                for each, value in _pairs(target, node.value):
                    yield from ((name, _type_of(value, types)) for name in _of_self(each))


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    """Pair targets with values. `a, b = c, d` gives (a, c) and (b, d). `a, b = c` gives a and b, each with an unknown value."""
    if not isinstance(target, ast.Tuple):
        return [(target, value)]
    if isinstance(value, ast.Tuple):
        return list(zip(target.elts, value.elts, strict=True))
    return [(each, ast.Constant(...)) for each in target.elts]


def _of_self(target: ast.expr) -> list[str]:
    is_own = isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"
    return [target.attr] if is_own and isinstance(target, ast.Attribute) else []


def _type_of(value: ast.expr, types: dict[str, str]) -> str:
    """Return the type of a parameter, a literal, a new object, or the result of a method in `types`; "" for all other values."""
    if isinstance(value, ast.Name):
        return types.get(value.id, "")
    if isinstance(value, ast.Constant):
        return "" if value.value in (None, ...) else type(value.value).__name__
    if isinstance(value, ast.Call):
        name = ast.unparse(value.func)
        return name if name.isidentifier() and name[0].isupper() else types.get(name, "")
    return ""
