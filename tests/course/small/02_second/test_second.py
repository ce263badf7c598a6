"""02 Second: a file of its own."""

import pytest
from conftest import Finding

pytestmark = pytest.mark.exercise("02", title="Second", file="02_second/second.py")


@pytest.mark.points(4)
def test_counts(path):
    """It has a line."""
    if len(path.read_text().splitlines()) // int("BREAK" not in path.read_text()) < 1:
        raise Finding("wrong-value", "no line")
