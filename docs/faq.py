"""Make the pictures and the numbers of docs/faq.md. Each shows a bug as people meet it, and the fixed run.

    python docs/faq.py [NAME ...]

draws docs/pictures/faq_NAME.png; without names, all of them. Runs about values use ranks of this machine. Runs about time and memory use
virtual GPUs, in virtual time. So all pictures come out the same on every machine. A run is a function that returns numbers or logs. A
picture is a function that draws the result of a run. The numbers in the text come from the runs; tests/walks/test_faq.py compares them.
"""

from __future__ import annotations

import copy
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import torch
import torch.distributed as dist
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import clip_grad_norm_

from hwfsdp import (
    EventLog,
    MixedPrecisionPolicy,
    RankError,
    UsageError,
    fully_shard,
    init_shards,
    launch,
    record,
    register_fsdp_forward_method,
)
from hwfsdp.observe.events import Event, active
from hwfsdp.plot import sheet, style, timeline
from hwfsdp.plot.timeline import Words
from hwfsdp.plot.loss import plot_losses
from hwfsdp.plot.memory import plot_memory
from hwfsdp.virtual import Simulation, simulate

import papers
from exercise_pictures.drawing import box, noise
from order_of_issue import Issued, draw_box, draw_issued, issued

# pickled by value, so that ranks import neither this file nor its drawing libraries
cloudpickle.register_pickle_by_value(sys.modules[__name__])

PICTURES = Path(__file__).parent / "pictures"
RIGHT, BOTTOM, CAPTION, CAPTION_LINE = 0.3, 0.55, 0.3, 0.17  # inches
BROKEN, MENDED, PLAIN = (
    style.Look(style.VERMILION, "\\\\\\"),
    style.Look(style.BLUE),
    style.Look(style.GREYS[2], "++"),
)

# --- Models ------------------------------------------------------------------------------------------------


def network(inputs: int = 24, hidden: int = 96, outputs: int = 6) -> nn.Sequential:
    """Make two layers, with the same weights on every rank."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


def sharded(model: nn.Sequential, **options: Any) -> Any:
    """Shard each layer that has parameters, then the rest."""
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


def examples(count: int, seed: int, inputs: int = 24, classes: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, inputs, generator=generator), torch.randint(
        classes, (count,), generator=generator
    )


def norm_of(model: nn.Module) -> float:
    """Return the norm of all gradients, over all ranks."""
    norm = clip_grad_norm_(model.parameters(), float("inf"))
    return float(getattr(norm, "full_tensor", lambda: norm)())


# --- Runs on ranks of this machine -------------------------------------------------------------------------


def loss_curves() -> tuple[dict[str, list[float]], str]:
    """Return the losses with an optimizer built in time and with one built too early, and the warning about the second."""

    def train(early: bool) -> tuple[list[float], str]:
        model, losses = network(), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        sharded(model)
        if not early:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        inputs, labels = examples(48, seed=dist.get_rank())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(16):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(inputs), labels)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return losses, str(caught[0].message) if caught else ""

    (flat, said), (falling, _) = both(train)
    return {"optimizer built after fully_shard": falling, "optimizer built before fully_shard": flat}, said


def both(fn: Callable[[bool], Any]) -> tuple[Any, Any]:
    """Call `fn(True)` and `fn(False)` on two ranks. Return the results of rank 0."""
    broken, mended = launch(lambda: (fn(True), fn(False)), 2)[0]
    return broken, mended


class Call(NamedTuple):
    """A collective: its number in the process group, its operation, its parameter group, and how far each rank got with it."""

    number: str
    op: str
    owner: str
    states: tuple[str, ...]


def _table(error: str) -> list[Call]:
    """Read the rows of the table in a `RankError`."""
    row = r"^[> ] *(\d*) +(\w+) +(\S+) +\w+ +[\d,]+ B +(\w+|–) +(\w+|–)$"
    return [Call(n, op, owner, states) for n, op, owner, *states in re.findall(row, error, re.MULTILINE)]


def _called(logs: Sequence[EventLog]) -> list[Call]:
    """Make the same rows for a run that ended. All ranks must have called the same collectives."""
    first, second = ([(e.op, e.owner or "save") for e in log.collectives()] for log in logs)
    if first != second:
        raise RuntimeError("a run that ended has ranks that called different collectives")
    return [Call(str(n), op, owner, ("done", "done")) for n, (op, owner) in enumerate(first, 1)]


def _tail(step: Callable[[], object]) -> EventLog:
    with record() as log:
        step()
    return log


def saves() -> dict[str, list[Call]]:
    """Return the calls of two ranks around a save: in one run only rank 0 gathers, in the other all ranks gather."""

    def train(everyone: bool) -> EventLog:
        model = sharded(network())
        inputs, labels = examples(8, seed=dist.get_rank())

        def steps() -> None:
            F.cross_entropy(model(inputs), labels).backward()
            if everyone or dist.get_rank() == 0:
                for param in model.state_dict().values():
                    param.full_tensor()
            model(inputs)

        return _tail(steps)

    *alone, last = _table(failure(train, False))
    gathers = "gathers\nfor its file"  # a collective of the DTensor, which is not in the table of rank 1
    last = last._replace(states=tuple(gathers if state == "–" else state for state in last.states))
    return {
        "rank 0 saves alone": [*alone, last],
        "all ranks gather, rank 0 writes": _called(launch(train, 2, True)),
    }


class Router(nn.Module):
    """A module that enters its experts by load (the busiest first), or always in the same order."""

    def __init__(self, by_load: bool) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, n), nn.Linear(n, 8)) for n in (16, 32))
        self.by_load = by_load

    def forward(self, x: Tensor) -> Tensor:
        order = [0, 1]
        if self.by_load:
            order = (x[:, 0] > 0).long().bincount(minlength=2).argsort(descending=True).tolist()
        for number in order:
            x = x + self.experts[number](x)
        return x


def route(by_load: bool) -> EventLog:
    """Run two steps on this rank. In the second step, ranks have different data."""
    model = Router(by_load)
    for expert in model.experts:
        fully_shard(expert)
    fully_shard(model)

    def steps() -> None:
        for sign in (1, 1 if dist.get_rank() else -1):
            model(sign * torch.ones(4, 8)).sum().backward()

    return _tail(steps)


def routes() -> dict[str, list[Call]]:
    """Return the calls of two ranks: experts entered by load, and experts entered in the same order."""
    return {
        "the busiest expert first": _table(failure(route, True)),
        "always in the same order": _called(launch(route, 2, False)),
    }


def failure(fn: Callable[..., Any], *args: Any) -> str:
    """Return the error of a run on two ranks that must fail."""
    try:
        launch(fn, 2, *args, timeout=4)
    except RankError as error:
        return str(error)
    raise RuntimeError("a run that should have failed ended")


class Norms(NamedTuple):
    """The gradient norms of one step: of each rank's rows, and of all rows."""

    local: tuple[float, ...]
    whole: float


def gradient_norms() -> list[Norms]:
    """Return the gradient norms of three steps on two ranks."""

    def train() -> list[tuple[float, float]]:
        model, found = network(), []
        with torch.no_grad():
            model[2].weight[3:] *= 8  # larger weights in rank 1's rows give them larger gradients
        sharded(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        inputs, labels = examples(48, seed=dist.get_rank())
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            local = torch.stack([p.grad.to_local().norm() for p in model.parameters()]).norm()
            found.append((float(local), norm_of(model)))
            optimizer.step()
        return found

    return [Norms((a, b), whole) for (a, whole), (b, _) in zip(*launch(train, 2), strict=True)]


def mean_norms() -> dict[int, tuple[float, float]]:
    """Return number of ranks → the norm if each rank divides by the labels of all ranks, and the norm if each takes its own mean."""

    def train() -> tuple[float, float]:
        inputs, labels = examples(48, seed=5)
        rank, ranks = dist.get_rank(), dist.get_world_size()
        x, y = inputs.chunk(ranks)[rank], labels.chunk(ranks)[rank]
        norms = []
        for total in (len(labels), len(y)):
            model = sharded(network())
            (F.cross_entropy(model(x), y, reduction="sum") / total).backward()
            norms.append(norm_of(model))
        return norms[0], norms[1]

    return {ranks: launch(train, ranks)[0] for ranks in (1, 2, 4)}


PIECES = (1, 2, 4, 8)


def piece_norms() -> dict[int, tuple[float, float]]:
    """Return number of pieces → the norm of losses as they are, and the norm of losses divided by the number of pieces."""

    def train() -> dict[int, tuple[float, float]]:
        inputs, labels = examples(48, seed=dist.get_rank())
        found = {}
        for pieces in PIECES:
            norms = []
            for divisor in (1, pieces):
                model = sharded(network())
                for x, y in zip(inputs.chunk(pieces), labels.chunk(pieces), strict=True):
                    (F.cross_entropy(model(x), y) / divisor).backward()
                norms.append(norm_of(model))
            found[pieces] = (norms[0], norms[1])
        return found

    return launch(train, 2)[0]


class Captioner(nn.Module):
    """A module with a method besides `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 24))
        self.head = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    def generate(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)).argmax(dim=-1)


class Said(NamedTuple):
    """The events of rank 0, and its error; "" if there is none."""

    events: list[Event]
    error: str


def methods() -> dict[str, Said]:
    """Return the run of `generate` as it is, and the run after its registration."""

    def run(bare: bool) -> Said:
        torch.manual_seed(1)
        model, error = Captioner(), ""
        fully_shard(model.body)
        fully_shard(model)
        if not bare:
            register_fsdp_forward_method(model, "generate")
        with record() as log, torch.no_grad():
            try:
                model.generate(torch.ones(2, 12))
            except RuntimeError as raised:
                error = str(raised)
        return Said(log.events, error)

    return dict(zip(("generate as it is", "registered"), both(run), strict=True))


class Tied(nn.Module):
    """A model whose first and last matrix are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(64, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(self.embed(tokens))))


class Ties(NamedTuple):
    """The two runs of `ties`.

    Attributes:
        apart: run → the largest difference of the two matrices, by step.
        error: the error for a tied weight in two groups. parameters: the number of parameters of each run.
    """

    apart: dict[str, list[float]]
    error: str
    parameters: tuple[int, int]


def error_of_tie() -> str:
    """Return the error of `fully_shard` about a weight in two groups."""
    model = Tied()
    try:
        for module in (model.embed, model.head):
            fully_shard(module)
    except UsageError as raised:
        return str(raised)
    return ""


def ties() -> Ties:
    """Train with a copy of the weight in each of two groups, and with one group that has both names."""

    def train(split: bool) -> tuple[list[float], str, int]:
        torch.manual_seed(1)
        model, error, apart = Tied(), "", []
        fully_shard(model.body)
        if split:
            error = error_of_tie()
            model.head.weight = nn.Parameter(model.embed.weight.clone())
            fully_shard(model.embed)
            fully_shard(model.head)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        tokens = torch.randint(64, (4, 9), generator=torch.Generator().manual_seed(dist.get_rank()))
        for _ in range(8):
            optimizer.zero_grad()
            F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
            first, last = model.embed.weight.full_tensor().detach(), model.head.weight.full_tensor().detach()
            apart.append(float((first - last).abs().max()))
        return apart, error, sum(p.numel() for p in model.parameters())

    (broken, error, more), (mended, _, fewer) = both(train)
    return Ties(
        {"a copy in each of two groups": broken, "tied, both in the root's group": mended},
        error,
        (more, fewer),
    )


COARSE_RANKS = (2, 4, 8)


def coarse_errors() -> dict[str, list[float]]:
    """Return reduce dtype → the relative errors of the reduced gradients, by number of ranks. The reference is the mean in float64."""

    def train(reduce: torch.dtype) -> float:
        model = network()
        alone = copy.deepcopy(model).bfloat16()
        sharded(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduce))
        inputs = examples(32, seed=dist.get_rank())[0].bfloat16()
        for each in (model, alone):
            each(inputs).float().square().mean().backward()
        off, whole = 0.0, 0.0
        for param, own in zip(model.parameters(), alone.parameters(), strict=True):
            mean = own.grad.double()
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
            off += float((param.grad.full_tensor() - mean).norm() ** 2)
            whole += float(mean.norm() ** 2)
        return (off / whole) ** 0.5

    found = [
        launch(lambda: (train(torch.bfloat16), train(torch.float32)), ranks)[0] for ranks in COARSE_RANKS
    ]
    broken, mended = (list(errors) for errors in zip(*found, strict=True))
    return {"reduce_dtype=torch.bfloat16": broken, "reduce_dtype=torch.float32": mended}


def started_weights() -> dict[str, Tensor]:
    """Start a weight on the meta device, by `reset_parameters` and by `init_shards`. Return the whole weights."""

    def start(by_rank: bool) -> Tensor:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(24, 12, bias=False))
        sharded(model).to_empty(device="cpu")
        if not by_rank:
            init_shards(
                model, lambda name, row, generator: row.uniform_(-0.2, 0.2, generator=generator), seed=1
            )
        else:
            torch.manual_seed(1)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model[0].reset_parameters()
        return model[0].weight.detach().full_tensor()

    return dict(zip(("reset_parameters", "init_shards"), both(start), strict=True))


def loaded_weights() -> dict[str, Tensor]:
    """Shard a weight that rank 0 read from a file: each rank shards its own weight, or the weight of rank 0. Return the whole weights."""

    def load(alone: bool) -> Tensor:
        torch.manual_seed(dist.get_rank())
        model = nn.Sequential(nn.Linear(24, 12, bias=False))
        if dist.get_rank() == 0:
            with torch.no_grad():  # in place of a file
                model[0].weight.copy_(0.2 * torch.eye(12).repeat(1, 2))
        if not alone:
            for tensor in model.state_dict().values():
                dist.broadcast(tensor, 0)
        return sharded(model)[0].weight.detach().full_tensor()

    return dict(zip(("every rank shards its own", "rank 0 broadcasts first"), both(load), strict=True))


class Marked(nn.Linear):
    """A layer that records its own forward."""

    def forward(self, x: Tensor) -> Tensor:
        recorder = active()
        span = recorder.begin("forward", "compute", owner=self.name) if recorder else None
        y = super().forward(x)
        if span:
            span.close()
        return y


def overlaps() -> dict[str, list[Event]]:
    """Record a forward of four layers on rank 0, by torch's FSDP2 and by hwfsdp. Return the events in the order of issue."""

    def forward() -> list[list[Event]]:
        from torch.distributed.fsdp import fully_shard as theirs

        found = []
        for shard in (theirs, fully_shard):
            model = nn.Sequential(*(Marked(16, 16) for _ in range(4)))
            for number, layer in enumerate(model):
                layer.name = f"layer {number}"
                shard(layer)
            shard(model)
            with torch.no_grad():
                for _ in range(2):
                    model(torch.ones(2, 16))  # hwfsdp learns the order
                with record() as log:
                    model(torch.ones(2, 16))
            found.append(log.events)
        return found

    return dict(zip(("torch's FSDP2", "hwfsdp"), launch(forward, 2)[0], strict=True))


def computed_meanwhile(events: Iterable[Event]) -> int:
    """Count the forwards of layers that ran between the issue of a gather and the wait for it."""
    gathers, count = 0, 0
    for event in events:
        gathers += (event.op == "all_gather") - (event.op == "wait")
        count += gathers > 0 and event.op == "forward" and event.owner.startswith("layer")
    return count


# --- Runs on virtual GPUs ----------------------------------------------------------------------------------


class Block(nn.Module):
    """A block that computes x + down(relu(up(x)))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


BLOCKS, BLOCK_WIDTH = 6, 4096


def virtual(
    step: Callable[[Any, Tensor], None] | None = None,
    *,
    gpus: int = 16,
    tokens: int = 4096,
    wrap: bool = True,
    hsdp: bool = False,
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
    blocks: int = BLOCKS,
    width: int = BLOCK_WIDTH,
    dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> Simulation:
    """Simulate a step of a stack of blocks on virtual H100s, eight to a node.

    Args:
        step: runs forwards and backwards, given the model and the inputs; by default one of each.
        wrap: if True, each block is a group; else all blocks are one group.
        options: arguments of `fully_shard`.
    """

    def build() -> Callable[[], None]:
        with torch.device("meta"):
            model = nn.Sequential(*(Block(width) for _ in range(blocks)))
        policy = MixedPrecisionPolicy(dtype, torch.float32)
        mesh = (
            init_device_mesh("cpu", (gpus // 8, 8), mesh_dim_names=("replicate", "shard")) if hsdp else None
        )
        for module in (*(model if wrap else ()), model):
            fully_shard(module, mesh=mesh, mp_policy=policy, **options)
        model.to_empty(device="cpu")
        x = torch.zeros(tokens, width)
        chosen = optimizer(model.parameters(), lr=1e-3)

        def one() -> None:
            (step or _forward_backward)(model, x)
            chosen.step()
            chosen.zero_grad()

        return one

    return simulate(build, gpus, "h100")


def _forward_backward(model: Any, x: Tensor) -> None:
    model(x).float().sum().backward()


MICRO_BATCHES = 3


def accumulations() -> dict[str, Simulation]:
    """Simulate a step that reduces gradients after the last micro-batch only, and one that reduces them after each."""

    def accumulate(every: bool) -> Callable[[Any, Tensor], None]:
        def step(model: Any, x: Tensor) -> None:
            for number in range(1, MICRO_BATCHES + 1):
                model.set_requires_gradient_sync(every or number == MICRO_BATCHES)
                _forward_backward(model, x)

        return step

    return {
        "reduced after the last micro-batch": virtual(accumulate(False), dtype=torch.float32),
        "reduced after each micro-batch": virtual(accumulate(True), dtype=torch.float32),
    }


def logged() -> dict[str, Simulation]:
    """Simulate a step that gathers its weights to log them before the forward. One run leaves them unsharded, the other frees them."""

    def logging(reshard: bool) -> Callable[[Any, Tensor], None]:
        def step(model: Any, x: Tensor) -> None:
            for block in model:
                block.unshard()
                block.up.weight.detach().abs().max()
                if reshard:
                    block.reshard()
            _forward_backward(model, x)

        return step

    return {
        "unshard() and nothing else": virtual(logging(False)),
        "reshard() after each block": virtual(logging(True)),
    }


def groupings() -> dict[str, Simulation]:
    """Simulate the stack as one group, and as one group per block."""
    return {"fully_shard(model) alone": virtual(wrap=False), "fully_shard on each block too": virtual()}


RESHARDS: dict[str, bool | int] = {"True": True, "8": 8, "False": False}


def reshards() -> dict[str, Simulation]:
    """Simulate `reshard_after_forward` as True, 8 (GPUs of a node) and False."""
    return {
        name: virtual(gpus=128, tokens=2048, reshard_after_forward=value) for name, value in RESHARDS.items()
    }


STATE_GPUS = (8, 16, 32, 64, 128)


def residents(gpus: Sequence[int] = STATE_GPUS) -> dict[int, Simulation]:
    """Simulate a larger stack on each number of GPUs."""
    return {n: virtual(gpus=n, blocks=12, optimizer=torch.optim.AdamW) for n in gpus}


BATCH = 65_536  # tokens over all GPUs


def scalings() -> dict[str, Simulation]:
    """Simulate one batch on 8 GPUs, on 256, and on 256 under hybrid sharding."""
    few, many = BATCH // 8, BATCH // 256
    return {
        f"8 GPUs, {few:,} tokens each": virtual(gpus=8, tokens=few, width=1024),
        f"256 GPUs, {many:,} tokens each": virtual(gpus=256, tokens=many, width=1024),
        f"256 GPUs, {many:,} tokens each, hybrid sharding": virtual(
            gpus=256, tokens=many, width=1024, hsdp=True
        ),
    }


def peak(log: EventLog, kind: str) -> int:
    """Return the peak bytes of a kind."""
    return log.peak_bytes_by_kind().get(kind, 0)


# --- Drawing -----------------------------------------------------------------------------------------------


class Page(NamedTuple):
    """The words and the width of a picture: its title, the text below it, the inches of its sheet."""

    title: str
    text: str
    width: float

    @property
    def is_narrow(self) -> bool:
        """True on a phone, where what stands side by side on a page stands below each other."""
        return self.width < sheet.PAGE

    @property
    def caption(self) -> float:
        """Inches above a panel for its caption; a narrow one may need two lines."""
        return CAPTION + CAPTION_LINE * self.is_narrow

    def figure(self, keys: Sequence[Any], rows: float, left: float) -> tuple[Figure, float]:
        """Make a sheet with a head, and `rows` inches below it. Return the sheet, and the top of the rows in inches."""
        begin = sheet.head_left(self.width, left)
        head = sheet.head(self.title, self.text, keys, self.width - begin - RIGHT)
        return head.figure(self.width, rows + BOTTOM, begin), rows + BOTTOM


def _caption(axes: Axes, text: str) -> None:
    size, room = style.TEXT_SIZE + 1, axes.figure.get_figwidth() * (1.0 - axes.get_position().x0)
    axes.set_title("\n".join(sheet.broken(text, room, size)), loc="left", fontsize=size, pad=4)


def draw_bands(logs: Mapping[str, EventLog], page: Page, arrows: bool = True) -> Figure:
    """Draw a band of streams per run. All bands share one axis of time, from each run's first event."""
    shown = {
        name: [e for e in log.select(rank=0) if e.op not in ("alloc", "free")] for name, log in logs.items()
    }
    shown = {name: _from_zero(events, arrows) for name, events in shown.items()}
    words = Words(page.title, page.text, "ms, virtual GPUs")
    drawn = timeline.draw_bands(words, [*shown.values()], [page.caption] * len(logs), page.width)
    for (name, log), axes in zip(logs.items(), drawn.axes, strict=True):
        end = log.summary()["step_us"]
        axes.axvline(end / 1e3, color=style.GREYS[3], linewidth=1.0, linestyle="--")
        _caption(axes, f"{name}: {style.format_ms(end)}")
    return drawn.figure


def _from_zero(events: Sequence[Event], arrows: bool) -> list[Event]:
    begin = min(e.start_us for e in events)
    return [replace(e, start_us=e.start_us - begin, after=e.after if arrows else ()) for e in events]


class Bar(NamedTuple):
    """A bar: its name, its length, the words behind it, its look. `gap`: rows of space above."""

    name: str
    value: float
    words: str
    look: style.Look
    gap: float = 0.0


def draw_bars(bars: Sequence[Bar], page: Page, axis: str) -> Figure:
    """Draw bars from top to bottom. Their names stand beside them, on a phone above them."""
    names, pitch, high = [bar.name for bar in bars], *((0.42, 0.45) if page.is_narrow else (0.3, 0.78))
    left = sheet.MARGIN + (0.0 if page.is_narrow else sheet.column_of(names, style.TEXT_SIZE, 3.0) + 0.1)
    places, at = [], 0.0
    for bar in bars:
        at += bar.gap
        places.append(at)
        at += 1.0
    figure, _ = page.figure((), pitch * at, left)
    width = page.width - left - RIGHT
    axes = sheet.axes_at(figure, left, BOTTOM, width, pitch * at)
    for place, bar in zip(places, bars, strict=True):
        axes.barh(
            place,
            bar.value,
            high,
            facecolor=bar.look.color,
            edgecolor=style.edge_of(bar.look),
            hatch=bar.look.hatch or None,
            linewidth=0.5,
        )
        axes.annotate(
            bar.words,
            (bar.value, place),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=style.TEXT_SIZE,
        )
    style.open_frame(axes)
    axes.set_yticks(places, [""] * len(bars) if page.is_narrow else names)
    for place, name in zip(places, names, strict=True) if page.is_narrow else ():
        sheet.say(axes, 0.0, place - 0.44, name)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(at - 0.4, -0.7 if page.is_narrow else -0.6)
    rooms = [width - sheet.inches(bar.words, style.TEXT_SIZE) for bar in bars]  # for bars, beside the words
    axes.set_xlim(0, max(bar.value * width / room for bar, room in zip(bars, rooms, strict=True)))
    axes.set_xlabel(axis, fontsize=style.TEXT_SIZE)
    return figure


MOST_CALLS = 9
# how far the rank got with the call → the word for it
_CELL = {"done": "done", "wait": "waits", "fail": "error", "–": "not called"}


def draw_calls(runs: Mapping[str, Sequence[Call]], page: Page) -> Figure:
    """Draw a column per collective and a row per rank, on a phone the other way round: which rank called it, and how far it got."""
    runs = {name: calls[-MOST_CALLS:] for name, calls in runs.items()}
    start = max(min(int(call.number) for call in calls if call.number) for calls in runs.values())
    runs = {
        name: [c for c in calls if not c.number or int(c.number) >= start] for name, calls in runs.items()
    }
    ops = dict.fromkeys(call.op for calls in runs.values() for call in calls)
    left, most = 0.75, max(map(len, runs.values()))
    heights = {name: 0.4 * (len(calls) + 0.42) if page.is_narrow else 0.86 for name, calls in runs.items()}
    keys = [sheet.key(style.look_of_op(op), op) for op in ops]
    figure, top = page.figure(keys, sum(heights.values()) + len(runs) * CAPTION - 0.45, left)
    top += 0.2
    for name, calls in runs.items():
        top -= heights[name] + CAPTION
        axes = sheet.axes_at(figure, left, top, page.width - left - RIGHT, heights[name])
        axes.axis("off")
        axes.set_xlim(0, 2 if page.is_narrow else most)
        axes.set_ylim(len(calls) if page.is_narrow else 2.0, -0.42)
        _caption(axes, name)
        for place, call in enumerate(calls):
            _name(axes, place, call.number and f"no. {call.number}", above=not page.is_narrow)
            for rank, state in enumerate(call.states):
                _draw_call(axes, (rank, place) if page.is_narrow else (place, rank), call, state)
        for rank in range(2):
            _name(axes, rank, f"rank {rank}", above=page.is_narrow)
    return figure


def _name(axes: Axes, place: int, text: str, above: bool) -> None:
    """Write the name of a column above it, or of a row beside it."""
    at, ha = ((place + 0.5, -0.12), "center") if above else ((-0.04, place + 0.45), "right")
    axes.text(
        *at, text, ha=ha, va="baseline" if above else "center", fontsize=style.TEXT_SIZE, color=style.GREYS[3]
    )


def _draw_call(axes: Axes, at: tuple[int, int], call: Call, state: str) -> None:
    look = style.look_of_op(call.op)
    called = state in ("done", "wait", "fail")
    face = look.color if state == "done" else style.mixed(look.color, style.WHITE, 0.75 if called else 1.0)
    axes.add_patch(
        Rectangle(
            (at[0] + 0.04, at[1] + 0.04),
            0.92,
            0.84,
            facecolor=face,
            edgecolor=style.GREYS[2] if not called else style.edge_of(look),
            linestyle="--" if not called else "-",
            linewidth=0.8 if state != "wait" else 2.2,
        )
    )
    owner = sheet.fitting(call.owner, style.SMALL_SIZE, 0.72) if called else ""
    axes.text(
        at[0] + 0.5,
        at[1] + 0.47,
        f"{owner}\n{_CELL.get(state, state)}".strip(),
        ha="center",
        va="center",
        fontsize=style.SMALL_SIZE,
        color=style.ink_on(face),
        path_effects=[style.Rim(0.0, face)],
        linespacing=1.25,
    )


def draw_curves(
    curves: Mapping[str, Sequence[float]],
    at: Sequence[float],
    page: Page,
    axes_names: tuple[str, str],
) -> Figure:
    """Draw lines with markers. The first line is the broken run, the second the fixed one."""
    figure, _ = page.figure((), 2.6, 0.95)
    axes = sheet.axes_at(figure, 0.95, BOTTOM, page.width - 0.95 - RIGHT, 2.6)
    for (name, values), look, marker in zip(curves.items(), (BROKEN, MENDED), "os", strict=True):
        axes.plot(
            at,
            values,
            color=look.color,
            marker=marker,
            linewidth=2.2,
            markersize=7,
            markeredgecolor=style.WHITE,
            label=name,
        )
    style.open_frame(axes)
    axes.grid(color=style.GREYS[1], linewidth=0.6)
    axes.set_xticks(list(at), [f"{x:g}" for x in at])
    axes.set_xlabel(axes_names[0], fontsize=style.TEXT_SIZE)
    axes.set_ylabel(axes_names[1], fontsize=style.TEXT_SIZE)
    axes.legend(frameon=False, fontsize=style.TEXT_SIZE)
    return figure


def draw_weights(weights: Mapping[str, Tensor], page: Page) -> Figure:
    """Draw matrices side by side, on a phone below each other, with rank 0's rows above rank 1's."""
    panel, left = 2.1, 0.75
    columns = 1 if page.is_narrow else len(weights)
    each, below = (page.width - left - RIGHT - 0.35 * (columns - 1)) / columns, panel + page.caption
    figure, top = page.figure((), len(weights) // columns * below - 0.25, left)
    for place, (name, weight) in enumerate(weights.items()):
        down, across = divmod(place, columns)
        axes = sheet.axes_at(figure, left + across * (each + 0.35), top - (down + 1) * below, each, panel)
        rows = len(weight)
        for row, numbers in enumerate(weight.tolist()):
            for column, value in enumerate(numbers):
                box(axes, (column, row), noise(value, 0.2), edgecolor=style.WHITE, linewidth=0.6)
        axes.set_xlim(0, weight.shape[1])
        axes.set_ylim(rows, 0)
        axes.axhline(rows / 2, color=style.BLACK, linewidth=2.0)
        axes.spines[:].set_visible(False)
        axes.set_xticks([])
        axes.set_yticks([rows / 4, 3 * rows / 4], ["", ""] if across else ["rank 0", "rank 1"])
        axes.tick_params(length=0, labelsize=style.TEXT_SIZE)
        _caption(axes, name)
    return figure


def draw_strips(
    runs: Mapping[str, Sequence[Event]],
    captions: Mapping[str, str],
    page: Page,
    lasts: Mapping[str, str],
) -> Figure:
    """Draw the events of rank 0 in the order of issue. `lasts`: the word at the end of a run that reached no forward."""
    drawn = {name: [named(each) for each in issued(events)] for name, events in runs.items()}
    longest = max(len(drawn[name]) + bool(lasts.get(name)) for name in drawn)
    ops = dict.fromkeys(each.event.op for found in drawn.values() for each in found)
    panel, left = 0.72, 0.95
    keys = [sheet.key(style.look_of_op(op), op) for op in ops]
    figure, top = page.figure(keys, len(runs) * (panel + page.caption) - 0.15, left)
    for name, found in drawn.items():
        top -= panel + page.caption
        axes = sheet.axes_at(figure, left, top, page.width - left - RIGHT, panel)
        draw_issued(axes, found, longest)
        _caption(axes, captions[name])
        if lasts.get(name):
            draw_box(axes, (len(found), 1), 1.0, style.Look(style.BLACK), lasts[name])
    below = "order of issue; a gather reaches to the wait for it →"
    axes.set_xlabel("\n".join(sheet.broken(below, page.width - left)), fontsize=style.TEXT_SIZE)
    return figure


def named(each: Issued) -> Issued:
    """Shorten "layer 1" to "1"."""
    return each._replace(event=replace(each.event, owner=each.event.owner.replace("layer ", "")))


# --- Pictures ----------------------------------------------------------------------------------------------


def _loss(width: float) -> Figure:
    return plot_losses(loss_curves()[0], width=width)


def _saves(width: float) -> Figure:
    return draw_calls(
        saves(),
        Page(
            "Who called what around a save",
            "Rank 0 gathers a weight for its file; rank 1 begins the next forward. A collective needs both.",
            width,
        ),
    )


def _routes(width: float) -> Figure:
    return draw_calls(
        routes(),
        Page(
            "Two experts, two ranks with different data",
            "Above, each rank begins with the expert that most of its tokens chose. So the ranks gather different groups.",
            width,
        ),
    )


def _norms(width: float) -> Figure:
    bars = []
    for step, norms in enumerate(gradient_norms()):
        for rank, value in enumerate(norms.local):
            bars.append(
                Bar(
                    f"step {step}, rank {rank}'s rows",
                    value,
                    f"{value:.3f}",
                    BROKEN,
                    0.6 * (rank == 0 and step > 0),
                )
            )
        bars.append(Bar(f"step {step}, all rows", norms.whole, f"{norms.whole:.3f}", MENDED))
    text = "Each rank's shards give only a part of the norm. The squares of the parts add up to the square of the whole."
    return draw_bars(bars, Page("Gradient norms of two ranks", text, width), "norm of the gradients")


def _means(width: float) -> Figure:
    bars = []
    for ranks, (broken, mended) in mean_norms().items():
        name = f"{ranks} rank{'s' * (ranks > 1)}"
        bars.append(Bar(f"{name}, sum / labels of all", broken, f"{broken:.4f}", BROKEN, 0.6 * (ranks > 1)))
        bars.append(Bar(f"{name}, mean of its own", mended, f"{mended:.4f}", MENDED))
    text = "The reduction takes the mean over ranks. A loss that is divided by the labels of all ranks is divided twice."
    return draw_bars(
        bars, Page("The same 48 examples on 1, 2 and 4 ranks", text, width), "norm of the gradients"
    )


def _pieces(width: float) -> Figure:
    bars = []
    for pieces, (broken, mended) in piece_norms().items():
        name = f"{pieces} piece{'s' * (pieces > 1)}"
        bars.append(Bar(f"{name}, losses as they are", broken, f"{broken:.4f}", BROKEN, 0.6 * (pieces > 1)))
        bars.append(Bar(f"{name}, each loss / {pieces}", mended, f"{mended:.4f}", MENDED))
    text = "Backwards add up. Each piece brings the mean of its own examples, so the sum grows with the number of pieces."
    return draw_bars(
        bars, Page("The same batch in 1, 2, 4 and 8 pieces", text, width), "norm of the gradients"
    )


def _accumulation(width: float) -> Figure:
    text = f"{MICRO_BATCHES} micro-batches of {BLOCKS} blocks on 16 GPUs. Above, whole gradients of all blocks wait for the last one. "
    text += "Buffers of collectives are left out."
    kinds = ("sharded_param", "sharded_grad", "unsharded_param", "unsharded_grad")
    logs = {name: run.log for name, run in accumulations().items()}
    return plot_memory(
        logs, kinds=kinds, title="Memory of a step that accumulates", text=text, in_order=True, width=width
    )


def _logging(width: float) -> Figure:
    return plot_memory(
        {name: run.log for name, run in logged().items()},
        kinds=("unsharded_param",),
        title="Whole parameters in a step that logs its weights first",
        text=f"{BLOCKS} blocks on 16 GPUs. Above, all of them are whole when the forward begins.",
        in_order=True,
        width=width,
    )


def _one_group(width: float) -> Figure:
    runs = groupings()
    whole = {name: style.format_bytes(peak(run.log, "unsharded_param")) for name, run in runs.items()}
    logs = {f"{name}, {whole[name]} of whole parameters": run.log for name, run in runs.items()}
    return draw_bands(
        logs,
        Page(
            f"{BLOCKS} blocks in one group, and in {BLOCKS}",
            "Green under blue is hidden. Nothing computes while the one group is gathered, or while it is reduced.",
            width,
        ),
    )


def _reshard(width: float) -> Figure:
    """Draw a bar per setting in three groups: memory, gathers, step. Bars are shares of the largest in their group."""
    runs = reshards()
    gathers = {name: [e for e in run.log.collectives() if e.op == "all_gather"] for name, run in runs.items()}
    rows = [
        (
            "whole parameters",
            [peak(run.log, "unsharded_param") for run in runs.values()],
            [""] * len(runs),
            style.format_bytes,
            style.look_of_kind("unsharded_param"),
        ),
        (
            "time of gathers",
            [sum(e.dur_us for e in gathers[name]) for name in runs],
            [f", {len(gathers[name])} gathers" for name in runs],
            style.format_ms,
            style.look_of_op("all_gather"),
        ),
        (
            "step",
            [run.step_seconds * 1e6 for run in runs.values()],
            [""] * len(runs),
            style.format_ms,
            style.Look(style.GREYS[2]),
        ),
    ]
    bars = []
    for title, values, more, words, look in rows:
        for place, (name, value) in enumerate(zip(runs, values, strict=True)):
            said = words(value) + more[place]
            bars.append(
                Bar(f"{title}, {name}", value / max(values), said, look, 0.6 * (place == 0 and bool(bars)))
            )
    text = f"{BLOCKS} blocks, 16 nodes of eight GPUs. Bars are shares of the largest of the three."
    return draw_bars(bars, Page("reshard_after_forward=True, 8, False", text, width), "share of the largest")


RESIDENT = (
    "sharded_param",
    "optimizer_state",
    "sharded_grad",
    "unsharded_param",
    "unsharded_grad",
    "all_gather_buffer",
    "reduce_scatter_buffer",
    "activation",
)


def _residents(width: float) -> Figure:
    runs = residents()
    left, rows, room = 0.95, 0.42 * len(runs), sheet.inches("12.34 GiB", style.TEXT_SIZE)
    keys = [sheet.key(style.look_of_kind(kind), kind) for kind in RESIDENT]
    text = "Left of the thick line are shards of parameters, optimizer states and gradients. With more GPUs, only these shrink."
    page = Page("Memory of one GPU at the peak of a step, by number of GPUs", text, width)
    figure, _ = page.figure(keys, rows, left)
    inner = width - left - RIGHT
    axes = sheet.axes_at(figure, left, BOTTOM, inner, rows)
    for row, run in enumerate(runs.values()):
        low = 0.0
        for kind in RESIDENT:
            look, high = style.look_of_kind(kind), run.peak_by_kind.get(kind, 0) / 2**30
            axes.barh(
                row,
                high,
                0.74,
                low,
                facecolor=look.color,
                edgecolor=style.edge_of(look),
                hatch=look.hatch or None,
                linewidth=0.5,
            )
            low += high
            if kind == "sharded_grad":
                axes.plot([low, low], [row - 0.48, row + 0.48], color=style.BLACK, linewidth=2.0)
        axes.annotate(
            f"{low:.2f} GiB",
            (low, row),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=style.TEXT_SIZE,
        )
    style.open_frame(axes)
    axes.set_yticks(range(len(runs)), [f"{gpus} GPUs" for gpus in runs])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(runs) - 0.5, -0.5)
    most = max(sum(run.peak_by_kind.values()) for run in runs.values()) / 2**30
    axes.set_xlim(0, most * inner / (inner - room))
    axes.set_xlabel("GiB", fontsize=style.TEXT_SIZE)
    return figure


def _scaling(width: float) -> Figure:
    return draw_bands(
        {name: run.log for name, run in scalings().items()},
        Page(
            f"{BATCH:,} tokens on more and more GPUs",
            "With more GPUs, each computes fewer tokens. But each still gathers and reduces the whole model.",
            width,
        ),
        arrows=False,
    )


def _methods(width: float) -> Figure:
    found = methods()
    captions = {
        name: f"{name}: {sum(e.op == 'all_gather' for e in said.events)} of 2 groups gathered"
        for name, said in found.items()
    }
    lasts = {name: "error" if said.error else "" for name, said in found.items()}
    return draw_strips(
        {name: said.events for name, said in found.items()},
        captions,
        Page(
            "model.generate(x) on rank 0, in the order of issue",
            "Only a call of a module runs its hooks. Above, only the body was called as a module.",
            width,
        ),
        lasts,
    )


def _ties(width: float) -> Figure:
    found = ties()
    return draw_curves(
        found.apart,
        range(1, 9),
        Page(
            "Largest difference of embedding and head",
            "Each copy has its own gradient and optimizer state. So the copies differ from the first step on.",
            width,
        ),
        ("step", "largest difference"),
    )


def _coarse(width: float) -> Figure:
    return draw_curves(
        coarse_errors(),
        COARSE_RANKS,
        Page(
            "Reduced gradients: relative distance from the mean over ranks",
            "The forward and backward are the same, in bf16. Only the dtype of the reduction differs.",
            width,
        ),
        ("ranks", "relative error"),
    )


def _meta(width: float) -> Figure:
    return draw_weights(
        started_weights(),
        Page(
            "A weight of 12 rows, started on two ranks and put together",
            "A square is a number. In the first weight, rank 1 has the same rows as rank 0.",
            width,
        ),
    )


def _pretrained(width: float) -> Figure:
    return draw_weights(
        loaded_weights(),
        Page(
            "A weight that rank 0 read from a file, sharded and put together",
            "The file holds two identity matrices. In the first weight, rank 1 still has the rows of its own new model.",
            width,
        ),
    )


def _fsdp2(width: float) -> Figure:
    found = overlaps()
    captions = {
        name: f"{name}: {computed_meanwhile(events)} of 4 layers computed while the next is gathered"
        for name, events in found.items()
    }
    return draw_strips(
        found,
        captions,
        Page(
            "A forward of four layers on the CPU, rank 0, in the order of issue",
            "Numbers are layers; FSDP2's gathers have no number. A layer can compute between a gather and the wait for it.",
            width,
        ),
        {},
    )


DRAW: dict[str, Callable[[float], Figure]] = {
    "loss": _loss,
    "saves": _saves,
    "routes": _routes,
    "norms": _norms,
    "means": _means,
    "pieces": _pieces,
    "accumulation": _accumulation,
    "residents": _residents,
    "one_group": _one_group,
    "logging": _logging,
    "reshard": _reshard,
    "scaling": _scaling,
    "methods": _methods,
    "ties": _ties,
    "coarse": _coarse,
    "meta": _meta,
    "pretrained": _pretrained,
    "fsdp2": _fsdp2,
}


# --- Numbers of the text -----------------------------------------------------------------------------------


def _said_of_losses() -> list[str]:
    curves, said = loss_curves()
    flat = curves["optimizer built before fully_shard"]
    return [", ".join(f"{loss:.6f}" for loss in flat[:3]), said.partition(" Build")[0]]


def _said_of_norms() -> list[str]:
    (first, second), whole = gradient_norms()[0]
    return [
        f"{first:.3f}",
        f"{second:.3f}",
        f"{whole:.3f}",
        f"√({first:.3f}² + {second:.3f}²) = {(first**2 + second**2) ** 0.5:.3f}",
    ]


def _said_of_ties() -> list[str]:
    found = ties()
    apart = found.apart["a copy in each of two groups"]
    return [
        found.error.partition(" Shard")[0],
        f"{apart[0]:.3f}",
        f"{apart[-1]:.3f}",
        *(f"{n:,}" for n in found.parameters),
    ]


def _said_of_started() -> list[str]:
    broken, mended = started_weights().values()
    if len(mended.unique(dim=0)) != len(mended):
        raise RuntimeError("init_shards gave two rows the same numbers")
    return [f"{len(broken)} rows has only {len(broken.unique(dim=0))} different rows"]


def _said_of_loaded() -> list[str]:
    broken, mended = loaded_weights().values()
    return [f"only {int((broken == mended).all(dim=1).sum())} of {len(broken)} rows come from the file"]


def _said_of_groupings() -> list[str]:
    runs = groupings().values()
    return [
        words
        for run in runs
        for words in (
            style.format_bytes(peak(run.log, "unsharded_param")),
            style.format_ms(run.step_seconds * 1e6),
        )
    ]


def _said_of_reshards() -> list[str]:
    found = []
    for run in reshards().values():
        gathers = [e.dur_us for e in run.log.collectives() if e.op == "all_gather"]
        found += [
            style.format_bytes(peak(run.log, "unsharded_param")),
            f"gathers {len(gathers)} times" if len(gathers) < 12 else "12 times a step",
        ]
        found += [style.format_ms(sum(gathers)), style.format_ms(run.step_seconds * 1e6)]
    return found


def _said_of_overlaps() -> list[str]:
    theirs, ours = (computed_meanwhile(events) for events in overlaps().values())
    return [f"{theirs} of 4 layers compute while the next layer is gathered; with hwfsdp, {ours} do"]


def _said_of_scalings() -> list[str]:
    steps = [run.log.summary()["step_us"] for run in scalings().values()]
    return [f"{BATCH:,} tokens", *map(style.format_ms, steps)]


# picture → texts in its section; "saves" is left out, because a save that hangs takes too long
STATED: dict[str, Callable[[], list[str]]] = {
    "loss": _said_of_losses,
    "routes": lambda: [failure(route, True).partition("\n")[0]],
    "norms": _said_of_norms,
    "means": lambda: [f"{broken:.4f}" for broken, _ in mean_norms().values()],
    "pieces": lambda: [f"{norm:.4f}" for norm in piece_norms()[PIECES[-1]]],
    "coarse": lambda: [f"{error:.1e}" for error in next(iter(coarse_errors().values()))],
    "methods": lambda: [methods()["generate as it is"].error],
    "ties": _said_of_ties,
    "meta": _said_of_started,
    "pretrained": _said_of_loaded,
    "residents": lambda: [
        f"{run.peak_allocated_gib:.2f} GiB" for run in residents((STATE_GPUS[0], STATE_GPUS[-1])).values()
    ],
    "one_group": _said_of_groupings,
    "accumulation": lambda: [
        style.format_bytes(peak(run.log, "unsharded_grad")).replace("512 MiB", "0.50 GiB")
        for run in accumulations().values()
    ],
    "logging": lambda: [style.format_bytes(peak(run.log, "unsharded_param")) for run in logged().values()],
    "reshard": _said_of_reshards,
    "scaling": _said_of_scalings,
    "fsdp2": _said_of_overlaps,
}


def main(names: Sequence[str]) -> None:
    for name in names or DRAW:
        path = PICTURES / f"faq_{name}.png"
        papers.save_each(DRAW[name], path)
        print(f"{path}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
