"""What a rank reports about `traffic`."""

from __future__ import annotations

from typing import Any

from hwfsdp.course.probing import Report, attempt, submitted


def probe_traffic(report: Report, calls: list[dict[str, Any]]) -> None:
    """Call the closed form with each of these arguments."""
    attempt(report, "traffic", lambda: [bytes_of(submitted().traffic(**arguments)) for arguments in calls])


def bytes_of(found: Any) -> dict[str, Any]:
    """Keep integers, and turn anything else into text."""
    return {str(op): nbytes if type(nbytes) is int else repr(nbytes) for op, nbytes in dict(found).items()}
