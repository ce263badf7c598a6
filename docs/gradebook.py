"""Take the picture of docs/instructors.md, light and dark, for pages and phones: `python docs/gradebook.py`. It needs a Chromium, and takes minutes.

It makes a small class from the reference: some submissions are right, and each of the others has one mistake or ends early. Then it grades
the class up to station 04. The picture ends above the remarks, which say of everybody here that they copied the reference.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "support"))

from browser import browser  # noqa: E402
from hwfsdp.course.stages import stage, starter  # noqa: E402

WIDTH, PHONE, SCALE = 736, 390, 2  # pixels of the window, and of the picture for each of them
MISTAKES = {  # student → a piece of the reference, and what the student writes instead
    "dora": ("self.add_to_shard(mean)", "self.add_to_shard(mean * dist.get_world_size())"),
    "emil": ("self.gathered.untyped_storage().resize_(0)", "pass"),
    "gina": (
        "return min(rank * chunk, n), min((rank + 1) * chunk, n)",
        "return rank * chunk, (rank + 1) * chunk",
    ),
    "ines": ("        self.is_whole = True\n", "        while not self.is_whole:\n            pass\n"),
}


def submissions() -> dict[str, str]:
    """Return the file of each student."""
    text = (HERE.parent / "solutions" / "my_fsdp.py").read_text()
    whole = stage(text, "04")
    found = {
        **dict.fromkeys(("ada", "ben", "dan"), whole),
        **dict.fromkeys(("carla", "hugo"), stage(text, "03")),
    }
    for name, (piece, mistake) in MISTAKES.items():
        assert piece in whole, piece
        found[name] = whole.replace(piece, mistake, 1)
    return found | {"jan": f"{whole}\ndef (:\n", "kim": stage(text, "01"), "lea": starter(text)}


def graded(folder: Path) -> Path:
    """Write the class, grade it, and return the page of the gradebook."""
    for name, text in submissions().items():
        (folder / "class" / name).mkdir(parents=True)
        (folder / "class" / name / "my_fsdp.py").write_text(text)
    (folder / "class" / "fred.tar.gz").write_bytes(b"\x1f\x8b\x08\x00 damaged")
    command = [sys.executable, "-m", "hwfsdp", "grade", str(folder / "class"), "--upto", "04", "--seed", "1"]
    subprocess.run(
        [*command, "--out", str(folder / "grades")], check=False
    )  # 1: there is something to look at
    return folder / "grades" / "grades.html"


def main() -> None:
    """Write gradebook.png and its twins, the top of the page, down to the fourth misconception."""
    with tempfile.TemporaryDirectory() as folder:
        page = graded(Path(folder))
        with browser(Path(folder, "browser")) as tab:
            for name, width, dark in (
                ("gradebook", WIDTH, False),
                ("gradebook_dark", WIDTH, True),
                ("gradebook_phone", PHONE, False),
                ("gradebook_phone_dark", PHONE, True),
            ):
                tab.look(width, 600, dark=dark)
                tab.open(page.absolute().as_uri())
                fourth = "document.querySelectorAll('.columns tr')[4]"  # below the head of the table
                end = tab.run(f"Math.ceil({fourth}.getBoundingClientRect().bottom)")
                tab.call(
                    "Emulation.setDeviceMetricsOverride",
                    width=width,
                    height=end,
                    deviceScaleFactor=SCALE,
                    mobile=False,
                )
                picture = Image.open(io.BytesIO(tab.png())).convert("RGB").quantize(64)
                picture.save(HERE / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
