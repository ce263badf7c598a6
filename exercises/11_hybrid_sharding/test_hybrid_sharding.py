"""11 Hybrid sharding: what must hold.

The tests shard a model on a mesh of 2 x 2 ranks, on 1 x 2 and on 2 x 1. They know its gradients from the unsharded model. They see
every collective, the ranks that take part, and its bytes. A collective takes its inputs when it begins, and gives its results when the
program waits for it: whoever reads them too early reads NaN.

    pytest exercises/11_hybrid_sharding -k traffic     one test
"""

from itertools import product

import facts_hybrid_sharding as facts
import pytest
import torch

from hwfsdp.course import laws
from hwfsdp.course.findings import Finding
from hwfsdp.course.laws import equal, rows_of

pytestmark = pytest.mark.exercise("11", title="Hybrid sharding", file="hybrid_sharding.py")

meshes = pytest.mark.parametrize(("replicas", "shards"), [(2, 2), (1, 2), (2, 1)])
ONE, TWO, PARTIAL = facts.RUNS


@pytest.mark.points(1, ask="How large is the whole parameter, and how large are a rank's rows of it?")
@meshes
def test_traffic(ranks, seed, replicas, shards):
    """Each rank knows its axes. Gathers and reduce-scatters stay in the node; rows, and only rows, go across; each has its bytes."""
    right_axes(ranks(replicas * shards).ask(facts.probe_axes, "axes", replicas=replicas), replicas, shards)
    for rank, run in enumerate(runs(ranks, seed, ONE, replicas, shards)):
        where, moved = f"Mesh {replicas} x {shards}, rank {rank}:", bytes_by_op(run[0])
        for op, (least, most, whole) in right_bytes(rank, replicas, shards).items():
            got = moved[op]
            if op == "all_reduce" and got >= whole > most:
                words = f"{where} the all-reduces have {got:,} B; whole gradients have {whole:,} B"
                raise Finding("reduced-whole", f"{words}.", most, got)
            if not least <= got <= most:
                missing = "drifted" if op == "all_reduce" and not got else "too-little-traffic"
                kind = "too-much-traffic" if got > most else missing
                words = f"{op} has {got:,} B in a step, expected {most:,} B ({least:,} B without padding)"
                raise Finding(kind, f"{where} {words}.", most, got)


@pytest.mark.points(
    1, ask="Which ranks' batches are in this gradient, and by which number is their sum divided?"
)
@meshes
@pytest.mark.parametrize("name", [ONE, TWO])
def test_numbers(ranks, seed, name, replicas, shards):
    """Each rank keeps its rows, and their gradients are the mean over all ranks: what unsharded PyTorch computes."""
    right_gradients(runs(ranks, seed, name, replicas, shards), seed, name, replicas, shards)


@pytest.mark.points(1, ask="When does the backward go on, and when must a collective be over?")
@meshes
def test_waits(ranks, seed, replicas, shards):
    """The backward goes on while rows go across. At its end, their mean is there. Whole gradients are gone before."""
    most = 2 * sum(param.nbytes for param in facts.Block("", facts.Log()).parameters())
    for rank, run in enumerate(runs(ranks, seed, ONE, replicas, shards)):
        where, [moment] = f"Mesh {replicas} x {shards}, rank {rank}:", run
        blocks, begun = 0, dict[int, int]()  # blocks whose backward had begun when an all-reduce began
        for number, (op, *what) in enumerate(moment["calls"], moment["first"]):
            blocks += op == "backward"
            if op == "all_reduce":
                begun[number] = blocks
            elif op == "wait" and begun.pop(what[0], None) == blocks < len(facts.BLOCKS):
                words = "the backward waits for an all-reduce before it goes on to the next block"
                raise Finding("no-overlap", f"{where} {words}.")
            elif op == "reduce_scatter" and what[2] > most:
                words = f"{what[2]:,} B of earlier whole gradients are there; two blocks have {most:,} B"
                raise Finding("kept-alive", f"{where} {words}.", most, what[2])
        if begun:
            raise Finding("left-in-flight", f"{where} a backward does not wait for {len(begun)} all-reduces.")


@pytest.mark.points(1, ask="Which gradients have not gone to other nodes yet, and where are they?")
@meshes
def test_partial(ranks, seed, replicas, shards):
    """Without all-reduces, gradients add up in the node. The next all-reduce takes them along, also the gradients of blocks that do not run."""
    found = runs(ranks, seed, PARTIAL, replicas, shards)
    for rank, run in enumerate(found):
        for number, (micro, moment) in enumerate(zip(facts.RUNS[PARTIAL], run, strict=True)):
            where = f"Mesh {replicas} x {shards}, rank {rank}, micro-batch {number}:"
            moved = bytes_by_op(moment)
            if moved["all_reduce"] and not micro.all_reduces:
                raise Finding("reduced-too-often", f"{where} an all-reduce; requires_all_reduce is False.")
            if shards > 1 and not moved["reduce_scatter"]:
                raise Finding("not-reduced", f"{where} no reduce-scatter inside the node.")
    right_gradients(found, seed, PARTIAL, replicas, shards)


# --- What is right -----------------------------------------------------------------------------------------


def right_bytes(rank, replicas, shards):
    """Return what travels in a step, by op: without padding, with it, and of whole tensors. All is gathered twice, and reduced once."""
    found = {op: (0, 0, 0) for op in facts.OPS}
    for name, param in facts.Model(0, facts.Log()).named_parameters():
        own = rows_of(param, rank % shards, shards).nbytes
        padded = -(-len(param) // shards) * param[0].nbytes
        gathers, trains = 2 * (shards > 1), (shards > 1) * param.requires_grad
        for op, times, least, most in (
            ("all_gather", gathers, param.nbytes, shards * padded),
            ("reduce_scatter", trains, param.nbytes, shards * padded),
            ("all_reduce", (replicas > 1) * param.requires_grad, own, padded),
        ):
            sizes = (least, most, param.nbytes) if not name.startswith("shift") else (0, 0, 0)
            found[op] = tuple(sum + times * size for sum, size in zip(found[op], sizes, strict=True))
    return found


def arrivals(name):
    """Yield, for each micro-batch, the micro-batches whose gradients must be there after it."""
    arrived, waiting = [], []
    for number, micro in enumerate(facts.RUNS[name]):
        arrived, waiting = [] if micro.begins else arrived, [*waiting, number]
        if micro.all_reduces:
            arrived, waiting = [*arrived, *waiting], []
        yield arrived


# --- Laws --------------------------------------------------------------------------------------------------


def right_axes(found, replicas, shards):
    """Each rank knows the ranks of its node, the ranks that hold the same rows, and its place among them."""
    for rank, axes in enumerate(found):
        right = facts.lines_of(rank, replicas, shards)
        for name, other in (("shard", "replicate"), ("replicate", "shard")):
            (*members, number), of = axes[name], right[name]
            where = f"Mesh {replicas} x {shards}, rank {rank}: the axis {name} has"
            for got in members:
                equal("axes-swapped" if got == right[other] else "wrong-group", f"{where} ranks", got, of)
            equal("wrong-group", f"{where} this rank at place", number, of.index(rank))


def runs(ranks, seed, name, replicas, shards):
    """Run micro-batches. Each rank keeps its rows. Each collective runs over the right ranks, and never over one; nothing else travels."""
    asked, run = ranks(replicas * shards), {"seed": seed, "replicas": replicas, "name": name}
    for rank, sharded in enumerate(asked.ask(facts.probe_run, "sharded", **run)):
        right_rows(sharded, f"Mesh {replicas} x {shards}, rank {rank}:", seed, rank % shards, shards)
    found = asked.ask(facts.probe_run, name, **run)
    for rank, moments in enumerate(found):
        right = facts.lines_of(rank, replicas, shards)
        for op, *what in (call for moment in moments for call in moment["calls"]):
            where = f"Mesh {replicas} x {shards}, rank {rank}: {op}"
            if op in ("wait", "backward"):
                continue
            if op not in facts.OPS:
                raise Finding("too-much-traffic", f"{where} is called, which this exercise does not need.")
            own, other = ("replicate", "shard") if op == "all_reduce" else ("shard", "replicate")
            kind = "axes-swapped" if what[0] == right[other] else "wrong-group"
            equal(kind, f"{where} runs over ranks", what[0], right[own])
            if len(what[0]) == 1:
                raise Finding("nobody-to-send-to", f"{where} runs over rank {rank} alone.")
            if what[3]:
                raise Finding("aliased", f"{where} writes to a gradient that autograd may read again.")
    return found


def right_rows(sharded, where, seed, number, shards):
    equal("not-returned", f"{where} hybrid_shard does not return the module", sharded["returned"], True)
    for name, whole in facts.Model(seed, facts.Log()).named_parameters():
        right, most = rows_of(whole.detach(), number, shards), -(-len(whole) // shards) * whole[0].nbytes
        got, held = sharded["rows"].get(name, (None, 0))
        if got is None or not torch.equal(got, right):
            raise Finding("wrong-rows", f"{where} the registered rows of {name} are wrong.", right, got)
        if held > most:
            raise Finding("replicated", f"{where} the rows of {name} keep {held} B of memory.", most, held)


def bytes_by_op(moment):
    return {op: sum(what[1] for each, *what in moment["calls"] if each == op) for op in facts.OPS}


def right_gradients(found, seed, name, replicas, shards):
    """After each micro-batch, the gradients of all ranks are right."""
    world = replicas * shards
    parts = facts.parts_of(name, seed, world)
    for (number, arrived), rank in product(enumerate(arrivals(name)), range(world)):
        where = f"Mesh {replicas} x {shards}, {name}, rank {rank}, after micro-batch {number}:"
        for each, grad in found[rank][number]["grads"].items():
            given = [part for of in parts for micro in arrived if (part := of[micro][each]) is not None]
            if grad is None and given:
                kind = "partial-forgotten" if name == PARTIAL else "grad-lost"
                raise Finding(kind, f"{where} {each} has no gradient.")
            if grad is not None and not given:
                kind = "reduced-too-often" if name == PARTIAL else "wrong-value"
                raise Finding(kind, f"{where} {each} has a gradient, which nothing has given it yet.")
            if given:
                right = rows_of(sum(given), rank % shards, shards) / world
                equal("wrong-rows", f"{where} {each}.grad has shape", list(grad.shape), list(right.shape))
                same_gradient(f"{where} {each}.grad, of micro-batches {arrived},", grad, right)


def same_gradient(where, grad, right):
    """The gradient is right. If it is not, it differs by a factor, or somewhere."""
    if torch.allclose(grad, right, rtol=1e-4, atol=1e-5):
        return
    if grad.isnan().any():
        words = "has nan: the result of a collective is used before the program waits for it"
        raise Finding("used-before-wait", f"{where} {words}.", right, grad)
    factor = laws.ratio(grad, right)
    if factor is not None and (0 < factor < 0.9 or factor > 1.1):
        kind = "summed-not-averaged" if factor > 1 else "averaged-twice"
        raise Finding(kind, f"{where} is {factor:.3g} times the mean over all ranks.", right, grad)
    raise Finding("wrong-value", f"{where} is wrong {laws.largest_difference(grad, right)}.", right, grad)
