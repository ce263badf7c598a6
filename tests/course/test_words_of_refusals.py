"""The words of refusals are data: each is used, and the code gives the values for all of its places."""

from __future__ import annotations

import ast
import string
from collections.abc import Iterator
from pathlib import Path

import pytest

import hwfsdp.course
from hwfsdp.course.refusals import refusals

FILLED_BY = {"unusable": set(), "refused": {"got"}, "misread": {"got"}, "read_text": {"path", "got"}}


def names_in(value: ast.AST) -> Iterator[str]:
    """Yield the name of a refusal, or both names of `"a.b" if … else "c.d"`."""
    yield from (
        node.value for node in ast.walk(value) if isinstance(node, ast.Constant) and "." in str(node.value)
    )


def uses() -> Iterator[tuple[str, set[str]]]:
    """Yield each use in the course, with the words that it gives."""
    for path in Path(hwfsdp.course.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and (by := FILLED_BY.get(ast.unparse(node.func))) is not None:
                given = {keyword.arg or "" for keyword in node.keywords} - {"kinds"}
                refusal = node.args[1 if ast.unparse(node.func) == "read_text" else 0]
                yield from ((name, given | by) for name in names_in(refusal))


USES = [use for use in uses() if use[0]]


@pytest.mark.parametrize(("name", "given"), USES, ids=[name for name, _ in USES])
def test_a_refusal_gets_the_words_that_it_has_places_for(name: str, given: set[str]) -> None:
    part, _, key = name.partition(".")
    texts = refusals()[part][key]
    places = {place for text in texts for _, place, _, _ in string.Formatter().parse(text) if place}
    assert len(texts) == 4 and places <= given, name


def test_every_refusal_is_used() -> None:
    known = {f"{part}.{name}" for part, names in refusals().items() for name in names}
    assert known == {name for name, _ in USES}
