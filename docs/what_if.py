"""Write the page on which readers change the settings of a step and see what follows: `python docs/what_if.py`. It takes minutes.

`simulate` predicts the step at every position of the controls, and the page holds all answers, so that it needs neither Python nor a
network. The page is docs/_static/what_if.html, made from docs/_templates/what_if.html.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jinja2 import Template

from hwfsdp.features.module import FSDPModule
from hwfsdp.observe.ledger import KINDS
from hwfsdp.plot import style
from hwfsdp.train.models import GPTConfig
from hwfsdp.train.models.zoo import build
from hwfsdp.virtual.programs import Plan, shard, training_step
from hwfsdp.virtual.run import LIMITS, Simulation, simulate

DOCS = Path(__file__).parent
PAGE = DOCS / "_static" / "what_if.html"
DEVICE, SEQ = "h100", 1024
MODELS = {
    "narrow: width 2048": GPTConfig(dim=2048, layers=4, heads=16, seq_len=SEQ),
    "wide: width 4096": GPTConfig(dim=4096, layers=4, heads=32, seq_len=SEQ),
}
LANES = {"compute": 0, "all_gather": 1, "reduce_scatter": 2, "all_reduce": 2}
OPS = ("forward", "backward", "optimizer", "wait", "all_gather", "reduce_scatter", "all_reduce", "copy_in", "copy_out")


class Position(NamedTuple):
    """The settings of one step: a value of each control, in the order of the controls on the page."""

    model: str
    gpus: int
    batch: int
    dtype: str
    reshard_after_forward: bool
    prefetch: bool
    checkpoint: str


CONTROLS: dict[str, tuple[str, tuple[Any, ...]]] = {  # field of a position → what the page calls it, values
    "model": ("GPT of 4 blocks", tuple(MODELS)),
    "gpus": ("GPUs (ranks)", (8, 512)),
    "batch": ("sequences per GPU", (1, 4)),
    "dtype": ("computes in", ("bfloat16", "float32")),
    "reshard_after_forward": ("frees parameters after the forward", (True, False)),
    "prefetch": ("prefetches in the backward", (True, False)),
    "checkpoint": ("activation checkpointing", ("none", "full")),
}


def positions() -> Iterator[Position]:
    """Yield all positions of the controls. The last control changes first."""
    yield from itertools.starmap(Position, itertools.product(*(values for _, values in CONTROLS.values())))


def predict(at: Position) -> Simulation:
    """Simulate the step at a position."""
    settings = {
        "batch": at.batch,
        "seq": SEQ,
        "param_dtype": getattr(torch, at.dtype),
        "reshard_after_forward": at.reshard_after_forward,
        "checkpoint": at.checkpoint,
    }
    target: Any = MODELS[at.model] if at.prefetch else _without_prefetch(MODELS[at.model], Plan(**settings), at.gpus)
    return simulate(target, at.gpus, DEVICE, **settings)


def _without_prefetch(config: GPTConfig, plan: Plan, gpus: int) -> Callable[[], Any]:
    """Return a function that makes the same step, in which no backward gathers ahead."""

    def make_step() -> Callable[[], Any]:
        with torch.device("meta"):
            model = build(config)
        model = shard(model, plan, gpus)
        model.to_empty(device="cpu")
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_modules_to_backward_prefetch([module])  # itself is gathered already: nothing is left to do
        return training_step(model, plan)

    return make_step


def pack(found: Simulation) -> dict[str, Any]:
    """Return what the page shows of a simulation. Times are µs; events are lane, op, start and length, one after the other."""
    begin = min(event.start_us for event in found.log.events)
    shown = [e for e in found.log.events if e.op in OPS and e.dur_us >= 1 and not (e.op in OPS[:2] and "." not in e.owner)]
    rows = [
        (LANES[e.stream], OPS.index(e.op), round(e.start_us - begin), round(e.dur_us))
        for e in sorted(shown, key=lambda e: e.start_us)
        if e.stream in LANES
    ]
    # compute waits for a collective that the step itself calls, as for the norm of the gradients
    called = found.log.select("all_reduce", owner="")
    rows += [(0, OPS.index("wait"), round(e.start_us - begin), round(e.dur_us)) for e in called]
    return {
        "step": round(found.step_seconds * 1e6),
        "exposed": round(found.exposed_comm_fraction * found.step_seconds * 1e6),
        "peak": {kind: nbytes for kind, nbytes in found.peak_by_kind.items() if nbytes},
        "memory": round(found.memory_gib * 2**30),
        "events": [number for row in rows for number in row],
    }


def answer(at: Position) -> dict[str, Any]:
    """Return what the page shows at a position."""
    return pack(predict(at))


def _look(look: style.Look) -> tuple[str, str, str]:
    """Return the color of an area, the mark that its hatch repeats ("" if it is plain), and the color of the hatch."""
    if look.color == style.WHITE:
        return "var(--paper)", look.hatch[:1], "var(--soft)"
    return look.color, look.hatch[:1], style.edge_of(look)


def write(answers: list[dict[str, Any]]) -> None:
    """Write the page with the answers at all positions, in the order of `positions`."""
    data = {
        "controls": [{"field": field, "name": name, "values": values} for field, (name, values) in CONTROLS.items()],
        "answers": answers,
        "ops": [[op, *_look(style.look_of_op(op))] for op in OPS],
        "kinds": [[kind, *_look(style.look_of_kind(kind))] for kind in (*KINDS, "activation")],
    }
    template = Template((DOCS / "_templates" / "what_if.html").read_text(), autoescape=True)
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    PAGE.write_text(template.render(data=text, limits=LIMITS, device=DEVICE, seq=SEQ) + "\n")


def answers(processes: int = 2) -> list[dict[str, Any]]:
    """Simulate all positions. Without gathers in the backward, nothing can be prefetched: one run is enough."""
    needed = [at for at in positions() if at.prefetch or at.reshard_after_forward]
    with get_context("spawn").Pool(processes) as pool:
        found = {}
        for at, packed in zip(needed, pool.imap(answer, needed), strict=True):
            found[at] = packed
            print(f"\r{len(found)} of {len(needed)}", end="", file=sys.stderr, flush=True)
    return [found[at if at in found else at._replace(prefetch=True)] for at in positions()]


if __name__ == "__main__":
    write(answers())
