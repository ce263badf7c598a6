"""13 Meta-device start: what must hold.

The tests start one model on 1, 3 and 4 ranks, in both ways: by `fully_shard` on the meta device, and hollow, by a sharder that keeps
rows. On one rank, they draw whole parameters with your `row_generator`, row by row. Every rank must have its part of exactly these.
`init` notes how it is called, and a watcher sees all memory that is allocated.

    pytest exercises/13_meta_start -k weights     one test
"""

from itertools import product
from math import prod

import facts_meta_start as facts
import pytest
import torch

from hwfsdp.course import laws
from hwfsdp.course.findings import Finding
from hwfsdp.course.laws import equal

pytestmark = pytest.mark.exercise(
    "13", title="Meta-device start", file="meta_start.py", may="hashlib hwfsdp.layout"
)

sizes = pytest.mark.parametrize("world_size", [4, 3, 1])  # the first finding counts: the most telling one
ways = pytest.mark.parametrize("way", facts.WAYS)
ROWS = 3  # that may be in memory at once: a row and its copies


def right_generators(found, alone, keys, world_size):
    """A row's generator depends on seed, name and number, and on nothing else."""
    said = [f"row_generator({number}, {name!r}, {row})" for number, name, row in keys]
    equal("wrong-value", "row_generator returns a", found["kind"], "Generator on cpu")
    equal(
        "global-generator",
        "After row_generator, torch's default generator has another state",
        found["global"],
        False,
    )
    equal(
        "one-sequence", f"{said[0]} and {said[1]} are one object, with one state", found["one object"], False
    )
    found["alone"] = alone["first"]
    for way, kind, words in (
        ("again", "hash-differs", "when it is asked again, in another order"),
        ("elsewhere", "hash-differs", "if hash() of texts is another one"),
        ("alone", "seed-per-rank", f"on rank {world_size - 1} of {world_size} than on one rank"),
    ):
        for key, first, other in zip(said, found["first"], found[way], strict=True):
            equal(kind, f"{key} gives other numbers {words}, beginning", first[0], other[0])
    seen = {}
    for key, first in zip(said, map(tuple, found["first"]), strict=True):
        equal("seeds-collide", f"{seen.get(first)} and {key} give the same numbers", first in seen, False)
        seen[first] = key


@pytest.mark.points(1, ask="A tensor has a shape, strides and a storage. How small may the storage be?")
def test_hollow(ranks, seed):
    """A hollow model looks like the model on the meta device, can be read, and has almost no memory; tied parameters stay tied."""
    found = ranks(1).ask(facts.probe_hollow, "found", seed=seed)[0]
    equal("not-returned", "hollow does not return the model that it was given", found["returned"], True)
    for name, right in found["before"].items():
        got = found["after"][name]
        kind = "flag-not-followed" if got.rpartition(",")[0] == right.rpartition(",")[0] else "wrong-value"
        equal(kind, f"{name} of a hollow model", got, right)
    equal("untied", "head.weight is another object than embed.weight", found["tied"], True)
    equal("not-allocated", "Still on the meta device", found["meta"], [])
    for name, nbytes in found["bytes"].items():
        equal(
            "replicated",
            f"{name} of a hollow model has {nbytes:,} B of memory, at most 64 B are allowed",
            nbytes > 64,
            False,
        )


@pytest.mark.points(1, ask="Which rows does this rank hold, and from which generator does each come?")
@sizes
@ways
def test_weights(ranks, seed, way, world_size):
    """On any number of ranks, the model has the same weights, each rank its own part of them, also if it has run; nothing else changes."""
    keys, asked = confusing_keys(seed), ranks(world_size)
    generators = asked.ask(facts.probe_generators, "facts", seed=seed, keys=keys)
    alone = ranks(1).ask(facts.probe_generators, "facts", seed=seed, keys=keys)
    weights = ranks(1).ask(facts.probe_generators, "weights", seed=seed, keys=keys)
    found = asked.ask(facts.probe_start, "found", seed=seed, way=way)
    again = (
        asked.ask(facts.probe_again, "found", seed=seed) if (way, world_size) == ("fully_shard", 3) else []
    )
    right_generators(generators[-1], alone[0], keys, world_size)
    weights = weights[0]
    for rank, said in enumerate(found):
        where = f"{way}, rank {rank} of {world_size}:"
        twice = f"{where} init is called for head.weight, which is embed.weight under another name"
        equal("initialized-twice", twice, "head.weight" in said["calls"], False)
        for name, whole in weights.items():
            part, first = part_of(name, whole, way, world_size, rank)
            right_calls(
                f"{where} {name}, shape {tuple(whole.shape)},",
                said["calls"].get(name, []),
                whole,
                part,
                first,
            )
            right_part(f"{where} {name}", said["shards"][name], part)
        random = f"{where} after init_shards, torch's default generator has another state"
        equal("global-generator", random, said["random"], False)
        equal("input-changed", f"{where} after init_shards, the buffer is", said["buffer"], [4.0] * 4)
        equal(
            "not-registered", f"{where} the modules hold other parameters than before", said["objects"], True
        )
        equal("not-allocated", f"{where} init_shards takes a model on the meta device", said["refused"], True)
    for rank, said in enumerate(again):  # its shards are filled, not what the forward has left whole
        for name, whole in weights.items():
            part, _ = part_of(name, whole, "fully_shard", 3, rank)
            if not alike(said[name], part):
                where = (
                    f"Rank {rank} of 3, after a forward: {name} does not have the shard that the seed gives"
                )
                raise Finding("not-initialized", f"{where}.", part, said[name])


@pytest.mark.points(1, ask="Which storages are alive at the same time?")
@sizes
@ways
def test_bytes(ranks, seed, way, world_size):
    """Besides the shards, there is memory for one row, and nothing travels."""
    found = ranks(world_size).ask(facts.probe_memory, "found", seed=seed, way=way)
    model, _ = facts.of_meta(seed)
    whole = max(param.nbytes for param in model.parameters())
    most = ROWS * max(prod(param.shape[1:]) * param.itemsize for param in model.parameters())
    for rank, said in enumerate(found):
        where = f"{way}, rank {rank} of {world_size}: init_shards"
        equal("too-much-traffic", f"{where} calls collectives", said["collectives"], [])
        for fact, words in (("largest", "allocates"), ("peak", "has"), ("after", "leaves")):
            if said[fact] > most:
                kind = "replicated" if world_size > 1 and said["largest"] >= whole else "more-than-a-row"
                sentence = f"{where} {words} {said[fact]:,} B at once; the largest parameter has {whole:,} B."
                raise Finding(kind, sentence, f"{most} B, three rows", said[fact])


# --- What is right -----------------------------------------------------------------------------------------


def confusing_keys(seed):
    """Seeds, names and rows that are easy to confuse; and more rows than seeds of 16 bits could keep apart."""
    seeds = [seed, seed + 1, seed + 10, -1 - seed, 2**63 + seed, 2**64 + seed]
    names = "layers.1.weight layers.2.weight layers.1.thgiew layers.11.weight layers.1.bias w w1".split()
    found = list(product(seeds, names, (0, 1, 2, 11, 12, 110, 10**9)))
    return found + [(seed, "w", row) for row in range(200, 800)]


def part_of(name, whole, way, world_size, rank):
    """Return a rank's part, and the number of its first row."""
    if name in facts.UNSHARDED:
        return whole, 0
    dim = 1 if way == "fully_shard" and name.startswith("columns") else 0
    return laws.rows_of(whole, rank, world_size, dim), 0 if dim else rank * -(-len(whole) // world_size)


def alike(got, right):
    return got.shape == right.shape and bool((got == right).all())


# --- Laws --------------------------------------------------------------------------------------------------


def right_calls(where, calls, whole, part, first):
    """init is called for each row of the part, from the row's own generator. first: the number of the part's first row."""
    row_shape = list(whole.shape[1:])
    rows = whole if whole.ndim else whole.view(1)
    for shape, dtype, kind, *_ in calls:
        if shape != row_shape:
            names = {whole.ndim: "one-sequence", whole.ndim - 1: "row-in-part"}
            equal(
                names.get(len(shape), "wrong-value"), f"{where} init gets a tensor of shape", shape, row_shape
            )
        equal("drawn-in-wrong-dtype", f"{where} init gets a row in", dtype, whole.dtype)
        equal("wrong-value", f"{where} init gets a", kind, "Tensor")
    count = (len(part) if part.ndim else 1) if part.numel() else 0
    equal(
        "rows-of-others" if len(calls) > count else "not-initialized",
        f"{where} rows that init gets",
        len(calls),
        count,
    )
    for number, (*_, got) in enumerate(calls, first):
        if not torch.equal(got, rows[number]):
            words = f"row {number} is not drawn from row_generator of the seed, this name and this number"
            raise Finding("wrong-value", f"{where} {words}.", rows[number], got)


def right_part(where, got, part):
    if not alike(got, part):
        left = got.shape == part.shape and bool(got.isnan().any())
        words = (
            laws.largest_difference(got, part) if got.shape == part.shape else f"of shape {tuple(got.shape)}"
        )
        raise Finding(
            "not-initialized" if left else "wrong-rows",
            f"{where} was drawn, but is wrong {words}.",
            part,
            got,
        )
