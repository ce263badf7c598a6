"""Curves over numbers of ranks: memory of model states, scaling."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure

from figures import assert_everything_is_on_the_sheet, points_of
from hwfsdp.observe.accounting import StateBytes, Strategy, model_state_bytes
from hwfsdp.plot.scaling import MeasuredSpeed, plot_scaling
from hwfsdp.plot.states import MeasuredState, plot_model_states

# model states

SHAPES = [(1000, 10), (10,)]
SIZES = [1, 2, 4, 8, 16]


def lines_of(figure: Figure) -> dict[str, tuple[list[float], list[float]]]:
    return {
        str(line.get_gid()): (list(line.get_xdata()), list(line.get_ydata())) for line in figure.axes[0].lines
    }


def test_lines_are_the_closed_form_at_every_number_of_ranks_that_the_strategy_has() -> None:
    lines = lines_of(plot_model_states(SHAPES, SIZES, shards=4, per_element=StateBytes(2, 2, 12)))
    for strategy in Strategy:
        sizes = [4, 8, 16] if strategy is Strategy.HSDP else SIZES
        expected = [
            sum(model_state_bytes(SHAPES, strategy, n, 4, per_element=StateBytes(2, 2, 12))) for n in sizes
        ]
        assert lines[strategy.name] == (sizes, expected)
    assert "HSDP" not in lines_of(plot_model_states(SHAPES, SIZES))


@pytest.mark.parametrize(
    ("off", "words"),
    [
        ({4: 0}, "equal to the closed form"),
        ({4: -3}, "3 B below"),
        ({2: -3, 4: 7, 8: 1}, "filled markers: 3 measured, up to 7 B above the closed form"),
    ],
)
def test_measured_points_say_how_far_the_farthest_is_from_the_closed_form(
    off: dict[int, int], words: str
) -> None:
    nbytes = {n: more + sum(model_state_bytes(SHAPES, Strategy.ZERO3, n)) for n, more in off.items()}
    measured = [MeasuredState(Strategy.ZERO3, n, found) for n, found in nbytes.items()]
    figure = plot_model_states(SHAPES, SIZES, measured=measured)
    assert lines_of(figure)["measured ZERO3 4"] == ([4], [nbytes[4]])
    assert words in " ".join(text.get_text() for text in figure.texts[1:])


# scaling


def test_the_ideal_line_is_the_speed_on_the_fewest_gpus() -> None:
    points = points_of(4)
    lines = lines_of(plot_scaling(points[::-1]))
    assert lines["speed"] == ([p.gpus for p in points], [p.tokens_per_second_per_gpu for p in points])
    assert lines["ideal"][1] == [6000, 6000]


def test_the_small_panels_show_time_memory_and_exposed_communication() -> None:
    points = points_of(3)
    drawn = {
        str(line.get_gid()): list(line.get_ydata())
        for axes in plot_scaling(points).axes[1:]
        for line in axes.lines
    }
    assert drawn == {
        "seconds per step": [p.step_seconds for p in points],
        "GiB per GPU": [p.memory_gib for p in points],
        "exposed communication, %": [pytest.approx(100 * p.exposed_fraction) for p in points],
    }


@pytest.mark.parametrize("share", [0.2, 0.99, 1.0, 1.05])
def test_measurements_close_to_their_point_are_legible(share: float) -> None:
    points = points_of(5)
    measured = [MeasuredSpeed(p.gpus, share * p.tokens_per_second_per_gpu, "a table") for p in points]
    assert_everything_is_on_the_sheet(plot_scaling(points, measured=measured))
