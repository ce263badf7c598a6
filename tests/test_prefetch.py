"""What to gather next: decisions about order, with letters for groups."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwfsdp.prefetch import ForwardOrder, next_in_backward, next_in_forward


class Group:
    """Equal to every other, so that only identity tells two apart."""

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


def forward(order: ForwardOrder[Group], *entered: Group) -> str:
    """Runs one forward; the names of what was to be gathered next at each group, "-" for nothing."""
    targets = [order.enter(group) for group in entered]
    order.finish()
    return "".join("-" if target is None else target.name for target in targets)


# --- Forward -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "position", "current", "expected"),
    [
        ([A, B, C], 0, A, B),
        ([A, B, C], 2, C, None),
        ([A, B, C], 3, A, None),
        ([A, B, C], 0, B, None),
        ([A, B, A, C], 2, A, C),
        ([], 0, A, None),
    ],
)
def test_the_next_group_in_forward_is_what_followed_last_time_at_this_place(
    order, position, current, expected
):
    assert next_in_forward(order, position, current) is expected


@pytest.mark.parametrize(
    ("learned", "taken", "targets"),
    [
        ([A, B, C], [A, C], "B-"),
        ([A, B, C], [A, B, C, D], "BC--"),
        ([A, B, C], [A, C, B], "B--"),
        ([A, C, B, D], [A, B, B, D], "C-D-"),
    ],
)
def test_a_forward_that_takes_another_path_guesses_only_where_the_paths_agree(learned, taken, targets):
    order: ForwardOrder[Group] = ForwardOrder()
    forward(order, *learned)
    assert forward(order, *taken) == targets


def test_only_the_last_forward_that_ended_counts_and_two_models_learn_apart() -> None:
    order, other = ForwardOrder[Group](), ForwardOrder[Group]()
    assert forward(order, A, B, C) == "---"
    assert forward(other, A, B, C) == "---"
    assert [forward(order, A, C, B) for _ in range(2)] == ["B--", "CB-"]
    for group in (A, D):
        order.enter(group)
    order.forget()
    assert forward(order, A, C, B) == "CB-"
    forward(order)
    assert forward(order, A, C, B) == "---"


@given(orders, orders)
def test_a_guess_is_always_what_followed_the_same_group_at_the_same_place(learned, taken):
    order: ForwardOrder[Group] = ForwardOrder()
    forward(order, *learned)
    for place, group in enumerate(taken):
        target = order.enter(group)
        agree = place < len(learned) and learned[place] is group
        assert target is (learned[place + 1] if agree and place + 1 < len(learned) else None)


# --- Backward ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("index", "expected"), [(2, B), (1, A), (0, None), (3, None), (-1, None)])
def test_the_next_group_in_backward_is_the_one_whose_forward_ended_before(index, expected):
    assert next_in_backward([A, B, A], index) is expected


@given(orders)
def test_a_backward_gathers_every_group_but_the_last_of_the_forward_in_reverse(path: list[Group]) -> None:
    targets = [next_in_backward(path, index) for index in reversed(range(len(path)))]
    assert [repr(target) for target in targets] == [g.name for g in path[-2::-1]] + ["None"] * bool(path)
