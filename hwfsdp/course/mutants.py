"""Mutants: a function with one small mistake in it, to grade whoever grades the function.

A check that passes a wrong solution teaches something wrong, and nobody notices. So wrong solutions are made by machine:
each is the reference with one change of the kind people make by accident (`<` for `<=`, a statement forgotten, two
arguments swapped), and a check that passes one of them is too weak, unless the mutant does the same as the reference.
Which of them do, no machine can say. Changes that mostly would are left out (the arguments of `min` are not swapped), and
so are those that raise TypeError whatever is checked (`-` between strings).

Changes are made to the text, at the positions that `ast` gives, so everything else stays byte for byte. Left alone are
docstrings, signatures, decorators, annotations and imports; what an error says (a `raise` goes as a whole, or stays);
`assert`, which states what is true anyway; and f-strings, whose parts have no reliable positions before Python 3.12.

A mutant may run forever (a loop that has lost its step): run mutants under a time limit.
"""

from __future__ import annotations

import ast
import io
import random
import re
import tokenize
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

from hwfsdp.errors import UsageError

SHORT = 60  # characters of a fragment that can be read at a glance

ARITHMETIC = {"+": "-", "-": "+", "*": "//", "//": "*", "/": "*", "%": "//"}  # of the same precedence
COMPARISONS = {"<": "<=", ">": ">=", "==": "!=", "is": "is not", "in": "not in"}
COMPARISONS |= {after: before for before, after in COMPARISONS.items()}
LOGIC = {"and": "or", "or": "and"}
FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any"}

NOT_SWAPPED = frozenset(  # functions whose arguments may as well be swapped, or cannot be
    "min max minimum maximum gcd lcm add mul equal allclose isclose isinstance issubclass getattr hasattr".split()
)
CONVERSIONS = frozenset(
    "abs bool ceil copy deepcopy dict float floor int list reversed set sorted tuple".split()
)
METHODS = frozenset(  # whose result may stand in for their receiver
    """add_ bfloat16 clone contiguous copy copy_ cpu cuda detach div_ double expand flatten float half long lower mul_
    neg ravel removeprefix removesuffix requires_grad_ reshape resolve squeeze strip sub_ t to transpose unsqueeze upper
    view zero_""".split()
)

UNTOUCHED = frozenset("Assert Import ImportFrom JoinedStr TemplateStr TypeAlias".split())
FIELDS = {  # of which nothing is touched
    "FunctionDef": ("decorator_list", "args", "returns", "type_params"),
    "AsyncFunctionDef": ("decorator_list", "args", "returns", "type_params"),
    "ClassDef": ("decorator_list", "bases", "keywords", "type_params"),
    "Lambda": ("args",),
    "AnnAssign": ("annotation",),
    "Raise": ("exc", "cause"),
}

Placed = ast.expr | ast.stmt | ast.keyword
ATOMS = ast.Name | ast.Attribute | ast.Call | ast.Subscript | ast.Constant | ast.List | ast.GeneratorExp
DROPPED = (
    (ast.Assign | ast.AugAssign | ast.Delete)
    | (ast.For | ast.AsyncFor | ast.While)
    | (ast.Raise | ast.Break | ast.Continue)
)


class Mutant(NamedTuple):
    """A function with one change; as a string, what was changed.

    Attributes:
        operator: the kind of change, for example "swap comparison".
        line: where it is; 1 is the first line of the text given.
        before, after: what was there, what is there now; with its surroundings if they are short.
        text: the whole function, changed.
    """

    operator: str
    line: int
    before: str
    after: str
    text: str

    def __str__(self) -> str:
        return f"line {self.line}, {self.operator}: {_quoted(self.before)} → {_quoted(self.after)}"


def _quoted(fragment: str) -> str:
    """On one line, its middle left out if it is long: changes are made at the ends."""
    line = " ".join(fragment.split())
    if len(line) > SHORT:
        line = f"{line[: SHORT * 2 // 3]} … {line[-SHORT // 3 :]}"
    return f"`{line}`" if line else "nothing"


def mutants(text: str) -> Iterator[Mutant]:
    """All mutants of a function, from its first line to its last; no two are the same program, and all compile.

    Args:
        text: the function's own, as `holes.extract` gives it: indented if it is a method.

    Raises:
        SyntaxError: it is not Python.
    """
    code = _Code(text)
    edits = [edit for node in code.nodes for kind in KINDS for edit in kind(code, node)]
    seen = {ast.dump(code.tree)}
    for edit in sorted(
        edits, key=lambda edit: edit.start
    ):  # where two start together, the outer one comes first
        mutant = code.changed(edit)
        try:
            program = ast.dump(_compiled(code.opening + mutant.text))
        except SyntaxError:
            continue
        if program not in seen:
            seen.add(program)
            yield mutant


def sample(found: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """`count` of the mutants (or all, if there are fewer), in their order, the same ones for the same seed.

    Kinds take turns, so that frequent ones do not crowd out rare ones: no kind has two more than another that could
    have given one more.

    Raises:
        UsageError: the count is negative.
    """
    if count < 0:
        raise UsageError(
            "sample of mutants", expected="count >= 0", got=str(count), remedy="Ask for 0 or more."
        )
    chance = random.Random(seed)
    kinds: dict[str, list[int]] = {}
    for index in chance.sample(range(len(found)), len(found)):
        kinds.setdefault(found[index].operator, []).append(index)
    rounds = zip_longest(*kinds.values())  # kinds in an order of chance, too
    turns = [index for each in rounds for index in each if index is not None]
    return [found[index] for index in sorted(turns[:count])]


def _compiled(text: str) -> ast.Module:
    """The program; raises SyntaxError where Python does. Its warnings about style are not ours to give."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(text)
        compile(tree, "<mutant>", "exec", dont_inherit=True)
    return tree


class _Edit(NamedTuple):
    """`after` in place of the bytes from `start` to `stop`."""

    operator: str
    start: int
    stop: int
    after: str


class _Token(NamedTuple):
    start: int
    stop: int
    string: str


class _Code:
    """A function's text, parsed. All positions are offsets into its UTF-8 bytes, in which `ast` counts columns, too.

    Attributes:
        opening: a line put above a method, so that its indentation is right.
        nodes: those that may be changed, outer ones first.
        tokens: in order, without comments and line ends.
        statements: calls whose result nobody takes.
    """

    def __init__(self, text: str) -> None:
        self.opening = "if True:\n" if re.match(r"\s*^[ \t]+\S", text, re.MULTILINE) else ""
        self.bytes = (self.opening + text).encode()
        self.tree = _compiled(self.opening + text)
        self.lines = [0, *(found.end() for found in re.finditer(rb"\r\n|\r|\n", self.bytes))]
        self.nodes = list(_touchable(self.tree))
        self.tokens = list(self._tokens())
        self.statements = {node.value for node in self.nodes if isinstance(node, ast.Expr)}
        self._spans = sorted(
            {self.span(node) for node in self.nodes if isinstance(node, Placed)}, key=_length
        )

    def _tokens(self) -> Iterator[_Token]:
        skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
        for token in tokenize.generate_tokens(io.StringIO(self.bytes.decode(), newline="").readline):
            if token.type not in skipped and token.string:
                row, column = token.start  # in characters
                start = self.lines[row - 1]
                start += len(self.bytes[start : start + 4 * column].decode(errors="ignore")[:column].encode())
                yield _Token(start, start + len(token.string.encode()), token.string)

    def span(self, node: Placed) -> tuple[int, int]:
        """From its first byte to the one after its last. Parentheses around it are not part of it."""
        assert (
            node.end_lineno is not None and node.end_col_offset is not None
        ), "ast.parse gives all positions"
        decorators: list[ast.expr] = getattr(node, "decorator_list", [])
        start = self.lines[node.lineno - 1] + node.col_offset
        if decorators:
            above = self.between(0, self.span(decorators[0])[0])
            start = [token.start for token in above if token.string == "@"][-1]
        return start, self.lines[node.end_lineno - 1] + node.end_col_offset

    def text(self, start: int, stop: int) -> str:
        return self.bytes[start:stop].decode()

    def between(self, start: int, stop: int) -> list[_Token]:
        """The tokens that begin there."""
        first, last = (
            bisect_left(self.tokens, position, key=lambda token: token.start) for position in (start, stop)
        )
        return self.tokens[first:last]

    def operator(self, left: Placed, right: Placed) -> tuple[int, int]:
        """Span of what stands between two operands, their parentheses aside."""
        gap = self.between(self.span(left)[1], self.span(right)[0])
        signs = [token for token in gap if token.string not in ("(", ")")]
        return signs[0].start, signs[-1].stop

    def outer(self, node: Placed, inside: tuple[int, int]) -> tuple[int, int]:
        """Span of a node with the parentheses around it, as far as these are inside of a span."""
        start, stop = self.span(node)
        while True:
            left, right = self.between(inside[0], start)[-1:], self.between(stop, inside[1])[:1]
            if [token.string for token in left + right] != ["(", ")"]:
                return start, stop
            start, stop = left[0].start, right[0].stop

    def arguments(self, call: ast.Call) -> tuple[int, int]:
        """Span of what is between a call's parentheses."""
        start, stop = self.span(call)
        opening = self.between(self.outer(call.func, (start, stop))[1], stop)[0]
        return opening.stop, stop - 1

    def operand(self, node: ast.expr) -> str:
        """Its text, in parentheses unless it can stand anywhere without."""
        text = self.text(*self.span(node))
        return text if isinstance(node, ATOMS) and len(text.splitlines()) == 1 else f"({text})"

    def changed(self, edit: _Edit) -> Mutant:
        """The mutant, described with the smallest expression or statement around the change, if that is short."""
        start, stop = edit.start, edit.stop
        left, right = self.text(0, start), self.text(stop, len(self.bytes))
        after = _glue(left, edit.after or right) + edit.after
        after += _glue(after, right)
        around = (
            each for each in self._spans if each[0] <= start and stop <= each[1] and each != (start, stop)
        )
        first, last = next(around, (start, stop))
        if last - first > SHORT or len(self.bytes[first:last].splitlines()) > 1:
            first, last = start, stop
        line = bisect_left(self.lines, start + 1) - self.opening.count("\n")
        new = self.text(first, start) + after + self.text(stop, last)
        text = left + after + right
        return Mutant(edit.operator, line, self.text(first, last), new, text[len(self.opening) :])


def _length(span: tuple[int, int]) -> tuple[int, int]:
    return span[1] - span[0], span[0]


def _glue(left: str, right: str) -> str:
    """What must stand between two pieces so that they do not become one word: `return-x` without its minus."""
    return " " if re.match(r"\w", left[-1:]) and re.match(r"\w", right[:1]) else ""


def _touchable(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for name, value in ast.iter_fields(node):
        if name not in FIELDS.get(type(node).__name__, ()):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and type(child).__name__ not in UNTOUCHED:
                    yield from _touchable(child)


def _swap_arithmetic(code: _Code, node: ast.AST) -> Iterator[_Edit]:
    if isinstance(node, ast.BinOp) and not _is_sequence(node):
        start, stop = code.operator(node.left, node.right)
        if new := ARITHMETIC.get(code.text(start, stop)):
            yield _Edit("swap arithmetic", start, stop, new)
    elif isinstance(node, ast.AugAssign) and not _is_sequence(node.value):
        start, stop = code.operator(node.target, node.value)
        if new := ARITHMETIC.get(code.text(start, stop - 1)):
            yield _Edit("swap arithmetic", start, stop, f"{new}=")


def _is_sequence(node: ast.expr) -> bool:
    """It says so itself; then any other operator is a TypeError."""
    if isinstance(node, ast.BinOp):
        return _is_sequence(node.left) or (
            isinstance(node.op, ast.Add | ast.Mult) and _is_sequence(node.right)
        )
    literal = isinstance(node, ast.JoinedStr | ast.List | ast.ListComp | ast.Tuple)
    return literal or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def _swap_comparison(code: _Code, node: ast.AST) -> Iterator[_Edit]:
    if isinstance(node, ast.Compare):
        operands = [node.left, *node.comparators]
        for left, right in zip(operands, operands[1:], strict=False):
            start, stop = code.operator(left, right)
            sign = " ".join(token.string for token in code.between(start, stop))
            yield _Edit("swap comparison", start, stop, COMPARISONS[sign])


def _swap_logic(code: _Code, node: ast.AST) -> Iterator[_Edit]:
    if isinstance(node, ast.BoolOp):
        for left, right in zip(node.values, node.values[1:], strict=False):
            start, stop = code.operator(left, right)
            yield _Edit("swap and/or", start, stop, LOGIC[code.text(start, stop)])


def _negate_condition(code: _Code, node: ast.AST) -> Iterator[_Edit]:
    """Unless another kind does: `==` becomes `!=`, `not x` becomes `x`, True becomes False."""
    tests = list(node.ifs) if isinstance(node, ast.comprehension) else []
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        tests = [node.test]
    elif isinstance(node, ast.match_case) and node.guard:
        tests = [node.guard]
    exact = ast.Eq | ast.NotEq | ast.Is | ast.IsNot | ast.In | ast.NotIn
    for test in tests:
        negated = isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], exact)
        negated |= isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
        if not negated and not isinstance(test, ast.Constant):
            yield _Edit("negate condition", *code.span(test), f"not {code.operand(test)}")


def _drop_statement(code: _Code, node: ast.AST) -> Iterator[_Edit]:
    if isinstance(node, ast.Return) and node.value and not _is_none(node.value):
        yield _Edit("drop return value", *code.span(node), "return None")
    elif isinstance(node, DROPPED | ast.Return):
        yield _Edit("drop statement", *code.span(node), "pass")
    elif isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant):
        yield _Edit("drop statement", *code.span(node), "pass")
    elif isinstance(node, ast.AnnAssign) and node.value:
        yield _Edit("drop statement", *code.span(node), "pass")


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _drop_with(code: _Code, node: ast.AST) -> Iterator[_Edit]:
    """The body of a `with`; and what it enters, unless the body has a name for that."""
    if isinstance(node, ast.With | ast.AsyncWith):
        start, stop = code.span(node.body[0])[0], code.span(node.body[-1])[1]
        yield _Edit("drop statement", start, stop, "pass")
        if not any(item.optional_vars for item in node.items):
            colon = code.between(code.span(node)[0], start)[-1]
            yield _Edit("drop context", code.span(node)[0], colon.stop, "if True:")


def _change_constant(code: _Code, node: ast.AST) -> Iterator[_Edit]:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        value = node.value
        if isinstance(value, bool):
            new = repr(not value)
        else:
            new = repr(type(value)(0) if value == 1 else value + 1)
        yield _Edit("change constant", *code.span(node), new)


def _off_by_one(code: _Code, node: ast.AST) -> Iterator[_Edit]:
    """Bounds of ranges and slices, unless there is a number in them, which is another kind's."""
    bounds: list[tuple[ast.expr | None, str]] = []
    if isinstance(node, ast.Call) and _name(node.func) == "range" and node.args:
        stop = node.args[:2][-1]
        bounds = [(stop, "+"), (stop, "-"), *((start, "+") for start in node.args[:2][:-1])]
    elif isinstance(node, ast.Slice):
        bounds = [(node.lower, "+"), (node.upper, "+")]
    for bound, sign in bounds:
        last = bound.right if isinstance(bound, ast.BinOp) else bound
        last = last.operand if isinstance(last, ast.UnaryOp) else last
        if bound and not isinstance(last, ast.Constant | ast.Starred):
            yield _Edit("off by one", *code.span(bound), f"{code.operand(bound)} {sign} 1")


def _drop_bound(code: _Code, node: ast.AST) -> Iterator[_Edit]:
    if isinstance(node, ast.Slice):
        for bound in (node.lower, node.upper, node.step):
            zero = bound is node.lower and isinstance(bound, ast.Constant) and bound.value == 0
            if bound and not zero:
                yield _Edit("drop bound", *code.outer(bound, (0, len(code.bytes))), "")


def _name(function: ast.expr) -> str:
    """The last name of a dotted one."""
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


def _swap_function(code: _Code, node: ast.AST) -> Iterator[_Edit]:
    if isinstance(node, ast.Call) and (new := FUNCTIONS.get(_name(node.func))):
        name = code.between(*code.span(node.func))[-1]
        yield _Edit("swap function", name.start, name.stop, new)


def _swap_arguments(code: _Code, node: ast.AST) -> Iterator[_Edit]:
    if isinstance(node, ast.Call) and _name(node.func) not in NOT_SWAPPED:
        inside = code.arguments(node)
        for left, right in zip(node.args, node.args[1:], strict=False):
            if not isinstance(left, ast.Starred) and not isinstance(right, ast.Starred):
                (start, end), (begin, stop) = code.outer(left, inside), code.outer(right, inside)
                swapped = code.text(begin, stop) + code.text(end, begin) + code.text(start, end)
                yield _Edit("swap arguments", start, stop, swapped)


def _drop_keyword(code: _Code, node: ast.AST) -> Iterator[_Edit]:
    """One comma goes with it, and blanks beside that; never a comment."""
    if isinstance(node, ast.Call):
        low, high = code.arguments(node)
        for keyword in node.keywords:
            start, stop = code.span(keyword)
            if after := code.between(stop, high):
                stop = after[0].stop
                stop += len(code.bytes[stop:high]) - len(code.bytes[stop:high].lstrip(b" "))
            elif (before := code.between(low, start)) and not code.bytes[before[-1].stop : start].strip(b" "):
                start = before[-1].start
            yield _Edit("drop keyword", start, stop, "")


def _unwrap_call(code: _Code, node: ast.AST) -> Iterator[_Edit]:
    """`x.clone()` and `sorted(x)` become `x`, where somebody takes the result."""
    if isinstance(node, ast.Call) and node not in code.statements:
        inner: ast.expr | None = None
        if isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
            inner = node.func.value
        elif _name(node.func) in CONVERSIONS and node.args and not isinstance(node.args[0], ast.Starred):
            inner = node.args[0]
        if inner:
            yield _Edit("unwrap call", *code.span(node), code.operand(inner))


def _drop_unary(code: _Code, node: ast.AST) -> Iterator[_Edit]:
    if isinstance(node, ast.UnaryOp) and not isinstance(node.op, ast.UAdd):
        sign, operand = code.between(*code.span(node))[:2]
        yield _Edit("drop unary", sign.start, operand.start, "")


KINDS: tuple[Callable[[_Code, ast.AST], Iterator[_Edit]], ...] = (
    _swap_arithmetic,
    _swap_comparison,
    _swap_logic,
    _swap_function,
    _swap_arguments,
    _negate_condition,
    _drop_statement,
    _drop_with,
    _drop_keyword,
    _drop_bound,
    _drop_unary,
    _off_by_one,
    _change_constant,
    _unwrap_call,
)
