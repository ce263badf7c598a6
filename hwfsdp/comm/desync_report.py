"""The first collective in which ranks diverge, with the last calls of all ranks side by side.

In each process group, all ranks must call the same collectives in the same order. If they do not, no rank can see this alone.
From the notes of all ranks (`flight_recorder`), this module finds the first collective that a rank called differently or did not call.
It describes this collective in one sentence, and shows the calls before it:

    rank 1 called reduce_scatter of 'blocks.2' where ranks 0 and 2 called all_gather of 'blocks.3': collective 17 of ranks 0–2.

       collectives of ranks 0–2     dtype        bytes  rank 0     1     2
       16  all_gather      blocks.2  float32  1,048,576    done  done  done
    >  17  all_gather      blocks.3  float32  1,048,576    wait     –  wait
           reduce_scatter  blocks.2  float32  1,048,576       –  wait     –

Each row has the number of a collective in one process group. Each column is a rank. If lines would get too long, ranks with equal
cells share a column.

Note [Which one is at fault]
    If one rank misses a call, other ranks wait for it. The waiting ranks miss calls in other process groups, so more ranks wait.
    So the report first names a rank that does not wait. If all ranks wait, they wait in a circle, and the report shows the circle.
"""

from __future__ import annotations

import inspect
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from hwfsdp.comm.flight_recorder import NotedCall, State, members_of
from hwfsdp.errors import shown_path

_BEFORE, _AFTER = 5, 2  # rows shown before and after the row where ranks diverge
_TABLES = 2  # the most tables to show
_WIDTH = 100  # characters of a line
_LONGEST_OWNER = 32  # characters
_WORDS = {State.DONE: "done", State.OPEN: "open", State.WAIT: "wait", State.FAILED: "fail"}
_LEGEND = {
    "done": "finished",
    "open": "issued, nobody waited for it yet",
    "wait": "the rank waits in it",
    "fail": "raised an error",
    "–": "not called",
    "?": "not known",
}


class Report(NamedTuple):
    """The facts known about one rank.

    Attributes:
        calls: its last collectives, oldest first (`flight_recorder.read`); None if the rank gave no report.
        left: how it ended, as the rest of a sentence that begins with "it", such as "raised KeyError: 'x'"; "" while it runs.
        place: its current or last line in the user's code (`place_in`); "" if it is not known.
    """

    rank: int
    calls: list[NotedCall] | None
    left: str = ""
    place: str = ""


class _Parting(NamedTuple):
    """The first collective of a process group in which its ranks differ.

    Attributes:
        calls: the call of each rank, in rank order; None if the rank did not call it. Ranks whose calls are not known are left out.
    """

    group: str
    number: int
    calls: dict[int, NotedCall | None]

    @property
    def kinds(self) -> dict[tuple[object, ...], list[int]]:
        """Return the ranks by the kind of their calls, the most common kind first. If two are equally common, FSDP's call is first."""
        found: dict[tuple[object, ...], list[int]] = {}
        for rank, call in self.calls.items():
            if call is not None:
                found.setdefault(_kind(call), []).append(rank)
        return dict(sorted(found.items(), key=lambda item: (-len(item[1]), self._is_users(item[1][0]))))

    def _is_users(self, rank: int) -> bool:
        call = self.calls[rank]
        return call is not None and call.is_users

    @property
    def missing(self) -> list[int]:
        return [rank for rank, call in self.calls.items() if call is None]

    @property
    def waiting(self) -> list[int]:
        states = State.WAIT, State.FAILED
        return [rank for rank, call in self.calls.items() if call is not None and call.state in states]


def describe_divergence(reports: Sequence[Report]) -> str:
    """Return a sentence that says where ranks diverge, and a table that shows it. Return "" if they agree and none waits.

    If the ranks agree but some of them wait, the sentence and the table are about the collective in which they wait.

    Args:
        reports: the reports of all ranks.
    """
    by_rank = {report.rank: report for report in reports}
    partings = [parting for parting in _partings(reports) if _matters(parting, reports)]
    partings.sort(key=lambda parting: _order(parting, by_rank))
    if partings:
        sentence, shown = _sentence(partings[0], by_rank), partings[:_TABLES]
    else:
        shown = [p for p in (_last_waited_for(reports),) if p is not None]
        if not shown:
            return ""
        sentence = _sentence_of_wait(shown[0], by_rank)
    tables = [_table(parting, by_rank) for parting in shown]
    return "\n\n".join([sentence, *tables, *_footnotes(tables, reports)])


# --- Finding -----------------------------------------------------------------------------------------------


def _kind(call: NotedCall) -> tuple[object, ...]:
    # Ranks may send different numbers of bytes in one all-to-all.
    return call.op, call.owner, call.dtype, 0 if call.op == "all_to_all" else call.nbytes


def _sequences(reports: Sequence[Report]) -> dict[str, dict[int, dict[int, NotedCall]]]:
    """Sort the calls by process group, rank and number, for every known rank that may have called there."""
    groups = dict.fromkeys(call.group for report in reports for call in report.calls or ())
    found: dict[str, dict[int, dict[int, NotedCall]]] = {}
    for group in groups:
        members = set(members_of(group))
        found[group] = {}
        for report in reports:
            calls = {call.number: call for call in report.calls or () if call.group == group}
            if calls or (report.rank in members and _is_known(report, group, 1)):
                found[group][report.rank] = calls
    return found


def _is_known(report: Report, group: str, number: int) -> bool:
    """True if the rank's notes go back to this collective of the group."""
    if report.calls is None or not report.calls:
        return report.calls is not None
    of_group = [call.number for call in report.calls if call.group == group]
    return report.calls[0].serial == 1 or (bool(of_group) and min(of_group) <= number)


def _partings(reports: Sequence[Report]) -> Iterable[_Parting]:
    """Find the first difference in each process group."""
    for group, by_rank in _sequences(reports).items():
        first = max((min(calls, default=1) for calls in by_rank.values()), default=1)
        last = max((max(calls, default=0) for calls in by_rank.values()), default=0)
        for number in range(first, last + 1):
            parting = _Parting(group, number, {rank: by_rank[rank].get(number) for rank in by_rank})
            if parting.missing or len(parting.kinds) > 1:
                yield parting
                break


def _order(parting: _Parting, by_rank: dict[int, Report]) -> tuple[bool, bool]:
    """Return the sort key of a parting. The smallest one is reported first (Note [Which one is at fault])."""
    at_fault = [rank for rank in parting.missing if _waits_in(by_rank[rank]) is None]
    return len(parting.kinds) < 2, not at_fault


def _waits_in(report: Report) -> NotedCall | None:
    """Return the collective in which a rank waits, or its last collective if this failed; None if the rank has ended."""
    return None if report.left else _stopped_in(report)


def _stopped_in(report: Report) -> NotedCall | None:
    """Return the same call as `_waits_in`, even if the rank has ended."""
    calls = report.calls or []
    done = max((call.serial for call in calls if call.state is State.DONE), default=0)
    stopped = [
        call
        for call in calls
        if call.state is State.WAIT or (call.state is State.FAILED and call.serial > done)
    ]
    return stopped[-1] if stopped else None


def _matters(parting: _Parting, reports: Sequence[Report]) -> bool:
    """True if a rank stopped in this collective, or in a later one of this process group. Otherwise the ranks went on."""
    stopped = [call for report in reports if (call := _stopped_in(report)) is not None]
    return any(call.group == parting.group and call.number >= parting.number for call in stopped)


def _last_waited_for(reports: Sequence[Report]) -> _Parting | None:
    """Return the collective in which ranks wait although all ranks called it, or None."""
    waiting = [call for report in reports if (call := _waits_in(report)) is not None]
    if not waiting:
        return None
    call = min(waiting, key=lambda call: call.number)
    by_rank = _sequences(reports)[call.group]
    return _Parting(call.group, call.number, {rank: by_rank[rank].get(call.number) for rank in by_rank})


# --- Saying ------------------------------------------------------------------------------------------------


def _sentence(parting: _Parting, by_rank: dict[int, Report]) -> str:
    kinds = list(parting.kinds.values())
    where = f"collective {parting.number} of {_group_named(parting.group)}"
    most, *others = [(ranks, _called(parting, ranks[0], len(kinds) > 1)) for ranks in kinds]
    if others:
        different = "; ".join(f"{_ranks(ranks)} called {call}" for ranks, call in others)
        return f"{different} where {_ranks(most[0])} called {most[1]}: {where}."
    at_fault = [rank for rank in parting.missing if _waits_in(by_rank[rank]) is None] or parting.missing
    call = f"{where}, {most[1]}"
    absent = f"{_ranks(at_fault)} {'has' if len(at_fault) == 1 else 'have'} not called"
    said = [_wait_in(parting.waiting, call), f"{absent} it"] if parting.waiting else [f"{absent} {call}"]
    doing = (_doing(by_rank[rank]) for rank in at_fault)
    return "; ".join([*said, *filter(None, doing)]) + "."


def _called(parting: _Parting, rank: int, apart: bool) -> str:
    """Name a rank's call, with its size if other ranks called it with another size."""
    call = parting.calls[rank]
    assert call is not None
    text = _what(call)
    names = {(kind[0], kind[1]) for kind in parting.kinds}
    return f"{text} ({call.nbytes:,} bytes of {call.dtype})" if apart and len(names) == 1 else text


def _what(call: NotedCall) -> str:
    """Name a call, such as "all_gather of 'blocks.0'", or "all_reduce (yours)" for the user's own."""
    if call.is_users:
        return f"{call.op} (yours)"
    return f"{call.op} of {call.owner!r}" if call.owner else call.op


def _wait_in(ranks: Sequence[int], where: str) -> str:
    return f"{_ranks(ranks)} {'waits' if len(ranks) == 1 else 'wait'} in {where}"


def _doing(report: Report) -> str:
    name, inside = f"rank {report.rank}", _waits_in(report)
    if report.left:
        return f"{name} {report.left}" + (f" in {report.place}" if report.place else "")
    if inside is not None:
        return f"{name} waits in {_what(inside)}, collective {inside.number} of {_group_named(inside.group)}"
    if report.calls is None:
        return f"{name} says nothing"
    return f"{name} is in {report.place}" if report.place else ""


def _sentence_of_wait(parting: _Parting, by_rank: dict[int, Report]) -> str:
    some = next(call for call in parting.calls.values() if call is not None)
    where = f"{_what(some)}, collective {some.number} of {_group_named(some.group)}"
    left = [by_rank[rank] for rank in parting.calls if by_rank[rank].left]
    silent = [rank for rank in members_of(parting.group) if rank in by_rank and rank not in parting.calls]
    waiting = [rank for rank, call in parting.calls.items() if call and _waits_in(by_rank[rank]) == call]
    text = _wait_in(waiting, where)
    if left:
        return "; ".join([text, *(f"{_doing(report)} after it had called that" for report in left)]) + "."
    if silent:
        return f"{text}; nothing is known of {_ranks(silent)} there."
    return f"{text}, which all of its ranks called with the same name and size: what moves the bytes is slow, or lost a rank, or the error below says more."


def _ranks(ranks: Sequence[int]) -> str:
    """Write ranks in words: "rank 1", "ranks 0, 2 and 3", "ranks 0 and 2–63"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    runs = _runs(ranks)
    return "ranks " + (" and ".join([", ".join(runs[:-1]), runs[-1]]) if len(runs) > 1 else runs[0])


def _runs(ranks: Sequence[int]) -> list[str]:
    """Write three or more consecutive ranks as "first–last", and all others one by one."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return [text for run in runs for text in ([f"{run[0]}–{run[-1]}"] if len(run) > 2 else map(str, run))]


def _group_named(group: str) -> str:
    members = members_of(group)
    return _ranks(members) if members else f"process group {group.rpartition(':')[0]}"


# --- Showing -----------------------------------------------------------------------------------------------


class _Row(NamedTuple):
    """One line of the table: a call, and its progress on each rank."""

    number: int
    call: NotedCall
    states: dict[int, str]
    is_first: bool


def _table(parting: _Parting, by_rank: dict[int, Report]) -> str:
    members = sorted({*members_of(parting.group), *parting.calls} & by_rank.keys())
    window = range(max(1, parting.number - _BEFORE), parting.number + _AFTER + 1)
    rows = [row for number in window for row in _rows_of(number, parting.group, members, by_rank)]
    heading = f"collectives of {_group_named(parting.group)}"
    texts = [_described(row, row.number == parting.number) for row in rows]
    widths = [max(len(text[i]) for text in texts) for i in range(len(texts[0]))]
    lines = [_aligned(text, widths) for text in texts]
    width = max(len(heading) + 3, *map(len, lines))
    columns = [[rank] for rank in members]
    if width + 6 * len(columns) + 2 > _WIDTH:
        columns = _equal_columns(members, rows)
    heads = [", ".join(_runs(column)) for column in columns]
    heads[0] = f"rank{'s' if len(columns[0]) > 1 else ''} {heads[0]}"
    sizes = [max(4, len(head)) for head in heads]

    def line(left: str, cells: Iterable[str]) -> str:
        shown = "  ".join(cell.rjust(size) for cell, size in zip(cells, sizes, strict=True))
        return f"{left.ljust(width)}  {shown}".rstrip()

    body = [line(text, (row.states[c[0]] for c in columns)) for text, row in zip(lines, rows, strict=True)]
    return "\n".join([line(f"   {heading}", heads), *body])


def _rows_of(number: int, group: str, members: Sequence[int], by_rank: dict[int, Report]) -> list[_Row]:
    """Return a row for each different collective that ranks called at this number."""
    calls = {
        rank: call
        for rank in members
        for call in by_rank[rank].calls or ()
        if (call.group, call.number) == (group, number)
    }
    kinds = Counter(map(_kind, calls.values()))
    rows = []
    for place, (kind, _) in enumerate(kinds.most_common()):
        states = {rank: "–" if _is_known(by_rank[rank], group, number) else "?" for rank in members}
        states |= {rank: _WORDS[call.state] for rank, call in calls.items() if _kind(call) == kind}
        some = next(call for call in calls.values() if _kind(call) == kind)
        rows.append(_Row(number, some, states, place == 0))
    return rows


def _described(row: _Row, is_parting: bool) -> tuple[str, ...]:
    call, mark = row.call, ">" if is_parting else ""
    number = str(row.number) if row.is_first else ""
    owner = call.owner if len(call.owner) <= _LONGEST_OWNER else f"…{call.owner[1 - _LONGEST_OWNER:]}"
    owner = owner or ("(yours)" if call.is_users else "")
    return mark, number, call.op, owner, call.dtype, f"{call.nbytes:,} B"


def _aligned(cells: tuple[str, ...], widths: Sequence[int]) -> str:
    """Align the cells of a line: text to the left, numbers to the right."""
    sides = "<><<<>"  # of the number and of the bytes: the right
    return "  ".join(f"{c:{side}{w}}" for c, side, w in zip(cells, sides, widths, strict=True))


def _equal_columns(members: Sequence[int], rows: Sequence[_Row]) -> list[list[int]]:
    columns: dict[tuple[str, ...], list[int]] = {}
    for rank in members:
        columns.setdefault(tuple(row.states[rank] for row in rows), []).append(rank)
    return list(columns.values())


def _footnotes(tables: Sequence[str], reports: Sequence[Report]) -> list[str]:
    """Return the meaning of the words in the tables, and the lines of code where ranks are."""
    cells = {word for table in tables for line in table.splitlines()[1:] for word in line.split()}
    legend = "; ".join(f"{word}: {text}" for word, text in _LEGEND.items() if word in cells)
    places: dict[str, list[int]] = {}
    for report in reports:
        if report.left or report.place:
            left = report.left + (", in " if report.left and report.place else "")
            places.setdefault(left + report.place, []).append(report.rank)
    return ["\n".join([legend, *(f"{_ranks(ranks)}: {text}" for text, ranks in places.items())])]


# --- Places ------------------------------------------------------------------------------------------------

_FRAME = re.compile(r'^ *File "([^"\n]+)", line (\d+), in (.+)$', re.MULTILINE)
_PACKAGES = (str(Path(__file__).parents[1]), str(Path(inspect.getfile(torch)).parent), "<frozen")
_STANDARD = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})


def place_in(stack: str, users_only: bool = False) -> str:
    """Return the line of the user's code in a printed stack or traceback, such as "train.py:12, in step", or "".

    This is the innermost frame outside of this package, torch and the standard library. If there is none, as under `hwfsdp train`,
    it is the innermost frame outside of this folder, or "" if `users_only`.
    """
    frames = _FRAME.findall(stack)
    users = [frame for frame in frames if not _is_library(frame[0])]
    if not users and (users_only or not frames):
        return ""
    above = [frame for frame in frames if not frame[0].startswith(str(Path(__file__).parent))]
    path, line, function = (users or above or frames)[-1]
    return f"{shown_path(path)}:{line}, in {function}"


def _is_library(path: str) -> bool:
    return path.startswith(_PACKAGES) or (path.startswith(_STANDARD) and "site-packages" not in path)
