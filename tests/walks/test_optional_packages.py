"""Without the extras, everything that needs only torch and numpy works, and each other part names the package that it needs.

The processes here, ranks too, cannot import the packages of the extras.
"""

from __future__ import annotations

import configparser
import functools
import json
import os
import zlib
from pathlib import Path
from typing import Any

import pytest

import hwfsdp
from commands import run_python
from hwfsdp import checkpoint
from hwfsdp.checkpoint import manifest
from hwfsdp.optional_packages import EXTRAS, missing
from suites import long

ROOT = Path(hwfsdp.__file__).parents[1]
HIDDEN = f"""
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {[*sorted(EXTRAS), "zlib_ng"]!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hidden())
"""
TRAINED = """
import sys, hwfsdp.core, first_program
print(hwfsdp.launch(first_program.train, 2, sys.argv[1], timeout=120))
assert not {"matplotlib", "PIL", "jinja2", "cloudpickle", "safetensors"} & sys.modules.keys()
"""


@pytest.fixture
def light(tmp_path: Path) -> Any:
    """Return a function that runs Python, whose processes cannot import packages of the extras."""
    (tmp_path / "sitecustomize.py").write_text(HIDDEN)
    places = (tmp_path, ROOT, ROOT / "tests" / "support")
    return functools.partial(run_python, cwd=tmp_path, PYTHONPATH=os.pathsep.join(map(str, places)))


def test_training_recording_and_checkpoints_need_torch_and_numpy_only(light: Any, tmp_path: Path) -> None:
    done = light("-c", TRAINED, str(tmp_path / "save"))
    assert done.stdout.strip() == str([["all_gather", "reduce_scatter"]] * 2), done.stdout + done.stderr
    assert manifest.checksum is not zlib.crc32  # the ranks above had no other
    checkpoint.verify(tmp_path / "save")


@pytest.mark.parametrize(
    "commands",
    [["--help"], long(["trace run demo --ranks 2 --out trace.json", "trace export trace.json --to csv"])],
)
def test_commands_without_pictures_need_no_extra(commands: list[str], light: Any) -> None:
    for command in commands:
        done = light("-m", "hwfsdp", *command.split())
        assert done.returncode == 0, done.stdout + done.stderr


ASKED = """
import importlib, json, pkgutil
import hwfsdp, torch
from hwfsdp import checkpoint, launch
from hwfsdp.checkpoint.convert import convert
from hwfsdp.errors import FSDPError
from hwfsdp.observe.eventlog import EventLog

def here(): pass

def said_by(ask):
    try:
        ask()
    except ImportError as error:
        return [isinstance(error, FSDPError), error.name, str(error)]
    return None

if __name__ == "__main__":
    checkpoint.save({"w": torch.ones(2)}, "save")
    names = [found.name for found in pkgutil.walk_packages(hwfsdp.__path__, "hwfsdp.")]
    asks = {name: lambda name=name: importlib.import_module(name) for name in names if name[-8:] != "__main__"}
    asks |= {
        "launch a script's function": lambda: launch(here, 1),
        "launch a lambda": lambda: launch(lambda: 1, 1),
        "to safetensors": lambda: convert("save", "w.safetensors", to="safetensors"),
        "from safetensors": lambda: convert("x.safetensors", "other", to="store"),
        "view": lambda: EventLog([], {}, {}).view(),
        "a module's name": lambda: hwfsdp.plot.timeline,
    }
    open("x.safetensors", "wb").close()
    print(json.dumps({what: said for what, ask in asks.items() if (said := said_by(ask))}))
"""


def test_every_part_names_the_package_that_it_needs(light: Any, tmp_path: Path) -> None:
    (tmp_path / "asking.py").write_text(ASKED)
    done = light("asking.py")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    others = {what: name for what, (_, name, _) in found.items() if not what.startswith("hwfsdp.")}
    assert others == {
        "launch a lambda": "cloudpickle",
        "to safetensors": "safetensors",
        "from safetensors": "safetensors",
        "view": "matplotlib",
        "a module's name": "matplotlib",
    }
    modules = found.keys() - others.keys()
    assert {name.rpartition(".")[0] for name in modules} <= {
        *("hwfsdp.plot", "hwfsdp.plot.player", "hwfsdp.cli")
    }
    for what, (is_ours, name, said) in found.items():
        assert is_ours and name in EXTRAS, what
        assert "expected the package" in said and f"pip install {EXTRAS[name][0]}" in said, what


def test_every_extra_that_a_message_names_installs_the_package() -> None:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    extras = dict(parser["options.extras_require"])
    for module, (package, extra) in EXTRAS.items():
        wanted = {line.partition(">")[0] for line in extras[extra].split("\n")}
        inner = {name for line in wanted for name in line.partition("[")[2].rstrip("]").split(",") if name}
        wanted |= {line.partition(">")[0] for name in inner for line in extras[name].split("\n")}
        assert package in wanted or (package, "jupyter" in wanted) == ("ipython", True), package
        assert f"'.[{extra}]'" in str(missing(module, "it"))
    needed = {line.partition(">")[0] for line in parser["options"]["install_requires"].split("\n") if line}
    assert needed == {"torch", "numpy", "zlib-ng"}
