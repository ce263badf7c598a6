"""15: what training waits for, when it saves at once and when it saves in the background; and who has which buffers."""

from __future__ import annotations

from typing import NamedTuple


from exercise_pictures.drawing import box, clear, headline, say
from hwfsdp.plot import sheet, style
from hwfsdp.plot.style import Figure

LEFT = 2.3  # where time begins


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


def draw() -> Figure:
    """Lanes from left to right in time."""
    figure = sheet.new_figure(sheet.PAGE, 3.5)
    axes = figure.add_axes((0.02, 0.14, 0.96, 0.76))
    headline(axes, "What training waits for: a save at once, and one in the background", weight="bold")
    clear(axes, (0, LEFT + 9.6), (4.6, -0.25))
    names = {0: "save", 1.55: "async_save", 2.55: "its thread", 3.55: "buffers"}
    for line, name in names.items():
        say(axes, (0, line + 0.4), name, style.TEXT_SIZE + 1)
    for bar in (*synchronous(), *asynchronous()):
        at, size = (LEFT + bar.begin + 0.02, bar.line), (bar.length - 0.04, 0.8)
        fontsize = style.TEXT_SIZE if bar.length < 0.8 else style.TEXT_SIZE + 1
        look = style.filled(bar.look)
        box(axes, at, bar.look.color, bar.text, size=size, fontsize=fontsize, **look)
    begin, end = LEFT + 2, LEFT + 2.5
    for x in (begin, end):
        axes.plot([x, x], [1.4, 4.45], color=style.GREYS[2], linewidth=0.9, linestyle=(0, (4, 3)), zorder=0)
    text = "Numbers are steps. The second async_save comes before the first save has ended, and waits for it:"
    text += "\nits copy goes into the same buffers."
    figure.text(0.02, 0.03, text, fontsize=style.TEXT_SIZE, color=style.GREYS[3])
    return figure
