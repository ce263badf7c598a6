"""The step player: the packed data match the log, places lead to the right line, and the page loads nothing else.

test_player_page tests the behavior of the page in a real browser.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from commands import assert_refused, said_by
from figures import events_of, training_log

from hwfsdp import Event, EventLog, UsageError, record
from hwfsdp.observe.analysis import expect_peak, times_of_steps
from hwfsdp.observe.group_states import Lifetime, find_lifetimes, find_reductions
from hwfsdp.observe.events import Sample
from hwfsdp.observe.call_sites import MOST, CallSites
from hwfsdp.observe.run_info import GroupAbout, ParamAbout
from hwfsdp.plot.player import page_data
from hwfsdp.plot.player.page_data import pack
from hwfsdp.plot.player.page import make_page
from hwfsdp.train.models import GPTConfig
from hwfsdp.virtual import simulate

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


@pytest.fixture(scope="module")
def log() -> EventLog:
    """Simulate a step of a small GPT. Return rank 0 of four virtual GPUs."""
    return simulate(GPTConfig(dim=64, layers=3, heads=2, seq_len=32), gpus=4, batch=2, seq=32).log


def unpacked(packed: dict[str, Any], owners: list[str]) -> Iterator[Event]:
    """Yield the events in a page, which have no accesses to memory."""
    tables = packed["tables"]
    for i, seq in enumerate(packed["seq"]):
        yield Event(
            *(packed["rank"][i], seq, tables["ops"][packed["op"][i]], tables["streams"][packed["stream"][i]]),
            *(owners[packed["owner"][i]], tables["phases"][packed["phase"][i]], packed["step"][i]),
            *(tables["dtypes"][packed["dtype"][i]], packed["bytes"][i]),
            *(packed["start"][i], packed["dur"][i], tuple(packed["after"].get(str(i), ()))),
        )


# --- Packing -----------------------------------------------------------------------------------------------


def test_columns_give_back_every_event_from_the_first_on_to_a_tenth_of_a_microsecond(log: EventLog) -> None:
    (packed,) = pack([("x", log)])["logs"]
    begin = min(e.start_us for e in log.events)
    for event, found in zip(log.events, unpacked(packed["events"], packed["owners"]), strict=True):
        assert found.start_us == pytest.approx(event.start_us - begin, abs=0.051)
        assert found.dur_us == pytest.approx(event.dur_us, abs=0.051)
        times = {"start_us": 0.0, "dur_us": 0.0}
        assert replace(found, **times) == replace(event, **times, reads=(), writes=(), code="")


def test_times_of_steps_equal_each_step_alone_and_have_the_means_of_the_summary() -> None:
    log = training_log(2, 3)
    found, summary = times_of_steps(log), log.summary()
    alone = [EventLog(log.select(step=step)).summary()["exposed_comm_us"] for step in (0, 1)]
    assert found.exposed_comm_us == pytest.approx(alone)
    ends = [max(e.end_us for e in log.select("optimizer", step=step)) for step in (0, 1)]
    assert found.step_us == pytest.approx([ends[0], ends[1] - ends[0]])
    for which in ("step_us", "exposed_comm_us"):
        assert fmean(getattr(found, which)) == pytest.approx(summary[which])
    (packed,) = pack([("x", log)])["logs"]
    assert packed["times"] == found._asdict()


def test_states_of_groups_in_the_player_equal_the_lifetimes(log: EventLog) -> None:
    (packed,) = pack([("x", log)])["logs"]
    states, begin = packed["states"], min(e.start_us for e in log.events)
    found = [
        (packed["owners"][owner], states["names"][state], start, end)
        for owner, state, start, end in zip(
            *(states[name] for name in ("owner", "state", "start", "end")), strict=True
        )
    ]
    expected = [
        (each.owner, each.state, round(each.start_us - begin, 1), round(each.end_us - begin, 1))
        for each in (*find_lifetimes(log.events), *find_reductions(log.events))
    ]
    assert found == expected and {state for _, state, *_ in found} >= {"gathering", "full", "reducing"}


def test_states_are_left_out_where_no_event_shows_their_end(log: EventLog) -> None:
    for missing in (("copy_out", "alloc"), ("free",)):
        (packed,) = pack([("x", EventLog([e for e in log.events if e.op not in missing]))])["logs"]
        assert packed["states"]["state"] == []


def test_a_log_without_events_or_with_too_many_for_a_page_is_refused(
    log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="the player of x.*got 0"):
        make_page([("x", EventLog())])
    monkeypatch.setattr(page_data, "MOST_EVENTS", 10)
    with pytest.raises(UsageError, match="--rank, --step"):
        make_page([("x", log)])


def test_of_two_logs_the_nth_steps_begin_together_and_all_else_stays_as_it_is() -> None:
    fast, slow = training_log(2, 1, steps=3), training_log(2, 3, steps=2)
    fast.samples[0] = [Sample(us, {"sharded_param": round(us)}) for us in range(0, 14000, 1000)]
    both = pack([("a", fast), ("b", slow)])["logs"]
    alone = [pack([("a", log)])["logs"][0] for log in (fast, slow)]
    begins = {0: {0: 0, 1: 16000, 2: 24000}, 1: {0: 0, 1: 16000}}
    for number, log in enumerate((fast, slow)):
        own, aligned = alone[number]["events"], both[number]["events"]
        gap = {step: begins[number][step] - log.select(step=step)[0].start_us for step in {*own["step"]}}
        assert own["start"] == [e.start_us for e in log.events]
        assert aligned == own | {"start": [us + gap[n] for us, n in zip(own["start"], own["step"])]}
        assert both[number]["times"] == alone[number]["times"]
    taken = both[0]["samples"]["0"]
    gaps = [0] * 8 + [begins[0][1] - 8000] * 2  # of the fast log's second step
    assert [us - n for us, n in zip(taken["us"], taken["kinds"]["sharded_param"])][:10] == gaps


# --- The closed form of whole parameters -------------------------------------------------------------------


def group(fqn: str, rows: int, again: int, shards: int = 2) -> GroupAbout:
    prefix = "" if fqn == "GPT" else f"{fqn}."
    param = ParamAbout(f"{prefix}weight", (rows, 10), "float32", "float32", 4, "float32", 4, True)
    return GroupAbout(fqn, shards, 1, again, (param,))


ROOT = group("GPT", 6, 0)


def test_the_closed_form_of_the_peak_sums_the_groups_that_are_whole_at_once() -> None:
    for groups, rows in [
        ([ROOT, group("a", 2, 2), group("b", 8, 2), group("c", 4, 2)], 6 + 8),  # one block at a time
        ([ROOT, group("a", 2, 0), group("b", 8, 0), group("c", 4, 0)], 6 + 2 + 8 + 4),  # all stay
        # the first passes before others stay
        ([ROOT, group("a", 8, 2), group("b", 4, 0), group("c", 2, 0)], 6 + 8),
        ([ROOT, group("a", 2, 0), group("b", 8, 2), group("b.x", 4, 2)], 6 + 2 + 8 + 4),  # around one another
        ([group("a", 3, 2, shards=2)], 4),  # rows are padded
        ([ROOT, group("a", 8, 2, shards=4)], None),  # kept on fewer ranks than it has
        ([ROOT, group("a", 8, 2), group("GPT", 6, 0)], None),  # two models
    ]:
        assert expect_peak(groups) == (None if rows is None else rows * 40)


def test_a_step_reaches_the_closed_form_and_no_more(log: EventLog) -> None:
    (packed,) = pack([("x", log)])["logs"]
    assert packed["closed_form"] == log.summary()["peak_unsharded_bytes"] > 0


# --- States where an implementation names nobody ------------------------------------------------------------


def test_unnamed_memory_belongs_to_the_group_whose_forward_reads_it() -> None:
    rows = [
        ("all_gather", "all_gather", 100, 900, {"owner": "a"}),
        ("alloc", "compute", 910, 910, {"writes": (1,)}),
        ("alloc", "compute", 915, 915, {"writes": (2,)}),
        ("forward", "compute", 1000, 2000, {"owner": "a", "reads": (1, 2)}),
        ("free", "compute", 2100, 2100, {"writes": (1,)}),
        ("free", "compute", 2200, 2200, {"writes": (2,)}),
        ("free", "compute", 2300, 2300, {"writes": (3,)}),
        ("optimizer", "compute", 2400, 2500),
    ]
    states = [each[2:] for each in find_lifetimes(events_of(0, *rows))]
    assert states == [("gathering", 100, 910), ("full", 910, 2200), ("freed", 2200, 2500)]


def test_a_reduction_lasts_from_its_copy_in_and_an_all_reduce_counts_by_itself() -> None:
    rows = [
        ("copy_in", "compute", 0, 10, {"owner": "a"}),
        ("reduce_scatter", "reduce_scatter", 20, 30, {"owner": "a"}),
        ("all_reduce", "all_reduce", 30, 45, {"owner": "a"}),
        ("all_reduce", "all_reduce", 50, 60),
        ("copy_in", "copy", 60, 70, {"owner": "a"}),
    ]
    found = find_reductions(events_of(1, *rows))
    assert found == [Lifetime(1, "a", "reducing", 0, 30), Lifetime(1, "a", "reducing", 30, 45)]


# --- Places ------------------------------------------------------------------------------------------------


def code_of(packed: dict[str, Any], index: int) -> tuple[dict[str, Any], int, int]:
    """Return the function that issued an event, its line, and the number of calls around it."""
    places = packed["places"][packed["logs"][0]["events"]["code"][index]]
    name, line = places[0]
    return packed["functions"][name], line, len(places)


def test_an_event_leads_to_the_line_of_the_core_that_issued_it(log: EventLog) -> None:
    packed = pack([("x", log)])
    for op, function, line in [
        ("all_gather", "all_gather", "transport.all_gather(flat"),
        ("wait", "ParamGroup.wait_for_gather", "compute.wait("),
        ("reduce_scatter", "reduce_scatter", "transport.reduce_scatter(result"),
        ("forward", "FSDPState.pre_forward", 'moment("pre_forward"'),
    ]:
        found = set()
        for index in (i for i, e in enumerate(log.events) if e.op == op):
            said, at, calls = code_of(packed, index)
            if said["function"] == function and said["file"].startswith("hwfsdp/core/"):
                found.add(said["lines"][at - said["first"]].strip())
                assert said["promise"] and calls <= MOST
        assert any(line in text for text in found), found


OWN = '''"""A user's script."""
import torch


class Trainer:
    def step(self):
        """Make one step. And more."""
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        weight.grad = torch.ones(2)
        optimizer.step()
'''


@pytest.fixture
def own(tmp_path: Path) -> tuple[Path, EventLog]:
    """Write a user's file, run a step of it, and return the file and the log."""
    file = tmp_path / "own.py"
    file.write_text(OWN)
    names: dict[str, Any] = {}
    exec(compile(OWN, str(file), "exec"), names)
    with record() as log:
        names["Trainer"]().step()
    return file, log


def step_of(log: EventLog) -> tuple[dict[str, Any], int]:
    """Return the function that issued the optimizer's step, and its line."""
    (index,) = [i for i, e in enumerate(log.events) if e.op == "optimizer"]
    return code_of(pack([("x", log)]), index)[:2]


def test_an_event_leads_to_the_line_of_a_users_own_file(own: tuple[Path, EventLog]) -> None:
    said, line = step_of(own[1])
    assert (said["function"], line, said["first"]) == ("Trainer.step", 11, 6)
    assert said["lines"] == OWN.splitlines()[5:11] and said["promise"] == "Make one step."
    assert said["file"].endswith("/own.py") and said["file"].count("/") == 1


def test_code_is_left_out_if_its_file_has_changed_since_the_run(own: tuple[Path, EventLog]) -> None:
    file, log = own
    log.save(file.with_name("x.json"))
    for change, why in [
        (lambda: file.write_text(f"\n{OWN}"), "the file has changed since the recording"),
        (lambda: file.unlink(), "the file is not on the machine that wrote this page"),
    ]:
        change()
        said, _ = step_of(EventLog.load(file.with_name("x.json")))
        assert "lines" not in said and said["missing"] == why and said["function"] == "Trainer.step"


def test_places_survive_the_file_and_the_merge(own: tuple[Path, EventLog], tmp_path: Path) -> None:
    file, log = own
    merged = EventLog.merge([log, EventLog([replace(e, rank=1) for e in log.events])])
    assert "code" not in merged.about  # files are read when a log is written
    merged.save(tmp_path / "x.json")
    read = EventLog.load(tmp_path / "x.json")
    assert read == merged and str(file) in read.code
    without = EventLog([replace(e, code="") for e in read.events])  # as logs from before places
    assert set(pack([("x", without)])["logs"][0]["events"]["code"]) == {0}


def test_files_of_one_module_name_have_places_of_their_own() -> None:
    places, installed = CallSites(), str(Path(torch.__file__).with_name("made_up.py"))
    for path, module in [
        (installed, "__main__"),
        (installed, "made_up"),
        ("train.py", "__main__"),
        ("train.py", "mine"),
    ]:
        names: dict[str, Any] = {"__name__": module}
        exec(compile("def step(inner): return inner()", path, "exec"), names)
        place = names["step"](lambda: places.here()).partition(" < ")[0]
        assert (place == "train.py:1 step") if path == "train.py" else ("step" not in place)


# --- The page ----------------------------------------------------------------------------------------------


class Elements(HTMLParser):
    """The elements of a page, in order: tag and attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def data_of(page: str) -> Any:
    """Return the page's data, which are JSON in their own element."""
    (data,) = re.findall(r'id="data"[^>]*>(.*?)</script>', page, re.DOTALL)
    return json.loads(data)


def test_the_page_is_one_file_that_asks_for_nothing(log: EventLog) -> None:
    page = make_page([("x", log)])
    found = Elements(page.text)
    asked = [attrs for _, attrs in found.tags if {"src", "href", "srcset", "action"} & attrs.keys()]
    icon = [attrs["href"] for attrs in asked if attrs.get("rel") == "icon"]
    assert len(asked) == 1 and str(icon[0]).startswith("data:image/svg+xml,")
    assert "url(" not in page.text and "import(" not in page.text
    (policy,) = [a["content"] for t, a in found.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert str(policy).startswith("default-src 'none'")
    assert len(page.text) < 1.5e6


def test_names_in_a_log_stay_data(log: EventLog) -> None:
    hostile = EventLog([replace(e, owner=HOSTILE) for e in log.events], log.samples, log.about)
    harmless, page = (make_page([(name, each)]).text for name, each in (("x", log), (HOSTILE, hostile)))
    assert [tag for tag, _ in Elements(page).tags] == [tag for tag, _ in Elements(harmless).tags]
    assert HOSTILE in data_of(page)["logs"][0]["owners"]


def test_a_notebook_gets_the_page_in_a_frame_of_its_own(log: EventLog, tmp_path: Path) -> None:
    page = log.view()
    (tag, attrs), *rest = Elements(page._repr_html_()).tags
    assert tag == "iframe" and not rest
    assert (attrs["srcdoc"], attrs["sandbox"]) == (page.text, "allow-scripts")
    assert attrs["title"] == page.title == "Step player: log"
    page.save(tmp_path / "x.html")
    assert (tmp_path / "x.html").read_text() == page.text
    assert log.view(log).title == "Step player: A and B"


# --- The command -------------------------------------------------------------------------------------------


def test_export_writes_a_page_of_one_trace_or_of_two_or_of_one_rank_and_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json.gz"
    for file in (first, second):
        training_log(3, 2).save(file)
    said = said_by(capsys, "trace", "export", first, "--to", "html", "--rank", 2, "--step", 1)
    assert (said.status, said.out) == (0, f"Written to {tmp_path / 'a.html'}\n")
    one = data_of((tmp_path / "a.html").read_text())
    (packed,) = one["logs"]
    assert packed["name"] == "a.json" and "comparison" not in one
    assert ({*packed["events"]["rank"]}, {*packed["events"]["step"]}) == ({2}, {1})
    assert said_by(capsys, "trace", "export", first, second, "--to", "html").status == 0
    both = data_of((tmp_path / "a-b.html").read_text())
    assert [each["name"] for each in both["logs"]] == ["a.json", "b.json.gz"]
    assert both["comparison"]["same_order"]


def test_a_log_that_cannot_become_a_page_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, empty, nowhere = (tmp_path / f"{name}.json" for name in ("a", "empty", "nowhere"))
    training_log(1, 1).save(a)
    empty.write_text('{"traceEvents": []}')
    for arguments, words in [
        ([empty], empty.name),
        ([a, nowhere], nowhere.name),
        ([a] * 4, "or two to compare; got 4"),
        ([a, "--out", a], "a file other than"),
        ([a, "--rank", 7], "ranks [0]"),
    ]:
        assert_refused(said_by(capsys, "trace", "export", *arguments, "--to", "html"), words)
    assert_refused(said_by(capsys, "trace", "export", a, a, "--to", "png"), "one trace; got 2")
    assert list(tmp_path.glob("*.html")) == []
