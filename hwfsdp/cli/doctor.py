"""`hwfsdp doctor`: check whether this machine can train, and say what to do if not.

    ok        it works
    note      something optional is missing: training works without it
    broken    training does not work, or does not work on the device that it would choose

There is one function for each thing that training needs. They do not depend on each other. A function that raises becomes a line,
not a traceback, and the functions after it still run. Modules that may be missing or broken are imported inside the functions.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

from hwfsdp.errors import TRACEBACK_BELOW, RankError, in_one_line
from hwfsdp.launcher.fork_server import start_server
from hwfsdp.torch_releases import NEWEST, OLDEST, REMEDY, SUPPORTED, release_of

_SECONDS = 120.0  # for the ranks to start and reach each other
_PATIENCE = 20.0  # seconds for other programs and for loopback
_PLACE_IN_C = re.compile(r"\[enforce fail at \S+\] ")  # gloo adds the place in its own source in this form
_ANOTHER_BUILD = (
    'make setup TORCH_SPEC=torch TORCH_ARGS="--index-url …", with the index that '
    "https://pytorch.org/get-started/locally/ names"
)
_WIDTH = 25  # columns before the text of a line


class Look(NamedTuple):
    """The result of one look.

    Attributes:
        says: what exists, or what is wrong with it. remedy: what to do; "" if there is nothing to do.
    """

    name: str
    status: Literal["ok", "note", "broken"]
    says: str
    remedy: str = ""


def doctor(args: argparse.Namespace) -> int:
    """Take all looks. Print each as soon as it is taken, because the ranks take a while."""
    looks, limits = [], []
    for look in examine(args.ranks):
        looks.append(look)
        if not args.as_json:
            print(_row(look.status, look.name, look.says), flush=True)
            if look.remedy:
                print(_row("", "", f"→ {look.remedy}"))
    broken = [look.name for look in looks if look.status == "broken"]
    if "torch" not in broken:
        from hwfsdp.course.walls import in_force

        limits = in_force()
    if args.as_json:
        found = {"ranks": args.ranks, "checks": [look._asdict() for look in looks]}
        found["limits_of_submissions"] = [limit._asdict() for limit in limits]
        print(json.dumps(found, indent=2))
        return 1 if broken else 0
    for number, limit in enumerate(limits):
        why = f": NOT in force, {limit.why_not}" if limit.why_not else ""
        print(_row("", "" if number else "submissions", limit.name + why))
    verdict = f"does not work on this machine: {', '.join(broken)}" if broken else "works on this machine"
    print(f"\nTraining {verdict}.")
    return 1 if broken else 0


def _row(status: str, name: str, text: str) -> str:
    """Make a row of the table. Its text is wrapped to the terminal."""
    width = max(40, shutil.get_terminal_size((80, 24)).columns - _WIDTH)
    lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]
    return f"\n{'':{_WIDTH}}".join([f"{status:<8}{name:<{_WIDTH - 8}}{lines[0]}", *lines[1:]])


def examine(ranks: int) -> Iterator[Look]:
    """Take all looks in order; yield each as soon as it is taken."""
    yield Look("Python", "ok", f"{platform.python_version()}, {os.cpu_count()} cores")
    yield (torch := _taken("torch", "broken", look_at_torch))
    yield _taken("loopback", "broken", look_at_loopback)
    yield _taken("temporary files", "broken", look_at_temporary_files)
    if torch.status != "broken":
        start_server()  # only now: it imports torch, and a broken torch would print its own errors
        yield _taken("ranks", "broken", lambda: look_at_ranks(ranks))
        yield (gpu := _taken("GPU", "note", look_at_gpus))
        if gpu.status == "ok" and gpu.says[0].isdigit():
            count = min(2, int(gpu.says.split()[0]))
            yield _taken("ranks on GPUs", "broken", lambda: look_at_ranks(count, "cuda"))
    yield look_at_packages("pictures", "matplotlib", "pip install matplotlib")
    remedy = "make setup, or in a clone of hwfsdp: pip install -e '.[notebooks]'"
    yield look_at_packages("notebooks", "jupyter_client ipykernel", remedy)


def _taken(name: str, otherwise: Literal["note", "broken"], look: Callable[[], Look]) -> Look:
    """Take a look. If it raises, return the error as its result."""
    try:
        return look()
    except Exception as error:
        says = f"cannot be checked: {type(error).__name__}: {in_one_line(str(error))}"
        return Look(name, otherwise, says, "Fix this error first. Then run: hwfsdp doctor")


def look_at_torch() -> Look:
    """Check whether torch can be imported, and look at its release and its build."""
    try:
        import torch.version

        release = release_of(torch.version.__version__)
        build = torch_build()
    except Exception as error:  # a broken build can raise anything
        says = f"cannot be imported: {type(error).__name__}: {in_one_line(str(error))}"
        return Look("torch", "broken", says, "Install it again: make setup, or: pip install torch")
    if OLDEST <= release <= NEWEST:
        return Look("torch", "ok", f"{build}; {SUPPORTED} are supported")
    status: Literal["note", "broken"] = "broken" if release < OLDEST else "note"
    remedy = (
        f"If something fails, install a supported release: make setup TORCH_SPEC=torch==2.13.0, or: {REMEDY}"
    )
    return Look("torch", status, f"{build}; supported are {SUPPORTED}", remedy)


def torch_build() -> str:
    """Return the release of torch, and the device for which it was built."""
    import torch.version

    hip = getattr(torch.version, "hip", None)
    kind = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {hip}" if hip else "the CPU"
    return f"{torch.version.__version__}, built for {kind}"


def installed() -> str:
    """Return the last lines that `make setup` prints."""
    return f"Installed: torch {torch_build()}.\nAnother build: {_ANOTHER_BUILD}.\nNext: make demo"


def look_at_loopback() -> Look:
    """Check whether this machine can connect to itself."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), _PATIENCE).close()
    except OSError as error:
        says = f"127.0.0.1 does not answer ({error.strerror or error}); ranks on one machine connect there"
        remedy = "As root: ip link set lo up. In a container: give it a network. With a firewall: allow lo."
        return Look("loopback", "broken", says, remedy)
    return Look("loopback", "ok", "127.0.0.1 answers")


def look_at_temporary_files() -> Look:
    """Check whether ranks can meet in a file."""
    try:
        folder = os.environ.get("TMPDIR") or tempfile.gettempdir()  # as `launch` does
        with tempfile.TemporaryDirectory(prefix="hwfsdp-", dir=folder) as meeting:
            Path(meeting, "store").write_bytes(bytes(1 << 16))
    except OSError as error:
        says = f"cannot be written ({error.strerror or error}); ranks find each other through one"
        remedy = "Set TMPDIR to a writable folder with free space: export TMPDIR=~/tmp"
        return Look("temporary files", "broken", says, remedy)
    return Look("temporary files", "ok", f"can be written in {folder}")


def look_at_ranks(ranks: int, device: str = "cpu", seconds: float = _SECONDS) -> Look:
    """Check whether ranks start, and an all-reduce gives the sum."""
    from hwfsdp.launcher.launch import launch

    name = f"{ranks} rank{'s' if ranks > 1 else ''}" + (" on GPUs" if device != "cpu" else "")
    try:
        sums = launch(_greet, ranks, device, timeout=seconds, device=device)
    except RankError as error:
        why = _PLACE_IN_C.sub("", error.headline).removesuffix(TRACEBACK_BELOW).strip()
        says = f"cannot reach each other: {why}"
        if device != "cpu":
            remedy = "NCCL_DEBUG=INFO hwfsdp doctor shows more. --device cpu trains without GPUs."
        elif os.environ.get("GLOO_SOCKET_IFNAME"):
            remedy = "Unset GLOO_SOCKET_IFNAME, or name an interface of: ip address"
        else:
            remedy = "See loopback above. If it is ok, tell gloo to use it: export GLOO_SOCKET_IFNAME=lo"
        if error.reason == "late":
            remedy = f"It took longer than {seconds:g} s: end other busy programs, then try again. {remedy}"
        return Look(name, "broken", says, remedy)
    if sums != [ranks] * ranks:
        return Look(name, "broken", f"an all-reduce of ones gives {sums}", "Take another build of torch.")
    return Look(name, "ok", "start and reach each other")


def _greet(device: str) -> int:
    import torch
    import torch.distributed as dist

    ones = torch.ones(1, device=device)
    dist.all_reduce(ones)
    return int(ones)


def look_at_gpus() -> Look:
    """Look at the GPUs that the driver lists, and check whether this build of torch can use them."""
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        for index in range(len(names)):
            torch.ones(1, device=f"cuda:{index}").add(1).item()
        return Look("GPU", "ok", f"{len(names)} × {names[0]}")
    listed = _driver_lists()
    if not listed:
        return Look("GPU", "ok", "none; training works on the CPU")
    says = f"{len(listed)} × {listed[0]}, but torch {torch_build()} finds none"
    remedy = f"To use it: {_ANOTHER_BUILD} for the driver here (nvidia-smi). Or unset CUDA_VISIBLE_DEVICES."
    return Look("GPU", "note", says, remedy)


def _driver_lists() -> list[str]:
    """Return the names of the NVIDIA GPUs, even if torch was built for the CPU. Without nvidia-smi, return no names."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE)
    except (OSError, subprocess.SubprocessError):
        return []
    return [] if found.returncode else [line.strip() for line in found.stdout.splitlines() if line.strip()]


def look_at_packages(name: str, modules: str, remedy: str) -> Look:
    """Check whether optional packages are installed."""
    gone = [module for module in modules.split() if find_spec(module) is None]
    if gone:
        return Look(name, "note", f"{' and '.join(gone)} not installed", f"Install it: {remedy}")
    return Look(name, "ok", f"{' and '.join(modules.split())} installed")
