"""Places in inches: names that fit, text that is broken, keys in columns, and what a picture is of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from figures import assert_texts_are_apart_and_on_the_sheet, canvas_of, training_log
from hwfsdp.plot import sheet, style
from hwfsdp.plot.choice import chosen, name_of_steps

LONG = "model.decoder.transformer.layers.31.self_attention.query_projection"


def test_a_long_name_is_shortened_to_its_end_and_if_possible_at_a_dot() -> None:
    for width in (0.5, 1.0, 3.0):
        short = sheet.fitting(LONG, style.TEXT_SIZE, width)
        assert short.startswith("…") and LONG.endswith(short[1:]) and len(short) > 1
        assert sheet.inches(short, style.TEXT_SIZE) <= width
    assert sheet.fitting("encoder.layers.7.attention", style.TEXT_SIZE, 1.5) == "…layers.7.attention"
    assert sheet.fitting("layers.7", style.TEXT_SIZE, 5.0) == "layers.7"


@pytest.mark.parametrize(("dpi", "size"), [(60, 12.0), (72, 7.0), (100, 9.0), (150, 7.0)])
def test_the_estimated_width_of_a_line_is_at_least_the_drawn_width(dpi: int, size: float) -> None:
    figure = sheet.new_figure(10.0, 1.0)
    figure.set_dpi(dpi)
    text = figure.text(0.0, 0.5, LONG, fontsize=size)
    drawn = text.get_window_extent(canvas_of(figure).get_renderer())
    assert drawn.width / dpi <= sheet.inches(LONG, size) <= 1.2 * drawn.width / dpi


def test_text_is_broken_between_words_and_nothing_is_lost() -> None:
    text = "compute that hides all communication is what sharding hopes for " * 4
    lines = sheet.broken(text, 3.0)
    assert len(lines) > 2 and " ".join(lines).split() == text.split()
    assert all(sheet.inches(line, style.TEXT_SIZE) <= 3.0 for line in lines)


@pytest.mark.parametrize("width", [2.5, 12.0])
def test_a_head_fits_whatever_its_width(width: float) -> None:
    keys = [sheet.key(style.look_of_op(op), f"{op} of all ranks") for op in style.DRAWN_OPS]
    head = sheet.head("A title", "with some text below it, which may be longer than a line", keys, width)
    figure = sheet.new_figure(width + 2 * sheet.MARGIN, head.height + 0.1)
    head.draw(figure)
    assert_texts_are_apart_and_on_the_sheet(figure)
    legend = figure.legends[0].get_window_extent(canvas_of(figure).get_renderer())
    assert legend.x1 <= figure.bbox.x1 and legend.y0 >= figure.bbox.y0


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


def test_events_are_those_of_the_rank_and_step_asked_for() -> None:
    log = training_log(ranks=2, groups=2)
    events = chosen(log, "draw", rank=1, step=0)
    assert {(e.rank, e.step) for e in events} == {(1, 0)}
    assert chosen(log, "draw") == log.events
    assert (name_of_steps(events), name_of_steps(log.events)) == ("step 0", "steps 0 to 1")
    after = replace(log.select("all_gather")[-1], step=2)
    assert name_of_steps([*log.events, after]) == "steps 0 to 1" and name_of_steps([after]) == "step 2"
