"""14: boxes against sets of indices, parts against `torch.chunk`, and loads against the numbers that were saved, for all sixteen
pairs of world sizes. `checkpoints_commits` checks every crash of a commit against the two checkpoints that may be found after it.
"""

from __future__ import annotations

import re
from itertools import permutations, product
from math import prod
from typing import Any

from torch import Tensor

from hwfsdp.course.checks.checkpoints_pairs import PLAIN, SAVED, TIED, Spread, coordinate, cut, more_spreads
from hwfsdp.course.checks.checkpoints_pairs import part_at, probe_pairs, probe_parts, saved_parts, spread_of
from hwfsdp.course.checks.checkpoints_pairs import spreads, values_of
from hwfsdp.course.checks.checkpoints_runs import WORLDS, Held, Part, Parts, held, nested_parts
from hwfsdp.course.checks.checkpoints_runs import pairs_of_parts, probe_integers, tilings
from hwfsdp.course.findings import expect, is_same, told
from hwfsdp.course.run import Ranks


def _text(part: Any) -> str:
    """Return a part as text, as the package shows a Box."""
    if part is None:
        return "nothing"
    if isinstance(part, str):
        return part
    return f"[{', '.join(f'{a}:{a + n}' for a, n in zip(*part, strict=True))}]"


# --- Boxes -------------------------------------------------------------------------------------------------


def judge_boxes(ranks: Ranks, seed: int) -> None:
    """Check `intersection` and `within`."""
    run = ranks.run(probe_integers, 1, seed=seed)
    for (one, other), got in zip(pairs_of_parts(seed), run["shared"][0], strict=True):
        wanted = _common([*map(list, one)], [*map(list, other)])
        where = f"intersection of {_text(one)} and {_text(other)}"
        if got != wanted:
            raise told(_wrong_common(got, wanted), where, _text(got), _text(wanted))
    for (outer, inner), got in zip(nested_parts(seed), run["within"][0], strict=True):
        right: Any = _from([*map(list, inner)], [*map(list, outer)])
        if got != right:
            name = "14.within_origin" if isinstance(got, list) and got[1] == right[1] else "14.within"
            raise told(name, f"{_text(inner)} within {_text(outer)}", _text(got), _text(right))


def _wrong_common(got: Any, wanted: Any) -> str:
    if isinstance(got, str):
        return "14.no_box"
    if wanted is None:
        return "14.touching"
    return "14.origin" if got is not None and got[1] == wanted[1] else "14.rows"


# --- The whole ---------------------------------------------------------------------------------------------


def judge_whole(ranks: Ranks, seed: int) -> None:
    """Check `find_fault` and `_holders_of`."""
    run = ranks.run(probe_integers, 1, seed=seed)
    for case, got in zip(tilings(seed), run["faults"][0], strict=True):
        if (case.what == "whole") != (got is None) or got == "":
            _explain_fault(case, got)
    for of_tensor, answer in zip(held(seed), run["holders"][0], strict=True):
        _compare_holders(of_tensor, answer)


def _explain_fault(case: Parts, got: str | None) -> None:
    shown = ", ".join(_text(part) if len(part[0]) == len(part[1]) else str(part) for part in case.parts[:8])
    more = ", …" if len(case.parts) > 8 else ""
    where = f"find_fault of shape {list(case.shape)}, {len(case.parts)} parts ({shown or 'none'}{more})"
    if case.what == "whole":
        raise told("14.refused", where, got, "None")
    raise told(f"14.{case.what}", f"{where} says {got!r},", repr(got), "a fault")


def _compare_holders(case: Held, answer: dict[str, Any]) -> None:
    shown = ", ".join("None" if part is None else _text(part) for part in case.parts)
    where = f"_holders_of of shape {list(case.shape)}, on ranks {shown}"
    if case.what != "whole":
        _compare_refusal(case, answer, where)
        return
    if "error" in answer:
        name = "14.holders_refused" if answer["error"] == "UsageError" else "14.raises"
        raise told(name, where, f"{answer['error']}: {answer['message']}", "the holders")
    by_part: dict[Part, list[int]] = {}
    for rank, part in enumerate(case.parts):
        if part is not None:
            by_part.setdefault(part, []).append(rank)
    wanted: list[Any] = [[list(case.path), [*map(list, part)], of] for part, of in by_part.items()]
    got = answer["boxes"]
    if got != wanted:
        tables = [
            "; ".join(f"{_text(box)}: ranks {of}" for _, box, of in each) or "nobody"
            for each in (got, wanted)
        ]
        raise told(_wrong_holders(got, wanted), where, *tables)


def _wrong_holders(got: list[Any], wanted: list[Any]) -> str:
    if sum(len(of) for *_, of in got) >= sum(len(of) for *_, of in wanted):
        return "14.holders"
    only_first = len(got) < len(wanted) and {rank for *_, of in got for rank in of} <= {0}
    return "14.first_only" if only_first else "14.holders_lost"


def _compare_refusal(case: Held, answer: dict[str, Any], where: str) -> None:
    if any(case.crc32):
        where += f" with checksums {', '.join(f'{c or 0:08x}' for c in case.crc32)}"
    if "error" not in answer:
        raise told(f"14.{case.what}", f"{where}, raises nothing,", "no error", "UsageError")
    if answer["error"] != "UsageError":
        raise told("14.raises", f"{where},", f"{answer['error']}: {answer['message']}", "UsageError")
    sums = {c or 0 for c in case.crc32} if case.what == "differing" else set()
    key = f"state_dict['model']['layers'][{len(case.parts)}]['{case.path[-1]}']"
    named = sums & _numbers_in(answer["message"].removeprefix(key))
    if not answer["message"].startswith(key) or (sums and len(named) < 2):
        expected = f"{key}, and two of {', '.join(f'{c:08x}' for c in sorted(sums))}" if sums else key
        raise told("14.not_named", f"{where}:", answer["message"], expected)


def _numbers_in(text: str) -> set[int]:
    """Return the numbers that a text may name: each word of digits, read as decimal and as hexadecimal."""
    words = re.findall(r"\b(?:0x)?([0-9a-f]+)\b", text.lower())
    return {int(word, 16) for word in words} | {int(word) for word in words if word.isdecimal()}


# --- Parts of ranks ----------------------------------------------------------------------------------------


def judge_parts(ranks: Ranks, seed: int) -> None:
    """Check `box_of` on every mesh against nested chunks of a tensor that holds its own indices."""
    run = ranks.run(probe_parts, 4, seed=seed)
    for of_world in (more_spreads, lambda world: {**spreads(seed, world), **PLAIN}):
        for world, rank in product(WORLDS, range(4)):
            answers = run["parts"][rank][str(world)]
            for name, spread in of_world(world).items():
                place = 0 if name in PLAIN else rank  # every rank has a whole plain tensor
                _compare_part(rank, answers, name, part_at(spread, place) if place < world else None, spread)


def _compare_part(rank: int, answers: dict[str, Any], name: str, wanted: Any, spread: Spread) -> None:
    how = "a plain tensor" if name in PLAIN else f"mesh {spread.mesh}, {list(map(str, spread.placements))}"
    where = f"box_of, rank {rank}, {how}, shape {list(spread.shape)}"
    if name not in answers:
        raised = next(iter(answers.get("parts that raised", {}).values()), {"kind": "?", "message": "?"})
        raise told("14.part_raises", f"{where}:", f"{raised['kind']}: {raised['message']}")
    if answers[name] != wanted:
        kind = _wrong_part(answers[name], wanted, spread)
        raise told(f"14.{kind}", f"{where}:", _text(answers[name]), _text(wanted))


def _wrong_part(got: Any, wanted: Any, spread: Spread) -> str:
    if isinstance(got, str):
        return "no_part"
    if got is None:
        return "rank_0_only" if any(wanted[0]) else "part"
    if wanted is None:
        return "empty_part" if not prod(got[1]) else "padded_part"
    if got[1] == list(spread.shape):
        return "whole_part"
    if got[1] == wanted[1]:
        return "part_origin"
    full = part_at(spread, 0)
    return "padded_part" if full and got[1] == full[1] else "part"


# --- All pairs ---------------------------------------------------------------------------------------------


def judge_pairs(ranks: Ranks, seed: int) -> None:
    """Check `needs_of` by itself. Then check every save, loaded on every mesh: all numbers arrive, and none is read twice."""
    _judge_needs(ranks, seed)
    run = ranks.run(probe_pairs, 4, seed=seed)
    failed = {pair for raised in run["raised"] for pair in raised}
    whole = [(w, v) for w, v in product(WORLDS, WORLDS) if f"{w} to {v}" not in failed]
    for rank, raised in enumerate(run["raised"]):
        for pair, (kind, text) in raised.items():
            same_only = " to " in pair and whole and all(w == v for w, v in whole)
            assert same_only or run["causes"], "what a rank raised comes first, with its line"
            name = "14.same_only" if same_only else "14.pair_raises"
            raise told(name, f"{_pair(pair)}, rank {rank}:", f"{kind}: {text}")
    bad: dict[str, list[str]] = {}
    for saved, world in product(WORLDS, WORLDS):
        for rank in range(world):
            loaded = run["loaded"][rank][f"{saved} to {world}"]
            if texts := _differences(loaded, saved, world, rank, seed):
                bad.setdefault(f"{saved} to {world}", []).extend(texts)
    if bad:
        pair, texts = next(iter(bad.items()))
        where = f"{_pair(pair)}: {texts[0].partition(' ')[2]};"
        raise told(_wrong_pairs(bad), where, tensors=sum(map(len, bad.values())), pairs=len(bad))
    for rank, loaded in enumerate(run["loaded"]):
        for pair, found in loaded.items():
            for each in found["tensors"]:
                where = f"{_pair(pair)}, rank {rank}, {each['path']}:"
                expect("14.read", where, each["read"], each["values"].numel())


def _judge_needs(ranks: Ranks, seed: int) -> None:
    """Check the boxes of the needs that are returned. The loads show which needs are missing."""
    run = ranks.run(probe_parts, 4, seed=seed)
    for world in WORLDS:
        for rank, by_saved in enumerate(run[f"needs {world}"]):
            if "instead" in by_saved:
                raise told("14.no_needs", f"Rank {rank}:", by_saved["instead"], "Needs")
            for saved, needs in by_saved.items():
                for need in needs:
                    where = f"needs_of, {_pair(f'{saved} to {world}')}, rank {rank}"
                    _compare_need(where, need, int(saved), world, rank, seed)


def _compare_need(where: str, need: Any, saved: int, world: int, rank: int, seed: int) -> None:
    if isinstance(need, str):
        raise told("14.no_need", f"{where}:", need, "a Need of an entry, a chunk and two boxes")
    name, chunk, *boxes = need
    wanted_box = part_at(spreads(seed, world)[SAVED[0] if name == TIED else name], rank)
    if (tuple(map(tuple, chunk)) if chunk else None) not in saved_parts(name, seed, saved) or not wanted_box:
        return
    wanted = _common(wanted_box, chunk)
    counted = {"its offset in the chunk": _from(wanted, chunk)}
    counted["its offset in this rank's part"] = _from(wanted, wanted_box)
    for field, got, right in zip(("box", "shared"), boxes, (wanted_box, wanted), strict=True):
        if got == right or right is None:
            continue
        why = next((f"; that is {what}" for what, box in counted.items() if box == got), "")
        origin = why or (isinstance(got, list) and got[1] == right[1])
        place = f"{where}, {name}, the chunk {_text(chunk)}:"
        raise told(
            "14.need_origin" if origin else "14.need", place, _text(got), _text(right), field=field, why=why
        )


def _common(one: list[list[int]], other: list[list[int]]) -> list[list[int]] | None:
    sets = [set(range(a, a + n)) & set(range(b, b + m)) for a, n, b, m in zip(*one, *other, strict=True)]
    return [list(map(min, sets)), list(map(len, sets))] if all(sets) else None


def _from(box: list[list[int]] | None, origin: list[list[int]]) -> list[list[int]] | None:
    return box and [[a - b for a, b in zip(box[0], origin[0], strict=True)], box[1]]


def _pair(pair: str) -> str:
    saved, _, loaded = pair.partition(" to ")
    return f"saved by {saved}, loaded by {loaded}" if loaded else pair.replace("save ", "a save by ")


def _differences(found: dict[str, Any], saved: int, world: int, rank: int, seed: int) -> list[str]:
    """Return one line for each wrong tensor of a load. It begins with a mark: "unread", "other", "wrong" or "values"."""
    wrong, tensors = [], found["tensors"]
    wholes = [values_of(each["name"], each["shape"], seed, saved) for each in tensors]
    others = {whole.flatten()[0].item(): each["name"] for whole, each in zip(wholes, tensors, strict=True)}
    for each, whole in zip(tensors, wholes, strict=True):
        name, got = each["name"], each["values"]
        spread = spread_of(name, tuple(each["shape"]), seed, world)
        expected = cut(whole, spread, coordinate(rank, spread.mesh)).reshape(-1)
        if is_same(got, expected):
            continue
        at = int((got != expected).nonzero()[0]) if got.shape == expected.shape else 0
        where = f"{_mark(got, expected, name, others)}{each['path']}, rank {rank}, element {at}"
        wrong.append(f"{where}: {_number(got, at)}, expected {_number(expected, at)}")
    if found["others"] != [100 + saved, 0.5]:
        wrong.append(f"values step and lr: {found['others']}, expected {[100 + saved, 0.5]}")
    return wrong


def _number(values: Tensor, at: int) -> str:
    return f"{values[at].item():g}" if at < len(values) else "nothing"


def _mark(got: Tensor, expected: Tensor, name: str, others: dict[float, str]) -> str:
    """Return the kind of a difference: elements that were not read, the numbers of another tensor, or other numbers."""
    if got.shape != expected.shape:
        return "wrong "
    different = got != expected
    if bool((got[different] <= 0).all()):
        return "unread "
    bases = {int(value) // 1024 for value in got[different].tolist()}
    from_others = [other for first, other in others.items() if int(first) // 1024 in bases]
    return f"other ({from_others[0]}) " if from_others and name not in from_others else "wrong "


def _wrong_pairs(bad: dict[str, list[str]]) -> str:
    every = [text for found in bad.values() for text in found]
    if set(bad) == {f"{w} to {v}" for w, v in permutations(WORLDS, 2)}:
        return "14.pairs_same_only"
    if all(text.startswith("unread") for text in every):
        return "14.optimizer" if all("['optim']" in text for text in every) else "14.unread"
    return "14.by_place" if all(text.startswith(("other", "unread")) for text in every) else "14.wrong"
