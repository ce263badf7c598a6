"""Take the picture of docs/instructors.md: `python docs/gradebook.py grades/grades.html`. It needs a Chromium."""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "support"))

from browser import browser  # noqa: E402

WIDTH, HEIGHT = 1100, 1560  # pixels: down to what the instructor should look at


def main(page: Path) -> None:
    """Write gradebook.png, the top of a gradebook's page."""
    with tempfile.TemporaryDirectory() as folder, browser(Path(folder)) as tab:
        tab.look(WIDTH, HEIGHT)
        tab.open(page.absolute().as_uri())
        picture = Image.open(io.BytesIO(tab.png())).convert("RGB").quantize(64)
    picture.save(HERE / "gradebook.png", optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
