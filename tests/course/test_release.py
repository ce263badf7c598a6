"""The student's edition: what is copied, what stays, and that it works."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import pytest
from commands import run_python

from hwfsdp.course import release
from hwfsdp.course.exercises import Course, find_course
from hwfsdp.errors import UsageError

ROOT = Path(__file__).parents[2]
MARKERS = "import pytest\npytestmark = pytest.mark.exercise('{0}', title='T', file='my_fsdp.py')\n"
FILES = {
    "exercises/03_naive/test_x.py": MARKERS.format("03"),
    "exercises/10_backward/test_x.py": MARKERS.format("10"),
    "exercises/01_rows/test_x.py": MARKERS.format("01"),
    "exercises/homework/test_x.py": MARKERS.format("homework"),
    "exercises/README.md": "See [one](01_rows/test_x.py), [ten](10_backward/test_x.py) and [the tests](../tests/test_x.py).\n",
    "exercises/AGENTS.md": "Ask first.\n<!-- instructors -->\nSecret.\n<!-- /instructors -->\n",
    "exercises/01_rows/README.md": """# Rows

In<!-- from 10 --> ten<!-- /from --> exercises.

| [one](test_x.py) |
| [ten](../10_backward/test_x.py) |

<!-- from 03 -->

Three.<!-- from 10 --> Ten.<!-- /from -->

<!-- /from -->

The end.
""",
    "solutions/my_fsdp.py": "x = 1\n",
    "tests/test_x.py": "",
    "docs/tutorial.md": "The path.\n",
    "docs/instructors.md": "",
    "notebooks/01.ipynb": "{}",
    "notebooks/01.py": "",
    "hwfsdp/__init__.py": "",
    "setup.cfg": "",
}


@pytest.fixture
def course(tmp_path: Path) -> Course:
    """A git repository with a course, and a file that git does not track."""
    root = tmp_path / "course"
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    subprocess.run(["git", "-C", str(root), "add", "."], check=True)
    (root / "exercises" / "grades.csv").touch()
    return find_course(root)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Build no wheel; note the files from which it would be built."""
    names: list[str] = []

    def build(source: Path, out: Path) -> Path:
        names.extend(path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file())
        (out / "p.whl").touch()
        return out / "p.whl"

    monkeypatch.setattr(release, "_build", build)
    return names


def written(course: Course, out: Path, upto: str | None = None) -> set[str]:
    return {path.relative_to(out).as_posix() for path in release.write_edition(course, out, upto)}


def test_the_edition_has_tracked_files_of_the_course_and_nothing_of_the_teachers(
    course: Course, built: list[str], tmp_path: Path
) -> None:
    found = written(course, tmp_path / "out")
    exercises = {name for name in FILES if name.startswith("exercises/")}
    top = {"README.md", "AGENTS.md", "p.whl"}
    assert found == exercises | top | {"docs/tutorial.md", "notebooks/01.ipynb"}
    assert not [name for name in built if name.startswith(("solutions", "tests")) or "grades" in name]
    assert {"hwfsdp/__init__.py", "setup.cfg", "exercises/README.md"} <= set(built)
    for name in ("AGENTS.md", "exercises/AGENTS.md"):
        assert (tmp_path / "out" / name).read_text() == "Ask first.\n"


TEN = "| [one](test_x.py) |\n| [ten](../10_backward/test_x.py) |"
PAGES = {  # the last exercise → what a page says
    "1": ("In exercises.", "| [one](test_x.py) |", ""),
    "3": ("In exercises.", "| [one](test_x.py) |", "Three.\n\n"),
    None: ("In ten exercises.", TEN, "Three. Ten.\n\n"),
}


def test_later_exercises_stay_and_no_page_speaks_of_them(
    course: Course, built: list[str], tmp_path: Path
) -> None:
    for upto, (words, rows, paragraphs) in PAGES.items():
        out = tmp_path / f"upto {upto}"
        found = written(course, out, upto)
        page = (out / "exercises" / "01_rows" / "README.md").read_text()
        assert page == f"# Rows\n\n{words}\n\n{rows}\n\n{paragraphs}The end.\n"
        if upto == "3":
            folders = {name.split("/")[1] for name in found if name.count("/") == 2}
            assert folders == {"01_rows", "03_naive"}
            page = (out / "exercises" / "README.md").read_text()
            assert page == "See [one](01_rows/test_x.py), ten and the tests.\n"


def test_a_folder_in_use_an_unknown_exercise_and_a_course_without_git_are_refused(
    course: Course, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="expected a new folder"):
        release.write_edition(course, course.root)
    with pytest.raises(UsageError, match="exercise 7"):
        release.write_edition(course, tmp_path / "out", "7")
    (course.root / ".git").rename(tmp_path / "git")
    with pytest.raises(UsageError, match="a git repository"):
        release.write_edition(course, tmp_path / "out")


@pytest.mark.long
def test_the_edition_is_small_and_its_wheel_lists_and_resets_without_the_repository(tmp_path: Path) -> None:
    out, site = tmp_path / "out", tmp_path / "site"
    files = release.write_edition(find_course(ROOT), out)
    assert len([path for path in files if path.suffix != ".png"]) <= 105
    with zipfile.ZipFile(next(out.glob("*.whl"))) as wheel:
        assert not [name for name in wheel.namelist() if name.startswith(("solutions", "tests"))]
        wheel.extractall(site)
    (out / "exercises" / "my_fsdp.py").write_text("x = 1\n")
    script = """from hwfsdp.course import commands
commands.list_exercises(False), commands.status(False), commands.reset_exercise("1", False)"""
    ran = run_python("-c", script, cwd=out, PYTHONPATH=str(site))
    assert ran.returncode == 0, ran.stderr
    assert "exercises/my_fsdp.py is the starter again." in ran.stdout
