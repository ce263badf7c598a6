"""What becomes of each parameter group over time: a shard, being gathered, full, freed.

One row per group, in the order in which they are first gathered (`hwfsdp.observe.lifetimes` says how that is read from the
log). A thin line is a group of which the rank holds its shard only. Gathering begins with the copy-in and ends when the
copy-out has filled the parameters; from then on the group is full, until the last of its storages is freed. A bar inside
says when the group computed, so one sees what it was gathered for, how far ahead, and how long it stayed.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hwfsdp.errors import UsageError
from hwfsdp.observe.eventlog import EventLog
from hwfsdp.observe.lifetimes import Lifetime, find_lifetimes
from hwfsdp.plot import sheet, style
from hwfsdp.plot.choice import chosen, name_of_steps

_WIDTH, _MOST_FOR_NAMES, _BOTTOM, _ROW = 12.0, 3.2, 0.55, 0.24  # inches
_LOOKS = {
    "gathering": style.look_of_op("all_gather"),
    "full": style.Look(style.YELLOW),
    "forward": style.look_of_op("forward"),
    "backward": style.look_of_op("backward"),
}
_HEIGHTS = {"gathering": 0.7, "full": 0.7, "forward": 0.34, "backward": 0.34}  # shares of a row


def plot_lifetimes(log: EventLog, *, rank: int = 0, step: int | None = None) -> Figure:
    """A row per parameter group of one rank: sharded, gathering, full, freed, and when it computed.

    Args:
        step: draw the time of this optimizer step only; by default all of the recording.

    Raises:
        UsageError: the rank or the step has no events, or no parameter group is gathered.
    """
    events = chosen(log, "plot_lifetimes", rank=rank, step=step)
    begin, end = min(e.start_us for e in events), max(e.end_us for e in events)
    groups: dict[str, list[Lifetime]] = {}
    for lifetime in find_lifetimes(log.select(rank=rank)):
        if lifetime.start_us < end and lifetime.end_us > begin:
            groups.setdefault(lifetime.owner, []).append(lifetime)
    if not groups:
        raise UsageError(
            f"plot_lifetimes(rank={rank})",
            expected="events of parameter groups that are gathered",
            got=f"{len(events)} events without any",
            remedy="Record a step of a model that fully_shard was applied to.",
        )
    names = sheet.column_of(groups, style.TEXT_SIZE, _MOST_FOR_NAMES)
    left = sheet.MARGIN + names + 0.1
    width = _WIDTH - left - sheet.MARGIN
    title = f"Parameter groups of rank {rank}, {name_of_steps(events)}"
    head = sheet.head(title, _text(groups), _keys(), width)
    figure, axes = sheet.page(head, left, width, len(groups) * _ROW + 0.1, _BOTTOM)
    axes.set_xlim(begin / 1e3, end / 1e3)
    axes.set_ylim(len(groups) - 0.3, -0.7)
    owners = [sheet.fitting(owner, style.TEXT_SIZE, names) for owner in groups]
    sheet.name_rows(axes, range(len(groups)), owners, "ms since the recording began")
    style.draw_grid(axes, "x")
    for row, (owner, lifetimes) in enumerate(groups.items()):
        _draw_states(axes, row, lifetimes, begin, end)
        for event in events:
            if event.owner == owner and event.op in ("forward", "backward"):
                _draw_bar(axes, row, event.start_us, event.end_us, event.op)
    return figure


def _text(groups: dict[str, list[Lifetime]]) -> str:
    """How many groups are full at once, at most."""
    full = [lifetime for found in groups.values() for lifetime in found if lifetime.state == "full"]
    most = max((sum(a.start_us <= b.start_us < a.end_us for a in full) for b in full), default=0)
    return f"{len(groups)} group{'s' * (len(groups) > 1)}, at most {most} full at the same time"


def _keys() -> list[Artist]:
    """The legend's."""
    return [
        sheet.line_key("sharded: this rank's rows only", color=style.GREYS[2], linewidth=1.2),
        sheet.key(_LOOKS["gathering"], "gathering"),
        sheet.key(_LOOKS["full"], "full"),
        sheet.line_key("freed", linestyle="none", marker="v", color=style.BLACK, markersize=4),
        sheet.key(_LOOKS["forward"], "in its forward"),
        sheet.key(_LOOKS["backward"], "in its backward"),
    ]


def _draw_states(axes: Axes, row: int, lifetimes: Sequence[Lifetime], begin: float, end: float) -> None:
    """Lines, bars and the moments of freeing of one group, as far as they lie between `begin` and `end`, in µs."""
    for _, owner, state, start, stop in lifetimes:
        low, high = max(start, begin), min(stop, end)
        if state in _LOOKS:
            _draw_bar(axes, row, low, high, state)
            continue
        times = [low / 1e3, high / 1e3]
        axes.plot(times, [row, row], color=style.GREYS[2], linewidth=1.2, gid=f"{owner} {state}")
        if state == "freed" and start >= begin:
            axes.plot(start / 1e3, row - 0.42, "v", color=style.BLACK, markersize=4, zorder=4, clip_on=False)


def _draw_bar(axes: Axes, row: int, start: float, end: float, what: str) -> None:
    height, zorder = _HEIGHTS[what], 3.0 if what in ("forward", "backward") else 2.0
    corner, size = (start / 1e3, row - height / 2), ((end - start) / 1e3, height)
    sheet.add_box(axes, corner, size, _LOOKS[what], f"row {row} {what}", zorder=zorder)
