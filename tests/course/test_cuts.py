"""Check the statements of notebook 09 about three ways to find a rank's rows."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from hwfsdp.course.cuts import Way, by_stripes, cut_by_cut, from_placements, is_right

SIZES = list(product(range(1, 40), range(1, 5), range(1, 5)))  # rows, dp, tp


@pytest.mark.parametrize("way", [cut_by_cut, by_stripes])
def test_every_row_belongs_to_exactly_one_rank(way: Way) -> None:
    for rows, dp, tp in SIZES:
        if way is cut_by_cut or rows % (dp * tp) == 0:
            parts = [way(rows, dp, tp, at) for at in product(range(dp), range(tp))]
            assert torch.cat(parts).sort().values.tolist() == [*range(rows)]


def test_placements_are_right_for_all_sizes_and_stripes_for_sizes_that_divide() -> None:
    assert all(is_right(from_placements, *size) for size in SIZES)
    assert all(is_right(by_stripes, *size) for size in SIZES if size[0] % (size[1] * size[2]) == 0)
    assert not all(is_right(by_stripes, *size) for size in SIZES)


def test_a_rank_may_have_nothing() -> None:
    assert cut_by_cut(7, 3, 2, (2, 0)).tolist() == [] and cut_by_cut(7, 3, 2, (2, 1)).tolist() == [6]
