"""The step player in a real browser: it loads, draws the log, and obeys keys and pointer.

Tests look at the structure of pictures: a region must have certain colors; single pixels may differ.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Tab, browser, find_browser
from figures import events_of

from hwfsdp import EventLog
from hwfsdp.core.sharding import chunk_extent
from hwfsdp.observe.group_states import find_lifetimes, find_reductions
from hwfsdp.plot import style
from hwfsdp.plot.player import page_data
from hwfsdp.plot.player.page import make_page
from hwfsdp.train.models import GPTConfig
from hwfsdp.virtual import simulate

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find_browser() is None, reason="no Chromium is installed here to open the page in"),
]
RANKS, APART = 2, 40.0  # µs by which each rank is later than the one before
HOSTILE = "</script><script>window.harmed = 1</script><img src=x onerror='window.harmed = 1'>"
WIDE, NARROW = (1280, 800), (400, 800)
TIMELINE = "#timeline .scroller canvas"


def step(reshard: bool = True) -> EventLog:
    """Simulate a step of a small GPT on virtual GPUs. Return one rank's log."""
    config = GPTConfig(dim=64, layers=3, heads=2, seq_len=32)
    return simulate(config, gpus=RANKS, batch=2, seq=32, reshard_after_forward=reshard).log


def spread(log: EventLog, ranks: int) -> EventLog:
    """Copy the log to `ranks` ranks, each a little later. Virtual ranks are equal, so the simulator runs only one."""
    events = [replace(e, rank=r, start_us=e.start_us + r * APART) for r in range(ranks) for e in log.events]
    samples = {r: [replace(s, us=s.us + r * APART) for s in log.samples[0]] for r in range(ranks)}
    clocks = {str(r): log.about["clocks"]["0"] for r in range(ranks)}
    return EventLog(events, samples, {**log.about, "clocks": clocks, "device": "cpu"})


@pytest.fixture(scope="module")
def log() -> EventLog:
    return spread(step(), RANKS)


@pytest.fixture(scope="module")
def pages(log: EventLog, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Write pages of the log, of two logs, and of hostile names. Return their addresses."""
    folder = tmp_path_factory.mktemp("pages")
    hostile = EventLog([replace(e, owner=HOSTILE) for e in log.events], log.samples, log.about)
    made = {
        "one": [("one.json", log)],
        "two": [("a.json", log), ("b.json", spread(step(reshard=False), RANKS))],
        "hostile": [(HOSTILE, hostile)],
    }
    for name, logs in made.items():
        make_page(logs).save(folder / f"{name}.html")
    return {name: (folder / f"{name}.html").as_uri() for name in made}


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browser(tmp_path_factory.mktemp("chromium")) as tab:
        yield tab


@pytest.fixture
def tab(chromium: Tab, pages: dict[str, str]) -> Iterator[Tab]:
    """Open the page of one log, wide and light. After the test, it must have no complaints and no further requests."""
    chromium.look(*WIDE)
    chromium.open(pages["one"])
    yield chromium
    assert chromium.complaints == []
    assert len({request.partition("#")[0] for request in chromium.requests}) == 1


def box(tab: Tab, selector: str) -> tuple[float, float, float, float]:
    """Return left, top, width and height of an element in the window."""
    found = tab.run(
        f"(() => {{ const b = document.querySelector('{selector}').getBoundingClientRect();"
        " return [b.left, b.top, b.width, b.height]; })()"
    )
    return tuple(found)


def pixels(tab: Tab, selector: str, color: str) -> int:
    """Count the pixels of an element that have this color, up to rounding."""
    left, top, width, height = (round(value) for value in box(tab, selector))
    part = tab.picture()[top : top + height, left : left + width].astype(int)
    wanted = np.array([int(color[at : at + 2], 16) for at in (1, 3, 5)])
    return int((abs(part - wanted).max(axis=2) <= 3).sum())


def place_of(tab: Tab, op: str, rank: int = 0) -> tuple[float, float]:
    """Return the place in the window where the longest event of this operation is drawn."""
    left, top, *_ = box(tab, TIMELINE)
    x, y = tab.run(f"""(() => {{
            const timeline = state.panes[0], long = (a, b) => (b.end - b.start) - (a.end - a.start);
            const event = state.log.events.filter((e) => e.op === "{op}" && e.rank === {rank}).sort(long)[0];
            const place = timeline.placeOf(event);
            return [timeline.x((event.start + event.drawnEnd) / 2), place.y + place.height / 2];
        }})()""")
    return left + x, top + y


def opened(tab: Tab, log: EventLog, folder: Path) -> None:
    """Open the page of a log of this test."""
    make_page([("log", log)]).save(folder / "own.html")
    tab.open((folder / "own.html").as_uri())


def begin_of(log: EventLog) -> float:
    return min(e.start_us for e in log.events)


def words_of(tab: Tab, selector: str) -> str:
    """Return the text of an element, with plain spaces."""
    return tab.text(selector).replace("\u00a0", " ")


# --- Opened ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "dark"), [(WIDE, False), (NARROW, True)], ids=["wide", "narrow and dark"])
def test_every_pane_shows_its_colors(
    size: tuple[int, int], dark: bool, tab: Tab, pages: dict[str, str]
) -> None:
    tab.look(size[0], 3600 if size is NARROW else size[1], dark=dark)
    tab.open(f"{pages['one']}#t=0.2")
    for op in ("forward", "backward", "all_gather"):
        assert pixels(tab, TIMELINE, page_data.OPS_LOOKS[op].color) > 30, op
    for kind in ("sharded_param", "optimizer_state", "unsharded_param"):
        assert pixels(tab, "#memory canvas", page_data.KINDS_LOOKS[kind].color) > 30, kind
    assert pixels(tab, "#parameters .scroller canvas", page_data.STATES_LOOKS["sharded"].color) > 100
    assert tab.run("document.documentElement.scrollWidth") <= size[0]
    paper = tab.run("getComputedStyle(document.documentElement).getPropertyValue('--paper').trim()")
    assert paper == ("#17181b" if dark else "#ffffff") and pixels(tab, "body", paper) > 10_000


@pytest.mark.parametrize("size", [NARROW, (1000, 600)], ids=["phone", "low frame"])
def test_the_buttons_stay_in_view_with_the_whole_text_of_the_event_and_are_large_enough_for_fingers(
    size: tuple[int, int], tab: Tab, pages: dict[str, str]
) -> None:
    tab.look(*size)
    tab.open(pages["one"])
    smallest = """Math.min(...[...document.querySelectorAll('button, select, summary')]
        .map((e) => e.getBoundingClientRect()).map(({width, height}) => Math.min(width, height)))"""
    assert tab.run(smallest) >= 40 or size != NARROW
    for place in ("0", "1e6"):
        tab.key("ArrowRight")
        tab.run(f"scrollTo(0, {place})")
        tab.drawn()
        _, top, _, height = box(tab, "#controls")
        assert 0 <= top and top + height <= size[1]
        assert tab.run("(({scrollHeight: a, clientHeight: b}) => a - b)(document.querySelector('#now'))") == 0


def test_a_log_cannot_run_scripts_in_the_page_through_its_names(tab: Tab, pages: dict[str, str]) -> None:
    tab.open(pages["hostile"])
    for key in ("ArrowRight", "g", "ArrowRight", "?"):
        tab.key(key)
    tab.mouse("mouseMoved", *place_of(tab, "all_gather"))
    assert tab.run("window.harmed") is None
    assert HOSTILE in tab.text("#code")


def test_tables_and_spoken_text_agree_with_the_panes(tab: Tab, log: EventLog) -> None:
    tables = tab.text("#tables")
    for part in ("time of one step", "parameter groups", "whole weights, gathered", "blocks.2.up.weight"):
        assert part in tables
    for kind, nbytes in log.summary()["peak_bytes_by_kind"].items():
        assert not nbytes or f"{kind}{nbytes:,}" in tables
    tab.key("ArrowRight")
    assert tab.text("#spoken").split(".")[0] in tab.text("#code .event")
    slider = "document.querySelector('#timeline .scroller canvas').getAttribute('aria-valuetext')"
    assert tab.run("nameOf(state.event)") in tab.run(slider)
    unnamed = """[...document.querySelectorAll('canvas[role], button, select, [tabindex]')].filter(e =>
        !(e.getAttribute('aria-label') || e.labels?.length || e.matches('button') && e.textContent.trim())).length"""
    assert tab.run(unnamed) == 0


# --- One cursor --------------------------------------------------------------------------------------------


def test_arrow_keys_go_through_all_events_of_a_rank_in_their_order(tab: Tab, log: EventLog) -> None:
    drawn = [e for e in log.events if e.rank == 0 and e.op in style.DRAWN_OPS]
    order = [e.seq for e in sorted(drawn, key=lambda e: (round(e.start_us, 1), e.seq))]
    all_steps = """(() => { state.lookAt(0, 0); state.seek(0); state.event = null; const found = [];
        while (state.step(1)) found.push(state.event.seq); return found; })()"""
    assert tab.run(all_steps) == order
    tab.key("ArrowLeft")
    tab.key("ArrowDown")
    assert tab.run("state.rank") == 1
    tab.run("state.choose(state.log.events.find((e) => e.owner === 'blocks.1' && e.op === 'copy_in'))")
    tab.key("g")
    tab.key("ArrowRight")  # the next event of this group
    assert tab.run("[state.group, state.event.owner, state.event.op]") == ["blocks.1"] * 2 + ["all_gather"]


def test_the_page_shows_the_states_of_the_lifetimes_at_every_moment(tab: Tab, log: EventLog) -> None:
    found = [
        e for e in (*find_lifetimes(log.events), *find_reductions(log.events)) if e.end_us - e.start_us > 1
    ]
    assert {each.state for each in found} >= {"gathering", "full", "freed", "reducing"}
    for each in found:
        middle = (each.start_us + each.end_us) / 2 - begin_of(log)
        shown = tab.run(f"state.log.stateOf({each.rank}, '{each.owner}', {middle})")
        assert shown["reducing"] if each.state == "reducing" else shown["params"] == each.state, each


def test_the_page_deals_out_rows_as_chunk_extent_does(tab: Tab) -> None:
    for count, ranks in itertools.product(range(8), range(1, 6)):
        for rank in range(ranks):
            start, length = chunk_extent(count, ranks, rank)
            assert tab.run(f"rowsOf({count}, {ranks}, {rank})") == {"start": start, "length": length}


def test_memory_under_the_cursor_is_the_last_sample_and_a_button_leads_to_the_peak(
    tab: Tab, log: EventLog
) -> None:
    samples = {
        round(s.us - begin_of(log), 1): s.bytes_by_kind for s in log.samples[1]
    }  # the last at a moment
    for us, alive in [*samples.items()][:: max(1, len(samples) // 10)]:
        shown = tab.run(f"state.log.bytesAt(1, {us})")
        assert Counter(shown) == Counter(alive)
    peak = max(log.samples[0], key=lambda sample: sum(sample.bytes_by_kind.values()))
    total = sum(peak.bytes_by_kind.values())
    most = [total, log.summary()["peak_unsharded_bytes"]]
    assert tab.run("[state.log.peaks.get(0).total, state.log.closedForm]") == most
    tab.press(".moment")
    assert tab.run("state.t") == pytest.approx(peak.us - begin_of(log), abs=0.1)
    said = words_of(tab, ".moment")
    stays = sum(peak.bytes_by_kind.get(k, 0) for k in ("sharded_param", "optimizer_state", "sharded_grad"))
    assert f"{tab.run(f'bytesText({stays}, {total})')} of shards" in said
    for kind in ("all_gather_buffer", "unsharded_param", "reduce_scatter_buffer"):
        assert f"{tab.run(f'bytesText({peak.bytes_by_kind[kind]}, {total})')} {kind}" in said


def test_the_line_that_issued_the_event_is_marked_in_its_function(tab: Tab) -> None:
    tab.run("state.choose(state.log.events.find((e) => e.op === 'copy_out'))")
    tab.drawn()
    assert "copy_out" in tab.text("#code mark")
    assert "Copy the gathered data" in tab.text("#code .promise")
    (_, top, _, height), (_, first, _, room) = box(tab, "#code mark"), box(tab, "#code ol")
    assert first <= top and top + height <= first + room
    tab.press("#code .place")  # the outermost call
    assert tab.run("document.querySelector('#code .place').getAttribute('aria-pressed')") == "true"


# --- Pointer and window ------------------------------------------------------------------------------------


def test_the_wheel_zooms_around_the_pointer_and_keys_around_the_cursor(tab: Tab) -> None:
    x, y = place_of(tab, "backward")
    under = f"state.panes[0].time({x - box(tab, TIMELINE)[0]})"
    before, span = tab.run(under), tab.run("state.span")
    tab.mouse("mouseWheel", x, y, deltaX=0, deltaY=-300)
    assert tab.run("state.span") < 0.6 * span and tab.run(under) == pytest.approx(before, abs=0.002 * span)
    tab.key("0")
    assert tab.run("state.span") == pytest.approx(span)
    tab.run("state.seek(state.end / 2)")
    tab.key("+")
    middle = tab.run("(state.t - state.from) / state.span")
    tab.key("+")
    assert tab.run("(state.t - state.from) / state.span") == pytest.approx(middle, abs=0.01)


def test_pointing_at_an_event_tells_of_it_and_clicking_chooses_it(tab: Tab) -> None:
    hidden = "document.querySelector('#tip').hidden"
    assert tab.run(hidden)
    tab.mouse("mouseMoved", *place_of(tab, "all_gather"))
    assert tab.run("state.hovered.op") == "all_gather"
    for part in ("all_gather of", "rank 0, all_gather stream", "waits for copy_in"):
        assert part in tab.text("#tip")
    tab.run(
        """state.panes[0].drawArrow = (context, from, to) => (window.arrows ??= []).push([from.seq, to.seq]);
        state.panes[0].draw();"""
    )
    ends = """(({seq, waitsFor, waitedForBy}) =>
        [...waitsFor.map((e) => [e.seq, seq]), ...waitedForBy.map((e) => [seq, e.seq])])"""
    assert tab.run("window.arrows") == tab.run(f"{ends}(state.hovered)")  # its own arrows alone
    tab.click(*place_of(tab, "all_gather"))
    assert tab.run(hidden)  # the pane Code says it now, and the tip would lie on it
    assert tab.run("[state.event === state.hovered, state.t === state.event.start]") == [True, True]


def test_a_tap_chooses_an_event_and_fingers_zoom_move_and_scrub(tab: Tab, pages: dict[str, str]) -> None:
    tab.look(*NARROW)
    tab.touching(True)
    tab.open(pages["one"])
    tab.run(f"document.querySelector('{TIMELINE}').scrollIntoView({{block: 'center'}})")
    tab.tap(*place_of(tab, "backward"))
    assert tab.run("state.event.op") == "backward"
    left, top, width, _ = box(tab, TIMELINE)
    x, y, span = left + width / 2, top + 90, tab.run("state.span")
    tab.touch((x - 15, y))
    for apart in (15, 40, 60, 80):
        tab.touch((x - apart, y), (x + apart, y))
    tab.touch()
    assert tab.run("state.span") < 0.5 * span
    for low, moved in ((y, "state.from"), (top + 8, "state.t")):  # the ruler scrubs
        before = tab.run(moved)
        for place in (40, 20, 0, -20, -40):
            tab.touch((x + place, low))
        tab.touch()
        assert tab.run(moved) != before, moved
    tab.touching(False)


# --- Playing -----------------------------------------------------------------------------------------------


def test_playing_moves_the_cursor_to_the_end_and_space_pauses(tab: Tab) -> None:
    tab.key(" ")
    tab.until("state.t > 0")
    tab.key(" ")
    assert tab.run("state.playing") is False
    t = tab.run("state.t")
    tab.drawn()
    assert tab.run("state.t") == t > 0
    tab.run("state.change({speed: 1000}); document.querySelector('#play').click()")
    tab.until("state.t === state.end && !state.playing")


def test_a_link_leads_to_a_moment_and_the_address_follows_the_cursor(tab: Tab, pages: dict[str, str]) -> None:
    tab.open(f"{pages['one']}#t=0.25&rank=1")
    assert tab.run("[state.t, state.rank]") == [250, 1] and "where the link points" in tab.text("#begin")
    tab.key("ArrowRight")
    t = tab.run("state.t")
    tab.until(f"location.hash === '#t={t / 1e3:.4f}&rank=1'")
    for address in ("#t=nonsense", "#t=1e99", "#t=0.1&rank=77", "#t=0.1&log=b", "#rank=1"):
        tab.open(f"{pages['one']}{address}")
        assert 0 <= tab.run("state.t") <= tab.run("state.end")
        assert ("no moment of this log" in tab.text("#begin")) == ("t=" in address)


# --- Two logs ----------------------------------------------------------------------------------------------


def test_two_logs_share_one_clock_and_the_page_opens_where_they_part(tab: Tab, pages: dict[str, str]) -> None:
    tab.open(pages["two"])
    head = tab.text("#head") + tab.text("#about")
    for part in ("A: a.json", "B: b.json", "exposed communication", "most bytes alive"):
        assert part in head
    parting: Any = tab.run("state.parting.map((event) => event && [event.log.side, event.op, event.owner])")
    assert parting[0] != parting[1] and [each[0] for each in parting] == [0, 1]
    assert f"in A it is the {parting[0][1]} of {parting[0][2]}" in head
    assert tab.run("state.event === state.parting[0]")
    assert "A and B do not share" in tab.text("#begin")
    bands = tab.run("state.panes[0].rows.filter((r) => r.kind === 'band').map((r) => [r.log.side, r.rank])")
    assert bands == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert tab.run("state.logs.map((log) => Math.min(...log.events.map((e) => e.start)))") == [0, 0]
    tab.key("ArrowDown")
    tab.key("ArrowDown")
    assert tab.run("[state.side, state.rank]") == [1, 0]


# --- Waits -------------------------------------------------------------------------------------------------


def test_a_page_opens_at_the_longest_wait_for_a_gather_that_the_order_explains_and_says_why(tab: Tab) -> None:
    """Both ranks wait equally long, but rank 0 for rank 1, which begins later."""
    assert tab.run("[state.event.op, awaited(state.event).op, state.event.rank]") == ["wait", "all_gather", 1]
    lengths = tab.run("longestWaits(state.log, Infinity, 'all_gather').map((e) => e.end - e.start)")
    assert tab.run("state.event.end - state.event.start") == pytest.approx(lengths[0])
    said = tab.text("#code")
    assert "Compute stands still" in said and "waits for all_gather of" in said


def test_a_page_opens_at_the_longest_wait_if_the_others_are_less_than_a_hundredth_of_a_step(
    tab: Tab, tmp_path: Path
) -> None:
    rows = [("all_gather", "all_gather", 0, 900, {}), ("wait", "compute", 0, 900, {"after": (0,)})]
    rows += [("all_gather", "all_gather", 995, 1000, {}), ("wait", "compute", 995, 1000, {"after": (2,)})]
    events = [*events_of(0, *rows), *events_of(1, ("all_gather", "all_gather", 800, 900, {}))]
    opened(tab, EventLog(events), tmp_path)
    assert tab.run("[state.event.op, state.event.start]") == ["wait", 0]


def test_a_collective_begins_when_its_last_rank_joins(tab: Tab) -> None:
    for rank, waited in ((0, f"Math.min({APART}, event.end - event.start)"), (1, "0")):
        event = f"const event = state.log.events.find((e) => e.op === 'all_gather' && e.rank === {rank})"
        assert tab.run(
            f"(() => {{ {event}; return state.log.joinedAt(event) - event.start === {waited}; }})()"
        )


# --- Predictions -------------------------------------------------------------------------------------------


def test_the_page_predicts_the_step_without_freeing_after_the_forward(tab: Tab) -> None:
    freed, kept = step(), step(reshard=False)
    gathered = [sum(e.bytes for e in log.select("all_gather")) for log in (kept, freed)]
    whole = [log.summary()["peak_unsharded_bytes"] for log in (kept, freed)]
    said = words_of(tab, "#otherwise")
    for now, before in (gathered, whole):
        words = [tab.run(f"bytesText({nbytes}, {max(now, before)})") for nbytes in (now, before)]
        assert words[0] != words[1] and re.search(f"{words[0]}[^.]* instead of {words[1]}", said), said
    assert not kept.select("all_gather", phase="backward")
    assert "backward would need no all_gather_buffer" in said


def test_the_page_predicts_no_gathers_where_a_single_rank_has_all_rows(
    tab: Tab, log: EventLog, tmp_path: Path
) -> None:
    alone = {"shards": 1, "replicas": RANKS, "gathered_again_from": 1}
    groups = [group | alone for group in log.about["groups"]]
    opened(tab, EventLog(log.events, log.samples, {**log.about, "groups": groups}), tmp_path)
    assert tab.text("#otherwise") == ""
