"""One picture of every kind from real runs, as docs/pictures.md shows them; extreme pictures; input that cannot be drawn."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from torch.distributed.tensor import Replicate, Shard

import suites
from figures import (
    MIB,
    assert_can_be_read_on_a_page,
    assert_everything_is_on_the_sheet,
    boxes,
    canvas_of,
    event,
    luma,
    points_of,
    sampled,
)
from figures import training_log
from hwfsdp import EventLog, UsageError
from hwfsdp.compat import strided_shard
from hwfsdp.layout.explain import Explanation, ParamRow
from hwfsdp.plot import sheet, style
from hwfsdp.plot.grid import LaidOut, plot_sharding
from hwfsdp.plot.loss import plot_losses
from hwfsdp.plot.memory import plot_memory
from hwfsdp.plot.parameters import plot_parameters
from hwfsdp.plot.scaling import ScalingPoint, plot_scaling
from hwfsdp.plot.timeline import plot_comparison, plot_timeline

DOCS = Path(__file__).parents[2] / "docs"
sys.path.insert(0, str(DOCS))

import gallery  # noqa: E402
import papers  # noqa: E402


@pytest.fixture(scope="module")
def runs() -> gallery.Runs:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gallery, "STEPS", gallery.RECORDED)
        return gallery.make_runs()


@pytest.mark.long
@pytest.mark.parametrize("name", gallery.PICTURES)
def test_a_picture_of_a_real_run_has_its_texts_apart_and_on_the_sheet(name: str, runs: gallery.Runs) -> None:
    figure = gallery.PICTURES[name](runs)
    assert isinstance(figure, Figure) and figure.axes
    assert_everything_is_on_the_sheet(figure)
    assert_can_be_read_on_a_page(figure)


# --- Extremes ----------------------------------------------------------------------------------------------

LONG = "model.decoder.transformer.layers.31.self_attention.query_projection.weight"
ROWS, STRIDED = (Shard(0),), (strided_shard(0, 2), Shard(0))
SAMPLES = sampled({"sharded_param": 4 * MIB}, {"sharded_param": 9 * MIB}, {"sharded_param": 4 * MIB})


def grid_of(count: int, name: str, mesh: dict[str, int]) -> Figure:
    placements = (*[Replicate()] * (len(mesh) - 1), Shard(0))
    found = [LaidOut(f"{name}{i}", (128256 if i % 2 else 3, 4), placements) for i in range(count)]
    return plot_sharding(found, mesh)


def table_of(fqn: str, count: int, shape: tuple[int, ...], placement: str = "S(0)") -> Figure:
    own = (0, shape[0] // 8)
    rows = [
        ParamRow(f"{fqn}.{i}", f"{fqn}.{i}", (shape[0] + i, *shape[1:]), "float32", placement, own, 0)
        for i in range(count)
    ]
    return plot_parameters(Explanation(rows, ["rope.frequencies"]))


EXTREMES: dict[str, Callable[[], Figure]] = {
    "timeline of four ranks": lambda: plot_timeline(training_log(4, groups=10), step=0),
    "memory, long names at the top": lambda: plot_memory(SAMPLES, expected={LONG: 9 * MIB, "b": 9 * MIB + 5}),
    "loss": lambda: plot_losses({LONG: [3.0, 2.5], "FSDP2": [3.0, 2.5], "unsharded": [3.0]}),
    "comparison of many": lambda: plot_comparison(
        {f"{LONG * 4} {i}": training_log(1, i) for i in (1, 2, 3, 4)}
    ),
    "grid of many parameters": lambda: grid_of(60, LONG, {"replicate": 2, "shard": 2}),
    "grid of many ranks": lambda: grid_of(4, LONG, {"shard": 64}),
    "table of nothing": lambda: table_of("w", 1, (0,)),
    "table of many unlike": lambda: table_of(
        LONG, 60, (10**9, 10**4), "_StridedShard(dim=0, sf=2), Shard(dim=0)"
    ),
    "scaling of many points": lambda: plot_scaling(
        points_of(20, 1e6), caption=f"{LONG} " * 5, title="A title"
    ),
}


WIDER = ("table of many unlike",)
SLOW = (
    *("timeline of four ranks", "comparison of many"),
    *("grid of many parameters", "table of many unlike"),
)


@pytest.mark.parametrize("name", suites.fast_are([name for name in EXTREMES if name not in SLOW], EXTREMES))
def test_an_extreme_picture_has_its_texts_apart_and_on_the_sheet(name: str) -> None:
    figure = EXTREMES[name]()
    assert_everything_is_on_the_sheet(figure)
    if name not in WIDER:
        assert_can_be_read_on_a_page(figure)


LOG, ALLOCATION = training_log(1, 1), EventLog([event(0, "alloc", "compute", 0, 0)])
REFUSED: list[tuple[Callable[[], Figure], str]] = [
    (lambda: plot_losses({}), "plot_losses: expected one or more curves"),
    (lambda: plot_timeline(LOG, step=7), r"The log has ranks \[0\] and steps \[0, 1\]"),
    (lambda: plot_timeline(EventLog()), "Record a step first"),
    (lambda: plot_memory(SAMPLES, rank=5), r"plot_memory\(rank=5\).*samples of the ranks \[0\]"),
    (lambda: plot_memory(sampled({}, {})), "samples without bytes"),
    (lambda: plot_comparison({}), "expected two logs or more"),
    (lambda: plot_comparison({"a": LOG, "b": LOG}, rank=1), "'a'.*ranks"),
    (lambda: plot_comparison({"a": ALLOCATION}), "events that take time"),
    (lambda: plot_sharding([LaidOut("scale", (), ROWS)], {"shard": 2}), "'scale' without dimensions"),
    (lambda: plot_sharding([LaidOut("w", (4,), ROWS)], {"shard": 65}), "1 to 64 ranks"),
    (lambda: plot_sharding([LaidOut("w", (4,), STRIDED)], {"a": 2, "b": 2}), "expected an axis of the mesh"),
    (lambda: plot_sharding([LaidOut("w", (4,), ROWS)], {"shard": 2}, fsdp="dp"), "'dp'"),
    (lambda: plot_sharding([LaidOut("w", (4,), STRIDED)], {"shard": 2}), "one for each dim of the mesh"),
    (lambda: plot_parameters(Explanation([], ["w"])), "expected an explanation with parameters"),
    (lambda: plot_scaling(points_of(1) * 2), "plot_scaling: expected one or more points"),
    (lambda: plot_scaling([ScalingPoint(8, float("nan"), 1, 1, 0)]), "plot_scaling: expected one or more"),
]


def test_a_log_that_cannot_be_drawn_is_refused_in_one_line() -> None:
    for draw, words in REFUSED:
        with pytest.raises(UsageError, match=words) as refusal:
            draw()
        assert "\n" not in str(refusal.value)


# --- Dark paper --------------------------------------------------------------------------------------------


def test_on_dark_paper_operations_keep_their_colors_and_letters_can_be_read() -> None:
    figure = plot_timeline(training_log(2, groups=3), step=0)
    before = {name: box.get_facecolor() for name, box in boxes(figure, "rank ").items()}
    canvas_of(figure)
    papers.darken(figure)
    canvas_of(figure)
    after = {name: box.get_facecolor() for name, box in boxes(figure, "rank ").items()}
    paper = style.to_hex(figure.get_facecolor())
    gathers = [name for name, color in before.items() if style.to_hex(color) == style.GREEN.lower()]
    assert gathers and all(after[name] == before[name] for name in gathers)
    assert paper == papers.PAPER and style.ink_on(paper) == style.WHITE
    for text in figure.findobj(Text):
        rims = [rim for rim in text.get_path_effects() if isinstance(rim, style.Rim)]
        under = rims[0].face if rims else paper
        assert abs(luma(text.get_color()) - luma(under)) > 0.35, text.get_text()


# --- The page ----------------------------------------------------------------------------------------------


def test_the_page_shows_every_picture_once_and_each_is_there() -> None:
    shown = re.findall(r"!\[[^\]]+\]\(pictures/(\w+)\.png\)", (DOCS / "pictures.md").read_text())
    assert sorted(shown) == sorted(gallery.PICTURES)
    there = {path.stem.removesuffix("_dark") for path in (DOCS / "pictures").glob("*.png")}
    # tests/walks/test_faq.py tests the pictures of the FAQ
    assert {name for name in there if not name.startswith("faq_")} == set(shown)


def test_the_files_of_the_documents_have_two_pixels_for_each_of_a_page() -> None:
    exercises = DOCS.parent / "exercises"
    paths = [*(DOCS / "pictures").glob("*.png"), *exercises.glob("*/picture.png")]
    widths = {path: int.from_bytes(path.read_bytes()[16:20], "big") for path in paths}
    assert {path: width for path, width in widths.items() if width != round(sheet.DPI * sheet.PAGE)} == {}
