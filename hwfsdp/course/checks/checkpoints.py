"""14: boxes against sets of indices, parts against torch.chunk, loads against the numbers that were saved, for all sixteen
pairs of world sizes; and every crash of a commit against the two checkpoints that may be found after it.
"""

from __future__ import annotations

import re
from math import prod
from typing import Any

import torch
from torch import Tensor

from hwfsdp.course.checks.checkpoints_pairs import (
    SAVED,
    TIED,
    Spread,
    coordinate,
    cut,
    more_spreads,
    probe_pairs,
    probe_parts,
    saved_parts,
    spread_of,
    spreads,
    values_of,
)
from hwfsdp.course.checks.checkpoints_runs import (
    WORLDS,
    Held,
    Parts,
    held,
    nested_parts,
    pairs_of_parts,
    probe_integers,
    tilings,
)
from hwfsdp.course.run import Ranks
from hwfsdp.course.verdict import Finding


def _text(part: Any) -> str:
    """A part as the package shows a Box."""
    if part is None:
        return "nothing"
    if isinstance(part, str):
        return part
    return f"[{', '.join(f'{a}:{a + n}' for a, n in zip(*part, strict=True))}]"


# --- Boxes -------------------------------------------------------------------------------------------------


def judge_boxes(ranks: Ranks, seed: int) -> None:
    """`intersection` and `within`."""
    run = ranks.run(probe_integers, 1, seed=seed)
    for (one, other), got in zip(pairs_of_parts(seed), run["shared"][0], strict=True):
        wanted = _common([*map(list, one)], [*map(list, other)])
        if got == wanted:
            continue
        message = (
            f"intersection of {_text(one)} and {_text(other)} is {_text(got)}, expected {_text(wanted)}."
        )
        raise Finding(_of_shared(got, wanted), message, _text(wanted), _text(got))
    for (outer, inner), got in zip(nested_parts(seed), run["within"][0], strict=True):
        wanted = [[a - b for a, b in zip(inner[0], outer[0], strict=True)], list(inner[1])]
        if got != wanted:
            shape_only = isinstance(got, list) and got[1] == wanted[1]
            message = (
                f"{_text(inner)} within {_text(outer)} is {_text(got)}, expected {_text(wanted)}: its offset counts from "
                "the first element of the outer box."
            )
            raise Finding("wrong-origin" if shape_only else "wrong-rows", message, _text(wanted), _text(got))


def _of_shared(got: Any, wanted: Any) -> str:
    if isinstance(got, str):
        return "wrong-value"
    if wanted is None:
        return "touching-not-shared"
    if got is not None and got[1] == wanted[1]:
        return "wrong-origin"
    return "wrong-rows"


# --- The whole ---------------------------------------------------------------------------------------------

FAULTS = {
    "missing": ("parts-missing", "elements are in no part"),
    "twice": ("parts-overlap", "a part is there twice"),
    "overlapping": ("parts-overlap", "two parts have elements in common"),
    "outside": ("past-the-end", "a part leaves the tensor"),
    "empty": ("empty-at-zero", "a part has no elements"),
    "dims": ("fault-missed", "a part has another number of dims than the tensor"),
    "differing": ("replicas-differ", "copies of a part have other bytes"),
}


def judge_whole(ranks: Ranks, seed: int) -> None:
    """`find_fault` and `_holders_of`."""
    run = ranks.run(probe_integers, 1, seed=seed)
    for case, got in zip(tilings(seed), run["faults"][0], strict=True):
        _compare_fault(case, got)
    for of_tensor, answer in zip(held(seed), run["holders"][0], strict=True):
        _compare_holders(of_tensor, answer)


def _compare_fault(case: Parts, got: str | None) -> None:
    shown = ", ".join(_text(part) if len(part[0]) == len(part[1]) else str(part) for part in case.parts[:8])
    where = f"find_fault of shape {list(case.shape)}, {len(case.parts)} parts ({shown or 'none'}"
    where += ", …)" if len(case.parts) > 8 else ")"
    if case.what == "whole" and got is not None:
        message = f"{where} says {got!r}; every element is in exactly one of them."
        raise Finding("good-parts-refused", message, "None", got)
    if case.what != "whole" and not got:
        misconception, why = FAULTS[case.what]
        raise Finding(misconception, f"{where} says {got!r}, but {why}.", "a fault", repr(got))


def _compare_holders(case: Held, answer: dict[str, Any]) -> None:
    shown = [None if part is None else _text(part) for part in case.parts]
    where = f"_holders_of of shape {list(case.shape)}, on ranks {', '.join(map(str, shown))}"
    if case.what != "whole":
        _compare_refusal(case, answer, where)
        return
    if "error" in answer:
        message = f"{where} raises {answer['error']}: {answer['message']}"
        misconception = "good-parts-refused" if answer["error"] == "UsageError" else "crashed"
        raise Finding(misconception, message, "the holders", answer["error"])
    wanted: list[list[Any]] = []
    for rank, part in enumerate(case.parts):
        plain = None if part is None else [list(part[0]), list(part[1])]
        known = next((entry for entry in wanted if entry[1] == plain), None)
        if known:
            known[2].append(rank)
        elif plain:
            wanted.append([list(case.path), plain, [rank]])
    got = answer["boxes"]
    if got == wanted:
        return
    table = "; ".join(f"{_text(box)}: ranks {of}" for _, box, of in got) or "nobody"
    expected = "; ".join(f"{_text(box)}: ranks {of}" for _, box, of in wanted)
    message = f"{where} gives {table}; expected {expected}."
    raise Finding(_of_holders(got, wanted), message, expected, table)


def _of_holders(got: list[Any], wanted: list[Any]) -> str:
    if sum(len(of) for *_, of in got) < sum(len(of) for *_, of in wanted):
        only_first = len(got) < len(wanted) and {rank for *_, of in got for rank in of} <= {0}
        return "rank-0-only" if only_first else "holders-lost"
    return "wrong-value"


def _compare_refusal(case: Held, answer: dict[str, Any], where: str) -> None:
    misconception, why = FAULTS[case.what]
    crc = f" with checksums {', '.join(f'{c or 0:08x}' for c in case.crc32)}" if any(case.crc32) else ""
    if "error" not in answer:
        raise Finding(misconception, f"{where}{crc}, raises nothing, but {why}.", "UsageError", "no error")
    if answer["error"] != "UsageError":
        message = f"{where}{crc}, raises {answer['error']}: {answer['message']}"
        raise Finding("crashed", message, "UsageError", answer["error"])
    sums = {c or 0 for c in case.crc32} if case.what == "differing" else set()
    key = f"state_dict['model']['layers'][{len(case.parts)}]['{case.path[-1]}']"
    named = sums & _numbers_in(answer["message"].removeprefix(key))
    if not answer["message"].startswith(key) or (sums and len(named) < 2):
        message = f"{where}{crc}: the error does not name what differs: {answer['message']}"
        expected = f"{key}, and two of {', '.join(f'{c:08x}' for c in sorted(sums))}" if sums else key
        raise Finding("not-named", message, expected, answer["message"])


def _numbers_in(text: str) -> set[int]:
    """What a text may name: each word of digits, read as a decimal number and as a hexadecimal one."""
    words = re.findall(r"\b(?:0x)?([0-9a-f]+)\b", text.lower())
    return {int(word, 16) for word in words} | {int(word) for word in words if word.isdecimal()}


# --- Parts of ranks ----------------------------------------------------------------------------------------


def judge_parts(ranks: Ranks, seed: int) -> None:
    """`box_of` on every mesh, against nested chunks of a tensor that holds its own indices."""
    run = ranks.run(probe_parts, 4, seed=seed)
    for world, rank, answers in _answers(run["parts"]):
        for name, spread in more_spreads(world).items():
            _compare_part(rank, answers, name, part_at(spread, rank) if rank < world else None, spread)
    for world, rank, answers in _answers(run["parts"]):
        for name, spread in spreads(seed, world).items():
            _compare_part(rank, answers, name, part_at(spread, rank) if rank < world else None, spread)
        plain: dict[str, tuple[tuple[int, ...], Any]] = {
            "plain": ((3, 2), [[0, 0], [3, 2]]),
            "one number": ((), [[], []]),
            "nothing": ((0, 2), None),
        }
        for name, (shape, wanted) in plain.items():
            _compare_part(rank, answers, name, wanted, Spread(shape, (1,), ()))


def _answers(parts: list[dict[str, Any]]) -> list[tuple[int, int, dict[str, Any]]]:
    """(world size, rank, what `box_of` said there)."""
    return [(world, rank, parts[rank][str(world)]) for world in WORLDS for rank in range(4)]


def part_at(spread: Spread, rank: int) -> list[list[int]] | None:
    """Offset and shape of what the rank has; None if it has nothing."""
    numbers = torch.arange(prod(spread.shape)).view(spread.shape)
    mine = cut(numbers, spread, coordinate(rank, spread.mesh))
    if not mine.numel():
        return None
    first = int(mine.flatten()[0])
    offset = []
    for n in reversed(spread.shape):
        offset.append(first % n)
        first //= n
    return [offset[::-1], list(mine.shape)]


def _compare_part(rank: int, answers: dict[str, Any], name: str, wanted: Any, spread: Spread) -> None:
    how = (
        f"mesh {spread.mesh}, {list(map(str, spread.placements))}" if spread.placements else "a plain tensor"
    )
    where = f"box_of, rank {rank}, {how}, shape {list(spread.shape)}"
    if name not in answers:
        raised = next(iter(answers.get("parts that raised", {}).values()), {"kind": "?", "message": "?"})
        raise Finding("crashed", f"{where}: it raises {raised['kind']}: {raised['message']}.")
    got = answers[name]
    if got == wanted:
        return
    message = f"{where}: {_text(got)}, expected {_text(wanted)}."
    raise Finding(_of_part(got, wanted, spread), message, _text(wanted), _text(got))


def _of_part(got: Any, wanted: Any, spread: Spread) -> str:
    if isinstance(got, str):
        return "wrong-value"
    if got is None:
        return "rank-0-only" if any(wanted[0]) else "wrong-rows"
    if wanted is None:
        return "empty-at-zero" if not prod(got[1]) else "padding-leaked"
    if got[1] == list(spread.shape):
        return "replicated"
    if got[1] == wanted[1]:
        return "wrong-origin"
    full = part_at(spread, 0)
    return "padding-leaked" if full and got[1] == full[1] else "wrong-rows"


# --- All pairs ---------------------------------------------------------------------------------------------


def judge_pairs(ranks: Ranks, seed: int) -> None:
    """`needs_of` by itself; then every save, loaded on every mesh: all numbers, none read twice."""
    _judge_needs(ranks, seed)
    run = ranks.run(probe_pairs, 4, seed=seed)
    failed = [[pair for pair in raised if " to " in pair] for raised in run["raised"]]
    ok = {
        p for p in (f"{w} to {v}" for w in WORLDS for v in WORLDS) if not any(p in pairs for pairs in failed)
    }
    for rank, raised in enumerate(run["raised"]):
        for pair, (kind, text) in raised.items():
            same_only = pair.count(" to ") == 1 and ok and all(p[0] == p[-1] for p in ok)
            message = f"{_pair(pair)}, rank {rank}: {kind}: {text}"
            if same_only:
                raise Finding("same-world-only", message)
            assert run["causes"], "what a rank raised comes first, with its line"
            raise Finding("crashed", message)
    wrong: dict[str, list[str]] = {}
    for saved in WORLDS:
        for world in WORLDS:
            pair = f"{saved} to {world}"
            wrong[pair] = [
                text
                for rank in range(world)
                for text in _differences(run["loaded"][rank][pair], saved, world, rank, seed)
            ]
    bad = {pair: texts for pair, texts in wrong.items() if texts}
    if bad:
        raise _pairs_finding(bad)
    for rank, loaded in enumerate(run["loaded"]):
        for pair, found in loaded.items():
            _compare_reading(rank, pair, found)


def _judge_needs(ranks: Ranks, seed: int) -> None:
    """Boxes of needs that are there; which are missing, a load tells."""
    run = ranks.run(probe_parts, 4, seed=seed)
    for world in WORLDS:
        for rank, by_saved in enumerate(run[f"needs {world}"]):
            if "instead" in by_saved:
                text = f"rank {rank}: needs_of returns a {by_saved['instead']}."
                raise Finding("wrong-value", text, "Needs, one after the other", by_saved["instead"])
            for saved, needs in by_saved.items():
                for need in needs:
                    where = f"needs_of, {_pair(f'{saved} to {world}')}, rank {rank}"
                    _compare_need(where, need, int(saved), world, rank, seed)


def _compare_need(where: str, need: Any, saved: int, world: int, rank: int, seed: int) -> None:
    if isinstance(need, str):
        raise Finding(
            "wrong-value", f"{where}: it gives {need}.", "a Need of an entry, a chunk and two boxes", need
        )
    name, chunk, *boxes = need
    wanted_box = part_at(spreads(seed, world)[SAVED[0] if name == TIED else name], rank)
    if (tuple(map(tuple, chunk)) if chunk else None) not in saved_parts(name, seed, saved) or not wanted_box:
        return
    wanted = _common(wanted_box, chunk)
    for field, got, right in zip(("box", "shared"), boxes, (wanted_box, wanted), strict=True):
        if got == right or right is None:
            continue
        others = {
            "its offset in the chunk": _from(wanted, chunk),
            "its offset in this rank's part": _from(wanted, wanted_box),
        }
        why = next((what for what, box in others.items() if box == got), "")
        text = f"{where}, {name}, the chunk {_text(chunk)}: {field} is {_text(got)}, expected {_text(right)}"
        text += f", counted from the tensor's first element; that is {why}." if why else "."
        same_shape = isinstance(got, list) and got[1] == right[1]
        raise Finding("wrong-origin" if why or same_shape else "wrong-rows", text, _text(right), _text(got))


def _common(one: list[list[int]], other: list[list[int]]) -> list[list[int]] | None:
    sets = [set(range(a, a + n)) & set(range(b, b + m)) for a, n, b, m in zip(*one, *other, strict=True)]
    return [list(map(min, sets)), list(map(len, sets))] if all(sets) else None


def _from(box: list[list[int]] | None, origin: list[list[int]]) -> list[list[int]] | None:
    return box and [[a - b for a, b in zip(box[0], origin[0], strict=True)], box[1]]


def _pair(pair: str) -> str:
    saved, _, loaded = pair.partition(" to ")
    return f"saved by {saved}, loaded by {loaded}" if loaded else pair.replace("save ", "a save by ")


def _differences(found: dict[str, Any], saved: int, world: int, rank: int, seed: int) -> list[str]:
    """What of a load is wrong, a line for each tensor, beginning with a mark: "unread", "other", "wrong" or "kept"."""
    wrong, start = [], 0
    others = {
        values_of(n, s, seed, saved).flatten()[0].item(): n
        for n, s in zip(found["names"], found["shapes"], strict=True)
    }
    for name, path, length, shape in zip(
        found["names"], found["paths"], found["lengths"], found["shapes"], strict=True
    ):
        got = found["values"][start : start + length]
        start += length
        whole = values_of(name, shape, seed, saved)
        spread = spread_of(name, tuple(shape), seed, world)
        expected = cut(whole, spread, coordinate(rank, spread.mesh)).reshape(-1)
        if torch.equal(got, expected):
            continue
        mark = _mark(got, expected, name, others)
        at = int((got != expected).nonzero()[0]) if got.shape == expected.shape else 0
        wrong.append(
            f"{mark}{path}, rank {rank}, element {at}: {_number(got, at)}, expected {_number(expected, at)}"
        )
    if found["others"] != [100 + saved, 0.5]:
        wrong.append(f"values step and lr: {found['others']}, expected {[100 + saved, 0.5]}")
    return wrong


def _number(values: Tensor, at: int) -> str:
    return f"{values[at].item():g}" if at < len(values) else "nothing"


def _mark(got: Tensor, expected: Tensor, name: str, others: dict[float, str]) -> str:
    """What kind of difference it is: elements that nobody read, the numbers of another tensor, or others."""
    if got.shape != expected.shape:
        return "wrong "
    different = got != expected
    if bool((got[different] <= 0).all()):
        return "unread "
    bases = {int(value) // 1024 for value in got[different].tolist()}
    from_others = [other for first, other in others.items() if int(first) // 1024 in bases]
    return f"other ({from_others[0]}) " if from_others and name not in from_others else "wrong "


def _pairs_finding(bad: dict[str, list[str]]) -> Finding:
    pair, texts = next(iter(bad.items()))
    every = [text for found in bad.values() for text in found]
    message = f"{_pair(pair)}: {texts[0].partition(' ')[2]}"
    message += f"; {len(every)} tensors in {len(bad)} of {len(WORLDS) ** 2} pairs are wrong."
    if set(bad) == {f"{w} to {v}" for w in WORLDS for v in WORLDS if w != v}:
        return Finding("same-world-only", message)
    if all(text.startswith("unread") for text in every):
        of_optimizer = all("['optim']" in text for text in every)
        return Finding("optimizer-forgotten" if of_optimizer else "rows-not-loaded", message)
    if all(text.startswith(("other", "unread")) for text in every):
        return Finding("matched-by-place", message)
    return Finding("wrong-rows", message)


def _compare_reading(rank: int, pair: str, found: dict[str, Any]) -> None:
    for path, length, read in zip(found["paths"], found["lengths"], found["read"], strict=True):
        if read != length:
            message = (
                f"{_pair(pair)}, rank {rank}: {read} elements of {path} are read, and this rank has {length}."
            )
            raise Finding("read-too-much" if read > length else "rows-not-loaded", message, length, read)
