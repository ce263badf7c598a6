"""Settings that fit into memory if the wanted settings do not. Arithmetic proposes them, and a simulation checks them.

At the peak, shards shrink with the number of GPUs that shard, activations shrink with the batch, and the rest is constant. So
one more simulation, with everything recomputed and one sequence at a time, shows if these GPUs are enough. If they are enough,
its result gives the largest batch. If not, its result gives the number of GPUs. Under hybrid sharding, more GPUs do not help, but
sharding over all GPUs does. If the user passes a step, only the number of GPUs can change. Every proposal is simulated before it
is returned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from hwfsdp.observe.tables import format_bytes
from hwfsdp.virtual.allocator import ACTIVATION
from hwfsdp.virtual.devices import GIB
from hwfsdp.virtual.run import Simulation

_SHARDS = ("sharded_param", "sharded_grad", "optimizer_state")
_MOST = 1 << 13  # GPUs; larger numbers are not tried


@dataclass(frozen=True)
class Choice:
    """The settings that may change so that a step fits. For a user's own step, `batch` and `checkpoint` are None."""

    gpus: int
    batch: int | None
    checkpoint: str | None
    hsdp: bool = False

    @property
    def flags(self) -> str:
        """Return the settings as options of `hwfsdp simulate`."""
        given = [f"--gpus {self.gpus}"]
        given += [f"--batch {self.batch}"] if self.batch is not None else []
        given += [f"--checkpoint {self.checkpoint}"] if self.checkpoint is not None else []
        return " ".join([*given, *(["--hsdp"] if self.hsdp else [])])


Try = Callable[[Choice], Simulation]


def describe_misfit(simulation: Simulation, chosen: Choice, simulate_with: Try) -> str:
    """Say in one sentence how much memory is missing, and name settings that would fit."""
    peak, usable = simulation.peak_allocated_gib, simulation.memory_gib
    needs, has, over = (format_bytes(round(gib * GIB)) for gib in (peak, usable, peak - usable))
    text = (
        f"{simulation.target} on {simulation.gpus} × {simulation.device.name} needs {needs} "
        f"of each GPU's {has}, {over} too many; "
    )
    found = find_fitting(simulation, chosen, simulate_with)
    if found is None:
        why = "what does not shrink is too large (shorter sequences would help)"
        return f"{text}nor would {_MOST} GPUs do: {why}"
    choice, fitting = found
    return text + f"{choice.flags} would fit, with {format_bytes(round(fitting.peak_allocated_gib * GIB))}"


def find_fitting(
    simulation: Simulation, chosen: Choice, simulate_with: Try
) -> tuple[Choice, Simulation] | None:
    """Find a choice that fits and is near the wanted choice, and simulate it. Return None if there is none."""
    least, found = chosen, simulation
    if chosen.batch is not None and (chosen.batch > 1 or chosen.checkpoint != "full"):
        least = replace(chosen, batch=1, checkpoint="full")
        found = simulate_with(least)
        if found.fits:
            for batch in _batches(found, chosen.batch):
                larger = replace(least, batch=batch)
                if (tried := simulate_with(larger)).fits:
                    return larger, tried
            return least, found
    if chosen.hsdp:
        least = replace(least, hsdp=False)
        found = simulate_with(least)
        if found.fits:
            return least, found
    return _with_more_gpus(found, least, simulate_with)


def _with_more_gpus(found: Simulation, least: Choice, simulate_with: Try) -> tuple[Choice, Simulation] | None:
    shards = sum(nbytes for kind, nbytes in found.peak_by_kind.items() if kind in _SHARDS) / GIB
    room, gpus = found.memory_gib - (found.peak_allocated_gib - shards), least.gpus
    while room > 0 and gpus * 2 <= _MOST:
        gpus *= 2
        if shards * least.gpus / gpus <= room:
            larger = replace(least, gpus=gpus)
            if (tried := simulate_with(larger)).fits:
                return larger, tried
    return None


def _batches(least: Simulation, batch: int) -> list[int]:
    """Return the batches above 1 to try: the largest that should fit, and smaller ones."""
    activations = least.peak_by_kind.get(ACTIVATION, 0) / GIB
    room = least.memory_gib - (least.peak_allocated_gib - activations)
    size = min(batch, int(room / activations)) if activations else batch
    sizes = []
    while size > 1:
        sizes.append(size)
        size //= 2
    return sizes
