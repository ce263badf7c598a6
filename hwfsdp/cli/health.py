"""What `hwfsdp doctor` looks at, one function for each thing, and what to do where it is not as it should be.

    ok        as it should be
    note      something optional is missing: training works without it
    broken    training does not work, or not on the device that it would choose

Each look is taken by itself: one that raises is a line of its own, not a traceback, and those after it are taken all the
same. What asks other processes has a limit of time. Modules that may be missing or broken are imported inside.

It leaves out how fast the machine is (`virtual.calibration`), and machines other than this one.
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

OLDEST, NEWEST = (2, 13), (2, 15)  # releases of torch that are supported
SECONDS = 120.0  # for the ranks to start and hear each other
_PATIENCE = 20.0  # seconds for other programs and for loopback
_PLACE_IN_C = re.compile(r"\[enforce fail at \S+\] ")  # as gloo says where in its own source it raised
_ROOM = 64 << 20  # bytes; containers often get no more in /dev/shm
_ANOTHER_BUILD = (
    'make setup TORCH_SPEC=torch TORCH_ARGS="--index-url …", with the index that '
    "https://pytorch.org/get-started/locally/ names"
)
_DEV = 'make setup, or: pip install "hwfsdp[dev]"'


class Look(NamedTuple):
    """What one look found.

    Attributes:
        says: what is there, or what is wrong with it. remedy: what to do; "" if there is nothing to do.
    """

    name: str
    status: Literal["ok", "note", "broken"]
    says: str
    remedy: str = ""


def examine(ranks: int, seconds: float = SECONDS) -> Iterator[Look]:
    """All looks, in order, each as soon as it has been taken."""
    yield look_at_python()
    yield (torch := _taken("torch", "broken", look_at_torch))
    yield _taken("loopback", "broken", look_at_loopback)
    yield _taken("temporary files", "broken", look_at_temporary_files)
    if torch.status != "broken":
        start_server()  # not before: it imports torch, too, and would say on its own what it thinks of a broken one
        yield _taken("backend", "broken", look_at_backend)
        yield _taken("ranks", "broken", lambda: look_at_ranks(ranks, seconds=seconds))
        yield from _gpus(seconds)
    yield _taken("/dev/shm", "note", look_at_shared_memory)
    yield _taken("pictures", "note", look_at_matplotlib)
    yield _taken("notebooks", "note", look_at_notebooks)
    if torch.status != "broken":
        yield _taken("calibration", "note", look_at_calibration)


def _taken(name: str, otherwise: Literal["note", "broken"], look: Callable[[], Look]) -> Look:
    """What the look finds; if it raises, that."""
    try:
        return look()
    except Exception as error:
        says = f"cannot be checked: {type(error).__name__}: {in_one_line(str(error))}"
        return Look(name, otherwise, says, "Mend what this says first, then: hwfsdp doctor")


# --- What training needs -----------------------------------------------------------------------------------


def look_at_python() -> Look:
    """Its version; on an older one than 3.11 this module could not be imported."""
    return Look("Python", "ok", f"{platform.python_version()}, {os.cpu_count()} cores")


def look_at_torch() -> Look:
    """Whether it can be imported, its release, and what it was built for."""
    try:
        import torch.version

        release = tuple(map(int, torch.version.__version__.split(".")[:2]))
        build = torch_build()
    except Exception as error:  # what a broken build raises is anyone's guess
        says = f"cannot be imported: {type(error).__name__}: {in_one_line(str(error))}"
        return Look("torch", "broken", says, "Install it anew: make setup, or: pip install torch")
    range_ = f"{'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}"
    if OLDEST <= release <= NEWEST:
        return Look("torch", "ok", f"{build}; {range_} are supported")
    remedy = f"If something fails that should not, take one of {range_}: make setup TORCH_SPEC=torch==2.13.0"
    return Look("torch", "broken" if release < OLDEST else "note", f"{build}; supported are {range_}", remedy)


def torch_build() -> str:
    """Release of torch, and what it was built for."""
    import torch.version

    hip = getattr(torch.version, "hip", None)
    kind = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {hip}" if hip else "the CPU"
    return f"{torch.version.__version__}, built for {kind}"


def installed() -> str:
    """What `make setup` says at its end."""
    return f"Installed: torch {torch_build()}.\nAnother build: {_ANOTHER_BUILD}.\nNext: make demo"


def look_at_loopback() -> Look:
    """Whether a connection from this machine to itself comes through."""
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
        says = f"127.0.0.1 does not answer ({error.strerror or error}); ranks of one machine meet there"
        remedy = "As root: ip link set lo up. In a container: give it a network; a firewall: let lo through."
        return Look("loopback", "broken", says, remedy)
    return Look("loopback", "ok" if heard else "broken", "127.0.0.1 answers" if heard else "loses bytes")


def look_at_temporary_files() -> Look:
    """Whether ranks can meet in a file."""
    try:
        folder = os.environ.get("TMPDIR") or tempfile.gettempdir()  # as `ranks` does
        with tempfile.TemporaryDirectory(prefix="hwfsdp-", dir=folder) as meeting:
            Path(meeting, "store").write_bytes(bytes(1 << 16))
    except OSError as error:
        says = f"cannot be written ({error.strerror or error}); ranks meet in one"
        remedy = "Set TMPDIR to a folder that may be written and has room: export TMPDIR=~/tmp"
        return Look("temporary files", "broken", says, remedy)
    return Look("temporary files", "ok", f"can be written in {folder}")


def look_at_backend() -> Look:
    """Whether torch has the backend for the CPU."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        says = "this build of torch has no gloo, which ranks on the CPU talk through"
        return Look("backend", "broken", says, f"Take another build: {_ANOTHER_BUILD}")
    return Look("backend", "ok", "gloo, NCCL" if dist.is_nccl_available() else "gloo")


def look_at_ranks(ranks: int, device: str = "cpu", seconds: float = SECONDS) -> Look:
    """Whether ranks start, and an all-reduce adds up."""
    from hwfsdp.launcher.ranks import launch

    name = f"{ranks} rank{'s' if ranks > 1 else ''}" + (" on GPUs" if device != "cpu" else "")
    try:
        sums = launch(_greet, ranks, device, timeout=seconds, device=device)
    except RankError as error:
        why = _PLACE_IN_C.sub("", error.headline).removesuffix(TRACEBACK_BELOW).strip()
        says = f"do not hear each other: {why}"
        if device != "cpu":
            remedy = "NCCL_DEBUG=INFO hwfsdp doctor says more; --device cpu trains without."
            return Look(name, "broken", says, remedy)
        if os.environ.get("GLOO_SOCKET_IFNAME"):
            return Look(name, "broken", says, "Unset GLOO_SOCKET_IFNAME, or name an interface of: ip address")
        remedy = "See loopback above. If it is ok, name it: export GLOO_SOCKET_IFNAME=lo"
        if error.reason == "late":
            remedy = f"Longer than {seconds:g} s: end what keeps the machine busy, then again. {remedy}"
        return Look(name, "broken", says, remedy)
    if sums != [ranks] * ranks:
        return Look(name, "broken", f"an all-reduce of ones gives {sums}", "Take another build of torch.")
    return Look(name, "ok", "start and hear each other")


def _greet(device: str) -> int:
    import torch
    import torch.distributed as dist

    ones = torch.ones(1, device=device)
    dist.all_reduce(ones)
    return int(ones)


# --- GPUs --------------------------------------------------------------------------------------------------


def _gpus(seconds: float) -> Iterator[Look]:
    """The GPUs, and where there are any, ranks on them."""
    yield (look := _taken("GPU", "note", look_at_gpus))
    if look.status == "ok":
        import torch

        if count := torch.cuda.device_count():
            ranks = min(2, count)
            yield _taken("ranks on GPUs", "broken", lambda: look_at_ranks(ranks, "cuda", seconds))


def look_at_gpus() -> Look:
    """What the driver lists, and whether this build of torch can use it."""
    import torch
    import torch.version

    listed = _driver_lists()
    if not torch.cuda.is_available():
        if not listed:
            return Look("GPU", "ok", "none; the CPU does")
        there = f"{len(listed)} × {listed[0]}"
        if not (torch.version.cuda or getattr(torch.version, "hip", None)):
            says = f"{there}, but torch is built for the CPU"
            return Look("GPU", "note", says, f"To use it: {_ANOTHER_BUILD} for the driver here")
        says = f"{there}, but torch finds none"
        remedy = (
            "Is CUDA_VISIBLE_DEVICES set, or the driver older than torch's CUDA (nvidia-smi)? "
            + _ANOTHER_BUILD
        )
        return Look("GPU", "note", says, remedy)
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    try:
        for index in range(len(names)):
            torch.ones(1, device=f"cuda:{index}").add(1).item()
    except Exception as error:
        says = f"{len(names)} × {names[0]}, but a sum on GPU {index} fails: {in_one_line(str(error))[:200]}"
        return Look("GPU", "broken", says, f"Train with --device cpu, or: {_ANOTHER_BUILD}")
    return Look("GPU", "ok", f"{len(names)} × {names[0]}")


def _driver_lists() -> list[str]:
    """Names of NVIDIA's GPUs, whatever torch was built for; none if nobody can say."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE)
    except (OSError, subprocess.SubprocessError):
        return []
    return [] if found.returncode else [line.strip() for line in found.stdout.splitlines() if line.strip()]


# --- What comes beside -------------------------------------------------------------------------------------


def look_at_shared_memory(folder: str = "/dev/shm") -> Look:
    """Room for what NCCL and loaders of data keep there; ranks on the CPU share memory without it (`shared_memory`)."""
    if not os.path.isdir(folder):
        return Look("/dev/shm", "ok", "none; ranks on the CPU do without")
    free = shutil.disk_usage(folder).free
    if free >= _ROOM:
        return Look("/dev/shm", "ok", f"{free / (1 << 30):.1f} GiB free")
    says = f"{free / (1 << 20):.1f} MiB free; NCCL and loaders of data want more, ranks on the CPU do without"
    remedy = "In a container: docker run --shm-size=1g. Else remove what lies there."
    return Look("/dev/shm", "note", says, remedy)


def look_at_matplotlib() -> Look:
    """Whether pictures can be drawn, and matplotlib remembers the fonts that it found."""
    asked = os.environ.get("MPLCONFIGDIR")
    logger = logging.getLogger("matplotlib")
    before = logger.level
    logger.setLevel(logging.ERROR)  # it warns of what is looked for here
    try:
        import matplotlib
        import matplotlib.figure

        matplotlib.get_configdir()
        matplotlib.get_cachedir()
        matplotlib.figure.Figure()
    except Exception as error:
        failed = f"{type(error).__name__}: {in_one_line(str(error))}"
        says, remedy = f"matplotlib fails: {failed}; demo and pictures need it", "pip install matplotlib"
        return Look("pictures", "note", says, f"Install it anew: make setup, or: {remedy}")
    finally:
        logger.setLevel(before)
    says = f"matplotlib {matplotlib.__version__}"
    if os.environ.get("MPLCONFIGDIR") != asked:  # it has made a folder of its own, for this process alone
        says += f"; {asked or 'its folder for settings'} cannot be written, so it looks for fonts in every process"
        remedy = "Set MPLCONFIGDIR to a folder that may be written: export MPLCONFIGDIR=~/mpl"
        return Look("pictures", "note", says, remedy)
    return Look("pictures", "ok", says)


def look_at_notebooks() -> Look:
    """Whether there is something that runs notebooks: the kernel that they name, and its program."""
    try:
        from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel
    except ImportError as error:
        return Look("notebooks", "note", f"jupyter is not installed ({in_one_line(str(error))})", _DEV)
    try:
        kernel: Any = KernelSpecManager().get_kernel_spec("python3")
    except NoSuchKernel:
        return Look("notebooks", "note", "jupyter has no kernel named python3", f"Install ipykernel: {_DEV}")
    # As jupyter takes it.
    program = sys.executable if kernel.argv[0] in ("python", "python3") else kernel.argv[0]
    trial = [program, "-c", "import ipykernel"]
    try:
        tried = subprocess.run(trial, capture_output=True, text=True, timeout=_PATIENCE)
    except OSError:
        says = f"the kernel python3 starts {program}, which is not there"
        return Look("notebooks", "note", says, f"Remove {kernel.resource_dir}; then {_DEV}")
    if tried.returncode:
        says = f"the kernel python3 cannot start: {(tried.stderr.splitlines() or ['no ipykernel'])[-1]}"
        return Look("notebooks", "note", says, _DEV)
    return Look("notebooks", "ok", "jupyter, kernel python3")


def look_at_calibration() -> Look:
    """Whether this machine has been measured."""
    from hwfsdp.errors import UsageError
    from hwfsdp.virtual.devices import THIS_MACHINE, calibration_file, device_named

    try:
        device_named(THIS_MACHINE)
    except UsageError as error:
        says = "none yet" if error.got == "none" else f"{calibration_file()} cannot be used: {error.got}"
        remedy = "For simulate --device this-machine: hwfsdp doctor --calibrate"
        return Look("calibration", "note", says, remedy)
    return Look("calibration", "ok", f"in {calibration_file()}")
