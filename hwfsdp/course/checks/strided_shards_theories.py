"""12: explanations of wrong orders of cuts and wrong boxes. A theory is named only if it explains all the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

from hwfsdp.course.checks.strided_shards_runs import Cuts, Sizes
from hwfsdp.course.verdict import Finding

Orders = dict[int, list[int]]

# --- Orders ------------------------------------------------------------------------------------------------


def explain_orders(cases: Sequence[Cuts], answers: Sequence[Any]) -> None:
    """Raise a Finding if an order is not the one that the placements say. Mesh dims of size 1 may be anywhere."""
    pairs = list(zip(cases, answers, strict=True))
    wrong = [(cuts, answer) for cuts, answer in pairs if not _is_right(cuts, answer)]
    if not wrong:
        return
    cuts, answer = wrong[0]
    got = f"was refused ({answer})" if isinstance(answer, str) else f"is {dict(map(tuple, answer))}"
    wanted = cuts.by_dim()
    text = f"{cuts}: orders_of_cuts {got}, expected {wanted}."
    raise Finding(_order_misconception(pairs, wrong), text, str(wanted), str(answer))


def _is_right(cuts: Cuts, answer: Any) -> bool:
    return not isinstance(answer, str) and _settled(cuts, _orders(answer)) == _settled(cuts, cuts.by_dim())


def _settled(cuts: Cuts, orders: Orders) -> Orders:
    """Put mesh dims of size 1 last, sorted: they may be anywhere."""
    ones = [m for m, size in enumerate(cuts.mesh) if size == 1]
    return {dim: sorted(order, key=lambda m: m + 1 if m in ones else 0) for dim, order in orders.items()}


def _orders(answer: Any) -> Orders:
    return {dim: order for dim, order in answer if order}


def _order_misconception(pairs: Sequence[tuple[Cuts, Any]], wrong: Sequence[tuple[Cuts, Any]]) -> str:
    made, refused = ([(c, a) for c, a in pairs if isinstance(a, str) is kind] for kind in (False, True))
    counted = any(
        {m for _, order in a for m in order} - _cutting(c) for c, a in wrong if not isinstance(a, str)
    )
    if counted or all(_is_mixed(cuts) for cuts, _ in wrong):
        return "counted-as-cut"
    for theory in ORDER_THEORIES:
        if any(pair in wrong for pair in made) and all(_as(theory, *pair) for pair in made):
            return "wrong-order-of-cuts"
    simple = any(max(sum(c.mesh[m] > 1 for m in order) for order in c.orders) <= 2 for c, _ in wrong)
    return "wrong-order-of-cuts" if simple and not refused else "wrong-split-factor"


OrderTheory = Callable[[Sequence[int]], list[int]]
ORDER_THEORIES: tuple[OrderTheory, ...] = (
    sorted,
    lambda order: sorted(order, reverse=True),
    lambda order: list(order)[::-1],
)


def _cutting(cuts: Cuts) -> set[int]:
    return {m for order in cuts.orders for m in order}


def _is_mixed(cuts: Cuts) -> bool:
    """True if some mesh dim cuts nothing, or cuts another tensor dim than the others."""
    return len(cuts.by_dim()) != 1 or len(_cutting(cuts)) < len(cuts.mesh)


def _as(theory: OrderTheory, cuts: Cuts, answer: Any) -> bool:
    return _orders(answer) == {dim: theory(order) for dim, order in cuts.by_dim().items()}


# --- Boxes -------------------------------------------------------------------------------------------------


class Box(NamedTuple):
    """A rank's box: (length, offset) in each tensor dim, as returned and as expected."""

    cuts: Cuts
    shape: Sizes
    coordinate: Sizes
    actual: list[tuple[int, int]]
    expected: list[tuple[int, int]]

    @property
    def is_line(self) -> bool:
        """True if theories apply to it: one tensor dim, and small."""
        return len(self.shape) == 1 and self.shape[0] < 1000 and len(self.cuts.orders) == 1

    @property
    def is_even(self) -> bool:
        sizes = [prod(self.cuts.mesh[m] for m in order) for order in self.cuts.orders]
        return all(n % size == 0 for n, size in zip(self.shape, sizes, strict=False))

    @property
    def has_right_lengths(self) -> bool:
        return [n for n, _ in self.actual] == [n for n, _ in self.expected]

    @property
    def is_right_if_not_empty(self) -> bool:
        return all(a == e or e[0] == 0 for a, e in zip(self.actual, self.expected, strict=True))


def explain_boxes(boxes: Sequence[Box]) -> None:
    """Raise a Finding if a box differs from nested chunking."""
    wrong = [box for box in boxes if box.actual != box.expected]
    if not wrong:
        return
    name = _box_misconception(boxes, wrong)
    telling = wrong  # the boxes that show this mistake best
    if name == "evenness-assumed":
        telling = [box for box in wrong if not box.is_even]
    elif name == "wrong-order-of-cuts":
        telling = [box for box in wrong if prod(box.cuts.mesh) > 1 and box.is_line]
    box = (telling or wrong)[0]
    orders = [f"mesh dims {order} along dim {dim}" for dim, order in box.cuts.by_dim().items()]
    text = f"nested_extent for shape {box.shape} on mesh {box.cuts.mesh}, cut by {' and '.join(orders) or 'none'}, coordinate "
    text += f"{box.coordinate}, is {_say_box(box.actual)}; expected {_say_box(box.expected)}."
    raise Finding(name, text, _say_box(box.expected), _say_box(box.actual))


def _say_box(box: Sequence[tuple[int, int]]) -> str:
    return f"shape {tuple(n for n, _ in box)} at {tuple(o for _, o in box)}"


def _box_misconception(boxes: Sequence[Box], wrong: Sequence[Box]) -> str:
    right_lengths = all(box.has_right_lengths for box in wrong)
    if right_lengths and all(box.is_right_if_not_empty for box in wrong):
        return "empty-at-zero"
    lines = [b for b in boxes if b.is_line]
    for name, theory in THEORIES:
        if any(b in wrong for b in lines) and all(_same(b, theory) for b in lines):
            return name
    if all(max(b.shape, default=0) > 2**53 for b in wrong):
        return "float-for-integer"
    return "wrong-rows" if right_lengths or any(b.is_even for b in wrong) else "evenness-assumed"


class Cut(NamedTuple):
    """One cut: the mesh dim, the number of chunks, and the index of the rank's chunk."""

    mesh_dim: int
    size: int
    which: int


Theory = Callable[[int, list[Cut]], tuple[int, int]]  # rows, cuts in order → length, offset
Chunk = Callable[[int, Cut], tuple[int, int]]  # rows, cut → start and length of the rank's chunk


def _same(box: Box, theory: Theory) -> bool:
    """True if the theory gives the returned box. If no rows are left, the offset does not matter."""
    mesh, order = box.cuts.mesh, box.cuts.orders[0]
    made = theory(box.shape[0], [Cut(m, mesh[m], box.coordinate[m]) for m in order])
    actual = box.actual[0]
    return made == actual or (made[0] <= 0 and actual[0] <= 0)


def _ceiling(n: int, cut: Cut) -> tuple[int, int]:
    """Cut as `torch.chunk` does."""
    chunk = -(-n // cut.size)
    start = min(cut.which * chunk, n)
    return start, min(chunk, n - start)


def nested(n: int, cuts: Sequence[Cut], chunk: Chunk = _ceiling) -> tuple[int, int]:
    """Return length and offset of what is left after all cuts, each a chunk of the chunk before."""
    offset, length = 0, n
    for cut in cuts:
        start, length = chunk(length, cut)
        offset += start
    return length, offset


def _balanced(n: int, cut: Cut) -> tuple[int, int]:
    """Spread the remainder over the first ranks."""
    quotient, rest = divmod(n, cut.size)
    return cut.which * quotient + min(cut.which, rest), quotient + (cut.which < rest)


def _divided(n: int, cut: Cut) -> tuple[int, int]:
    """Leave out the remainder."""
    return cut.which * (n // cut.size), n // cut.size


def _overlong(n: int, cut: Cut) -> tuple[int, int]:
    """Give every rank a full chunk."""
    return cut.which * -(-n // cut.size), -(-n // cut.size)


def _once(n: int, cuts: list[Cut]) -> tuple[int, int]:
    """Make one cut into as many chunks as there are ranks."""
    size, index = 1, 0
    for _, more, inner in cuts:
        size, index = size * more, index * more + inner
    return nested(n, [Cut(0, size, index)])


def _stripes(n: int, cuts: list[Cut]) -> tuple[int, int]:
    """Cut from left to right. A mesh dim takes a stripe of each piece that mesh dims on its right cut before."""
    rows, order = list(range(n)), [cut.mesh_dim for cut in cuts]
    for cut in sorted(cuts):
        earlier = prod(c.size for c in cuts[: order.index(cut.mesh_dim)] if c.mesh_dim > cut.mesh_dim)
        pieces = [_chunk(rows, earlier, index) for index in range(earlier)]
        rows = [row for piece in pieces for row in _chunk(piece, cut.size, cut.which)]
    return (len(rows), rows[0]) if rows else (0, n)


def _chunk(rows: list[int], size: int, index: int) -> list[int]:
    start, length = _ceiling(len(rows), Cut(0, size, index))
    return rows[start : start + length]


THEORIES: tuple[tuple[str, Theory], ...] = (
    ("replicated", lambda n, cuts: (n, 0)),
    ("stripes-not-boxes", _stripes),
    ("wrong-order-of-cuts", lambda n, cuts: nested(n, sorted(cuts))),
    ("wrong-order-of-cuts", lambda n, cuts: nested(n, cuts[::-1])),
    ("spread-evenly", lambda n, cuts: nested(n, cuts, _balanced)),
    ("floor-instead-of-ceil", lambda n, cuts: nested(n, cuts, _divided)),
    ("past-the-end", lambda n, cuts: nested(n, cuts, _overlong)),
    ("evenness-assumed", _once),
)
