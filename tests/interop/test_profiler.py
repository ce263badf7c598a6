"""torch's profiler around a step shows FSDP2's ranges, in every mode and wherever the collectives run.

Ranges are compared with FSDP2's over the same model in the same process: as many of every name. Two moments differ. In forward, FSDP2
gathers ahead only as lists say, and hwfsdp as it has learned. In FSDP2, a group without gradients waits for the reduction before it;
in hwfsdp, the next group with gradients does.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch._logging
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile, schedule

import hwfsdp
import models
from hwfsdp import launch
from hwfsdp.core import observer
from oracles import fresh, wrap
from suites import long


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
FULL = {"record_shapes": True, "with_stack": True, "profile_memory": True}
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


def compare() -> dict[str, tuple[Counter[str], Counter[str]]]:
    return {
        name: (ranges(trained(case, hwfsdp)), ranges(trained(case, fsdp))) for name, case in CASES.items()
    }


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


def compare_messages() -> dict[str, tuple[list[str], list[str]]]:
    return {
        name: (messages(trained(case, hwfsdp)), messages(trained(case, fsdp))) for name, case in CASES.items()
    }


def profile_in_all_ways(folder: str) -> list[int]:
    """Count the ranges of FSDP in each file of profiles of all kinds. The last kind is on the first rank only."""
    step, path = trained(CASES["blocks"], hwfsdp), Path(folder) / str(dist.get_rank())
    files: list[Path] = []

    def keep(profiled: Any) -> None:
        files.append(path.with_suffix(f".{len(files)}.json"))
        profiled.export_chrome_trace(str(files[-1]))

    for options in ({}, FULL):
        with profile(activities=CPU, on_trace_ready=keep, **options):
            step()
    with profile(
        activities=CPU, schedule=schedule(wait=1, warmup=1, active=1, repeat=2), on_trace_ready=keep
    ) as turns:
        for _ in range(6):
            step()
            turns.step()
    observer = torch.profiler.ExecutionTraceObserver().register_callback(str(path.with_suffix(".et.json")))
    with profile(activities=CPU, execution_trace_observer=observer):
        step()
    if dist.get_rank() == 0:
        with profile(activities=CPU, on_trace_ready=keep):
            step()
    else:
        step()
    traces = [json.loads(file.read_text()) for file in files]
    groups = [len(trace["distributedInfo"]["pg_config"]) for trace in traces]
    assert groups == [1] * len(traces), "a profile lists the groups of torch, and each once"
    return [sum(e.get("name", "").startswith("FSDP::") for e in trace["traceEvents"]) for trace in traces]


def test_a_profile_has_the_ranges_of_fsdp2() -> None:
    for found in launch(compare, 2):
        for case, (ours, theirs) in found.items():
            skipped = ["FSDP::forward_prefetch for "] + ["FSDP::post_backward_rs_wait"] * (case == "frozen")
            for names in (ours, theirs):
                for name in [name for name in names if name.startswith(tuple(skipped))]:
                    del names[name]
            assert ours == theirs, case
        assert found["blocks"][0]["FSDP::all_gather (blocks.1)"] == 4


def test_torch_logs_have_the_messages_of_fsdp2() -> None:
    for found in launch(compare_messages, 2):
        assert all(sorted(ours) == sorted(theirs) for ours, theirs in found.values()), found
        ours, theirs = found["blocks"]
        assert "FSDP::post_backward (blocks.1)" in ours
        assert {*ours[:2]} == {"FSDP::root_pre_forward", "FSDP::pre_forward"}


@pytest.mark.parametrize("shared_memory", ["1", long("0")])
def test_all_kinds_of_profiles_can_be_made(shared_memory, tmp_path, monkeypatch):
    monkeypatch.setenv("HWFSDP_SHARED_MEMORY", shared_memory)
    first, second = launch(profile_in_all_ways, 2, str(tmp_path))
    assert len(first) == len(second) + 1 == 5
    assert len({*first, *second}) == 1 and first[0] > 0, (first, second)


def gathered_by_hand(library: Any) -> Counter[str]:
    """Count the ranges of a gather that the user starts in a profile."""
    model = library.fully_shard(nn.Linear(4, 4))
    model(torch.ones(1, 4))
    model.reshard()
    return ranges(model.unshard)


def slots() -> list[bool]:
    """Tell before, in and after a profile if the observer's slot is empty; then compare gathers by hand with FSDP2's."""
    step = trained(CASES["blocks"], hwfsdp)
    found = [observer.slot is None]
    with profile(activities=CPU):
        step()
        found.append(observer.slot is None)
    step()
    found.append(observer.slot is None)
    ours, theirs = gathered_by_hand(hwfsdp), gathered_by_hand(fsdp)
    return [*found, bool(ours), ours == theirs]


def test_the_observer_is_in_its_slot_only_while_a_profiler_runs() -> None:
    assert launch(slots, 2) == [[True, False, True, True, True]] * 2


def test_no_range_is_made_without_a_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a range, and nobody to see it")

    monkeypatch.setattr(torch.autograd.profiler.record_function, "__enter__", refuse)
    with hwfsdp.compat.profiler_range("all_gather", "blocks.0"):
        pass
