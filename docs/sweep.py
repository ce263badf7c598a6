"""Draw virtual.png for virtual.md, which names the command that gives the same curve: `python docs/sweep.py`. It takes a minute."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import papers
from hwfsdp.plot.scaling import plot_scaling
from hwfsdp.plot.style import Figure
from hwfsdp.virtual.run import LIMITS, Simulation, simulate

MODEL, DEVICE, GPUS = "llama3-8b", "h100", [2**n for n in range(3, 13)]
OPTIONS = {"batch": 1, "seq": 8192, "checkpoint": "selective"}


def draw(found: list[Simulation], width: float) -> Figure:
    return plot_scaling(found, title=f"{MODEL} on {DEVICE}", caption=f"Predicted: {LIMITS}.", width=width)


if __name__ == "__main__":
    found = [simulate(MODEL, gpus, DEVICE, **OPTIONS) for gpus in GPUS]
    papers.save_each(partial(draw, found), Path(__file__).with_name("virtual.png"))
