"""What a learner takes home after station 10: one HTML file, with the figures of their own `my_fsdp.py`."""

from __future__ import annotations

import hashlib
from datetime import date
from html import escape
from pathlib import Path

from hwfsdp.course.manifest import OWN_FILE, Course
from hwfsdp.course.progress import Progress

STATION = "10"  # with which one gets it
_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>I wrote FSDP</title>
<style>
  body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 42rem; margin: 3rem auto; padding: 0 1rem; color: #222; background: #fff }}
  h1 {{ font-size: 1.8rem; margin-bottom: 0 }}
  table {{ border-collapse: collapse; width: 100%; margin: 1rem 0 }}
  td {{ border-top: 1px solid #ccc; padding: .3rem .6rem .3rem 0; vertical-align: top; overflow-wrap: anywhere }}
  td.points {{ white-space: nowrap; text-align: right }}
  footer {{ color: #666; font-size: .85rem; overflow-wrap: anywhere }}
</style>
<h1>I wrote FSDP</h1>
<p>Fully sharded data parallel training in one file of {lines} lines, from scratch. It trains with the same numbers as a model
that is not sharded, on one, two and three ranks.</p>
<h2>Stations</h2>
<table>{stations}</table>
<h2>Measured</h2>
<table>{measured}</table>
<footer>{day}. {file}, SHA-256 {digest}. Checked by hwfsdp check; whoever has the file can check it again.</footer>
</html>
"""


def write_certificate(course: Course, progress: Progress) -> Path | None:
    """Write `certificate.html` beside the learner's progress, if all stations up to 10 have their points; 02 is a side quest.

    Returns:
        Where it is; None if something is missing, or it cannot be written.
    """
    stations = [e for e in course.exercises if e.is_station and e.number <= STATION]
    standings = [progress.standing(station) for station in stations]
    if any((s.status, s.stale) != ("passed", False) for s in standings if s.exercise.number != "02"):
        return None
    content = stations[0].path.read_bytes()
    rows = "".join(
        f'<tr><td>{s.exercise.number} {escape(s.exercise.title)}</td><td class="points">{s.score} of {s.exercise.points}</td></tr>'
        for s in standings
    )
    measured = "".join(
        f"<tr><td>{escape(of)}</td><td>{escape(figures)}</td></tr>"
        for of, figures in progress.measured.items()
    )
    page = _PAGE.format(
        lines=len(content.splitlines()),
        stations=rows,
        measured=measured,
        day=date.today().isoformat(),
        file=OWN_FILE,
        digest=hashlib.sha256(content).hexdigest(),
    )
    path = course.root / ".hwfsdp" / "certificate.html"
    try:
        path.write_text(page)
    except OSError:
        return None
    return path
