"""Lazy names of a package: public names and submodules, each loaded at first use.

`import hwfsdp` takes milliseconds, and `hwfsdp.checkpoint.parts` works after it, without an import of its own.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of the package with this name.

    Args:
        homes: public name → the submodule that defines it.
    """

    def find(name: str) -> Any:
        from importlib.util import find_spec

        if name in homes:
            value = getattr(importlib.import_module(f"{package}.{homes[name]}"), name)
            setattr(sys.modules[package], name, value)
            return value
        if name.startswith("_") or find_spec(f"{package}.{name}") is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return importlib.import_module(f"{package}.{name}")

    def names() -> list[str]:
        import pkgutil

        module = sys.modules[package]
        submodules = {found.name for found in pkgutil.iter_modules(module.__path__)}
        return sorted({*vars(module), *homes, *submodules} - {"__main__"})

    return find, names
