"""One text with marks gives starters, stages and solutions."""

from __future__ import annotations

from pathlib import Path

import pytest

from hwfsdp.course import stages
from hwfsdp.errors import UsageError

ROOT = Path(__file__).parents[2]
MARKED = '''def wait(event):
    """Wait for an event."""
    # @08
    stream.wait(event)
    # @03
    # |     host.wait()
    # @00
    # |     raise NotImplementedError("TODO(03): wait")
    # @end
# @h2


def overlap():
    # @h3
    return 3
    # @h2
    # |     return 2
    # @end
# @end
'''


def body(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()][2:]


def test_a_stage_has_the_newest_lines_up_to_it() -> None:
    for upto, lines in [
        ("00", ['raise NotImplementedError("TODO(03): wait")']),
        ("02", ['raise NotImplementedError("TODO(03): wait")']),
        ("03", ["host.wait()"]),
        ("07", ["host.wait()"]),
        ("16", ["stream.wait(event)"]),
        ("h1", ["stream.wait(event)"]),
        ("h2", ["stream.wait(event)", "def overlap():", "return 2"]),
        ("zz", ["stream.wait(event)", "def overlap():", "return 3"]),
    ]:
        assert body(stages.stage(MARKED, upto)) == lines


def test_marks_that_do_not_fit_are_named() -> None:
    for text, got in [
        ("# @end\n", "# @end alone"),
        ("# @03\n", "the end of the file"),
        ("# @03\n# @03\n# @end\n", "# @03 again"),
    ]:
        with pytest.raises(UsageError, match=got):
            stages.stage(text, "03")


def test_the_file_before_a_station_names_the_stations_that_it_gives() -> None:
    text = stages.caught_up(MARKED, ["01", "02", "03"], own=["02"])
    assert [number for number in ("01", "02", "03") if stages.is_given(number, text)] == ["01", "03"]
    assert "host.wait()" in text


def test_starters_are_written_once_and_files_that_differ_or_have_no_source_are_named(tmp_path: Path) -> None:
    (tmp_path / "solutions" / "lab").mkdir(parents=True)
    (tmp_path / "solutions" / "my_fsdp.py").write_text(MARKED)
    (tmp_path / "solutions" / "lab" / "train.py").write_text("print()\n")  # has no marks
    starter = tmp_path / "exercises" / "my_fsdp.py"
    assert stages.write(tmp_path) == [starter]
    assert (stages.write(tmp_path), stages.differences(tmp_path)) == ([], [])
    starter.write_text("changed\n")
    (tmp_path / "exercises" / "17_new").mkdir()
    for name in ("new.py", "test_new.py", "facts_new.py"):
        (tmp_path / "exercises" / "17_new" / name).touch()
    assert sorted(stages.differences(tmp_path)) == [
        "exercises/17_new/new.py has no source with marks in solutions/.",
        "exercises/my_fsdp.py is not what solutions/ gives. Run: make exercises",
    ]
    (tmp_path / "solutions" / "my_fsdp.py").write_text("# @03\nx = 1\n# @00\n# | x = =\n# @end\n")
    with pytest.raises(UsageError, match="solutions/my_fsdp.py: expected stages"):
        stages.write(tmp_path)


def test_the_starters_of_the_course_are_what_its_solutions_give() -> None:
    assert stages.differences(ROOT) == []
