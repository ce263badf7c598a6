"""Take the pictures of the step player, light and dark, for README.md and docs/: `python docs/player_picture.py`. It needs a Chromium.

The page plays a step of a GPT on virtual GPUs, so the times are the same on every machine.
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests" / "support")]

from browser import Tab, browser  # noqa: E402
from hwfsdp.plot.player.page import make_page  # noqa: E402
from players import STEP, step_of_gpt  # noqa: E402

WIDTH, SCALE = 1100, 2  # pixels of the window, and of the picture for each of them


def main() -> None:
    """Write player.png and player_dark.png: the page of a player, down to its panes' end."""
    with tempfile.TemporaryDirectory() as folder, browser(Path(folder, "browser")) as tab:
        page = Path(folder, "player.html")
        make_page([(STEP, step_of_gpt())]).save(page)
        for name, dark in (("player", False), ("player_dark", True)):
            tab.look(WIDTH, 600, dark=dark)
            tab.open(page.as_uri())
            picture = Image.open(io.BytesIO(_taken(tab))).convert("RGB").quantize(256, dither=Image.Dither.NONE)
            picture.save(HERE / f"{name}.png", optimize=True)


def _taken(tab: Tab) -> bytes:
    """Take the page from its top to the end of its panes, at `SCALE` times the pixels of the window."""
    height = tab.run("Math.ceil(document.querySelector('main').getBoundingClientRect().bottom) + 10")
    tab.call(
        "Emulation.setDeviceMetricsOverride", width=WIDTH, height=height, deviceScaleFactor=SCALE, mobile=False
    )
    tab.run("state.change({})")  # the canvases draw again, for these pixels
    tab.drawn()
    return tab.png()


if __name__ == "__main__":
    main()
