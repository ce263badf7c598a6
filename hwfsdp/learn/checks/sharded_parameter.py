"""Checks of 04: memory that comes and goes, shards, and the two transitions.

One run shows everything (see `sharded_parameter_runs`); the oracles are torch.chunk and arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hwfsdp.learn.checks.sharded_parameter_runs import ROUNDS, Case, Data, cases, probe_parameter
from hwfsdp.learn.diagnose import first_difference
from hwfsdp.learn.run import Ranks, Run, Unreported
from hwfsdp.learn.verdict import Check, Finding


def run_of(ranks: Ranks, seed: int) -> Run:
    """Three ranks where two are asked for, so that there are shards with rows, with some and with none."""
    return ranks.run(probe_parameter, 3 if ranks.world_size == 2 else ranks.world_size, seed=seed)


def judge_memory(ranks: Ranks, seed: int) -> None:
    """Bytes after each call, and what aliases and autograd see."""
    run = run_of(ranks, seed)
    for facts in run["storages"][0]:
        size = facts["elements"] * facts["itemsize"]
        for call, own, alias, shape in facts["states"]:
            expected = size if call == "allocate" else 0
            where = f"After {call} of {facts['elements']} elements of {facts['itemsize']} B"
            if shape != facts["shape"] or own != alias:
                text = (
                    f"{where} the tensor, of shape {tuple(shape)}, has {own} B, and an alias of it {alias} B."
                )
                raise Finding(
                    "replaced-not-resized", text, f"{expected} B under both", f"{own} and {alias} B"
                )
            if own == expected:
                continue
            name = "not-freed" if call == "free" else "elements-for-bytes" if own else "not-allocated"
            raise Finding(name, f"{where} its storage has {own} B, expected {expected} B.", expected, own)
        if "alias" not in facts:
            raise Unreported("storages", run)
        _check_contents(facts)
    if left := run["one byte"][0]:
        raise Finding(
            "not-freed", "After free of 1 element of 1 B its storage has 1 B, expected 0 B.", 0, left
        )


def _check_contents(facts: Data) -> None:
    kept, alias, grad = facts.get("kept"), facts.get("alias"), facts.get("grad")
    if kept is None or alias is None or grad is None or not _same(kept[:1], alias):
        raise Finding("replaced-not-resized", "An alias does not see what is written to the tensor.")
    if not _same(kept.flatten()[1:] - kept.flatten()[:-1], torch.ones_like(kept.flatten()[1:])):
        raise Finding("freed-too-early", "allocate, called a second time, loses the contents.", None, kept)
    if not _same(grad, 2 * alias):
        text = "Autograd saved an alias; its gradient is not made from what was filled in again."
        raise Finding("replaced-not-resized", text, 2 * alias, grad)


def _same(actual: Any, expected: Tensor) -> bool:
    return isinstance(actual, Tensor) and actual.shape == expected.shape and torch.equal(actual, expected)


def _each_shard(ranks: Ranks, seed: int, judge: Callable[[Case, Data, int], None]) -> None:
    """Calls `judge` with every case, what was found, and the rank in the case's mesh."""
    run = run_of(ranks, seed)
    made = cases(len(run.reports))
    for rank, found in enumerate(run["shards"]):
        for case, facts in zip(made, found, strict=False):
            judge(case, facts, rank if case.ranks > 1 else 0)
        if len(found) < len(made):
            raise Unreported("shards", run)


def judge_rows(ranks: Ranks, seed: int) -> None:
    """Values and sizes of the local part and of the padded shard."""

    def judge(case: Case, facts: Data, rank: int) -> None:
        whole = case.whole(seed)
        piece, local, padded = case.piece(whole, rank), facts["local"], facts["padded"]
        where = f"Rank {rank}, {case}:"
        if not _same(local, piece):
            raise _rows_finding(where, local, piece, whole, case)
        if tuple(padded.shape) != (case.padded_numel,):
            short = padded.numel() < case.padded_numel
            name = "padding-dropped" if short else "replicated" if case.ranks > 1 else "wrong-rows"
            name = "wrong-rows" if padded.numel() == case.padded_numel else name
            raise Finding(
                name,
                f"{where} padded_shard has shape {tuple(padded.shape)}, expected ({case.padded_numel},).",
                [case.padded_numel],
                list(padded.shape),
            )
        rest = padded[piece.numel() :]
        if not _same(padded[: piece.numel()], piece.flatten()):
            raise Finding("wrong-rows", f"{where} padded_shard does not begin with the rows.", piece, padded)
        if rest.ne(0).any():
            text = f"{where} {rest.numel()} elements of padding are {rest.tolist()}, expected zeros."
            raise Finding("padding-not-zero", text, 0, rest)
        if not _same(facts["whole"], whole):
            raise Finding(
                "input-changed", f"{where} the whole parameter was written to.", whole, facts["whole"]
            )

    _each_shard(ranks, seed, judge)


def _rows_finding(where: str, local: Tensor, piece: Tensor, whole: Tensor, case: Case) -> Finding:
    text = f"{where} the local part has shape {tuple(local.shape)}, expected {tuple(piece.shape)}"
    if local.shape == piece.shape:
        text = f"{where} the local part is not torch.chunk's"
        text += f", {first_difference(local, piece)}" if local.dtype == piece.dtype else f" but {local.dtype}"
    name = "wrong-rows"
    if case.ranks > 1 and _same(local, whole):
        name = "replicated"
    elif local.numel() == case.padded_numel > piece.numel():
        name = "padding-leaked"
    elif local.dtype != piece.dtype:
        name = "wrong-dtype"
    return Finding(name, f"{text}.", piece, local)


def judge_front(ranks: Ranks, seed: int) -> None:
    """The local part is the front of the padded shard's memory, and that is no larger than it has to be."""

    def judge(case: Case, facts: Data, rank: int) -> None:
        where, padded = f"Rank {rank}, {case}:", facts["padded"]
        size = padded.numel() * padded.element_size()
        if facts["shares"] or facts["padded bytes"] > size:
            text = (
                f"{where} padded_shard keeps {facts['padded bytes']} B alive, its own elements are {size} B."
            )
            raise Finding("replicated", text, size, facts["padded bytes"])
        if facts["whole alive"]:
            text = (
                f"{where} {facts['whole alive']} B of the whole parameter are alive when everyone else has let go of it; "
                f"expected 0 B, the shard has its own {size} B."
            )
            raise Finding("replicated", text, 0, facts["whole alive"])
        if facts["local"].numel() and not (facts["front"] and facts["row strides"]):
            text = f"{where} the local part of sharded_param is not the front of padded_shard's memory."
            raise Finding("not-a-view", text)

    _each_shard(ranks, seed, judge)
    run = run_of(ranks, seed)
    for key, where in (("meta", "on the meta device"), ("host", "in host memory, with shards offloaded")):
        for rank, (padded, local) in enumerate(run[key]):
            if not (padded and local):
                which = "padded_shard" if not padded else "the local part"
                raise Finding("wrong-device", f"Rank {rank}: {which} is not {where}.")


def judge_dtensor(ranks: Ranks, seed: int) -> None:
    """What the sharded parameter says about itself."""

    def judge(case: Case, facts: Data, rank: int) -> None:
        where = f"Rank {rank}, {case}: sharded_param"
        if not facts["dtensor"]:
            raise Finding("wrong-placement", f"{where} is no DTensor.", "DTensor", "a plain tensor")
        names = ("placements", "shape", "stride", "dtype", "mesh")
        for name, expected, actual in zip(names, facts["wanted"], facts["layout"], strict=True):
            if actual != expected:
                text = f"{where} has {name} {actual}, expected {expected}."
                raise Finding("wrong-placement", text, expected, actual)
        if not facts["parameter"]:
            raise Finding("not-registered", f"{where} is no nn.Parameter, or no leaf of autograd's.")
        if facts["requires_grad"] != case.requires_grad:
            text = (
                f"{where}.requires_grad is {facts['requires_grad']}, the parameter's is {case.requires_grad}."
            )
            raise Finding("flag-not-followed", text, case.requires_grad, facts["requires_grad"])

    _each_shard(ranks, seed, judge)


def judge_register(ranks: Ranks, seed: int) -> None:
    """The very object, at all places."""
    run = run_of(ranks, seed)
    for key, call in (("after init", "register(sharded_param)"), ("after register", "register(another)")):
        for rank, found in enumerate(run[key]):
            _check_places(f"Rank {rank}, {call}", found)
    expected = ["head.weight", "rnn.weight_hh_l0", "rnn.weight_ih_l0", "tail.weight"]
    if run["names"][0] != expected:
        raise Finding("not-registered", "The modules have other parameters now.", expected, run["names"][0])


def _check_places(where: str, found: dict[str, bool]) -> None:
    missing = [place for place, there in found.items() if not there]
    if missing:
        tied = 0 < len(missing) < len(found) and found["head"]
        text = (
            f"{where}: of a parameter tied over head, tail and rnn, another one is at {', '.join(missing)}."
        )
        raise Finding(
            "untied" if tied else "not-registered", text, "everywhere", f"not at {', '.join(missing)}"
        )


def judge_unsharded(ranks: Ranks, seed: int) -> None:
    """After `to_unsharded`: one object for life, registered, with the flag that the user set."""
    run = run_of(ranks, seed)
    case = Case((5, 3), world_size=len(run.reports))
    for rank, rounds in enumerate(run["rounds"]):
        for number, facts in enumerate(rounds, 1):
            where = f"Rank {rank}, to_unsharded number {number}"
            _check_state(where, facts["unsharded"], "UNSHARDED", case.ranks * case.padded_numel * 4)
            if not _same(facts["unsharded"]["value"], case.whole(seed)):
                raise Finding("wrong-value", f"{where}: the modules do not see what was gathered.")
        if not rounds or (len(rounds) < ROUNDS and "sharded" in rounds[-1]):
            raise Unreported("rounds", run)
    for rank, left in enumerate(run["left"]):
        for facts in left[:1]:
            _check_state(f"Rank {rank}, to_unsharded from POST_FORWARD", facts, "UNSHARDED")
    _check_own_form(run["own form"])


def _check_own_form(found: Sequence[Any]) -> None:
    for rank, value in enumerate(found):
        if not _same(value, torch.full((5, 3), 9.0)):
            text = (
                f"Rank {rank}: the extension was not asked for the whole parameter before it was registered."
            )
            raise Finding("not-gathered", text, 9.0, value)


def _check_state(where: str, facts: Data, state: str, alive: int | None = None) -> None:
    places = facts["places"]
    if not facts["same"]:
        text = f"{where}: unsharded_param is another object than in the first round."
        raise Finding("replaced-not-resized", text)
    _check_places(where, places)
    if facts["state"] != state:
        raise Finding("wrong-state", f"{where}: the state is {facts['state']}.", state, facts["state"])
    for which, flag in zip(("what is registered", "sharded_param"), facts["requires_grad"], strict=True):
        if flag != facts["flag"]:
            text = f"{where}: {which} has requires_grad {flag}; the user set it to {facts['flag']}."
            raise Finding("flag-not-followed", text, facts["flag"], flag)
    if not facts.get("grad kept", True):
        text = f"{where}: unsharded_param.grad is another one, or gone; no transition touches gradients."
        raise Finding("grad-lost", text, "the object that autograd left", "None, or another")
    if not facts["mesh"] or not facts["post forward"]:
        which = (
            "post_forward_shard is still there" if facts["mesh"] else "gather_mesh is still the smaller one"
        )
        raise Finding("wrong-state", f"{where}: {which}.", state, "a rest of POST_FORWARD")
    if alive is not None and facts["alive"] != alive:
        text = f"{where}: {facts['alive']} B of the whole parameter are alive, expected {alive} B."
        raise Finding(
            "not-freed" if facts["alive"] > alive else "freed-too-early", text, alive, facts["alive"]
        )


def judge_sharded(ranks: Ranks, seed: int) -> None:
    """After `to_sharded`: no byte of the whole parameter, and autograd finds it again in the next round."""
    run = run_of(ranks, seed)
    for rank, rounds in enumerate(run["rounds"]):
        for number, facts in enumerate(rounds, 1):
            if "kept" not in facts:
                raise Unreported("rounds", run)
            where = f"Rank {rank}, to_sharded number {number}"
            _check_state(where, facts["sharded"], "SHARDED", 0)
            same, shape = facts["kept"]
            if not same or shape != [5, 3]:
                text = f"{where}: unsharded_param is another object, or of another shape, than before."
                raise Finding("replaced-not-resized", text, [5, 3], shape)
        if len(rounds) < ROUNDS or len(run["left"][rank]) < 2:
            raise Unreported("rounds", run)
        _check_state(f"Rank {rank}, to_sharded from POST_FORWARD", run["left"][rank][1], "SHARDED", 0)
    if any(times != 1 for times in run["own form freed"]):
        raise Finding("not-freed", "The extension's memory was not freed, or more than once.", 1)
    for rank, (error, grad) in enumerate(zip(run["error"], run["grad"], strict=True)):
        if error or not _same(grad, 2 * Case((5, 3)).whole(seed)):
            text = (
                f"Rank {rank}: a backward after the second gather does not give the gradient: {error or grad}"
            )
            raise Finding("replaced-not-resized", text)


MEMORY, ROWS, REGISTER, WHOLE = "04.memory", "04.rows", "04.register", "04.unsharded"
CHECKS = (
    Check(MEMORY, "a storage is freed and given back under a tensor that stays", 1, judge_memory),
    Check(ROWS, "each rank has the rows that torch.chunk gives it, padded with zeros", 1, judge_rows),
    Check(
        "04.front",
        "the rows are the front of the padded shard, in memory of its own",
        1,
        judge_front,
        (ROWS,),
    ),
    Check("04.dtensor", "the sharded parameter says how it is cut", 1, judge_dtensor, (ROWS,)),
    Check(REGISTER, "the modules have the very parameter, at all places", 1, judge_register, (ROWS,)),
    Check(
        WHOLE,
        "gathered, the modules compute with one whole parameter that lives as long as the model",
        1,
        judge_unsharded,
        (MEMORY, REGISTER),
    ),
    Check(
        "04.sharded",
        "freed, no byte of it is left, and autograd finds it again",
        1,
        judge_sharded,
        (MEMORY, REGISTER, WHOLE),
    ),
)
