"""Puts the course into the package that is built: `exercises/` becomes `hwfsdp/_course/exercises/`, without solutions.

So whoever installs hwfsdp from a wheel can ask for a copy to work in (`hwfsdp course`), and no file is kept twice. Everything
else about the build is in setup.cfg. An editable installation has the checkout around it, and nothing is copied.

It copies what lies there: build from a tree in which nobody works on the exercises. `make check` says whether it is one.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

NOT_GIVEN = shutil.ignore_patterns("__pycache__", "*.py.[0-9]*", "runs")  # what working on exercises leaves


class BuildWithCourse(build_py):
    """Builds the package, then adds the course."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            carried = Path(self.build_lib, "hwfsdp", "_course")
            shutil.rmtree(carried, ignore_errors=True)  # of an earlier build
            shutil.copytree("exercises", carried / "exercises", ignore=NOT_GIVEN)


setup(cmdclass={"build_py": BuildWithCourse})
