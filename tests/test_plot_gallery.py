"""One picture of every kind, of real runs, as docs/pictures.md shows them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from figures import assert_everything_is_on_the_sheet
from hwfsdp import plot
from hwfsdp.plot import gallery

DOCS = Path(__file__).parent.parent / "docs"
ROOMS = {path.stem for path in Path(plot.__file__).parent.glob("[!_]*.py")} | {"lessons"}


@pytest.fixture(scope="module")
def runs() -> gallery.Runs:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gallery, "STEPS", gallery.RECORDED)
        return gallery.make_runs()


@pytest.mark.parametrize("name", gallery.PICTURES)
def test_a_picture_of_a_real_run_has_its_texts_apart_and_on_the_sheet(name: str, runs: gallery.Runs) -> None:
    figure = gallery.PICTURES[name](runs)
    assert isinstance(figure, Figure) and figure.axes
    assert_everything_is_on_the_sheet(figure)


def test_pictures_are_written_one_after_the_other(runs: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(gallery, "make_runs", lambda: runs)
    monkeypatch.setattr(gallery, "PICTURES", {name: gallery.PICTURES[name] for name in ("loss", "mesh_hsdp")})
    written = list(gallery.draw_all(tmp_path / "new" / "folder"))
    assert [path.name for path in written] == ["loss.png", "mesh_hsdp.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_the_page_shows_every_picture_once_and_each_is_there() -> None:
    shown = re.findall(r"!\[[^\]]+\]\(pictures/(\w+)\.png\)", (DOCS / "pictures.md").read_text())
    assert sorted(shown) == sorted(gallery.PICTURES)
    there = {path.stem for path in (DOCS / "pictures").glob("*.png")}
    assert {name for name in there if not name.startswith("faq_")} == set(shown)  # those: tests/test_faq.py


def test_the_table_of_contents_names_every_room() -> None:
    named = re.findall(r"^    (\w+)  +\S", plot.__doc__ or "", re.MULTILINE)
    assert sorted(named) == sorted(ROOMS)
