"""The loop and the two commands, run as a user runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hwfsdp import EventLog, UsageError, launch
from hwfsdp.cli import main
from hwfsdp.data import draw_batch, load_text
from hwfsdp.models import GPTConfig
from hwfsdp.train import TrainConfig, build_model, train, train_step

TINY = ["--layers", "2", "--dim", "32", "--seq-len", "16", "--batch", "2"]
TINY_MODEL = GPTConfig(dim=32, layers=2, heads=1, seq_len=16)


def unsharded_losses(config: TrainConfig, world_size: int) -> list[float]:
    """The oracle: one process, the whole batch."""
    model, text = build_model(config.model, config.seed), load_text(config.text)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
    rows = config.batch * world_size
    return [
        float(train_step(model, optimizer, *draw_batch(text, config.model.seq_len, rows, config.seed, step)))
        for step in range(config.steps)
    ]


@pytest.mark.parametrize("world_size", [1, 3])
def test_sharded_training_has_the_losses_of_unsharded_training(world_size: int) -> None:
    config = TrainConfig(TINY_MODEL, batch=2, steps=4)
    results = launch(train, world_size, config, timeout=90)
    for result in results:
        assert result.losses == pytest.approx(unsharded_losses(config, world_size), abs=1e-5)


def test_in_bfloat16_the_losses_are_close_and_half_the_bytes_are_gathered() -> None:
    logs = {}
    for dtype in ("float32", "bfloat16"):
        config = TrainConfig(TINY_MODEL, batch=2, steps=3, param_dtype=dtype, record_last=1)
        result = launch(train, 2, config, timeout=90)[0]
        assert result.losses == pytest.approx(unsharded_losses(config, 2), abs=0.05)
        logs[dtype] = result.log.summary()["bytes_by_op"]
    assert logs["bfloat16"]["all_gather"] * 2 == logs["float32"]["all_gather"]
    assert logs["bfloat16"]["reduce_scatter"] == logs["float32"]["reduce_scatter"]


@pytest.mark.parametrize("settings", [{"steps": 0}, {"batch": 0}, {"param_dtype": "int8"}])
def test_settings_that_make_no_sense_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="TrainConfig"):
        TrainConfig(**settings)  # type: ignore[arg-type]


def test_the_demo_compares_measures_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--steps", "6", "--out", str(tmp_path), *TINY]) == 0
    report = capsys.readouterr().out
    assert "step 6/6" in report
    assert "equal, bit for bit" in report

    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["equal_to_fsdp2"] is True
    assert summary["loss_last"] < summary["loss_first"]
    assert summary["largest_loss_difference_to_unsharded"] < 1e-5
    assert summary["bytes_by_op"] == summary["expected_bytes_by_op"]
    assert summary["count_by_op"] == {"all_gather": 2 * (2 * 2 + 1), "reduce_scatter": 2 * (2 + 1)}
    assert summary["peak_unsharded_bytes"] == summary["expected_peak_unsharded_bytes"]
    assert set(summary["step_ms"]) == {"hwfsdp", "FSDP2", "unsharded"}
    assert 0 <= summary["overlap_fraction"] <= 1

    log = EventLog.load(tmp_path / "trace.json")
    assert log.ranks == [0, 1]
    assert log.summary()["bytes_by_op"] == summary["bytes_by_op"]
    for name in ("loss", "timeline", "memory"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_the_demo_says_so_when_the_runs_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def differing(*args: object, **kwargs: object) -> dict[str, object]:
        return {**summary, "equal_to_fsdp2": False}

    main(["demo", "--steps", "1", "--ranks", "1", "--out", str(tmp_path), *TINY])
    summary = json.loads((tmp_path / "summary.json").read_text())
    monkeypatch.setattr("hwfsdp.demo.run_demo", differing)
    assert main(["demo", "--steps", "1", "--out", str(tmp_path)]) == 1
    assert "NOT equal" in capsys.readouterr().out


def test_train_prints_json_and_writes_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "t.json"
    assert main(["train", "--steps", "3", "--json", "--trace", str(trace), *TINY]) == 0
    out = json.loads(capsys.readouterr().out)
    assert len(out["losses"]) == 3
    assert json.loads(json.dumps(EventLog.load(trace).summary())) == out["trace"]


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["train", "--text", "/no/such/file"], "No such file"),
        (["train", "--dim", "33", "--heads", "2"], "a width that the heads divide"),
        (["train", "--seq-len", "10000000"], "more than 10000000 bytes"),
        (["train", "--lr", "nan"], "learning rate nan"),
        (["train", "--trace", "/no/such/folder/t.json"], "cannot write '/no/such/folder/t.json'"),
        (["demo", "--out", f"{__file__}/inside"], "Not a directory"),
    ],
)
def test_unusable_arguments_are_one_line_and_status_2(
    argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert complaint in error


@pytest.mark.parametrize(
    "argv",
    [["fly"], ["demo", "--ranks", "0"], ["train", "--device", "abacus"], ["train", "--ranks", "x"]],
)
def test_arguments_that_argparse_refuses_have_status_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2


@pytest.mark.parametrize("argv", [["train", "--fly"], ["list", "now"], ["check", "1", "2"]])
def test_what_a_verb_does_not_know_is_refused_with_its_own_usage(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    error = capsys.readouterr().err
    assert caught.value.code == 2
    assert error.startswith(f"usage: hwfsdp {argv[0]} ") and f"unrecognized arguments: {argv[-1]}" in error


def test_a_folder_for_saves_that_cannot_be_is_said_before_the_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hwfsdp.ranks.launch", lambda *args, **kwargs: pytest.fail("it trains"))
    (tmp_path / "file").touch()
    assert main(["train", "--save-every", "1", "--checkpoint", str(tmp_path / "file" / "run")]) == 2
    assert capsys.readouterr().err == f"hwfsdp: cannot write '{tmp_path / 'file' / 'run'}': Not a directory\n"


def test_train_runs_under_torchrun_and_prints_once() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "hwfsdp", "train", "--steps", "2", "--json", *TINY],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["losses"]) == 2
