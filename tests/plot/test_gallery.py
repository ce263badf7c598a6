"""One picture of every kind from real runs, as docs/pictures.md shows them; extreme pictures; input that cannot be drawn."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from torch.distributed.tensor import Shard

from figures import (
    MIB,
    assert_can_be_read_on_a_page,
    assert_everything_is_on_the_sheet,
    event,
    points_of,
    sampled,
)
from figures import training_log
from hwfsdp import EventLog, UsageError
from hwfsdp.compat import strided_shard
from hwfsdp.plot import sheet
from hwfsdp.plot.grid import LaidOut, plot_sharding
from hwfsdp.plot.loss import plot_losses
from hwfsdp.plot.memory import plot_memory
from hwfsdp.plot.scaling import plot_scaling
from hwfsdp.plot.timeline import plot_comparison, plot_timeline

DOCS = Path(__file__).parents[2] / "docs"
sys.path.insert(0, str(DOCS))

import gallery  # noqa: E402


@pytest.fixture(scope="module")
def runs() -> gallery.Runs:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gallery, "STEPS", gallery.RECORDED)
        return gallery.make_runs()


@pytest.mark.long
@pytest.mark.parametrize("name", gallery.PICTURES)
@pytest.mark.parametrize("width", [sheet.PAGE, sheet.PHONE], ids=["page", "phone"])
def test_a_picture_of_a_real_run_has_its_texts_apart_and_on_the_sheet(
    name: str, width: float, runs: gallery.Runs
) -> None:
    figure = gallery.PICTURES[name](runs, width)
    assert isinstance(figure, Figure) and figure.axes and figure.get_figwidth() <= width + 1e-6
    assert_everything_is_on_the_sheet(figure)
    assert_can_be_read_on_a_page(figure)


# --- Extremes ----------------------------------------------------------------------------------------------

LONG = "model.decoder.transformer.layers.31.self_attention.query_projection.weight"
ROWS, STRIDED = (Shard(0),), (strided_shard(0, 2), Shard(0))
SAMPLES = sampled({"sharded_param": 4 * MIB}, {"sharded_param": 9 * MIB}, {"sharded_param": 4 * MIB})


WEIGHTS = [LaidOut(f"{LONG}{i}", (128256 if i % 2 else 3, 4), ROWS) for i in range(4)]
LOGS = {"A name that needs two lines": training_log(1, 1), LONG: training_log(1, 2)}
TWO_LINES = "reduced after the last micro-batch"
PHONE = {"width": sheet.PHONE}
EXTREMES: dict[str, Callable[[], Figure]] = {
    "memory": lambda: plot_memory(SAMPLES, expected={LONG: 9 * MIB, "b": 9 * MIB + 5}),
    "loss": lambda: plot_losses({LONG: [3.0, 2.5], "FSDP2": [3.0, 2.5], "unsharded": [3.0]}),
    "grid": lambda: plot_sharding(WEIGHTS, {"shard": 64}),
    "scaling": lambda: plot_scaling(points_of(20, 1e6), caption=f"{LONG} " * 5, title="A title"),
    "phone: timeline": lambda: plot_timeline(training_log(2, 1), title=f"A long title of {LONG}", **PHONE),
    "phone: comparison": lambda: plot_comparison(LOGS, **PHONE),
    "phone: memory": lambda: plot_memory({TWO_LINES: SAMPLES, "b": SAMPLES}, **PHONE),
    "phone: loss": lambda: plot_losses({TWO_LINES: [3.0, 2.5], "b": [3.0, 2.5]}, **PHONE),
    "phone: grid": lambda: plot_sharding([LaidOut("0.attention.weight", (384, 4), ROWS)], {"s": 4}, **PHONE),
    "phone: scaling": lambda: plot_scaling(points_of(10, 1e6), caption="Long " * 30, title="T", **PHONE),
}


@pytest.mark.parametrize("name", EXTREMES)
def test_an_extreme_picture_has_its_texts_apart_and_on_the_sheet(name: str) -> None:
    figure = EXTREMES[name]()
    assert figure.get_figwidth() == sheet.PHONE or "phone" not in name
    assert_everything_is_on_the_sheet(figure)
    assert_can_be_read_on_a_page(figure)


LOG, ALLOCATION = training_log(1, 1), EventLog([event(0, "alloc", "compute", 0, 0)])
REFUSED: list[tuple[Callable[[], Figure], str]] = [
    (lambda: plot_losses({}), "plot_losses: expected one or more curves"),
    (lambda: plot_timeline(LOG, step=7), r"The log has ranks \[0\] and steps \[0, 1\]"),
    (lambda: plot_timeline(EventLog()), "Record a step first"),
    (lambda: plot_memory(SAMPLES, rank=5), r"plot_memory\(rank=5\).*samples of the ranks \[0\]"),
    (lambda: plot_memory(sampled({}, {})), "samples without bytes"),
    (lambda: plot_comparison({}), "expected two logs or more"),
    (lambda: plot_sharding([LaidOut("scale", (), ROWS)], {"shard": 2}), "'scale' without dimensions"),
    (lambda: plot_sharding([LaidOut("w", (4,), STRIDED)], {"a": 2, "b": 2}), "expected an axis of the mesh"),
    (lambda: plot_sharding([LaidOut("w", (4,), STRIDED)], {"shard": 2}), "one for each dim of the mesh"),
    (lambda: plot_scaling(points_of(1) * 2), "plot_scaling: expected one or more simulations"),
]


def test_a_log_that_cannot_be_drawn_is_refused_in_one_line() -> None:
    for draw, words in REFUSED:
        with pytest.raises(UsageError, match=words) as refusal:
            draw()
        assert "\n" not in str(refusal.value)


# --- The page ----------------------------------------------------------------------------------------------


def test_the_page_shows_every_picture_once_and_each_is_there() -> None:
    shown = re.findall(r"!\[[^\]]+\]\(pictures/(\w+)\.png\)", (DOCS / "pictures.md").read_text())
    assert sorted(shown) == sorted(gallery.PICTURES)
    there = {
        path.stem.removesuffix("_dark").removesuffix("_phone") for path in (DOCS / "pictures").glob("*.png")
    }
    # tests/walks/test_faq.py tests the pictures of the FAQ
    assert {name for name in there if not name.startswith("faq_")} == set(shown)
