"""Record the terminal session of the README again: `.venv/bin/python docs/recording.py`.

The script types into a shell in a pseudo-terminal, in a copy of the course: the demo, then station 01 not begun, wrong and right. It
keeps the output and its times as an asciicast (https://docs.asciinema.org/manual/asciicast/v2/), and draws them as an SVG that
stylesheets animate. `--draw` draws the existing recording.

    record   asciicast v2, with true times             docs/_static/demo.cast
    shorten  cut waits, add time to read
    play     a small terminal, frame by frame
    draw     rows with the times when they are seen    docs/_static/demo.svg

The film begins where the demo prints its results. Without animation, the picture shows its last frame. Phones get a picture without
animation instead, of a narrow terminal that says what is wrong with an answer (demo_phone.svg). Run `make setup` first: the script installs nothing. Its terminal knows only
the control characters that these commands write, and raises an error at any other.
"""

from __future__ import annotations

import argparse
import codecs
import fcntl
import json
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from hwfsdp.course.stages import stage

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "_static"
LONGEST_WAIT = 600.0  # seconds for one command

FILE = "exercises/my_fsdp.py"
# the setting of bash, and the end of the prompt that bash then prints
PROMPT, PROMPTED = r"\[\e[34m\]$\[\e[0m\] ", "$\x1b[0m "
TYPED = (
    "# The first time, this sets up .venv, too. That takes minutes.",
    "make demo",
    "source .venv/bin/activate",
    "hwfsdp check 1",
    "# First try: n // W rows for everyone, and the remainder to the first ranks.",
    f"cp first_try.py {FILE} && hwfsdp check 1",
    "# Second try: full chunks, until there are no rows left.",
    f"cp second_try.py {FILE} && hwfsdp check 1",
)


class Film(NamedTuple):
    """What is typed into a terminal of this size, and the name of the recording."""

    name: str
    title: str
    columns: int
    rows: int
    typed: tuple[str, ...]

    @property
    def cast(self) -> Path:
        return FOLDER / f"{self.name}.cast"


FILMS = (
    Film("demo", "make demo, then hwfsdp check 1 on a file not begun, a wrong and a right answer", 100, 24, TYPED),
    Film("demo_phone", "hwfsdp check 1 on a wrong answer", 48, 19, (".venv/bin/hwfsdp check 1",)),
)
FIRST_TRY = """def rows_of(n: int, world_size: int, rank: int) -> tuple[int, int]:
    fewer, more = divmod(n, world_size)
    start = rank * fewer + min(rank, more)
    return start, start + fewer + (rank < more)
"""


class Event(NamedTuple):
    """A piece of output: seconds since the beginning, and the text."""

    at: float
    text: str


# --- Record ------------------------------------------------------------------------------------------------


def record(film: Film, folder: Path) -> list[Event]:
    """Type the commands into a shell in the folder. Wait for the prompt before each command."""
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        kept = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
        environment = {**kept, "TERM": "xterm-256color", "LANG": "C.UTF-8", "PS1": PROMPT}
        os.execvpe("bash", ["bash", "--norc", "--noprofile", "--noediting", "-i"], environment)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", film.rows, film.columns, 0, 0))
    began, events = time.monotonic(), []
    decoder = codecs.getincrementaldecoder("utf-8")()

    def read_until(ending: str) -> None:
        seen, deadline = "", time.monotonic() + LONGEST_WAIT
        while not seen.endswith(ending):
            if not select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f"the shell wrote no {ending!r} within {LONGEST_WAIT:.0f} s")
            text = decoder.decode(os.read(terminal, 65536))
            events.append(Event(time.monotonic() - began, text))
            seen += text

    read_until(PROMPTED)
    for command in film.typed:
        for character in command:
            os.write(terminal, character.encode())
            read_until(character)
        os.write(terminal, b"\n")
        read_until(PROMPTED)
    os.write(terminal, b"exit\n")
    os.waitpid(child, 0)
    return events


def copy_course(folder: Path) -> None:
    """Copy the course and the two tries, wrong and right, into a folder. Use the current environment; install nothing."""
    listed = ["git", "ls-files", "exercises", "solutions", "Makefile", "setup.cfg", "pyproject.toml"]
    for name in subprocess.check_output(listed, cwd=ROOT, text=True).splitlines():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    tools, ours = ROOT / ".venv" / "bin", folder / ".venv" / "bin"
    ours.mkdir(parents=True)
    for name in ("bin/hwfsdp", "bin/activate", "lib", "pyvenv.cfg"):
        (ours.parent / name).symlink_to(ROOT / ".venv" / name)
    # Under the name that it has here, Python tells the user commands of this environment.
    (ours / "python").write_text(f'#!/bin/bash\n[ "$2" = pip ] && exit 1\nexec -a "$0" "{tools}/python" "$@"\n')
    (ours / "python").chmod(0o755)
    (ours.parent / ".installed").write_text((ROOT / ".venv" / ".installed").read_text())
    planned = subprocess.check_output(["make", "-n", "demo"], cwd=folder, text=True)
    if planned.count("\n") != 1:  # setup would replace the installed package by this copy
        raise SystemExit(
            f"recording: expected make demo to do nothing else, got:\n{planned}Run make setup first."
        )
    right = stage((ROOT / "solutions" / "my_fsdp.py").read_text(), "01")
    (folder / "second_try.py").write_text(right)
    before, rest = right.split("def rows_of", 1)
    (folder / "first_try.py").write_text(f"{before}{FIRST_TRY}\n\n{rest[rest.index('# --- 02') :]}")


def write_cast(film: Film, events: list[Event]) -> None:
    """Write the recording."""
    header = {
        "version": 2,
        "width": film.columns,
        "height": film.rows,
        "title": f"hwfsdp: {film.title}",
        "env": {"TERM": "xterm-256color", "SHELL": "bash"},
    }
    lines = [header, *([round(event.at, 3), "o", event.text] for event in events)]
    film.cast.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def read_cast(film: Film) -> list[Event]:
    """Read the existing recording."""
    lines = [json.loads(line) for line in film.cast.read_text().splitlines()]
    return [Event(at, text) for at, kind, text in lines[1:] if kind == "o"]


# --- Shorten -----------------------------------------------------------------------------------------------

LETTER, PROGRESS, WAIT, LAST = 0.045, 0.05, 0.9, 9.0  # seconds at most
A_LINE = 0.28  # seconds to read a line


def shorten(events: list[Event]) -> tuple[list[Event], float]:
    """Return the same events in less time, and the duration of all."""
    shortened: list[Event] = []
    now = before = 0.0
    lines = 0  # number of lines since the last typed character
    for event in events:
        typed = len(event.text) == 1
        longest = LETTER if typed else PROGRESS if event.text.startswith("\r") else WAIT
        if typed and lines:
            now += 0.8 + A_LINE * lines
            lines = 0
        now += min(event.at - before, longest) if not typed else LETTER
        lines += event.text.count("\n") if len(event.text) > 2 else 0
        before = event.at
        shortened.append(Event(now, event.text))
    return shortened, now + LAST


# --- Play --------------------------------------------------------------------------------------------------

COLORS = {  # contrast with the background: at least 4.5:1 (https://www.w3.org/TR/WCAG21/#contrast-minimum)
    "": "#d8dee9",
    "1": "#ffffff",
    "31": "#f08a93",
    "32": "#9fd086",
    "34": "#8ab4f8",
    "90": "#98a2b3",
}
PIECE = re.compile(r"\x1b\[(?P<color>[0-9;]*)m|(?P<erase>\x1b\[K)|(?P<control>[\x00-\x1f\x7f])|(?P<character>.)", re.DOTALL)
Cell = tuple[str, str]  # a character, and its color
Row = tuple[Cell, ...]


class Terminal:
    """A small terminal. It knows characters, colors, returns, new lines, lines that are too long, and how to erase the end of a line."""

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self.rows: list[list[Cell]] = [[]]
        self._column, self._color = 0, ""

    def write(self, text: str) -> None:
        """Write the output of a program. Raises ValueError at anything that this terminal does not know."""
        for piece in PIECE.finditer(text):
            if piece["color"] is not None:
                self._color = "" if piece["color"] in ("", "0") else piece["color"]
                if self._color not in COLORS:
                    raise ValueError(
                        f"recording: expected one of the colors {list(COLORS)}, got {self._color!r}"
                    )
            elif piece["erase"]:
                del self.rows[-1][self._column :]
            elif piece["control"] == "\r":
                self._column = 0
            elif piece["control"] == "\n":
                self._next_row()
            elif piece["control"]:
                raise ValueError(f"recording: expected text, colors and new lines, got {piece['control']!r}")
            else:
                self._put(piece["character"])

    def _put(self, character: str) -> None:
        if self._column == self._columns:
            self._next_row()
            self._column = 0
        row = self.rows[-1]
        row[self._column : self._column + 1] = [(character, self._color)]
        self._column += 1

    def _next_row(self) -> None:
        self.rows.append([])


class Seen(NamedTuple):
    """One state of a row, seen from one time to another."""

    row: int
    cells: Row
    begin: float
    end: float


def play(film: Film, events: list[Event], duration: float) -> tuple[list[Seen], list[tuple[float, int]]]:
    """Return the states of all rows, and the number of rows at each time."""
    terminal, seen = Terminal(film.columns), []
    current: dict[int, tuple[Row, float]] = {}
    heights: list[tuple[float, int]] = []
    for event in events:
        terminal.write(event.text)
        for number, row in enumerate(map(tuple, terminal.rows)):
            cells, since = current.get(number, ((), 0.0))
            if cells != row:
                seen.append(Seen(number, cells, since, event.at))
                current[number] = row, event.at
        heights.append((event.at, len(terminal.rows)))
    seen += [Seen(number, cells, since, duration) for number, (cells, since) in current.items()]
    return [each for each in seen if each.cells and each.end > each.begin], heights


# --- Draw --------------------------------------------------------------------------------------------------

CHARACTER, LINE, SIZE = 8.4, 19, 14  # pixels: width of a cell, height, size of the font
MARGIN, BAR = 16, 34
FONT = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono','Liberation Mono',monospace"


def draw(film: Film, seen: list[Seen], heights: list[tuple[float, int]], duration: float, opens: float) -> str:
    """Return the picture as SVG. A row that is not in the last frame is hidden until the animation shows it. It begins at the time `opens`."""
    width, height = round(film.columns * CHARACTER + 2 * MARGIN), BAR + film.rows * LINE + MARGIN
    names: dict[tuple[float, float], str] = {}
    groups: dict[tuple[float, float], list[str]] = {}
    for each in seen:
        names.setdefault((each.begin, each.end), f"s{len(names)}")
        groups.setdefault((each.begin, each.end), []).extend(_texts(each))
    rules = [_appear(name, begin, end, duration) for (begin, end), name in names.items()]
    up = [(at, max(0, count - film.rows) * LINE) for at, count in heights]
    hidden = ' visibility="hidden"'
    body = [
        f'<g class="{names[times]}"{"" if times[1] == duration else hidden}>{"".join(texts)}</g>'
        for times, texts in groups.items()
    ]
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">
<title>A terminal: {film.title}</title>
<style>
text{{font:{SIZE}px {FONT};white-space:pre}}
{"".join(f".c{color}{{fill:{value}}}" for color, value in COLORS.items())}.c1{{font-weight:bold}}
.s{{animation:up {duration:.2f}s step-end infinite}}
{_scroll(up, duration)}
{"".join(rules)}*{{animation-delay:-{opens:.2f}s!important}}
@media (prefers-reduced-motion:reduce){{*{{animation:none!important}}}}
</style>
<rect width="{width}" height="{height}" rx="8" fill="#20242c"/>
<g fill="#4c5361"><circle cx="20" cy="17" r="5"/><circle cx="38" cy="17" r="5"/><circle cx="56" cy="17" r="5"/></g>
<svg x="{MARGIN}" y="{BAR}" width="{width - 2 * MARGIN}" height="{film.rows * LINE}">
<g class="s" transform="translate(0,{-up[-1][1]})">
{"".join(body)}
</g></svg></svg>
"""


def _texts(seen: Seen) -> Iterator[str]:
    """Yield the words of a row, each at its column, so that they are aligned in a font of any width."""
    column = 0
    for color, text in _runs(seen.cells):
        for word in re.finditer(r"\S+(?: \S+)*", text):
            x = (column + word.start()) * CHARACTER
            length = len(word[0]) * CHARACTER
            yield (
                f'<text class="c{color}" x="{x:.4g}" y="{seen.row * LINE + SIZE}" textLength="{length:.4g}">'
                f"{escape(word[0])}</text>"
            )
        column += len(text)


def _runs(cells: Row) -> Iterator[tuple[str, str]]:
    begin = 0
    for end in range(1, len(cells) + 1):
        if end == len(cells) or cells[end][1] != cells[begin][1]:
            yield cells[begin][1], "".join(character for character, _ in cells[begin:end])
            begin = end


def _appear(name: str, begin: float, end: float, duration: float) -> str:
    steps = {
        0.0: "hidden",
        100 * begin / duration: "visible",
        100 * end / duration: "hidden",
        100.0: "hidden",
    }
    if end == duration:
        steps[100.0] = "visible"
    frames = "".join(f"{at:.6g}%{{visibility:{value}}}" for at, value in sorted(steps.items()))
    return f".{name}{{animation:{name} {duration:.2f}s step-end infinite}}@keyframes {name}{{{frames}}}\n"


def _scroll(up: list[tuple[float, int]], duration: float) -> str:
    steps = {0.0: up[0][1]}
    for at, pixels in up:
        if pixels != list(steps.values())[-1]:
            steps[100 * at / duration] = pixels
    steps[100.0] = up[-1][1]
    frames = "".join(f"{at:.6g}%{{transform:translateY({-pixels}px)}}" for at, pixels in steps.items())
    return f"@keyframes up{{{frames}}}"


def main() -> None:
    """Record, unless `--draw` is given, and draw the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--draw", action="store_true", help="draw the recording that is there")
    if not parser.parse_args().draw:
        with tempfile.TemporaryDirectory() as folder:
            copy_course(Path(folder))
            for film in FILMS:
                write_cast(film, record(film, Path(folder)))
                shutil.copy(Path(folder, "first_try.py"), Path(folder, FILE))  # the picture for phones is of this try
    for film in FILMS:
        make_picture(film)


def make_picture(film: Film) -> None:
    """Draw a recording. The picture for phones is its last frame."""
    events, duration = shorten(read_cast(film))
    if film is FILMS[0]:
        opens = next(event.at for event in events if "--to html" in event.text) + 1  # the last line of the demo's results
    else:
        events, opens = [Event(0.0, "".join(event.text for event in events).removesuffix("$\x1b[0m "))], 0.0
    picture = film.cast.with_suffix(".svg")
    picture.write_text(draw(film, *play(film, events, duration), duration, opens))
    print(f"{picture.relative_to(ROOT)}: {duration:.0f} s, {picture.stat().st_size / 1000:.0f} kB", file=sys.stderr)


if __name__ == "__main__":
    main()
