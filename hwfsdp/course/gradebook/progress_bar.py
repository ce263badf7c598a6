"""A line that says how far a run is, on a terminal only."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TextIO

from hwfsdp.course.gradebook.grading import Progress

WIDTH = 24  # of the bar


class ProgressBar:
    """One line of a terminal, rewritten as a run proceeds; nothing elsewhere.

    Args:
        stream: usually standard error, so that what is printed may go elsewhere.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stderr
        self.shown, self.began = False, time.monotonic()

    def __call__(self, progress: Progress) -> None:
        if not self.stream.isatty():
            return
        self.stream.write(f"\r\033[K{self.line(progress)}")
        self.stream.flush()
        self.shown = True

    def line(self, progress: Progress) -> str:
        """The line, no wider than the terminal."""
        full = WIDTH * progress.done // max(1, progress.total)
        seconds = int(time.monotonic() - self.began)
        text = f"{'█' * full}{'░' * (WIDTH - full)} {progress.done}/{progress.total} submissions, "
        text += f"{progress.exercises} exercises, {seconds // 60}:{seconds % 60:02d}  {progress.name}"
        return text[: shutil.get_terminal_size((100, 24)).columns - 1]

    def clear(self) -> None:
        """Take the line away."""
        if self.shown:
            self.stream.write("\r\033[K")
            self.stream.flush()
            self.shown = False
