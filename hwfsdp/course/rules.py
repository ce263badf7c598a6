"""Find forbidden code in the text of an answer before it runs: access to frames, memory and code of others.

A submission that names one of these doors, or an instrument, in plain words does not run. If a submission builds these words from parts,
the text shows nothing. Then `doors` applies the same rules when the code uses the name, and the guard watches, too.
"""

from __future__ import annotations

import ast
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from hwfsdp.course.verdict import Finding

MODULES = frozenset(  # doors to frames, memory and code of others, and to objects by a name built from parts
    """ctypes _ctypes gc inspect marshal signal _signal subprocess _posixsubprocess opcode dis faulthandler tracemalloc mmap
    pickletools _testcapi _testinternalcapi _thread code codeop builtins unittest pydoc pkgutil timeit doctest bdb pdb profile
    cProfile trace atexit asyncio concurrent multiprocessing pickle _pickle logging.config yaml importlib.metadata
    importlib.machinery importlib.util importlib.abc importlib._bootstrap importlib._bootstrap_external _frozen_importlib
    _frozen_importlib_external _imp imp zipimport runpy rlcompleter cgitb xmlrpc distutils setuptools cffi _cffi_backend
    numpy.ctypeslib numpy.f2py numpy.distutils torch.utils._python_dispatch torch.testing torch.package torch._C
    torch.fx torch.export torch.onnx torch.ao torch.quantization torch.hub torch.utils.cpp_extension torch._inductor""".split()
)
FRAMES = frozenset(
    """_getframe _current_frames _current_exceptions f_back f_globals f_locals f_builtins f_code f_trace tb_frame gi_frame
    cr_frame ag_frame settrace setprofile settrace_all_threads setprofile_all_threads""".split()
)
BOUND = frozenset(["__builtins__", "__match_args__"])  # names that Python also uses as variables
ATTRIBUTES = BOUND | frozenset(
    """addaudithook __globals__ __closure__ cell_contents __code__ co_code co_consts __subclasses__ CodeType FunctionType
    get_objects get_referrers get_referents __getattribute__ __setattr__ __delattr__ __wrapped__ __self__ __func__ __defaults__
    __kwdefaults__ __reduce__ __reduce_ex__ __loader__ __spec__ load_library from_file _convert_
    c10d c10d_functional _c10d_functional _c10d_functional_autograd""".split()  # torch's operators, which bypass its functions
)
NAMES = {  # closed names in open modules
    "builtins": tuple(
        "getattr setattr delattr vars globals locals exec eval compile __import__ breakpoint".split()
    ),
    "importlib": ("reload",),
    "sys": ("modules", "meta_path", "path_hooks", "path_importer_cache", "breakpointhook"),
    "operator": ("attrgetter", "methodcaller"),
    "string": ("Formatter",),
    "typing": ("get_type_hints", "ForwardRef"),
    "threading": ("Thread", "Timer"),
    "hwfsdp.core.streams": ("backend", "_backends"),
    "hwfsdp.core.observer": ("put",),
    "hwfsdp.compat": ("unseen_by_modes", "fake_tensors", "fake_process_group", "around_shape_propagation"),
}
ONE_BY_ONE = {name for names in NAMES.values() for name in names}
# locks stay open, although `_thread` is closed
LOCKS = frozenset(f"_thread.{name}" for name in ("allocate_lock", "lock", "RLock", "_local", "get_ident"))
# modules that look up or set very many names: no caller chooses the names in torch's modules, and `doors` checks each name itself
BUSY = frozenset(["torch._compile", "torch._subclasses.fake_tensor", "hwfsdp.course.doors"])
STREAMS = "hwfsdp.core.streams"
INSTRUMENTS = frozenset(  # modules that record what a learner's code did
    f"hwfsdp.{name}"
    for name in ("observe", "core.observer", "comm.history", "comm.divergence", "virtual", "launcher")
)
READY_MADE = ("torch.distributed.fsdp", "torch.distributed._composable", "torch.nn.parallel")
POLICIES = ("MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy")  # torch's arguments, open
# also torch's, and open: records, and the function that finds where parameters are registered
RECORDS = ("ParamModuleInfo", "FSDPMeshInfo", "_get_param_module_infos")
CLOSED = MODULES | INSTRUMENTS | {"hwfsdp.course"}  # cannot be imported
HOMEWORK_MAY = ("hwfsdp", "hwfsdp.streams", "hwfsdp.collectives", "hwfsdp.core.streams")


class Use(NamedTuple):
    """A use of something that no answer needs: a description, its line, and the misconception behind it."""

    what: str
    line: int
    kind: str = "blocked"


def check_rules(path: str | Path, text: str) -> None:
    """Check the text of a file, which must be valid Python.

    Raises:
        Finding: the file uses something that no answer needs. Nothing of the exercise counts.
    """
    if use := find_digging(text):
        raise Finding("blocked", f"{Path(path).name}, line {use.line}, {use.what}.")


def find_digging(text: str) -> Use | None:
    """Return the first use of something that no answer needs; None if there is none. The text must be valid Python."""
    tree = answer_questions(ast.parse(text), "answer")
    found = [use for node in ast.walk(tree) if (use := _use_of(node)) is not None]
    return min(found, key=lambda use: use.line, default=None)


def is_below(name: str, roots: tuple[str, ...] | frozenset[str]) -> bool:
    """True if a dotted name is one of these roots, or below one of them. Long collections should be frozensets, which keep their hash."""
    # a learner's own kind of str may say that it equals another, so it must not become a key
    return _is_below(name, roots) if type(name) is str else _is_below.__wrapped__(name, roots)


@lru_cache(maxsize=4096)
def _is_below(name: str, roots: tuple[str, ...] | frozenset[str]) -> bool:
    return any(name == root or name.startswith(f"{root}.") for root in roots)


def is_stream(kind: type) -> bool:
    """True if this is the class of a stream, or of a stream's event, on any device."""
    streams = [each.__name__ for each in kind.__mro__ if each.__module__ == STREAMS]
    return "Stream" in streams or "StreamEvent" in streams


# --- A question that an answer may ask ----------------------------------------------------------------------

# The homework's skeleton was published with a function that asks whether a module has a `__setattr__` of its own:
#
#     getattr(module.__setattr__, "__func__", None) is nn.Module.__setattr__
#
# The answer is a bool, and the methods do not leave the comparison. So it is open, although the names in it are closed.


def answer_questions(tree: ast.AST, function: str) -> ast.AST:
    """Replace each such comparison by a call of a function of this name, which is `same_setattr`."""
    answered: ast.AST = _Answered(function).visit(tree)
    return answered


def same_setattr(a: object, a_function: bool, b: object, b_function: bool) -> bool:
    """True if `a.__setattr__` is `b.__setattr__`. The flags ask for the function of a method (`__func__`)."""
    first, second = (getattr(value, "__setattr__") for value in (a, b))
    first = getattr(first, "__func__", None) if a_function else first
    return first is (getattr(second, "__func__", None) if b_function else second)


class _Answered(ast.NodeTransformer):
    def __init__(self, function: str) -> None:
        self._function = function

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        sides = [_setattr_of(each) for each in (node.left, *node.comparators)]
        if None in sides or len(sides) > 2 or not isinstance(node.ops[0], ast.Is | ast.IsNot):
            return node
        asked = ast.Call(
            ast.Name(self._function, ast.Load()), [part for side in sides for part in side or ()], []
        )
        found = asked if isinstance(node.ops[0], ast.Is) else ast.UnaryOp(ast.Not(), asked)
        return ast.fix_missing_locations(ast.copy_location(found, node))


def _setattr_of(side: ast.expr) -> tuple[ast.expr, ast.Constant] | None:
    """Return the object whose `__setattr__` is compared, and whether `__func__` of it is."""
    of_function = True
    if isinstance(side, ast.Attribute) and side.attr == "__func__":
        side = side.value
    elif isinstance(side, ast.Call) and ast.unparse(side).endswith((", '__func__', None)", ", '__func__')")):
        if ast.unparse(side.func) != "getattr" or len(side.args) < 2:
            return None
        side = side.args[0]
    else:
        of_function = False
    if not isinstance(side, ast.Attribute) or side.attr != "__setattr__":
        return None
    return side.value, ast.Constant(of_function)


# --- Uses --------------------------------------------------------------------------------------------------


def _use_of(node: ast.AST) -> Use | None:
    line = getattr(node, "lineno", 0)
    if isinstance(node, ast.Import | ast.ImportFrom):
        bad = next((name for name in _imported(node) if _is_closed(name)), None)
        return Use(f"imports {bad}", line) if bad else None
    if isinstance(node, ast.MatchClass):  # reads attributes without an `ast.Attribute`
        bad = next((n for n in node.kwd_attrs if n.startswith("_") or n in FRAMES or n in ONE_BY_ONE), None)
        return Use(f"uses {bad}", line) if bad else None
    if isinstance(node, ast.Attribute) and node.attr in FRAMES | ATTRIBUTES:
        return Use(f"uses {node.attr}", line)
    if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch._C":
        return Use("uses torch._C", line)
    return Use(f"uses {node.id}", line) if isinstance(node, ast.Name) and node.id in BOUND else None


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Return the imported names, each with its module."""
    names = [alias.name for alias in node.names]
    if isinstance(node, ast.Import):
        return names
    module = node.module or ""
    return [module, *(f"{module}.{name}" for name in names)]


def _is_closed(name: str) -> bool:
    module, _, last = name.rpartition(".")
    return is_below(name, CLOSED) or last in FRAMES | ATTRIBUTES or last in NAMES.get(module, ())
