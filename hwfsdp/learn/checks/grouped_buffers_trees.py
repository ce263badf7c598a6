"""11, what a group is made of: random trees of modules, and what the two functions that walk them find.

Parts of a tree are marked as sharded already, without sharding them: what is below them must be left alone. Outside of
these, parameters are tied across modules and within one, modules are registered at two places, and some parameters are
frozen or to be ignored.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from hwfsdp import claim, hooks
from hwfsdp.learn.run import Run
from hwfsdp.learn.verdict import Finding

CASES = 12
Row = list[Any]


class Tree(NamedTuple):
    """A model, and what a call of `fully_shard` on `modules` is told.

    Attributes:
        root: of all modules. modules: what the call is given, the root or several below it.
        sharded: names of modules that have a state. ignored: parameters to leave as they are.
    """

    root: nn.Module
    modules: Sequence[nn.Module]
    sharded: set[str]
    ignored: set[nn.Parameter]


class Node(nn.Module):
    """A module whose parameters and children are given one by one."""


def tree(seed: int, number: int) -> Tree:
    """The same on every rank. Of every three, one has a list of modules."""
    draw = random.Random(1000 * seed + number)
    root: nn.Module = _grown(draw, 0)
    modules: list[nn.Module] = [root]
    if number % 3 == 2:
        root = Node()
        modules = [_grown(draw, 1) for _ in range(3)]
        for index, module in enumerate(modules):
            root.add_module(f"part{index}", module)
    names = {name for name, module in root.named_modules() if name and module not in modules}
    sharded = set(draw.sample(sorted(names), min(len(names) // 4 + 1, len(names))))
    mine = [module for name, module in root.named_modules() if not _below(name, sharded)]
    _tie(draw, [module for module in mine if module is not root or root in modules])
    params = [param for module in mine for param in module.parameters(recurse=False)]
    for param in draw.sample(params, len(params) // 4):
        param.requires_grad_(False)
    return Tree(root, modules, sharded, set(draw.sample(params, len(params) // 5)))


def _grown(draw: random.Random, depth: int) -> Node:
    node = Node()
    parts = ["weight", "bias", "scale"][: draw.randint(0 if depth else 1, 3)]
    children = [f"child{i}" for i in range(draw.randint(1, 3) if depth < 2 else draw.randint(0, 1))]
    for name in parts:
        node.register_parameter(name, nn.Parameter(torch.zeros(draw.randint(1, 5), 2)))
    for name in draw.sample(children, len(children)) if depth < 3 else []:
        node.add_module(name, _grown(draw, depth + 1))
    return node


def _tie(draw: random.Random, modules: Sequence[nn.Module]) -> None:
    """Registers some parameters, and one module, a second time, in any order."""
    owners = [module for module in modules if list(module.parameters(recurse=False))]
    for number in range(min(3, len(owners))):
        param = draw.choice(list(draw.choice(owners).parameters(recurse=False)))
        draw.choice(modules).register_parameter(f"tied{number}", param)
    leaves = [module for module in modules if not list(module.children())]
    if leaves and len(modules) > 2:
        leaf = draw.choice(leaves)
        draw.choice([module for module in modules if module is not leaf]).add_module("again", leaf)


def _below(name: str, sharded: set[str]) -> bool:
    """Whether a module of this name is one of those, or in one."""
    return any(name == each or name.startswith(each + ".") for each in sharded)


# --- On the rank -------------------------------------------------------------------------------------------


def _names(root: nn.Module) -> tuple[dict[nn.Module, str], dict[nn.Parameter, str]]:
    """The first name of every module and parameter."""
    return {m: name for name, m in root.named_modules()}, {p: name for name, p in root.named_parameters()}


def _each(seed: int, look: Callable[[Tree], list[Row]]) -> list[list[Row]]:
    found = []
    for number in range(CASES):
        made = tree(seed, number)
        for name in made.sharded:
            hooks.attach_state(made.root.get_submodule(name), cast(Any, "sharded before"))
        found.append(look(made))
    return found


def found_modules(seed: int) -> list[list[Row]]:
    """Of every tree, per module: the prefix, and its name in the whole."""

    def look(made: Tree) -> list[Row]:
        names = _names(made.root)[0]
        return [[prefix, names[module]] for prefix, module in claim.managed_modules(list(made.modules))]

    return _each(seed, look)


def found_parameters(seed: int) -> list[list[Row]]:
    """Of every tree, per parameter: the fqn, its first name in the whole, and its places."""

    def look(made: Tree) -> list[Row]:
        modules, params = _names(made.root)
        found = claim.parameters_to_claim(list(made.modules), set(made.ignored))
        return [
            [fqn, params[param], [[modules[slot.module], slot.name] for slot in slots]]
            for param, fqn, slots in found
        ]

    return _each(seed, look)


# --- The oracle --------------------------------------------------------------------------------------------


def expected_modules(made: Tree) -> Iterator[tuple[str, nn.Module]]:
    """By torch's own walk over all modules, without those whose name is below a sharded one."""
    names, seen = _names(made.root)[0], set[nn.Module]()
    for start in made.modules:
        above = names[start] + "." if names[start] else ""
        for name, module in start.named_modules():
            if module not in seen and not _below(above + name, made.sharded):
                seen.add(module)
                yield name + "." if name else "", module


def expected_parameters(made: Tree) -> list[Row]:
    modules, params = _names(made.root)
    rows: dict[nn.Parameter, Row] = {}
    for prefix, module in expected_modules(made):
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if param not in made.ignored:
                row = rows.setdefault(param, [prefix + name, params[param], []])
                row[2].append([modules[module], name])
    return list(rows.values())


# --- Judges ------------------------------------------------------------------------------------------------


def compare_modules(run: Run, seed: int) -> None:
    for rank, of_rank in enumerate(run["modules"]):
        for number, rows in enumerate(of_rank):
            made = tree(seed, number)
            names = _names(made.root)[0]
            expected = [[prefix, names[module]] for prefix, module in expected_modules(made)]
            if rows != expected:
                raise _modules_finding(rows, expected, made, f"Model {number}, rank {rank}")


def _modules_finding(rows: list[Row], expected: list[Row], made: Tree, where: str) -> Finding:
    found, right = [name for _, name in rows], [name for _, name in expected]
    if extra := [name for name in found if name not in right]:
        kind = "has been sharded before" if extra[0] in made.sharded else "belongs to one that has"
        if not _below(extra[0], made.sharded):
            kind = "is not below the modules given"
        text = f"{where}: managed_modules gives {_quoted(extra[0])}, which {kind}."
        return Finding("claimed-twice", text, right, found)
    if missing := [name for name in right if name not in found]:
        text = f"{where}: managed_modules leaves out {_quoted(missing[0])}, which no other call has sharded."
        return Finding("left-out", text, right, found)
    if len(found) != len(right):
        twice = next(name for name in found if found.count(name) > 1)
        text = f"{where}: {_quoted(twice)} is registered at two places, and comes {found.count(twice)} times."
        return Finding("claimed-twice", text, right, found)
    if found != right:
        text = f"{where}: modules come in another order than in named_modules()."
        return Finding("wrong-order", text, right, found)
    at = next(i for i in range(len(rows)) if rows[i] != expected[i])
    text = f"{where}: the prefix of {_quoted(found[at])} is {rows[at][0]!r}; expected {expected[at][0]!r}."
    return Finding("wrong-name", text, expected[at][0], rows[at][0])


def compare_parameters(run: Run, seed: int) -> None:
    for rank, of_rank in enumerate(run["parameters"]):
        for number, rows in enumerate(of_rank):
            made = tree(seed, number)
            expected = expected_parameters(made)
            if rows != expected:
                raise _parameters_finding(rows, expected, made, f"Model {number}, rank {rank}")


def _parameters_finding(rows: list[Row], expected: list[Row], made: Tree, where: str) -> Finding:
    found, right = [row[1] for row in rows], [row[1] for row in expected]
    places = {row[1]: row[2] for row in expected}
    params = dict(made.root.named_parameters())
    for name in (name for name in found if found.count(name) > 1):
        text = f"{where}: {name} is tied, one object at {len(places.get(name, []))} places, and listed {found.count(name)} times."
        return Finding("untied", text, 1, found.count(name))
    if missing := [name for name in right if name not in found]:
        frozen = "" if params[missing[0]].requires_grad else " It is frozen; forward needs it all the same."
        return Finding("left-out", f"{where}: {missing[0]} is not claimed.{frozen}", right, found)
    for name in (name for name in found if name not in right):
        if params[name] in made.ignored:
            return Finding("not-ignored", f"{where}: {name} is to be ignored, and claimed.", right, found)
        return Finding(
            "claimed-twice", f"{where}: {name} is another call's, and claimed again.", right, found
        )
    if found != right:
        text = f"{where}: parameters come in another order than modules and names were registered in."
        return Finding("wrong-order", text, right, found)
    return _row_finding(next(pair for pair in zip(rows, expected, strict=True) if pair[0] != pair[1]), where)


def _row_finding(rows: tuple[Row, Row], where: str) -> Finding:
    """Of one parameter, found and expected."""
    (fqn, name, places), (right_fqn, _, right) = rows
    written, wanted = _placed(places), _placed(right)
    if fqn != right_fqn:
        return Finding("wrong-name", f"{where}: {name} is called {fqn!r}.", right_fqn, fqn)
    if any(place not in places for place in right):
        text = f"{where}: {name} is registered at {len(right)} places; of these, {len(places)} are listed."
        return Finding("untied", text, wanted, written)
    misconception = "wrong-order" if len(places) == len(right) else "wrong-value"
    return Finding(
        misconception, f"{where}: the places of {name} are not these, in this order.", wanted, written
    )


def _placed(places: Sequence[Sequence[str]]) -> str:
    return ", ".join(f"{module}.{name}" if module else name for module, name in places)


def _quoted(name: str) -> str:
    return f"module {name!r}" if name else "the root"
