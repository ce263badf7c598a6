"""The picture of a layout: the sharding grid."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from figures import boxes
from hwfsdp import explain, fully_shard, launch
from hwfsdp.compat import strided_shard
from hwfsdp.layout.explain import Explanation
from hwfsdp.plot.grid import LaidOut, laid_out, plot_sharding

STRIDED = (strided_shard(0, 2), Shard(0))


def cells(figure: Figure, line: int, rank: int) -> tuple[float, float]:
    """Return the owned share and the padded share of a rank's full chunk."""
    found = boxes(figure, f"cell {line} rank {rank} ")
    widths = {name.split()[-1]: box.get_width() for name, box in found.items()}
    total = sum(widths.values())
    return widths.get("owned", 0.0) / total, widths.get("padding", 0.0) / total


def test_a_cell_is_filled_as_far_as_the_rank_has_rows_of_its_full_chunk() -> None:
    figure = plot_sharding([LaidOut("w", (5, 3), (Shard(0),))], {"shard": 4})
    for rank, rows in enumerate((2, 2, 1, 0)):
        assert cells(figure, 0, rank) == pytest.approx((rows / 2, 1 - rows / 2))


def map_of(figure: Figure, line: int, length: int) -> list[int]:
    """Read off the map which rank owns each row of the whole tensor."""
    owners = [-1] * length
    for name, box in boxes(figure, f"map {line} owner").items():
        first, last = round(box.get_x() * length), round((box.get_x() + box.get_width()) * length)
        owners[first:last] = [int(name.split()[-1])] * (last - first)
    return owners


def test_the_map_of_a_strided_placement_equals_two_cuts_with_tensor_parallelism_first() -> None:
    rows = 7
    parts = [tp.chunk(3) for tp in torch.arange(rows).chunk(2)]
    owner_of_row = {
        int(row): (dp, tp) for tp, part in enumerate(parts) for dp, rows_ in enumerate(part) for row in rows_
    }
    figure = plot_sharding([LaidOut("w", (rows,), STRIDED)], {"dp": 3, "tp": 2})
    owners = map_of(figure, 0, rows)
    assert [owner_of_row[row] for row in range(rows)] == [divmod(owner, 2) for owner in owners]
    plain = plot_sharding([LaidOut("w", (rows,), (Shard(0), Shard(0)))], {"dp": 3, "tp": 2})
    assert map_of(plain, 0, rows) == sorted(map_of(plain, 0, rows)) != owners


def test_replicas_share_a_color_and_other_shards_have_another() -> None:
    figure = plot_sharding([LaidOut("w", (8,), (Replicate(), Shard(0)))], {"replicate": 2, "shard": 2})
    colors = [to_rgb(boxes(figure)[f"cell 0 rank {rank} owned"].get_facecolor()) for rank in range(4)]
    assert colors[0] == colors[2] != colors[1] == colors[3]
    labels = {t.get_text() for t in figure.axes[0].texts}
    assert labels == {"0, 2", "1, 3"}


def test_a_parameter_cut_in_two_dimensions_is_a_map_of_boxes_that_tile_it() -> None:
    figure = plot_sharding([LaidOut("w", (7, 4), (Shard(0), Shard(1)))], {"dp": 3, "tp": 2})
    found = list(boxes(figure, "map 0 owner").values())
    whole = boxes(figure, "map 0")["map 0"]
    assert len(found) == 6
    area = sum(box.get_width() * box.get_height() for box in found)
    assert area == pytest.approx(whole.get_width() * whole.get_height())
    for a, b in combinations(found, 2):
        assert Bbox.intersection(a.get_bbox().padded(-1e-6), b.get_bbox().padded(-1e-6)) is None


def table_and_placements() -> tuple[Explanation, list[LaidOut]]:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    fully_shard(model[0])
    fully_shard(model)
    return explain(model), laid_out(model)


def test_the_grid_of_a_sharded_model_agrees_with_its_table() -> None:
    on_ranks = launch(table_and_placements, 2, timeout=60)
    parameters = on_ranks[0][1]
    assert {p.name for p in parameters} == {"0.weight", "0.bias", "1.weight", "1.bias"}
    figure = plot_sharding(parameters, {"shard": 2})
    for rank, (table, _) in enumerate(on_ranks):
        for row in table.rows:
            owned, padding = cells(figure, [p.name for p in parameters].index(row.fqn), rank)
            rows = row.rows[1] - row.rows[0]
            padded = row.padding / (row.shape[1] if len(row.shape) > 1 else 1)
            assert padding * (rows + padded) == pytest.approx(padded)
            assert bool(owned) == bool(rows)
