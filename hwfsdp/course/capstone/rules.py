"""The rules for a file that stands by itself, my_fsdp.py or the homework: what it may use, and what it must define.

The rules are checked on the text, before any of it runs.

From hwfsdp, the file may use `hwfsdp.streams` and `hwfsdp.collectives`, so that the virtual clock and the instruments see its
actions. It may not use names that these two import from the rest of hwfsdp. It has its own sharding, schedule and bookkeeping:
it uses neither hwfsdp's nor torch's FSDP for them.
"""

from __future__ import annotations

import ast
import symtable
from collections.abc import Iterator, Mapping, Sequence

from hwfsdp.course import holes, rules
from hwfsdp.course.manifest import module_source
from hwfsdp.course.rules import READY_MADE, RECORDS, Use
from hwfsdp.course.submission import NOT_PYTHON, Source, not_python, parameters
from hwfsdp.course.verdict import Finding

ALLOWED = ("hwfsdp.streams", "hwfsdp.collectives")
ALONE = "not-alone"  # the misconception behind imports of the package, and of torch's FSDP
FROM_READY_MADE = {"MixedPrecisionPolicy", *RECORDS}  # allowed: the policy is an argument
ROUND_ABOUT = set(
    "importlib __import__ imp runpy pkgutil exec eval compile open io builtins __builtins__ globals".split()
)
OF_SYS = ("sys.modules", "sys.meta_path", "sys.path", "sys.path_hooks")
NEEDED = {  # functions by name, with the arguments that the grader or the homework passes
    "fully_shard": ("module", "module_fqn", "comm_ctx", "mesh", "reshard_after_forward", "mp_policy"),
    "FSDPCommContext.__init__": ("self", "device_type"),
    "FSDPParam.__init__": (*("self", "param", "module_info", "param_fqn", "mesh", "device", "mp_policy"),),
    "pre_forward": ("module",),
    "post_forward": ("module",),
    "pre_backward": ("module",),
    "post_backward": ("module",),
    **{
        f"FSDPModule.{name}": ("self",)
        for name in ("unshard", "wait_for_unshard", "reshard", "record_post_forward", "_backward_prefetch")
    },
}


def check_rules(source: Source, needed: Mapping[str, Sequence[str]] = NEEDED) -> None:
    """Read the file as Python would.

    Args:
        needed: functions that it has to define, with the arguments that they need.

    Raises:
        Finding: the file is not Python, lacks a definition, or uses something forbidden.
    """
    assert source.text is not None, "a file that is there"
    name = source.path.name
    try:
        tree = ast.parse(source.text)
        compile(source.text, name, "exec", dont_inherit=True)
        defined = dict(holes.definitions(source.text))
    except NOT_PYTHON as error:
        raise not_python(source, error) from None
    for function, arguments in needed.items():
        if function not in defined:
            raise Finding("missing", f"{name} does not define {function}.", function, "nothing")
        given = [argument for argument, _ in parameters(defined[function])]
        if lacking := [a for a in arguments if a not in given and not any("*" in other for other in given)]:
            message = f"{name}: {function} has no argument {lacking[0]!r}."
            raise Finding("wrong-signature", message, ", ".join(arguments), ", ".join(given))
    if use := next(forbidden_uses(tree, source.text), None):
        message = f"{name}, line {use.line}: {use.what}."
        allowed = " and ".join(ALLOWED) if use.kind == ALONE else None
        raise Finding(use.kind, message, allowed, use.what if allowed else None)
    rules.check_rules(name, source.text)


def forbidden_uses(tree: ast.Module, text: str) -> Iterator[Use]:
    """Yield the forbidden uses in the file, in no particular order."""
    aliases: dict[str, str] = {}  # names in the file for the two modules, or for hwfsdp itself
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _imported(alias.name, f"import {alias.name}", node.lineno)
                if alias.name.partition(".")[0] == "hwfsdp":
                    aliases[alias.asname or "hwfsdp"] = alias.name if alias.asname else "hwfsdp"
        elif isinstance(node, ast.ImportFrom):
            module = f"{'.' * node.level}{node.module or ''}"
            for alias in node.names:
                statement = f"from {module} import {alias.name}"
                yield from _imported(f"{module}.{alias.name}", statement, node.lineno)
                if node.module == "hwfsdp":
                    aliases[alias.asname or alias.name] = f"hwfsdp.{alias.name}"
    yield from _built_in(symtable.symtable(text, "the file", "exec"), tree)
    plain = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call) and _names_plainly(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == "getattr" and id(node) not in plain:
            yield Use("getattr of a name that is put together", node.lineno)
        elif isinstance(node, ast.Attribute):
            yield from _attribute(ast.unparse(node), aliases, node.lineno)


def _built_in(scope: symtable.SymbolTable, tree: ast.Module) -> Iterator[Use]:
    """Yield names that mean Python's built-ins here. A variable of a function may be called `open`."""
    for symbol in scope.get_symbols():
        own = scope.get_type() == "function" and not symbol.is_global()
        if symbol.get_name() in ROUND_ABOUT and symbol.is_referenced() and not own:
            names = (
                node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == symbol.get_name()
            )
            line = min((node.lineno for node in names if node.lineno >= scope.get_lineno()), default=0)
            yield Use(f"{symbol.get_name()}, which gets at anything", line)
    for inner in scope.get_children():
        yield from _built_in(inner, tree)


def _names_plainly(call: ast.Call) -> bool:
    """True if the second argument, an attribute's name, is a text or a variable."""
    return len(call.args) > 1 and isinstance(call.args[1], ast.Constant | ast.Name | ast.Attribute)


def _imported(dotted: str, statement: str, line: int) -> Iterator[Use]:
    """Yield the statement if it may not import this name, which has its module before it."""
    if dotted.startswith(".") or _is_of_others(dotted):
        yield Use(statement, line, ALONE)
    elif dotted in {*ROUND_ABOUT, *OF_SYS} or dotted.rpartition(".")[0] in ROUND_ABOUT:
        yield Use(statement, line)


def _attribute(dotted: str, aliases: dict[str, str], line: int) -> Iterator[Use]:
    """Yield forbidden attributes: `streams.compat`, `hwfsdp.core`, `torch.distributed.fsdp.fully_shard`, `sys.modules`."""
    first, _, rest = dotted.partition(".")
    whole = f"{aliases[first]}.{rest}" if first in aliases else dotted
    if whole in OF_SYS or {"__globals__", "__builtins__"} & set(whole.split(".")):
        yield Use(f"{dotted}, which gets at anything", line)
    elif whole not in READY_MADE and _is_of_others(whole):  # the module alone leads to its policies, too
        yield Use(dotted, line, ALONE)


def _is_of_others(dotted: str) -> bool:
    """True if a name is the package's, or of torch's FSDP, and is not open to the file."""
    root, *names = dotted.split(".")
    if root == "hwfsdp":
        module = ".".join([root, *names[:1]])
        return module not in ALLOWED or not _borrowed(module).isdisjoint(names[1:2])
    return dotted.startswith(READY_MADE) and names[-1] not in FROM_READY_MADE


def _borrowed(module: str) -> set[str]:
    """Return names that a module imports from other modules of the package. A name imported `as` itself counts as its own."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(module_source(module))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "hwfsdp":
            if node.module not in ALLOWED:
                found |= {a.asname or a.name for a in node.names if a.asname != a.name}
    return found
