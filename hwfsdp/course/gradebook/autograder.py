"""Make autograders for other services: an upload for Gradescope, and a workflow for GitHub.

Gradescope needs a zip with `setup.sh` and `run_autograder` at its root. It unpacks the zip to /autograder/source, runs `setup.sh` once,
and runs `run_autograder` for each submission (https://gradescope-autograders.readthedocs.io/en/latest/specs/). The zip holds the
package, the manifests, the starters, and the list of packages for pip. It holds no solutions and no secret.

`run_autograder` always leaves a results.json. If grading did not end, this file gives no points and says why. To try the autograder on
another machine, set HWFSDP_AUTOGRADER_ROOT to the folder that replaces /autograder.

The workflow belongs in the staff's own repository, and fetches the submissions. In a student's repository, the student could edit the
workflow and read its secrets. The texts of both are in `templates/`.
"""

from __future__ import annotations

import configparser
import io
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from hwfsdp.course.gradebook.layout import EXTRAS
from hwfsdp.course.manifest import PACKAGE, Course
from hwfsdp.course.refusals import refused

SECONDS = 540.0  # by default, Gradescope ends an autograder after ten minutes
CLASS_SECONDS = 18_000.0  # GitHub ends a job after six hours
_FIXED_TIME = (2020, 1, 1, 0, 0, 0)  # so that the same course gives the same zip
_SKIPPED = ("__pycache__", ".pyc", ".hwfsdp", ".png")
_TEMPLATES = Path(__file__).with_name("templates")


def make_autograder(path: Path, course: Course, limit: float = SECONDS) -> int:
    """Write the zip for Gradescope, and return its number of files.

    Args:
        limit: seconds for one submission. Exercises that are not graded by then get no points, and the report says so.

    Raises:
        UsageError: the zip cannot be written.
    """
    files = dict(_files(course, limit))
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, (content, mode) in sorted(files.items()):
            entry = zipfile.ZipInfo(name, _FIXED_TIME)
            entry.external_attr = (0o100000 | mode) << 16
            archive.writestr(entry, content, zipfile.ZIP_DEFLATED)
    _write("--make-autograder", path, packed.getvalue())
    return len(files)


def make_workflow(path: Path, limit: float = CLASS_SECONDS) -> None:
    """Write the workflow for GitHub.

    Args:
        limit: seconds for the class. Exercises that are not graded by then get no points, and the report says so.

    Raises:
        UsageError: the file cannot be written.
    """
    _write("--make-workflow", path, _filled("workflow.yml", limit))


def _filled(name: str, limit: float) -> bytes:
    """Fill a template with the limit in seconds, and with the minutes after which the service ends the job."""
    text = (_TEMPLATES / name).read_text().replace("@MINUTES@", str(int(limit // 60) + 10))
    return text.replace("@LIMIT@", str(int(limit))).encode()


def _write(option: str, path: Path, content: bytes) -> None:
    with refused("grade.output", option=option, path=path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def _files(course: Course, limit: float) -> Iterator[tuple[str, tuple[bytes, int]]]:
    """Yield the name in the zip, the content and the mode of every file."""
    yield "setup.sh", (_filled("setup.sh", limit), 0o755)
    yield "run_autograder", (_filled("run_autograder.sh", limit), 0o755)
    yield "requirements.txt", ("\n".join(requirements()).encode() + b"\n", 0o644)
    exercises = course.root / "exercises"
    own = [exercise.folder for exercise in course.exercises]
    for folder in (PACKAGE, *own, *map(exercises.joinpath, EXTRAS)):
        root = PACKAGE.parent if folder == PACKAGE else course.root
        for path in folder.rglob("*"):
            name = path.relative_to(root).as_posix()
            if path.is_file() and not any(skip in name for skip in _SKIPPED):
                yield name, (path.read_bytes(), 0o644)


def requirements() -> list[str]:
    """Return the packages that pip must install to grade, from the package's own setup: those of the extra `course`, too."""
    parser = configparser.ConfigParser()
    if parser.read(PACKAGE.parent / "setup.cfg"):
        extras = parser["options.extras_require"]
        return [*parser["options"]["install_requires"].split(), *extras["course"].split()]
    needed = (each.partition(";") for each in metadata.requires("hwfsdp") or ())
    return [name.strip() for name, _, only in needed if "extra" not in only or "course" in only]
