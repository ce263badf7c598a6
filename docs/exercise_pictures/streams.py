"""08: the gathers and forwards of four blocks in one queue, and on two streams."""

from __future__ import annotations

from exercise_pictures.drawing import arrow, box, clear, headline, say, write_below
from hwfsdp.plot import sheet, style
from hwfsdp.plot.style import Axes, Figure

BLOCKS, GATHER, FORWARD = 4, 3.5, 8.2  # ms, as the page computes them
HEIGHT, ISSUE = 0.8, 1.1  # of a bar; ms in which the host puts one piece of work into a queue
LEFT, END = 15.5, 53.0  # ms: room for the names of the rows (none on a phone, where they stand above); the end of the scale
ONE, HOST, GATHERS, COMPUTE = 0.0, 1.9, 3.3, 4.7  # the rows, from above
TEXT = """G: a gather of 3.5 ms. C: a forward of 8.2 ms. The host only puts work into queues, and is far ahead.
An arrow is an event: compute waits for the gather of its block. The host waits for nothing."""


def draw(width: float) -> Figure:
    is_page = width >= sheet.PAGE
    lines = TEXT.split("\n") if is_page else sheet.broken(TEXT.replace("\n", " "), width - 0.2)
    below = 0.15 + 0.17 * len(lines)
    figure = sheet.new_figure(width, below + (3.1 if is_page else 3.4))
    axes = sheet.axes_at(figure, 0.1, below, width - 0.2, 2.7 if is_page else 2.75)
    left = LEFT if is_page else 0.0
    clear(axes, (-left, END if is_page else END + 4.0), (5.6 if is_page else 6.2, -0.5))
    title = "Gathers and forwards of four blocks,", "in one queue and on two streams"
    headline(axes, (" " if is_page else "\n").join(title), weight="bold")
    names = {ONE: "one queue", HOST: "host", GATHERS: "stream of gathers", COMPUTE: "stream of compute"}
    for row, name in names.items():
        above = row - 0.27 if row != COMPUTE else row + HEIGHT + 0.3  # arrows lead to the compute from above
        at = (-left, row + HEIGHT / 2) if is_page else (0, above)
        say(axes, at, name, style.TEXT_SIZE + is_page)
    _draw_queue(axes)
    _draw_streams(axes, names_calls=is_page)
    write_below(figure, lines, 0.1)
    return figure


def _draw_queue(axes: Axes) -> None:
    """Draw the work of one stream: each gather is exposed."""
    for block in range(BLOCKS):
        begin = block * (GATHER + FORWARD)
        _bar(axes, ONE, begin, GATHER, f"G{block}", style.look_of_op("all_gather"))
        _bar(axes, ONE, begin + GATHER, FORWARD, f"C{block}", style.look_of_op("forward"))
    _end(axes, ONE, BLOCKS * (GATHER + FORWARD))


def _draw_streams(axes: Axes, names_calls: bool) -> None:
    """Draw the same work on two streams: only the first gather is exposed."""
    for block in range(BLOCKS):
        for place, letter in enumerate("GC" if names_calls else ("", "")):
            _bar(axes, HOST, (2 * block + place) * ISSUE, ISSUE, letter, style.Look(style.GREYS[1]), style.SMALL_SIZE)
        _bar(axes, GATHERS, block * GATHER, GATHER, f"G{block}", style.look_of_op("all_gather"))
        begin = GATHER + block * FORWARD
        _bar(axes, COMPUTE, begin, FORWARD, f"C{block}", style.look_of_op("forward"))
        x = (block + 1) * GATHER
        arrow(axes, (x, GATHERS + HEIGHT), (max(x, begin), COMPUTE), style.GREYS[3], 1.0)
    _bar(axes, COMPUTE, 0.0, GATHER, "", style.look_of_op("wait"))
    _end(axes, COMPUTE, GATHER + BLOCKS * FORWARD)


def _bar(
    axes: Axes, row: float, begin: float, length: float, text: str, look: style.Look, size: float = style.TEXT_SIZE
) -> None:
    at, filled = (begin, row), style.filled(look)
    box(axes, at, look.color, text, size=(length, HEIGHT), fontsize=size, **filled)


def _end(axes: Axes, row: float, end: float) -> None:
    say(axes, (end + 0.4, row + HEIGHT / 2), f"{end:.1f} ms", color=style.BLACK)
