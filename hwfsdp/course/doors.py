"""Check each access of a learner's code at the moment of the access.

A rule over text sees only words, and code can build words: `vars(m)["pau" + "sed"]`. So this module compiles a submission in a special
way: `Doors` checks each attribute that the code reads, sets or deletes, and has the object itself. `Doors` also replaces the built-in
functions that look up names (`getattr`), import, or run text (`exec`), so it checks the attributes in that text, too. It ignores the
spelling and looks at the object that the access returns. It refuses

    an instrument        recorder, log, clock, ledger, virtual device: they record what a learner's code did
    a ready-made answer  FSDP and DDP of torch; for the stations and the homework, also the package's own
    a door               frames, code and variables of others, modules by a built name, other ways around these checks

It also refuses to set an attribute of a module, class, function or instrument that is not the learner's.

Note [Code that has not come in by the door]
    Some code runs without passing through this module: a library evaluates annotations, or imports a file that was just written.
    So the guard looks at all code that runs. If the code does not belong to Python, a library or the package, it must have been
    compiled here (`came_in`).

Note [Out of reach]
    Code that could replace the built-in functions in a module's names could turn off the checks of that module's functions. So a
    learner never gets those names: `globals()` returns a copy, and text that runs with the learner's own names runs in a copy of
    them.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import secrets
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, NoReturn

from hwfsdp.compat import NATIVE_MODULES
from hwfsdp.course.overlay import SUBMITTED
from hwfsdp.course.rules import ATTRIBUTES, BOUND, CLOSED, FRAMES, HOMEWORK_MAY, INSTRUMENTS, LOCKS
from hwfsdp.course.rules import NAMES, ONE_BY_ONE, POLICIES, READY_MADE, RECORDS, STREAMS
from hwfsdp.course.rules import answer_questions, is_below, is_stream, same_setattr
from hwfsdp.course.trust import ROOTS, codes_in

Refuse = Callable[[str], NoReturn]
_CLOSED = CLOSED | {*NATIVE_MODULES}
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
_ANNOTATIONS = ("annotation", "returns")
_ANNOTATED = (ast.arg, ast.AnnAssign, ast.FunctionDef, ast.AsyncFunctionDef)
_OWN_NAMES = ("__dict__",)  # may be read of instances, but not of objects in `_TOLD`
_TOLD = (types.ModuleType, type, *_FUNCTIONS)  # objects that know their own module
_WORDS = FRAMES | ATTRIBUTES | {*_OWN_NAMES}
_STANDS_FOR = (super, weakref.ProxyType, weakref.CallableProxyType)  # have the attributes of another object


class Doors:
    """Compile and run a learner's code.

    Args:
        refuse: called with a text that says what the code did, for example "imports gc"; it does not return.
        alone: the code is a station or the homework, which may use only two modules of the package (`HOMEWORK_MAY`).
    """

    def __init__(self, refuse: Refuse, alone: bool = False) -> None:
        self._refuse, self._alone = refuse, alone
        self._came_in: dict[int, types.CodeType] = {}
        # random names that a learner cannot guess
        self._look, self._touch, self._hold, self._same = (f"<{secrets.token_hex(8)}>" for _ in range(4))
        self._closed: dict[int, str] = {}
        self._kinds_closed: set[type] = set()  # types of closed objects
        # by module and attribute name: attributes that passed the checks
        self._passed: dict[tuple[types.ModuleType, str], Any] = {}
        self._plain: set[type] = set()  # types whose instances are not instruments
        self._copies: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}  # each copy with its original
        self._builtins = {**vars(builtins), **self._by_name(), **self._by_text()}

    def close(self) -> None:
        """Remember the identity of each object that is closed by name. Call this when the package is loaded."""
        self._closed = {id(value): name for name, value in _closed_objects()}
        self._kinds_closed = {type(value) for _, value in _closed_objects()}

    def came_in(self, code: types.CodeType) -> bool:
        """True if this object compiled the code. See Note [Code that has not come in by the door]."""
        return id(code) in self._came_in

    def run(self, text: str, path: str, names: dict[str, Any]) -> None:
        """Run the text of a file in these names."""
        self._execute(self._compile(text, path), names)

    # --- Attributes ----------------------------------------------------------------------------------------

    def look(self, value: Any, name: str) -> Any:
        """Return `value.name`, if the learner's code may read it."""
        if type(value) is types.ModuleType and name not in _WORDS:
            found = self._passed.get((value, name), self)
            if found is not self and getattr(value, name) is found:
                return found
        meant = _meant(value) if type(value) in _STANDS_FOR else value
        if name in _WORDS or type(meant) not in self._plain:
            self._check_name(meant, name)
        found = getattr(value, name)
        if isinstance(found, _TOLD) or type(found) in self._kinds_closed:
            self._refuse_if(self._closed_as(meant, found))
        if type(value) is types.ModuleType:
            self._passed[value, name] = found
        return found

    def touch(self, value: Any, name: str, sets: bool) -> Any:
        """Check that the learner's code may read, set or delete this attribute next, and return `value`."""
        meant = _meant(value)
        self._check_name(meant, name)
        if sets and (what := self._not_own(meant)):
            self._refuse(f"exchanges {what}.{name}")
        return value

    def copy(self, wrapped: Any, wrapper: Any, names: Iterable[str]) -> None:
        """Check a copy of attributes, and of everything in `__dict__`, from `wrapped` to `wrapper`; None if others made the wrapper."""
        if issubclass(type(wrapped), types.ModuleType):
            self._refuse("copies the names of a module")
        self._check_name(wrapped, "__doc__")
        if wrapper is not None:
            self.touch(wrapper, "__doc__", True)
            for name in names:
                self.look(wrapped, name) if hasattr(wrapped, name) else None

    def _check_name(self, value: Any, name: str) -> None:
        if name in FRAMES:
            self._refuse(f"looks into the frames of others ({name})")
        if name in ATTRIBUTES or (name in _OWN_NAMES and isinstance(value, _TOLD) and self._not_own(value)):
            self._refuse(f"uses {name}")
        kind = type(value)
        if is_stream(kind):
            if name.startswith("_") or name == "clock":
                self._refuse(f"looks into a stream ({name})")
        elif is_below(str(kind.__module__), INSTRUMENTS):
            self._refuse(f"looks into an instrument ({kind.__module__}.{kind.__qualname__})")
        elif isinstance(value, types.ModuleType):
            self._refuse_if(self._closed_module(value))
        elif not issubclass(kind, _TOLD):
            self._plain.add(kind)

    def _refuse_if(self, reason: str) -> None:
        if reason:
            self._refuse(reason)

    def _closed_as(self, value: Any, found: Any) -> str:
        """Say why `found`, an attribute of `value`, is closed; "" if it is open."""
        if id(found) in self._closed:
            return f"uses {self._closed[id(found)]}"
        if isinstance(found, types.ModuleType):
            return self._closed_module(found)
        if not isinstance(found, _TOLD):
            return ""
        home = found.__module__ or ""
        if not home:
            return ""  # a method of an object that is not written in Python
        what = f"{home}.{found.__qualname__}"
        if is_below(home, READY_MADE) and found.__name__ not in (*POLICIES, *RECORDS):
            return f"uses {what}"
        if not isinstance(value, types.ModuleType) or _may_hold_spies(value, home):
            return ""  # functions of a probe, and wrappers of a recording
        if is_below(home, _CLOSED) and home != "builtins" and what not in LOCKS:
            return f"uses {what}"
        return f"uses {what}, which this file does without" if self._is_of_others(home) else ""

    def _closed_module(self, module: types.ModuleType) -> str:
        name = type(module).__getattribute__(module, "__name__")
        if is_below(name, _CLOSED):
            return f"uses the module {name}"
        return f"uses {name}, which this file does without" if self._is_of_others(name) else ""

    def _is_of_others(self, home: str) -> bool:
        return self._alone and is_below(home, ("hwfsdp",)) and home not in HOMEWORK_MAY

    def _not_own(self, value: Any) -> str:
        """Return the name of an object that a learner may not change; "" if they may change it."""
        kind = type(value)
        if kind is types.FunctionType and self.came_in(value.__code__):
            return ""  # the learner's, even if it wraps another function
        if isinstance(value, (type, *_FUNCTIONS)):
            home = value.__module__ or ""
            return "" if home.startswith(SUBMITTED) else f"{home}.{value.__qualname__}"
        if isinstance(value, types.ModuleType):
            return "" if value.__name__.startswith(SUBMITTED) else value.__name__
        if is_stream(kind) or is_below(str(kind.__module__), (STREAMS, NATIVE_MODULES[0])):
            return f"a {kind.__qualname__}"
        return ""

    # --- Text, and built-in functions --------------------------------------------------------------------------

    def _compile(self, source: Any, path: Any, mode: str = "exec") -> Any:
        if isinstance(source, bytes | bytearray | memoryview | str):
            tree: Any = ast.parse(source if isinstance(source, str) else bytes(source), path, mode)
        else:
            tree = ast.fix_missing_locations(source)
        marked = _Marked((self._look, self._touch, self._hold), tree, self._refuse)
        code = compile(marked.visit(answer_questions(tree, self._same)), path, mode, dont_inherit=True)
        for each in codes_in(code):
            self._came_in[id(each)] = each
            if found := BOUND & {*each.co_names, *each.co_varnames, *each.co_cellvars}:
                self._refuse(f"uses {min(found)}")
        return code

    def _execute(self, code: types.CodeType, names: dict[str, Any]) -> Any:
        """Run code that was compiled here, as the module with these names."""
        names["__builtins__"] = self._builtins
        return eval(code, names)

    def _execute_beside(self, code: types.CodeType, names: dict[str, Any]) -> Any:
        """Run code in a copy of names that the learner holds. See Note [Out of reach]."""
        inner = dict(names)
        found = self._execute(code, inner)
        names.update({key: value for key, value in inner.items() if key != "__builtins__"})
        return found

    def _shown(self, names: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
        """Return the result of `globals` or `locals`. The names of a module are copied, and `exec` recognizes the copy."""
        if names is not whole:
            return names
        shown = {key: value for key, value in whole.items() if key != "__builtins__"}
        self._copies[id(shown)] = shown, whole
        return shown

    def _by_name(self) -> dict[str, Any]:
        """Return the built-in functions that look up names, by name."""
        missing, frame_of = object(), sys._getframe

        def look_up(value: Any, name: str, default: Any = missing, /) -> Any:
            try:
                return self.look(value, _text(name))
            except AttributeError:
                if default is missing:
                    raise
                return default

        def set_to(value: Any, name: str, new: Any, /) -> None:
            setattr(self.touch(value, _text(name), True), _text(name), new)

        def delete(value: Any, name: str, /) -> None:
            delattr(self.touch(value, _text(name), True), _text(name))

        def names_of(*value: Any) -> Any:
            return self.look(value[0], "__dict__") if value else own_names(frame_of(1))

        def own_names(frame: types.FrameType) -> dict[str, Any]:
            return self._shown(frame.f_locals, frame.f_globals)

        def all_names() -> dict[str, Any]:
            frame = frame_of(1)
            return self._shown(frame.f_globals, frame.f_globals)

        def local_names() -> dict[str, Any]:
            return own_names(frame_of(1))

        return {
            **{"getattr": look_up, "setattr": set_to, "delattr": delete, "vars": names_of},
            **{"globals": all_names, "locals": local_names, "__import__": self._import},
            **{self._look: self.look, self._touch: self.touch, self._hold: _Held, self._same: same_setattr},
            # looked up at each call: a probe replaces it by the function of another process
            "hash": lambda value, /: builtins.hash(value),
        }

    def _by_text(self) -> dict[str, Any]:
        """Return the built-in functions that run a text, by name."""
        frame_of = sys._getframe

        def run_text(source: Any, names: Any = None, own: Any = None, /) -> None:
            self._run(source, "exec", names, own, frame_of(1))

        def value_of(source: Any, names: Any = None, own: Any = None, /) -> Any:
            return self._run(source, "eval", names, own, frame_of(1))

        def compiled(source: Any, filename: Any, mode: str, flags: int = 0, *rest: Any, **more: Any) -> Any:
            if flags & ast.PyCF_ONLY_AST:
                return compile(source, filename, mode, flags)
            if str(filename).startswith(ROOTS):
                self._refuse("compiles code under a name that is not its own")
            return self._compile(source, filename, mode)

        def stop(*args: Any, **kwargs: Any) -> None:
            self._refuse("uses breakpoint, which calls whatever the environment names")

        return {"breakpoint": stop, "exec": run_text, "eval": value_of, "compile": compiled}

    def _run(self, source: Any, mode: str, names: Any, own: Any, frame: types.FrameType) -> Any:
        """Do the work of `exec` or `eval`, called in this frame. The code binds its names in `own` if it is given, else in `names`."""
        if isinstance(source, types.CodeType):
            if not self.came_in(source):
                self._refuse("runs code that was compiled elsewhere")
            code = source
        else:
            code = self._compile(source.strip() if mode == "eval" else source, "<string>", mode)
        if names is None:
            own = frame.f_locals if own is None else own
            names = frame.f_globals
        elif id(names) in self._copies:
            names = self._copies[id(names)][1]
        if own is None or own is names:
            is_module = names is frame.f_globals
            return self._execute(code, names) if is_module else self._execute_beside(code, names)
        scope = {**names, **own}
        found = self._execute_beside(code, scope)
        own.update({key: value for key, value in scope.items() if names.get(key) is not value})
        return found

    def _import(
        self, name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> Any:
        """Do the work of `__import__`. The parameters have the same names."""
        if is_below(name, _CLOSED):
            self._refuse(f"imports {name}")
        module = __import__(name, globals, locals, fromlist, level)
        if fromlist and "*" in fromlist and not is_below(module.__name__, ("hwfsdp",)):
            return self._open_part(module)
        for each in fromlist or ():
            wanted = _public(module) if each == "*" else [each]
            for attribute in wanted:
                if hasattr(module, attribute):
                    self.look(module, attribute)
        return module

    def _open_part(self, module: types.ModuleType) -> types.ModuleType:
        """Return a module with the names that `from module import *` binds: all except closed ones."""
        self._refuse_if(self._closed_module(module))
        found = types.ModuleType(module.__name__)
        for name in _public(module):
            if name not in _WORDS and not self._closed_as(module, value := getattr(module, name)):
                setattr(found, name, value)
        setattr(found, "__all__", [name for name in vars(found) if name in _public(module)])
        return found


class _Marked(ast.NodeTransformer):
    """Replace each attribute access by a checked one: `look(value, "name")`, or `touch(value, "name", sets).name`.

    Annotations that Python keeps as text stay unchanged, because Python makes this text from the tree. The class in a pattern
    also stays unchanged: Python allows only dotted names there, and the code cannot get hold of that class. A value in a
    pattern has to be an attribute: `case Color.RED` becomes `case hold(look(Color, "RED")).value`.
    """

    def __init__(self, names: tuple[str, str, str], tree: ast.AST, refuse: Refuse) -> None:
        self._names, self._refuse = names, refuse
        body = tree.body if isinstance(tree, ast.Module | ast.Interactive) else []
        imports = [node for node in body if isinstance(node, ast.ImportFrom)]
        future = [alias.name for node in imports if node.module == "__future__" for alias in node.names]
        self._as_text = "annotations" in future

    def visit(self, node: ast.AST) -> Any:
        kept: dict[str, ast.expr] = {}
        if self._as_text and isinstance(node, _ANNOTATED):
            kept = {name: getattr(node, name) for name in _ANNOTATIONS if getattr(node, name, None)}
        for name, annotation in kept.items():
            setattr(node, name, _at(annotation, ast.Constant(None)))
        found = super().visit(node)
        for name, annotation in kept.items():
            setattr(node, name, annotation)
        return found

    def visit_MatchClass(self, node: ast.MatchClass) -> ast.AST:
        """Refuse dangerous names in a pattern, because a pattern reads attributes without a check."""
        told = {n for m, module in list(sys.modules.items()) if m[:6] == "hwfsdp" for n in vars(module)}
        for name in node.kwd_attrs:
            if name.startswith("_") or name in told | _WORDS | ONE_BY_ONE:
                self._refuse(f"matches {name}")
        if node.patterns and not (isinstance(node.cls, ast.Name) and node.cls.id in vars(builtins)):
            self._refuse("matches attributes by their position (name them, as in `case Pair(left=1)`)")
        node.patterns = [self.visit(each) for each in node.patterns]
        node.kwd_patterns = [self.visit(each) for each in node.kwd_patterns]
        return node

    def visit_MatchValue(self, node: ast.MatchValue) -> ast.AST:
        node.value = self._held(node.value)
        return node

    def visit_MatchMapping(self, node: ast.MatchMapping) -> ast.AST:
        node.keys = [self._held(key) for key in node.keys]
        node.patterns = [self.visit(each) for each in node.patterns]
        return node

    def _held(self, value: ast.expr) -> ast.expr:
        """Return a value of a pattern. If it is a dotted name, look it up first."""
        if not isinstance(value, ast.Attribute):
            return value
        hold = _at(value, ast.Name(self._names[2], ast.Load()))
        held = _at(value, ast.Call(hold, [self.visit(value)], []))
        found: ast.expr = _at(value, ast.Attribute(held, "value", ast.Load()))
        return found

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        value, reads = node.value, isinstance(node.ctx, ast.Load)
        name = _at(value, ast.Constant(node.attr))
        mangled = node.attr.startswith("__") and not node.attr.endswith("__")
        if reads and not mangled:
            look = _at(value, ast.Name(self._names[0], ast.Load()))
            found: ast.expr = _at(node, ast.Call(look, [value, name], []))
            if (last := node.end_lineno) and last > node.lineno:  # Python reports the line of the name
                found.lineno, found.col_offset = last, (node.end_col_offset or 0) - len(node.attr.encode())
            return found
        touch = _at(value, ast.Name(self._names[1], ast.Load()))
        node.value = _at(value, ast.Call(touch, [value, name, _at(value, ast.Constant(not reads))], []))
        return node


def _at(place: Any, node: Any) -> Any:
    """Return a new node with the location of another one. Python needs the location of each node."""
    node.lineno, node.col_offset = place.lineno, place.col_offset
    node.end_lineno, node.end_col_offset = place.end_lineno, place.end_col_offset
    return node


class _Held(NamedTuple):
    """A holder of a value, so that a pattern can read the value as an attribute."""

    value: Any


def _text(name: Any) -> str:
    """Return the name of an attribute as a plain `str`, which cannot change between the check and the use."""
    if not issubclass(type(name), str):
        raise TypeError(f"attribute name must be string, not '{type(name).__name__}'")
    return str(name)


def _meant(value: Any) -> Any:
    """Return the object that holds the attributes: the one behind `super()` or behind a weak proxy."""
    if type(value) is super:
        return super.__getattribute__(value, "__self__")
    return value.__repr__.__self__ if type(value) in _STANDS_FOR else value


def _may_hold_spies(module: types.ModuleType, home: str) -> bool:
    """True if the package may have put an object from `home` into this module of others, such as torch or `os`."""
    name = module.__name__
    return is_below(name, ("torch",)) or (is_below(home, ("hwfsdp",)) and not is_below(name, ("hwfsdp",)))


def _public(module: Any) -> list[str]:
    return list(getattr(module, "__all__", None) or [n for n in vars(module) if n[:1] != "_"])


def _closed_objects() -> Iterator[tuple[str, Any]]:
    """Yield each object that is closed by name, with its name, wherever a learner finds it. Names that hold None are left out."""
    for module_name, names in NAMES.items():
        module = sys.modules.get(module_name) or importlib.import_module(module_name)
        for name in names:
            if getattr(module, name, None) is not None:
                yield f"{module_name}.{name}", getattr(module, name)
