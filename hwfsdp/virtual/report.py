"""A simulation, and a sweep of them, as text."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from hwfsdp.observe.tables import format_bytes, lay_out
from hwfsdp.virtual.devices import GIB, Device
from hwfsdp.virtual.run import LIMITS, Simulation


def report(found: Simulation) -> str:
    """Return the result of a simulation as text, with the limits of the model."""
    plan, summary = found.plan, found.log.summary()
    where = f"{found.gpus} × {found.device.name}" + (f" on {found.nodes} nodes" if found.nodes > 1 else "")
    rate, mfu = found.tokens_per_second_per_gpu, found.mfu
    reserved, usable, alive = map(
        _of_gib, (found.peak_memory_gib, found.memory_gib, found.peak_allocated_gib)
    )
    memory = f"{reserved} of {usable} reserved, {alive} alive"
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
