"""The page "yours beside the reference": a simulated step of two files, as a picture and a table."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import run_python

from hwfsdp.course import compare, machines, stages
from hwfsdp.course.machines import WIDE, Step
from hwfsdp.course.ranks import StudentFile
from hwfsdp.launcher.fork_server import start_server

ROOT = Path(__file__).parents[2]
MARKED = ROOT / "solutions" / "my_fsdp.py"
SECTIONS = [(op, unit) for op, units in (("forward", "01234"), ("backward", "43210")) for unit in units]


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Step, Step]]:
    """The step of the file after station 08, which gathers nothing ahead, and of the reference."""
    start_server("hwfsdp.course.machines")
    found = []
    for upto in ("08", stages.END):
        path = tmp_path_factory.mktemp("file") / "my_fsdp.py"
        path.write_text(stages.stage(MARKED.read_text(), upto))
        course = StudentFile(path)
        found.append(machines.askers(course)["host"](WIDE))
        course.end()
    yield found[0], found[1]


def test_the_table_has_the_figures_of_both_steps(steps: tuple[Step, Step]) -> None:
    rows = {row.name: row for row in compare.figures(*steps)}
    mine, theirs = steps
    assert rows["step"][1:] == (f"{mine.step_us / 1e3:,.1f} ms", f"{theirs.step_us / 1e3:,.1f} ms")
    exposed = rows["gathers of the forward travel alone"]
    assert exposed.mine == f"{sum(mine.exposed_us('forward')) / 1e3:,.1f} ms" != exposed.theirs
    peak = rows["peak of memory"]
    assert peak[1:] == (f"{mine.peak_bytes / 1e6:,.1f} MB", f"{theirs.peak_bytes / 1e6:,.1f} MB")
    assert peak.mine != peak.theirs
    assert mine.step_us > 1.2 * theirs.step_us  # as 09 and 10 say


def test_the_picture_has_the_compute_of_each_unit_and_its_collectives(steps: tuple[Step, Step]) -> None:
    for step in steps:
        events = compare.drawn(step).events
        spans = [e for e in events if e.op in ("forward", "backward")]
        assert [(e.op, e.owner) for e in spans] == SECTIONS
        assert all(e.end_us <= after.start_us for e, after in zip(spans, spans[1:], strict=False))
        assert sum(e.op == "all_gather" for e in events) == 10
        assert sum(e.op == "reduce_scatter" for e in events) == 5
    words = [text.get_text() for axes in compare.picture(*steps).axes for text in axes.texts]
    assert {compare.MINE, compare.THEIRS, *"01234"} <= set(words)


def test_the_page_stands_alone(steps: tuple[Step, Step]) -> None:
    page = compare.page(*steps)
    assert re.findall(r'src="(.{9})', page) == ["data:imag"] and "<script" not in page and "http" not in page
    assert page.count("<tr>") == 6 and "<td>yours</td><td>the reference</td>" in page


@pytest.mark.long
def test_a_run_with_a_reference_prints_the_table_and_names_the_page(tmp_path: Path) -> None:
    (tmp_path / "my_fsdp.py").write_text(stages.stage(MARKED.read_text(), "08"))
    command = ["-m", "pytest", str(ROOT / "exercises" / "08_streams"), "-k", "overlap"]
    command += ["--submission", str(tmp_path), "--reference", str(ROOT / "solutions")]
    ended = run_python(*command, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert "open runs/check/my_fsdp.html in a browser" in ended.stdout, ended.stdout
    assert "gathers of the forward travel alone" in ended.stdout
    assert (tmp_path / "runs" / "check" / "my_fsdp.html").exists()


def test_a_file_that_was_not_simulated_has_no_page(tmp_path: Path) -> None:
    (tmp_path / "my_fsdp.py").write_text("")
    assert compare.beside(StudentFile(tmp_path / "my_fsdp.py"), ROOT / "solutions") == ""
