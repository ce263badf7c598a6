"""What a student's file may say: one scan of its syntax tree, before any of it runs. `rules.toml` has the words.

    imports            only modules and names that an exercise may need
    attributes         no names with `__` besides ordinary ones, no private names of other code, no frames, no ready-made FSDP
    texts              names in texts count as attributes: `getattr`, `attrgetter` and others take names as texts
    built-ins          no exec, eval, open …; of imported things, `getattr` and `vars` read only names that stand there as a text
    stores             none on imported things: a file changes its own objects, and the model that it gets
    own names          a name that the file gives to its own functions and attributes is its own, if it is private or an ordinary word

A scan of a text cannot be complete: a name that is put together while the file runs shows nothing. It says early, and with a line, what
no answer needs. The operating system is the wall (`walls`), and docs/grading.md says what a determined student could still do.
"""

from __future__ import annotations

import ast
import os
import re
import stat
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from hwfsdp.course.findings import Finding, one_line

LARGEST = 1 << 20  # bytes of the largest file that is read
NOT_PYTHON = (SyntaxError, ValueError, RecursionError, MemoryError)  # errors of the parser
READY_MADE = ("torch.distributed", "torch.nn", "hwfsdp")  # what a student writes is there already
_WORDS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
OPEN, CLOSED, IMPORTED, OF_TORCH, NEVER, WORDS, DUNDER, PRIVATE, BUILT_IN, BY_NAME = (
    frozenset(_WORDS[name].split())
    for name in "open closed imported of_torch never words dunder private built_in by_name".split()
)
NO_TERMINAL = ", but a rank has no terminal. Take it out, or debug with: hwfsdp train --ranks 1"
ORDINARY = (NEVER & WORDS) - {"builtins"}  # names that a student may give to something else


class Use(NamedTuple):
    """A use of something that no answer needs: a description, its line, and the misconception behind it."""

    what: str
    line: int
    kind: str = "blocked"


def read(path: Path, may: Iterable[str] = ()) -> tuple[str, Finding | None]:
    """Return the text of a student's file, and why it must not run; None if it may.

    Args:
        may: modules, names and built-ins that the exercise opens, besides the usual ones.

    Raises:
        FileNotFoundError: there is no file.
    """
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        return "", Finding("not-read", f"{path.name} is not a plain file.")
    if status.st_size > LARGEST:
        return "", Finding("not-read", f"{path.name} has more than {LARGEST:,} bytes.")
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors on Windows begin a file with a mark
        # under a file's own name, an error would quote the file of this name in the current folder: the starter
        compile(text, f"<{path.name}>", "exec", dont_inherit=True)
        use = refused(text, may)
    except UnicodeDecodeError as error:
        return "", Finding(
            "not-read", f"{path.name}: byte {error.start:,} is not UTF-8. Save the file as UTF-8."
        )
    except NOT_PYTHON as error:
        line = getattr(error, "lineno", None)
        where = f"line {line}: `{one_line(getattr(error, 'text', '') or '', 100)}`: " if line else ""
        what = getattr(error, "msg", None) or one_line(str(error), 200) or "nested too deeply"
        return "", Finding("not-python", f"{path.name}, {where}{what}.")
    except OSError as error:
        return "", Finding("not-read", f"{path.name} cannot be read: {error.strerror}.")
    return text, Finding(use.kind, f"{path.name}, line {use.line}: {use.what}.") if use else None


def refused(text: str, may: Iterable[str] = ()) -> Use | None:
    """Return the first use of something that no answer needs; None if there is none. The text must be valid Python."""
    return min(_Scan(ast.parse(text), frozenset(may)).uses(), key=lambda use: use.line, default=None)


class _Scan:
    """The nodes of a file.

    Attributes:
        imported: names in the file for imported things, and for what is assigned from them; with their whole names.
        own: names that the file itself gives to functions, classes and variables. stored: names of attributes that it writes.
    """

    def __init__(self, tree: ast.Module, may: frozenset[str]) -> None:
        self.nodes, self.may = list(ast.walk(tree)), may
        self.imported, self.own, self.stored = dict[str, str](), set[str](), set[str]()
        for node in self.nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                self.imported |= dict(_names_of(node))
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                self.own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.own.add(node.id)
        for node in self.nodes:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if whole := self.dotted(getattr(node, "value", None)):
                self.imported |= {each.id: whole for each in targets if isinstance(each, ast.Name)}
        for node in self.nodes:
            if isinstance(node, ast.arg):  # in that function, the name stands for something else
                self.imported.pop(node.arg, None)
        for node in self.nodes:
            if (found := _store(node)) and not self.dotted(found.of):
                self.stored.add(found.name)
        self.called = {id(node.func): node for node in self.nodes if isinstance(node, ast.Call)}

    def uses(self) -> Iterator[Use]:
        for node in self.nodes:
            line, what = getattr(node, "lineno", 0), ""
            for verb, whole in self.named(node):
                if self.is_closed(whole):
                    yield Use(f"{verb} {whole}{_remark(whole)}", line, _kind(whole))
            if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
                if self.dotted(node) or self.dotted(node.value):
                    what = f"changes {ast.unparse(node)}, which is not its own"
                elif isinstance(node, ast.Attribute):
                    what = self.attribute(node.attr)
            elif isinstance(node, ast.Attribute):
                what = self.changed(node) or self.attribute(node.attr, node.value)
            elif isinstance(node, ast.MatchClass):  # reads attributes without an `ast.Attribute`
                what = next(filter(None, map(self.attribute, node.kwd_attrs)), "")
            elif isinstance(node, ast.Name):
                what = self.built_in(node)
            elif isinstance(node, ast.Constant | ast.BinOp | ast.JoinedStr):
                what = self.text(_text(node) or "")
            if what:
                yield Use(what, line)

    def named(self, node: ast.AST) -> Iterator[tuple[str, str]]:
        """Yield a verb and the whole name of each imported thing that the node names."""
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (("imports", whole) for _, whole in _names_of(node))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            if whole := self.dotted(node):
                yield "uses", whole

    def changed(self, node: ast.Attribute) -> str:
        """Say what a call of `__setattr__` changes, if it is an imported thing."""
        call = self.called.get(id(node)) if node.attr in ("__setattr__", "__delattr__") else None
        whole = self.dotted(call.args[0]) if call and call.args else ""
        return f"changes {whole}, which is not its own" if whole else ""

    def dotted(self, node: object) -> str:
        """Return the whole name of an imported thing, such as "torch.distributed.fsdp"; "" for other things."""
        names = list[str]()
        while isinstance(node, ast.Attribute):
            names.insert(0, node.attr)
            node = node.value
        root = self.imported.get(node.id, "") if isinstance(node, ast.Name) else ""
        return ".".join([root, *names]) if root else ""

    def is_closed(self, whole: str) -> bool:
        """True if a file may not use this imported thing. Modules on the way to something open are open."""
        _, *parts = whole.split(".")
        last = whole.rpartition(".")[2]
        if _is_below(whole, self.may) or (last in OF_TORCH and whole.startswith("torch.distributed.")):
            return False
        if not IMPORTED.isdisjoint(parts):  # torch.os
            return True
        is_open = _longest(whole, OPEN) > _longest(whole, CLOSED) and last != "*"
        leads_on = (
            any(name.startswith(f"{whole}.") for name in OPEN | self.may) or whole == "torch.distributed.fsdp"
        )
        return not is_open and not leads_on

    def attribute(self, name: str, of: ast.expr | None = None) -> str:
        """Say what is wrong with an attribute of this name; "" if nothing is."""
        own = self.own | self.stored
        is_own = name in ORDINARY & own and not self.dotted(of)
        if (name in NEVER and name not in self.may and not is_own) or (
            _is_dunder(name) and name not in DUNDER
        ):
            return f"uses {name}"
        is_self = of is not None and ast.unparse(of) in ("self", "cls", "super()")
        is_known = is_self or name in own | PRIVATE | DUNDER | OF_TORCH | self.may
        return f"uses {name}, a private name of other code" if name[:1] == "_" and not is_known else ""

    def text(self, text: str) -> str:
        """Say what is wrong with a text. A sentence may say anything; a name, or names with dots, may not lead to closed things."""
        names = (
            text.split(".")
            if re.fullmatch(r"[\w.]+", text)
            else re.findall(r"__\w+__", text) if len(text) < 100 else []
        )
        closed = NEVER | BUILT_IN if len(names) > 1 else (NEVER | BUILT_IN) - WORDS
        found = [
            name for name in names if name in closed - self.may or (_is_dunder(name) and name not in DUNDER)
        ]
        return f"uses the name {found[0]} in a text" if found else ""

    def built_in(self, node: ast.Name) -> str:
        """Say what is wrong with the use of a built-in; "" if nothing is, or the name is the file's own."""
        name, call = node.id, self.called.get(id(node))
        if name == "breakpoint":
            return f"uses breakpoint{NO_TERMINAL}"
        if name in ("__builtins__", "__loader__", "__spec__"):
            return f"uses {name}"
        if not isinstance(node.ctx, ast.Load) or name in {*self.own, *self.imported, *self.may}:
            return ""
        if name in BUILT_IN:
            return f"uses {name}, which no answer needs"
        if name not in BY_NAME:
            return ""
        if call is None:
            return f"hands on {name}"
        named = call.args[1] if len(call.args) > 1 else None
        text, whole = _text(named) or "", self.dotted(call.args[0]) if call.args else ""
        if not whole or name == "hasattr":
            return self.attribute(text) if "\0" not in text else ""
        if name in ("setattr", "delattr"):
            return f"changes {whole}, which is not its own"
        is_plain = isinstance(named, ast.Constant) and not self.is_closed(f"{whole}.{text}")
        return self.attribute(text) if is_plain else f"reads {whole} by a name that is put together"


class _Store(NamedTuple):
    """An attribute that a file writes, and the expression that it belongs to."""

    of: ast.expr
    name: str


def _store(node: ast.AST) -> _Store | None:
    """Return the attribute that this node writes, by its name or by a text; None if it writes none."""
    match node:
        case ast.Attribute(value=of, attr=name, ctx=ast.Store()):
            return _Store(of, name)
        case ast.Call(func=ast.Name(id="setattr"), args=[of, ast.Constant(value=str(name)), *_]):
            return _Store(of, name)
        case ast.Call(
            func=ast.Attribute(value=ast.Attribute(value=of, attr="__dict__"), attr="setdefault"),
            args=[ast.Constant(value=str(name)), *_],
        ):
            return _Store(of, name)
        case ast.Subscript(
            value=ast.Attribute(value=of, attr="__dict__"),
            slice=ast.Constant(value=str(name)),
            ctx=ast.Store(),
        ):
            return _Store(of, name)
    return None


def _names_of(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """Yield each name that an import binds, and the whole name of what it stands for."""
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            yield alias.asname or alias.name, f"{'.' * node.level}{node.module or ''}.{alias.name}"
        else:
            yield alias.asname or alias.name, alias.name
            if not alias.asname:
                yield (root := alias.name.partition(".")[0]), root


def _text(node: object) -> str | None:
    """Return the text of a constant, also if it is put together from constants; an f-string has zeros for its values."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(each) or "\0" for each in node.values)
    if isinstance(node, ast.FormattedValue):
        return _text(node.value)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _text(node.left), _text(node.right)
        return left + right if left is not None and right is not None else None
    return None


def _remark(whole: str) -> str:
    """Return what else to say of a closed name: about a debugger, or a module of the student's own."""
    root = whole.partition(".")[0]
    if root == "pdb":
        return NO_TERMINAL
    is_ours = root in ("torch", "numpy", "hwfsdp") or root in sys.stdlib_module_names
    return (
        ""
        if is_ours
        else ", but there are only Python, torch, numpy and hwfsdp. Put your own functions into this file"
    )


def _kind(whole: str) -> str:
    return "not-alone" if _is_below(whole, READY_MADE) else "blocked"


def _is_dunder(name: str) -> bool:
    return len(name) > 4 and name[:2] == "__" == name[-2:]


def _longest(name: str, roots: Iterable[str]) -> int:
    """Return the length of the longest of these names that this one is below; 0 if there is none."""
    return max((len(root) for root in roots if _is_below(name, [root])), default=0)


def _is_below(name: str, roots: Iterable[str]) -> bool:
    return any(name == root or name.startswith(f"{root}.") for root in roots)
