"""Detect forbidden access by learner code from inside the rank: name it, award no points.

Four looks, none of which a right answer comes near:

    audit       files of the course and other programs, opened or started from Python; frames, code and objects of others (`trust`)
    doors       each attribute that its code reads or sets, with the object in hand, whatever its spelling (`doors`)
    forgotten   functions that the holes were cut out of, and torch's own `fully_shard`, raise if somebody digs them out
    rewired     functions and classes of the package, or of torch.distributed, exchanged for others

Python keeps no secrets from Python: who runs in this process can undo much of it. What must not be read is kept away by the
system (`confinement`), expected values never come here, and what a rank reports is data to be compared. The guard's purpose is
the plain sentence in the report.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from torch.distributed import distributed_c10d

from hwfsdp.course.doors import Doors
from hwfsdp.course.manifest import Place
from hwfsdp.course.overlay import SUBMITTED
from hwfsdp.course.rules import RECORDS
from hwfsdp.course.trust import FILLER, digging, is_package, is_trusted

_FSDP = "torch.distributed.fsdp"
FOREIGN = tuple(  # what the course is about, ready-made
    f"{_FSDP}._fully_shard._{name}"
    for name in "fully_shard fsdp_init fsdp_state fsdp_param_group fsdp_param fsdp_collectives".split()
) + (
    *(f"{_FSDP}.{name}" for name in ("fully_sharded_data_parallel", "_flat_param", "_runtime_utils")),
    *("torch.distributed._composable.replicate", "torch.nn.parallel.distributed"),
)
OWN = tuple(f"hwfsdp.core.{name}" for name in ("param", "group", "wrap"))  # the same, of the package
_STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "pty.spawn")
_READERS = ("linecache", "tokenize")  # read the text of code that a traceback shows
_NEAR = 8  # frames
_SWITCHES = {
    "hwfsdp.observe.events": ("activate", "paused", "keeping_clock", "use_clock"),
    "hwfsdp.core.streams": ("backend",),
    "hwfsdp.core.observer": ("put",),
}
_COLLECTIVES = ("all", "barrier", "broadcast", "gather", "monitored", "recv", "reduce", "scatter", "send")


class Blocked(BaseException):
    """The learner's code tried what it may not."""


BLOCKED = "hwfsdp.course.guard.Blocked: "  # how its text begins in a traceback


class Guard:
    """A guard that watches one rank from `arm` on.

    Attributes:
        seen: what was tried, as sentences, the first one first.
    """

    def __init__(self, off_limits: Sequence[str], alone: bool = False) -> None:
        self.seen: list[str] = []
        self.doors = Doors(self._refuse, alone)
        self._bound: dict[tuple[str, str], Any] = {}
        self._off_limits = tuple(os.path.realpath(path) for path in off_limits)

    def arm(self) -> None:
        """From now on. An audit hook lasts as long as the process."""
        self._bound = dict(_bindings())
        pid, off_limits, seen = os.getpid(), self._off_limits, self.seen
        came_in = self.doors.came_in

        looking: set[int] = set()  # threads that are here: to ask for a frame is an event, too
        thread, frame_of = threading.get_ident, sys._getframe

        def look(event: str, args: tuple[Any, ...]) -> None:
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
                seen.append(tried)
                raise Blocked(tried)

        _guard_groups(seen)
        _guard_instruments(seen)
        _guard_wrapping(self.doors)
        self.doors.close()
        sys.addaudithook(look)

    def _refuse(self, tried: str) -> NoReturn:
        self.seen.append(tried)
        raise Blocked(tried)

    def finish(self) -> list[str]:
        """The attempts so far, and the functions that now hold a learner's code."""
        now = dict(_bindings())
        changed = [
            f"exchanges {module}.{name}"
            for (module, name), bound in self._bound.items()
            if (found := now.get((module, name))) is not bound and not _is_known(found)
        ]
        return [*self.seen, *changed]


def _is_known(value: Any) -> bool:
    """Whether it was written in a file of Python, of a library or of the package; checks put spies of their own in places."""
    if isinstance(value, type):
        return value.__module__ in sys.modules and not value.__module__.startswith(SUBMITTED)
    plain = getattr(value, "fget", None) or getattr(value, "__func__", value)
    code = getattr(getattr(plain, "__wrapped__", plain), "__code__", None)
    if code is None:
        return value is None or type(value).__module__ in ("builtins", "functools")  # gone, or native
    return is_trusted(code)


def _tried(event: str, args: tuple[Any, ...], pid: int, off_limits: tuple[str, ...]) -> str | None:
    """The meaning of an audit event, if a learner's code may not cause it."""
    if event == "open":
        path = _path(args[0])
        if path and path.startswith(off_limits) and not _is_for_traceback():
            return f"opens {_short(path)}"
    elif event in _STARTS:
        return f"starts another program ({event})"
    elif event in ("os.kill", "os.killpg") and args[0] != pid:
        return "sends a signal to another process"
    elif event == "object.__setattr__" and args[1] == "__code__" and not _is_filler(sys._getframe(2)):
        return f"exchanges the code of {getattr(args[0], '__qualname__', 'a function')}"
    elif event == "socket.connect" and _leaves_the_machine(args[1]):
        return f"connects to {args[1][0]}"
    return None


def _is_filler(frame: types.FrameType) -> bool:
    """Whether a student's edition is filling its holes. It cannot read what fills the checked ones."""
    return frame.f_code.co_filename == FILLER


def _path(given: Any) -> str:
    if isinstance(given, str | bytes | os.PathLike):
        try:
            return os.path.realpath(os.fsdecode(given))
        except (ValueError, OSError):
            return ""
    return ""  # a file descriptor


def _short(path: str) -> str:
    """The end of a path: a report should not tell where on this machine things are."""
    return "/".join(path.split("/")[-3:])


def _is_for_traceback() -> bool:
    frame: types.FrameType | None = sys._getframe(2)
    for _ in range(_NEAR):
        if frame is None:
            return False
        if frame.f_globals.get("__name__") in _READERS:
            return True
        frame = frame.f_back
    return False


def _leaves_the_machine(address: Any) -> bool:
    if not isinstance(address, tuple) or not address or not isinstance(address[0], str):
        return False  # a Unix socket
    return not address[0].startswith(("127.", "::1", "localhost"))


def _bindings() -> Iterable[tuple[tuple[str, str], Any]]:
    """Functions and classes of the package and of torch.distributed, and the functions in the package's classes."""
    for module_name, module in list(sys.modules.items()):
        root = module_name.split(".")[0]
        if not (root == "hwfsdp" or module_name.startswith("torch.distributed.distributed_c10d")):
            continue
        for name, value in list(vars(module).items()):
            kind = type(value)  # not isinstance, which asks lazy objects what they are
            if kind is types.FunctionType or issubclass(kind, type):
                yield (module_name, name), value
            if issubclass(kind, type) and value.__module__ == module_name:
                for inner, method in list(vars(value).items()):
                    if callable(method) or isinstance(method, property | staticmethod | classmethod):
                        yield (module_name, f"{name}.{inner}"), method


def _guard_groups(seen: list[str]) -> None:
    """A process group's own collectives, which no instrument sees, can be called by torch and the package only."""
    for kind in (distributed_c10d.ProcessGroup, distributed_c10d.Backend):
        for name in collectives_of(kind):
            words = f"{name} of a process group itself"
            setattr(kind, name, _for_the_package(getattr(kind, name), words, seen))


def _guard_instruments(seen: list[str]) -> None:
    """Let only the package begin, pause or end a recording, or choose its clock.

    If the package was loaded again, these are other modules than the ones that this module has imported.
    """
    loaded: Any
    for module_name, names in _SWITCHES.items():
        loaded = importlib.import_module(module_name)
        for name in names:
            setattr(loaded, name, _for_the_package(getattr(loaded, name), name, seen, is_package))
    loaded = importlib.import_module("hwfsdp.core.streams").StreamSet
    loaded.__init__ = _for_the_package(loaded.__init__, "StreamSet", seen, is_package)
    loaded = importlib.import_module("hwfsdp.observe.collectives")
    loaded.watch_from_now_on()


def _guard_wrapping(doors: Doors) -> None:
    """`functools.wraps` and what uses it copy any object's attributes into another: the doors look at both first."""
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


def collectives_of(kind: type) -> list[str]:
    """Names of the methods of a process group that communicate."""
    names = [name for name in dir(kind) if name.lstrip("_").startswith(_COLLECTIVES)]
    return [name for name in names if not name.startswith("__") and callable(getattr(kind, name))]


@contextmanager
def watch_wire() -> Iterator[tuple[list[list[Any]], list[str]]]:
    """Watch everything that this rank sends and receives: ["send" or "recv", peer in the group, bytes] of each.

    Also names of what it does with process groups besides, whether or not a recording sees that.
    """
    moves, others = list[list[Any]](), list[str]()
    kind = distributed_c10d.ProcessGroup
    originals = {name: getattr(kind, name) for name in collectives_of(kind)}

    def watched(name: str) -> Any:
        def move(group: Any, tensors: Sequence[Any], peer: int, *rest: Any) -> Any:
            moves.append([name, int(peer), sum(t.numel() * t.element_size() for t in tensors)])
            return originals[name](group, tensors, peer, *rest)

        def other(*args: Any, **kwargs: Any) -> Any:
            others.append(name.lstrip("_"))
            return originals[name](*args, **kwargs)

        return move if name in ("send", "recv") else other

    try:
        for name in originals:
            setattr(kind, name, watched(name))
        yield moves, others
    finally:
        for name, original in originals.items():
            setattr(kind, name, original)


def _for_the_package(
    method: Callable[..., Any],
    name: str,
    seen: list[str],
    known: Callable[[types.CodeType], bool] = is_trusted,
) -> Callable[..., Any]:
    frame_of = sys._getframe

    def call(*args: Any, **kwargs: Any) -> Any:
        if not known(frame_of(1).f_code):
            seen.append(f"calls {name}, past what is timed and seen")
            raise Blocked(seen[-1])
        return method(*args, **kwargs)

    return call


# --- Forgetting --------------------------------------------------------------------------------------------


def forget(places: Iterable[Place]) -> None:
    """Functions at these places, as they were loaded before, and torch's own FSDP raise from now on, wherever they are kept."""
    for place in places:
        if place.module in sys.modules:
            _blank_at(vars(sys.modules[place.module]), place.name, "the package's own")
    forget_modules(FOREIGN, "torch's own")


def forget_modules(names: Iterable[str], whose: str) -> None:
    """The same for all functions of these modules. They are loaded now, because later nothing can read them."""
    for name in names:
        _blank_module(importlib.import_module(name), whose)


def _blank_module(module: types.ModuleType, whose: str) -> None:
    """All functions and methods that a module defines, but for records."""
    for name, value in list(vars(module).items()):
        if getattr(value, "__module__", None) == module.__name__ and name not in RECORDS:
            inner = [f"{name}.{each}" for each in vars(value)] if type(value) is type else []
            for each in inner or [name]:
                _blank_at(vars(module), each, whose)


def _blank_at(names: Mapping[str, Any], name: str, whose: str) -> None:
    """Blank the function of this dotted name, and the functions that its decorators have wrapped."""
    *classes, attribute = name.split(".")
    for inner in classes:
        names = vars(names[inner])
    found = names.get(attribute)
    found = getattr(found, "fget", None) or getattr(found, "__func__", found)
    while type(found) is types.FunctionType:
        wrapped = vars(found).get("__wrapped__")
        _blank(found, whose)
        found = wrapped


def _blank(function: types.FunctionType, whose: str) -> None:
    """The function raises. Its code keeps the shape that Python asks of a function with free variables."""
    message = f"{whose} {function.__qualname__} is not there: write it"
    cells = function.__code__.co_freevars
    bound = "".join(f"    {cell} = None\n" for cell in cells)
    used = "".join(f"        {cell}\n" for cell in cells)
    source = (
        f"def make():\n{bound}    def stub(*args, **kwargs):\n"
        f"        raise RuntimeError({message!r})\n{used}    return stub\n"
    )
    names: dict[str, Callable[..., Any]] = {}
    exec(source, names)
    stub: Any = names["make"]()
    function.__code__ = stub.__code__
    function.__defaults__, function.__kwdefaults__ = None, None
