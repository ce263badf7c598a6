"""Mutants: each makes one change, of its kind and at its line, and changes nothing else in the text."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from pathlib import Path

from mutants import Mutant, mutants


def changed_as_stated(original: str, mutant: Mutant) -> bool:
    """Return True if replacing `before` by `after` at some place in the line gives the mutant's text."""
    lines = original.splitlines(keepends=True)
    first = sum(map(len, lines[: mutant.line - 1]))
    return any(
        original.startswith(mutant.before, place)
        and original[:place] + mutant.after + original[place + len(mutant.before) :] == mutant.text
        for place in range(first, first + len(lines[mutant.line - 1]))
    )


def promises(original: str) -> Sequence[Mutant]:
    """Return the mutants of the text. Assert every promise about mutants first."""
    found = list(mutants(original))
    programs = [ast.unparse(ast.parse(original)), *(ast.unparse(ast.parse(mutant.text)) for mutant in found)]
    assert len(set(programs)) == len(programs)
    for mutant in found:
        compile(ast.parse(mutant.text), "<mutant>", "exec")
        assert changed_as_stated(original, mutant), mutant
    return found


def in_function(line: str) -> str:
    return f"def f(a, b, c):\n    {line}\n"


def plain(line: str) -> str:
    """Return the line as Python writes it, without its layout."""
    return ast.unparse(ast.parse(in_function(line)))


def found_in(line: str) -> dict[str, list[str]]:
    """Return kind → the changed lines."""
    found: dict[str, list[str]] = {}
    for mutant in promises(in_function(line)):
        found.setdefault(mutant.operator, []).append(ast.unparse(ast.parse(mutant.text)))
    return found


EXAMPLES = [
    ("swap arithmetic", "a + b * c", ["a - b * c", "a + b // c"]),
    ("swap arithmetic", "[a] + b, 'x' * a, '%s' % a, f'{a + b}' + c + c", None),
    ("swap comparison", "a < b <= c", ["a <= b <= c", "a < b < c"]),
    ("swap and/or", "a and b or c", ["(a or b) or c", "(a and b) and c"]),
    ("swap and/or", "(a)and(b)and c", ["(a)or(b)and c", "(a)and(b)or c"]),
    ("swap function", "min(a), b.any(), max", ["max(a), b.any(), max", "min(a), b.all(), max"]),
    ("swap arguments", "f(a, (b), c)", ["f((b), a, c)", "f(a, c, (b))"]),
    ("swap arguments", "f(a, a), f(a, *b, c), min(a, b), isinstance(a, b), f(a, x=b)", None),
    ("negate condition", "b if a else c", ["b if not a else c"]),
    (
        "negate condition",
        "[x for x in a if x < b if x]",
        ["[x for x in a if not (x < b) if x]", "[x for x in a if x < b if not x]"],
    ),
    ("negate condition", "b if a is c else 1 if not b else 2 if True else 3", None),
    ("drop statement", "a.b = c", ["pass"]),
    ("drop statement", "a: int = b; b: int; del c", ["pass; b: int; del c", "a: int = b; b: int; pass"]),
    ("drop statement", "...; pass; import os; assert a < 1, f(a, b)", None),
    ("drop return value", "return a", ["return None"]),
    ("drop context", "with a(), b: c()", ["if True: c()"]),
    ("drop keyword", "f(a, b=1, **c)", ["f(a, **c)", "f(a, b=1)"]),
    (
        "drop bound",
        "a[b:c:2], a[0:(b)]",
        ["a[:c:2], a[0:(b)]", "a[b::2], a[0:(b)]", "a[b:c:], a[0:(b)]", "a[b:c:2], a[0:]"],
    ),
    ("drop unary", "return-a, not(b)", ["return a, not(b)", "return-a, (b)"]),
    ("off by one", "range(a or b)", ["range((a or b) + 1)", "range((a or b) - 1)"]),
    ("off by one", "range(a, b, c)", ["range(a + 1, b, c)", "range(a, b + 1, c)", "range(a, b - 1, c)"]),
    ("off by one", "range(3), range(a - 1), a[:-1], range(*a)", None),
    ("change constant", "a(0, 1, 7)", ["a(1, 1, 7)", "a(0, 0, 7)", "a(0, 1, 8)"]),
    (
        "change constant",
        "a(0.5, True, None, 'a', b'b')",
        ["a(1.5, True, None, 'a', b'b')", "a(0.5, False, None, 'a', b'b')"],
    ),
    ("unwrap call", "return (a + b).to(c)if c else b", ["return (a + b)if c else b"]),
    ("unwrap call", "return sorted(a or b, key=c)", ["return (a or b)"]),
    ("unwrap call", "a.zero_(); list(*b); a.other(b)", None),
]


def test_each_example_line_gives_the_expected_mutants() -> None:
    for operator, line, expected in EXAMPLES:
        assert sorted(found_in(line).get(operator, [])) == sorted(map(plain, expected or []))


def test_there_is_an_example_of_every_kind() -> None:
    source = Path(__file__).with_name("mutants.py").read_text()
    assert set(re.findall(r'_Change\(\s*"(.*?)"', source)) == {operator for operator, _, _ in EXAMPLES}
