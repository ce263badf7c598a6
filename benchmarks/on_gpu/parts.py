"""The parts to run. Each part is a list of commands that together take at most ten minutes."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default", "--durations=0"]
# Tool → its options. torch asks the driver for functions that may be missing. memcheck must not report this as an error.
SANITIZERS = {"memcheck": ["--report-api-errors", "no"], "racecheck": [], "synccheck": []}


class Step(NamedTuple):
    """A command to run, or the reason why it is left out.

    Attributes:
        name: the name of the step. command: the command line; empty if the step is left out.
        environ: additional environment variables. why: the reason for leaving the step out, a sentence.
    """

    name: str
    command: list[str]
    environ: dict[str, str] = {}
    why: str = ""


class Part(NamedTuple):
    """A part of `make gpu`.

    Attributes:
        what: its description on the page. steps: returns its steps for a device and a folder for results.
    """

    what: str
    steps: Callable[[str, Path], list[Step]]


def files_of(files: list[str], *options: str, environ: dict[str, str] | None = None) -> list[Step]:
    """Return a step for each file of tests. If hypothesis is missing, leave out files that use it, and run the others without conftest.py."""
    has_hypothesis = importlib.util.find_spec("hypothesis") is not None
    steps = []
    for name in files:
        uses = "hypothesis" in (ROOT / "tests" / name).read_text()
        if uses and not has_hypothesis:
            steps.append(Step(name, [], why="hypothesis is not installed."))
            continue
        alone = [] if has_hypothesis else ["--noconftest"]
        steps.append(Step(name, [*PYTEST, *alone, f"tests/{name}", *options], environ or {}))
    return steps


def on_the_device(device: str, out: Path) -> list[Step]:
    """Run tests that need a CUDA device. On the CPU, run those tests of the same files that can run there."""
    files = ["checkpoint/test_staging.py", "checkpoint/test_copies.py"]
    chosen = ["-m", "cuda"] if device == "cuda" else ["-k", "pinning or device"]
    return files_of(files, *chosen, environ=one_gpu(device))


def worlds(device: str, out: Path) -> list[Step]:
    """Run tests of order, memory and bits, in pretended worlds of one to three ranks (`tests/support/pretended.py`)."""
    environ = {**one_gpu(device), "HWFSDP_TEST_DEVICE": device}
    bits = "not changed and not elements" if device == "cuda" else "uneven or bf16"
    return [
        *files_of(
            ["parity/test_overlap.py", "parity/test_memory_bounds.py"], "-p", "pretended", environ=environ
        ),
        *files_of(
            ["parity/test_parity.py"], "-p", "pretended", "-m", "not long", "-k", bits, environ=environ
        ),
    ]


def races(device: str, out: Path) -> list[Step]:
    """Run the tests that make each stream late in turn."""
    return files_of(["parity/test_streams_on_a_device.py"], "-k", device, environ=one_gpu(device))


def speed(device: str, out: Path) -> list[Step]:
    """Compare with torch's FSDP2. Each case is a separate command, so a case that needs too much memory or time stops no other case."""
    from benchmarks.gpu import cases

    environ = {**one_gpu(device), "TORCH_DISTRIBUTED_DEBUG": "OFF"}
    command = [sys.executable, "-m", "benchmarks.on_gpu.speed", device, str(out / "speed.json")]
    return [
        Step(f"{case.params}, {case.ranks} ranks", [*command, str(number)], environ)
        for number, case in enumerate(cases(device))
    ]


def same(device: str, out: Path) -> list[Step]:
    """Compare with FSDP2 what the tests of `worlds` leave out."""
    command = [sys.executable, "-m", "benchmarks.on_gpu.same", device]
    # the same bits in every matrix product
    environ = {**one_gpu(device), "TORCH_DISTRIBUTED_DEBUG": "OFF", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    return [Step("beside FSDP2", command, environ)]


def commands(device: str, out: Path) -> list[Step]:
    """Run the commands that a user types, with one rank, over NCCL on a GPU."""
    hwfsdp = [sys.executable, "-m", "hwfsdp"]
    train = ["--ranks", "1", "--steps", "3", "--device", device]
    trace = ["trace", "run", "demo", "--ranks", "1", "--device", device, "--out", str(out / "trace.json")]
    saved = ["--save-every", "2", "--checkpoint", str(out / "checkpoint")]
    several = Step(
        "two ranks", [], why="This machine has fewer than two GPUs, which two ranks over NCCL need."
    )
    if device == "cpu" or gpus() > 1:
        several = Step("two ranks", [*hwfsdp, "train", "--ranks", "2", "--steps", "3", "--device", device])
    return [
        Step("doctor", [*hwfsdp, "doctor"]),
        Step("train", [*hwfsdp, "train", *train]),
        Step("train, bf16, saved", [*hwfsdp, "train", *train, "--param-dtype", "bfloat16", *saved]),
        Step("trace", [*hwfsdp, *trace]),
        several,
    ]


def sanitizer(device: str, out: Path) -> list[Step]:
    """Run one small step under compute-sanitizer; on the CPU, run the step by itself."""
    step = [sys.executable, "-m", "benchmarks.on_gpu.small", device]
    environ = {
        **one_gpu(device),
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "TORCH_DISTRIBUTED_DEBUG": "OFF",  # a fake store cannot check collectives
    }
    found = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    why = "compute-sanitizer was not found; it comes with the CUDA toolkit."
    why = "It watches what runs on a GPU." if device == "cpu" else why
    plain = Step("the step alone", step, environ)
    if device == "cpu" or not found:
        return [plain, *(Step(tool, [], why=why) for tool in SANITIZERS)]
    watched = [found, "--error-exitcode", "9", "--print-limit", "20", "--tool"]
    return [
        plain,
        *(Step(tool, [*watched, tool, *more, *step], environ) for tool, more in SANITIZERS.items()),
    ]


def gpus() -> int:
    import torch

    return torch.cuda.device_count()


def one_gpu(device: str) -> dict[str, str]:
    """Show only the first GPU: torch refuses a mesh of pretended ranks whose size is not a multiple of the visible GPUs."""
    if device == "cpu":
        return {}
    return {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}


PARTS = {
    "device": Part("tests that need a GPU", on_the_device),
    "worlds": Part("order, memory and bits, in pretended worlds of 1 to 3 ranks, collectives late", worlds),
    "races": Part(
        "every loss and gradient stays equal, bit for bit, whichever stream is late; freed memory is overwritten",
        races,
    ),
    "same": Part(
        "losses, norms and weights equal to FSDP2's, bit for bit: dtypes, offloaded, compiled", same
    ),
    "commands": Part("`hwfsdp doctor`, `train`, `trace` with one rank over NCCL", commands),
    "sanitizer": Part("memory and synchronization of one small step, by compute-sanitizer", sanitizer),
    "speed": Part("time, issue time and peak memory beside FSDP2, in turns", speed),
}
