"""Mutants: functions with one small mistake each, to test tests: those of the exercises, and those of the package (`mutation_testing`).

A test that passes a wrong function teaches something wrong, and nobody notices. So this module makes wrong functions: each one has one
change that people make by accident (`<` for `<=`, a forgotten statement, two swapped arguments). If the tests pass a mutant, they are too
weak, or the mutant does the same as the original. No program can decide which of the two is true. This module
leaves out changes that would mostly do the same (it does not swap the arguments of `min`), and mutants that always raise TypeError
(`-` between strings).

A change replaces one expression or statement by another. The text of the changed part is written anew; all text around it stays the
same, byte for byte. These parts never change: docstrings, signatures, decorators, annotations and imports; the text of an error (a
whole `raise` may be dropped); `assert`, because its condition is always true; and f-strings, because their parts have no reliable
positions before Python 3.12.

A mutant may run forever (a loop without its step), so run mutants under a time limit.
"""

from __future__ import annotations

import ast
import copy
import re
import tomllib
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

SHORT = 60  # characters; a longer fragment is shortened

KNOWN: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
ARITHMETIC, COMPARISONS = (
    {getattr(ast, before): getattr(ast, after) for before, after in KNOWN[name].items()}
    for name in ("arithmetic", "comparisons")
)
COMPARISONS |= {after: before for before, after in COMPARISONS.items()}
NOT_SWAPPED, CONVERSIONS, METHODS, UNTOUCHED = (
    frozenset(KNOWN[name].split()) for name in ("not_swapped", "conversions", "methods", "untouched")
)

Function = ast.FunctionDef | ast.AsyncFunctionDef
Placed = ast.expr | ast.stmt | ast.keyword
DROPPED = (
    (ast.Assign | ast.AugAssign | ast.Delete)
    | (ast.For | ast.AsyncFor | ast.While)
    | (ast.Raise | ast.Break | ast.Continue)
)


class Mutant(NamedTuple):
    """A function with one change. As a string, it describes the change.

    Attributes:
        operator: the kind of change, for example "swap comparison".
        line: the line of the change; 1 is the first line of the given text.
        before, after: the old and the new text of the changed part, with the code around it if that is short.
        text: the whole changed function.
    """

    operator: str
    line: int
    before: str
    after: str
    text: str

    def __str__(self) -> str:
        return f"line {self.line}, {self.operator}: {_quoted(self.before)} → {_quoted(self.after)}"


def _quoted(fragment: str) -> str:
    """Put a fragment on one line. Leave out its middle if it is long."""
    line = " ".join(fragment.split())
    if len(line) > SHORT:
        line = f"{line[: SHORT * 2 // 3]} … {line[-SHORT // 3 :]}"
    return f"`{line}`"


def mutants(text: str) -> Iterator[Mutant]:
    """Yield all mutants of a function, from its first line to its last. All of them compile, and no two are the same program.

    Args:
        text: the function's own text, as `extract` returns it: indented if it is a method.

    Raises:
        SyntaxError: the text is not Python.
    """
    code = _Code(text)
    seen = {ast.dump(code.tree)}
    # Calls whose result is not used.
    nobodys = {node.value for node in code.nodes if isinstance(node, ast.Expr)}
    changes = [
        change
        for node in code.nodes
        for change in _changes(node)
        if not (change.operator == "unwrap call" and node in nobodys)
    ]
    for change in sorted(changes, key=lambda change: code.span(change.node)[0]):  # the outer one comes first
        try:
            mutant = code.changed(change)
            program = ast.dump(_compiled(code.opening + mutant.text))
        except SyntaxError:
            continue
        if program not in seen:
            seen.add(program)
            yield mutant


def _compiled(text: str) -> ast.Module:
    """Parse a text, and compile it so that every SyntaxError shows. Python's warnings about style are hidden."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(text)
        compile(tree, "<mutant>", "exec", dont_inherit=True)
    return tree


class _Change(NamedTuple):
    """`new` in place of `node`."""

    operator: str
    node: Placed
    new: ast.AST


class _Code:
    """A function's text, parsed. All positions are offsets into its UTF-8 bytes, as in `ast`.

    Attributes:
        opening: a line put above a method, so that its indentation is right.
        nodes: the nodes that may change, outer ones first.
    """

    def __init__(self, text: str) -> None:
        self.opening = "if True:\n" if re.match(r"\s*^[ \t]+\S", text, re.MULTILINE) else ""
        self.bytes = (self.opening + text).encode()
        self.tree = _compiled(self.opening + text)
        self.lines = list(accumulate(map(len, self.bytes.splitlines(keepends=True)), initial=0))
        self.nodes = list(_touchable(self.tree))
        spans = {self.span(node) for node in self.nodes if isinstance(node, Placed)}
        self._spans = sorted(spans, key=lambda span: (span[1] - span[0], span))

    def span(self, node: Placed) -> tuple[int, int]:
        """Return the offsets of a node's first byte and of the byte after its last. Parentheses around the node do not count."""
        assert node.end_lineno is not None and node.end_col_offset is not None, "ast.parse gives them"
        start = self.lines[node.lineno - 1] + node.col_offset
        return start, self.lines[node.end_lineno - 1] + node.end_col_offset

    def text(self, start: int, stop: int | None = None) -> str:
        return self.bytes[start:stop].decode()

    def changed(self, change: _Change) -> Mutant:
        """Make the mutant. Its description shows the smallest expression or statement around the change, if that is short."""
        start, stop = self.span(change.node)
        left, right = self.text(0, start), self.text(stop)
        new = ast.unparse(change.new).replace("\n", "\n" + " " * change.node.col_offset)
        if isinstance(change.new, ast.expr) and not isinstance(change.new, ast.Slice):
            new = _parenthesized(left, new, right)
        first, last = next(
            (each for each in self._spans if each[0] <= start and stop <= each[1] and each != (start, stop)),
            (start, stop),
        )
        if last - first > SHORT or len(self.bytes[first:last].splitlines()) > 1:
            first, last = start, stop
        text = (left + new + right)[len(self.opening) :]
        line = bisect_right(self.lines, start) - self.opening.count("\n")
        after = self.text(first, start) + new + self.text(stop, last)
        return Mutant(change.operator, line, self.text(first, last), after, text)


def _parenthesized(left: str, new: str, right: str) -> str:
    """Return an expression that fits between its neighbors: in parentheses if they would split it, with a space next to a word."""
    spaced = f" {new}" if re.match(r"\w", left[-1:]) else new
    spaced += " " if re.match(r"\w", right[:1]) else ""
    try:
        same = ast.dump(ast.parse(left + spaced + right)) == ast.dump(ast.parse(f"{left}({new}){right}"))
    except SyntaxError:
        same = False
    return spaced if same else f"({new})"


def _touchable(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for name, value in ast.iter_fields(node):
        if name not in KNOWN["fields"].get(type(node).__name__, ()):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and type(child).__name__ not in UNTOUCHED:
                    yield from _touchable(child)


# --- Kinds of changes ----------------------------------------------------------------------------------------

Node = TypeVar("Node", bound=ast.AST)


def _with(node: Node, **fields: Any) -> Node:
    """Return a copy of a node with other fields."""
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def _changes(node: ast.AST) -> Iterator[_Change]:
    """Yield all changes to a node itself, not to its children."""
    for kinds, changes in KINDS:
        if isinstance(node, kinds):
            yield from changes(node)


def _swap_arithmetic(node: ast.BinOp | ast.AugAssign) -> Iterator[_Change]:
    operand = node if isinstance(node, ast.BinOp) else node.value
    new = ARITHMETIC.get(type(node.op))
    if new and not _is_sequence(operand):
        yield _Change("swap arithmetic", node, _with(node, op=new()))


def _is_sequence(node: ast.expr) -> bool:
    """True if a node is visibly a sequence. For a sequence, any other operator is a TypeError."""
    if isinstance(node, ast.BinOp):
        return _is_sequence(node.left) or (
            isinstance(node.op, ast.Add | ast.Mult) and _is_sequence(node.right)
        )
    literal = isinstance(node, ast.JoinedStr | ast.List | ast.ListComp | ast.Tuple)
    return literal or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def _swap_comparison(node: ast.Compare) -> Iterator[_Change]:
    for place, sign in enumerate(node.ops):
        ops = [*node.ops[:place], COMPARISONS[type(sign)](), *node.ops[place + 1 :]]
        yield _Change("swap comparison", node, _with(node, ops=ops))


def _swap_logic(node: ast.BoolOp) -> Iterator[_Change]:
    other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    for place in range(1, len(node.values)):
        parts = [node.values[:place], node.values[place:]]
        sides = [part[0] if len(part) == 1 else _with(node, values=part) for part in parts]
        yield _Change("swap and/or", node, ast.BoolOp(other, sides))


def _negate_condition(
    node: ast.If | ast.While | ast.IfExp | ast.comprehension | ast.match_case,
) -> Iterator[_Change]:
    """Negate a condition, unless another kind of change does: `==` becomes `!=`, `not x` becomes `x`, True becomes False."""
    if isinstance(node, ast.comprehension):
        tests = node.ifs
    elif isinstance(node, ast.match_case):
        tests = [node.guard] if node.guard else []
    else:
        tests = [node.test]
    exact = ast.Eq | ast.NotEq | ast.Is | ast.IsNot | ast.In | ast.NotIn
    for test in tests:
        negated = isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], exact)
        negated |= isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
        if not negated and not isinstance(test, ast.Constant):
            yield _Change("negate condition", test, ast.UnaryOp(ast.Not(), test))


def _drop_statement(node: ast.stmt) -> Iterator[_Change]:
    if isinstance(node, ast.Return) and node.value and not _is_constant(node.value, None):
        yield _Change("drop return value", node, ast.Return(ast.Constant(None)))
        return
    says_something = isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant)
    if (
        isinstance(node, DROPPED | ast.Return)
        or says_something
        or (isinstance(node, ast.AnnAssign) and node.value)
    ):
        yield _Change("drop statement", node, ast.Pass())


def _is_constant(node: ast.expr | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def _drop_with(node: ast.With | ast.AsyncWith) -> Iterator[_Change]:
    """Drop the body of a `with`. Drop its context managers, too, if the body has no names for them."""
    yield _Change("drop statement", node, _with(node, body=[ast.Pass()]))
    if not any(item.optional_vars for item in node.items):
        yield _Change("drop context", node, ast.If(ast.Constant(True), node.body, []))


def _change_constant(node: ast.Constant) -> Iterator[_Change]:
    value = node.value
    if isinstance(value, bool):
        yield _Change("change constant", node, ast.Constant(not value))
    elif isinstance(value, int | float):
        yield _Change("change constant", node, ast.Constant(type(value)(0 if value == 1 else value + 1)))


def _off_by_one(node: ast.Call | ast.Slice) -> Iterator[_Change]:
    """Change the bounds of ranges and slices by one, except bounds that end in a number: "change constant" changes these."""
    bounds: list[tuple[ast.expr | None, ast.operator]] = []
    if isinstance(node, ast.Slice):
        bounds = [(node.lower, ast.Add()), (node.upper, ast.Add())]
    elif _name(node.func) == "range" and node.args:
        *start, stop = node.args[:2]
        bounds = [(stop, ast.Add()), (stop, ast.Sub()), *((bound, ast.Add()) for bound in start)]
    for bound, sign in bounds:
        last = bound.right if isinstance(bound, ast.BinOp) else bound
        last = last.operand if isinstance(last, ast.UnaryOp) else last
        if bound and not isinstance(last, ast.Constant | ast.Starred):
            yield _Change("off by one", bound, ast.BinOp(bound, sign, ast.Constant(1)))


def _drop_bound(node: ast.Slice) -> Iterator[_Change]:
    for field in ("lower", "upper", "step"):
        bound = getattr(node, field)
        if bound and not (field == "lower" and _is_constant(bound, 0)):
            yield _Change("drop bound", node, _with(node, **{field: None}))


def _name(function: ast.expr) -> str:
    """Return the last part of a dotted name."""
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


def _swap_function(node: ast.Call) -> Iterator[_Change]:
    if new := KNOWN["functions"].get(_name(node.func)):
        field = "id" if isinstance(node.func, ast.Name) else "attr"
        yield _Change("swap function", node, _with(node, func=_with(node.func, **{field: new})))


def _swap_arguments(node: ast.Call) -> Iterator[_Change]:
    if _name(node.func) not in NOT_SWAPPED:
        for place, pair in enumerate(zip(node.args, node.args[1:], strict=False)):
            if not any(isinstance(argument, ast.Starred) for argument in pair):
                args = [*node.args[:place], pair[1], pair[0], *node.args[place + 2 :]]
                yield _Change("swap arguments", node, _with(node, args=args))


def _drop_keyword(node: ast.Call) -> Iterator[_Change]:
    for keyword in node.keywords:
        rest = [each for each in node.keywords if each is not keyword]
        yield _Change("drop keyword", node, _with(node, keywords=rest))


def _unwrap_call(node: ast.Call) -> Iterator[_Change]:
    """Replace `x.clone()` and `sorted(x)` by `x`, if their result is used."""
    if isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
        yield _Change("unwrap call", node, node.func.value)
    elif _name(node.func) in CONVERSIONS and node.args and not isinstance(node.args[0], ast.Starred):
        yield _Change("unwrap call", node, node.args[0])


def _drop_unary(node: ast.UnaryOp) -> Iterator[_Change]:
    if not isinstance(node.op, ast.UAdd):
        yield _Change("drop unary", node, node.operand)


Kinds = Callable[[Any], Iterator[_Change]]
KINDS: tuple[tuple[Any, Kinds], ...] = (  # types of nodes, and the function that lists their changes
    (ast.BinOp | ast.AugAssign, _swap_arithmetic),
    (ast.Compare, _swap_comparison),
    (ast.BoolOp, _swap_logic),
    (ast.Call, _swap_function),
    (ast.Call, _swap_arguments),
    (ast.If | ast.While | ast.IfExp | ast.comprehension | ast.match_case, _negate_condition),
    (ast.stmt, _drop_statement),
    (ast.With | ast.AsyncWith, _drop_with),
    (ast.Call, _drop_keyword),
    (ast.Slice, _drop_bound),
    (ast.UnaryOp, _drop_unary),
    (ast.Call | ast.Slice, _off_by_one),
    (ast.Constant, _change_constant),
    (ast.Call, _unwrap_call),
)


# --- Functions of a module, cut out and put back ----------------------------------------------------------------


def functions(source: str) -> dict[str, slice]:
    """Return the lines of all functions of a module and all methods of its classes, by name: decorators to last line.

    A function on one line is left out, and a name with two definitions, such as a property and its setter.

    Raises:
        SyntaxError: the source is not Python.
    """
    lines, found, twice = source.splitlines(), dict[str, slice](), set[str]()
    for name, node in _definitions(ast.parse(source).body, ""):
        if name in found:
            twice.add(name)
        first = node.body[0]
        if not lines[first.lineno - 1].encode()[: first.col_offset].strip():
            start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
            found[name] = slice(start, node.end_lineno)
    return {name: place for name, place in found.items() if name not in twice}


def _definitions(body: Sequence[ast.AST], prefix: str) -> Iterator[tuple[str, Function]]:
    for node in body:
        if isinstance(node, Function):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _definitions(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            for field in ("body", "orelse", "handlers", "finalbody"):
                yield from _definitions(getattr(node, field, []), prefix)


def extract(source: str, name: str) -> str:
    """Return the function's own text unchanged, indentation included."""
    return "".join(source.splitlines(keepends=True)[functions(source)[name]])


def splice(source: str, name: str, text: str) -> str:
    """Return the module with `text` in place of the function."""
    lines = source.splitlines(keepends=True)
    lines[functions(source)[name]] = [text]
    return "".join(lines)
