"""Pictures of logs, losses and scaling as structures: their artists, the places of these, and the texts. Pixels are not compared."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations

import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from figures import (
    MIB,
    event,
    legend_of,
    luma,
    points_of,
    sampled,
    training_log,
)
from hwfsdp import EventLog
from hwfsdp.observe.events import OPS, Sample
from hwfsdp.observe.ledger import KINDS
from hwfsdp.plot import style
from hwfsdp.plot.loss import plot_losses
from hwfsdp.plot.memory import plot_memory
from hwfsdp.plot.player.page_data import pack
from hwfsdp.plot.scaling import plot_scaling
from hwfsdp.plot.timeline import plot_comparison, plot_timeline


def test_owners_in_a_row_of_bars_are_cut_alike() -> None:
    narrow = event(0, "forward", "compute", 0.0, 30.0, owner="blocks.1")
    wide = event(1, "forward", "compute", 30.0, 940.0, owner="blocks.2")
    texts = {text.get_text() for text in plot_timeline(EventLog([narrow, wide])).axes[0].texts}
    assert {"1", "2"} <= texts and not any("blocks" in text for text in texts)


def bars(figure: Figure) -> dict[tuple[int, int], Rectangle]:
    """Return (rank, seq) → bar."""
    found = {}
    for axes in figure.axes:
        for patch in axes.patches:
            if isinstance(patch, Rectangle):
                _, rank, _, seq = str(patch.get_gid()).split()
                found[int(rank), int(seq)] = patch
    return found


def arrows(figure: Figure) -> list[FancyArrowPatch]:
    return [p for axes in figure.axes for p in axes.patches if isinstance(p, FancyArrowPatch)]


# style


def test_every_op_that_takes_time_and_every_kind_of_memory_has_a_look_of_its_own_in_grey_print_too() -> None:
    assert set(style.DRAWN_OPS) == set(OPS) - {"alloc", "free"}
    ops = [style.look_of_op(op) for op in style.DRAWN_OPS]
    kinds = [style.look_of_kind(kind) for kind in KINDS]
    for looks in (ops, kinds):
        assert len(set(looks)) == len(looks)
        for first, second in combinations(looks, 2):
            assert first.hatch != second.hatch or abs(luma(first.color) - luma(second.color)) > 0.15
    assert style.look_of_kind("unheard of") not in kinds


# timeline


def test_each_event_that_takes_time_is_a_bar_of_its_extent_in_its_row() -> None:
    log = training_log(ranks=2, groups=2)
    drawn = bars(plot_timeline(log))
    expected = {(e.rank, e.seq): e for e in log.events if e.op not in ("alloc", "free")}
    assert set(drawn) == set(expected)
    middles: dict[str, set[float]] = {}
    for place, bar in drawn.items():
        found = expected[place]
        assert bar.get_x() == pytest.approx(found.start_us / 1e3)
        assert bar.get_width() == pytest.approx(found.dur_us / 1e3)
        if found.op in ("wait", "forward", "backward"):
            assert bool(bar.get_hatch()) == (found.op == "wait")
        middles.setdefault(found.stream, set()).add(round(bar.get_y() + bar.get_height() / 2, 6))
    assert all(len(rows) == 1 for rows in middles.values())
    assert len(set.union(*middles.values())) == len(middles)


def test_an_arrow_leads_from_an_event_to_the_place_where_its_waiter_goes_on() -> None:
    log = EventLog(
        [
            event(0, "all_gather", "all_gather", 0, 800),
            event(1, "wait", "compute", 100, 810, after=(0,)),
            event(2, "forward", "compute", 820, 1500, after=(1,)),  # the same stream: no arrow
            event(3, "reduce_scatter", "reduce_scatter", 1700, 2000, after=(2, 99)),  # 99 is not in the log
        ]
    )
    drawn = {arrow.get_gid(): arrow for arrow in arrows(plot_timeline(log))}
    assert sorted(drawn) == ["rank 0 seq 0 to 1", "rank 0 seq 2 to 3"]
    expected = {"rank 0 seq 0 to 1": (0.8, 0.8), "rank 0 seq 2 to 3": (1.5, 1.7)}
    for gid, (tail, head) in expected.items():
        path = drawn[gid].get_path()
        extent = path.get_extents()
        ends = (path.vertices[0][0], extent.x0, extent.x1)
        assert ends == pytest.approx((tail, tail, head), abs=0.01)


def test_each_bar_has_the_color_of_a_key_and_only_spans_around_spans_of_their_kind_are_pale() -> None:
    copied = [
        event(90, "copy_out", "compute", 99_000, 99_500),
        event(91, "wait", "compute", 99_400, 99_400),  # it waits for nothing, and takes no time
        event(92, "all_gather", "all_gather", 99_000, 99_500),
        event(93, "all_gather", "all_gather", 99_100, 99_200),  # another one, in the time of the first
    ]
    log = EventLog([*training_log(ranks=1, groups=2, steps=1).events, *copied])
    figure = plot_timeline(log)
    keys = figure.legends[0].get_patches()
    labels = {text: key.get_facecolor() for text, key in zip(legend_of(figure), keys, strict=False)}
    assert labels.keys() >= {"forward of an outer module", "backward of an outer module", "copy_out"}
    for place, bar in bars(figure).items():
        [found] = log.select(rank=place[0], seq=place[1])
        outer = " of an outer module" if found.owner == "GPT" and found.op != "optimizer" else ""
        name = "wait (exposed communication)" if found.op == "wait" else found.op + outer
        assert bar.get_facecolor() == labels[name]


# two runs


def test_runs_begin_together_on_one_axis_of_time() -> None:
    log = training_log(ranks=2, groups=2)
    slow = [replace(e, start_us=9e6 + 1.5 * e.start_us, dur_us=1.5 * e.dur_us) for e in log.events]
    figure = plot_comparison({"usual": log, "slow": EventLog(slow)}, rank=1, step=1)
    assert len({axes.get_xlim() for axes in figure.axes}) == 1
    for axes in figure.axes:
        assert min(p.get_x() for p in axes.patches if hasattr(p, "get_x")) == axes.get_xlim()[0] == 0.0
    lines = [line for axes in figure.axes for line in axes.lines]
    ends = [line.get_xdata()[0] for line in lines if line.get_gid() == "end"]
    assert ends[1] == pytest.approx(1.5 * ends[0])


def test_pictures_and_player_count_time_from_the_first_event() -> None:
    log = training_log(ranks=2, groups=1, steps=1)
    late = EventLog([e.changed(start_us=e.start_us + 9000) for e in log.events])
    peaks = {8000: 1, 10_000: 2, 11_000: 1}
    late.samples[0] = [Sample(us, {"sharded_param": mib * MIB}) for us, mib in peaks.items()]
    starts = [[bar.get_x() for bar in bars(plot_timeline(each)).values()] for each in (late, log)]
    assert starts[0] == starts[1]
    figure = plot_memory(late)
    assert figure.axes[0].get_xlim()[0] == 0.0
    assert "peak: 2.00 MiB at 1.00 ms" in {text.get_text() for text in figure.axes[0].texts}
    (packed,) = pack([("late", late)])["logs"]
    assert packed["samples"]["0"]["us"][1] == 1000 and min(packed["events"]["start"]) == 0


# memory


UP_AND_DOWN = sampled(
    {"sharded_param": 4 * MIB},
    {"sharded_param": 4 * MIB, "unsharded_param": 2 * MIB, "all_gather_buffer": 2 * MIB},
    {"sharded_param": 4 * MIB, "unsharded_param": 4 * MIB, "all_gather_buffer": 1 * MIB},
    {"sharded_param": 4 * MIB, "unsharded_param": 4 * MIB, "all_gather_buffer": 1 * MIB},
    {"sharded_param": 4 * MIB},
)


def areas(figure: Figure) -> dict[str, PolyCollection]:
    found = [c for c in figure.axes[0].collections if isinstance(c, PolyCollection)]
    return {str(area.get_label()).split(":")[0]: area for area in found}


def test_areas_are_stacked_with_lasting_memory_lowest_and_stay_level_between_samples() -> None:
    drawn = areas(plot_memory(UP_AND_DOWN))
    assert list(drawn) == ["sharded_param", "unsharded_param", "all_gather_buffer"]
    for ms, sample in enumerate(UP_AND_DOWN.samples[0][:-1]):
        base = 0.0
        for kind, area in drawn.items():
            top = base + sample.bytes_by_kind[kind] / MIB
            for late in (0.1, 0.9):  # just after the sample and just before the next: no slope
                [path] = area.get_paths()
                assert not path.contains_point((ms + late, base - 0.05))
                assert path.contains_point((ms + late, (base + top) / 2)) == (top > base)
                assert not path.contains_point((ms + late, top + 0.05))
            base = top


def test_the_first_of_the_highest_samples_is_marked_and_named() -> None:
    figure = plot_memory(UP_AND_DOWN)
    [peak] = [line for line in figure.axes[0].lines if line.get_gid() == "peak"]
    assert (list(peak.get_xdata()), list(peak.get_ydata())) == ([2.0], [9.0])
    assert [text.get_text() for text in figure.axes[0].texts] == ["peak: 9.00 MiB at 2.00 ms"]
    kinds = {"sharded_param": 4, "unsharded_param": 4, "all_gather_buffer": 1}
    assert legend_of(figure) == [f"{kind}: {mib}.00 MiB" for kind, mib in kinds.items()]
    colors = [to_rgb(patch.get_facecolor()) for patch in figure.legends[0].get_patches()]
    assert colors == [to_rgb(style.look_of_kind(kind).color) for kind in kinds]


def test_expected_values_are_dashed_lines_above_memory_that_stays_and_in_the_legend() -> None:
    stays = [{"sharded_param": 4 * MIB, "sharded_grad": mib * MIB, "unsharded_param": MIB} for mib in (0, 2)]
    figure = plot_memory(sampled(*stays), expected={"model": 16 * MIB, "unsharded": 4 * MIB})
    dashed = {str(line.get_gid()): line for line in figure.axes[0].lines if line.is_dashed()}
    heights = {name: list(line.get_ydata())[:2] for name, line in dashed.items()}
    assert heights == {"unsharded": [8.0, 10.0], "model": [20.0, 22.0]}
    assert legend_of(figure)[-2:] == ["model: 16.0 MiB", "unsharded: 4.00 MiB"]
    assert len({line.get_linestyle() for line in figure.legends[0].get_lines()}) == 1  # dashed
    assert figure.axes[0].get_ylim()[1] > 22.0


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


def test_the_legend_names_equal_curves_and_curves_that_only_look_equal() -> None:
    one_bit_off = [*FALLING[:-1], math.nextafter(FALLING[-1], 3.0)]
    curves = {"a": FALLING, "b": list(FALLING), "c": one_bit_off, "d": FALLING[:-1], "e": [3.0] * 4}
    said = ["a", "b (equals a exactly)", "c (at most 4.4e-16 from a)", "d", "e"]
    assert legend_of(plot_losses(curves)) == said


# scaling


def test_the_panels_of_scaling_show_speed_with_an_ideal_time_memory_and_exposed_communication() -> None:
    points = points_of(4)
    lines = {line.get_gid(): line for axes in plot_scaling(points[::-1]).axes for line in axes.lines}
    assert list(lines["speed"].get_xdata()) == [p.gpus for p in points]
    assert {name: list(line.get_ydata()) for name, line in lines.items()} == {
        "speed": [p.tokens_per_second_per_gpu for p in points],
        "ideal": [6000, 6000],  # the speed on the fewest GPUs
        "seconds per step": [p.step_seconds for p in points],
        "GiB reserved on a GPU": [p.peak_memory_gib for p in points],
        "exposed communication, % of step": [pytest.approx(100 * p.exposed_comm_fraction) for p in points],
    }
