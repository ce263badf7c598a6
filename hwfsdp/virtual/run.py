"""`simulate`: a training step on virtual GPUs.

    result = simulate("llama3-8b", gpus=512, device="h100", batch=2, seq=8192, checkpoint="selective")
    print(result.tokens_per_second_per_gpu, result.peak_memory_gib, result.fits)
    result.log.save("trace.json")

The simulation runs the package itself: `fully_shard`, its hooks and its prefetching, on rank 0 of a virtual world (`world`).
The first step is a warm-up: hwfsdp learns the order of the groups, and the optimizer makes its state. The second step is
measured.

Note [What the model leaves out]
    Ranks are equal and start together: no stragglers, no congestion, no failures. A roofline gives the cost of kernels, with
    one efficiency for all matrix products of a device, whatever their shapes. Streams do not slow each other down; on a real
    device, collectives take some of its compute units and memory bandwidth. `Device.launch_us` gives the speed of the host.
    Data loading, checkpoints and compilation in the first steps are left out.
"""

from __future__ import annotations

import gc
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from math import prod
from typing import Any

from torch import Tensor

from hwfsdp.compat import local_of
from hwfsdp.errors import UsageError
from hwfsdp.observe.eventlog import EventLog
from hwfsdp.observe.ledger import Ledger
from hwfsdp.observe.recording import record
from hwfsdp.observe.run_info import VIRTUAL, read_about
from hwfsdp.observe.tables import format_bytes, lay_out
from hwfsdp.train.models.gpt import GPTConfig
from hwfsdp.train.models.llama import LlamaConfig
from hwfsdp.train.models.zoo import config_of
from hwfsdp.virtual.allocator import Allocator
from hwfsdp.virtual.devices import GIB, Device, device_named, placed
from hwfsdp.virtual.programs import Plan, Target, program
from hwfsdp.virtual.world import World

LIMITS = (
    "equal ranks without stragglers or congestion; roofline costs with one efficiency per device; "
    "streams do not slow each other down"
)
# Model FLOPs of attention per FLOP of its backward: the model has 2 + 4 matrix products; the backward runs 4, and one again.
_ATTENTION = 6 / 5
_USABLE = 0.99  # share of a device's memory that is usable; the driver needs the rest


@dataclass(frozen=True)
class Simulation:
    """Time and memory of a training step on one GPU.

    Attributes:
        tokens_per_second_per_gpu: the speed; None if the number of tokens in the user's own step is not known.
        step_seconds: seconds from the start of the step until the host and all streams have finished.
        mfu: model FLOPs utilization: 6 FLOPs per parameter and token, and 12 per layer, width, position and token for
            attention, divided by the peak (the definition of PaLM, arXiv:2204.02311, appendix B). None if the number of tokens is
            not known.
        exposed_comm_fraction: share of the step in which a collective runs and nothing is computed.
        peak_memory_gib: the memory that the caching allocator reserves, in GiB. It is limited to the device's memory, but never
            below `peak_allocated_gib`. Training frameworks report this number.
        peak_allocated_gib: the most memory that is alive at once, in GiB.
        peak_by_kind: bytes alive at that moment, by kind of memory (`ledger.KINDS`, and "activation").
        fits: True if `peak_allocated_gib` is within the part of the device's memory that programs can use.
        log: events of rank 0 in the measured step, in virtual time.
    """

    target: str
    gpus: int
    device: Device
    plan: Plan
    tokens_per_second_per_gpu: float | None
    step_seconds: float
    mfu: float | None
    exposed_comm_fraction: float
    peak_memory_gib: float
    peak_allocated_gib: float
    peak_by_kind: dict[str, int]
    fits: bool
    log: EventLog = field(repr=False)

    @property
    def nodes(self) -> int:
        return self.gpus // self.device.per_node

    @property
    def memory_gib(self) -> float:
        """Return the usable memory of the device, in GiB."""
        return _USABLE * self.device.memory / GIB

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-ready values, with the log's summary in place of the log."""
        found = {name: value for name, value in vars(self).items() if name not in ("log", "device", "plan")}
        plan = asdict(self.plan) | {"param_dtype": str(self.plan.param_dtype).removeprefix("torch.")}
        shown = ("name", "per_node", "efficiency", "fitted_on", "source")
        device = {name: getattr(self.device, name) for name in shown}
        more = {"memory_gib": self.memory_gib, "summary": self.log.summary(), "limits": LIMITS}
        return {**found, "plan": plan, "device": device, **more, "nodes": self.nodes}


def simulate(
    step_or_model: Target,
    gpus: int = 8,
    device: str | Device = "h100",
    *,
    nodes: int | None = None,
    hsdp: bool = False,
    **settings: Any,
) -> Simulation:
    """Train for a step on `gpus` virtual devices.

    Args:
        step_or_model: the name of a model (`models.zoo`), its sizes, an unsharded `nn.Module` on any device, or a function
            without arguments. The function is called once in the virtual world. If it returns a model, this model is trained as a
            language model on tokens. Or it builds a model, shards it with `fully_shard`, and returns a step: a function without
            arguments that trains this model for one step.
        gpus: the number of all ranks. nodes: the number of nodes. All nodes get the same number of ranks. By default, there are as
            few nodes as possible.
        device: a name of `devices.DEVICES`, or your own `Device`.
        hsdp: True: shard within each node, and replicate across nodes.
        settings: fields of the `Plan`: batch, seq, checkpoint, reshard_after_forward, wrap, shards, param_dtype (by default
            bfloat16). If you pass your own step, `batch * seq` is its number of
            tokens (not known without `seq`), and `param_dtype` selects the peak for `mfu`. It ignores the other settings.

    Raises:
        UsageError: a name or a setting is unknown, the number of nodes or of shards does not divide the number of GPUs, both `hsdp`
            and `shards` are given, or the step computes nothing or needs the values of a tensor.
        StateError: this process has a process group already.
    """
    if not isinstance(gpus, int) or not isinstance(nodes, int | None) or (hsdp and "shards" in settings):
        raise UsageError(
            "simulate",
            expected="whole numbers of GPUs and nodes, and of hsdp and shards one",
            got=f"gpus={gpus!r}, nodes={nodes!r}, hsdp={hsdp!r}, shards={settings.get('shards')!r}",
            remedy="hsdp=True shards within each node; shards=N over N GPUs.",
        )
    figures = placed(device_named(device) if isinstance(device, str) else device, gpus, nodes)
    if hsdp:
        settings["shards"] = min(gpus, figures.per_node)
    plan = _planned(step_or_model, gpus, settings)
    world = World(gpus, figures)
    with world.entered():
        run = program(step_or_model, plan, gpus)
        log = _record_second(run.step, world)
        tokens = plan.batch * plan.seq if run.tokens is None and "seq" in settings else run.tokens
        return _result(_name_of(step_or_model), plan, world, log, tokens)


def _record_second(step: Callable[[], Any], world: World) -> EventLog:
    """Run a step as a warm-up, then once more from time 0, and return the log of the second one."""
    world.allocator.pack()  # the function may have built a whole model before it sharded it
    step()
    gc.collect()
    world.allocator.reset_peak()
    world.restart()
    with record(ledger=_NamingLedger(world.allocator)) as log:
        step()
        world.clock.synchronize()
    log.about["device"] = VIRTUAL + world.device.name
    if not world.clock.host:
        raise UsageError(
            "simulate",
            expected="a step that computes",
            got="one that called no operator",
            remedy="The step must run forward, backward and optimizer each time it is called.",
        )
    return log


class _NamingLedger(Ledger):
    """A ledger that also tells the allocator the kind of each storage."""

    def __init__(self, allocator: Allocator) -> None:
        super().__init__()
        self._allocator = allocator

    def watch(self, tensor: Tensor, kind: str) -> None:
        super().watch(tensor, kind)
        local = local_of(tensor)
        self._allocator.name(local.untyped_storage(), kind)


def _planned(target: Target, gpus: int, settings: dict[str, Any]) -> Plan:
    known = {f.name for f in fields(Plan)}
    if unknown := sorted(set(settings) - known):
        raise UsageError(
            "simulate",
            expected=f"settings among {', '.join(sorted(known))}, nodes, hsdp",
            got=", ".join(unknown),
            remedy="Change their names.",
        )
    config = config_of(target) if isinstance(target, str) else target
    if "seq" not in settings and isinstance(config, GPTConfig | LlamaConfig):
        settings = {**settings, "seq": config.seq_len}
    if isinstance(settings.get("wrap"), str):
        settings = {**settings, "wrap": (settings["wrap"],)}
    plan = Plan(**settings)
    if plan.shards is not None and (plan.shards < 1 or gpus % plan.shards):
        raise UsageError(
            "simulate",
            expected=f"a number of shards that divides the {gpus} GPUs",
            got=str(plan.shards),
            remedy=f"Choose among {', '.join(str(n) for n in range(1, gpus + 1) if gpus % n == 0)}.",
        )
    return plan


def _name_of(target: Target) -> str:
    if isinstance(target, str):
        return target
    return getattr(target, "__qualname__", None) or type(target).__name__


def _result(name: str, plan: Plan, world: World, log: EventLog, tokens: int | None) -> Simulation:
    device, allocator, seconds = world.device, world.allocator, world.clock.host / 1e6
    rate = mfu = None
    if tokens:
        rate = tokens / seconds
        about = read_about(log.about)
        params = sum(prod(p.shape) for group in (about.groups if about else ()) for p in group.params)
        flops = 6.0 * params * tokens + _ATTENTION * world.attention_flops
        mfu = flops / seconds / device.peak(str(plan.param_dtype).removeprefix("torch."))
    steps = max(1, len(log.finished_steps))  # the summary gives their mean
    usable = _USABLE * device.memory
    return Simulation(
        target=name,
        gpus=world.gpus,
        device=device,
        plan=plan,
        tokens_per_second_per_gpu=rate,
        step_seconds=seconds,
        mfu=mfu,
        exposed_comm_fraction=steps * log.summary()["exposed_comm_us"] / 1e6 / seconds,
        peak_memory_gib=max(allocator.peak, min(allocator.reserved, usable)) / GIB,
        peak_allocated_gib=allocator.peak / GIB,
        peak_by_kind=allocator.peak_by_kind(),
        fits=allocator.peak <= usable,
        log=log,
    )


# --- As text -----------------------------------------------------------------------------------------------


def report(found: Simulation) -> str:
    """Return the result of a simulation as text, with the limits of the model."""
    plan, summary = found.plan, found.log.summary()
    where = f"{found.gpus} × {found.device.name}" + (f" on {found.nodes} nodes" if found.nodes > 1 else "")
    rate, mfu = found.tokens_per_second_per_gpu, found.mfu
    reserved, usable, alive = map(
        _of_gib, (found.peak_memory_gib, found.memory_gib, found.peak_allocated_gib)
    )
    memory = f"{reserved} reserved of {usable}, {alive} alive"
    speed = f"{rate:,.0f}" if rate else "unknown: the step does not say how many tokens it has"
    rows = [
        ("step", f"{found.step_seconds:.4g} s"),
        ("tokens per second and GPU", speed),
        ("model FLOPs utilization", f"{mfu:.1%} of the peak" if mfu else "unknown"),
        ("communication not hidden", f"{found.exposed_comm_fraction:.1%} of the step"),
        ("memory", memory if found.fits else f"{memory}: does NOT fit"),
    ]
    largest_first = sorted(found.peak_by_kind.items(), key=lambda item: -item[1])
    rows += [(f"  {kind}", format_bytes(nbytes)) for kind, nbytes in largest_first]
    for op, count in summary["count_by_op"].items():
        rows.append((op, f"{count} in a step, {format_bytes(summary['bytes_by_op'][op])}"))
    head = f"{found.target} on {where}; per GPU {plan.batch} × {plan.seq} tokens, checkpointing: {plan.checkpoint}"
    return "\n".join([head, "", *lay_out(rows, left=2, indent=""), "", *_footer(found.device)])


def _of_gib(gib: float) -> str:
    return format_bytes(round(gib * GIB))


def _footer(device: Device) -> list[str]:
    is_fitted = not device.host and not device.fitted_on.startswith("borrowed")
    source = f"fitted on {device.fitted_on}" if is_fitted else device.fitted_on
    products = f"Matrix products: efficiency {device.efficiency:g}, {source}."
    texts = f"Predicted, not measured: {LIMITS}.", products
    return [textwrap.fill(text, 80, break_on_hyphens=False) for text in texts]


def sweep_report(found: Sequence[Simulation]) -> str:
    """Return a sweep as text, with one line for each number of GPUs."""
    head = ("GPUs", "nodes", "tokens/s/GPU", "step, s", "MFU", "exposed", "memory", "fits")
    lines = lay_out([head, *map(_row, found)], left=0, indent="")
    first = found[0]
    title = f"{first.target} on {first.device.name}; per GPU {first.plan.batch} × {first.plan.seq} tokens, "
    title += f"checkpointing: {first.plan.checkpoint}"
    return "\n".join([title, "", *lines, "", *_footer(first.device)])


def _row(s: Simulation) -> tuple[str, ...]:
    rate = f"{s.tokens_per_second_per_gpu:,.0f}" if s.tokens_per_second_per_gpu else "-"
    mfu = f"{s.mfu:.1%}" if s.mfu else "-"
    exposed, memory = f"{s.exposed_comm_fraction:.1%}", _of_gib(s.peak_memory_gib)
    gpus, nodes, seconds = f"{s.gpus:,}", str(s.nodes), f"{s.step_seconds:.3f}"
    return (gpus, nodes, rate, seconds, mfu, exposed, memory, "yes" if s.fits else "NO")
