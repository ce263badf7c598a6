"""Every part of the benchmarks in a tiny configuration. The tests check the shape of results, never their values."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import checkpoints, gpu, grading, overhead, peak, profile, recording, scaling
from benchmarks import __main__ as program
from benchmarks import steps
from benchmarks.contenders import DDP, FSDP2, HWFSDP, UNSHARDED
from benchmarks.records import Check, Record, Spread, load, of_part, save
from benchmarks.report import tables, verdict
from benchmarks.timing import take_turns, timed

SMALLEST = "0.2 M"
POINTS = {scaling.LAYERS: (2,), scaling.PARAMETERS: (4,), scaling.GROUPS: (3,), scaling.RANKS: (1,)}


@pytest.fixture(scope="module")
def records() -> list[Record]:
    """Run one round of each part. Collectives are not checked: torch's DDP does not survive the checks in launched ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_DISTRIBUTED_DEBUG", "OFF")
        return [
            *steps.run([2], [SMALLEST], 1),
            *scaling.run(1, POINTS),
            *overhead.run(1, [2]),
            *recording.run(1),
            *peak.run([SMALLEST]),
            *gpu.run("cpu", 1, world_size=2),
            *profile.run([SMALLEST], 1),
        ]


@pytest.mark.long
def test_every_part_has_its_cases_and_parts_add_up(records):
    parts = {"steps", "floor", "limit", "scaling", "overhead", "recording", "memory", "gpu", "profile"}
    assert {record.part for record in records} == parts
    scaled = [(record.case["axis"], (record.case["at"],)) for record in of_part(records, "scaling")]
    assert scaled == list(POINTS.items())
    assert [record.case["kind"] for record in of_part(records, "gpu")] == ["fwd+bwd", "issue", "peak"] * 3
    for record in of_part(records, "steps"):
        assert {HWFSDP, FSDP2, DDP, UNSHARDED} <= set(record.values)
        assert record.checks["hwfsdp / FSDP2"].target is not None
    (profiled,), (memory,) = of_part(records, "profile"), of_part(records, "memory")
    parts = [spread.median for name, spread in profiled.values.items() if name != "step"]
    assert sum(parts) == pytest.approx(profiled.values["step"].median)
    spread = memory.checks["hwfsdp's whole parameters / closed form"].spread
    assert (spread.q1, spread.median, spread.q3) == (1.0, 1.0, 1.0)


def test_a_counter_sees_the_peak_and_storages_that_come_and_go():
    with peak.StorageCounter() as counter:
        kept = torch.zeros(1000)
        torch.zeros(500)  # gone at once
        view = kept[:10]
        last = torch.zeros(250)
        highest = counter.peak
        kept.untyped_storage().resize_(0)
        counter.reset()
        before = counter.peak
        kept.untyped_storage().resize_(4000)
    assert (highest, before, counter.peak, counter.whole) == (6000, 1000, 5000, 4000)
    assert len(view) + len(last) == 260


@pytest.mark.long
def test_checkpoints_are_compared_by_time_and_memory():
    times, memory = checkpoints.run(1, total=1 << 20)
    assert {f"{what}, hwfsdp / DCP" for what in checkpoints.TARGETS} == set(times.checks)
    assert all(spread.median >= 0 for spread in [*times.values.values(), *memory.values.values()])


def test_contenders_take_turns_at_going_first():
    order: list[str] = []
    actions = {name: timed("ms", lambda name=name: order.append(name)) for name in "abc"}
    samples = take_turns(actions, rounds=2, warm_up=1)
    assert "".join(order) == "cab" + "abc" + "bca"
    assert {name: len(times) for name, times in samples["ms"].items()} == dict.fromkeys("abc", 2)


def test_a_check_meets_its_target_if_the_number_that_it_shows_does():
    for median, said in [(0.5, "0.50 ≤ 1 ✓"), (1.004, "1.00 ≤ 1 ✓"), (1.006, "1.01 > 1 MISS")]:
        record = Record("steps", {}, "ms", {}, {"ratio": Check(Spread(median, median, median, 1), 1.0)})
        [table] = tables([record])
        assert table.rows == [[said]]
        assert verdict([record]) == ("1 of 1 targets met." if "✓" in said else "0 of 1 targets met.")


def test_a_file_of_results_keeps_the_parts_of_this_machine_that_were_not_measured_again(tmp_path):
    path = tmp_path / "bench.json"
    old, new = (Record("steps", {"at": n}, "ms", {"a": Spread(1, 1, 1, 1)}) for n in (1, 2))
    other = Record("memory", {}, "MiB", {}, {"b": Check(Spread(1, 1, 1, 1), 1.0)}, ("a note",))
    save(path, [old, other])
    save(path, [new])
    assert load(path) == [other, new]
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "machine": {"cpu": "another"}}))
    save(path, [new])
    assert load(path) == [new]


@pytest.mark.long
def test_the_command_measures_keeps_and_reports(tmp_path, monkeypatch, capsys, records):
    monkeypatch.setitem(program.PARTS, "memory", lambda chosen: of_part(records, "memory"))
    path = tmp_path / "bench.json"
    program.main(["memory", "--out", str(path)])
    assert load(path) == of_part(records, "memory")
    assert path.with_suffix(".png").exists()
    program.main(["report", "--out", str(path)])
    assert "| params | ranks |" in capsys.readouterr().out


@pytest.mark.long
def test_grading_compares_classes_of_several_sizes_with_one_of_one() -> None:
    one, two = grading.run(1, classes=(1, 2), only="13")
    assert (one.case, two.case) == ({"submissions": 1}, {"submissions": 2})
    assert one.checks["memory to that of one"].spread.median == 1.0
