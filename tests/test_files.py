"""What is written over an older file: the whole new file, or after an error the old one."""

from __future__ import annotations

import os
import re
import resource
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import run_python
from figures import training_log

import hwfsdp
from hwfsdp.cli import predict
from hwfsdp.files import write_whole
from hwfsdp.plot.export import export
from hwfsdp.virtual import simulate

LOG = training_log(2, 2)


def draw_simulation(path: Path) -> None:
    predict._draw([simulate("gpt-tiny", gpus=2)], Namespace(sweep=None, png=path))


WRITERS: dict[str, Callable[[Path], Any]] = {
    "trace.json": LOG.save,
    "trace.json.gz": LOG.save,
    "player.html": LOG.view().save,
    "simulated.png": draw_simulation,
    "text.json": lambda path: write_whole(path, "0" * 1000),
} | {
    f"to.{to}": lambda path, to=to: export([("", LOG)], path, to) for to in ("perfetto", "csv", "png", "svg")
}


@pytest.fixture
def full_disk() -> Iterator[Callable[[], None]]:
    """Return a function that lets a file have no more than a few bytes, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50, limits[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_leaves_the_old_file_and_nothing_beside_it(name, tmp_path, full_disk) -> None:
    path = tmp_path / name
    WRITERS[name](path)
    assert path.stat().st_size > 50
    path.write_text("old")
    full_disk()
    with pytest.raises(OSError, match=rf"File too large: '.*{name}'"):
        WRITERS[name](path)
    assert path.read_text() == "old" and os.listdir(tmp_path) == [name]


def test_a_file_keeps_its_permissions(tmp_path) -> None:
    (tmp_path / "grades.csv").write_text("old")
    (tmp_path / "grades.csv").chmod(0o600)
    assert write_whole(tmp_path / "grades.csv", "new").stat().st_mode & 0o777 == 0o600


def test_a_link_stays_a_link_and_a_device_a_device(tmp_path) -> None:
    (tmp_path / "link.json").symlink_to("file.json")
    write_whole(tmp_path / "link.json", "new")
    assert (tmp_path / "link.json").is_symlink() and (tmp_path / "file.json").read_text() == "new"
    code = "from hwfsdp.files import write_whole; from pathlib import Path; write_whole(Path('/dev/stdout'), 'text')"
    assert run_python("-c", code).stdout == "text"


# modules that write into a folder of their own, or into memory
OTHERS = "commit compare doctor pool probing release sheet submissions".split()


def test_every_other_file_is_written_as_a_whole() -> None:
    package = Path(hwfsdp.__file__).parent
    found = {
        f"{path.relative_to(package)}: {line.strip()}"
        for path in package.rglob("*.py")
        if path.stem not in OTHERS and "exercises" not in path.parts
        for line in path.read_text().splitlines()
        if "`" not in line
        if re.search(r"(?<!draft)\.write_(text|bytes)\(|\.savefig\((?!draft)|\.open\(\"w", line)
    }
    assert found == {'plot/export.py: with target.open("w", newline="", encoding="utf-8") as file:'}
