"""Tests that are left out with torch 2.11 and 2.12, by name. `conftest` skips them, and gives the reason.

Each compares with a part of FSDP2 that came with torch 2.13, or in which FSDP2 fails before 2.13. hwfsdp has these parts with every
torch, and tests with other oracles run with every torch, too.
"""

from __future__ import annotations

import re

import torch

from hwfsdp.torch_releases import release_of

IS_OLDER = release_of(torch.__version__) < (2, 13)

LEFT_OUT = {  # reason → tests, as regular expressions over their names
    "FSDP2 has no DataParallelMeshDims before torch 2.13": (
        "test_hybrid_sharding.*(axes given by name|test_named_axes)",
    ),
    "FSDP2 has no ShardPlacementResult before torch 2.13": (
        "test_param_meshes.*(train as FSDP2's do|order of collectives|in FSDP2's order|DCP, from FSDP2)",
        "test_param_meshes.*(no axis to shard over|of one mesh only)",
    ),
    "FSDP2 gathers a head that the trainer calls in another way before torch 2.13": (
        "test_groups.*(a head called by the trainer|chunk by chunk)",
    ),
    "FSDP2 cannot cast a model that also has integers before torch 2.13": (
        "test_mixed_precision.*integers stay integers",
        r"test_casts_have_the_same_results_as_fsdp2s\[torch\.(u?int|bool|complex)",
    ),
    "FSDP2 does not have these switches before torch 2.13": (
        "test_backward.*(buffers|separate group|unused: ranks choose)",
    ),
    "DTensor cannot compute this model before torch 2.13": (
        "test_recovery.*runs_no_collective_under_tensor_parallelism",
    ),
    "torch's pipelines wait for ever in these programs before torch 2.13, with FSDP2 too": (
        "test_pipelines",
    ),
    "FSDP2 frees what it still needs in this case before torch 2.13": (
        "test_parity.*(structured|output fp16)",
    ),
}
if release_of(torch.__version__) < (2, 12):
    LEFT_OUT["DTensor cannot flatten dimensions if one behind the first is sharded before torch 2.12"] = (
        "checkpoint/test_distribute.*stripes",
    )


def why_left_out(test: str) -> str:
    """Return the reason why the test with this name is left out; "" if it runs."""
    if not IS_OLDER:
        return ""
    found = (why for why, names in LEFT_OUT.items() if any(re.search(name, test) for name in names))
    return next(found, "")
