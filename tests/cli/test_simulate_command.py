"""`hwfsdp simulate`: its output, its refusals, and its exit status."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from commands import Run, assert_refused

from hwfsdp import EventLog
from hwfsdp.virtual import DEVICES
from hwfsdp.virtual.devices import GIB

VERB = "simulate"  # the command that the fixture `run` runs
TINY = ("--model", "gpt-tiny", "--gpus", "2")
PNG = b"\x89PNG"

pytestmark = pytest.mark.usefixtures("mine")


@pytest.fixture
def small_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that adds the device `small`, an H100 with so many bytes of memory."""
    return lambda memory: monkeypatch.setitem(
        DEVICES, "small", replace(DEVICES["h100"], name="small", memory=memory)
    )


# --- Output ------------------------------------------------------------------------------------------------


def test_json_has_the_keys_that_others_read(run: Run) -> None:
    said = run(*TINY, "--json")
    assert (said.status, said.err) == (0, "")
    for key in ("tokens_per_second_per_gpu", "step_seconds", "mfu", "exposed_comm_fraction"):
        assert said.found[key] > 0
    assert said.found["fits"] is True
    assert sum(said.found["peak_by_kind"].values()) == said.found["peak_allocated_gib"] * GIB
    assert said.found["peak_memory_gib"] >= said.found["peak_allocated_gib"]
    assert (said.found["target"], said.found["gpus"], said.found["nodes"]) == ("gpt-tiny", 2, 1)
    assert said.found["plan"]["param_dtype"] == "bfloat16"
    assert said.found["device"]["name"] == "h100"


def test_flags_reach_the_plan(run: Run) -> None:
    where = "--gpus 4 --nodes 2 --device a100-40gb --json"
    what = "--batch 3 --seq 32 --checkpoint full --reshard-after-forward 2 --wrap Block,Attention --dtype float16"
    found = run("--model", "gpt-tiny", *where.split(), *what.split()).found
    plan = {"batch": 3, "seq": 32, "checkpoint": "full", "reshard_after_forward": 2, "shards": None}
    assert found["plan"] == plan | {"wrap": ["Block", "Attention"], "param_dtype": "float16"}
    assert (found["gpus"], found["nodes"], found["device"]["name"]) == (4, 2, "a100-40gb")


def test_a_trace_loads_back_and_a_picture_is_drawn(run: Run, tmp_path: Path) -> None:
    files = ("--trace", "trace.json.gz", "--png", "picture.png", "--json")
    found = run(*TINY, "--reshard-after-forward", "no", *files).found["summary"]
    assert found["count_by_op"]["all_gather"] == 5
    summary = EventLog.load(tmp_path / "trace.json.gz").summary()
    assert summary["count_by_op"] == found["count_by_op"]
    assert summary["bytes_by_op"] == found["bytes_by_op"]
    assert summary["step_us"] == pytest.approx(found["step_us"])
    assert (tmp_path / "picture.png").read_bytes().startswith(PNG)


# --- Programs of the user ----------------------------------------------------------------------------------


def test_a_function_may_return_a_model(run: Run) -> None:
    said = run("--model", "mine_to_read:Words", "--seq", "4", "--batch", "2", "--json")
    assert (said.status, said.found["target"]) == (0, "mine_to_read:Words")
    assert said.found["tokens_per_second_per_gpu"] == pytest.approx(8 / said.found["step_seconds"])
    assert said.found["summary"]["count_by_op"]["reduce_scatter"] == 3


def test_a_step_that_raises_is_one_line_that_says_where(run: Run) -> None:
    for function, kind, place in [
        ("formats", "TypeError", "in <lambda>"),
        ("misfits", "RuntimeError", "in forward"),
    ]:
        said = run("--model", f"mine_to_read:{function}")
        assert_refused(said, kind)
        assert re.search(rf"mine_to_read\.py:\d+, {place}", said.err)


def test_a_function_may_return_a_step_and_its_tokens_come_from_the_arguments(run: Run) -> None:
    own = ("--model", "mine_to_read:trains")
    said = run(*own, "--seq", "3", "--batch", "2", "--json")
    assert said.status == 0
    assert said.found["tokens_per_second_per_gpu"] == pytest.approx(6 / said.found["step_seconds"])
    assert "unknown" in run(*own).out


# --- Refusals ----------------------------------------------------------------------------------------------


REFUSED = {
    "--model mine_to_read:fails": ("KeyError", "no weights", "mine_to_read.py"),
    "--model no_such_module:f": ("no_such_module",),
    "--gpus 12": ("12 GPUs, 4 more than 8", "Take 8 or 16"),
    "--model gpt-tiny --gpus 2 --trace nowhere/trace.json": ("nowhere/trace.json",),
    "--device h10": ("got 'h10'", "Did you mean: h100"),
}


def test_a_run_that_cannot_be_simulated_is_refused_in_one_line(run: Run) -> None:
    for args, words in REFUSED.items():
        assert_refused(run(*args.split()), *words)


UNUSABLE = {
    "--gpus 0": "1 to 65536",
    "--batch two": "whole number",
    "--sweep 8..16": "gpus=A..B",
    "--checkpoint some": "selective",
    "--sweep gpus=2..4 --nodes 2": "--nodes: not allowed with argument --sweep",
}


def test_unusable_arguments_are_refused_before_anything_runs(run: Run) -> None:
    for args, words in UNUSABLE.items():
        said = run(*args.split())
        assert (said.status, said.out) == (2, "") and words in said.err


# --- Out of memory -----------------------------------------------------------------------------------------


def test_a_step_that_does_not_fit_exits_with_1_and_says_how_much_memory_is_missing(
    run: Run, small_gpu: Callable[[float], None]
) -> None:
    need = run(*TINY, "--json").found["peak_allocated_gib"]
    small_gpu(0.6 * need * GIB)
    said = run("--model", "gpt-tiny", "--device", "small", "--gpus", "2", "--json")
    assert (said.status, said.found["fits"]) == (1, False)
    assert re.fullmatch(
        r"hwfsdp: gpt-tiny on 2 × small needs .* of each GPU's .*, .* too many\. More .* need less\.\n",
        said.err,
    )
    needs, has, over = map(float, re.findall(r"([\d.]+) MiB", said.err))
    assert needs == pytest.approx(need * 1024, abs=0.1) and over == pytest.approx(needs - has, abs=0.2)
