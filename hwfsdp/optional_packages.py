"""Packages that only parts of hwfsdp need, and what to type if one is missing. Everything else needs torch, numpy and zlib-ng only.

The names of the extras are those of setup.cfg.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hwfsdp.errors import MissingPackageError

EXTRAS = {  # module of another package → the package, and an extra that has it
    "PIL": ("pillow", "plot"),
    "cloudpickle": ("cloudpickle", "launch"),
    "jinja2": ("jinja2", "course"),
    "matplotlib": ("matplotlib", "plot"),
    "safetensors": ("safetensors", "safetensors"),
    "IPython": ("ipython", "notebooks"),
}


@contextmanager
def needed_by(subject: str) -> Iterator[None]:
    """Import packages of an extra inside the block.

    Args:
        subject: what needs them, for the message.

    Raises:
        MissingPackageError: one of them is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in EXTRAS:
            raise
        raise missing(module, subject) from error


def missing(module: str, subject: str) -> MissingPackageError:
    """Make the error for a module that is not installed."""
    package, extra = EXTRAS[module]
    return MissingPackageError(
        subject,
        expected=f"the package {package}",
        got="none",
        remedy=f"pip install {package}. (A clone of hwfsdp installs it, and what else belongs to it, by: pip install -e '.[{extra}]')",
        name=module,
    )
