"""What the first pages promise: links lead somewhere, the tree is the repository's, commands exist, forms are GitHub's."""

from __future__ import annotations

import re
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

import hwfsdp
from hwfsdp.cli import build_parser

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "exercises/*/README.md", "solutions/*/README.md", ".github/**/*.md")
    for path in ROOT.glob(pattern)
)
MADE_WITH_THE_SITE = (ROOT / "docs" / "book", ROOT / "docs" / "notebooks")
MOST_BYTES = 300_000  # of the recording: a page that is read on a train


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def prose_of(path: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^( *)```.*?^\1```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)


# --- Links -------------------------------------------------------------------------------------------------


def links_of(path: Path) -> Iterator[str]:
    """Targets of links and images that are no addresses on the net."""
    text = re.sub(r"`[^`\n]*`", "code", prose_of(path))
    for target in re.findall(r"\]\(([^)\s]+)\)|<img[^>]* src=\"([^\"]+)\"", text):
        link = "".join(target)
        if not re.match(r"[a-z]+:", link):
            yield link


def anchors_of(path: Path) -> set[str]:
    """Anchors that GitHub gives the headings of a page: https://github.com/gjtorikian/html-pipeline has the rule."""
    anchors: list[str] = []
    for heading in re.findall(r"^#+ +(.*?) *$", prose_of(path), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        again = sum(re.fullmatch(rf"{re.escape(anchor)}(-\d+)?", other) is not None for other in anchors)
        anchors.append(f"{anchor}-{again}" if again else anchor)
    return set(anchors)


def broken(path: Path) -> list[str]:
    """Links of a page that lead nowhere."""
    found = []
    for link in links_of(path):
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if any(target.is_relative_to(folder) for folder in MADE_WITH_THE_SITE):
            continue
        if not target.exists() or anchor and anchor not in anchors_of(target):
            found.append(link)
    return found


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_of_a_page_lead_to_files_and_headings_that_exist(path: Path) -> None:
    assert broken(path) == []


def test_a_link_to_a_file_or_a_heading_that_is_not_there_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One `name`, two\n\n[a](page.md#one-name-two) [b](#three) [c](gone.md) ![d](gone.png) [e](https://x.y)\n"
        '<img alt="f" src="gone.svg">\n\n```sh\n# three\n[g](gone.too)\n```\n'
    )
    assert broken(page) == ["#three", "gone.md", "gone.png", "gone.svg"]


def test_there_are_links_to_look_at() -> None:
    assert sum(len(list(links_of(path))) for path in PAGES) > 100


# --- The tree ----------------------------------------------------------------------------------------------


def listed() -> set[str]:
    """Paths of the tree in the README."""
    [tree] = re.findall(r"^```text\n\.\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    paths, folder = set(), ""
    for line in tree.splitlines():
        branch = re.fullmatch(r"((?:│   )?)[├└]── (\S+)(?: +\S.*)?", line)
        assert branch, f"expected a branch of the tree and words on it, got {line!r}"
        folder = folder if branch[1] else branch[2]
        paths.add(f"{folder}/{branch[2]}" if branch[1] else branch[2])
    return paths


def tracked() -> set[str]:
    """Entries of the repository, and of docs/, that are under version control."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("no checkout of git")
    names = [name.split("/") for name in done.stdout.splitlines()]
    return {name[0] for name in names} | {"/".join(name[:2]) for name in names if name[0] == "docs"}


def test_the_tree_has_all_that_is_under_version_control() -> None:
    assert tracked() - listed() == set()


def test_the_tree_has_nothing_that_is_not_there() -> None:
    assert [path for path in sorted(listed()) if not (ROOT / path).exists()] == []


# --- Commands ----------------------------------------------------------------------------------------------

TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def commands_in(path: Path, program: str) -> Iterator[list[str]]:
    """Words after a program's name, in code within a line and at the beginning of a line of a block."""
    blocks = re.findall(r"^ *```sh\n(.*?)^ *```", path.read_text(), re.DOTALL | re.MULTILINE)
    for text, begin in ((prose_of(path), "`"), ("\n".join(blocks), "^ *")):
        for command in re.findall(rf"{begin}{program} ([^`\n#]*)", text, re.MULTILINE):
            yield command.split()


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_what_make_is_told_on_a_page_is_a_target(path: Path) -> None:
    told = [words[0] for words in commands_in(path, "make") if words and words[0].islower()]
    assert [target for target in told if target not in TARGETS] == []


def verbs_of(words: list[str]) -> list[str]:
    """The verb of a command, and for a verb that has actions the action."""
    verbs = []
    for word in words[: 2 if words[:1] in (["trace"], ["checkpoint"]) else 1]:
        if not re.fullmatch("[a-z]+", word):
            break
        verbs.append(word)
    return verbs


def exists(verbs: list[str]) -> bool:
    with pytest.raises(SystemExit) as stopped:
        build_parser().parse_args([*verbs, "--help"])
    return stopped.value.code == 0


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_a_verb_that_a_page_names_is_one(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = {tuple(verbs_of(words)) for words in commands_in(path, "hwfsdp")}
    assert [verbs for verbs in sorted(named) if not exists(list(verbs))] == []


def test_a_verb_and_an_action_that_are_none_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert exists(["trace", "show"]) and not exists(["trace", "sow"]) and not exists(["chek"])


def test_the_first_block_of_the_readme_is_the_two_commands() -> None:
    first = re.search(r"^```sh\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    assert first and [line.split("#")[0].split() for line in first[1].splitlines()] == [
        ["make", "demo"],
        ["make", "test"],
    ]


# --- The recording -----------------------------------------------------------------------------------------

RECORDING = ROOT / "docs" / "_static" / "demo.svg"
NS = "{http://www.w3.org/2000/svg}"


def test_the_recording_is_small_and_needs_nothing_else() -> None:
    text = RECORDING.read_text()
    assert len(text.encode()) < MOST_BYTES
    addresses = set(re.findall(r"https?://[^\s\"<)]+", text)) - {
        "http://www.w3.org/2000/svg",
        "https://ui.perfetto.dev",
    }
    assert not addresses and "<script" not in text and "url(" not in text


def test_the_recording_without_animation_is_the_verdict_on_a_right_answer() -> None:
    groups = [
        each for each in ElementTree.parse(RECORDING).iter(f"{NS}g") if each.get("class", "").startswith("s")
    ]
    shown = [each for each in groups if each.get("visibility") != "hidden"]
    words = " ".join(text.text or "" for group in shown for text in group.iter(f"{NS}text"))
    assert "5 of 5 points" in words and "spread-evenly" in words
    assert len(shown) < len(groups)


def test_the_recording_shows_no_path_of_the_machine_that_made_it() -> None:
    for path in (RECORDING, RECORDING.with_suffix(".cast")):
        assert not re.search(r"/(?:home|root|tmp|Users|work|var)/", path.read_text())


# --- Citation ----------------------------------------------------------------------------------------------


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def test_the_citation_has_what_its_format_asks_for_and_this_version() -> None:
    """https://github.com/citation-file-format/citation-file-format/blob/1.2.0/schema-guide.md"""
    citation = read_yaml(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == hwfsdp.__version__
    assert citation["authors"] == [{"name": "The hwfsdp authors"}]
    assert "The hwfsdp authors" in (ROOT / "LICENSE").read_text() and citation["license"] == "MIT"


# --- Forms -------------------------------------------------------------------------------------------------

FORMS = sorted(path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config")
WORDS = {"type": "string", "pattern": r"\S"}
ELEMENT = {
    "type": "object",
    "required": ["type", "attributes"],
    "properties": {
        "type": {"enum": ["markdown", "input", "textarea", "dropdown", "checkboxes"]},
        "id": {"type": "string", "pattern": "^[A-Za-z0-9_-]+$"},
        "attributes": {"type": "object"},
        "validations": {
            "type": "object",
            "properties": {"required": {"type": "boolean"}},
            "additionalProperties": False,
        },
    },
    "additionalProperties": False,
    "if": {"properties": {"type": {"const": "markdown"}}},
    "then": {"properties": {"attributes": {"required": ["value"], "properties": {"value": WORDS}}}},
    "else": {"properties": {"attributes": {"required": ["label"], "properties": {"label": WORDS}}}},
}
FORM = (
    {  # https://docs.github.com/en/communities/using-templates-to-encourage-useful-issues-and-pull-requests
        "type": "object",
        "required": ["name", "description", "body"],
        "properties": {
            "name": WORDS,
            "description": WORDS,
            "title": WORDS,
            "labels": {"type": "array", "items": WORDS},
            "body": {"type": "array", "minItems": 1, "items": ELEMENT},
        },
        "additionalProperties": False,
    }
)


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_is_one_that_github_takes(path: Path) -> None:
    form = read_yaml(path)
    jsonschema.validate(form, FORM)
    fields = [element for element in form["body"] if element["type"] != "markdown"]
    for key in ("id", "label"):
        values = [field.get(key) or field["attributes"].get(key) for field in fields]
        assert fields and None not in values and len(values) == len(set(values))
    assert all(field["attributes"].get("options") for field in fields if field["type"] == "dropdown")


def test_there_is_a_form_for_bugs_for_verdicts_and_for_texts() -> None:
    fields = {path.stem: {e.get("id") for e in read_yaml(path)["body"]} for path in FORMS}
    assert fields.keys() == {"bug", "verdict", "teaching"}
    assert "doctor" in fields["bug"] and {"submission", "verdict", "expected"} <= fields["verdict"]
    assert read_yaml(ROOT / ".github" / "ISSUE_TEMPLATE" / "config.yml")["blank_issues_enabled"] is True
