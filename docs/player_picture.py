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

WIDTH, PHONE, SCALE = 736, 390, 2  # pixels of the windows (the column of the site), and of the picture for each of them


def main() -> None:
    """Write player.png, timeline and code of a player as wide as the site's column, and player_phone.png, the timeline on a phone; both also dark."""
    with tempfile.TemporaryDirectory() as folder, browser(Path(folder, "browser")) as tab:
        page = Path(folder, "player.html")
        make_page([(STEP, step_of_gpt())]).save(page)
        for end, dark in (("", False), ("_dark", True)):
            for width, last, name in ((WIDTH, "#code", "player"), (PHONE, "#timeline", "player_phone")):
                tab.look(width, 600, dark=dark)
                tab.open(page.as_uri())
                picture = _taken(tab, width, 1400)  # so high that the bar at the bottom covers no part of the picture
                top, bottom = _sides(tab, "#timeline")[0], _sides(tab, last)[1]
                box = (0, round(SCALE * top) - 8, picture.width, round(SCALE * bottom) + 8)
                _save(picture.crop(box), f"{name}{end}.png")


def _taken(tab: Tab, width: int, height: int) -> Image.Image:
    """Take the top of the page, at `SCALE` times the pixels of the window."""
    tab.call(
        "Emulation.setDeviceMetricsOverride",
        width=width,
        height=height,
        deviceScaleFactor=SCALE,
        mobile=False,
    )
    tab.run("state.change({})")  # the canvases draw again, for these pixels
    tab.drawn()
    return Image.open(io.BytesIO(tab.png())).convert("RGB")


def _sides(tab: Tab, selector: str) -> tuple[float, float]:
    """Return where an element begins and ends, in pixels of the window from its top."""
    box = tab.run(f"document.querySelector('{selector}').getBoundingClientRect().toJSON()")
    return box["top"], box["bottom"]


def _save(picture: Image.Image, name: str) -> None:
    picture.quantize(256, dither=Image.Dither.NONE).save(HERE / name, optimize=True)


if __name__ == "__main__":
    main()
