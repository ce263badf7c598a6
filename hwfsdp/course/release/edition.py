"""Write the student's edition into a new folder.

    the package     every hole blank in the text, with its compiled body beside it (`bodies`) for demo, notebooks and
                    prerequisites; all checks compiled; without the reference of the stations
    exercises/      the starters, and a copy of each to compare with
    tests/          the tests that a student can pass
    left out        solutions, the tests of the package, answers, benchmarks, the grader of a class, and the FAQ, which names the
                    causes of the lab's bugs

Only files that git tracks are copied. An instructor's tree may also have submissions, grades or a secret (`untracked`).

Note [Handed out in parts]
    An edition up to an exercise says nothing about later ones. In a page, a part between `<!-- from 08 -->` and `<!-- /from -->` is
    left out of editions that end before 08. The homework is in editions with all stations only, because its skeleton shows how
    an FSDP is built.

Note [One version of Python]
    Compiled code is for one minor version of Python: the version of the instructor who made the edition. setup.cfg says so, so
    that pip says so too.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path

from hwfsdp.course.commands import everything
from hwfsdp.course.manifest import HOMEWORK, PACKAGE, Course, Exercise, compiled_body, module_source
from hwfsdp.course.overlay import blanked
from hwfsdp.course.refusals import check_new_folder, unusable
from hwfsdp.course.release import bodies
from hwfsdp.course.release.leaks import find_leaks, secrets_of
from hwfsdp.course.stations.stages import LAST
from hwfsdp.course.submission import KEPT_STARTER, starter
from hwfsdp.course.trust import codes_in

_LEFT_OUT = tuple("""solutions/ tests/ benchmarks/ .ci/ .github/ docs/grading.md docs/instructors.md
    docs/faq.md docs/faq.py docs/pictures/faq_ docs/recording.py CONTRIBUTING.md CHANGELOG.md
    docs/performance.md docs/bench.png docs/gpu. docs/testing.md
    hwfsdp/course/release/ hwfsdp/course/stations/my_fsdp.py hwfsdp/course/gradebook/ hwfsdp/course/__main__.py
    hwfsdp/course/mutants. hwfsdp/course/grader_report.py hwfsdp/course/templates/grading.md
    hwfsdp/cli/release.py hwfsdp/cli/grade.py""".split())
_KEPT_TESTS = ("tests/exercises/", "tests/test_edition.py")
# Folders of the course. In the second one, the marks are not secret, and `SOURCE` is not there.
_COMPILED = ("course/checks", "course/stations")
_WITH_BODIES = [f"{folder}/*{bodies.SUFFIX}" for folder in (bodies.FOLDER.name, *_COMPILED)]
_AS_TEXT = ("__init__.py", "stages.py")
_FILL = "\n\nfrom hwfsdp import bodies  # noqa: E402\n\nbodies.fill(__name__)\n"
_LOAD = "\nfrom hwfsdp import bodies\n\nbodies.load(__name__)\n"
_FOR_INSTRUCTORS = re.compile(  # in a page: whole paragraphs, or a part of one; in the Makefile: targets
    r"^<!-- instructors -->\n.*?^<!-- /instructors -->\n\n?| ?<!-- instructors -->.*?<!-- /instructors -->"
    r"|^# instructors\n.*?^# /instructors\n\n?",
    re.DOTALL | re.MULTILINE,
)
_UP_TO_MARK = r"(?:(?!<!-- from ).)*?"
_FROM = re.compile(  # in a page: whole paragraphs, or a part of one, without marks in it. See Note [Handed out in parts]
    rf"^<!-- from (?P<lines_from>\d\d) -->\n\n(?P<lines>{_UP_TO_MARK}\n)\n<!-- /from -->\n\n?"
    rf"|<!-- from (?P<words_from>\d\d) -->(?P<words>{_UP_TO_MARK})<!-- /from -->",
    re.DOTALL | re.MULTILINE,
)
_COMMAND = re.compile(rf"^hwfsdp [^\n]*\b{HOMEWORK}\b[^\n]*\n", re.MULTILINE)
_YOURSELF = "**Write it yourself"  # at the end of a notebook: the exercises that it leads to
_LEADS_TO = re.compile(r"(?:,? and|:)(?P<item>[^:()`]*\(`exercises/[^)]*\))")
_EXERCISE = re.compile(r"`(exercises/\w+)`")
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#:\s]+)[^):]*\)")
_MINOR = sys.version_info.minor
_CHANGES = {  # files at the top that mention missing parts: a pattern → its replacement
    "Makefile": {
        _FOR_INSTRUCTORS.pattern: "",
        r" --numprocesses \$\(TEST_JOBS\) --dist loadfile": "",
        r"^TEST_JOBS  \?= 2\n": "",
        "## run the tests, TEST_JOBS files at a time": "## check this edition, and the exercises that you have begun",
    },
    "README.md": {  # the last branch of a tree is drawn as the last one
        r"^hwfsdp (?:grade|release) [^\n]*\n|^[^\n]*\(not in the student's edition\)\n": "",
        r"^│   ├(── [^\n]*\n)(?!│)": r"│   └\1",
    },
    "setup.cfg": {  # Note [One version of Python]
        r"^python_requires = [^\n]*": f"python_requires = ==3.{_MINOR}.*",
        rf"^[^\n]*Python :: 3\.(?!{_MINOR}\n)\d+\n": "",
        r"^# Programs that tests/clients trains[^\n]*\n(?:\w+ =\n(?:    [^\n]*\n)+)+": "",
        "hwfsdp = py.typed": ", ".join(["hwfsdp = py.typed", *_WITH_BODIES]),
    },
}


def write_edition(course: Course, out: Path, upto: int | None = None) -> list[Path]:
    """Write the student's edition of a course, and prove that it contains no answer.

    Args:
        out: a folder that does not exist, or is empty.
        upto: the last exercise to be handed out; None: all of them. Holes of later exercises are blank too.

    Returns:
        The files that were written.

    Raises:
        UsageError: `out` is in use, `upto` is not an exercise, or the text of an answer would be left.
    """
    check_new_folder("release", out)
    last = course.exercise(upto).number if upto is not None else course.exercises[-1].number
    missing = [exercise.directory for exercise in course.exercises if exercise.number > last]
    if int(last) < LAST:
        missing.append(HOMEWORK)
    for name in _travelling(course.root, [f"exercises/{directory}/" for directory in missing]):
        target = out / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(course.root / name, target)
    _blank_package(course, out)
    _compile_checks(out / "hwfsdp")
    for exercise in everything(course):
        if exercise.directory not in missing:
            _put_starter(exercise, out / "exercises" / exercise.target)
    _change_files(out, last)
    leaks = list(find_leaks(out, secrets_of(course)))
    if leaks:
        raise unusable("release.leak", folder=out, count=len(leaks), first=leaks[0])
    return sorted(path for path in out.rglob("*") if path.is_file())


def untracked(root: Path) -> list[str]:
    """Return the files that git neither tracks nor ignores. The edition does not contain them."""
    return _listed(root, "--others", "--exclude-standard")


def _travelling(root: Path, left_out: Sequence[str]) -> Iterator[str]:
    """Yield the files that git tracks, unless they are secret."""
    for name in _listed(root, "--cached"):
        kept = name.startswith(_KEPT_TESTS) or not name.startswith((*_LEFT_OUT, *left_out))
        if kept and (root / name).is_file():
            yield name


def _listed(root: Path, *options: str) -> list[str]:
    call = ["git", "-C", str(root), "ls-files", *options, "-z"]
    listed = subprocess.run(call, capture_output=True, text=True)
    if listed.returncode:
        raise unusable("release.git", root=root, got=" ".join(listed.stderr.split()) or "none")
    return sorted(filter(None, listed.stdout.split("\0")))


def _blank_package(course: Course, out: Path) -> None:
    """Blank all holes in the text, and write their compiled bodies beside it."""
    package = out / "hwfsdp"
    (package / bodies.FOLDER.name).mkdir()
    for place in [place for exercise in course.exercises for place in exercise.places]:
        body = body_of(place.module, module_source(place.module), place.name)
        compiled_body(place, package).write_bytes(bodies.pack(body))
    for module, text in blanked(course.exercises).items():
        package.joinpath(*module.split(".")[1:]).with_suffix(".py").write_text(text + _FILL)
    shutil.copyfile(PACKAGE / "course" / "release" / "bodies.py", package / "bodies.py")


def _compile_checks(package: Path) -> None:
    """Compile every module of the checks. Only the first paragraph of its docstring stays."""
    for path in (path for name in _COMPILED for path in (package / name).glob("*.py")):
        if path.name not in _AS_TEXT:
            module, source = f"hwfsdp.course.{path.parent.name}.{path.stem}", path.read_text()
            path.with_suffix(bodies.SUFFIX).write_bytes(bodies.pack(_compiled(module, source)))
            said = (ast.get_docstring(ast.parse(source)) or "").partition("\n\n")[0]
            path.write_text(f'"""{said}"""\n{_LOAD}')


def _compiled(module: str, source: str) -> types.CodeType:
    """Compile a module. The code does not contain the path of its file."""
    code: types.CodeType = compile(source, f"<{module}, compiled>", "exec", dont_inherit=True)
    return code


def body_of(module: str, source: str, name: str) -> types.CodeType:
    """Return the compiled function.

    Raises:
        LookupError: there is no function of this name.
    """
    for code in codes_in(_compiled(module, source)):
        if code.co_qualname == name:
            return code
    raise LookupError(f"no function {name} in {module}")


def _put_starter(exercise: Exercise, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    for each in (path, path.with_name(KEPT_STARTER)):
        each.write_text(starter(exercise))


def _change_files(out: Path, last: str) -> None:
    """Change the pages, and the files at the top that mention missing parts. `last` is the number of the last exercise."""
    for name, changes in _CHANGES.items():
        text = (out / name).read_text()
        for gone, instead in changes.items():
            text = re.sub(gone, instead, text, flags=re.MULTILINE | re.DOTALL)
        (out / name).write_text(text)
    for page in [*out.glob("*.md"), *out.glob("docs/*.md"), *out.glob("exercises/**/*.md")]:
        _change_page(page, last, has_homework=(out / "exercises" / HOMEWORK).exists())
    for path in out.glob("notebooks/*.ipynb"):
        _change_notebook(path, out)


def _change_page(page: Path, last: str, has_homework: bool) -> None:
    """Remove parts marked for instructors or for later exercises, and table rows with a cell that links only to missing pages.

    Other links to missing pages become words.
    """

    def kept_from(found: re.Match[str]) -> str:
        if (found["lines_from"] or found["words_from"]) > last:
            return ""
        return found["words"] if found["words_from"] else f"{found['lines']}\n"

    def there(link: re.Match[str]) -> bool:
        return (page.parent / link[2]).exists()

    def kept(line: str) -> bool:
        cells = [list(_LINK.finditer(cell)) for cell in line.split("|")] if line.startswith("|") else []
        return all(any(map(there, links)) for links in cells if links)

    text, marked = _FOR_INSTRUCTORS.sub("", page.read_text()), 1
    while marked:
        text, marked = _FROM.subn(kept_from, text)
    text = text.rstrip("\n") + "\n"
    text = text if has_homework else _COMMAND.sub("", text)
    lines = "".join(filter(kept, text.splitlines(keepends=True)))
    page.write_text(_LINK.sub(lambda link: link[0] if there(link) else link[1], lines))


def _change_notebook(path: Path, out: Path) -> None:
    """Remove missing exercises from the end of a notebook, and from the end of the script beside it."""
    notebook = json.loads(path.read_text())
    last = notebook["cells"][-1]
    last["source"] = _leads("".join(last["source"]), out).splitlines(keepends=True)
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
    script = path.with_suffix(".py")
    script.write_text(_leads(script.read_text().rstrip("\n"), out) + "\n")


def _leads(text: str, out: Path) -> str:
    said, mark, rest = text.rpartition(_YOURSELF)
    found = list(_LEADS_TO.finditer(rest))
    items = [each["item"] for each in found]
    there = [item for item in items if all((out / name).exists() for name in _EXERCISE.findall(item))]
    if len(there) == len(found):
        return text
    return f"{said}{mark}{rest[:found[0].start()]}:{', and'.join(there)}." if there else said.rstrip()
