"""Curves: scaling over numbers of GPUs, losses over steps."""

from __future__ import annotations

import math

import pytest
from matplotlib.figure import Figure

from figures import legend_of, points_of
from hwfsdp.plot.loss import plot_losses
from hwfsdp.plot.scaling import plot_scaling

# scaling


def lines_of(figure: Figure) -> dict[str, tuple[list[float], list[float]]]:
    return {
        str(line.get_gid()): (list(line.get_xdata()), list(line.get_ydata())) for line in figure.axes[0].lines
    }


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
        "GiB reserved on a GPU": [p.memory_gib for p in points],
        "exposed communication, % of step": [pytest.approx(100 * p.exposed_fraction) for p in points],
    }


# loss


FALLING = [3.0, 2.5, 2.25, 2.0]


def test_curves_are_drawn_as_given_each_thinner_and_above_the_one_before() -> None:
    curves = {"a": FALLING, "b": FALLING, "c": [3.0, 3.1], "d": FALLING}
    lines = plot_losses(curves).axes[0].lines
    for line, curve in zip(lines, curves.values(), strict=True):
        assert list(line.get_xdata()) == list(range(len(curve)))
        assert list(line.get_ydata()) == curve
    for below, above in zip(lines, lines[1:], strict=False):
        assert below.get_linewidth() > above.get_linewidth() and below.get_zorder() < above.get_zorder()
        assert below.get_color() != above.get_color() and below.get_marker() != above.get_marker()
    assert [line.is_dashed() for line in lines] == [False, True, True, True]


def test_the_legend_names_equal_curves_and_curves_that_only_look_equal() -> None:
    one_bit_off = [*FALLING[:-1], math.nextafter(FALLING[-1], 3.0)]
    curves = {"a": FALLING, "b": list(FALLING), "c": one_bit_off, "d": FALLING[:-1], "e": [3.0] * 4}
    said = ["a", "b (equals a exactly)", "c (at most 4.4e-16 from a)", "d", "e"]
    assert legend_of(plot_losses(curves)) == said
