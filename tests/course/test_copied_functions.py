"""Copies of the reference, of the package and of other students are seen; what people write alike is not."""

from __future__ import annotations

import re
from pathlib import Path


from hwfsdp.course import copies

ROOT = Path(__file__).parents[2]
EXERCISES = ROOT / "exercises"
REFERENCE = (ROOT / "solutions" / "my_fsdp.py").read_text()
RIGHT = sorted((ROOT / "tests/course/answers/right").glob("*.py"))


def remarks(text: str) -> list[str]:
    return copies.compare({"my_fsdp.py": text}, EXERCISES)[0]


def test_the_reference_is_seen_also_with_other_names_and_without_comments() -> None:
    renamed = re.sub(r"\b(pieces|part|received)\b", r"my_\1", re.sub("  #.*", "", REFERENCE))
    for text in (REFERENCE, renamed):
        (line,) = remarks(text)
        assert line.startswith("my_fsdp.py has functions of solutions/my_fsdp.py") and line.endswith(" more")


def test_functions_of_the_package_are_seen_even_short_ones_with_their_docstrings() -> None:
    ring = (ROOT / "hwfsdp/comm/ring.py").read_text()
    assert any("hwfsdp/comm/ring.py" in line and "ring_all_gather" in line for line in remarks(ring))
    sharding = (ROOT / "hwfsdp/core/sharding.py").read_text()
    (short,) = [part for part in sharding.split("\n\n\n") if part.startswith("def chunk_length")]
    assert "hwfsdp/core/sharding.py: chunk_length" in remarks(short)[0]


def test_the_starter_is_nobodys_copy() -> None:
    assert not remarks((EXERCISES / "my_fsdp.py").read_text())
    assert not copies.compare({"my_fsdp.py": (EXERCISES / "my_fsdp.py").read_text()}, EXERCISES)[1]


def test_files_of_several_authors_resemble_neither_ours_nor_each_other() -> None:
    found = {path.stem: copies.compare({"my_fsdp.py": path.read_text()}, EXERCISES) for path in RIGHT}
    assert len(found) == 3 and not any(lines for lines, _ in found.values())
    assert not copies.shared({name: own for name, (_, own) in found.items()})


def test_students_with_the_same_functions_are_named_to_each_other() -> None:
    own = {path.stem: copies.compare({"my_fsdp.py": path.read_text()}, EXERCISES)[1] for path in RIGHT[:2]}
    one, other = own
    found = copies.shared({**own, "copier": own[one]})
    assert set(found) == {one, "copier"} and f"in common with {one}" in found["copier"][0]


def test_a_file_that_is_not_python_has_no_functions() -> None:
    for text in ["def f(:", "x = '\0'", "(" * 9999]:
        assert copies.functions(text) == {}
