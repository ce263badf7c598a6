"""The package with holes and a learner's functions in them: all code sees the functions, and learners reach nothing else."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from hwfsdp import launch
from hwfsdp.course.holes import blank
from hwfsdp.course.manifest import Place
from hwfsdp.course.manifest import module_source
from hwfsdp.course.overlay import Overlay, Submitted, install

PLACES = (
    Place("hwfsdp.core.sharding", "chunk_length"),
    Place("hwfsdp.core.sharding", "chunk_extent"),
    Place("hwfsdp.core.param", "FSDPParam.local"),
    Place("hwfsdp.core.param", "FSDPParam.set_unsharded"),
    Place("hwfsdp.core.layout", "free"),
)


def overlay(text: str, places: tuple[Place, ...] = PLACES) -> Overlay:
    modules: dict[str, str] = {}
    for place in places:
        modules[place.module] = blank(
            modules.get(place.module) or module_source(place.module), place.name, "00"
        )
    return Overlay(modules, (Submitted("00", "/learner/answer.py", textwrap.dedent(text), places),))


ANSWER = """
from hwfsdp.core.param import FSDPParam as Base, Place as Slot
from hwfsdp.core.sharding import Extent, padded_length
from hwfsdp.core import layout as storage

FREED = []

def chunk_length(n, world_size):
    return 7

def chunk_extent(n, world_size, rank):
    return Extent(padded_length(n, world_size), helper())

def helper():
    return 3

def free(tensor):
    FREED.append(tensor)

class FSDPParam:
    @property
    def local(self):
        return "mine", self.helper(), super().__class__ is not None

    def helper(self):
        return "helps"

    def set_unsharded(self, param):
        storage.free(param)

    def to_sharded(self):
        return "not a hole"
"""


def on_a_rank(text: str, ask: Any) -> Any:
    """Return the result of `ask()` in a process that has the overlay installed."""

    def run() -> Any:
        install(overlay(text))
        return ask()

    return launch(run, 1, timeout=60)[0]


def test_every_module_that_imports_a_hole_gets_the_learners_function() -> None:
    def ask() -> Any:
        import hwfsdp.core.collectives
        import hwfsdp.core.layout
        import hwfsdp.core.param
        import hwfsdp.core.sharding

        return (
            hwfsdp.core.sharding.chunk_length(10, 2),
            hwfsdp.core.collectives.chunk_length(10, 2),
            hwfsdp.core.sharding.padded_length(10, 2),
            tuple(hwfsdp.core.layout.chunk_extent(10, 2, 0)),
        )

    assert on_a_rank(ANSWER, ask) == (7, 7, 14, (14, 3))


def test_methods_and_properties_are_the_learners_with_the_helpers_they_added() -> None:
    def ask() -> Any:
        from hwfsdp.core import layout as storage
        from hwfsdp.core.param import FSDPParam

        param = object.__new__(FSDPParam)
        param.set_unsharded("a parameter")  # type: ignore[arg-type]
        return param.local, sys.modules["submitted_00"].FREED, storage.free.__name__  # type: ignore[attr-defined]

    assert on_a_rank(ANSWER, ask) == (("mine", "helps", True), ["a parameter"], "free")


def test_a_function_that_is_no_hole_stays_the_packages() -> None:
    def ask() -> Any:
        from hwfsdp.core.param import FSDPParam

        return FSDPParam.to_sharded.__module__

    assert on_a_rank(ANSWER, ask) == "hwfsdp.core.param"


def test_the_reference_is_not_in_the_package_that_was_loaded() -> None:
    def ask() -> Any:
        import inspect

        from hwfsdp.core import sharding

        blank_function = vars(sharding)["chunk_length"].__wrapped__
        try:
            blank_function(10, 2)
        except NotImplementedError:
            return inspect.getsource(blank_function), inspect.getsource(sharding)
        return "the reference"

    function, module = on_a_rank(ANSWER, ask)
    assert function.endswith("    # TODO(00)\n    raise NotImplementedError\n")
    assert function in module


@pytest.mark.parametrize("missing", ["def free", "class FSDPParam", "def set_unsharded"])
def test_a_file_that_does_not_define_a_hole_is_refused_by_name(missing: str) -> None:
    def ask() -> None:
        return None

    with pytest.raises(Exception, match="does not define"):
        on_a_rank(ANSWER.replace(missing, f"{missing}_"), ask)


def test_tracebacks_show_the_learners_lines_though_the_file_is_not_there() -> None:
    text = ANSWER.replace("return 7", "return 1 // 0  # here")

    def ask() -> str:
        import traceback

        from hwfsdp.core import sharding

        try:
            sharding.chunk_length(1, 1)
        except ZeroDivisionError:
            return traceback.format_exc()
        return ""

    assert not Path("/learner/answer.py").exists()
    assert "return 1 // 0  # here" in on_a_rank(text, ask)


def test_a_file_that_imports_the_package_over_its_own_functions_is_told() -> None:
    with pytest.raises(Exception, match="imports the package's FSDPParam.local over its own"):
        on_a_rank(ANSWER + "\nfrom hwfsdp.core.param import FSDPParam\n", lambda: None)
