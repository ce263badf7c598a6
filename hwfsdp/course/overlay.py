"""The package with holes, and a learner's functions in these holes.

Learner code is loaded only in rank processes. For an elective, `install` unloads the package there and loads it again, from
source in which the graded holes are blank. Each hole becomes a *socket*: a function that calls the function that is plugged in.
Then `install` loads the learner's file, like any module, and plugs in its functions.

Note [Sockets]
    A learner's file imports the package, and the package needs the learner's functions. So the one that is loaded first would find
    the other one incomplete. We could set the learner's function in the package's module. But another module may already have
    imported the old function with `from … import`, and would keep it. A socket exists as soon as its module has run. Every module
    that imports the name gets the socket, and the function that it calls may come later.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import linecache
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import spec_from_loader
from typing import Any

from hwfsdp.course import holes
from hwfsdp.course.manifest import Exercise, Place, module_source

Function = Callable[..., Any]
SUBMITTED = "submitted_"  # the beginning of the names of learners' modules


@dataclass(frozen=True)
class Submitted:
    """A learner's file: the exercise's number, the file's path and text, and the functions that it must define."""

    number: str
    path: str
    text: str
    places: tuple[Place, ...]


@dataclass(frozen=True)
class Overlay:
    """The data that a rank needs to load the package with a learner's functions. It is sent to the rank by value.

    Attributes:
        modules: the text of each module that has holes, with the holes blank, by the module's name.
        submitted: the learner's files.
    """

    modules: dict[str, str]
    submitted: tuple[Submitted, ...]

    @classmethod
    def alone(cls, name: str, path: object, text: str) -> Overlay:
        """Return an overlay of the unchanged package and one file that stands by itself."""
        return cls({}, (Submitted(name, str(path), text, ()),))


def blanked(exercises: Sequence[Exercise]) -> dict[str, str]:
    """Return the text of every module in which these exercises have holes, by name. All their holes are blank."""
    texts: dict[str, str] = {}
    for exercise in exercises:
        for place in exercise.places:
            text = texts.get(place.module) or module_source(place.module)
            texts[place.module] = holes.blank(text, place.name, exercise.number)
    return texts


class MissingHole(Exception):
    """The learner's file does not define a function that it must define."""


class Socket:
    """A stand-in for a hole. It calls the plugged-in function. Before there is one, it calls the blank function, which raises."""

    def __init__(self, blank: Function) -> None:
        self.plugged = blank

        @functools.wraps(blank)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self.plugged(*args, **kwargs)

        call.__dict__["socket"] = self
        self.function = call


class _Importer(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import modules with holes from the given texts, and put sockets into the holes. Python imports all other modules as usual."""

    def __init__(self, texts: dict[str, str], places: Sequence[Place]) -> None:
        self.texts, self.places = texts, places
        self.sockets: dict[Place, Socket] = {}

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return spec_from_loader(name, self, origin=f"<{name} with holes>") if name in self.texts else None

    def exec_module(self, module: types.ModuleType) -> None:
        name = module.__name__
        _run_text(self.texts[name], f"<{name} with holes>", module, run_plainly)
        for place in self.places:
            if place.module == name:
                self.sockets[place] = _insert_socket(module, place.name)


Runner = Callable[[str, str, dict[str, Any]], None]  # takes a text, its path, and a dict for its names


def run_plainly(text: str, path: str, names: dict[str, Any]) -> None:
    """Run a text as Python does."""
    exec(compile(text, path, "exec"), names)


def install(
    overlay: Overlay, when_loaded: Callable[[], None] = lambda: None, run: Runner = run_plainly
) -> None:
    """Load a learner's files in this process. If the package has holes for them, load it again with these holes.

    Args:
        when_loaded: called when the package is loaded, before the first of the learner's files runs.
        run: called to run each of the learner's files.

    Raises:
        MissingHole: a file does not define one of its holes.
        Exception: whatever a file raises when it runs.
    """
    if overlay.modules:
        forget_package()
    places = [place for submitted in overlay.submitted for place in submitted.places]
    importer = _Importer(overlay.modules, places)
    sys.meta_path.insert(0, importer)
    if importlib.util.find_spec("hwfsdp.bodies"):  # a student's edition, which would fill its holes itself
        filler: Any = importlib.import_module("hwfsdp.bodies")
        filler.left_blank.update(map(tuple, places))
    for name in overlay.modules:
        importlib.import_module(name)
    when_loaded()
    for submitted in overlay.submitted:
        module = types.ModuleType(f"{SUBMITTED}{submitted.number}")
        sys.modules[module.__name__] = module
        _run_text(submitted.text, submitted.path, module, run)
        for place in submitted.places:
            importer.sockets[place].plugged = _learners_function(vars(module), place, submitted.path)
        _add_helpers(vars(module), submitted.places)


def forget_package() -> None:
    """Unload the package, so that the next import of hwfsdp loads it again. Running code keeps the old objects."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "hwfsdp"]:
        del sys.modules[name]


def _run_text(text: str, path: str, module: types.ModuleType, run: Runner) -> None:
    """Run a text as this module. Tracebacks show the lines of this text, even if there is no such file, or another one."""
    module.__file__ = path
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    run(text, path, module.__dict__)


def _insert_socket(module: types.ModuleType, name: str) -> Socket:
    """Replace the blank function by a socket. A property or static method stays one."""
    owner, attribute = owner_of(module, name)
    blank = vars(owner)[attribute]
    socket = Socket(function_of(blank))
    replaced: Any = socket.function
    if isinstance(blank, property):
        replaced = property(socket.function)
    elif isinstance(blank, staticmethod | classmethod):
        replaced = type(blank)(socket.function)
    setattr(owner, attribute, replaced)
    return socket


def owner_of(module: types.ModuleType, name: str) -> tuple[Any, str]:
    """Return the class or module that owns a dotted name, and the last part of the name."""
    *classes, attribute = name.split(".")
    owner: Any = module
    for inner in classes:
        owner = vars(owner)[inner]
    return owner, attribute


def function_of(found: Any) -> Any:
    """Return the function in a property, static method or class method; all other objects unchanged."""
    if isinstance(found, property):
        return found.fget
    return found.__func__ if isinstance(found, staticmethod | classmethod) else found


def _learners_function(names: dict[str, Any], place: Place, path: str) -> Function:
    *classes, attribute = place.name.split(".")
    try:
        for inner in classes:
            names = dict(vars(names[inner]))
        function: Function = function_of(names[attribute])
    except (KeyError, TypeError, AttributeError):
        raise MissingHole(f"{path} does not define {place.name}") from None
    if not callable(function):
        raise MissingHole(f"{path} defines {place.name}, but not as a function")
    if isinstance(getattr(function, "socket", None), Socket):
        raise MissingHole(f"{path} imports the package's {place.name} over its own")
    if classes:
        _belongs_to(function, owner_of(sys.modules[place.module], place.name)[0])
    return function


def _belongs_to(function: Function, owner: type) -> None:
    """Make `super()` without arguments use the package's class instead of the learner's class of the same name."""
    plain: Any = getattr(function, "__wrapped__", function)
    names = getattr(getattr(plain, "__code__", None), "co_freevars", ())
    if "__class__" in names:
        cell = plain.__closure__[names.index("__class__")]
        cell.cell_contents = owner


def _add_helpers(names: dict[str, Any], places: Sequence[Place]) -> None:
    """Add a learner's new methods to a class of the package. The package's own methods stay unchanged."""
    for place in places:
        owner_name = place.name.rpartition(".")[0]
        if not owner_name:
            continue
        theirs, (ours, _) = names[owner_name.split(".")[0]], owner_of(sys.modules[place.module], place.name)
        for name, value in list(vars(theirs).items()):
            if not hasattr(ours, name):
                setattr(ours, name, value)
                if callable(value):
                    _belongs_to(value, ours)
