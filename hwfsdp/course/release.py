"""`hwfsdp release OUT`: the student's edition, a copy of the files that a course needs and git tracks.

    exercises/     without those after `--upto`; the homework only with all stations, because its skeleton shows how an FSDP is built
    notebooks/     without the scripts that they are made from
    docs/          the pages that exercises and notebooks link to
    AGENTS.md      rules for an assistant, also in exercises/
    README.md      how to begin
    *.whl          the package, with the exercises as `hwfsdp reset` writes them

The package is a wheel: students install it, and read it where it is installed. What stays in the instructor's tree: solutions, tests,
benchmarks, teachers' pages, and all files that git does not track, such as submissions, grades and the secret. An instructor's
paragraph in a page, from `<!-- instructors -->` to `<!-- /instructors -->`, stays there, too.

An edition that ends at an exercise does not speak of later ones. A part of a page from `<!-- from 08 -->` to `<!-- /from -->`, with other
parts in it or not, is left out of editions that end before 08, as are table rows with a cell that links only to missing pages. Other
links to missing pages become words. Pictures that no page shows are left out, too.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from hwfsdp.course.exercises import Course, find_course
from hwfsdp.course.text import answer
from hwfsdp.errors import UsageError

PAGES = (
    "docs/tutorial.md",
    "docs/glossary.md",
    "docs/traces.md",
    "docs/traces.png",
    "docs/player.png",
    "docs/path.png",
    *(f"docs/pictures/{op}.png" for op in ("all_gather", "reduce_scatter", "all_reduce")),
    "docs/ai.md",
)
ONLY_FOR_THE_WHEEL = ("hwfsdp/", "setup.py", "setup.cfg", "pyproject.toml", "README.md")
HOMEWORK_FROM = "10"  # the last station that the homework needs
_FOR_INSTRUCTORS = re.compile(r"<!-- instructors -->.*?<!-- /instructors -->\n*", re.DOTALL)
_NO_MARK = r"(?:(?!<!-- from ).)*?"
_FROM = re.compile(  # whole paragraphs, or words, without marks in them: the innermost part
    rf"^<!-- from (?P<from>\d\d) -->\n\n(?P<lines>{_NO_MARK}\n)\n<!-- /from -->\n\n?"
    rf"|<!-- from (?P<words_from>\d\d) -->(?P<words>{_NO_MARK})<!-- /from -->",
    re.DOTALL | re.MULTILINE,
)
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#:\s]+)[^):]*\)")
README = """\
# Write FSDP, and train with it

```sh
python3 -m venv .venv && source .venv/bin/activate    # Python 3.11 or newer
pip install "{wheel}[notebooks]"
hwfsdp list             # what there is to do
hwfsdp demo             # what you are going to build: a GPT, sharded and not
hwfsdp check 1          # what your file does, and the next question; also: pytest exercises/01_rows
```

On Linux without a GPU, run `pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu` before the other `pip install`.
Without this command, pip downloads gigabytes of CUDA libraries that you do not need.

First read [exercises/README.md](exercises/README.md). [The path](docs/tutorial.md) names a notebook for each station.
"""


def release(out: Path, upto: str | None, as_json: bool) -> int:
    """Write the edition to a new folder, and say what is in it."""
    course = find_course()
    # first, because the new folder may be in the repository
    left_out = _listed(course.root, "--others", "--exclude-standard")
    files = write_edition(course, out, upto)
    numbers = sorted(path.name for path in (out / "exercises").glob("[0-9][0-9]_*"))
    lines = [
        f"{len(files)} files in {out}: exercises {numbers[0][:2]} to {numbers[-1][:2]}, without solutions."
    ]
    lines += [f"Not copied, because git does not track them: {', '.join(left_out[:5])}"] if left_out else []
    found = {"folder": str(out), "files": len(files), "exercises": numbers, "untracked": left_out}
    return answer(as_json, found, lines)


def write_edition(course: Course, out: Path, upto: str | None = None) -> list[Path]:
    """Write the edition, and return its files.

    Raises:
        UsageError: `out` is in use, `upto` is no exercise, git does not know the course, or no wheel can be built.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"release {out}", expected="a new folder", got="one in use", remedy="Name another.")
    last = course.exercise(upto, "release --upto").number if upto else "99"
    later = [each.folder.name for each in course.exercises if each.has_number and each.number > last]
    later += ["homework"] * (last < HOMEWORK_FROM)
    with tempfile.TemporaryDirectory(prefix="hwfsdp-release-") as folder:
        source = Path(folder)
        for name in _listed(course.root, "--cached"):
            given = name.startswith(("exercises/", *PAGES, "LICENSE")) or re.match(
                r"notebooks/.*\.ipynb$", name
            )
            if (
                name.startswith(tuple(f"exercises/{each}/" for each in later))
                or not (course.root / name).is_file()
            ):
                continue
            for target in [out] * bool(given) + [source] * bool(given or name.startswith(ONLY_FOR_THE_WHEEL)):
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(course.root / name, target / name)
        wheel = _build(source, out)
    (out / "README.md").write_text(README.format(wheel=wheel.name), encoding="utf-8")
    shutil.copyfile(out / "exercises" / "AGENTS.md", out / "AGENTS.md")
    for page in out.rglob("*.md"):
        page.write_text(_for_students(page, last), encoding="utf-8")
    _leave_out_pictures(out)
    return sorted(path for path in out.rglob("*") if path.is_file())


def _for_students(page: Path, last: str) -> str:
    """Return the text of a page in an edition that ends with the exercise `last`."""

    def there(link: re.Match[str]) -> bool:
        return (page.parent / link[2]).exists()

    def kept(line: str) -> bool:
        cells = [list(_LINK.finditer(cell)) for cell in line.split("|")] if line.startswith("|") else []
        return all(any(map(there, links)) for links in cells if links)

    def unmarked(part: re.Match[str]) -> str:
        if (part["from"] or part["words_from"]) > last:
            return ""
        return part["words"] if part["words_from"] else f"{part['lines']}\n"

    text, marked = _FOR_INSTRUCTORS.sub("", page.read_text(encoding="utf-8")), 1
    while marked:
        text, marked = _FROM.subn(unmarked, text)
    lines = "".join(filter(kept, (text.rstrip("\n") + "\n").splitlines(keepends=True)))
    return _LINK.sub(lambda link: link[0] if there(link) else link[1], lines)


def _leave_out_pictures(out: Path) -> None:
    """Remove pictures that no page of the edition shows. Some are for the site's dark theme, others belong to parts that are left out."""
    shown = ("({})", '"{}"')  # in Markdown and in HTML
    texts = {
        path: path.read_text(encoding="utf-8") for kind in ("*.md", "*.ipynb") for path in out.rglob(kind)
    }
    for picture in list(out.rglob("*.png")):
        names = {page: os.path.relpath(picture, page.parent) for page in texts}
        if not any(way.format(names[page]) in text for page, text in texts.items() for way in shown):
            picture.unlink()


def _listed(root: Path, *options: str) -> list[str]:
    ran = subprocess.run(["git", "-C", str(root), "ls-files", *options, "-z"], capture_output=True, text=True)
    if ran.returncode:
        got = " ".join(ran.stderr.split()) or "none"
        raise UsageError(
            "release", expected=f"a git repository in {root}", got=got, remedy="Release from a clone."
        )
    return sorted(filter(None, ran.stdout.split("\0")))


def _build(source: Path, out: Path) -> Path:
    """Build the package's wheel, without the network, and return its path."""
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    ran = subprocess.run([*pip, "--wheel-dir", str(out), str(source)], capture_output=True, text=True)
    if ran.returncode:
        got = ran.stderr.strip().splitlines()[-1:] or ["nothing"]
        raise UsageError(
            "release", expected="a wheel of the package", got=got[0], remedy="pip install setuptools"
        )
    return next(out.glob("*.whl"))
