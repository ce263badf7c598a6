"""A line that shows the progress of a run, on a terminal only."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TextIO

from hwfsdp.course.gradebook.grading import Progress

WIDTH = 24  # of the bar


class ProgressBar:
    """One line of a terminal that is rewritten as a run proceeds. Without a terminal, it shows nothing.

    Args:
        stream: by default standard error, so that standard output can go to a file.
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
        """Return the line, cut to the width of the terminal."""
        full = WIDTH * progress.done // max(1, progress.total)
        seconds = int(time.monotonic() - self.began)
        text = f"{'█' * full}{'░' * (WIDTH - full)} {progress.done}/{progress.total} submissions, "
        text += f"{progress.exercises} exercises, {seconds // 60}:{seconds % 60:02d}  {progress.name}"
        return text[: shutil.get_terminal_size((100, 24)).columns - 1]

    def clear(self) -> None:
        """Remove the line."""
        if self.shown:
            self.stream.write("\r\033[K")
            self.stream.flush()
            self.shown = False
