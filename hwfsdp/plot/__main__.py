"""python -m hwfsdp.plot [DIR]: draws a picture of every kind into DIR (default docs/pictures)."""

from __future__ import annotations

import sys
from pathlib import Path

from hwfsdp.plot.gallery import draw_all

if __name__ == "__main__":
    for path in draw_all(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/pictures")):
        print(path, flush=True)
