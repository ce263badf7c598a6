"""torch's profiler around a step shows FSDP2's ranges, in every mode and wherever the collectives run.

Ranges are compared with FSDP2's over the same model in the same process: as many of every name. Two moments differ. In forward, FSDP2
gathers ahead only as lists say, and hwfsdp as it has learned. In FSDP2, a group without gradients waits for the reduction before it;
in hwfsdp, the next group with gradients does.
"""

from __future__ import annotations

import contextlib
import json
import logging
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._logging
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile, schedule

import hwfsdp
import models
from hwfsdp.core import observer
from oracles import fresh, wrap
from together import Together


class Case(NamedTuple):
    """A model, and the way to shard it. Two micro-batches run; the first may leave its gradients unreduced."""

    build: Callable[[], models.Model]
    how: str = "blocks"
    mixed: bool = False
    reduce_first: bool = True
    one_rank: bool = False


CASES = {
    "blocks": Case(models.stem),
    "mixed precision": Case(models.even, mixed=True),
    "accumulation": Case(models.stem, reduce_first=False),
    "checkpoints": Case(lambda: models.checkpointed(reentrant=False)),
    "frozen": Case(models.frozen),
    "one rank": Case(models.stem, one_rank=True),
}
two = Together(2)
CPU = [ProfilerActivity.CPU]


def trained(case: Case, library: Any) -> Callable[[], None]:
    """Return a function that runs the steps of a case. It has run once already."""
    options: dict[str, Any] = {}
    if case.mixed:
        policy = library.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
        options["mp_policy"] = policy
    if case.one_rank:
        mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("outer", "inner"))
        options["mesh"] = mesh["inner"]
    model: Any = wrap(fresh(case.build), library.fully_shard, case.how, **options)

    def step() -> None:
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1 or case.reduce_first)
            model(*model.inputs(4, micro)).sum().backward()
        model.zero_grad()

    step()
    return step


def ranges(step: Callable[[], None]) -> Counter[str]:
    """Count each range of FSDP in a profile. At the root, one of FSDP2's names ends in " ()", which is cut off."""
    with profile(activities=CPU) as profiled:
        step()
    names = [event.name for event in profiled.events() or [] if event.name.startswith("FSDP::")]
    return Counter(name.removesuffix(" ()") for name in names)


def messages(step: Callable[[], None]) -> list[str]:
    """Return the debug messages of FSDP, as TORCH_LOGS=+fsdp shows them."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torch.distributed.fsdp")
    torch._logging.set_logs(fsdp=logging.DEBUG)
    logger.addHandler(handler)
    step()
    logger.removeHandler(handler)
    torch._logging.set_logs()
    return found


@two.finds([])
def profiles_and_torch_logs_have_the_ranges_of_fsdp2() -> list[str]:
    wrong = []
    for name, case in CASES.items():
        ours, theirs = (ranges(trained(case, library)) for library in (hwfsdp, fsdp))
        said = [sorted(messages(trained(case, library))) for library in (hwfsdp, fsdp)]
        skipped = ["FSDP::forward_prefetch for "] + ["FSDP::post_backward_rs_wait"] * (name == "frozen")
        others = [each for each in (ours - theirs) + (theirs - ours) if not each.startswith(tuple(skipped))]
        wrong += [f"{name}: {others}"] * bool(others) + [f"{name}: {said}"] * (said[0] != said[1])
        wrong += [f"{name}: {ours}"] * (not ours or not said[0])
    return wrong


@two.finds([True, True, True])
def all_kinds_of_profiles_can_be_made_and_list_each_process_group_once() -> list[Any]:
    step, traces = trained(CASES["blocks"], hwfsdp), []

    def keep(profiled: Any) -> None:
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            profiled.export_chrome_trace(file.name)
            traces.append(json.loads(Path(file.name).read_text()))

    options: list[dict[str, Any]] = [
        {"record_shapes": True, "with_stack": True, "profile_memory": True},
        {"schedule": schedule(wait=1, warmup=1, active=1)},
    ]
    for each in options:
        with profile(activities=CPU, on_trace_ready=keep, **each) as turns:
            for _ in range(3):
                step()
                turns.step()
    with profile(on_trace_ready=keep) if dist.get_rank() == 0 else contextlib.nullcontext():
        step()
    groups = [[group["pg_name"] for group in trace["distributedInfo"]["pg_config"]] for trace in traces]
    counts = [sum(e.get("name", "").startswith("FSDP::") for e in trace["traceEvents"]) for trace in traces]
    once = all(len({*names}) == len(names) > 0 for names in groups)
    return [all(counts), once, len(traces) == 2 + (dist.get_rank() == 0)]


def gathered_by_hand(library: Any) -> Counter[str]:
    """Count the ranges of a gather that the user starts in a profile."""
    model = library.fully_shard(nn.Linear(4, 4))
    model(torch.ones(1, 4))
    model.reshard()
    return ranges(model.unshard)


@two.finds([True, False, True, True, True])
def the_observer_is_in_its_slot_only_while_a_profiler_runs() -> list[bool]:
    """Look before, in and after a profile; then compare gathers by hand with FSDP2's."""
    step = trained(CASES["blocks"], hwfsdp)
    found = [observer.slot is None]
    with profile(activities=CPU):
        step()
        found.append(observer.slot is None)
    step()
    found.append(observer.slot is None)
    ours, theirs = gathered_by_hand(hwfsdp), gathered_by_hand(fsdp)
    return [*found, bool(ours), ours == theirs]


test_on_two_ranks = two.test()
