"""Functions and values for another process, and the caller's script there: its functions and classes keep their names.

`launch` sends the script's functions and classes by value, so the script does not run again on the ranks. But `pickle` sends a
class as a module and a name. So each rank has a module `__main__` of its own, and everything that arrives from the caller's
`__main__` gets its name in it. Then ranks can save objects of the script's classes, send them to each other, return them, and hand
them to processes that they spawn. A result that is an object of such a class comes back as an object of the caller's own class.

Note [Names that were not sent]
    Only what the function and its arguments refer to is sent. If a rank asks `__main__` for another name, for example to read a
    checkpoint with an object of a class that the function does not mention, the script is run once, as `multiprocessing` runs
    it in a spawned process: under the name `__mp_main__`, so that nothing below `if __name__ == "__main__":` runs. Notebooks and
    `python -c` have no file to run.

With cloudpickle, all this works for functions and classes that are defined anywhere, also in a notebook or in another function.
Without it, the other process imports them, so they must be at the top level of a module or a script.
"""

from __future__ import annotations

import io
import multiprocessing as mp
import os
import pickle
import sys
from collections import ChainMap
from collections.abc import Callable
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from hwfsdp.errors import MissingPackageError, StateError, WrongTypeError
from hwfsdp.optional_packages import missing

try:
    import cloudpickle as cloudpickle
except ModuleNotFoundError:
    cloudpickle = None

_AS_IMPORTED = "__mp_main__"  # multiprocessing's name for a script that a spawned process imports

# on a rank: name in `__main__` → the function or class that arrived from the caller
_received: dict[str, object] = {}
_to_run: Script | None = None  # on a rank: the script, until it is run (Note [Names that were not sent])


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


# --- The caller's script ------------------------------------------------------------------------------------


class Script(NamedTuple):
    """The caller's `__main__`.

    Attributes:
        file: its path, None in a notebook. package: for relative imports. module: its name after `python -m`, else None.
    """

    file: str | None
    package: str | None
    module: str | None


def find_script() -> Script:
    """Describe the `__main__` of this process."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    file = os.path.abspath(file) if file and os.path.isfile(file) else None
    spec = getattr(main, "__spec__", None)
    return Script(file, getattr(main, "__package__", None), getattr(spec, "name", None))


def refuse_import() -> None:
    """Raise StateError if `multiprocessing` is importing the script in a spawned process, and the script has no guard."""
    if getattr(mp.current_process(), "_inheriting", False):
        raise StateError(
            "launch",
            expected="a call in the script itself",
            got="a call while a process that the script has started imports the script",
            remedy='Put the call below `if __name__ == "__main__":`.',
        )


class Main(ModuleType):
    """The module `__main__` of a rank."""

    def __init__(self, script: Script) -> None:
        super().__init__("__main__")
        self.__package__ = script.package
        self.__spec__ = ModuleSpec(script.module, None) if script.module else None
        if script.file:
            self.__file__ = script.file

    def __getattr__(self, name: str) -> Any:
        global _to_run
        script, missing = _to_run, f"module '__main__' has no attribute {name!r}"
        if not name.startswith("__") and script is not None and script.file:
            _to_run = None  # also if it fails: its top level may be slow
            try:
                self._fill(script, script.file)
            except (Exception, SystemExit) as error:
                raise AttributeError(f"{missing}, and its script cannot be imported: {error}") from error
            if name in vars(self):
                return vars(self)[name]
        raise AttributeError(missing)

    def _fill(self, script: Script, file: str) -> None:
        """Run the script, and take the names that the caller did not send (Note [Names that were not sent])."""
        process, namespace = mp.current_process(), {**vars(self), **_received, "__name__": _AS_IMPORTED}
        setattr(process, "_inheriting", True)  # the script must start no processes now
        try:
            exec(_code_of(script, file), namespace, _Names(namespace))
        finally:
            delattr(process, "_inheriting")
        for name, value in namespace.items():
            if isinstance(value, type | FunctionType) and value.__module__ == _AS_IMPORTED:
                value.__module__ = "__main__"
                _received.setdefault(name, value)
            vars(self).setdefault(name, value)


class _Names(ChainMap[str, Any]):
    """The names of a script that runs. Classes and functions that the caller sent are not replaced: objects of them exist."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in _received:
            super().__setitem__(name, value)


def _code_of(script: Script, file: str) -> CodeType:
    loader = getattr(find_spec(script.module), "loader", None) if script.module else None
    if isinstance(loader, InspectLoader):
        code = loader.get_code(script.module or "")
        assert code is not None, "the module has no code"
        return code
    return compile(Path(file).read_bytes(), file, "exec")


def become(script: Script) -> None:
    """Make the `__main__` of this rank."""
    global _to_run
    _to_run = script
    sys.modules["__main__"] = sys.modules[_AS_IMPORTED] = Main(script)


# --- Pickling ----------------------------------------------------------------------------------------------


def for_ranks(value: Any) -> bytes:
    """Pickle a value for ranks. Functions and classes of `__main__` keep their names there."""
    return _dumps(value, None)


def for_the_caller(value: Any) -> bytes:
    """Pickle a value on a rank. What arrived from the caller's `__main__` is pickled as a name."""
    main = vars(sys.modules["__main__"])
    return _dumps(value, lambda name: name in _received and main.get(name) is _received[name])


def for_the_same_script(value: Any) -> bytes:
    """Pickle a value for another process that runs this script. Functions and classes of `__main__` are pickled as names."""
    return _dumps(value, lambda name: True)


def _dumps(value: Any, is_known: Callable[[str], bool] | None) -> bytes:
    if cloudpickle is None:
        return dumps(value)  # as names, which ranks look up (Note [Names that were not sent])
    with io.BytesIO() as file:
        _Pickler(file, is_known).dump(value)
        return file.getvalue()


def _reduce_code(code: CodeType) -> Any:
    """Keep the file of the code: some versions of cloudpickle leave it out."""
    make, arguments = _Base.dispatch_table[CodeType](code)
    return _make_code, (code.co_filename, make, *arguments)


def _make_code(file: str, make: Callable[..., CodeType], *arguments: Any) -> CodeType:
    return make(*arguments).replace(co_filename=file)


_Base: Any = pickle.Pickler if cloudpickle is None else cloudpickle.Pickler


class _Pickler(_Base):  # type: ignore[misc]
    dispatch_table = ChainMap({CodeType: _reduce_code}, getattr(_Base, "dispatch_table", {}))

    def __init__(self, file: io.BytesIO, is_known: Callable[[str], bool] | None) -> None:
        super().__init__(file)
        # in the reader's `__main__`; None: the reader is a rank that knows no name yet
        self._is_known = is_known
        if is_known is None:
            self.globals_ref[id(vars(sys.modules["__main__"]))] = _MainGlobals()

    def reducer_override(self, obj: Any) -> Any:
        reduced = super().reducer_override(obj)
        name = "" if reduced is NotImplemented else _name_in_main(obj)
        if not name:
            return reduced
        first = name.partition(".")[0]
        if self._is_known is not None:
            return NotImplemented if self._is_known(first) else reduced  # NotImplemented: pickled as a name
        make, arguments, *rest = reduced
        outer = None if name == first else vars(sys.modules["__main__"])[first]
        return (_define, (name, outer, make, *arguments), *rest)


class _MainGlobals(dict[str, Any]):
    """The globals of the script's functions. The reader puts the globals of its own `__main__` in their place."""

    def __reduce__(self) -> Any:
        return _globals_of_main, ()


def _globals_of_main() -> dict[str, Any]:
    return vars(sys.modules["__main__"])


def _name_in_main(obj: Any) -> str:
    """Return the name by which `__main__` has this function or class, or ""."""
    name = getattr(obj, "__qualname__", "")
    found: Any = sys.modules["__main__"]
    if getattr(obj, "__module__", None) != "__main__" or "<" in name:
        return ""
    for part in name.split("."):
        found = vars(found).get(part) if isinstance(found, ModuleType | type) else None
    return name if getattr(found, "__func__", found) is obj else ""


def _define(name: str, outer: object, make: Callable[..., Any], *arguments: Any) -> Any:
    """Make a function or class of the caller's `__main__`, and give it its name. `outer`: the class around it, which defines it."""
    made = make(*arguments)
    if isinstance(made, type):
        made.__qualname__ = name  # cloudpickle knows only the last part
    if outer is None:
        vars(sys.modules["__main__"])[name] = _received[name] = made
    return made


# --- A call and its result ---------------------------------------------------------------------------------


def pickle_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Pickle a call for the ranks.

    Raises:
        WrongTypeError: the function or an argument cannot be pickled. The error names it.
    """
    try:
        return for_ranks((fn, args, kwargs))
    except MissingPackageError:
        raise
    except Exception as error:
        parts = {"fn": fn, **{f"argument {n} of fn": arg for n, arg in enumerate(args, 1)}}
        parts |= {f"argument {name} of fn": arg for name, arg in kwargs.items()}
        name = next((name for name, part in parts.items() if not _can_be_pickled(part)), "fn")
        raise cannot_pickle(f"launch: {name}", error) from error


def _can_be_pickled(part: Any) -> bool:
    try:
        for_ranks(part)
    except Exception:
        return False
    return True


def cannot_pickle(subject: str, error: Exception) -> WrongTypeError:
    """Make the error for a value that cannot move between a rank and its caller."""
    return WrongTypeError(
        subject,
        expected="a value that can be pickled, because ranks are other processes",
        got=f"{type(error).__name__}: {error}",
        remedy="Make files, locks and generators inside the function, and return plain values.",
    )
