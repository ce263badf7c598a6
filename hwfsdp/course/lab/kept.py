"""What the lab remembers from command to command: JSON files in `.hwfsdp` of the course, which may be lost at any time."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import Any

from hwfsdp.course.manifest import Course


def load(course: Course, name: str) -> dict[str, Any]:
    """What was saved under a name; nothing if nothing was, or if it cannot be read."""
    try:
        found = json.loads((course.root / ".hwfsdp" / name).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def save(course: Course, name: str, found: dict[str, Any]) -> None:
    """As a whole, so that an interrupted command leaves the old file; not at all in a course that may only be read."""
    path = course.root / ".hwfsdp" / name
    with suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(found, indent=1))
        draft.replace(path)
