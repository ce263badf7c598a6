"""The releases of torch that this package supports, and a warning about any other one.

Left out: what differs between these releases. `compat` and `core.private_torch` know what each of them calls by another name.
"""

from __future__ import annotations

import re
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

OLDEST, NEWEST = (2, 11), (2, 15)
SUPPORTED = "2.11 to 2.15"
REMEDY = 'pip install "torch>=2.11,<2.16"'

Release = tuple[int, int]


def warn_of_other_torch() -> None:
    """Warn if the installed torch is not supported. This does not import torch, which takes a second."""
    found = installed_torch()
    if found and not OLDEST <= release_of(found) <= NEWEST:
        warnings.warn(
            f"hwfsdp supports torch {SUPPORTED}, and torch {found} is installed: names of torch that hwfsdp needs may be missing or "
            f"have changed. Install a supported one: {REMEDY}",
            stacklevel=3,
        )


def installed_torch() -> str:
    """Return the version of the installed torch; "" if there is none, or if its version cannot be found."""
    if "torch" in sys.modules:
        return str(getattr(sys.modules["torch"], "__version__", ""))
    spec = find_spec("torch")
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder, "version.py")
        said = re.search(
            r"^__version__ = '(\d+\.\d+[^']*)'", path.read_text() if path.is_file() else "", re.MULTILINE
        )
        if said:
            return said[1]
    return ""


def release_of(version: str) -> Release:
    """Return (2, 13) for "2.13.0+cpu"."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
