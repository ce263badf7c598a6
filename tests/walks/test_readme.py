"""The promises of the first pages: links lead somewhere, the tree matches the repository, commands exist."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import yaml

import hwfsdp
from hwfsdp.cli.command import parse

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "exercises/**/README.md", "solutions/*/README.md", ".github/**/*.md")
    for path in ROOT.glob(pattern)
)
MADE_WITH_THE_SITE = (ROOT / "docs" / "book", ROOT / "docs" / "notebooks")
MOST_BYTES = 300_000  # limit for the recording, because pages are read on slow connections, too


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def prose_of(path: Path) -> str:
    """Return a page without its blocks of code."""
    return re.sub(r"^( *)```.*?^\1```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)


# --- Links -------------------------------------------------------------------------------------------------


def links_of(path: Path) -> Iterator[str]:
    """Return the targets of links and images that are not web addresses."""
    text = re.sub(r"`[^`\n]*`", "code", prose_of(path))
    for target in re.findall(r"\]\(([^)\s]+)\)|<img[^>]* src=\"([^\"]+)\"", text):
        link = "".join(target)
        if not re.match(r"[a-z]+:", link):
            yield link


def anchors_of(path: Path) -> set[str]:
    """Return GitHub's anchors for the headings of a page. The rule: https://github.com/gjtorikian/html-pipeline."""
    anchors: list[str] = []
    for heading in re.findall(r"^#+ +(.*?) *$", prose_of(path), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        again = sum(re.fullmatch(rf"{re.escape(anchor)}(-\d+)?", other) is not None for other in anchors)
        anchors.append(f"{anchor}-{again}" if again else anchor)
    return set(anchors)


def broken(path: Path) -> list[str]:
    """Return the links of a page that lead nowhere."""
    found = []
    for link in links_of(path):
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if any(target.is_relative_to(folder) for folder in MADE_WITH_THE_SITE):
            continue
        if not target.exists() or anchor and anchor not in anchors_of(target):
            found.append(link)
    return found


def test_links_lead_to_files_and_headings_that_exist() -> None:
    assert {name_of(path): links for path in PAGES if (links := broken(path))} == {}


# --- The tree ----------------------------------------------------------------------------------------------


def listed() -> set[str]:
    """Return the paths of the tree in the README."""
    [tree] = re.findall(r"^```text\n\.\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    branches = [re.fullmatch(r"[├└]── (\S+) +\S.*", line) for line in tree.splitlines()]
    assert all(branches), "each line of the tree is a branch, and words on it"
    return {branch[1] for branch in branches if branch}


def test_the_tree_is_the_folders_under_version_control_and_the_makefile() -> None:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("no checkout of git")
    folders = {name.split("/")[0] for name in done.stdout.splitlines() if "/" in name and name[0] != "."}
    assert {*folders, "Makefile"} == listed()


# --- Commands ----------------------------------------------------------------------------------------------

TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def commands_in(path: Path, program: str) -> Iterator[list[str]]:
    """Yield the words after a program's name: in blocks the whole line, in running text only the verbs, with `--help`."""
    blocks = re.findall(r"^ *```sh\n(.*?)^ *```", path.read_text(), re.DOTALL | re.MULTILINE)
    for line in "".join(blocks).replace("\\\n", " ").splitlines():
        if line.lstrip().startswith(f"{program} "):
            yield shlex.split(line, comments=True)[1:]
    for code in re.findall(rf"`{program} ([^`\n#]*)", prose_of(path)):
        verbs = re.match("(?:(?:trace|checkpoint) )?[a-z]+(?= |$)", code)
        yield [*verbs[0].split(), "--help"] if verbs else ["--help"]


def test_each_make_command_on_a_page_is_a_target() -> None:
    told = {words[0] for path in PAGES for words in commands_in(path, "make") if words}
    assert {word for word in told if word.islower() and word != "--help"} - TARGETS == set()


def is_taken(words: Sequence[str]) -> bool:
    """Return True if the command accepts these arguments."""
    try:
        parse(words)
    except SystemExit as stopped:
        return stopped.code == 0
    return True


def test_commands_on_a_page_exist_with_their_options(capsys: pytest.CaptureFixture[str]) -> None:
    shown = {tuple(words) for path in PAGES for words in commands_in(path, "hwfsdp")}
    assert len(shown) > 50 and [words for words in sorted(shown) if not is_taken(words)] == []


# --- The recording -----------------------------------------------------------------------------------------

RECORDING = ROOT / "docs" / "_static" / "demo.svg"
FOR_PHONES = RECORDING.with_stem("demo_phone")


def test_the_recordings_are_small_and_show_or_need_nothing_of_another_place() -> None:
    for recording in (RECORDING, FOR_PHONES):
        text = recording.read_text()
        assert len(text.encode()) < MOST_BYTES
        allowed = {"http://www.w3.org/2000/svg", "https://ui.perfetto.dev"}
        assert set(re.findall(r"https?://[^\s\"<)]+", text)) <= allowed
        assert "<script" not in text and "url(" not in text
        for each in (text, recording.with_suffix(".cast").read_text()):
            assert not re.search(r"/(?:home|root|tmp|Users|work|var)/", each)
    text = FOR_PHONES.read_text()  # says at once what is wrong with an answer
    assert "spread-evenly" in text and 'visibility="hidden"' not in text


# --- Citation ----------------------------------------------------------------------------------------------


def test_the_citation_has_all_required_fields_and_this_version() -> None:
    """https://github.com/citation-file-format/citation-file-format/blob/1.2.0/schema-guide.md"""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == hwfsdp.__version__
    assert citation["authors"] == [{"name": "The hwfsdp authors"}]
    assert "The hwfsdp authors" in (ROOT / "LICENSE").read_text() and citation["license"] == "MIT"
