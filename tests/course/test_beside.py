"""A failed check of a station writes a page: the learner's run beside the reference's, opened at the place in the verdict."""

from __future__ import annotations

import gzip
import inspect
import json
import pickle
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from hwfsdp import EventLog
from hwfsdp.core.group import ParamGroup
from hwfsdp.course import beside, checking
from hwfsdp.course.beside import LOGS, STATIONS, record_reference, write_page
from hwfsdp.course.checklist import checks_of
from hwfsdp.course.grade import Options, grade
from hwfsdp.course.manifest import find_course
from hwfsdp.course.report import Style, shown
from hwfsdp.course.run import Run
from hwfsdp.course.stations import machines
from hwfsdp.course.stations.clocked import GPU
from hwfsdp.course.stations.stages import stage
from hwfsdp.course.stations.watching import Watch
from hwfsdp.course.submission import Source, find_source
from hwfsdp.course.verdict import CheckResult, Finding, Grade, Seen
from hwfsdp.observe.events import Event
from hwfsdp.virtual.allocator import Allocator
from hwfsdp.virtual.clock import Clock

COURSE = find_course(Path(__file__))
REFERENCE: dict[str, Any] = json.loads(gzip.decompress(LOGS.read_bytes()))
OWN = '"""A learner\'s file."""\n\n\ndef gather():\n    """Gather it."""\n    return "mine alone"\n'


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    """Write a learner's file in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_fsdp.py").write_text(OWN)
    return Source(tmp_path / "my_fsdp.py", OWN)


def failed(number: str, machine: str, us: float | None, place: str = "") -> Grade:
    """Make a verdict whose first check fails in a run. The run is the reference's, as if `place` had issued its events."""
    log = REFERENCE[number][machine]
    log = {**log, "events": [{**event, "code": place} for event in log["events"]]}
    exercise = COURSE.exercise(number)
    results = [CheckResult(check, passed=True) for check in checks_of(exercise)]
    results[0].passed = False
    results[0].finding = Finding("not-prefetched", "5 of 5.").at(Seen(machine, log, us))
    return Grade(exercise, results, "failed")


class _Data(HTMLParser):
    """The data of a page."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.text, self._inside = "", False
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = ("id", "data") in attrs

    def handle_data(self, data: str) -> None:
        self.text += data if self._inside else ""


def data_of(page: Path | None) -> Any:
    assert page is not None
    return json.loads(_Data(page).text)


def test_a_failed_run_stands_beside_the_references_and_opens_at_its_moment(source: Source) -> None:
    second = [e for e in REFERENCE["09"]["host"]["events"] if e["op"] == "all_gather"][1]
    page = write_page(failed("09", "host", second["start_us"]), source)
    assert page == Path("runs", "check", "09.html")
    found = data_of(page)
    assert [log["name"] for log in found["logs"]] == ["yours", "the reference"]
    begin = min(e["start_us"] for e in REFERENCE["09"]["host"]["events"])
    assert found["start"]["us"] == pytest.approx(second["start_us"] - begin, abs=0.1)
    assert (found["start"]["rank"], found["start"]["said"]) == (0, "09.exposed: 5 of 5.")


def test_a_finding_about_memory_opens_at_the_peak(source: Source) -> None:
    log = data_of(write_page(failed("10", "host", None), source))
    us, memory = (log["logs"][0]["samples"]["0"][key] for key in ("us", "kinds"))
    [alive] = memory.values()
    assert log["start"]["us"] == us[alive.index(max(alive))]


def test_the_page_shows_the_learners_code_and_none_of_the_references(source: Source) -> None:
    found = data_of(write_page(failed("09", "host", 0.0, f"{source.path.name}:6 gather"), source))
    mine, theirs = ({*log["events"]["code"]} for log in found["logs"])
    assert 0 not in mine and theirs == {0}
    assert [each.get("lines") for each in found["functions"].values()] == [OWN.splitlines()[3:]]


def test_no_code_but_the_learners_own_is_shown(source: Source) -> None:
    line = inspect.getsourcelines(ParamGroup.unshard)[1] + 1
    other = f"hwfsdp/core/group.py:{line} ParamGroup.unshard < {LOGS.with_name('my_fsdp.py')}:3 f"
    found = data_of(write_page(failed("09", "host", 0.0, other), source))
    assert len(found["functions"]) == 2 and all("lines" not in each for each in found["functions"].values())


def test_a_check_that_passes_removes_the_page(source: Source) -> None:
    page = write_page(failed("08", "gpu", 0.0), source)
    assert page is not None and page.exists()
    passed = Grade(COURSE.exercise(8), [], "passed")
    assert write_page(passed, source) is None and not page.exists()


def test_a_verdict_names_its_page_in_one_line(source: Source) -> None:
    verdict = failed("08", "order", 0.0)
    page = write_page(verdict, source)
    text = shown(verdict, Path("my_fsdp.py"), Style(), {}, page)
    assert [line for line in text.splitlines() if "08.html" in line] == [
        "  See it, beside the reference: open runs/check/08.html in a browser."
    ]
    assert "html" not in shown(verdict, Path("my_fsdp.py"), Style())


def test_an_unwritable_folder_leaves_out_the_page_and_raises_nothing(source: Source) -> None:
    Path("runs").write_text("in the way")
    assert checking._write_page(failed("09", "host", 0.0), source.path.parent) is None


def test_a_finding_that_travels_between_graders_leaves_its_run_behind() -> None:
    finding = failed("09", "host", 0.0).results[0].finding
    assert finding is not None and finding.seen is not None
    assert pickle.loads(pickle.dumps(finding)).seen is None


def test_the_references_logs_are_of_every_machine_and_name_no_place() -> None:
    assert {number: tuple(logs) for number, logs in REFERENCE.items()} == STATIONS
    events = [e for logs in REFERENCE.values() for log in logs.values() for e in log["events"]]
    assert {e["code"] for e in events} == {""} and {e["op"] for e in events} >= {
        "forward",
        "backward",
        "wait",
    }


@pytest.mark.long
def test_the_references_logs_match_the_reference_today(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beside, "LOGS", tmp_path / "logs.gz")
    monkeypatch.setattr(beside, "STATIONS", {"09": STATIONS["09"]})
    record_reference()
    found = json.loads(gzip.decompress((tmp_path / "logs.gz").read_bytes()))["09"]
    names = ("op", "stream", "owner", "phase", "bytes")
    for machine, log in found.items():
        now, kept = (
            [tuple(e[name] for name in names) for e in each["events"] if e["op"] not in ("alloc", "free")]
            for each in (log, REFERENCE["09"][machine])
        )
        assert now == kept, machine


@pytest.mark.long
def test_the_file_of_the_station_before_is_shown_at_a_gather_that_nothing_hides(tmp_path: Path) -> None:
    (tmp_path / "my_fsdp.py").write_text(stage(8))
    station = COURSE.exercise(9)
    verdict = grade(station, tmp_path, COURSE, Options(seed=7))
    finding = verdict.results[0].finding
    assert finding is not None and finding.seen is not None and finding.seen.machine == "host"
    log = Run([{"log": finding.seen.log}]).log()
    [gather] = [e for e in log.select("all_gather") if e.start_us == finding.seen.us]
    busy = [e for e in log.select("forward") if e.start_us < gather.end_us and e.end_us > gather.start_us]
    assert (gather.owner, busy) == ("1", [])
    assert max(sum(sample.bytes_by_kind.values()) for sample in log.samples[0]) < 4e8
    assert {e.owner for e in log.select("forward", "backward")} == {"", *"01234"}
    assert find_source(station, tmp_path).path.name in gather.code


def test_the_spans_of_a_learners_file_belong_to_the_step_whose_optimizer_ends_them() -> None:
    watch, times = Watch(), (0, 20, 30, 60)
    watch.spans = [
        Event(0, n, "forward", "compute", "0", start_us=us, dur_us=5) for n, us in enumerate(times)
    ]
    ends = [
        Event(0, n, "optimizer", "compute", step=n, start_us=us, dur_us=5) for n, us in enumerate((10, 40))
    ]
    shown = watch.log_of(EventLog(ends), [("forward", 0)])
    assert [e.step for e in shown.select("forward")] == [0, 1, 1, 2]


def test_memory_of_a_simulated_gpu_is_sampled_when_compute_gets_there_not_when_the_host_does() -> None:
    watch, clock, allocator, kept = Watch(), Clock(GPU), Allocator(), []
    with watch.looking():
        for _ in range(3):
            kept.append(torch.zeros(8))
            allocator.see(kept[-1].untyped_storage())
            clock.run(100.0)
    assert [sample.us for sample in watch.samples] == [GPU.launch_us + us for us in (100, 200, 300)]
    assert [sum(sample.bytes_by_kind.values()) for sample in watch.samples] == [32, 64, 96]


def test_too_many_reductions_are_shown_where_the_third_one_joins_two(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = [10.0, 20.0, 30.0, 40.0, 50.0]
    log = {"events": [], "samples": []}
    step = {"flying": [1, 2, 1, 2, 3], "reductions": [[us] for us in starts], "machine": "host", "shown": log}
    monkeypatch.setattr(machines, "figures", lambda *_: step)
    with pytest.raises(Finding, match="3 reductions are started") as caught:
        machines.judge_bound(None, 0)  # type: ignore[arg-type]
    assert caught.value.seen is not None and caught.value.seen.us == 50.0
