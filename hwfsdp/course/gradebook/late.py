"""Late submissions: what they cost, and when each was handed in.

    10%/day         a tenth of the points earned, for each begun day
    0.5/h           half a point for each begun hour
    10%/day max 50% the same, but never more than half of the points earned

A penalty never takes more than what was earned. A time without an offset is one of the deadline's own.

Note [Whose word a time is]
    Only `--submitted` comes from the staff. The author of an archive, commit or file wrote its times, so they are
    shown with where they come from, and one that cannot be is not believed: such a submission counts as handed in when it
    was graded.
"""

from __future__ import annotations

import csv
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone, tzinfo
from pathlib import Path

from hwfsdp.course.gradebook.results import UNKNOWN, Result
from hwfsdp.course.gradebook.submissions import Handed
from hwfsdp.course.refusals import refused, unusable

UNITS = {"minute": 60, "hour": 3600, "day": 86400, "week": 604800}  # seconds
UNITS |= {"min": 60, "h": 3600, "d": 86400, "w": 604800}
OLDEST = datetime(2000, 1, 1, tzinfo=timezone.utc)  # an older time is what tools write that know none
AHEAD = timedelta(days=1)  # a clock may be wrong, and a zone
_RULE = re.compile(
    r"\s*(?P<rate>\d+(?:\.\d+)?)\s*(?P<percent>%?)\s*/\s*(?P<unit>[a-z]+)"
    r"(?:\s*,?\s*max\s*(?P<most>\d+(?:\.\d+)?)\s*(?P<most_percent>%?))?\s*"
)


@dataclass(frozen=True)
class Rule:
    """The cost of being late.

    Attributes:
        rate: for each begun unit of `seconds`: percent of the points earned, or points.
        most: the largest penalty, in percent of the points earned or in points; None: all points.
    """

    rate: float
    percent: bool
    seconds: int
    most: float | None = None
    most_percent: bool = False

    def penalty(self, points: float, late: timedelta) -> float:
        """Points taken off, rounded to hundredths."""
        units = math.ceil(max(0.0, late.total_seconds()) / self.seconds)
        taken = self.rate * units * (points / 100 if self.percent else 1)
        if self.most is not None:
            taken = min(taken, self.most * (points / 100 if self.most_percent else 1))
        return round(min(taken, points), 2)


@dataclass(frozen=True)
class Standing:
    """The points of one submission: earned, taken off for being late, and counting; and seconds late.

    Attributes:
        time_unknown: nobody knows when it was handed in, so all this is of when it was graded.
    """

    raw: float
    penalty: float
    final: float
    late_seconds: int
    time_unknown: bool = False


@dataclass(frozen=True)
class LatePolicy:
    """A deadline and a rule; without a deadline nothing is late, without a rule it costs nothing."""

    deadline: datetime | None = None
    rule: Rule | None = None

    @property
    def zone(self) -> tzinfo:
        """The zone of wall clock times without one."""
        return (self.deadline.tzinfo if self.deadline else None) or timezone.utc

    def standing(self, result: Result) -> Standing:
        """The points of a submission that count."""
        late = timedelta(0)
        if self.deadline and result.time:
            late = max(timedelta(0), result.time - self.deadline)
        penalty = self.rule.penalty(result.score, late) if self.rule else 0.0
        final = round(result.score - penalty, 2)
        seconds = math.ceil(late.total_seconds())
        return Standing(result.score, penalty, final, seconds, result.submitted_by == UNKNOWN)


def parse_rule(text: str) -> Rule:
    """A rule as it is written on the command line.

    Raises:
        UsageError: it is none.
    """
    found = _RULE.fullmatch(text.casefold())
    unit = (found["unit"].removesuffix("s") if len(found["unit"]) > 1 else found["unit"]) if found else ""
    if found is None or unit not in UNITS:
        raise unusable("late.rule", text=text)
    most = float(found["most"]) if found["most"] else None
    return Rule(
        float(found["rate"]), found["percent"] == "%", UNITS[unit], most, found["most_percent"] == "%"
    )


def parse_time(text: str, what: str, zone: tzinfo | None = None) -> datetime:
    """Parse a time in ISO 8601. A time without an offset is in `zone`, by default the machine's.

    Raises:
        UsageError: it is none.
    """
    try:
        found = datetime.fromisoformat(text.strip())
    except ValueError:
        raise unusable("late.time", what=what, text=text) from None
    if found.tzinfo is not None:
        return found
    return found.replace(tzinfo=zone) if zone else found.astimezone()


def read_times(path: Path, zone: tzinfo) -> Mapping[str, datetime]:
    """Times of submissions from a CSV file with two columns, name and time; a header is allowed.

    Raises:
        UsageError: it cannot be read, or a row is none.
    """
    kinds = (OSError, UnicodeDecodeError, csv.Error)
    with refused("late.file", kinds, path=path):
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [row for row in csv.reader(file) if any(cell.strip() for cell in row)]
    times: dict[str, datetime] = {}
    for index, row in enumerate(rows):
        what = f"--submitted {path}, row {index + 1}"
        if len(row) < 2:
            raise unusable("late.columns", what=what, row=",".join(row))
        if index == 0 and row[1].strip().casefold() in ("time", "submitted", "timestamp", "date"):
            continue
        name = row[0].strip()
        if name in times:
            raise unusable("late.twice", what=what, name=name)
        times[name] = parse_time(row[1], what, zone)
    return times


def match_times(given: Mapping[str, datetime], handed: Sequence[Handed]) -> dict[str, datetime]:
    """Times by the names of submissions; they are given by these, or by the names of files and folders.

    Raises:
        UsageError: a name fits no submission or several, or two names mean the same one.
    """
    names, files = {each.name for each in handed}, defaultdict[str, list[str]](list)
    for each in handed:
        files[each.path.name].append(each.name)
    found: dict[str, datetime] = {}
    wrong = []
    for name, at in given.items():
        meant = [name] if name in names else files.get(name, [])
        if len(meant) == 1 and meant[0] not in found:
            found[meant[0]] = at
        else:
            wrong.append(name)
    if wrong:
        raise unusable("late.names", known=some_of(sorted(names)), wrong=some_of(wrong))
    return found


def some_of(names: Sequence[str]) -> str:
    """The first five of these, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def implausible(at: datetime | None, now: datetime) -> str:
    """Why nothing can have been handed in at a time that files tell; "" if it can."""
    if at is None:
        return "no time that can be read"
    if at < OLDEST:
        return f"{at:%Y-%m-%d}, before {OLDEST.year}"
    return f"{at:%Y-%m-%d}, in the future" if at > now + AHEAD else ""
