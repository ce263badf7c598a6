"""Draw virtual.png for virtual.md, which names the command that gives the same curve: `python docs/sweep.py`. It takes a minute."""

from __future__ import annotations

from pathlib import Path

import papers
from hwfsdp.plot.scaling import plot_scaling, points_of
from hwfsdp.plot.style import Figure
from hwfsdp.virtual.run import LIMITS, simulate

MODEL, DEVICE, GPUS = "llama3-8b", "h100", [2**n for n in range(3, 13)]
OPTIONS = {"batch": 1, "seq": 8192, "checkpoint": "selective"}


def draw() -> Figure:
    points = points_of(simulate(MODEL, gpus, DEVICE, **OPTIONS) for gpus in GPUS)
    return plot_scaling(points, title=f"{MODEL} on {DEVICE}", caption=f"Predicted: {LIMITS}.")


if __name__ == "__main__":
    papers.save(draw(), Path(__file__).with_name("virtual.png"))
