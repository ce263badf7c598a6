"""Pickle functions and values for another process.

With cloudpickle, this works for functions and classes that are defined anywhere, also in a notebook or in another function.
Without it, the other process imports them, so they must be at the top level of a module or a script.
"""

from __future__ import annotations

import io
import pickle
import sys
from types import FunctionType
from typing import Any

from hwfsdp.extras import missing

try:
    import cloudpickle as cloudpickle
except ModuleNotFoundError:
    cloudpickle = None


def dumps(value: Any) -> bytes:
    """Return the pickled value.

    Raises:
        MissingPackageError: cloudpickle is not installed, and a function or class cannot be imported.
    """
    if cloudpickle is not None:
        return bytes(cloudpickle.dumps(value))
    with io.BytesIO() as file:
        _ByName(file).dump(value)
        return file.getvalue()


class _ByName(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, type | FunctionType):
            return NotImplemented
        has_no_file = obj.__module__ == "__main__" and not hasattr(sys.modules["__main__"], "__file__")
        if has_no_file or "<" in obj.__qualname__:
            where = "a notebook" if has_no_file else "another function"
            raise missing(
                "cloudpickle", f"{obj.__qualname__}, which is defined in {where} and needed on a rank"
            )
        return NotImplemented
