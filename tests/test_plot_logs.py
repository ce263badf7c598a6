"""Pictures of a log except timeline and memory: lifetimes, overlap, traffic, two runs side by side."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from matplotlib.figure import Figure

from figures import boxes, event, gathered_and_freed, lifetime_log, training_log
from hwfsdp import EventLog
from hwfsdp.observe.accounting import GroupSizes, Strategy, strategy_traffic
from hwfsdp.plot.comparison import plot_comparison
from hwfsdp.plot.issued import issued
from hwfsdp.plot.lifetimes import plot_lifetimes
from hwfsdp.plot.overlap import Shares, plot_overlap, shares_of
from hwfsdp.plot.traffic import plot_traffic, traffic_of

# lifetimes


def extents(figure: Figure, prefix: str) -> list[tuple[float, float]]:
    return [(b.get_x(), b.get_x() + b.get_width()) for b in boxes(figure, prefix).values()]


def test_a_group_is_sharded_gathering_in_its_buffer_until_its_copy_out_full_until_it_is_freed() -> None:
    figure = plot_lifetimes(lifetime_log(groups=2))
    for row, begin in enumerate((0.0, 2.0)):
        assert extents(figure, f"row {row} gathering") == [pytest.approx((begin, begin + 0.9))]
        assert extents(figure, f"row {row} in its buffer") == [pytest.approx((begin + 0.9, begin + 1.0))]
        assert extents(figure, f"row {row} full") == [pytest.approx((begin + 1.0, begin + 3.0))]
        assert extents(figure, f"row {row} forward") == [pytest.approx((begin + 1.5, begin + 2.5))]
    lines = figure.axes[0].lines
    spans = {str(line.get_gid()): list(line.get_xdata()) for line in lines if line.get_marker() != "v"}
    assert spans["transformer.layers.1 sharded"] == pytest.approx([0.0, 2.0])
    assert spans["transformer.layers.0 freed"] == pytest.approx([3.0, 5.0])
    marks = [line.get_xdata()[0] for line in lines if line.get_marker() == "v"]
    assert marks == pytest.approx([3.0])  # the other group is freed with the last event


@pytest.mark.parametrize(("step", "full"), [(0, (1.0, 2.5)), (1, (2.6, 3.0))])
def test_an_event_that_outlasts_the_step_is_cut_there(step: int, full: tuple[float, float]) -> None:
    events = [replace(e, step=int(e.op == "free")) for e in gathered_and_freed(0, 0.0)]
    log = EventLog([*events, event(99, "backward", "compute", 2600, 3500, owner="other", step=1)])
    figure = plot_lifetimes(log, step=step)
    assert extents(figure, "row 0 full") == [pytest.approx(full)]
    for line in figure.axes[0].lines:
        low, high = figure.axes[0].get_xlim()
        assert low <= min(line.get_xdata()) and max(line.get_xdata()) <= high


# issued


def test_a_collective_reaches_from_its_call_to_the_wait_for_it_and_compute_takes_one_place() -> None:
    log = [
        event(0, "forward", "compute", 0, 100, owner="model"),
        event(1, "all_gather", "all_gather", 1, 5, owner="0"),
        event(2, "wait", "compute", 2, 5, owner="0", after=(1,)),
        event(3, "all_gather", "all_gather", 5, 20, owner="1"),
        event(4, "forward", "compute", 6, 10, owner="0"),
        event(5, "wait", "compute", 11, 20, owner="1", after=(3,)),
        event(6, "forward", "compute", 20, 30, owner="1"),
        event(7, "reduce_scatter", "reduce_scatter", 40, 50, owner="1"),
    ]
    found = [(each.event.op, each.event.owner, each.begin, each.end) for each in issued(log)]
    assert found == [
        ("all_gather", "0", 0, 1),
        ("all_gather", "1", 1, 3),
        ("forward", "0", 2, 3),
        ("forward", "1", 3, 4),
        ("reduce_scatter", "1", 4, 5),
    ]


# overlap


def test_time_is_split_into_four_parts_that_add_up() -> None:
    events = [
        event(0, "forward", "compute", 0, 520),
        event(1, "all_gather", "all_gather", 500, 900),
        event(3, "forward", "compute", 520, 600),
        event(2, "wait", "compute", 550, 600, after=(1,)),
    ]
    shares = shares_of(events, 0, 1000)
    assert shares == Shares(compute=500, hidden=50, exposed=350, idle=100)
    assert sum(shares) == 1000


def test_the_bars_of_all_ranks_are_as_long_as_the_step_and_lie_one_after_the_other() -> None:
    late = [replace(e, start_us=e.start_us + 5000.0) for e in training_log(1, 2).events]
    log = EventLog([*training_log(1, 2).events, *(replace(e, rank=1) for e in late)])
    figure = plot_overlap(log, step=0)
    length = figure.axes[0].get_xlim()[1]
    for rank in (0, 1):
        at = 0.0
        for bar in boxes(figure, f"rank {rank} ").values():
            assert bar.get_x() == pytest.approx(at)
            at += bar.get_width()
        assert at == pytest.approx(length)
    idle = [boxes(figure)[f"rank {rank} idle"].get_width() for rank in (0, 1)]
    assert idle == pytest.approx([idle[1], idle[0]]) and idle[0] >= 5.0


def test_overlap_names_the_rank_with_the_most_exposed_communication() -> None:
    fast = event(0, "copy_in", "copy", 0, 100)
    slow = event(0, "all_gather", "all_gather", 0, 900, rank=1)
    log = EventLog([fast, slow, event(1, "forward", "compute", 800, 1000, rank=1)])
    [_, text] = [t.get_text() for t in plot_overlap(log).texts]
    assert "on rank 1: 0.80 ms, 89% of what it communicated" in text
    alone = EventLog([event(0, "forward", "compute", 0, 500)])
    assert plot_overlap(alone).texts[1].get_text() == "0.50 ms, without communication"


# traffic

GROUPS = [GroupSizes([(10, 4)]), GroupSizes([(3, 4), (5,)])]
CLOSED = strategy_traffic(GROUPS, Strategy.ZERO3, 2)


def moving(traffic: dict[str, int], ranks: int = 2, steps: int = 2) -> EventLog:
    """Make a log in which every step has this traffic."""
    events = []
    for rank in range(ranks):
        for step in range(steps):
            for op, nbytes in traffic.items():
                at = 1000.0 * len(events)
                events.append(event(len(events), op, op, at, at + 500, rank=rank, step=step, bytes=nbytes))
            events.append(
                event(len(events), "optimizer", "compute", at + 600, at + 700, rank=rank, step=step)
            )
    return EventLog(events)


def test_bars_show_the_bytes_of_one_step_of_one_rank() -> None:
    assert traffic_of(moving(CLOSED, steps=3), 1) == CLOSED
    forward_only = EventLog([event(0, "all_gather", "all_gather", 0, 1, bytes=64)])
    assert traffic_of(forward_only, 0) == {"all_gather": 64}


@pytest.mark.parametrize(
    "more", [{"owner": "", "bytes": 7}, {"step": 2, "bytes": 7}], ids=["nobody's", "later"]
)
def test_bars_leave_out_collectives_outside_groups_and_unfinished_steps(
    more: dict[str, Any],
) -> None:
    log = moving(CLOSED)
    extra = [event(100 + rank, "all_gather", "all_gather", 1e5, 2e5, rank=rank, **more) for rank in (0, 1)]
    assert traffic_of(EventLog([*log.events, *extra]), 0) == traffic_of(log, 0)
    assert traffic_of(EventLog(extra[:1]), 0) == {"all_gather": 7}


MOVED = {op: n for op, n in CLOSED.items() if n}


@pytest.mark.parametrize(
    ("moved", "said", "all_are_equal"),
    [
        (MOVED, "equal to closed form", True),
        ({op: 3 * n for op, n in MOVED.items()}, "3 × closed form", False),
        ({**MOVED, "all_gather": MOVED["all_gather"] + 1}, "1 B more than closed form", False),
    ],
    ids=["equal", "several times over", "a byte too many"],
)
def test_measured_bytes_stand_beside_the_closed_form_and_say_how_they_differ(
    moved: dict[str, int], said: str, all_are_equal: bool
) -> None:
    figure = plot_traffic(moving(moved), {"closed form": CLOSED})
    for op in MOVED:
        measured, closed = (boxes(figure)[f"{op} {name}"] for name in ("each of 2 ranks", "closed form"))
        assert measured.get_width() * CLOSED[op] == closed.get_width() * moved[op]
    assert any(said in t.get_text() for t in figure.axes[0].texts)
    verdict = figure.texts[1].get_text()
    assert verdict.endswith("every collective equals closed form")
    assert ("not every" in verdict) is not all_are_equal


def test_ranks_that_moved_different_bytes_have_bars_of_their_own() -> None:
    first = moving(CLOSED, ranks=1).events
    half = [replace(e, rank=1, bytes=e.bytes // 2) for e in first]
    bars = boxes(plot_traffic(EventLog([*first, *half]), {}))
    assert bars["all_gather rank 0"].get_width() == 2 * bars["all_gather rank 1"].get_width()


# comparison


def stretched(log: EventLog, factor: float) -> EventLog:
    return EventLog(
        [replace(e, start_us=9e6 + factor * e.start_us, dur_us=factor * e.dur_us) for e in log.events]
    )


def test_runs_begin_together_on_one_axis_of_time() -> None:
    log = training_log(ranks=2, groups=2)
    figure = plot_comparison({"usual": log, "slow": stretched(log, 1.5)}, rank=1, step=1)
    usual, slow = figure.axes
    assert usual.get_xlim() == slow.get_xlim() == (0.0, pytest.approx(slow.get_xlim()[1]))
    for axes in figure.axes:
        assert min(p.get_x() for p in axes.patches if hasattr(p, "get_x")) == 0.0
    lines = [line for axes in figure.axes for line in axes.lines]
    ends = [line.get_xdata()[0] for line in lines if line.get_gid() == "end"]
    assert ends[1] == pytest.approx(1.5 * ends[0])
