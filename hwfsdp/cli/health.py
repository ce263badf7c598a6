"""The looks of `hwfsdp doctor`: one function for each thing that training needs, with a remedy if it is missing.

    ok        it works
    note      something optional is missing: training works without it
    broken    training does not work, or does not work on the device that it would choose

Looks do not depend on each other. A look that raises becomes a line, not a traceback, and the looks after it still run. A look
at other processes has a time limit. Modules that may be missing or broken are imported inside the functions.

Left out: the speed of this machine (`virtual.calibration`), and other machines.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hwfsdp.errors import TRACEBACK_BELOW, RankError, in_one_line
from hwfsdp.launcher.fork_server import start_server
from hwfsdp.releases import NEWEST, OLDEST, REMEDY, SUPPORTED, release_of

SECONDS = 120.0  # for the ranks to start and reach each other
_PATIENCE = 20.0  # seconds for other programs and for loopback
_PLACE_IN_C = re.compile(r"\[enforce fail at \S+\] ")  # gloo adds the place in its own source in this form
_ROOM = 64 << 20  # bytes; containers often get no more in /dev/shm
_ANOTHER_BUILD = (
    'make setup TORCH_SPEC=torch TORCH_ARGS="--index-url …", with the index that '
    "https://pytorch.org/get-started/locally/ names"
)
_DEV = "make setup, or in a clone of hwfsdp: pip install -e '.[notebooks]'"


class Look(NamedTuple):
    """The result of one look.

    Attributes:
        says: what exists, or what is wrong with it. remedy: what to do; "" if there is nothing to do.
    """

    name: str
    status: Literal["ok", "note", "broken"]
    says: str
    remedy: str = ""


def examine(ranks: int, seconds: float = SECONDS) -> Iterator[Look]:
    """Take all looks in order; yield each as soon as it is taken."""
    yield look_at_python()
    yield (torch := _taken("torch", "broken", look_at_torch))
    yield _taken("loopback", "broken", look_at_loopback)
    yield _taken("temporary files", "broken", look_at_temporary_files)
    if torch.status != "broken":
        start_server()  # only now: it imports torch, and a broken torch would print its own errors
        yield _taken("backend", "broken", look_at_backend)
        yield _taken("ranks", "broken", lambda: look_at_ranks(ranks, seconds=seconds))
        yield from _gpus(seconds)
    yield _taken("/dev/shm", "note", look_at_shared_memory)
    yield _taken("pictures", "note", look_at_matplotlib)
    yield _taken("notebooks", "note", look_at_notebooks)
    if torch.status != "broken":
        yield _taken("calibration", "note", look_at_calibration)


def _taken(name: str, otherwise: Literal["note", "broken"], look: Callable[[], Look]) -> Look:
    """Take a look. If it raises, return the error as its result."""
    try:
        return look()
    except Exception as error:
        says = f"cannot be checked: {type(error).__name__}: {in_one_line(str(error))}"
        return Look(name, otherwise, says, "Fix this error first. Then run: hwfsdp doctor")


# --- What training needs -----------------------------------------------------------------------------------


def look_at_python() -> Look:
    """Look at the version. Python below 3.11 could not import this module."""
    return Look("Python", "ok", f"{platform.python_version()}, {os.cpu_count()} cores")


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
    remedy = (
        f"If something fails, install a supported release: make setup TORCH_SPEC=torch==2.13.0, or: {REMEDY}"
    )
    return Look(
        "torch", "broken" if release < OLDEST else "note", f"{build}; supported are {SUPPORTED}", remedy
    )


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
            server.settimeout(_PATIENCE)
            with socket.create_connection(server.getsockname(), _PATIENCE) as one:
                two, _ = server.accept()
                with two:
                    one.sendall(b"?")
                    two.settimeout(_PATIENCE)
                    heard = two.recv(1) == b"?"
    except OSError as error:
        says = f"127.0.0.1 does not answer ({error.strerror or error}); ranks on one machine connect there"
        remedy = "As root: ip link set lo up. In a container: give it a network. With a firewall: allow lo."
        return Look("loopback", "broken", says, remedy)
    return Look("loopback", "ok" if heard else "broken", "127.0.0.1 answers" if heard else "loses bytes")


def look_at_temporary_files() -> Look:
    """Check whether ranks can meet in a file."""
    try:
        folder = os.environ.get("TMPDIR") or tempfile.gettempdir()  # as `ranks` does
        with tempfile.TemporaryDirectory(prefix="hwfsdp-", dir=folder) as meeting:
            Path(meeting, "store").write_bytes(bytes(1 << 16))
    except OSError as error:
        says = f"cannot be written ({error.strerror or error}); ranks find each other through one"
        remedy = "Set TMPDIR to a writable folder with free space: export TMPDIR=~/tmp"
        return Look("temporary files", "broken", says, remedy)
    return Look("temporary files", "ok", f"can be written in {folder}")


def look_at_backend() -> Look:
    """Check whether torch has the backend for the CPU."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        says = "this build of torch has no gloo, and ranks on the CPU communicate through gloo"
        return Look("backend", "broken", says, f"Take another build: {_ANOTHER_BUILD}")
    return Look("backend", "ok", "gloo, NCCL" if dist.is_nccl_available() else "gloo")


def look_at_ranks(ranks: int, device: str = "cpu", seconds: float = SECONDS) -> Look:
    """Check whether ranks start, and an all-reduce gives the sum."""
    from hwfsdp.launcher.ranks import launch

    name = f"{ranks} rank{'s' if ranks > 1 else ''}" + (" on GPUs" if device != "cpu" else "")
    try:
        sums = launch(_greet, ranks, device, timeout=seconds, device=device)
    except RankError as error:
        why = _PLACE_IN_C.sub("", error.headline).removesuffix(TRACEBACK_BELOW).strip()
        says = f"cannot reach each other: {why}"
        if device != "cpu":
            remedy = "NCCL_DEBUG=INFO hwfsdp doctor shows more. --device cpu trains without GPUs."
            return Look(name, "broken", says, remedy)
        if os.environ.get("GLOO_SOCKET_IFNAME"):
            return Look(name, "broken", says, "Unset GLOO_SOCKET_IFNAME, or name an interface of: ip address")
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


# --- GPUs --------------------------------------------------------------------------------------------------


def _gpus(seconds: float) -> Iterator[Look]:
    """Look at the GPUs. If there are any, look at ranks on them."""
    yield (look := _taken("GPU", "note", look_at_gpus))
    if look.status == "ok":
        import torch

        if count := torch.cuda.device_count():
            ranks = min(2, count)
            yield _taken("ranks on GPUs", "broken", lambda: look_at_ranks(ranks, "cuda", seconds))


def look_at_gpus() -> Look:
    """Look at the GPUs that the driver lists, and check whether this build of torch can use them."""
    import torch
    import torch.version

    listed = _driver_lists()
    if not torch.cuda.is_available():
        if not listed:
            return Look("GPU", "ok", "none; training works on the CPU")
        there = f"{len(listed)} × {listed[0]}"
        if not (torch.version.cuda or getattr(torch.version, "hip", None)):
            says = f"{there}, but torch is built for the CPU"
            return Look("GPU", "note", says, f"To use it: {_ANOTHER_BUILD} for the driver here")
        says = f"{there}, but torch finds none"
        asked = "Is CUDA_VISIBLE_DEVICES set, or the driver older than torch's CUDA (nvidia-smi)?"
        return Look("GPU", "note", says, f"{asked} {_ANOTHER_BUILD}")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    try:
        for index in range(len(names)):
            torch.ones(1, device=f"cuda:{index}").add(1).item()
    except Exception as error:
        says = f"{len(names)} × {names[0]}, but a sum on GPU {index} fails: {in_one_line(str(error))[:200]}"
        return Look("GPU", "broken", says, f"Train with --device cpu, or: {_ANOTHER_BUILD}")
    return Look("GPU", "ok", f"{len(names)} × {names[0]}")


def _driver_lists() -> list[str]:
    """Return the names of the NVIDIA GPUs, even if torch was built for the CPU. Without nvidia-smi, return no names."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE)
    except (OSError, subprocess.SubprocessError):
        return []
    return [] if found.returncode else [line.strip() for line in found.stdout.splitlines() if line.strip()]


# --- Optional parts ----------------------------------------------------------------------------------------


def look_at_shared_memory(folder: str = "/dev/shm") -> Look:
    """Check whether NCCL and data loaders have room. Ranks on the CPU share memory in another way (`shared_memory`)."""
    if not os.path.isdir(folder):
        return Look("/dev/shm", "ok", "none; ranks on the CPU do not need it")
    free = shutil.disk_usage(folder).free
    if free >= _ROOM:
        return Look("/dev/shm", "ok", f"{free / (1 << 30):.1f} GiB free")
    says = f"{free / (1 << 20):.1f} MiB free; NCCL and data loaders need more, ranks on the CPU do not"
    remedy = "In a container: docker run --shm-size=1g. Otherwise remove files there."
    return Look("/dev/shm", "note", says, remedy)


def look_at_matplotlib() -> Look:
    """Check whether matplotlib can draw, and can remember the fonts that it found."""
    asked = os.environ.get("MPLCONFIGDIR")
    logger = logging.getLogger("matplotlib")
    before = logger.level
    logger.setLevel(logging.ERROR)  # this look reports the same faults as its warnings
    try:
        import matplotlib
        import matplotlib.figure

        matplotlib.get_configdir()
        matplotlib.get_cachedir()
        matplotlib.figure.Figure()
    except Exception as error:
        failed = f"{type(error).__name__}: {in_one_line(str(error))}"
        says, remedy = f"matplotlib fails: {failed}; demo and pictures need it", "pip install matplotlib"
        return Look("pictures", "note", says, f"Install it again: make setup, or: {remedy}")
    finally:
        logger.setLevel(before)
    says = f"matplotlib {matplotlib.__version__}"
    if os.environ.get("MPLCONFIGDIR") != asked:  # it has made a folder for this process only
        says += f"; {asked or 'its folder for settings'} cannot be written, so it looks for fonts in every process"
        remedy = "Set MPLCONFIGDIR to a writable folder: export MPLCONFIGDIR=~/mpl"
        return Look("pictures", "note", says, remedy)
    return Look("pictures", "ok", says)


def look_at_notebooks() -> Look:
    """Check whether notebooks can run: their kernel must exist, and its program must start."""
    try:
        from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel
    except ImportError as error:
        return Look("notebooks", "note", f"jupyter is not installed ({in_one_line(str(error))})", _DEV)
    try:
        kernel: Any = KernelSpecManager().get_kernel_spec("python3")
    except NoSuchKernel:
        return Look("notebooks", "note", "jupyter has no kernel named python3", f"Install ipykernel: {_DEV}")
    # Jupyter also replaces these two names with its own Python.
    program = sys.executable if kernel.argv[0] in ("python", "python3") else kernel.argv[0]
    trial = [program, "-c", "import ipykernel"]
    try:
        tried = subprocess.run(trial, capture_output=True, text=True, timeout=_PATIENCE)
    except OSError:
        says = f"the kernel python3 starts {program}, which does not exist"
        return Look("notebooks", "note", says, f"Remove {kernel.resource_dir}; then {_DEV}")
    if tried.returncode:
        says = f"the kernel python3 cannot start: {(tried.stderr.splitlines() or ['no ipykernel'])[-1]}"
        return Look("notebooks", "note", says, _DEV)
    return Look("notebooks", "ok", "jupyter, kernel python3")


def look_at_calibration() -> Look:
    """Check whether this machine has been measured."""
    from hwfsdp.errors import UsageError
    from hwfsdp.virtual.devices import THIS_MACHINE, calibration_file, device_named

    try:
        device_named(THIS_MACHINE)
    except UsageError as error:
        says = "none yet" if error.got == "none" else f"{calibration_file()} cannot be used: {error.got}"
        remedy = "For simulate --device this-machine: hwfsdp doctor --calibrate"
        return Look("calibration", "note", says, remedy)
    return Look("calibration", "ok", f"in {calibration_file()}")
