"""The states of each parameter group over time: sharded, gathering, full, freed.

There is one row per group, in the order of the first gathers (`hwfsdp.observe.lifetimes` says how the log shows them). A thin line
means that the rank holds only its shard. Gathering begins with the copy-in and ends with the all-gather. A group that was
gathered early lies in its buffer until the copy-out fills the parameters. Then the group is full, until the last of its
storages is freed. A bar inside shows when the group computed. So you see why it was gathered, how far ahead, and how long it
stayed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


from hwfsdp.errors import UsageError
from hwfsdp.observe.eventlog import EventLog
from hwfsdp.observe.events import Event
from hwfsdp.observe.lifetimes import Lifetime, find_lifetimes
from hwfsdp.plot import sheet, style
from hwfsdp.plot.choice import chosen, name_of_steps
from hwfsdp.plot.parts import Artist, Axes, Figure

_MOST_FOR_NAMES, _BOTTOM, _ROW = 2.2, 0.55, 0.26  # inches
_LOOKS = {
    "gathering": style.look_of_op("all_gather"),
    "in its buffer": style.Look(style.PALE_GREEN),
    "full": style.look_of_kind("unsharded_param"),
    "forward": style.look_of_op("forward"),
    "backward": style.look_of_op("backward"),
}
_COMPUTE = ("forward", "backward")
_HIGH, _LOW = 0.7, 0.34  # height of a bar, and of a bar inside it, in shares of a row


def plot_lifetimes(log: EventLog, *, rank: int = 0, step: int | None = None) -> Figure:
    """Draw a row per parameter group of one rank: sharded, gathering, full, freed, and when it computed.

    Args:
        step: draw only the time of this optimizer step; by default the whole recording.

    Raises:
        UsageError: the rank or the step has no events, or no parameter group is gathered.
    """
    events = chosen(log, "plot_lifetimes", rank=rank, step=step)
    begin, end = min(e.start_us for e in events), max(e.end_us for e in events)
    groups: dict[str, list[Lifetime]] = {}
    for lifetime in _told_apart(find_lifetimes(log.select(rank=rank)), log.select("all_gather", rank=rank)):
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
    width = sheet.PAGE - left - sheet.MARGIN
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
            if event.owner == owner and event.op in _COMPUTE:
                _draw_bar(axes, row, event.start_us, event.end_us, event.op)
    return figure


def _told_apart(lifetimes: Sequence[Lifetime], gathers: Sequence[Event]) -> Iterator[Lifetime]:
    """Split the state "gathering" at the end of the all-gather. From then on, the group lies in its buffer until its copy-out."""
    for each in lifetimes:
        ends = [
            e.end_us for e in gathers if e.owner == each.owner and each.start_us <= e.start_us < each.end_us
        ]
        if each.state == "gathering" and ends and max(ends) < each.end_us:
            yield each._replace(end_us=max(ends))
            yield each._replace(state="in its buffer", start_us=max(ends))
        else:
            yield each


def _text(groups: dict[str, list[Lifetime]]) -> str:
    """Say how many groups there are, and how many are full at the same time at most."""
    full = [lifetime for found in groups.values() for lifetime in found if lifetime.state == "full"]
    most = max((sum(a.start_us <= b.start_us < a.end_us for a in full) for b in full), default=0)
    return f"{len(groups)} group{'s' * (len(groups) > 1)}, at most {most} full at the same time"


def _keys() -> list[Artist]:
    """Return the keys of the legend."""
    return [
        sheet.line_key("sharded: own rows only", color=style.GREYS[2], linewidth=1.2),
        sheet.key(_LOOKS["gathering"], "being gathered"),
        sheet.key(_LOOKS["in its buffer"], "gathered, in its buffer"),
        sheet.key(_LOOKS["full"], "full"),
        sheet.line_key("freed", linestyle="none", marker="v", color=style.BLACK, markersize=4),
        sheet.key(_LOOKS["forward"], "in its forward"),
        sheet.key(_LOOKS["backward"], "in its backward"),
    ]


def _draw_states(axes: Axes, row: int, lifetimes: Sequence[Lifetime], begin: float, end: float) -> None:
    """Draw the lines, bars and moments of freeing of one group between `begin` and `end`, in µs."""
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
    height, zorder = (_LOW, 3.0) if what in _COMPUTE else (_HIGH, 2.0)
    corner, size = (start / 1e3, row - height / 2), ((end - start) / 1e3, height)
    sheet.add_box(axes, corner, size, _LOOKS[what], f"row {row} {what}", zorder=zorder)
