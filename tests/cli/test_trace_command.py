"""`hwfsdp trace`: the recording of a script, the findings in a log, the comparison of two logs.

Closed forms of `accounting` are the oracle for the traffic of real runs. Logs made by hand are the oracle for statements about logs.
"""

from __future__ import annotations

import ast
import csv
import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Run, Said, assert_refused
from matplotlib.figure import Figure
from models import Model, even, frozen, stem, uneven
from torch import nn

import suites
from figures import canvas_of, events_of
from oracles import Training, ours, recorded_steps
from hwfsdp import EventLog, UsageError, launch
from hwfsdp.cli import main
from hwfsdp.observe import log_report
from hwfsdp.observe.events import Event, Sample
from hwfsdp.observe.analysis import Traffic, compare, examine
from hwfsdp.observe.log_report import describe
from hwfsdp.observe.run_info import read_about
from hwfsdp.plot.export import PICTURES, draw
from hwfsdp.train import traced_run
from hwfsdp.train.traced_run import Capture, Steps, Target, read_steps, trace_run

VERB = "trace"  # the command that the fixture `run` runs

# --- Which steps -------------------------------------------------------------------------------------------


def test_steps_are_a_number_after_the_warm_up_or_a_range_and_others_are_refused_in_one_line() -> None:
    for text, steps in [("1", (2, 2)), ("5", (2, 6)), ("0..0", (0, 0)), ("3..7", (3, 7)), ("4..", (4, None))]:
        assert read_steps(text) == steps
    for text in ["0", "x", "3..2", "..4", "1.5", "", "²", "1...3"]:
        with pytest.raises(UsageError) as refusal:
            read_steps(text)
        assert repr(text) in str(refusal.value) and "\n" not in str(refusal.value)


def train_plainly(steps: int, *, optimizers: int = 1, evaluate: bool = False) -> None:
    """Train an unsharded model in this process."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    found = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model[:optimizers])]
    for _ in range(steps):
        model(torch.ones(1, 2)).sum().backward()
        for optimizer in found:
            optimizer.step()
        if evaluate:
            with torch.no_grad():
                model(torch.ones(1, 2))


def test_the_steps_that_are_wanted_are_recorded() -> None:
    for wanted, recorded, optimizers, evaluate in [
        (Steps(0, 0), 1, 2, True),
        (Steps(0, None), 5, 1, True),
        (Steps(4, 9), 1, 2, False),
        (Steps(5, 6), 0, 1, False),
    ]:
        with Capture(wanted).running() as capture:
            train_plainly(5, optimizers=optimizers, evaluate=evaluate)
        assert capture.steps == 5
        assert (capture.log is not None) == bool(recorded)
        found = [e.step for e in capture.log.select("optimizer")] if capture.log is not None else []
        steps = range(wanted.first, wanted.first + recorded)
        assert found == [step for step in steps for _ in range(optimizers)]


# --- A script ----------------------------------------------------------------------------------------------

PREAMBLE = """
import os
import sys
import torch
import torch.distributed as dist
from torch import nn
from hwfsdp import fully_shard

def train(steps=4):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def script(folder: Path, body: str) -> Path:
    path = folder / "train.py"
    path.write_text(f"{PREAMBLE}\n{body}")
    return path


def traced(path: Path, *arguments: str, steps: Steps = Steps(1, 2), ranks: int = 2) -> EventLog:
    return trace_run(Target(path, arguments, steps), ranks, "cpu")


SCRIPTS = {
    "a group as it asks for, destroyed at the end": (
        "from torch.distributed import init_process_group as init\n"
        "init('gloo', 'env://')\ntrain()\ndist.destroy_process_group()"
    ),
    "a group if there is none, a main guard and an exit": (
        "import neighbor\n"
        "names = 'RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE'.split()\n"
        "if __name__ == '__main__':\n"
        "    print(sys.argv[1:], [os.environ[name] for name in names], neighbor.name)\n"
        "    if not dist.is_initialized():\n"
        "        dist.init_process_group()\n"
        "    train()\n"
        "    sys.exit(0)"
    ),
    "launch of its own": "from hwfsdp import launch\nlaunch(train, 2)",
}
GUARDED = list(SCRIPTS)[1]


@pytest.mark.parametrize("name", suites.fast_are([GUARDED], SCRIPTS))
def test_a_script_written_for_torchrun_is_recorded_as_it_is(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "neighbor.py").write_text("name = 'neighbor'")
    log = traced(script(tmp_path, SCRIPTS[name]), "--lr", "3")
    found, said = examine(log), capsys.readouterr()
    assert found.ranks == [0, 1] and found.steps == [1, 2]
    assert found.as_expected and found.ranks_agree
    printed = [f"['--lr', '3'] ['{rank}', '{rank}', '2', '2'] neighbor" for rank in (0, 1)]
    assert sorted(said.out.splitlines()) == (printed if name == GUARDED else [])
    assert said.err == ""


@pytest.mark.parametrize(
    ("last_line", "said"),
    [
        ("raise ValueError('no more data')", "rank 1 raised ValueError: no more data"),
        suites.long("def broken(:", "rank . raised SyntaxError: invalid syntax.*"),
    ],
    ids=["its own error", "no Python"],
)
def test_an_error_of_a_script_is_one_line_with_its_rank_and_place_and_leaves_no_file(
    last_line: str, said: str, run: Run, tmp_path: Path
) -> None:
    path = script(tmp_path, f"train(1)\nif int(os.environ['RANK']) == 1:\n    {last_line}")
    line, out = len(path.read_text().splitlines()), tmp_path / "t.json"
    status, _, err = run("run", path, "--device", "cpu", "--out", out)
    assert status == 1 and err.count("\n") == 1
    assert re.search(rf"{said} at {re.escape(str(path))}:{line}\.", err)
    assert not out.exists()


def test_a_target_that_cannot_be_traced_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in (tmp_path / "x.py", tmp_path, script(tmp_path, "train(2)")):
        with pytest.raises(UsageError) as refusal:
            traced(path, steps=Steps(7, 8), ranks=1)
        assert "\n" not in str(refusal.value)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with pytest.raises(UsageError, match="torchrun"):
        traced(script(tmp_path, "train()"))


# --- Traffic of real runs ----------------------------------------------------------------------------------


MODELS: dict[str, tuple[Callable[[], Model], dict[str, Any]]] = {
    "plain": (even, {}),
    "kept": (even, {"reshard_after_forward": False}),
    "frozen": (frozen, {}),
    "smaller": (uneven, {"reshard_after_forward": 2}),
    "hybrid": (even, {"shape": (2, 2)}),
    "replicated": (stem, {"shape": (4, 1)}),
}


def run_all() -> dict[str, EventLog]:
    """Return the log of every model on this rank."""
    found = {name: Training(build, ours, **options) for name, (build, options) in MODELS.items()}
    return {name: recorded_steps(training) for name, training in found.items()}


@pytest.fixture(scope="module")
def logs() -> dict[str, EventLog]:
    """Return the logs of four ranks, read from the JSON of their files."""
    ranks = launch(run_all, 4, timeout=120)
    return {name: EventLog.merge(each[name] for each in ranks) for name in ranks[0]}


@pytest.mark.parametrize("name", MODELS)
def test_a_real_run_moves_the_bytes_of_the_closed_form(
    name: str, logs: dict[str, EventLog], tmp_path: Path
) -> None:
    logs[name].save(tmp_path / "log.json")
    found = examine(EventLog.load(tmp_path / "log.json"))
    assert found.as_expected, (found.measured, found.expected)
    assert found.same_every_step and found.ranks_agree
    assert "equal" in describe(found, name)


def test_a_step_that_gathers_more_often_shows_how_often(logs: dict[str, EventLog]) -> None:
    hybrid = logs["hybrid"]
    events = [e for e in hybrid.events for _ in range(3 if e.op == "all_gather" else 1)]
    found = examine(EventLog(events, hybrid.samples, hybrid.about))
    assert found.as_expected is False and found.same_every_step
    said = re.findall(r"^  (\w+) .*  (equal|3 ×)$", describe(found, "x"), re.MULTILINE)
    assert said == [("all_gather", "3 ×"), ("reduce_scatter", "equal"), ("all_reduce", "equal")]


def test_a_log_describes_its_run(logs: dict[str, EventLog]) -> None:
    about = {name: read_about(log.about) for name, log in logs.items()}
    hybrid, smaller, frozen = (about[name] for name in ("hybrid", "smaller", "frozen"))
    assert hybrid is not None and smaller is not None and frozen is not None
    assert (hybrid.world_size, hybrid.device, hybrid.torch) == (4, "cpu", torch.__version__)
    assert {(group.shards, group.replicas) for group in hybrid.groups} == {(2, 2)}
    assert {group.gathered_again_from for group in smaller.groups} == {2}
    assert {p.trained for group in frozen.groups for p in group.params} == {True, False}


# --- Statements about logs made by hand ----------------------------------------------------------------------


def by_hand(ranks: int = 2, steps: int = 2) -> EventLog:
    rows: list[tuple[Any, ...]] = []
    for step in range(steps):
        at, here = 100.0 * step, {"step": step}
        rows += [
            ("all_gather", "all_gather", at, at + 10, {"owner": "a", "bytes": 64, **here}),
            ("wait", "compute", at, at + 10, here),
            ("forward", "compute", at + 10, at + 30, {"owner": "a", "phase": "forward", **here}),
            ("reduce_scatter", "reduce_scatter", at + 30, at + 50, {"owner": "a", "bytes": 32, **here}),
            ("all_reduce", "all_reduce", at + 50, at + 51, {"bytes": 4, **here}),
            ("optimizer", "compute", at + 51, at + 60, here),
        ]
    return EventLog([event for rank in range(ranks) for event in events_of(rank, *rows)])


def test_a_log_that_does_not_describe_its_run_has_no_closed_form() -> None:
    found = examine(by_hand())
    assert (found.about, found.expected, found.as_expected) == (None, None, None)
    moved = {"all_gather": Traffic(1, 64), "reduce_scatter": Traffic(1, 32)}
    assert found.measured == {0: moved, 1: moved}
    assert found.others == {"all_reduce": Traffic(2, 8)}
    times = found.summary["by_rank"].items()
    assert [(rank, t["step_us"], t["exposed_comm_us"]) for rank, t in times] == [(0, 80, 31), (1, 80, 31)]
    assert "no closed form" in describe(found, "x")


def changed(log: EventLog, change: Callable[[Event], Event | None]) -> EventLog:
    """Apply `change` to each event of the log. None removes the event."""
    return EventLog([e for event in log.events if (e := change(event)) is not None], log.samples, log.about)


def drop(op: str, rank: int, step: int, event: Event) -> Event | None:
    return None if (event.op, event.rank, event.step) == (op, rank, step) else event


def test_a_rank_and_a_step_that_did_less_are_noticed(logs: dict[str, EventLog]) -> None:
    log = changed(logs["plain"], partial(drop, "reduce_scatter", 3, 1))
    found = examine(log)
    assert not found.ranks_agree and found.as_expected
    assert "Ranks did not move the same" in describe(found, "x")
    for rank in range(3):
        log = changed(log, partial(drop, "reduce_scatter", rank, 1))
    found = examine(log)
    assert found.ranks_agree and not found.same_every_step and found.as_expected is False
    assert "Steps differ" in describe(found, "x")


# --- Two logs ------------------------------------------------------------------------------------------------


def broadcast(event: Event) -> Event:
    return replace(event, op="broadcast") if (event.op, event.step) == ("all_reduce", 0) else event


CHANGES: list[tuple[Callable[[Event], Event | None], list[str], int]] = [  # ops that differ, first event
    (partial(drop, "reduce_scatter", 1, 1), ["reduce_scatter"], 7),
    (lambda e: replace(e, bytes=8 + e.bytes) if e.op == "all_gather" else e, ["all_gather"], 0),
    (broadcast, ["all_reduce", "broadcast"], 3),
    (lambda e: replace(e, owner="b") if (e.op, e.rank) == ("forward", 1) else e, [], 1),
]


def test_a_comparison_finds_the_first_place_where_two_logs_differ_if_there_is_one() -> None:
    log = by_hand()
    slower = changed(log, lambda e: None if e.op == "wait" else replace(e, dur_us=2 * e.dur_us))
    for other in (log, slower, by_hand(steps=5)):
        found = compare(log, other)
        assert found.same_traffic and found.parting is None
    assert compare(log, slower).ops["optimizer"][1].us == 2 * compare(log, slower).ops["optimizer"][0].us
    for change, differing, number in CHANGES:
        found = compare(log, changed(log, change))
        assert found.differing_ops == differing and found.same_traffic is not bool(differing)
        assert found.parting is not None and found.parting.number == number
        assert found.parting.a != found.parting.b


# --- The command -----------------------------------------------------------------------------------------------


@pytest.fixture
def file(logs: dict[str, EventLog], tmp_path: Path) -> Path:
    logs["plain"].save(tmp_path / "plain.json.gz")
    return tmp_path / "plain.json.gz"


def test_the_command_records_a_script_and_shows_it(run: Run, tmp_path: Path) -> None:
    path = script(tmp_path, "dist.init_process_group()\nprint('hello', *sys.argv[1:])\ntrain(3)")
    out = tmp_path / "trace.json"
    said = run("run", path, "--steps", "1..1", "--out", out, "--device", "cpu", "--json", "--", "--json", "x")
    assert said.status == 0
    assert said.err.count("hello --json x") == 2  # what the script prints does not spoil the JSON
    assert said.found["as_expected"] and said.found["steps"] == [1]
    assert run("show", out, "--json") == Said(0, said.out, "")


SHOWN = {
    *("file", "world_size", "torch", "device", "parameter_groups", "ranks", "steps", "traffic_by_step"),
    *("other_traffic", "expected_per_step", "as_expected", "same_every_step", "ranks_agree"),
    *("summary", "races", "accesses"),
}


def test_show_says_the_same_in_words_and_in_json(run: Run, file: Path, logs: dict[str, EventLog]) -> None:
    words, found = run("show", file).out, run("show", file, "--json").found
    assert set(found) == SHOWN
    none = {"all_reduce": {"calls": 0, "bytes": 0}}
    assert found["expected_per_step"] == found["traffic_by_step"]["0"] | none
    for moved in found["traffic_by_step"]["1"].values():
        assert f"{moved['bytes']:,}" in words
    assert found["summary"] == json.loads(json.dumps(logs["plain"].summary()))


def test_diff_gives_its_verdict_as_status_in_words_and_in_json(
    run: Run, file: Path, logs: dict[str, EventLog]
) -> None:
    second = file.with_name("second.json")
    for other, same in (("plain", True), ("kept", False)):
        logs[other].save(second)
        words, said = run("diff", file, second), run("diff", file, second, "--json")
        assert words.status == said.status == int(not same)
        assert ("Both did the same" in words.out) is same
        assert said.found["same_traffic"] is said.found["same_order"] is same
        assert (said.found["orders_part"] is None) is same


def test_a_csv_table_has_every_event_once_with_all_its_fields(file: Path, logs: dict[str, EventLog]) -> None:
    assert main(["trace", "export", str(file), "--to", "csv"]) == 0
    rows = list(csv.DictReader((file.parent / "plain.csv").read_text().splitlines()))
    for row, event in zip(rows, logs["plain"].events, strict=True):
        read = {name: row[name] for name in ("op", "stream", "owner", "phase", "dtype", "code")}
        numbers = ("rank", "seq", "step", "bytes", "start_us", "dur_us")
        read |= {name: ast.literal_eval(row[name]) for name in numbers}
        read |= {name: tuple(map(int, row[name].split())) for name in ("after", "reads", "writes")}
        assert Event(**read) == event


def test_an_export_has_the_rank_and_the_step_that_were_asked_for(run: Run, file: Path) -> None:
    for to, name in (("csv", "part.csv"), ("perfetto", "part.json"), ("png", "part.png")):
        said = run("export", file, "--to", to, "--rank", "2", "--step", "1", "--out", file.with_name(name))
        assert said.status == 0
    rows = list(csv.DictReader(file.with_name("part.csv").read_text().splitlines()))
    events = EventLog.load(file.with_name("part.json")).events
    assert {(row["rank"], row["step"]) for row in rows} == {("2", "1")}
    assert {(event.rank, event.step) for event in events} == {(2, 1)}
    assert len(rows) == len(events) == len(EventLog.load(file).of_rank(2).select(step=1))
    assert file.with_name("part.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_lies_beside_the_trace_by_default(run: Run, file: Path) -> None:
    target = Path(run("export", file, "--picture", "memory", "--to", "svg", "--json").found["file"])
    assert target == file.with_name("plain.memory.svg") and "<svg" in target.read_text()


def test_a_file_that_is_no_trace_of_ours_is_refused(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for words in ([], ["reads format 1"]):
        for given in (["show", path], ["diff", path, path], ["export", path, "--to", "csv"]):
            assert_refused(run(*given), str(path), *words)
        by_hand().save(path)
        path.write_text(path.read_text().replace('"format":1', '"format":7'))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a file that is always full")
def test_a_full_disk_is_one_line(run: Run, file: Path) -> None:
    for to in ("csv", "perfetto"):
        said = run("export", str(file), "--to", to, "--out", "/dev/full")
        assert_refused(said, "cannot write all output: No space left on device")


def test_arguments_that_cannot_be_used_are_refused(run: Run, file: Path) -> None:
    assert_refused(run("export", file, "--to", "png", "--rank", "9", "--picture", "memory"))
    assert_refused(run("export", file, "--to", "png", "--step", "9"))
    assert_refused(run("export", file, "--to", "perfetto", "--out", file))
    assert_refused(run("export", file, "--to", "csv", "--picture", "memory"), "no --picture", "png and svg")
    assert_refused(run("run", "nowhere.py"))
    assert_refused(run("run", "demo", "--steps", "none"))
    assert_refused(run("run", "demo", "--out", "/nowhere/at/all.json"))
    for seconds in ("0", "soon", "1e7", "inf"):
        said = run("run", "demo", "--timeout", seconds)
        assert said.status == 2 and "above 0" in said.err


def test_gpus_that_are_not_there_are_refused_before_any_rank_starts(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(traced_run, "launch", lambda *args, **kwargs: pytest.fail("ranks were started"))
    said = run("run", script(tmp_path, "train()"), "--device", "cuda", "--out", tmp_path / "t.json")
    assert_refused(said, "--device cuda", "a GPU for each of 2 ranks")


def test_a_trace_file_appears_only_when_its_script_has_ended(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, seen = tmp_path / "t.json", []
    monkeypatch.setattr(
        traced_run, "trace_run", lambda *args, **kwargs: seen.append(out.exists()) or by_hand()
    )
    assert run("run", "demo", "--out", out).status == 0
    assert seen == [False] and EventLog.load(out) == by_hand()
    before = out.read_bytes()
    monkeypatch.undo()
    assert_refused(run("run", "nowhere.py", "--out", out))
    assert out.read_bytes() == before  # the old file stays if the next run fails


def test_a_report_without_recorded_collectives_does_not_claim_that_there_are_no_races() -> None:
    unseen = [replace(e, writes=(1,)) for e in by_hand().events if e.op in ("forward", "optimizer")]
    found = examine(EventLog(unseen, {}, {"world_size": 2, "torch": "2.13", "device": "cpu", "groups": []}))
    said = describe(found, "t.json")
    assert found.groups_unseen and found.races is None
    assert "Collectives that C++ calls" in said and "no collective was seen" in said
    assert "No races" not in said and "0%" not in said


def test_names_from_a_file_are_shown_printable() -> None:
    owner, kind = "\x1b[31mred\nline", "\x1b]0;title\x07"
    log = by_hand()
    log.events = [replace(e, owner=owner, writes=(1,)) for e in log.events if e.op != "wait"]
    log.samples = {0: [Sample(0.0, {kind: 5})]}
    other = changed(log, lambda e: None if e.seq == 0 else e)
    found = describe(examine(log), "x"), log_report.describe_difference(compare(log, other), ("a", "b"))
    for text in found:
        assert all(line.isprintable() for line in text.split("\n"))
        assert r"\x1b" in text


@pytest.mark.parametrize("picture", PICTURES)
def test_a_picture_is_of_the_rank_and_the_step_that_were_asked_for(
    picture: str, logs: dict[str, EventLog]
) -> None:
    log = logs["plain"]
    step = max(e.step for e in log.select("optimizer"))
    here = (2, step)
    other = changed(log, lambda e: e if (e.rank, e.step) == here else replace(e, bytes=2 * e.bytes))
    other.events = [e for e in other.events if e.rank == 2 or e.op != "forward"]
    other.samples = {r: found if r == 2 else [] for r, found in log.samples.items()}
    drawn = [content_of(draw(each, picture, 2, step)) for each in (log, other)]
    assert drawn[0] == drawn[1]
    assert content_of(draw(log, picture)) != drawn[0]
    assert content_of(draw(log, picture, 2)) != drawn[0]
    for rank, at in ((99, None), (None, 99), (2, 99)):
        with pytest.raises(UsageError):
            draw(log, picture, rank, at)


def content_of(figure: Figure) -> bytes:
    return bytes(canvas_of(figure).buffer_rgba())
