"""The same training with any implementation: hwfsdp's, torch's, none, and files of users, good and bad.

The oracle for losses and gradient norms is unsharded PyTorch in one process. Sharded runs must be equal.
"""

from __future__ import annotations

import json
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import suites
import torch
from commands import assert_refused, said_by

from hwfsdp import EventLog, launch
from hwfsdp.cli import main
from hwfsdp.launcher import launch as launching
from hwfsdp.launcher import worker
from hwfsdp.train.data import draw_batch, load_text
from hwfsdp.train.implementations import time_limit
from hwfsdp.train.loop import TrainConfig, TrainResult, build_model, train, train_step
from hwfsdp.train.models import GPTConfig
from hwfsdp.train.snapshots import SnapshotConfig
from hwfsdp.train.traced_run import Capture, Steps

Capsys = pytest.CaptureFixture[str]
ROOT = Path(__file__).parents[2]
HOMEWORK = ROOT / "solutions" / "homework" / "hw_fsdp.py"
STATIONS = HOMEWORK.parents[1] / "my_fsdp.py"
STARTER = ROOT / "exercises" / "homework" / "hw_fsdp.py"
TINY = ["--layers", "2", "--dim", "32", "--seq-len", "16", "--batch", "2"]
CONFIG = TrainConfig(GPTConfig(dim=32, layers=2, heads=1, seq_len=16), batch=2, steps=4)

FILES = {  # signatures that a user may have chosen
    "as_torch": "from torch.distributed.fsdp import fully_shard\n",
    "ours": "from hwfsdp import fully_shard\n",
    "short": "from hwfsdp import fully_shard as theirs\ndef fully_shard(module, mesh):\n    theirs(module, mesh=mesh)\n",
    "stars": "import torch.distributed.fsdp as f\ndef fully_shard(m, **kw):\n    return f.fully_shard(m, **kw)\n",
    "beside": "from helper_of_mine import fully_shard\n",
}
HELPER = "from torch.distributed.fsdp import fully_shard\n"


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / f"{name}.py"
    path.write_text(text)
    return path


def unsharded(config: TrainConfig, world_size: int) -> tuple[list[float], list[float]]:
    """Return losses and gradient norms of one process with the whole batch."""
    model, text = build_model(config.model, config.seed), load_text(config.text)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
    losses, norms = [], []
    for step in range(config.steps):
        batch = draw_batch(text, config.model.seq_len, config.batch * world_size, config.seed, step)
        losses.append(float(train_step(model, optimizer, *batch)))
        norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])))
    return losses, norms


def trained(configs: list[TrainConfig]) -> list[TrainResult]:
    return [train(config) for config in configs]


def trained_and_recorded(configs: list[TrainConfig]) -> list[tuple[list[float], EventLog | None]]:
    """Return the losses of each run, and the log of its third step."""
    found = []
    for config in configs:
        with Capture(Steps(2, 2)).running() as capture:
            losses = train(config).losses
        found.append((losses, capture.log))
    return found


def test_every_implementation_has_the_losses_and_norms_of_unsharded_training(tmp_path: Path) -> None:
    written(tmp_path, "helper_of_mine", HELPER)
    files = [written(tmp_path, name, text) for name, text in FILES.items()]
    names = ["hwfsdp", "fsdp2", "none", *map(str, (HOMEWORK, STATIONS, *files))]
    configs = [replace(CONFIG, implementation=name) for name in names]
    losses, norms = unsharded(CONFIG, 2)
    for results in launch(trained, 2, configs, timeout=480):
        for name, result in zip(names, results, strict=True):
            assert result.losses == pytest.approx(losses, abs=1e-5), name
            assert result.grad_norms == pytest.approx(norms, rel=1e-4), name
            if name != "none":
                assert (result.losses, result.grad_norms) == (results[0].losses, results[0].grad_norms), name


def test_in_bfloat16_the_losses_are_close_and_half_the_bytes_are_gathered() -> None:
    dtypes = ["float32", "bfloat16"]
    configs = [replace(CONFIG, steps=3, param_dtype=dtype) for dtype in dtypes]
    results = launch(trained_and_recorded, 2, configs, timeout=90)[0]
    expected, _ = unsharded(configs[0], 2)
    for losses, _ in results:
        assert losses == pytest.approx(expected, abs=0.05)
    whole, half = (log.summary()["bytes_by_op"] for _, log in results)
    assert half["all_gather"] * 2 == whole["all_gather"]
    assert half["reduce_scatter"] == whole["reduce_scatter"]


@pytest.mark.parametrize("file", [None, suites.long(HOMEWORK)])
def test_the_demo_compares_measures_and_draws(file: Path | None, tmp_path: Path, capsys: Capsys) -> None:
    chosen, name = (["--implementation", str(file)], file.name) if file else ([], "hwfsdp")
    assert main(["demo", *chosen, "--steps", "6", "--out", str(tmp_path), *TINY]) == 0
    report = capsys.readouterr().out
    assert "step 6/6" in report and "equal, bit for bit" in report
    assert f"losses and gradients, {name} and FSDP2  " in report
    table, _, _ = report.partition("Written to")  # a folder, whose name may be long
    assert max(map(len, table.splitlines())) <= 80

    summary = json.loads((tmp_path / "summary.json").read_text())
    norms = summary["grad_norms"]
    assert list(summary["losses"]) == list(norms) == list(summary["step_ms"]) == [name, "FSDP2", "unsharded"]
    assert summary["equal_to_fsdp2"] is True and norms[name] == norms["FSDP2"]
    assert norms["unsharded"] == pytest.approx(unsharded(replace(CONFIG, steps=6), 2)[1], rel=1e-4)
    assert summary["loss_last"] < summary["loss_first"]
    assert summary["largest_loss_difference_to_unsharded"] < 1e-5
    assert summary["bytes_by_op"] == summary["expected_bytes_by_op"]
    assert summary["count_by_op"] == {"all_gather": 2 * (2 * 2 + 1), "reduce_scatter": 2 * (2 + 1)}
    assert summary["peak_unsharded_bytes"] == summary["expected_peak_unsharded_bytes"]
    assert 0 <= summary["overlap_fraction"] <= 1

    log = EventLog.load(tmp_path / "trace.json")
    assert log.ranks == [0, 1] and log.summary()["bytes_by_op"] == summary["bytes_by_op"]
    spans = {(e.op, e.owner) for e in log.events if e.op in ("forward", "backward")}
    assert spans == {(op, name) for op in ("forward", "backward") for name in ("blocks.0", "blocks.1", "GPT")}
    for picture in ("loss", "timeline", "memory"):
        assert (tmp_path / f"{picture}.png").read_bytes().startswith(b"\x89PNG")


LARGER = HOMEWORK.read_text() + (  # on all ranks but the first; AdamW hides that from the loss
    "\n_add = FSDPParam.add_sharded_grad\n"
    "FSDPParam.add_sharded_grad = lambda self, reduced: _add(self, reduced * (1 + torch.distributed.get_rank()))\n"
)


@pytest.mark.long
def test_the_demo_fails_a_file_whose_gradients_are_too_large_on_one_rank(
    tmp_path: Path, capsys: Capsys
) -> None:
    path = written(tmp_path, "larger", LARGER)
    assert main(["demo", "--implementation", str(path), "--steps", "1", "--out", str(tmp_path), *TINY]) == 1
    assert "NOT equal" in capsys.readouterr().out
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert not summary["equal_to_fsdp2"] and summary["largest_gradient_difference_to_fsdp2"] > 0


def test_a_time_limit_that_ends_inside_a_collective_counts_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pending = iter(["all_gather"])
    monkeypatch.setattr(worker, "describe_wait", lambda: next(pending, ""))
    with pytest.raises(TimeoutError, match="a step took more than 0.01 s"), time_limit(0.01, "a step"):
        signal.pause()
        for _ in range(1_000_000_000):  # the second alarm ends it
            pass


@pytest.mark.parametrize(
    ("options", "moved", "stays_whole"),
    [
        (["--implementation", "none"], {"all_reduce"}, True),
        suites.long(["--implementation", str(HOMEWORK)], {"all_gather", "reduce_scatter"}, False),
        suites.long(["--reshard-after-forward", "no"], {"all_gather", "reduce_scatter"}, True),
    ],
)
def test_a_trace_of_any_implementation_moves_the_bytes_of_the_closed_form(
    options: list[str], moved: set[str], stays_whole: bool, tmp_path: Path, capsys: Capsys
) -> None:
    assert main(["trace", "run", "demo", *options, "--out", str(tmp_path / "t.json"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["as_expected"] and found["races"] == [] and found["accesses"] > 0
    assert {op for op, t in found["expected_per_step"].items() if t["bytes"]} == moved
    kinds = found["summary"]["peak_bytes_by_kind"]
    assert (kinds["unsharded_param"] > kinds["sharded_param"]) == stays_whole


# --- Files that do not work --------------------------------------------------------------------------------

BODY = "from torch.distributed.fsdp import fully_shard as theirs\ndef fully_shard(module, mesh):\n"
RAISES = BODY + (
    "    theirs(module, mesh=mesh)\n"
    "    module.register_forward_hook(after)\n"
    "def after(module, args, output):\n"
    "    raise ValueError('no good')\n"
)
HANGS = BODY + (
    "    import torch.distributed as dist\n"
    "    while dist.get_rank() == 1:\n"
    "        pass\n"
    "    dist.barrier()\n"
)
PLAIN = "def fully_shard(module):\n    return module\n"
MAKES = "import torch\ndef fully_shard(m):\n    return torch.nn.Sequential(m)\n"
LATE = "rank 1 raised TimeoutError: sharding with hangs.py took more than 4 s at {}/hangs.py:4."
BAD = {  # name: text, options, exit status, and what is said
    "no_python": ("def f(:\n    pass\n", [], 2, "no_python.py:1: expected Python; got SyntaxError"),
    "wants": ("def fully_shard(m, rank):\n    pass\n", [], 2, "wants.py: expected arguments among"),
    "makes": (MAKES, [], 2, "to shard the module in place"),
    "raises": (RAISES, [], 1, "ValueError: no good at {}/raises.py:6."),
    "hangs": (HANGS, ["--timeout", "4"], 1, LATE),
    "plain": (PLAIN, ["--save-every", "1"], 2, "saving with plain.py: expected parameters that are DTensors"),
}


@pytest.mark.parametrize("name", suites.fast_are(["no_python", "makes", "raises"], BAD))
def test_an_error_in_a_learners_file_is_one_line_with_its_place(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    text, options, status, said = BAD[name]
    path = written(tmp_path, name, text)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert main(["train", "--implementation", str(path), "--steps", "2", *options, *TINY]) == status
    error = capsys.readouterr().err.strip()
    assert said.format(tmp_path) in error.splitlines()[-1]
    assert error.count("\n") == 0 or name == "hangs"  # where there is a table of what ranks called last


def test_a_function_that_is_not_written_yet_is_named(capsys: Capsys) -> None:
    assert main(["train", "--implementation", str(STARTER), "--steps", "1", *TINY]) == 1
    error = capsys.readouterr().err
    found = re.search(r"NotImplementedError: (TODO\(h1\): .*) at \S*hw_fsdp.py:(\d+)", error)
    assert found and error.count("\n") == 1
    assert f'raise NotImplementedError("{found[1]}")' in STARTER.read_text().splitlines()[int(found[2]) - 1]


def test_an_implementation_that_cannot_be_is_refused_before_ranks_are_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launching, "run_ranks", lambda *args, **kwargs: pytest.fail("ranks are started"))
    for argv, complaint in [
        ("train --implementation gone.py", "or a Python file with a fully_shard; got No such"),
        ("train --implementation FSDP", "implementation 'FSDP'"),
        ("train --implementation none --param-dtype bfloat16", "expected float32"),
        ("demo --implementation fsdp2", "hwfsdp train --implementation fsdp2"),
        ("trace run demo --implementation gone.py", "got No such file"),
        ("trace run train.py --reshard-after-forward no", "expected the target demo"),
    ]:
        assert_refused(said_by(capsys, *argv.split()), complaint)


# --- Saving ------------------------------------------------------------------------------------------------


def saved_and_resumed(configs: list[TrainConfig]) -> list[tuple[TrainResult, TrainResult]]:
    found = []
    for config in configs:
        train(replace(config, steps=2))
        found.append((train(replace(config)), train(replace(config, snapshots=None))))
    return found


@pytest.mark.long
def test_a_run_of_any_implementation_goes_on_from_its_save(tmp_path: Path) -> None:
    names = ["fsdp2", "none", str(HOMEWORK)]
    configs = [
        replace(CONFIG, implementation=name, snapshots=SnapshotConfig(tmp_path / str(i), resume=True))
        for i, name in enumerate(names)
    ]
    for each in launch(saved_and_resumed, 2, configs, timeout=480):
        for name, (resumed, whole) in zip(names, each, strict=True):
            assert resumed.resumed_at == 2, name
            assert (resumed.losses, resumed.grad_norms) == (whole.losses, whole.grad_norms), name
