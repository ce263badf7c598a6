"""12 Strided shards: what must hold.

The tests make the cuts themselves, one after the other (`Cuts`), so they know their order, the right placements and each rank's box.
Your functions see a part of this, and have to find the rest: for all orders of cuts on all meshes up to 4 x 4 and 3 x 3 x 3, and for
others that the seed draws.
"""

import random
from itertools import permutations, product
from math import prod
from typing import NamedTuple

import facts_strided_shards as facts
import pytest
import torch
from facts_strided_shards import shown
from torch.distributed.tensor import Partial, Replicate, Shard

from hwfsdp.compat import is_shard, strided_shard
from hwfsdp.course import laws
from hwfsdp.course.findings import Finding
from hwfsdp.course.laws import equal
from hwfsdp.course.ranks import Unanswered

pytestmark = pytest.mark.exercise("12", title="Strided shards", file="strided_shards.py", may="hwfsdp.compat")

PADDING, REPLICA = 777.0, 888.0  # values that must not be in a whole tensor


@pytest.mark.points(
    1, ask="Which axes have cut this dim before FSDP does, and where do their placements stand?"
)
def test_placement(ranks, seed):
    """FSDP's placement counts the pieces that exist when it cuts. In the joined mesh, FSDP's axes are the outer ones."""
    cases = axes_before_fsdp(seed)
    cuts = answers(ranks, "cut_after", [(each.axes, each.dim) for each in cases])
    arguments = [(each.own, [p for p, _ in each.axes], [n for _, n in each.axes], each.dim) for each in cases]
    found = answers(ranks, "joined_placements", arguments)
    all_right("wrong-split-factor", "cut_after", cases, cuts, Axes.cut)
    all_right("wrong-placement", "joined_placements", cases, found, Axes.joined)


@pytest.mark.points(1, ask="In which order were the cuts made that the placements describe?")
def test_order(ranks, seed):
    """The order of the cuts follows from the placements; split factors that no cuts make are refused."""
    cases = small_cuts() + mixed_cuts(seed)
    arguments = [(cuts.mesh, cuts.placements) for cuts in cases]
    found = answers(ranks, "orders_of_cuts", arguments + IMPOSSIBLE)
    for cuts, answer in zip(cases, found, strict=False):
        where = f"{cuts} orders_of_cuts"
        if not is_order(answer, len(cuts.mesh)):
            raise Finding("wrong-value", f"{where} returns {answer}, expected a dict of lists of axes, counted from 0.")
        same("wrong-order-of-cuts", where, cuts.settled(answer), cuts.settled(cuts.by_dim.items()))
    for (mesh, placements), answer in zip(IMPOSSIBLE, found[len(cases) :], strict=True):
        where = f"mesh {mesh}, {all_shown(placements)}, where no cuts make that many pieces: orders_of_cuts"
        same("wrong-split-factor", where, str(answer)[:10], "ValueError")


@pytest.mark.points(1, ask="What is left of the rows after each cut, and which tensor owns its memory?")
def test_shards(ranks, seed):
    """Each rank has the box that chunks of chunks leave. Shards are these boxes, each in its own memory; gradients flow back."""
    boxes = [Box(cuts, shape, at) for cuts, shape in shapes_to_cut(seed) for at in cuts.coordinates]
    arguments = [(box.shape, box.cuts.mesh, box.cuts.by_dim, box.coordinate) for box in boxes]
    of_boxes = answers(ranks, "box_of", arguments)
    cases = tensors(seed)
    arguments = [(each.whole, each.cuts.mesh, each.cuts.placements, each.pad) for each in cases]
    of_tensors = answers(ranks, "shard_strided", arguments)
    all_right("wrong-rows", "box_of", boxes, of_boxes, Box.right)
    for case, found in zip(cases, of_tensors, strict=True):
        right, where = case.shards(), f"{case} shard_strided:"
        ran(where, found)
        same("not-a-shard-each", f"{where} the number of shards", len(found["shards"]), len(right))
        for at, got, expected, box in zip(case.cuts.coordinates, found["shards"], right, case.pieces):
            same(shard_mistake(got, expected, box), f"{where} the shard of {at}", got, expected)
        held, grad = [shard.nbytes for shard in right], (
            case.gradient if case.dtype.is_floating_point else None
        )
        equal("wrong-value", f"{where} not contiguous, as collectives need it", found["contiguous"], True)
        equal("input-changed", f"{where} the tensor that is cut was written to", found["written"], False)
        equal("aliased", f"{where} a view of the tensor, which keeps all of it alive", found["view"], False)
        same("kept-alive", f"{where} the bytes that shards keep alive", found["bytes"], held)
        equal("kept-alive", f"{where} shards share memory", found["shared"], False)
        same("grad-lost", f"{where} the gradient of the tensor that is cut", found["grad"], grad)


@pytest.mark.points(1, ask="Where does the first element of each shard belong?")
def test_whole(ranks, seed):
    """The whole comes back without padding, from the first of all replicas; shards that do not fit are refused."""
    cases = tensors(seed)
    first, *others = cases[0].shards()
    given = [(case, case.shards(PADDING, REPLICA)) for case in cases]
    wrong = {"one shard less than ranks": [first, *others[:-1]], "a short shard": [first[:1], *others]}
    wrong["a long shard"] = [torch.ones(3), *others]
    fitting = [(shards, case.shape, case.cuts.mesh, case.cuts.placements) for case, shards in given]
    calls = {"unshard_strided": fitting, "misfits": [(shards, *fitting[0][1:]) for shards in wrong.values()]}
    found = ranks(1).ask(facts.probe_calls, "unshard_strided", calls=calls)[0]
    for case, answer in zip(cases, found, strict=True):
        where = f"{case} unshard_strided:"
        ran(where, answer)
        same(whole_mistake(case, answer["whole"]), f"{where} the whole", answer["whole"], case.whole)
        equal(
            "input-changed",
            f"{where} a shard was written to, or the whole is in it",
            answer["touched"],
            False,
        )
        equal("grad-lost", f"{where} gradients do not reach the shards", answer["attached"], True)
    for what, answer in zip(wrong, ranks(1).ask(facts.probe_calls, "misfits", calls=calls)[0], strict=True):
        if answer != "raises ValueError":
            raise Finding("wrong-value", f"Given {what}, unshard_strided {answer}, expected ValueError.")


# --- What is right -----------------------------------------------------------------------------------------


class Cuts(NamedTuple):
    """Which axes of a mesh cut which dim of a tensor: `orders[dim]` has the axes, the first cut first."""

    mesh: tuple[int, ...]
    orders: tuple[tuple[int, ...], ...]

    by_dim = property(lambda self: {dim: list(order) for dim, order in enumerate(self.orders) if order})
    coordinates = property(lambda self: list(product(*map(range, self.mesh))))

    @property
    def placements(self):
        """The same, as a DTensor says it: a strided shard names the pieces that axes on its right have made before."""
        found = [Replicate() for _ in self.mesh]
        for dim, order in self.by_dim.items():
            for place, axis in enumerate(order):
                before = [self.mesh[other] for other in order[:place] if other > axis]
                found[axis] = strided_shard(dim, prod(before)) if before else Shard(dim)
        return found

    def piece(self, whole, coordinate):
        """Cut by `torch.chunk`, again and again. A rank for which no chunk is left has nothing."""
        for dim, order in self.by_dim.items():
            for axis in order:
                left = whole.narrow(dim, 0, 0)
                whole = [*whole.chunk(self.mesh[axis], dim), *[left] * self.mesh[axis]][coordinate[axis]]
        return whole

    def settled(self, order):
        """Leave out the axes of one rank, which may stand anywhere."""
        kept = [[dim, [axis for axis in axes if self.mesh[axis] > 1]] for dim, axes in order]
        return [[dim, axes] for dim, axes in kept if axes]

    def __str__(self):
        return f"mesh {self.mesh}, {all_shown(self.placements)}:"


class Axes(NamedTuple):
    """The axes on the right of FSDP's axes, which are for the placements `own`."""

    axes: list
    dim: int
    own: list

    def cut(self):
        pieces = prod(n for placement, n in self.axes if is_shard(placement) and placement.dim == self.dim)
        return shown(strided_shard(self.dim, pieces) if pieces > 1 else Shard(self.dim))

    def joined(self):
        return [*map(shown, self.own[:-1]), self.cut(), *(shown(p) for p, _ in self.axes)]

    def __str__(self):
        axes = ", ".join(f"{shown(p)} over {n}" for p, n in self.axes) or "no axes"
        return f"{axes}; then FSDP cuts dim {self.dim} by {all_shown(self.own)}:"


class Box(NamedTuple):
    """The box of the rank at this coordinate."""

    cuts: Cuts
    shape: tuple[int, ...]
    coordinate: tuple[int, ...]

    def right(self):
        """Return lengths and offsets. If nothing is left, a box is at the end of the tensor."""
        lengths, offsets = [], []
        for dim, n in enumerate(self.shape):
            length, offset = n, 0
            for axis in self.cuts.by_dim.get(dim, []):
                chunk = -(-length // self.cuts.mesh[axis])
                start = min(self.coordinate[axis] * chunk, length)
                length, offset = min(chunk, length - start), offset + start
            lengths.append(length)
            offsets.append(offset if length else n)
        return [lengths, offsets]

    def __str__(self):
        return f"shape {self.shape}, mesh {self.cuts.mesh}, orders {self.cuts.by_dim}, coordinate {self.coordinate}:"


class Tensors(NamedTuple):
    """A tensor to cut: all its elements differ, and none is zero."""

    cuts: Cuts
    shape: tuple[int, ...]
    dtype: torch.dtype
    pad: bool = False

    whole = property(lambda self: torch.arange(1, prod(self.shape) + 1).to(self.dtype).view(self.shape))
    pieces = property(lambda self: [self.cuts.piece(self.whole, at) for at in self.cuts.coordinates])

    def shards(self, padding=0.0, replica=None):
        """Return the right shards. `replica` fills all but the first of several ranks with the same box."""
        found, seen = [], set()
        for at, part in zip(self.cuts.coordinates, self.pieces, strict=True):
            again = (box := tuple(at[axis] for order in self.cuts.orders for axis in order)) in seen
            found.append(part.new_full(self.pieces[0].shape if self.pad else part.shape, padding))
            found[-1][tuple(map(slice, part.shape))] = replica if again and replica else part
            seen.add(box)
        return found

    @property
    def gradient(self):
        """Of the sum of (rank + 1) * shard."""
        found = torch.zeros(self.shape, dtype=self.dtype)
        for rank, at in enumerate(self.cuts.coordinates):
            self.cuts.piece(found, at).add_(rank + 1)
        return found

    def __str__(self):
        return f"shape {self.shape}{', pad' * self.pad}, {self.cuts}"


def all_shown(placements):
    return f"[{', '.join(map(shown, placements))}]"


# --- Cases -------------------------------------------------------------------------------------------------

IMPOSSIBLE = [
    ((3, 2), [strided_shard(0, 3), Shard(0)]),
    ((2, 2), [Shard(0), strided_shard(0, 2)]),
    ((2, 2, 3), [strided_shard(0, 3), Shard(0), Shard(0)]),
    ((2, 2), [strided_shard(0, 2), Shard(1)]),
    ((2, 2), [strided_shard(0, 2), Replicate()]),
]
UNEVEN = Tensors(Cuts((3, 2), ((1, 0),)), (7,), torch.float32)


def small_cuts():
    meshes = [*product(range(1, 5), repeat=2), *product(range(1, 4), repeat=3)]
    return [Cuts(mesh, (order,)) for mesh in meshes for order in permutations(range(len(mesh)))]


def mixed_cuts(seed):
    """Axes that cut different dims of a tensor, or none; small meshes first."""
    draw, found = random.Random(seed), list[Cuts]()
    while len(found) < 70:
        mesh, ndim = [draw.randint(1, 4) for _ in range(draw.randint(1, 4))], draw.randint(0, 3)
        owner = [draw.choice([None, *range(ndim)]) for _ in mesh]
        orders = [[axis for axis, of in enumerate(owner) if of == dim] for dim in range(ndim)]
        if prod(mesh) <= 64:
            found.append(Cuts(tuple(mesh), tuple(tuple(draw.sample(order, len(order))) for order in orders)))
    return sorted(found, key=lambda cuts: prod(cuts.mesh))


def shapes_to_cut(seed):
    """Every length up to 16 on meshes of two axes, some lengths on others, and a length that no float can hold."""
    draw = random.Random(seed)
    lines = [(each, range(17) if len(each.mesh) == 2 else draw.sample(range(28), 3)) for each in small_cuts()]
    found = [(cuts, (n,)) for cuts, lengths in lines for n in lengths]
    found += [(cuts, tuple(draw.randint(0, 9) for _ in cuts.orders)) for cuts in mixed_cuts(seed)]
    return [*found, (UNEVEN.cuts, (7, 3)), (Cuts((2, 2), ((1, 0),)), (10**16 + 1,))]


def tensors(seed):
    """Tensors that are cut in different ways, without and with padding; some leave many ranks without rows."""
    draw, found = random.Random(seed), [UNEVEN]
    for cuts in draw.sample(small_cuts(), 12) + mixed_cuts(seed)[:40]:
        shape = [draw.randint(1, 9) for _ in range(draw.randint(len(cuts.orders), 3))]
        found.append(Tensors(cuts, tuple(shape), draw.choice([torch.float32, torch.float64, torch.int64])))
    return [case._replace(pad=pad) for case in found for pad in (False, True)]


def axes_before_fsdp(seed):
    """Few axes first; each is joined with FSDP's shards, and with its replicas and shards."""
    draw, kinds = random.Random(seed), [
        Shard(0),
        Shard(1),
        Replicate(),
        Shard(0),
        strided_shard(0, 2),
        Partial(),
    ]
    drawn = [[(draw.choice(kinds), draw.randint(1, 4)) for _ in range(number // 20)] for number in range(80)]
    dims = [(axes, draw.randint(0, 1)) for axes in drawn]
    return [Axes(axes, dim, own) for axes, dim in dims for own in ([Shard(dim)], [Replicate(), Shard(dim)])]


# --- Laws --------------------------------------------------------------------------------------------------


def shard_mistake(got, expected, box):
    """box: the shard without padding."""
    if got.shape == box.shape != expected.shape:
        return "padding-dropped"
    if got.shape == expected.shape and got[tuple(map(slice, box.shape))].equal(box):
        return "padding-not-zero"
    return "padding-leaked" if got.numel() > expected.numel() else "wrong-rows"


def whole_mistake(case, got):
    if (got == PADDING).any() or got.numel() > case.whole.numel():
        return "padding-leaked"
    return "wrong-replica" if (got == REPLICA).any() else "wrong-rows"


def answers(ranks, function, arguments):
    found = ranks(1).ask(facts.probe_calls, function, calls={function: arguments})
    return found if isinstance(found, Unanswered) else found[0]  # a test asks all before it looks at one


def all_right(misconception, function, cases, found, right):
    """All answers of a function are right."""
    for case, answer in zip(cases, found, strict=True):
        same(misconception, f"{case} {function}", answer, right(case))


def is_order(answer, axes):
    """True if this is a dict of lists of axes: as pairs, unless it is empty."""
    return isinstance(answer, list | dict) and all(
        isinstance(pair, list)
        and len(pair) == 2
        and isinstance(pair[1], list)
        and all(type(axis) is int and 0 <= axis < axes for axis in pair[1])
        for pair in answer
    )


def ran(where, answer):
    if isinstance(answer, str):
        raise Finding("crashed", f"{where} {answer}")


def same(misconception, where, got, right):
    """Two facts are equal; tensors also in shape and dtype."""
    if isinstance(got, torch.Tensor) and isinstance(right, torch.Tensor):
        if got.shape == right.shape and got.dtype == right.dtype:
            if not torch.equal(got, right):
                raise Finding(
                    misconception, f"{where} is wrong {laws.largest_difference(got, right)}.", right, got
                )
            return
        got, right = f"{got.dtype} {tuple(got.shape)}", f"{right.dtype} {tuple(right.shape)}"
    if isinstance(got, torch.Tensor) != isinstance(right, torch.Tensor):
        raise Finding(misconception, f"{where} is {got}, expected {right}.", right, got)
    equal(misconception, f"{where} is", got, right)
