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


class _Loader(importlib.abc.Loader):
    """A loader that runs a module from text and puts sockets into its holes."""

    def __init__(self, text: str, path: str, names: Sequence[str], sockets: dict[Place, Socket]) -> None:
        self.text, self.path, self.names, self.sockets = text, path, names, sockets

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        module.__file__ = self.path
        show_lines(self.path, self.text)
        exec(compile(self.text, self.path, "exec"), module.__dict__)
        for name in self.names:
            self.sockets[Place(module.__name__, name)] = _insert_socket(module, name)


class _Finder(importlib.abc.MetaPathFinder):
    """A finder that takes modules with holes from the given texts. Python finds all other modules as usual."""

    def __init__(self, loaders: dict[str, _Loader]) -> None:
        self.loaders = loaders

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        loader = self.loaders.get(name)
        return spec_from_loader(name, loader, origin=loader.path) if loader else None


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
    sockets: dict[Place, Socket] = {}
    places = [place for submitted in overlay.submitted for place in submitted.places]
    loaders = {}
    for module, text in overlay.modules.items():
        names = [place.name for place in places if place.module == module]
        loaders[module] = _Loader(text, f"<{module} with holes>", names, sockets)
    sys.meta_path.insert(0, _Finder(loaders))
    if importlib.util.find_spec("hwfsdp.bodies"):  # a student's edition, which would fill its holes itself
        filler: Any = importlib.import_module("hwfsdp.bodies")
        filler.left_blank.update(map(tuple, places))
    for name in overlay.modules:
        importlib.import_module(name)
    when_loaded()
    for submitted in overlay.submitted:
        defined = _run_file(submitted, run)
        for place in submitted.places:
            sockets[place].plugged = _learners_function(defined, place, submitted.path)
        _add_helpers(defined, submitted.places)


def forget_package() -> None:
    """Unload the package, so that the next import of hwfsdp loads it again. Running code keeps the old objects."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "hwfsdp"]:
        del sys.modules[name]


def show_lines(path: str, text: str) -> None:
    """Let tracebacks show the lines of this text for this path, even if there is no such file, or another one."""
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)


def _run_file(submitted: Submitted, run: Runner) -> dict[str, Any]:
    """Run a learner's file, and return the names that it defines."""
    show_lines(submitted.path, submitted.text)
    module = types.ModuleType(f"{SUBMITTED}{submitted.number}")
    module.__file__ = submitted.path
    sys.modules[module.__name__] = module
    run(submitted.text, submitted.path, module.__dict__)
    return module.__dict__


def _insert_socket(module: types.ModuleType, name: str) -> Socket:
    """Replace the blank function by a socket. A property or static method stays one."""
    owner, attribute = owner_of(module, name)
    blank = vars(owner)[attribute]
    socket = Socket(_function_of(blank))
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


def _function_of(found: Any) -> Function:
    """Return the function in a property or method."""
    if isinstance(found, property):
        assert found.fget is not None
        return found.fget
    function: Function = found.__func__ if isinstance(found, staticmethod | classmethod) else found
    return function


def _learners_function(names: dict[str, Any], place: Place, path: str) -> Function:
    *classes, attribute = place.name.split(".")
    try:
        for inner in classes:
            names = dict(vars(names[inner]))
        function = _function_of(names[attribute])
    except (KeyError, TypeError, AttributeError):
        raise MissingHole(f"{path} does not define {place.name}") from None
    if not callable(function):
        raise MissingHole(f"{path} defines {place.name}, but not as a function")
    if isinstance(getattr(function, "socket", None), Socket):
        raise MissingHole(f"{path} imports the package's {place.name} over its own")
    if classes:
        _belongs_to(function, _package_class(place))
    return function


def _package_class(place: Place) -> type:
    owner: type = owner_of(sys.modules[place.module], place.name)[0]
    return owner


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
        theirs, ours = names[owner_name.split(".")[0]], _package_class(place)
        for name, value in list(vars(theirs).items()):
            if not hasattr(ours, name):
                setattr(ours, name, value)
                if callable(value):
                    _belongs_to(value, ours)
