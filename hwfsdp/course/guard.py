"""Detect forbidden access by learner code from inside the rank. The report names the access, and the answer gets no points.

Five checks; no right answer triggers any of them:

    audit       the code opens files of the course, starts programs, or reads frames, code and objects of others (`trust`)
    doors       each attribute that the code reads or sets, whatever its spelling; the check has the object (`doors`)
    forgotten   the original functions of the holes, and torch's own `fully_shard`, raise if the code calls them
    lookups     attributes that libraries read or set for the code (`lookups`)
    rewired     the code replaced functions or classes of the package or of torch.distributed, or constants that figures depend on

Python code cannot hide anything from other Python code: code in this process can undo much of the guard. So other means protect the
course. The system blocks files that must not be read (`confinement`). Expected values never reach this process. The reports of a rank
are only data to compare. The guard gives the report a plain sentence about what the code tried.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import threading
import types
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from traceback import walk_stack
from typing import Any, NoReturn

from torch.distributed import distributed_c10d

from hwfsdp.course import lookups
from hwfsdp.course.doors import Doors, Refuse
from hwfsdp.course.manifest import Place
from hwfsdp.course.oracles import ROOMS
from hwfsdp.course.overlay import function_of, owner_of
from hwfsdp.course.rules import RECORDS, is_below
from hwfsdp.course.trust import FILLER, digging, is_package, is_trusted, names_wrapper
from hwfsdp.course.wire import collectives_of

_FSDP = "torch.distributed.fsdp"
FOREIGN = tuple(  # ready-made answers to the course
    f"{_FSDP}._fully_shard._{name}"
    for name in "fully_shard fsdp_init fsdp_state fsdp_param_group fsdp_param fsdp_collectives".split()
) + (
    *(f"{_FSDP}.{name}" for name in ("fully_sharded_data_parallel", "_flat_param", "_runtime_utils")),
    *("torch.distributed._composable.replicate", "torch.nn.parallel.distributed"),
)
OWN = tuple(f"hwfsdp.core.{name}" for name in ("param", "group", "api"))  # the same for the package
_STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "pty.spawn")
_READERS = ("linecache", "tokenize")  # read the text of code that a traceback shows
_MEASURED = ("hwfsdp.virtual", *ROOMS)  # modules whose constants may not change
_NEAR = 8  # number of frames to look through for a reader
_SWITCHES = {
    "hwfsdp.observe.events": ("activate", "paused", "keeping_clock", "use_clock"),
    "hwfsdp.core.streams": ("backend",),
    "hwfsdp.core.observer": ("put",),
}


class Blocked(BaseException):
    """The learner's code tried something forbidden."""


BLOCKED = "hwfsdp.course.guard.Blocked: "  # the beginning of its text in a traceback


class Guard:
    """A guard that watches one rank from the call of `arm` on.

    Attributes:
        seen: descriptions of the forbidden attempts, in order.
    """

    def __init__(self, off_limits: Sequence[str], alone: bool = False) -> None:
        self.seen: list[str] = []
        self.doors = Doors(self._refuse, alone)
        self._bound: dict[tuple[str, str], Any] = {}
        self._constants: dict[tuple[str, str], str] = {}
        self._off_limits = tuple(os.path.realpath(path) for path in off_limits)

    def arm(self) -> None:
        """Begin to watch. Python cannot remove an audit hook, so the guard watches until the process ends."""
        pid, off_limits, refuse, came_in = os.getpid(), self._off_limits, self._refuse, self.doors.came_in

        looking: set[int] = set()  # threads inside this hook: the hook itself causes events
        thread, frame_of = threading.get_ident, sys._getframe

        def look(event: str, args: tuple[Any, ...]) -> None:
            if event == "builtins.id":
                return  # most events are of this kind, and it gives access to nothing
            here = thread()
            if here in looking:
                return
            looking.add(here)
            try:
                caller = frame_of(1)
                tried = _tried(event, args, pid, off_limits) or digging(event, args, caller, came_in)
            finally:
                looking.discard(here)
            if tried is not None:
                refuse(tried)

        _guard_groups(refuse)
        _guard_instruments(refuse)
        _guard_wrapping(self.doors)
        self.doors.close()
        lookups.watch(refuse)
        self._bound, self._constants = dict(_bindings()), dict(_constants())
        sys.addaudithook(look)

    def _refuse(self, tried: str) -> NoReturn:
        self.seen.append(tried)
        raise Blocked(tried)

    def finish(self) -> list[str]:
        """Return the attempts so far, and the functions, classes and constants that the learner's code replaced."""
        now, constants = dict(_bindings()), dict(_constants())
        changed = [
            place
            for place, bound in self._bound.items()
            if (found := now.get(place)) is not bound and not _is_known(found)
        ]
        changed += [place for place, text in self._constants.items() if constants.get(place) != text]
        return [*self.seen, *(f"exchanges {module}.{name}" for module, name in changed)]


def _is_known(value: Any) -> bool:
    """True if this is a function of a file of Python, a library or the package, such as a spy of a check."""
    plain = getattr(value, "fget", None) or getattr(value, "__func__", value)
    code = getattr(getattr(plain, "__wrapped__", plain), "__code__", None)
    return code is not None and is_trusted(code)


def _tried(event: str, args: tuple[Any, ...], pid: int, off_limits: tuple[str, ...]) -> str | None:
    """Describe an audit event that a learner's code may not cause; None for all others."""
    if event == "open":
        path = _path(args[0])
        if path and path.startswith(off_limits) and not _is_for_traceback():
            return f"opens {_short(path)}"
    elif event in _STARTS:
        return f"starts another program ({event})"
    elif event in ("os.kill", "os.killpg") and args[0] != pid:
        return "sends a signal to another process"
    elif event == "object.__setattr__" and args[1] == "__code__":
        caller = sys._getframe(2)
        # a student's edition fills its holes here; it cannot read the bodies of the holes that are graded
        if caller.f_code.co_filename != FILLER and not names_wrapper(caller):
            return f"exchanges the code of {getattr(args[0], '__qualname__', 'a function')}"
    elif event == "socket.connect" and _leaves_the_machine(args[1]):
        return f"connects to {args[1][0]}"
    return None


def _path(given: Any) -> str:
    try:
        return os.path.realpath(os.fsdecode(given))
    except (TypeError, ValueError, OSError):  # a file descriptor is no path
        return ""


def _short(path: str) -> str:
    """Return the end of a path: a report should not show the layout of this machine."""
    return "/".join(path.split("/")[-3:])


def _is_for_traceback() -> bool:
    near = islice(walk_stack(sys._getframe(2)), _NEAR)
    return any(frame.f_globals.get("__name__") in _READERS for frame, _ in near)


def _leaves_the_machine(address: Any) -> bool:
    if not isinstance(address, tuple) or not address or not isinstance(address[0], str):
        return False  # a Unix socket
    return not address[0].startswith(("127.", "::1", "localhost"))


def _bindings() -> Iterable[tuple[tuple[str, str], Any]]:
    """Yield the functions and classes of the package and of torch.distributed, and the functions in their classes, by module and name."""
    for module_name, module in list(sys.modules.items()):
        root = module_name.split(".")[0]
        if not (root == "hwfsdp" or module_name.startswith("torch.distributed.distributed_c10d")):
            continue
        for name, value in list(vars(module).items()):
            kind = type(value)  # not `isinstance`, because it would load lazy objects
            if kind is types.FunctionType or issubclass(kind, type):
                yield (module_name, name), value
            if issubclass(kind, type) and value.__module__ == module_name:
                for inner, method in list(vars(value).items()):
                    if callable(method) or isinstance(method, property | staticmethod | classmethod):
                        yield (module_name, f"{name}.{inner}"), method


def _constants() -> Iterable[tuple[tuple[str, str], str]]:
    """Yield the text of each constant of the probes and the virtual devices, by module and name: their figures depend on it."""
    for module_name, module in list(sys.modules.items()):
        if is_below(module_name, _MEASURED):
            for name, value in list(vars(module).items()):
                if name.lstrip("_").isupper():
                    yield (module_name, name), repr(value)


def _guard_groups(refuse: Refuse) -> None:
    """Let only torch and the package call a process group's own collectives, because no instrument sees these calls."""
    for kind in (distributed_c10d.ProcessGroup, distributed_c10d.Backend):
        for name in collectives_of(kind):
            words = f"{name} of a process group itself"
            setattr(kind, name, _for_the_package(getattr(kind, name), words, refuse))


def _guard_instruments(refuse: Refuse) -> None:
    """Let only the package begin, pause or end a recording, or choose its clock.

    If the package was loaded again, its modules are new objects, not the ones that this module has imported. So import them here.
    """
    loaded: Any
    for module_name, names in _SWITCHES.items():
        loaded = importlib.import_module(module_name)
        for name in names:
            setattr(loaded, name, _for_the_package(getattr(loaded, name), name, refuse, is_package))
    loaded = importlib.import_module("hwfsdp.core.streams").StreamSet
    loaded.__init__ = _for_the_package(loaded.__init__, "StreamSet", refuse, is_package)
    loaded = importlib.import_module("hwfsdp.observe.collectives")
    loaded.watch_from_now_on()


def _guard_wrapping(doors: Doors) -> None:
    """Let the doors check both objects before `functools.wraps` copies attributes from one to the other."""
    functools: Any = importlib.import_module("functools")
    plain, frame_of = functools.update_wrapper, sys._getframe
    names = functools.WRAPPER_ASSIGNMENTS

    def update_wrapper(
        wrapper: Any, wrapped: Any, assigned: Any = names, updated: Any = ("__dict__",)
    ) -> Any:
        by_others = is_trusted(frame_of(1).f_code)
        doors.copy(wrapped, None if by_others else wrapper, assigned := tuple(assigned))
        return plain(wrapper, wrapped, assigned, updated)

    functools.update_wrapper = update_wrapper


def _for_the_package(
    method: Callable[..., Any],
    name: str,
    refuse: Refuse,
    known: Callable[[types.CodeType], bool] = is_trusted,
) -> Callable[..., Any]:
    frame_of = sys._getframe

    def call(*args: Any, **kwargs: Any) -> Any:
        if not known(frame_of(1).f_code):
            refuse(f"calls {name}, past what is timed and seen")
        return method(*args, **kwargs)

    return call


# --- Forgetting --------------------------------------------------------------------------------------------


def forget(places: Iterable[Place]) -> None:
    """Make the loaded functions at these places, and torch's own FSDP, raise from now on, wherever references to them exist."""
    for place in places:
        if place.module in sys.modules:
            _blank_at(sys.modules[place.module], place.name, "the package's own")
    forget_modules(FOREIGN, "torch's own")


def forget_modules(names: Iterable[str], whose: str) -> None:
    """Make all functions of these modules raise. Load the modules now, because later the rank cannot read their files."""
    for name in names:
        _blank_module(importlib.import_module(name), whose)


def _blank_module(module: types.ModuleType, whose: str) -> None:
    """Blank all functions and methods that a module defines, except those of records."""
    for name, value in list(vars(module).items()):
        if getattr(value, "__module__", None) == module.__name__ and name not in RECORDS:
            inner = [f"{name}.{each}" for each in vars(value)] if type(value) is type else []
            for each in inner or [name]:
                _blank_at(module, each, whose)


def _blank_at(module: types.ModuleType, name: str, whose: str) -> None:
    """Blank the function of this dotted name, and the functions that its decorators have wrapped."""
    owner, attribute = owner_of(module, name)
    found = function_of(vars(owner).get(attribute))
    while type(found) is types.FunctionType:
        wrapped = vars(found).get("__wrapped__")
        _blank(found, whose)
        found = wrapped


def _blank(function: types.FunctionType, whose: str) -> None:
    """Make a function raise. Its new code has the same free variables, as Python requires."""
    message = f"{whose} {function.__qualname__} is not there: write it"
    stub = _stub(function.__code__.co_freevars)
    function.__code__ = stub.replace(co_consts=tuple(message if c == "" else c for c in stub.co_consts))
    function.__defaults__, function.__kwdefaults__ = None, None


@functools.cache
def _stub(cells: tuple[str, ...]) -> types.CodeType:
    """Return the code of a function that raises an error with an empty message, and has these free variables."""
    bound = "".join(f"    {cell} = None\n" for cell in cells)
    used = "".join(f"        {cell}\n" for cell in cells)
    source = (
        f"def make():\n{bound}    def stub(*args, **kwargs):\n"
        f"        raise RuntimeError('')\n{used}    return stub\n"
    )
    names: dict[str, Callable[..., Any]] = {}
    exec(source, names)
    code: types.CodeType = names["make"]().__code__
    return code
