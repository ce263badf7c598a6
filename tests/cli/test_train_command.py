"""The loop and the two commands, run as a user runs them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from commands import assert_refused, said_by

from hwfsdp.cli import main
from hwfsdp.cli.terminal import own_command
from hwfsdp.train import loop

TINY = ["--layers", "2", "--dim", "32", "--seq-len", "16", "--batch", "2"]


def test_train_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--steps", "3", "--json", *TINY]) == 0
    assert len(json.loads(capsys.readouterr().out)["losses"]) == 3


def test_unusable_arguments_are_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hwfsdp.launcher.launch.launch", lambda *args, **kwargs: pytest.fail("it trains"))
    (tmp_path / "file").touch()
    for argv, complaint in [
        ("train --text /no/such/file", "No such file"),
        ("train --dim 33 --heads 2", "a width that the heads divide"),
        ("train --seq-len 10000000", "more than 10000000 bytes"),
        (f"train --save-every 1 --checkpoint {tmp_path}/file/run", f"cannot write '{tmp_path}/file/run'"),
        (f"demo --out {tmp_path}/file/inside", "Not a directory"),
    ]:
        assert_refused(said_by(capsys, *argv.split()), complaint)


def test_a_verb_refuses_an_unknown_argument_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, complaint in [
        ("train --fly", "unrecognized arguments: --fly. See: hwfsdp train --help\n"),
        ("demo --implementaton x.py", "--implementaton x.py. Did you mean: --implementation\n"),
        ("trace expor", "Did you mean: hwfsdp trace export\n"),
        ("simulate --checkpoint ful", "Did you mean: hwfsdp simulate --checkpoint full\n"),
        ("demo --ranks 0", "expected a whole number, 1 "),
        ("train --ranks x", "got 'x'"),
        ("train --lr nan", "expected a number above 0"),
    ]:
        said = said_by(capsys, *argv.split())
        assert said.status == 2 and said.err.startswith(f"hwfsdp {argv.split()[0]}") and complaint in said.err
        assert said.err.count("\n") == 1


def test_ranks_train_on_gpus_if_each_has_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "launch_blaming", lambda *args, device: pytest.fail(f"it trains on {device}"))
    for gpus, options, device in [
        (1, "", "cpu"),  # two ranks
        (1, "--ranks 1", "cuda"),
        (2, "", "cuda"),
        (2, "--device cpu", "cpu"),
    ]:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        with pytest.raises(pytest.fail.Exception, match=f"it trains on {device}"):
            main(["train", *options.split()])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert_refused(said_by(capsys, "train", "--device", "cuda"), "a GPU for each of 2 ranks; got 1 GPU")


def test_a_command_to_type_is_found_without_an_activated_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("env/bin", "other"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "hwfsdp").touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "env/bin/python"))
    for here, path, command in [
        (".", "env/bin", "hwfsdp"),  # the environment is activated
        (".", "", "env/bin/hwfsdp"),
        (".", "other", "env/bin/hwfsdp"),
        ("other", "", f"{tmp_path}/env/bin/hwfsdp"),
    ]:
        monkeypatch.chdir(tmp_path / here)
        monkeypatch.setenv("PATH", str(tmp_path / path) if path else "")
        assert own_command() == command
