"""Late submissions: their penalty, and the time of each submission.

    10%/day         a tenth of the points earned, for each begun day
    0.5/h           half a point for each begun hour
    10%/day max 50% the same, but never more than half of the points earned

A penalty never exceeds the points earned. A time without an offset is in the time zone of the deadline.

Note [Whose word a time is]
    Only `--submitted` comes from the staff. The author of an archive, commit or file wrote its times. So the gradebook shows each
    time with its source. If a time is impossible, the grader does not believe it: the submission counts as handed in when it was
    graded.
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
OLDEST = datetime(2000, 1, 1, tzinfo=timezone.utc)  # tools that do not know the time write older times
AHEAD = timedelta(days=1)  # how far in the future a time may be: a clock or a zone may be wrong
_RULE = re.compile(
    r"\s*(?P<rate>\d+(?:\.\d+)?)\s*(?P<percent>%?)\s*/\s*(?P<unit>[a-z]+)"
    r"(?:\s*,?\s*max\s*(?P<most>\d+(?:\.\d+)?)\s*(?P<most_percent>%?))?\s*"
)


@dataclass(frozen=True)
class Rule:
    """The penalty for a late submission.

    Attributes:
        rate: the penalty for each begun unit of `seconds`, in percent of the points earned if `percent`, else in points.
        most: the largest penalty, in percent of the points earned if `most_percent`, else in points; None: all points.
    """

    rate: float
    percent: bool
    seconds: int
    most: float | None = None
    most_percent: bool = False

    def penalty(self, points: float, late: timedelta) -> float:
        """Return the points to take off, rounded to hundredths."""
        units = math.ceil(max(0.0, late.total_seconds()) / self.seconds)
        taken = self.rate * units * (points / 100 if self.percent else 1)
        if self.most is not None:
            taken = min(taken, self.most * (points / 100 if self.most_percent else 1))
        return round(min(taken, points), 2)


@dataclass(frozen=True)
class Standing:
    """The points of one submission.

    Attributes:
        raw: points earned. penalty: points taken off because the submission is late. final: points that count.
        late_seconds: how late the submission is, in seconds.
        time_unknown: the time of the submission is unknown, so the time of grading was used.
    """

    raw: float
    penalty: float
    final: float
    late_seconds: int
    time_unknown: bool = False


@dataclass(frozen=True)
class LatePolicy:
    """A deadline and a rule. Without a deadline no submission is late. Without a rule there is no penalty."""

    deadline: datetime | None = None
    rule: Rule | None = None

    @property
    def zone(self) -> tzinfo:
        """The time zone for times that do not give one."""
        return (self.deadline.tzinfo if self.deadline else None) or timezone.utc

    def standing(self, result: Result) -> Standing:
        """Return the points of a submission, with the penalty."""
        late = timedelta(0)
        if self.deadline and result.time:
            late = max(timedelta(0), result.time - self.deadline)
        penalty = self.rule.penalty(result.score, late) if self.rule else 0.0
        final = round(result.score - penalty, 2)
        seconds = math.ceil(late.total_seconds())
        return Standing(result.score, penalty, final, seconds, result.submitted_by == UNKNOWN)


def parse_rule(text: str) -> Rule:
    """Parse a rule from the command line.

    Raises:
        UsageError: the text is not a rule.
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
    """Parse a time in ISO 8601. A time without an offset is in `zone`, by default the machine's zone.

    Raises:
        UsageError: the text is not a time.
    """
    try:
        found = datetime.fromisoformat(text.strip())
    except ValueError:
        raise unusable("late.time", what=what, text=text) from None
    if found.tzinfo is not None:
        return found
    return found.replace(tzinfo=zone) if zone else found.astimezone()


def read_times(path: Path, zone: tzinfo) -> Mapping[str, datetime]:
    """Read the times of submissions from a CSV file with two columns, name and time. A header is allowed.

    Raises:
        UsageError: the file cannot be read, a row is not valid, or a name comes twice.
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
    """Return the times by the names of submissions. `given` may use these names, or the names of files and folders.

    Raises:
        UsageError: a name fits no submission, or several; or two names fit the same submission.
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
    """Return the first five names as text, with the number of further names."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def implausible(at: datetime | None, now: datetime) -> str:
    """Say why a time from files is impossible; "" if it is possible."""
    if at is None:
        return "no time that can be read"
    if at < OLDEST:
        return f"{at:%Y-%m-%d}, before {OLDEST.year}"
    return f"{at:%Y-%m-%d}, in the future" if at > now + AHEAD else ""
