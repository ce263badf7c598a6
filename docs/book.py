"""Make pages of the site from other files, each time the site is built.

The book of the package has a page for each folder and a section for each chapter (a module or a package). The docstring of
`hwfsdp/__init__.py` lists the folders. The docstring of each folder lists its chapters. A section has the docstrings of its chapter,
and in `core` and `features` the code, too. Sphinx reads only files below docs/, so exercises and notebooks are copied there.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "hwfsdp"
FOLDER = Path(__file__).parent / "book"
TESTS = 4  # a section names at most this many
WITH_CODE = ("core", "features", "interop")  # the book shows the code of these folders


class Chapter(NamedTuple):
    """A module or a package in hwfsdp, and the sentence about it in its folder's docstring."""

    name: str
    about: str


class Part(NamedTuple):
    """The chapters of one folder."""

    title: str
    chapters: list[Chapter]


def read_contents() -> list[Part]:
    """Return a part for each folder and each top-level module that `hwfsdp/__init__.py` lists, in its order."""
    parts = []
    for name, said in _listed(PACKAGE):
        chapters = [Chapter(name, said)]
        if (PACKAGE / name).is_dir():
            chapters = [Chapter(f"{name}.{each}", about) for each, about in _listed(PACKAGE / name)]
        parts.append(Part(f"`{name}`: {said}", chapters))
    return parts


def _listed(folder: Path) -> list[tuple[str, str]]:
    """Return the modules that a folder's docstring lists, each with its sentence."""
    said = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    there = {path.stem for path in folder.iterdir()}
    found = re.findall(r"^ *(\w+)  +(\S.*)$", said, re.MULTILINE)
    return [(name, text) for name, text in found if name in there]


def sources_of(chapter: Chapter) -> list[Path]:
    """Return the chapter's files. The first has the chapter's docstring."""
    path = PACKAGE.joinpath(*chapter.name.split("."))
    return [path.with_suffix(".py")] if path.with_suffix(".py").exists() else sorted(path.glob("*.py"))


def tests_of(chapter: Chapter) -> list[str]:
    """Return paths of tests that import the chapter. A test file with the chapter's name comes first."""
    package, _, name = f"hwfsdp.{chapter.name}".rpartition(".")
    wanted = re.compile(rf"\bfrom {package}\.{name}\b|\bfrom {package} import [^\n]*\b{name}\b")
    paths = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if wanted.search(path.read_text())]
    paths.sort(key=lambda path: path.stem != f"test_{name}")
    return [str(path.relative_to(ROOT)) for path in paths[:TESTS]]


def section(chapter: Chapter) -> Iterator[str]:
    """Yield the lines of a chapter's section, in Markdown."""
    sources = sources_of(chapter)
    yield from ("", f"## `{chapter.name}`: {chapter.about}", "")
    yield from ("```{eval-rst}", f".. automodule:: hwfsdp.{chapter.name}", "   :no-index:", "```", "")
    if chapter.name.startswith(WITH_CODE):
        text = sources[0].read_text()
        begin = (ast.parse(text).body[0].end_lineno or 0) + 1
        options = (":language: python", f":lines: {begin}-", f":lineno-start: {begin}")
        yield from (f"```{{literalinclude}} /../{sources[0].relative_to(ROOT)}", *options, "```", "")
    if len(sources) > 1:
        for path in sources[1:]:
            first = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0]
            yield f"- `{path.relative_to(PACKAGE)}`: {first}"
        yield ""
    lines = sum(len(path.read_text().splitlines()) for path in sources)
    yield f"*Source:* `{sources[0].relative_to(ROOT)}`, {lines:,} lines with docstrings and comments."
    if tests := tests_of(chapter):
        yield f" *Tests:* {', '.join(f'`{test}`' for test in tests)}."


def write_book(app: Any = None) -> None:
    """Write the pages into docs/book/."""
    FOLDER.mkdir(exist_ok=True)
    parts = read_contents()
    for number, part in enumerate(parts, 1):
        lines = [f"# {number} · {part.title}", *(line for c in part.chapters for line in section(c))]
        _write(FOLDER / f"{number:02d}.md", "\n".join(lines) + "\n")
    _write(FOLDER / "index.md", "\n".join(_index(parts)) + "\n")
    for path in FOLDER.glob("[0-9][0-9].md"):
        if int(path.stem) > len(parts):  # an older package had more parts
            path.unlink()


def _index(parts: list[Part]) -> Iterator[str]:
    yield from (
        "# The book of the package",
        "",
        "Parts are folders of the package, chapters are modules, in reading order.",
    )
    yield from (
        "",
        "```{toctree}",
        ":hidden:",
        "",
        *(f"{number:02d}" for number in range(1, len(parts) + 1)),
        "```",
    )
    for number, part in enumerate(parts, 1):
        yield from (
            "",
            f"**[{number} · {part.title}]({number:02d}.md)**",
            "",
            "| chapter | is about |",
            "| --- | --- |",
        )
        yield from (f"| `{chapter.name}` | {chapter.about} |" for chapter in part.chapters)


def copy_notebooks(app: Any = None) -> None:
    """Copy the notebooks to where Sphinx finds them, and write an index of their titles."""
    folder = Path(__file__).parent / "notebooks"
    folder.mkdir(exist_ok=True)
    paths = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
    for path in paths:
        _write(folder / path.name, _with_note_in_notebook(path))
    hidden = ["```{toctree}", ":hidden:", "", *(path.stem for path in paths), "```"]
    first = (
        "# Notebooks\n\nEach has one idea, and was run from top to bottom as it stands here. Run them yourself: "
        "`.venv/bin/jupyter lab notebooks`.\n"
    )
    _write(folder / "index.md", "\n".join([first, *map(_line_about, paths), "", *hidden]) + "\n")


def _line_about(path: Path) -> str:
    """Return a line of a list: a link to a notebook, and its first paragraph."""
    title, said, *_ = "".join(json.loads(path.read_text())["cells"][0]["source"]).split("\n\n")
    return f"- [{title.removeprefix('# ')}]({path.name}): {' '.join(said.split())}"


def copy_exercises(app: Any = None) -> None:
    """Copy the exercises' pages and pictures to where Sphinx finds them. finish.py chooses between a picture and its dark twin."""
    for page in sorted([*(ROOT / "exercises").rglob("README.md"), *(ROOT / "exercises").glob("lab/bugs.md")]):
        copy = Path(__file__).parent / page.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        is_first = page.name == "README.md"
        below = _PAGES_BELOW.get(page.parent.name, "") if is_first else ""
        told = re.sub(r'<picture>\n.*?<img alt="(.*?)" src="(.*?)">\n</picture>', r"![\1](\2)", page.read_text(), flags=re.DOTALL)
        text = _with_note(told, "\n".join(_how_to_run(page.parent)) if is_first else "")
        _write(copy, text + below)
        for picture in page.parent.glob("*.png"):
            shutil.copyfile(picture, copy.parent / picture.name)


_PAGES_BELOW = {
    folder: "\n```{toctree}\n:hidden:\n:glob:\n\n" + "\n".join(pages) + "\n```\n"
    for folder, pages in {
        "exercises": ["[01]?_*/README", "homework/README", "lab/README"],
        "lab": ["bugs"],
    }.items()
}


def _with_note(text: str, note: str) -> str:
    """Return the page with a note below its title."""
    title, _, rest = text.partition("\n")
    return f"{title}\n\n```{{admonition}} Run this\n:class: tip\n\n{note}\n```\n{rest}" if note else text


def _with_note_in_notebook(path: Path) -> str:
    """Return the notebook as JSON. A note in its first cell says how to run it."""
    notebook = json.loads(path.read_text())
    first = notebook["cells"][0]
    note = (
        f"`.venv/bin/jupyter lab notebooks/{path.name}` opens this notebook. Here you see its code and its last output. "
        "Change the numbers and run it again."
    )
    first["source"] = _with_note("".join(first["source"]), note)
    return json.dumps(notebook, ensure_ascii=False, indent=1) + "\n"


def _how_to_run(folder: Path) -> Iterator[str]:
    """Yield sentences: where to write, and which command to type. A page that only lists exercises gets none."""
    number, _, topic = folder.name.partition("_")
    if folder.name == "homework" or number.isdigit():
        own = {"homework": "hw_fsdp.py"}.get(folder.name, f"{topic}.py")
        file = f"{folder.name}/{own}" if (folder / own).exists() else "my_fsdp.py"
        exercise = int(number) if number.isdigit() else folder.name
        yield f"Write in `exercises/{file}`. `hwfsdp check {exercise}` grades it. `hwfsdp hint {exercise}` shows a hint."


def point_to_copies(app: Any, name: str, source: list[str]) -> None:
    """Change links to notebooks and exercises into links to their copies, and links to code into its file's name."""
    text = re.sub(r"\]\(\.\./(notebooks|exercises)/", r"](\1/", source[0])
    if name.startswith("exercises/"):
        text = re.sub(r"\[([^\]]+\.(?:py|toml))\]\([^)]+\)", r"`\1`", text)
        text = text.replace("../docs/", "../")
    source[0] = text


def _write(path: Path, text: str) -> None:
    """Write a file, unless it has this text already: Sphinx reads every newer file again."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def set_docstring(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Make reStructuredText of a docstring. Tables, and lines that are indented after an empty line, stay as they are."""
    lines[:] = _mark_verbatim(_mark_returns(lines))


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())


def _mark_verbatim(lines: list[str]) -> list[str]:
    marked: list[str] = []
    before, verbatim = 0, -1  # depths of the last line, and of the text around verbatim lines (-1: none)
    for number, line in enumerate(lines):
        if not line.strip():
            marked.append(line)
            continue
        if verbatim >= 0 and _depth(line) <= verbatim and not line.lstrip().startswith("|"):
            verbatim = -1
        if verbatim < 0:
            alone = number > 0 and not lines[number - 1].strip()
            if alone and _depth(line) > before:
                marked += [" " * before + "::", ""]
                verbatim = before
            elif line.lstrip().startswith("|"):
                marked += ["", " " * _depth(line) + "::", ""]
                verbatim = _depth(line)
        table = line.lstrip().startswith("|") and verbatim == _depth(line)
        marked.append("   " + line if table else line)
        before = _depth(line) if verbatim < 0 else before
    return marked


def _mark_returns(lines: list[str]) -> list[str]:
    """Mark what a function returns as text, or as a list of names. Other projects write a type and a colon there."""
    for at, line in enumerate(lines):
        if line.strip() not in ("Returns:", "Yields:"):
            continue
        end = at + 1
        while end < len(lines) and (not lines[end].strip() or _depth(lines[end]) > _depth(line)):
            end += 1
        block = [each for each in lines[at + 1 : end] if each.strip()]
        base = _depth(block[0])
        items = [
            n for n, each in enumerate(block) if _depth(each) == base and re.match(r"[\w, ]+: ", each.strip())
        ]
        if len(items) > 1:
            block = [
                (
                    " " * base + ("- " if _depth(each) == base else "  ") + each.strip()
                    if _depth(each) == base or n > items[0]
                    else each
                )
                for n, each in enumerate(block)
            ]
        depth = " " * _depth(line)
        said = [
            f"{depth}:{line.strip()[:-1].lower()}:",
            *("" for _ in items[:1] if len(items) > 1),
            *block,
            "",
        ]
        return [*lines[:at], "", *said, *_mark_returns(lines[end:])]
    return lines


def setup(app: Any) -> dict[str, Any]:
    """Connect the functions above to Sphinx, which calls this."""
    app.connect("builder-inited", write_book)
    app.connect("builder-inited", copy_notebooks)
    app.connect("builder-inited", copy_exercises)
    app.connect("source-read", point_to_copies)
    app.connect("autodoc-process-docstring", set_docstring, priority=400)  # before Sphinx reads sections
    return {"parallel_read_safe": True}
