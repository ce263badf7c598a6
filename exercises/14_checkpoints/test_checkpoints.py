"""14 Checkpoints: what must hold.

Your file has two functions, which all ranks call together:

    save(folder, model, optimizer)     afterwards a load from `folder` finds exactly this state
    load(folder, model, optimizer)     fills both, in place, on any number of ranks

`model` was sharded by `fully_shard`. Every value of a parameter, and of what AdamW keeps for it, is drawn from the seed and the name
(`facts.key_values`), so the right part of every rank is known. The tests do not look into your files. They only load them: also
when the save was killed at any step, when the power failed, and when a file is damaged.

    pytest exercises/14_checkpoints -k pairs     one test
"""

import facts_checkpoints as facts
import pytest
import torch

from hwfsdp.course import laws
from hwfsdp.course.findings import Finding

pytestmark = pytest.mark.exercise(
    "14",
    title="Checkpoints",
    file="checkpoints.py",
    may="open os pathlib shutil json struct zlib hashlib tempfile uuid hwfsdp.layout",
)

ROOM = 64 << 10  # bytes for what you write and read besides rows


@pytest.mark.points(
    1, ask="From which of three origins is a row counted: the tensor, the file, the rank's own memory?"
)
def test_pairs(ranks, seed):
    """What 1 to 4 ranks saved, 1 to 4 ranks load bit for bit; each row is written once, read where it is kept, and does not travel."""
    found = ranks(4).ask(facts.probe_pairs, "pairs", seed=seed)
    moved = ranks(4).ask(facts.probe_bytes, "bytes", seed=seed)
    values = facts.key_values(facts.Model(seed, 8), seed)
    for pair in sorted(found[0], key=lambda pair: (pair[0] != pair[-1], pair)):
        for rank in range(int(pair[-1])):
            where = f"saved by {pair[0]}, loaded on {pair[-1]}, rank {rank}:"
            right_state(where, found[rank][pair], values, seed, int(pair[-1]), rank)
    few_bytes(moved, seed)


def few_bytes(found, seed):
    """Every row is written once, also where replicas have it; a rank reads what it keeps; rows do not travel."""
    whole = sum(value.nbytes for value in facts.key_values(facts.Wide(), seed).values())
    for name, written in found[0]["written"].items():
        most("replicated", f"{name}: a save of {whole:,} B writes", written, whole + ROOM)
        if written < whole // 2:
            words = f"{name}: the folder has {written:,} B after a save of {whole:,} B: most rows are somewhere else."
            raise Finding("not-committed", words, whole, written)
    for rank, said in enumerate(found):
        where = f"Rank {rank} of 4, which keeps {said['kept']:,} B,"
        most("too-much-traffic", f"{where} sends", said["sent"], said["kept"] // 2)
        most("read-too-much", f"{where} reads", said["read"], said["kept"] * 3 // 2 + ROOM)


@pytest.mark.points(1, ask="Before a name appears: is everything that it names on the disk?")
@pytest.mark.parametrize(("world_size", "has_old"), [(1, True), (1, False), (2, True)])
def test_crashes(ranks, seed, world_size, has_old):
    """If all ranks are killed, or the power fails, at any moment of a save, a load finds the whole old save, or the whole new one."""
    found = ranks(2).ask(facts.probe_crashes, "crashes", seed=seed, world_size=world_size, has_old=has_old)[0]
    loads_right([got for (_, _, power, is_last), got, _ in found if is_last and not power][0], seed)
    for (after, before, power, is_last), got, again in sorted(found, key=lambda each: each[0][2]):
        moment = "after save has returned" if is_last else f"between `{after}` and `{before}`"
        where = f"{world_size} ranks, {'a power cut' if power else 'a kill'} {moment}: a load"
        state = which(got, seed)
        if (
            state == "old"
            and not is_last
            or state == "none"
            and not has_old
            and not is_last
            or state == "new"
        ):
            if again:
                raise Finding(
                    "crashed", f"{where} finds the {state} save; but the next save there fails: {again}."
                )
            continue
        if is_last and not power:
            raise Finding(
                "not-committed", f"{where} does not find the save: {said(got, state)}.", "the new save", state
            )
        raise Finding(
            "not-durable" if power else "not-atomic", f"{where} {said(got, state)}.", "a whole save", state
        )


@pytest.mark.points(1, ask="What do the other ranks change until they hear that one has failed?")
@pytest.mark.parametrize("how", ["kill", "fail"])
def test_one_rank(ranks, seed, how):
    """If one of two ranks is killed at any step, a load finds a whole save. If a step fails, `save` raises on both, and the old save counts."""
    found = ranks(2).ask(facts.probe_ended, "ended", seed=seed, how=how)
    loads_right(found[0][0][-1], seed)
    for (victim, last, first, got), (_, _, second, _) in zip(*found, strict=True):
        if not last:
            saves_again(first or second, got, seed)
        elif how == "kill" and (state := which(got, seed)) not in ("old", "new"):
            where = f"Rank {victim} of 2 was killed before its `{last}`: a load"
            raise Finding("not-atomic", f"{where} {said(got, state)}.", "a whole save", state)
        elif how == "fail":
            raised_on_both(f"`{last}` fails on rank {victim} of 2:", (first, second), last, got, seed)


@pytest.mark.points(1, ask="How does a load notice that a byte is not the one that was written?")
def test_damaged(ranks, seed):
    """If a file is missing, too short, or has another bit, a load raises an error, or finds the right state all the same."""
    (_, _, undamaged), *found = ranks(2).ask(facts.probe_damaged, "damaged", seed=seed)[0]
    loads_right(undamaged, seed, facts.Middle)
    for words, is_short, got in found:
        if "tensors" in got and which(got, seed, facts.Middle) != "old":
            raise Finding(
                "parts-missing" if is_short else "damage-missed", f"{words}: load returns, with wrong values."
            )


# --- What is right -----------------------------------------------------------------------------------------


def part_of(name, whole, world_size, rank):
    """Return a rank's part."""
    if name.startswith(facts.UNSHARDED) or name.endswith(" step"):
        return whole
    return laws.rows_of(whole, rank, world_size, dim=1 if name.startswith("columns") else 0)


def alike(got, right):
    return (
        got is not None and got.shape == right.shape and got.dtype == right.dtype and torch.equal(got, right)
    )


def which(got, seed, kind=facts.Small):
    """Say which save of the small model a load has found."""
    if "raised" in got:
        return "none"
    for name, which in (("old", facts.OLD), ("new", facts.NEW)):
        right = facts.key_values(kind(seed), seed + which)
        if right.keys() == got["tensors"].keys() and all(
            alike(got["tensors"][key], right[key]) for key in right
        ):
            if got["lr"][1] == facts.LR[which] and not got["step"]:
                return name
    return "a mixture"


def said(got, state):
    return (
        f"raises {got['raised']}"
        if state == "none"
        else f"finds {'the ' if state != 'a mixture' else ''}{state}"
    )


# --- Laws --------------------------------------------------------------------------------------------------


def loads_right(got, seed, kind=facts.Small):
    """After a save that nothing has disturbed, a load finds what was saved, and raises nothing."""
    where = "A save that nothing has disturbed: a load"
    if (state := which(got, seed, kind)) == "none":
        raise Finding("crashed", f"{where} {said(got, state)}.")
    if state == "a mixture" and got["step"]:
        raise Finding("crashed", f"{where} returns, but the optimizer's next step raises {got['step']}.")
    if state == "a mixture":
        raise Finding("wrong-value", f"{where} finds other values than were saved.")


def saves_again(error, got, seed):
    """A second save that nothing has ended returns on both ranks, and a load finds it."""
    where = "A second save, in which no step fails,"
    if error:
        raise Finding("crashed", f"{where} raises {error}.")
    if (state := which(got, seed)) != "new":
        raise Finding(
            "not-committed", f"{where} returns, but a load {said(got, state)}.", "the new save", state
        )


def raised_on_both(where, errors, step, got, seed):
    """A step of one rank has failed: `save` raises on both ranks, and a load finds the old save."""
    state, raised = which(got, seed), [rank for rank, error in enumerate(errors) if error]
    if len(raised) == 1:
        words = f"{where} save raises on rank {raised[0]} only: {errors[raised[0]]}."
        raise Finding("raised-alone", words)
    if not raised and (state != "new" or step.startswith(("write", "open", "fsync", "fdatasync"))):
        words = f"{where} save returns, and a load {said(got, state)}."
        raise Finding("error-swallowed", words, "OSError", None)
    if raised and state == "new":
        words = f"{where} save raises, but a load finds the new save."
        raise Finding("failed-save-counts", words, "the old save", state)
    if raised and state != "old":
        raise Finding("not-atomic", f"{where} a load {said(got, state)}.", "the old save", state)


def most(misconception, where, got, limit):
    if got > limit:
        raise Finding(misconception, f"{where} {got:,} B, at most {limit:,} B are allowed.", limit, got)


def right_state(where, found, values, seed, world_size, rank):
    """A rank has its part of every tensor, and the optimizer goes on."""
    fresh = facts.key_values(facts.Model(seed, 8), seed + facts.LATER)
    got = found["tensors"]
    if not found["objects"]:
        raise Finding("object-replaced", f"{where} the model has other parameters than before.")
    if extra := [key for key in got if key not in values]:
        raise Finding("wrong-value", f"{where} {extra[0]} was not saved.")
    for key, whole in values.items():
        is_sharded = not key.startswith(facts.UNSHARDED) and not key.endswith(" step")
        if is_sharded and key in got and not found["kinds"][key]:
            raise Finding("wrong-placement", f"{where} {key} is a plain tensor, expected a DTensor.")
        right, before = part_of(key, whole, world_size, rank), part_of(key, fresh[key], world_size, rank)
        if not alike(got.get(key), right):
            kind, words = wrong_part(key, got.get(key), right, before)
            raise Finding(kind, f"{where} {key} {words}.", right, got.get(key))
    if [found["lr"][1], found["weight_decay"]] != [facts.LR[facts.OLD], [0.0, 0.01]]:
        message = f"{where} the learning rate and the weight decay of the groups are not the saved ones."
        raise Finding("optimizer-forgotten", message, facts.LR[facts.OLD], found["lr"][1])
    if found["step"]:
        raise Finding("crashed", f"{where} the optimizer's next step raises {found['step']}.")


def wrong_part(key, got, right, before):
    """Say what is wrong with a rank's part of a tensor. before: what the part held before the load."""
    if got is None:
        return "optimizer-forgotten", "is not there"
    if got.shape != right.shape or got.dtype != right.dtype:
        return (
            "wrong-value",
            f"is {tuple(got.shape)} {got.dtype}, expected {tuple(right.shape)} {right.dtype}",
        )
    wrong = got != right
    if ((got == before) | (got == 0))[wrong].all():
        kind = "optimizer-forgotten" if " " in key and wrong.all() else "rows-not-loaded"
        return kind, f"has {int(wrong.sum())} of {got.numel()} elements that are not loaded"
    return "wrong-value", f"is wrong {laws.largest_difference(got, right)}"
