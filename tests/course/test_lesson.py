"""The needs of notebooks beyond the package: sliders without a kernel, pictures on paper, and errors outside of a notebook."""

from __future__ import annotations

import base64
import json
import re
from io import BytesIO
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from PIL import Image

from browser import browser, find_browser
from hwfsdp.course import lesson
from hwfsdp.errors import UsageError
from hwfsdp.plot.sheet import DPI, new_figure


def test_a_slider_without_choices_and_a_lesson_outside_of_a_notebook_are_refused() -> None:
    with pytest.raises(UsageError, match="got plain Python. Open the notebook"):
        lesson.begin()
    for choices, got in [({}, "no name at all"), ({"rank": ()}, "none for 'rank'")]:
        with pytest.raises(UsageError, match=f"expected values to choose from; got {got}"):
            lesson.explore(print, **choices)  # type: ignore[arg-type]


def draw(rank: int, step: str = "-") -> Figure:
    """Draw a picture: one inch wide plus one per rank, and two inches high in step b, else one."""
    return new_figure(1.0 + rank, 2.0 if step == "b" else 1.0)


def sizes_of(page: str) -> list[tuple[int, int]]:
    """Return the sizes of the pictures in the page, in the page's inches."""
    [found] = re.findall(r'<script type="application/json">(.*?)</script>', page, re.DOTALL)
    addresses = [address.partition("base64,") for address in json.loads(found)["pictures"]]
    assert {begin for begin, _, _ in addresses} == {"data:image/webp;"}
    images = [Image.open(BytesIO(base64.b64decode(data))) for _, _, data in addresses]
    return [(image.width // DPI, image.height // DPI) for image in images]


def test_every_position_of_every_slider_is_in_the_page_and_paper_has_the_first_and_the_last() -> None:
    chosen = lesson.explore(draw, rank=range(3), step="ab")
    assert sizes_of(chosen._repr_html_()) == [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (3, 2)]
    assert [said for said, _ in chosen.stills()] == ["rank = 0, step = a", "rank = 2, step = b"]
    assert [said for said, _ in lesson.explore(draw, rank=[7]).stills()] == ["rank = 7"]


def test_a_page_with_sliders_asks_for_nothing_and_its_texts_stay_texts() -> None:
    text = "</script><b>1 < 2</b>"
    page = lesson.explore(draw, question=text, answer=text, rank=[1], step=[text])._repr_html_()
    assert "<b>" not in page and page.count("</script>") == 2
    assert re.findall(r"https?:|src=|href=|url\(", page) == []


@pytest.mark.long
@pytest.mark.skipif(find_browser() is None, reason="no Chromium")
def test_a_reader_predicts_reveals_and_moves_the_slider_without_a_kernel(tmp_path: Path) -> None:
    snippet = lesson.explore(draw, "How wide?", "Wider.", rank=range(3), step="ab")._repr_html_()
    still = "<div><img class='still' alt=''></div>"
    page = tmp_path / "page.html"
    page.write_text(f"<!doctype html><div class='cell_output'>{still}<div>{snippet}</div>{still}</div>")
    with browser(tmp_path / "browser") as tab:
        tab.look(400, 800)
        tab.open(page.as_uri())
        drawn = "document.querySelector('.explore img')"
        assert not tab.run(f"{drawn}.checkVisibility()")
        assert tab.run("document.querySelector('.explore textarea').checkVisibility()")
        # of the cell's other outputs, only the still pictures that follow the sliders are hidden
        stills = "[...document.querySelectorAll('.still')].map(each => each.checkVisibility())"
        assert tab.run(stills) == [True, False]
        tab.run("document.querySelector('.explore summary').click()")
        tab.run("document.querySelector('.explore input').focus()")
        tab.key("ArrowRight")
        tab.run("document.querySelectorAll('.explore input')[1].focus()")
        tab.key("ArrowRight")
        tab.until(f"{drawn}.naturalHeight > 100")
        assert tab.run(f"[{drawn}.alt, {drawn}.naturalWidth, {drawn}.naturalHeight]") == [
            "rank = 1, step = b",
            *(2 * DPI // 2, 2 * DPI // 2),
        ]
        tab.call("Emulation.setEmulatedMedia", media="print")
        assert tab.run(stills) == [True, True] and not tab.run(f"{drawn}.checkVisibility()")
        asked = [request for request in tab.requests if not request.startswith(("file:", "data:", "about:"))]
        assert (tab.complaints, asked) == ([], [])
