"""02 Ring: what must hold.

One to four ranks call your functions on whole numbers, so that sums are exact in any order. Everything that a rank sends and receives
is watched below every function that your file may call.

    pytest exercises/02_ring -k gather -s      one test, with what the ranks print
"""

import pytest
import torch
from facts_ring import probe_rings

from hwfsdp.course import laws
from hwfsdp.course.findings import Finding

pytestmark = pytest.mark.exercise("02", title="Ring", file="my_fsdp.py")

N = 5  # elements of a piece
SIZES = [3, 2, 4, 1]


def given(seed, size):
    """The input of each rank, [W, W * N]."""
    return torch.randint(1, 1000, (size, size * N), generator=torch.Generator().manual_seed(seed)).float()


@pytest.mark.points(3, ask="Which rank's piece has this rank just received, in round s?")
@pytest.mark.parametrize("size", SIZES)
def test_gather(ranks, seed, size):
    """A ring brings every rank's piece to every rank; each rank sends (W - 1) / W of the whole, to its neighbor only."""
    found = ranks(size).ask(probe_rings, "gather", whole=given(seed, size))
    pieces = given(seed, size)[:, :N]
    owners = [owners_of(facts["output"], pieces) for facts in found]
    mirrored = all(
        of == [(2 * rank - block) % size for block in range(size)] for rank, of in enumerate(owners)
    )
    for rank, facts in enumerate(found):
        where = f"ring_all_gather, rank {rank} of {size}"
        only_sends_and_receives(where, facts)
        if not torch.equal(facts["output"], pieces.flatten()):
            shown = ", ".join("no rank's" if owner is None else f"rank {owner}'s" for owner in owners[rank])
            kind = "wrong-neighbor" if mirrored else "wrong-block"
            if None in owners[rank]:
                kind = "block-missing" if (facts["output"] == -1).any() else "wrong-value"
            right = f"rank 0's to rank {size - 1}'s"
            raise Finding(kind, f"{where}: the pieces are {shown}; expected {right}.")
        sends_what_it_must(where, facts, pieces[rank], rank, size)
        sent = [pieces[(rank - step) % size] for step in range(size - 1)]
        passes_on(where, facts, sent)


@pytest.mark.points(
    3, ask="Which rank's sum does this rank pass on in round s, and which ranks have added to it?"
)
@pytest.mark.parametrize("size", SIZES)
def test_reduce(ranks, seed, size):
    """A ring brings each rank the sum of its pieces; each rank sends (W - 1) / W of the whole, to its neighbor only."""
    found, whole = ranks(size).ask(probe_rings, "reduce", whole=given(seed, size)), given(seed, size)
    pieces = whole.view(size, size, N)  # [of rank, for rank, N]
    totals = pieces.sum(0)
    for rank, facts in enumerate(found):
        where, got = f"ring_reduce_scatter, rank {rank} of {size}", facts["output"]
        only_sends_and_receives(where, facts)
        if not torch.equal(got, totals[rank]):
            for other, total in enumerate(totals):
                if torch.equal(got, total):
                    said = f"{where}: this is the sum for rank {other}, expected the sum for rank {rank}."
                    raise Finding("wrong-block", said, rank, other)
            if torch.allclose(got * size, totals[rank]):
                raise Finding(
                    "averaged-not-summed", f"{where}: this is the mean, not the sum.", totals[rank], got
                )
            at = laws.largest_difference(got, totals[rank])
            raise Finding(
                "wrong-value", f"{where}: this is not the sum of all ranks' pieces {at}.", totals[rank], got
            )
        sends_what_it_must(where, facts, whole[rank], rank, size)
        # a sum begins at the rank after the one that it is for, and grows at each rank
        sent = [
            sum(pieces[(rank - back) % size, (rank - step) % size] for back in range(step))
            for step in range(1, size)
        ]
        passes_on(where, facts, sent)


def owners_of(got, pieces):
    """The rank to which each piece belongs; None for a piece that is no rank's."""
    blocks = got.view(len(pieces), N)
    return [
        next((r for r, piece in enumerate(pieces) if torch.equal(block, piece)), None) for block in blocks
    ]


def only_sends_and_receives(where, facts):
    """No other collective is called."""
    if facts["others"]:
        called = ", ".join(dict.fromkeys(facts["others"]))
        raise Finding("not-a-ring", f"{where}: calls {called}.", "send and receive", called)


def sends_what_it_must(where, facts, kept, rank, size):
    """The input is unchanged. This rank sends only the necessary bytes, to the next rank, and receives from the previous one."""
    if not torch.equal(facts["input"], kept):
        raise Finding(
            "input-changed", f"{where}: the input has changed {laws.largest_difference(facts['input'], kept)}."
        )
    for kind, peer in (("send", (rank + 1) % size), ("recv", (rank - 1) % size)):
        moves = [(other, nbytes) for what, other, nbytes in facts["moves"] if what == kind]
        for other, _ in moves:
            if other != peer:
                said = f"{where}: {kind}s have rank {other} at their other end; expected rank {peer}."
                raise Finding("wrong-neighbor", said, peer, other)
        nbytes, right = sum(nbytes for _, nbytes in moves), (size - 1) * N * 4
        if nbytes != right:
            enough = f"a piece is {4 * N} B, and {size - 1} rounds are enough"
            said = f"{where}: {kind} {nbytes} B in {len(moves)} rounds; {enough}."
            raise Finding("too-much-traffic" if nbytes > right else "too-little-traffic", said, right, nbytes)


def passes_on(where, facts, sent):
    """The messages consist of these tensors, in any order and cut in any way: nothing else goes around a ring."""
    right = torch.cat([torch.empty(0, dtype=torch.uint8), *(each.view(torch.uint8) for each in sent)])
    if not torch.equal(facts["sent"].sort().values, right.sort().values):
        said = f"{where}: the result is right, but its messages do not hold what a ring passes on."
        raise Finding("not-a-ring", said)
