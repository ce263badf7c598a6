"""01 First: the file runs."""

import os

import pytest
from conftest import Finding

pytestmark = pytest.mark.exercise("01", title="First", file="my_fsdp.py")


@pytest.mark.points(3)
def test_starts(path):
    """It begins with a docstring."""
    if not path.read_text().startswith('"""'):
        raise Finding("wrong-value", f"{path.name} does not begin with a docstring")


@pytest.mark.points(2)
def test_runs(run, path):
    """It runs to its end."""
    if "KILL THE JUDGE" in path.read_text():
        os.kill(os.getpid(), 9)
    if status := run():
        raise Finding(
            "crashed",
            f"Rank 1 raised ValueError in g ({path.name}, line 4: `f(7531)`): status {status}, 7531",
        )
