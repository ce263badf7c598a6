"""Holes: cutting out and putting back gives the same bytes, and a hole says what the learner must do.

tests/course/test_workbook.py tests the holes of the course, and the modules that its solutions restore.
"""

from __future__ import annotations

import ast

import pytest

from hwfsdp import UsageError
from hwfsdp.course.holes import blank, extract, functions, splice

EXAMPLE = '''\
"""A module."""
import functools


def plain(n: int) -> int:
    """Doubles."""
    # by adding
    return n + n
    # that was all


@functools.cache
def decorated(
    n: int,
) -> str:
    text = """
no indentation here
"""

    return text * n  # 字


class Outer:
    class Inner:
        @property
        def value(self):
            return self._value

        @value.setter
        def value(self, new):
            self._value = new

        async def method(self):
            """Over
            two lines."""

            @functools.cache
            def nested(): return 1

            return nested()

    def only_a_docstring(self):
        """Says it all."""

    def one_line(self): return 1


if True:
    def conditional():
        pass
else:
    def otherwise():
        pass
'''


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_all_holes_of_a_module_can_be_made_and_filled_again(ending):
    source = EXAMPLE.replace("\n", ending)
    names = list(functions(source))
    texts = {name: extract(source, name) for name in names}
    hollow = source
    for name in names:
        hollow = blank(hollow, name, "03")
    assert hollow.count("raise NotImplementedError") == hollow.count("# TODO(03)") == len(names)
    ast.parse(hollow)
    for name in reversed(names):
        hollow = splice(hollow, name, texts[name])
    assert hollow == source


def test_a_function_has_the_name_python_gives_it():
    assert list(functions(EXAMPLE)) == [
        "plain",
        "decorated",
        "Outer.Inner.method",
        "Outer.only_a_docstring",
        "conditional",
        "otherwise",
    ]


def test_a_hole_reaches_from_the_decorator_to_the_last_comment():
    assert extract(EXAMPLE, "plain").endswith("    # that was all\n")
    assert extract(EXAMPLE, "decorated").startswith("@functools.cache\ndef decorated(")


def test_a_hole_keeps_signature_and_docstring_and_nothing_of_the_body():
    hollow = blank(EXAMPLE, "plain", "12")
    expected = '    """Doubles."""\n    # TODO(12)\n    raise NotImplementedError\n\n\n@functools.cache'
    assert expected in hollow and "by adding" not in hollow and "that was all" not in hollow
    hollow = blank(EXAMPLE, "decorated", "12")
    assert ") -> str:\n    # TODO(12)\n    raise NotImplementedError\n" in hollow and "字" not in hollow


@pytest.mark.parametrize("name", ["value", "Outer.Inner.value", "Outer.one_line", "missing", ""])
def test_a_name_that_is_no_function_or_several_is_refused(name):
    with pytest.raises(UsageError, match="hole"):
        extract(EXAMPLE, name)


def test_a_misspelled_name_is_corrected():
    with pytest.raises(UsageError, match=r"Did you mean: Outer\.Inner\.method$"):
        blank(EXAMPLE, "Outer.Inner.metod", "01")
