"""`hwfsdp doctor` on machines that lack something.

Faults are real: a namespace without loopback, a module that cannot be imported, a path that is not a folder.
"""

from __future__ import annotations

import json
import os
import threading
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.version
from commands import run_python

from hwfsdp.cli.doctor import look_at_packages, look_at_ranks


def looked(name: str, **environ: str) -> dict[str, Any]:
    """Run one look of the doctor in a new process, and return its result.

    Standard error must stay empty, except for the warning of `import hwfsdp` about a torch that it does not support.
    """
    code = f"import json; from hwfsdp.cli import doctor; print(json.dumps(doctor.{name}._asdict()))"
    done = run_python("-c", code, **environ)
    warned = "UserWarning: hwfsdp supports torch 2.11 to 2.15, and torch" in done.stderr
    assert done.returncode == 0 and done.stderr.count("\n") == warned, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert warned == (name == "look_at_torch()" and found["status"] != "ok")
    assert bool(found["remedy"]) == (found["status"] != "ok")
    return found


def doctor(*prefix: str, **environ: str) -> tuple[int, dict[str, dict[str, Any]], str]:
    """Run the doctor. Return its exit status, its looks by name, and standard error."""
    command = [*prefix, sys.executable, "-m", "hwfsdp", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environ)
    looks = {look["name"]: look for look in json.loads(done.stdout)["checks"]}
    return done.returncode, looks, done.stderr


def in_the_way(folder: Path, file: str, text: str) -> str:
    """Write a file into a folder. With this folder as PYTHONPATH, a module has this text."""
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    (path.parent / "__init__.py").touch()
    path.write_text(text)
    return str(folder)


def namespace(*options: str) -> list[str]:
    """Return a prefix that runs a command in its own namespaces."""
    prefix = ["unshare", *options]
    if not shutil.which("unshare") or subprocess.run([*prefix, "true"], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("namespaces need Linux and root")
    return prefix


@pytest.mark.long
def test_doctor_reports_that_training_works_on_the_machine() -> None:
    status, looks, _ = doctor()
    assert status == 0 and not [look for look in looks.values() if look["status"] == "broken"]
    assert looks["2 ranks"]["status"] == looks["loopback"]["status"] == "ok"


@pytest.mark.long
def test_doctor_reports_broken_training_without_loopback() -> None:
    status, looks, err = doctor(*namespace("--net"))
    assert status == 1 and "Traceback" not in err
    assert {name for name, look in looks.items() if look["status"] == "broken"} == {"loopback", "2 ranks"}
    assert "ip link set lo up" in looks["loopback"]["remedy"] and "loopback" in looks["2 ranks"]["remedy"]


def test_doctor_names_a_torch_that_does_not_import_and_checks_the_rest(tmp_path: Path) -> None:
    path = in_the_way(tmp_path, "torch.py", "raise OSError('libtorch.so: no such file')")
    status, looks, err = doctor(PYTHONPATH=path)
    assert (status, err) == (1, "")
    assert "libtorch.so" in looks["torch"]["says"] and "make setup" in looks["torch"]["remedy"]
    assert looks["loopback"]["status"] == "ok" and "2 ranks" not in looks


def test_doctor_names_a_torch_of_another_release_with_its_remedy(tmp_path: Path) -> None:
    for release, told in [("2.4.0", "broken"), ("2.99.0", "note")]:
        text = f"__version__ = '{release}'; cuda = None"
        found = looked("look_at_torch()", PYTHONPATH=in_the_way(tmp_path / release, "torch/version.py", text))
        assert found["status"] == told and "2.11 to 2.15" in found["says"] and "2.13.0" in found["remedy"]


def test_doctor_names_an_optional_package_that_is_not_installed() -> None:
    found = look_at_packages("pictures", "json no_such_package", "pip install it")
    assert (found.status, found.says) == ("note", "no_such_package not installed")
    assert found.remedy.endswith("pip install it")


def test_doctor_reports_a_folder_that_cannot_be_written() -> None:
    found = looked("look_at_temporary_files()", TMPDIR="/dev/null/none")
    assert (found["status"], "cannot be written" in found["says"]) == ("broken", True)
    assert "TMPDIR" in found["remedy"]


def test_doctor_reports_ranks_that_do_not_answer_in_time_or_cannot_communicate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("hwfsdp.cli.doctor._greet", lambda device: threading.Event().wait())  # never returns
        found = look_at_ranks(2, seconds=0.01)
    assert found.status == "broken" and "0.01 s" in found.remedy
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    found = look_at_ranks(2)
    assert found.status == "broken" and "nowhere0" in found.says and "GLOO_SOCKET_IFNAME" in found.remedy


def test_a_gpu_that_torch_is_not_built_for_is_a_note_with_the_way_to_use_it(tmp_path: Path) -> None:
    if torch.version.cuda:
        pytest.skip("needs a build of torch for the CPU")
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho NVIDIA H100\necho NVIDIA H100\n")
    driver.chmod(0o755)
    found = looked("look_at_gpus()", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert found["status"] == "note" and "2 × NVIDIA H100" in found["says"]
    assert "TORCH_ARGS" in found["remedy"] and "pytorch.org" in found["remedy"]
