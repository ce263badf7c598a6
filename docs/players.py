"""Put step players on the site, below a still picture or before a question: readers can play the same step.

The build of the site makes these pages, so that they show the code as it is. A player is folded at first, and the browser loads its
page only when the reader unfolds it. Paper and GitHub have the still pictures. Logs come from the simulator, and, for the demo, from two
ranks on this machine. Players of the reference show its events and times, but no code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from docutils import nodes
from jinja2 import Template

from hwfsdp.course.compare import drawn, step_of
from hwfsdp.course.machines import EVALUATION, WIDE
from hwfsdp.course.stages import stage
from hwfsdp.observe.eventlog import EventLog
from hwfsdp.plot.player.page import make_page
from hwfsdp.train.models import GPTConfig
from hwfsdp.train.traced_run import Steps, Target, trace_run
from hwfsdp.virtual.run import simulate

DOCS = Path(__file__).parent
PACKAGE = DOCS.parent / "hwfsdp"
FOLDER = "players"  # folder of the site
CONFIG = GPTConfig(dim=2048, layers=5, heads=16, seq_len=1024)
Logs = dict[str, EventLog]

BLOCK = Template(
    '<details class="player{{ " low" if is_low }}"><summary>{{ says }}</summary><p><a href="{{ address }}">In a window of its own</a></p>'
    '<iframe src="{{ address }}" title="Step player: {{ says }}" loading="lazy"></iframe></details>',
    autoescape=True,
)


class Player(NamedTuple):
    """A player on a page.

    Attributes:
        page: the page of the site. at: the name of the picture above the player, or the id of the section below it.
        says: the question for the reader. logs: makes one log or two, by name.
    """

    page: str
    at: str
    says: str
    logs: Callable[[], Logs]


# --- Logs --------------------------------------------------------------------------------------------------


@cache
def demo(reshard_after_forward: bool | None) -> EventLog:
    """Record two steps of the demo's model on two ranks of this machine."""
    with redirect_stdout(sys.stderr):
        return trace_run(Target(None, (), Steps(), reshard_after_forward=reshard_after_forward), 2, "cpu")


def with_and_without_freeing() -> Logs:
    return {"freed after the forward": demo(True), "kept until the backward": demo(False)}


def stations(machine: str, *numbers: str, trains: bool = True) -> Logs:
    """Run a step of the reference after each of these stations on a simulated machine: forward and backward, or only a forward."""
    marked = (DOCS.parent / "solutions" / "my_fsdp.py").read_text()
    logs = {}
    with TemporaryDirectory() as folder:
        for number in numbers:
            path = Path(folder, f"after_{number}.py")
            path.write_text(stage(marked, number))
            step = step_of(path, WIDE if trains else EVALUATION, machine)
            log = drawn(step)
            shown = [replace(e, code="") for e in log.events]  # the page must not show the reference
            logs[f"after station {number}"] = EventLog(shown, about=log.about)
    return logs


def simulated(gpus: int, settings: dict[str, dict[str, Any]]) -> Logs:
    """Simulate a step of a GPT on virtual H100s. `settings`: name → the settings of `simulate`."""
    return {
        name: simulate(CONFIG, gpus, **{"batch": 2, "seq": 1024, **each}).log
        for name, each in settings.items()
    }


STEP = "One training step of a GPT on 8 virtual GPUs"


def step_of_gpt() -> EventLog:
    """Return the step in the picture of the player, docs/player.png."""
    return simulate(CONFIG, 8, "h100", batch=2, seq=1024, reshard_after_forward=True).log


def of_faq(name: str) -> Logs:
    """Return the first and the last run of a function of docs/faq.py."""
    import faq

    runs = list(getattr(faq, name)().items())
    return {name: run.log for name, run in (runs[0], runs[-1])}


# --- Players -----------------------------------------------------------------------------------------------

EXERCISES = {
    "03_naive_fsdp": (
        "Play a forward of the reference: how long does each unit wait for its gathers?",
        partial(stations, "host", "03", trains=False),
    ),
    "06_mixed_precision": (
        "Play a step in float32 (A) and in bfloat16 (B): what becomes half as large, and what stays?",
        partial(
            simulated, 8, {str(dtype): {"param_dtype": dtype} for dtype in (torch.float32, torch.bfloat16)}
        ),
    ),
    "07_accumulation": (
        "Play a step with reshard_after_forward=True (A) and False (B): which gathers does B leave out, and what does it hold instead?",
        partial(
            simulated,
            8,
            {f"reshard_after_forward={each}": {"reshard_after_forward": each} for each in (True, False)},
        ),
    ),
    "08_streams": (
        "Play a step of the reference on a virtual GPU: which gathers does compute hide, and which can it not hide?",
        partial(stations, "gpu", "08"),
    ),
    "09_forward_prefetch": (
        "Play a forward whose gathers start when they are needed (A), and one ahead (B): where does A wait?",
        partial(stations, "host", "08", "09", trains=False),
    ),
    "10_backward_prefetch": (
        "Play a step before this station (A) and after it (B): what moves behind the backward?",
        partial(stations, "host", "09", "10"),
    ),
    "11_hybrid_sharding": (
        "Play a step sharded over 16 GPUs (A) and within each node of 8 (B): what takes less time, and what more memory?",
        partial(simulated, 16, {"over all GPUs": {}, "within each node": {"hsdp": True}}),
    ),
    "homework": (
        "Play a step that overlaps only what it has to (A), and one that overlaps all it can (B): where does A wait?",
        partial(stations, "host", "08", "10"),
    ),
}
FAQ = {
    "one_group": ("groupings", "Play one group (A) and six (B): what can compute hide?"),
    "accumulation": ("accumulations", "Play both steps: how long do whole gradients stay?"),
    "logging": ("logged", "Play both steps: which parameters are whole when the forward begins?"),
    "reshard": (
        "reshards",
        "Play True (A) and False (B): which gathers disappear, and what is whole meanwhile?",
    ),
    "scaling": ("scalings", "Play 8 GPUs (A) and 256 with hybrid sharding (B): what does compute hide?"),
}
PLAYERS = {
    "step": Player("index", "player.png", "Play this step.", lambda: {STEP: step_of_gpt()}),
    "demo": Player("traces", "player.png", "Play two steps of the demo.", lambda: {"the demo": demo(None)}),
    "demo-kept": Player(
        "traces",
        "player.png",
        "Play the demo beside itself with reshard_after_forward=False.",
        with_and_without_freeing,
    ),
    **{
        name: Player(f"exercises/{name}/README", "picture.png", says, logs)
        for name, (says, logs) in EXERCISES.items()
    },
    **{
        f"faq-{name}": Player("faq", f"faq_{name}.png", says, partial(of_faq, source))
        for name, (source, says) in FAQ.items()
    },
}


def add_players(app: Any, doctree: nodes.document) -> None:
    """Insert the players of a page."""
    page = app.env.docname
    for name, player in reversed(PLAYERS.items()):  # of two players at one place, the first comes first
        if player.page == page:
            address = f"{'../' * page.count('/')}{FOLDER}/{name}.html"
            is_low = (
                isinstance(player.logs, partial) and player.logs.func is stations
            )  # it has no pane of memory
            text = BLOCK.render(says=player.says, address=address, is_low=is_low)
            block = nodes.raw("", text, format="html")
            parent, place = _place(doctree, player.at)
            parent.insert(place, block)


def _place(doctree: nodes.document, at: str) -> tuple[Any, int]:
    """Return the place of a player: the parent node, and the index among its children."""
    for section in doctree.findall(nodes.section):
        if at in section["ids"]:
            return section.parent, section.parent.index(section)
    picture = next(node for node in doctree.findall(nodes.image) if Path(node["uri"]).name == at)
    block = picture.parent if isinstance(picture.parent, nodes.paragraph) else picture
    place = block.parent.index(block) + 1
    following = block.parent[place : place + 1]
    is_caption = bool(following) and isinstance(following[0].next_node(), nodes.emphasis)
    return block.parent, place + is_caption


def write_players(app: Any, failed: Exception | None) -> None:
    """Write the players of all pages of the site. Skip players that are newer than all code."""
    if failed or app.builder.format != "html":
        return
    newest = max(path.stat().st_mtime for path in _sources())
    for name, player in PLAYERS.items():
        path = Path(app.outdir) / FOLDER / f"{name}.html"
        if player.page in app.env.found_docs and not (path.exists() and path.stat().st_mtime > newest):
            path.parent.mkdir(exist_ok=True)
            make_page(list(player.logs().items())).save(path)


def _sources() -> Iterator[Path]:
    yield from DOCS.glob("*.py")
    for kind in ("py", "js", "css", "html", "gz"):
        yield from PACKAGE.rglob(f"*.{kind}")


def setup(app: Any) -> dict[str, Any]:
    """Register the hooks. Sphinx calls this function."""
    app.connect("doctree-read", add_players)
    app.connect("build-finished", write_players)
    return {"parallel_read_safe": True}
