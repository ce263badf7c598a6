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


def test_each_question_is_in_the_table_and_has_a_fix_a_trace_a_picture_and_places_to_practice() -> None:
    anchors = re.findall(r"\]\(#([^)]+)\)", TEXT.partition("```")[0])
    slugs = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in SECTIONS]
    assert sorted(anchors) == sorted(slugs)
    pictures = []
    for section in SECTIONS.values():
        parts = re.findall(r"^\*\*([\w ]+)\.\*\*", section, re.MULTILINE)
        assert parts == ["Seen", "Cause", "Fix", "In a trace", "Practice"]
        pictures += re.findall(r"!\[[^\]]+\]\(pictures/faq_(\w+)\.png\)", section)
        places = re.findall(r"`(exercises/[\w/]+)`", section.split("**Practice.**")[1])
        assert places and [place for place in places if not (ROOT / place).is_dir()] == []
    assert sorted(pictures) == sorted(faq.DRAW) and len(pictures) == len(SECTIONS)
    assert max((faq.PICTURES / f"faq_{name}.png").stat().st_size for name in pictures) <= 90_000


@pytest.mark.parametrize("name", suites.fast_are(["means", "logging"], faq.STATED))
def test_numbers_of_the_text_are_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_DISTRIBUTED_DEBUG", raising=False)  # which adds collectives
    section = next(text for text in SECTIONS.values() if f"faq_{name}.png" in text)
    stated: Callable[[], list[str]] = faq.STATED[name]
    words = " ".join(section.split())
    assert [each for each in stated() if each not in words] == []
