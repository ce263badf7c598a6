"""What would fit, when something does not: found by arithmetic, and then tried.

Of what is alive at the peak, shards shrink with the number of GPUs, activations with the batch, and the rest stays. So
one more simulation, with everything recomputed and one sequence at a time, says whether these GPUs are enough at all. If
they are, it says for how large a batch; if not, how many it takes. The answer is simulated before it is given.
"""

from __future__ import annotations

from collections.abc import Callable

from hwfsdp.virtual.allocator import ACTIVATION
from hwfsdp.virtual.devices import GIB
from hwfsdp.virtual.run import Simulation

_SHARDS = ("sharded_param", "sharded_grad", "optimizer_state")
Try = Callable[[int, int, str], Simulation]  # gpus, batch, checkpoint


def describe_misfit(simulation: Simulation, simulate_with: Try, most_gpus: int = 1 << 16) -> str:
    """One sentence: by how much it does not fit, and what would.

    Args:
        simulate_with: simulates the same with another number of GPUs, batch and checkpointing.
    """
    over = simulation.peak_allocated_gib - simulation.memory_gib
    text = (
        f"{simulation.target} on {simulation.gpus} × {simulation.device.name} needs {simulation.peak_allocated_gib:.1f} GiB "
        f"of each GPU's {simulation.memory_gib:.1f}, {over:.1f} too many; "
    )
    found = what_fits(simulation, simulate_with, most_gpus)
    if found is None:
        return text + "no number of GPUs is enough: one sequence and one block are too large; shorten --seq"
    plan = found.plan
    return text + (
        f"{found.peak_allocated_gib:.1f} GiB, and so would fit: --gpus {found.gpus} --batch {plan.batch} "
        f"--checkpoint {plan.checkpoint}"
    )


def what_fits(simulation: Simulation, simulate_with: Try, most_gpus: int) -> Simulation | None:
    """A simulation that fits, as near to the given one as this finds; None if there is none."""
    gpus, batch = simulation.gpus, simulation.plan.batch
    least = simulate_with(gpus, 1, "full")
    if least.fits:
        for size in _batches(least, batch):
            found = simulate_with(gpus, size, "full") if size > 1 else least
            if found.fits:
                return found
    shards = sum(nbytes for kind, nbytes in least.peak_by_kind.items() if kind in _SHARDS) / GIB
    room = least.memory_gib - (least.peak_allocated_gib - shards)
    while room > 0 and gpus < most_gpus:
        gpus *= 2
        if shards * simulation.gpus / gpus <= room:
            found = simulate_with(gpus, 1, "full")
            if found.fits:
                return found
    return None


def _batches(least: Simulation, batch: int) -> list[int]:
    """Batches to try: the largest that should fit, and smaller ones."""
    activations = least.peak_by_kind.get(ACTIVATION, 0) / GIB
    room = least.memory_gib - (least.peak_allocated_gib - activations)
    size = min(batch, int(room / activations)) if activations else batch
    sizes = []
    while size > 1:
        sizes.append(size)
        size //= 2
    return [*sizes, 1]
