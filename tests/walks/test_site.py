"""The site: the Python of its pages runs, and pages look right in a browser. `make docs` fails at a broken link."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import suites
import torch.distributed as dist
import mutation_testing
from PIL import Image
from sybil import Sybil
from sybil.document import Document
from sybil.parsers.markdown import PythonCodeBlockParser

from browser import browser, find_browser
from hwfsdp.core.context import FSDPCommContext
from hwfsdp.core.state import FSDPState
from hwfsdp.plot.player.page_data import pack

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TEXTS = [*DOCS.glob("*.md"), ROOT / "README.md", *(ROOT / "exercises").glob("[0-9]*/README.md")]
# tests/course/test_own_exercise.py follows one of the others; the test on the other one stands in exercises/03_naive_fsdp
PAGES = [
    str(path.relative_to(ROOT))
    for path in TEXTS
    if "```python" in path.read_text() and path.name not in ("own_exercise.md", "course.md")
]
FAST = ["README.md", "docs/checkpoints.md", "docs/virtual.md"]
READER = Sybil(parsers=[PythonCodeBlockParser()])


def read(path: Path) -> Document:
    """Read a page and its examples. Their namespace can start ranks: functions travel by value."""
    document = READER.parse(path)
    document.namespace["__name__"] = "__main__"
    return document


@pytest.mark.parametrize("page", suites.fast_are(FAST, PAGES))
def test_the_python_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # pages may change these classes to show a mistake; restore them afterwards
    for changed in (FSDPState, FSDPCommContext):
        for name, method in vars(changed).items():
            if inspect.isfunction(method):
                monkeypatch.setattr(changed, name, method)
    try:
        for example in read(ROOT / page).examples():
            example.evaluate()
    finally:
        if dist.is_initialized():  # a page may do this in a comment that readers do not see
            dist.destroy_process_group()


def test_the_page_on_testing_has_the_table_of_measured_mistakes() -> None:
    assert mutation_testing.table(mutation_testing.kept()) in (DOCS / "testing.md").read_text()


# --- In a browser ------------------------------------------------------------------------------------------

PAGE = f"""# A page

A *rank* keeps a shard. Each rank has one.

```python
{"a_long_name = " + " + ".join(f"part_{number}" for number in range(20))}
```
"""
TABLE = """
<div class="stacked">

| part | what | why |
| --- | --- | --- |
| one | first | because |
| | second | |

</div>
"""
EXERCISES = ("01_rows", "09_forward_prefetch")
NOT_OURS = 'app.connect("builder-inited", write_book)'  # the book: minutes of this test's time


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a site of three pages and two exercises, as `make docs` does."""
    root = tmp_path_factory.mktemp("checkout")
    pages, built = root / "docs", root / "host" / "course" / "hwfsdp"
    shutil.copytree(DOCS / "_static", pages / "_static", ignore=shutil.ignore_patterns("demo*"))
    shutil.copytree(DOCS / "_templates", pages / "_templates")
    for each in EXERCISES:
        shutil.copytree(ROOT / "exercises" / each, root / "exercises" / each)
    for each in ("conf.py", "players.py", "finish.py", "glossary.md", "copyright.md", "player.png"):
        shutil.copy(DOCS / each, pages)
    (root / "solutions").mkdir()
    shutil.copy(ROOT / "solutions" / "my_fsdp.py", root / "solutions")
    for each in ("LICENSE", "CITATION.cff"):
        shutil.copy(ROOT / each, root)
    book = (DOCS / "book.py").read_text()
    assert NOT_OURS in book
    (pages / "book.py").write_text(book.replace(NOT_OURS, "pass"))
    for each in ("tutorial", "howto"):
        (pages / f"{each}.md").write_text(PAGE + TABLE)
    first = "# First\n\n![A step](player.png)\n\n```{toctree}\n:glob:\n\n*\nexercises/*/README\n```\n"
    (pages / "index.md").write_text(first)
    command = [sys.executable, "-m", "sphinx", "-q", "-b", "html", str(pages), str(built)]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    return built


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Serve the site in a subfolder. Answer unknown addresses with its 404 page, as GitHub Pages does."""

    class Host(SimpleHTTPRequestHandler):
        error_message_format = (site / "404.html").read_text().replace("%", "%%")

        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments, directory=str(site.parent.parent))  # type: ignore[arg-type]

        def log_message(self, format: str, *arguments: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Host)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/course/hwfsdp"
    server.shutdown()
    server.server_close()


@pytest.mark.long
@pytest.mark.skipif(find_browser() is None, reason="no Chromium")
def test_pages_fit_a_phone_link_the_glossary_and_are_found_again_from_any_address(
    site: Path, address: str, tmp_path: Path
) -> None:
    with browser(tmp_path) as tab:
        tab.look(400, 900)
        tab.open(f"{address}/tutorial.html")
        assert tab.run("document.documentElement.scrollWidth") == 400
        code = "document.querySelector('article pre')"  # of Python: moved sideways, never broken
        assert tab.run(f"{code}.scrollWidth > {code}.clientWidth")
        assert tab.run(f"getComputedStyle({code}).overflowX") == "auto"
        links = "[...document.querySelectorAll('article a.term')]"
        assert tab.run(f"{links}.map(link => link.textContent)") == ["rank", "shard"]
        assert tab.run(f"{links}.every(link => link.title && link.href.includes('glossary.html#term-'))")
        host = address.removesuffix("course/hwfsdp")
        assert all(request.startswith((host, "data:", "about:")) for request in tab.requests)
        tab.open(f"{address}/exercises/01_rows/README.html")
        assert "hwfsdp check 1" in tab.run("document.querySelector('article .admonition').textContent")
        for gone in ("gone.html", "exercises/gone/deep.html"):
            tab.open(f"{address}/{gone}")
            assert tab.run("document.querySelector('h1').textContent") == "There is no such page"
            assert tab.run("document.querySelector('article a').href") == f"{address}/index.html"
            assert tab.run("document.querySelector('input.search-again') !== null")


@pytest.mark.long
@pytest.mark.skipif(find_browser() is None, reason="no Chromium")
def test_a_phone_shows_stacked_tables_and_an_exercise_with_a_narrow_picture_that_plays_its_step(
    address: str, tmp_path: Path
) -> None:
    with browser(tmp_path) as tab:
        tab.look(400, 900)
        tab.open(f"{address}/howto.html")
        before = "[...document.querySelectorAll('.stacked td')].map(cell => getComputedStyle(cell, '::before').content)"
        assert tab.run(before) == ["none", '"what: "', '"why: "', '"one"', '"what: "', "none"]
        shown = "[...document.querySelectorAll('article img')].filter(img => img.clientWidth).map(img => img.src.includes('_phone'))"
        for width, narrow in ((1280, [False]), (400, [True])):
            tab.look(width, 900)
            tab.open(f"{address}/exercises/09_forward_prefetch/README.html")
            assert tab.run(shown) == narrow
            assert tab.run("(p => p.scrollWidth - p.clientWidth)(document.querySelector('p.picture'))") == 0
        assert tab.run("document.querySelectorAll('#predict textarea.prediction').length") == 2
        assert not any("/players/" in request for request in tab.requests)
        tab.run("document.querySelector('details.player').open = true")
        tab.run("document.querySelector('details.player').scrollIntoView()")
        tab.until("document.querySelector('iframe').contentDocument?.querySelector('#code .event') !== null")
        heads = "[...document.querySelector('iframe').contentDocument.querySelectorAll('h1')].map(e => e.firstChild.data.trim())"
        assert tab.run(heads) == ["A: after station 08", "B: after station 09"]
        assert tab.run("document.documentElement.scrollWidth") == 400
        assert [said for said in tab.complaints if "404" not in said] == []  # the browser asks for an icon


def test_each_picture_of_a_page_has_a_twin_of_the_same_size_for_dark_pages() -> None:
    pages = [*DOCS.glob("*.md"), *(ROOT / "exercises").rglob("README.md")]
    shown = {
        page.parent / name
        for page in pages
        for name in re.findall(r"(?:!\[[^\]]*\]\(|<img [^>]*src=\")([\w/.]+\.\w+)", page.read_text())
    }
    assert len(shown) > 40
    phones = {path.with_name(f"{path.stem}_phone{path.suffix}") for path in shown}
    for path in shown | {path for path in phones if path.is_file()}:
        twin = path.with_name(f"{path.stem}_dark{path.suffix}")
        assert twin.is_file(), f"{path} has no twin"
        if path.suffix == ".png":
            with Image.open(path) as light, Image.open(twin) as dark:
                assert light.size == dark.size, path
                middle = [each.convert("L").getpixel((3, each.height // 2)) for each in (light, dark)]
                assert middle[0] > 200 > 60 > middle[1], path


def test_every_player_of_the_site_has_a_page_and_a_place_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    from players import PLAYERS

    for name, player in PLAYERS.items():
        page = next(
            root / f"{player.page}.md" for root in (ROOT, DOCS) if (root / f"{player.page}.md").exists()
        )
        place = rf"[/ (\"]{player.at}\b" if player.at.endswith(".png") else f"## {player.at}"
        assert re.search(place, page.read_text(), re.IGNORECASE), name


@pytest.mark.long
def test_players_of_the_reference_show_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    from players import stations

    for name, log in stations("host", "03", trains=False).items():
        data = pack([(name, log)])
        assert data["functions"] == {} and data["logs"][0]["predicted"]


def test_the_footer_names_the_repository_without_a_user_or_a_password(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    from finish import web_address

    for remote, address in {
        "git@github.com:ada/hwfsdp.git": "https://github.com/ada/hwfsdp",
        "https://ada:secret@git.example.org/course/hwfsdp.git": "https://git.example.org/course/hwfsdp",
        "ssh://git@git.example.org:2222/course/hwfsdp": "https://git.example.org/course/hwfsdp",
        "/home/ada/hwfsdp": "",
        "": "",
    }.items():
        assert web_address(remote) == address
