"""Draw the pictures of all exercises, or of those named: `python docs/exercise_pictures/draw.py [01_rows ...]`."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
EXERCISES = HERE.parents[1] / "exercises"
sys.path.insert(0, str(HERE.parent))

import papers  # noqa: E402


def main(names: list[str]) -> None:
    for folder in sorted(EXERCISES.iterdir()):
        topic = {"homework": "hw_fsdp", "lab": "worked_example"}.get(folder.name, folder.name[3:])
        if (folder.name in names or not names) and (HERE / f"{topic}.py").is_file():
            draw, path = importlib.import_module(f"exercise_pictures.{topic}").draw, folder / "picture.png"
            if inspect.signature(draw).parameters:  # the width: there is a picture for phones, too
                papers.save_each(draw, path)
            else:
                papers.save(draw(), path)


if __name__ == "__main__":
    main(sys.argv[1:])
