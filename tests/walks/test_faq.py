"""The FAQ: each question has a picture, a fix that test_site runs, and a place to practice. Its numbers are measured."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import suites

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))

import faq  # noqa: E402

TEXT = (DOCS / "faq.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL))


def test_each_question_is_in_the_table_above_them() -> None:
    table = TEXT.partition("```")[0]
    anchors = re.findall(r"\]\(#([^)]+)\)", table)
    slugs = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in SECTIONS]
    assert sorted(anchors) == sorted(slugs)


def test_a_question_has_symptom_cause_fix_trace_picture_and_places_to_practice() -> None:
    for question in SECTIONS:
        section = SECTIONS[question]
        parts = re.findall(r"^\*\*([\w ]+)\.\*\*", section, re.MULTILINE)
        assert parts == ["Seen", "Cause", "Fix", "In a trace", "Practice"]
        fix, trace = section.split("**Fix.**")[1].split("**In a trace.**")
        assert "```python\n" in fix and "```sh\n" in trace
        assert len(re.findall(r"!\[[^\]]+\]\(pictures/faq_\w+\.png\)", section)) == 1
        places = re.findall(r"`(exercises/[\w/]+)`", section.split("**Practice.**")[1])
        assert places and [place for place in places if not (ROOT / place).is_dir()] == []


def test_pictures_in_the_text_are_exactly_the_pictures_drawn() -> None:
    named = re.findall(r"\(pictures/faq_(\w+)\.png\)", TEXT)
    there = {
        path.stem.removeprefix("faq_"): path.stat().st_size
        for path in faq.PICTURES.glob("faq_*.png")
        if not path.stem.endswith(("_dark", "_phone"))
    }
    assert len(named) == len(set(named))
    assert set(named) == set(there) == set(faq.DRAW)
    assert max(there.values()) <= 90_000


@pytest.mark.parametrize("name", suites.fast_are(["means", "logging"], faq.STATED))
def test_numbers_of_the_text_are_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_DISTRIBUTED_DEBUG", raising=False)  # which adds collectives
    section = next(text for text in SECTIONS.values() if f"faq_{name}.png" in text)
    stated: Callable[[], list[str]] = faq.STATED[name]
    words = " ".join(section.split())
    assert [each for each in stated() if each not in words] == []
