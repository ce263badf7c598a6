"""Choose the next gather: decisions about order, with letters for groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from hwfsdp.core.context import ForwardOrder, FSDPCommContext


class Group:
    """A group that equals every other group, so that only identity tells two apart."""

    post_forward_indices: list[int]

    def __init__(self, name: str) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Group)

    def __hash__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return self.name


A, B, C, D = groups = [Group(name) for name in "ABCD"]
orders = st.lists(st.sampled_from(groups), max_size=8)


def forward(order: ForwardOrder, *entered: Group) -> str:
    """Run one forward. For each group, return the name of the group to gather next, or "-"."""
    order.begin()
    targets = [order.note_and_predict(group) for group in entered]
    order.finish()
    return "".join(target.name if target else "-" for target in targets)


# --- Forward -----------------------------------------------------------------------------------------------


def test_guesses_come_from_the_last_finished_forward_of_the_same_model() -> None:
    order, other = ForwardOrder(), ForwardOrder()
    assert forward(order, A, B, C) == "---"
    assert forward(other, A, B, C) == "---"
    assert [forward(order, A, C, B) for _ in range(2)] == ["B--", "CB-"]
    order.begin()  # a forward that an exception ends
    for group in (A, D):
        order.note_and_predict(group)
    assert forward(order, A, C, B) == "CB-"
    forward(order)
    assert forward(order, A, C, B) == "---"


@given(orders, orders)
def test_a_guess_is_the_group_that_followed_the_same_group_at_the_same_place(learned, taken):
    order: ForwardOrder = ForwardOrder()
    forward(order, *learned)
    order.begin()
    for place, group in enumerate(taken):
        target = order.note_and_predict(group)
        agree = place < len(learned) and learned[place] is group
        assert target is (learned[place + 1] if agree and place + 1 < len(learned) else None)


# --- Backward ----------------------------------------------------------------------------------------------


def backwards(path: Sequence[Group], keep: int | None = None) -> list[str]:
    """Return the expected group after each backward of a forward that ran this path. With `keep`, only the path's beginning is known."""
    comm_ctx: Any = FSDPCommContext("cpu")
    for group in groups:
        group.post_forward_indices = []
    for group in path:
        comm_ctx.note_end_of_forward(group)
    if keep is not None:
        comm_ctx.forget_forwards(keep)
    return ["".join(map(repr, comm_ctx.take_previous(group))) for group in reversed(path)]


@given(orders)
def test_a_backward_gathers_every_group_but_the_last_of_the_forward_in_reverse(path: list[Group]) -> None:
    assert backwards(path) == [g.name for g in path[-2::-1]] + [""] * bool(path)


def test_a_forward_that_was_forgotten_predicts_nothing() -> None:
    assert backwards([A, B, C], keep=0) == [""] * 3
    assert backwards([A, B, C], keep=2) == ["", "A", ""]
