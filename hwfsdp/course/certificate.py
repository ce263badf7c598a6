"""The certificate after station 10: one HTML file with the figures of the learner's `my_fsdp.py`."""

from __future__ import annotations

import hashlib
from datetime import date
from pathlib import Path

from hwfsdp.course.manifest import OWN_FILE, Course
from hwfsdp.course.pages import filled
from hwfsdp.course.progress import Progress

STATION = "10"  # the learner gets the certificate after this station


def write_certificate(course: Course, progress: Progress) -> Path | None:
    """Write `certificate.html` beside the learner's progress if all stations up to 10 have full marks. Station 02 is optional.

    Returns:
        The path of the certificate; None if a station is missing, or the file cannot be written.
    """
    stations = [e for e in course.exercises if e.is_station and e.number <= STATION]
    standings = [progress.standing(station) for station in stations]
    if any((s.status, s.stale) != ("passed", False) for s in standings if s.exercise.number != "02"):
        return None
    content = stations[0].path.read_bytes()
    page = filled(
        "certificate.html",
        lines=len(content.splitlines()),
        standings=standings,
        measured=progress.measured,
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
