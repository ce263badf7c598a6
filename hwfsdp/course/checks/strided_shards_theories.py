"""12: what explains wrong orders of cuts, and wrong boxes. A theory is named only if it accounts for what came back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

from hwfsdp.course.checks.strided_shards_runs import Cuts, Sizes, shown
from hwfsdp.course.verdict import Finding

Orders = dict[int, list[int]]

# --- Orders ------------------------------------------------------------------------------------------------


def explain_orders(cases: Sequence[Cuts], answers: Sequence[Any]) -> None:
    """Raise a Finding if an order is not the one that placements say; dims of the mesh of size 1 may be anywhere."""
    wrong = [
        (cuts, answer) for cuts, answer in zip(cases, answers, strict=True) if not _is_right(cuts, answer)
    ]
    if not wrong:
        return
    cuts, answer = wrong[0]
    got = f"was refused ({answer})" if isinstance(answer, str) else f"is {dict(map(tuple, answer))}"
    wanted = {dim: list(order) for dim, order in enumerate(cuts.orders) if order}
    text = f"mesh {cuts.mesh}, {shown(cuts.placements())}: orders_of_cuts {got}, expected {wanted}."
    raise Finding(_order_misconception(cases, answers, wrong), text, str(wanted), str(answer))


def _is_right(cuts: Cuts, answer: Any) -> bool:
    if isinstance(answer, str):
        return False
    found = _orders(answer)
    if any(not isinstance(m, int) for order in found.values() for m in order):
        return False
    wanted = {dim: list(order) for dim, order in enumerate(cuts.orders) if order}
    return {d: sorted(o) for d, o in found.items()} == {d: sorted(o) for d, o in wanted.items()} and {
        d: _without_ones(o, cuts.mesh) for d, o in found.items()
    } == {d: _without_ones(o, cuts.mesh) for d, o in wanted.items()}


def _orders(answer: Any) -> Orders:
    return {dim: order for dim, order in answer if order}


def _without_ones(order: Sequence[int], mesh: Sizes) -> list[int]:
    return [m for m in order if mesh[m] > 1]


def _order_misconception(
    cases: Sequence[Cuts], answers: Sequence[Any], wrong: Sequence[tuple[Cuts, Any]]
) -> str:
    if any(not isinstance(answer, str) and _members(answer) - _cutting(cuts) for cuts, answer in wrong):
        return "counted-as-cut"
    if all(_is_mixed(cuts) for cuts, _ in wrong):
        return "counted-as-cut"
    theories: list[Callable[[Sequence[int]], list[int]]] = [
        sorted,
        lambda o: sorted(o, reverse=True),
        lambda o: list(o)[::-1],
    ]
    for theory in theories:
        made = [(cuts, a) for cuts, a in zip(cases, answers, strict=True) if not isinstance(a, str)]
        if any(pair in wrong for pair in made) and all(_as(theory, *pair) for pair in made):
            return "wrong-order-of-cuts"
    simple = [cuts for cuts, _ in wrong if max(len(_without_ones(o, cuts.mesh)) for o in cuts.orders) <= 2]
    return (
        "wrong-order-of-cuts"
        if simple and not any(isinstance(a, str) for _, a in wrong)
        else "wrong-split-factor"
    )


def _members(answer: Any) -> set[int]:
    return {m for _, order in answer for m in order}


def _cutting(cuts: Cuts) -> set[int]:
    return {m for order in cuts.orders for m in order}


def _is_mixed(cuts: Cuts) -> bool:
    """Whether some dim of the mesh cuts nothing, or another tensor dim than others do."""
    return len([order for order in cuts.orders if order]) != 1 or len(_cutting(cuts)) < len(cuts.mesh)


def _as(theory: Callable[[Sequence[int]], list[int]], cuts: Cuts, answer: Any) -> bool:
    wanted = {dim: theory(order) for dim, order in enumerate(cuts.orders) if order}
    return _orders(answer) == wanted


# --- Boxes -------------------------------------------------------------------------------------------------


class Box(NamedTuple):
    """A rank's box: (length, offset) in each tensor dim, as it came back and as it should be."""

    cuts: Cuts
    shape: Sizes
    coordinate: Sizes
    actual: list[tuple[int, int]]
    expected: list[tuple[int, int]]

    @property
    def is_line(self) -> bool:
        """Whether theories can speak of it: one tensor dim, small."""
        return len(self.shape) == 1 and self.shape[0] < 1000 and len(self.cuts.orders) == 1

    @property
    def is_even(self) -> bool:
        return all(
            n % prod(self.cuts.mesh[m] for m in order) == 0
            for n, order in zip(self.shape, self.cuts.orders, strict=False)
        )


def explain_boxes(boxes: Sequence[Box]) -> None:
    """Raise a Finding if a box differs from nested chunking's."""
    wrong = [box for box in boxes if box.actual != box.expected]
    if not wrong:
        return
    name = _box_misconception(boxes, wrong)
    box = next((b for b in wrong if name != "evenness-assumed" or not b.is_even), wrong[0])
    box = next(
        (b for b in wrong if name == "wrong-order-of-cuts" and prod(b.cuts.mesh) > 1 and b.is_line), box
    )
    text = f"nested_extent for shape {box.shape} on mesh {box.cuts.mesh}, cut by {_say_orders(box.cuts)}, coordinate "
    text += f"{box.coordinate}, is {_say_box(box.actual)}; expected {_say_box(box.expected)}."
    raise Finding(name, text, _say_box(box.expected), _say_box(box.actual))


def _say_orders(cuts: Cuts) -> str:
    found = [f"mesh dims {list(order)} along dim {dim}" for dim, order in enumerate(cuts.orders) if order]
    return " and ".join(found) or "none"


def _say_box(box: Sequence[tuple[int, int]]) -> str:
    return f"shape {tuple(n for n, _ in box)} at {tuple(o for _, o in box)}"


def _box_misconception(boxes: Sequence[Box], wrong: Sequence[Box]) -> str:
    if all(_lengths(b.actual) == _lengths(b.expected) and _differ_when_empty(b) for b in wrong):
        return "empty-at-zero"
    lines = [b for b in boxes if b.is_line]
    for name, theory in THEORIES:
        if any(b in wrong for b in lines) and all(_same(b, theory) for b in lines):
            return name
    if any(n > 2**53 for b in wrong for n in b.shape) and all(max(b.shape, default=0) > 2**53 for b in wrong):
        return "float-for-integer"
    return "wrong-rows" if any(b.is_even for b in wrong) or _only_offsets(wrong) else "evenness-assumed"


def _lengths(box: Sequence[tuple[int, int]]) -> list[int]:
    return [n for n, _ in box]


def _differ_when_empty(box: Box) -> bool:
    return all(a == e or e[0] == 0 for a, e in zip(box.actual, box.expected, strict=True))


def _only_offsets(wrong: Sequence[Box]) -> bool:
    """Whether lengths are right: then it is not the sizes that were misjudged."""
    return all(_lengths(b.actual) == _lengths(b.expected) for b in wrong)


class Cut(NamedTuple):
    """By which dim of the mesh, into how many chunks, of which the rank takes this one."""

    mesh_dim: int
    size: int
    which: int


Theory = Callable[[int, list[Cut]], tuple[int, int]]  # rows, cuts, the first one first → length, offset


def _same(box: Box, theory: Theory) -> bool:
    """Whether the theory gives what came back; where nothing is left of the rows, the offset says nothing."""
    mesh, order = box.cuts.mesh, box.cuts.orders[0]
    made = theory(box.shape[0], [Cut(m, mesh[m], box.coordinate[m]) for m in order])
    actual = box.actual[0]
    return made == actual or (made[0] <= 0 and actual[0] <= 0)


def nested(n: int, cuts: Sequence[Cut]) -> tuple[int, int]:
    offset, length = 0, n
    for _, size, index in cuts:
        chunk = -(-length // size)
        start = min(index * chunk, length)
        offset, length = offset + start, min(chunk, length - start)
    return length, offset


def _backwards(n: int, cuts: list[Cut]) -> tuple[int, int]:
    return nested(n, cuts[::-1])


def _left_to_right(n: int, cuts: list[Cut]) -> tuple[int, int]:
    return nested(n, sorted(cuts))


def _balanced(n: int, cuts: list[Cut]) -> tuple[int, int]:
    """The remainder spread over the first ranks, at every cut."""
    offset, length = 0, n
    for _, size, index in cuts:
        quotient, rest = divmod(length, size)
        offset += index * quotient + min(index, rest)
        length = quotient + (index < rest)
    return length, offset


def _divided(n: int, cuts: list[Cut]) -> tuple[int, int]:
    """The remainder left out, at every cut."""
    offset, length = 0, n
    for _, size, index in cuts:
        length //= size
        offset += index * length
    return length, offset


def _overlong(n: int, cuts: list[Cut]) -> tuple[int, int]:
    """A full chunk for every rank."""
    offset, length = 0, n
    for _, size, index in cuts:
        length = -(-length // size)
        offset += index * length
    return length, offset


def _once(n: int, cuts: list[Cut]) -> tuple[int, int]:
    """One cut into as many chunks as there are ranks."""
    size, index = 1, 0
    for _, more, inner in cuts:
        size, index = size * more, index * more + inner
    return nested(n, [Cut(0, size, index)])


def _stripes(n: int, cuts: list[Cut]) -> tuple[int, int]:
    """From left to right: a dim of the mesh that others on its right cut before takes a stripe of each of their pieces."""
    rows, order = list(range(n)), [cut.mesh_dim for cut in cuts]
    for cut in sorted(cuts):
        earlier = [c.size for c in cuts[: order.index(cut.mesh_dim)] if c.mesh_dim > cut.mesh_dim]
        stripes = [_chunk(piece, cut.size, cut.which) for piece in _chunks(rows, prod(earlier))]
        rows = [row for stripe in stripes for row in stripe]
    return (len(rows), rows[0]) if rows else (0, n)


def _chunk(rows: list[int], size: int, index: int) -> list[int]:
    chunk = -(-len(rows) // size)
    return rows[index * chunk : (index + 1) * chunk]


def _chunks(rows: list[int], count: int) -> list[list[int]]:
    return [_chunk(rows, count, index) for index in range(count)]


def _all(n: int, cuts: list[Cut]) -> tuple[int, int]:
    return n, 0


THEORIES: tuple[tuple[str, Theory], ...] = (
    ("replicated", _all),
    ("stripes-not-boxes", _stripes),
    ("wrong-order-of-cuts", _left_to_right),
    ("wrong-order-of-cuts", _backwards),
    ("spread-evenly", _balanced),
    ("floor-instead-of-ceil", _divided),
    ("past-the-end", _overlong),
    ("evenness-assumed", _once),
)
