"""requirements.lock has a version of each package that `make setup` installs, and setup.cfg allows this version."""

import configparser
import re
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


def test_the_lock_file_satisfies_what_the_package_requires() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = setup["options.extras_require"]
    names = set(extras) - {"clients", "torchtune"}  # `make setup` does not install these
    texts = [setup["options"]["install_requires"], *(extras[name] for name in names)]
    required = [Requirement(line) for text in texts for line in text.split("\n") if line]
    locked: dict[str, list[str]] = {}  # a package has several versions if they depend on Python's version
    for line in (ROOT / "requirements.lock").read_text().splitlines():
        name, version = re.match(r"(\S+?)==(\S+)", line).groups()
        locked.setdefault(name, []).append(version)
    for requirement in required:
        if requirement.name != "hwfsdp":  # one extra of the package names others
            versions = locked.get(requirement.name, [])
            assert versions and all(
                requirement.specifier.contains(version) for version in versions
            ), requirement
    (torch,) = locked["torch"]
    assert f"TORCH_SPEC ?= torch=={torch}\n" in (ROOT / "Makefile").read_text()
