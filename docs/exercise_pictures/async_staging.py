"""15: what training waits for, when it saves at once and when it saves in the background; and who has which buffers."""

from __future__ import annotations

from typing import NamedTuple


from exercise_pictures.drawing import box, clear, headline, say, write_below
from hwfsdp.plot import sheet, style
from hwfsdp.plot.style import Figure

LEFT = 2.3  # where time begins; on a phone 0, and names stand above their lines
TEXT = """Numbers are steps. The second async_save comes before the first save has ended, and waits for it:
its copy goes into the same buffers."""


class Bar(NamedTuple):
    """Something that takes time: its line, begin and length, what it is called, how it looks."""

    line: float
    begin: float
    length: float
    text: str
    look: style.Look


STEP, COPY, WRITE = style.Look(style.SKY_BLUE), style.look_of_op("copy_in"), style.Look(style.GREYS[3])
WAIT = style.look_of_op("wait")
LENT = style.Look(style.YELLOW)


def synchronous() -> list[Bar]:
    """Two steps, a save, two steps, a save, which goes on after the end of the picture."""
    bars = [Bar(0, time, 1, str(number), STEP) for number, time in ((1, 0), (2, 1), (3, 5.4), (4, 6.4))]
    return [*bars, Bar(0, 2, 3.4, "write 2", WRITE), Bar(0, 7.4, 2.0, "write 4", WRITE)]


def asynchronous() -> list[Bar]:
    """The same steps; the second save is called before the first has ended."""
    line, copied = 1.55, 0.5
    bars = [Bar(line, number, 1, str(number + 1), STEP) for number in range(2)]
    bars.append(Bar(line, 2, copied, "copy", COPY))
    bars += [Bar(line, 2 + copied + number, 1, str(number + 3), STEP) for number in range(2)]
    end = 2 + copied + 3.4
    bars.append(Bar(line, 4 + copied, end - 4 - copied, "wait", WAIT))
    bars.append(Bar(line, end, copied, "copy", COPY))
    bars += [Bar(line, end + copied + number, 1, str(number + 5), STEP) for number in range(3)]
    bars.append(Bar(line + 1, 2 + copied, 3.4, "write 2", WRITE))
    bars.append(Bar(line + 1, end + copied, 3.0, "write 4", WRITE))
    lent = [(2.0, copied + 3.4), (end, copied + 3.0)]
    bars += [Bar(line + 2, begin, length, "lent", LENT) for begin, length in lent]
    return bars


def draw(width: float) -> Figure:
    """Lanes from left to right in time."""
    is_page = width >= sheet.PAGE
    left, line_pitch = (LEFT, 1.0) if is_page else (0.0, 1.6)
    lines = TEXT.split("\n") if is_page else sheet.broken(TEXT.replace("\n", " ") + " Hatched, narrow: a copy.", width - 0.3)
    below = 0.15 + 0.17 * len(lines)
    figure = sheet.new_figure(width, below + (3.0 if is_page else 3.7))
    axes = sheet.axes_at(figure, 0.16, below, width - 0.32, 2.65 if is_page else 3.1)
    title = "What training waits for: a save at once,", "and one in the background"
    headline(axes, (" " if is_page else "\n").join(title), weight="bold")
    clear(axes, (0, left + 9.6), (3.55 * line_pitch + 1.05, -0.25 if is_page else -0.75))
    names = {0: "save", 1.55: "async_save", 2.55: "its thread", 3.55: "buffers"}
    for line, name in names.items():
        say(axes, (0, line * line_pitch + (0.4 if is_page else -0.28)), name, style.TEXT_SIZE + is_page)
    for bar in (*synchronous(), *asynchronous()):
        at, size = (left + bar.begin + 0.02, bar.line * line_pitch), (bar.length - 0.04, 0.8)
        fontsize = style.TEXT_SIZE if bar.length < 0.8 else style.TEXT_SIZE + 1
        text = bar.text if is_page or bar.length > 0.8 else ""
        box(axes, at, bar.look.color, text, size=size, fontsize=fontsize, **style.filled(bar.look))
    for x in (left + 2, left + 2.5):
        ends = [1.4 * line_pitch, 3.55 * line_pitch + 0.9]
        axes.plot([x, x], ends, color=style.GREYS[2], linewidth=0.9, linestyle=(0, (4, 3)), zorder=0)
    write_below(figure, lines, 0.16)
    return figure
