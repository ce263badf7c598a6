"""Put the course into the built package: copy `exercises/` to `hwfsdp/_course/exercises/`, without solutions.

`hwfsdp course` then writes a copy to work in. An editable installation uses the checkout, and copies nothing. Everything else about
the build is in setup.cfg.

Build from a tree whose exercises are untouched; `make check` tests this.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

NOT_GIVEN = shutil.ignore_patterns("__pycache__", "*.py.[0-9]*", "runs")  # leftovers of work on exercises


class BuildWithCourse(build_py):
    """Build the package, then add the course."""

    def run(self) -> None:
        built = Path(self.build_lib, "hwfsdp")
        if not self.editable_mode:
            shutil.rmtree(built, ignore_errors=True)  # of an earlier build, with modules that may be gone
        super().run()
        if not self.editable_mode:
            shutil.copytree("exercises", built / "_course" / "exercises", ignore=NOT_GIVEN)


setup(cmdclass={"build_py": BuildWithCourse})
