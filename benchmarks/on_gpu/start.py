"""Find a Python whose torch sees the GPU, and run the parts with it. This file needs only Python itself.

It tries in this order: the environment of `make setup`, then the Python that runs this file. If neither sees a GPU and the machine
has one, `make setup` makes an environment with a build of torch for it. This needs a package registry and takes minutes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv" / "bin" / "python"
TORCH = "torch==2.15.0"  # the registry's build of this version is for CUDA
NEEDED = ("torch", "numpy", "cloudpickle", "safetensors", "matplotlib", "jinja2", "pytest")
ASK = f"""
import importlib.util, json
missing = [name for name in {NEEDED!r} if importlib.util.find_spec(name) is None]
if "torch" in missing:
    print(json.dumps({{"missing": missing}}))
else:
    import torch
    print(json.dumps({{"missing": missing, "torch": torch.__version__, "gpus": torch.cuda.device_count()}}))
"""


def asked(python: str) -> dict[str, object]:
    """Ask a Python which modules it lacks, its torch, and how many GPUs it sees; return {} if it does not run."""
    try:
        done = subprocess.run([python, "-c", ASK], capture_output=True, text=True, timeout=300)
        found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return {}
    return found


def chosen(dry: bool) -> str | None:
    """Return the first suitable Python; None if there is none."""
    for python in (str(VENV), sys.executable):
        found = asked(python)
        if found.get("missing"):
            print(f"gpu: {python} lacks {', '.join(map(str, found['missing']))}", flush=True)  # type: ignore[call-overload]
        elif found and (dry or found["gpus"]):
            print(f"gpu: {python}, torch {found['torch']}, {found['gpus']} GPUs", flush=True)
            return python
    return None


def environment() -> dict[str, str]:
    """Return environment variables that put the package into Python's path."""
    behind = [path for path in [os.environ.get("PYTHONPATH", "")] if path]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support"), *behind]),
    }


def main(arguments: list[str]) -> int:
    dry = "--dry" in arguments
    python = chosen(dry)
    if python is None and not dry and shutil.which("nvidia-smi"):
        print(f"gpu: no torch here sees the GPU; make setup TORCH_SPEC={TORCH} takes minutes", flush=True)
        if subprocess.run(["make", "setup", f"TORCH_SPEC={TORCH}"], cwd=ROOT).returncode == 0:
            python = chosen(dry)
    if python is None:
        wanted = "torch and pytest" if dry else "a GPU, and a torch that sees it"
        print(
            f"gpu: expected {wanted}; got neither .venv nor {sys.executable} with it.",
            end=" ",
            file=sys.stderr,
        )
        print("Run make setup, or try all of it out on the CPU: make gpu DRY=1.", file=sys.stderr)
        return 2
    command = [python, "-m", "benchmarks.on_gpu", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment()).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
