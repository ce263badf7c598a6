"""Places in inches: names that fit, text that is broken, and places that are moved apart."""

from __future__ import annotations

import pytest

from hwfsdp.plot import sheet, style

LONG = "model.decoder.transformer.layers.31.self_attention.query_projection"


def test_a_long_name_is_shortened_to_its_end_and_if_possible_at_a_dot() -> None:
    for width in (0.5, 1.0, 3.0):
        short = sheet.fitting(LONG, style.TEXT_SIZE, width)
        assert short.startswith("…") and LONG.endswith(short[1:]) and len(short) > 1
        assert sheet.inches(short, style.TEXT_SIZE) <= width
    assert sheet.fitting("encoder.layers.7.attention", style.TEXT_SIZE, 1.5) == "…layers.7.attention"
    assert sheet.fitting("layers.7", style.TEXT_SIZE, 5.0) == "layers.7"


def test_text_is_broken_between_words_and_nothing_is_lost() -> None:
    text = "compute that hides all communication is what sharding hopes for " * 4
    lines = sheet.broken(text, 3.0)
    assert len(lines) > 2 and " ".join(lines).split() == text.split()
    assert all(sheet.inches(line, style.TEXT_SIZE) <= 3.0 for line in lines)


@pytest.mark.parametrize(
    ("heights", "moved"),
    [
        ([0, 1, 2], [0, 10, 20]),
        ([50, 90, 95], [50, 80, 90]),
        ([10, 30], [10, 30]),
        ([99, 99, 99], [70, 80, 90]),
    ],
)
def test_heights_are_moved_apart_and_stay_below_the_top(heights: list[float], moved: list[float]) -> None:
    assert sheet.moved_apart(heights, 10.0, 90.0) == moved
