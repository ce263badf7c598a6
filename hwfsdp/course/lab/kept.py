"""Values that the lab keeps between commands: JSON files in `.hwfsdp` of the course, which may be lost at any time."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from hwfsdp.course.manifest import Course
from hwfsdp.course.refusals import write_whole


def load(course: Course, name: str) -> dict[str, Any]:
    """Return what was saved under a name; {} if nothing was saved, or it cannot be read."""
    try:
        found = json.loads((course.root / ".hwfsdp" / name).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def save(course: Course, name: str, found: dict[str, Any]) -> None:
    """Save the file as a whole, so that an interrupted command leaves the old file. A read-only course saves nothing."""
    with suppress(OSError):
        write_whole(course.root / ".hwfsdp" / name, [json.dumps(found, indent=1)])
