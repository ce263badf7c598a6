"""08: the gathers and forwards of four blocks in one queue, and on two streams."""

from __future__ import annotations

from exercise_pictures.drawing import arrow, box, clear, headline, say
from hwfsdp.plot import sheet, style
from hwfsdp.plot.style import Axes, Figure

BLOCKS, GATHER, FORWARD = 4, 3.5, 8.2  # ms, as the page computes them
HEIGHT, ISSUE = 0.8, 1.1  # of a bar; ms in which the host puts one piece of work into a queue
LEFT, END = 15.5, 53.0  # ms: room for the names of the rows; the end of the scale
ONE, HOST, GATHERS, COMPUTE = 0.0, 1.9, 2.9, 4.2  # the rows, from above


def draw() -> Figure:
    figure = sheet.new_figure(sheet.PAGE, 3.6)
    axes = sheet.axes_at(figure, 0.1, 0.1, sheet.PAGE - 0.2, 3.1)
    clear(axes, (0, LEFT + END), (6.35, -0.75))
    headline(axes, "Gathers and forwards of four blocks, in one queue and on two streams", weight="bold")
    names = {ONE: "one queue", HOST: "host", GATHERS: "stream of gathers", COMPUTE: "stream of compute"}
    for row, name in names.items():
        say(axes, (0, row + HEIGHT / 2), name, style.TEXT_SIZE + 1)
    _draw_queue(axes)
    _draw_streams(axes)
    text = "G: a gather of 3.5 ms. C: a forward of 8.2 ms. The host only puts work into queues, and is far ahead.\n"
    text += "An arrow is an event: compute waits for the gather of its block. The host waits for nothing."
    say(axes, (0, 5.85), text, linespacing=1.5)
    return figure


def _draw_queue(axes: Axes) -> None:
    """Draw the work of one stream: each gather is exposed."""
    for block in range(BLOCKS):
        begin = block * (GATHER + FORWARD)
        _bar(axes, ONE, begin, GATHER, f"G{block}", style.look_of_op("all_gather"))
        _bar(axes, ONE, begin + GATHER, FORWARD, f"C{block}", style.look_of_op("forward"))
    _end(axes, ONE, BLOCKS * (GATHER + FORWARD))


def _draw_streams(axes: Axes) -> None:
    """Draw the same work on two streams: only the first gather is exposed."""
    for block in range(BLOCKS):
        for place, letter in enumerate("GC"):
            _bar(axes, HOST, (2 * block + place) * ISSUE, ISSUE, letter, style.Look(style.GREYS[1]), style.SMALL_SIZE)
        _bar(axes, GATHERS, block * GATHER, GATHER, f"G{block}", style.look_of_op("all_gather"))
        begin = GATHER + block * FORWARD
        _bar(axes, COMPUTE, begin, FORWARD, f"C{block}", style.look_of_op("forward"))
        x = LEFT + (block + 1) * GATHER
        arrow(axes, (x, GATHERS + HEIGHT), (max(x, LEFT + begin), COMPUTE), style.GREYS[3], 1.0)
    _bar(axes, COMPUTE, 0.0, GATHER, "", style.look_of_op("wait"))
    _end(axes, COMPUTE, GATHER + BLOCKS * FORWARD)


def _bar(
    axes: Axes, row: float, begin: float, length: float, text: str, look: style.Look, size: float = style.TEXT_SIZE
) -> None:
    at, filled = (LEFT + begin, row), style.filled(look)
    box(axes, at, look.color, text, size=(length, HEIGHT), fontsize=size, **filled)


def _end(axes: Axes, row: float, end: float) -> None:
    say(axes, (LEFT + end + 0.4, row + HEIGHT / 2), f"{end:.1f} ms", color=style.BLACK)
