"""Programs of other projects train on hwfsdp as on torch's FSDP2: the same bits of losses, gradients and parameters at every step.

The oracle is the same program in other processes, without the switch. `make clients` installs the programs.
"""

from __future__ import annotations

import functools

import pytest
from compare import LAUNCHES, PROGRAMS, Launch, differences

CASES = [
    pytest.param(launch, case, id=f"{launch.module}-{case}") for launch in LAUNCHES for case in launch.cases
]


@functools.cache
def said(launch: Launch) -> dict[str, str]:
    """Run a launch with each library. Return library → output."""
    return {library: launch.run(library) for library in PROGRAMS}


@pytest.mark.long
@pytest.mark.parametrize(("launch", "case"), CASES)
def test_a_client_trains_as_with_torchs_fsdp2(launch: Launch, case: str) -> None:
    if launch.missing:
        pytest.skip(f"{', '.join(launch.missing)} not installed: run `make clients`")
    outputs = said(launch)
    theirs, ours = (launch.watched(library, case) for library in PROGRAMS)
    assert theirs, outputs["torch"]
    assert ours, outputs["hwfsdp"]
    assert all(each.steps and each.sharded_by.startswith("torch.") for each in theirs)
    assert all(each.steps and each.sharded_by.startswith("hwfsdp.") for each in ours)
    assert [*differences(theirs, ours)] == []
