"""The markers of exercises, whose tests are called here as functions."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "exercise(number, title, file): the exercise that a module judges")
    config.addinivalue_line("markers", "points(n, ask, bonus): what a test is worth")
