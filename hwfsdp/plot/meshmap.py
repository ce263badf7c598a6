"""A map of the mesh: which ranks gather together, which replicate, which compute one layer together, and on which nodes.

There is one panel per axis of the mesh. Each panel shows all ranks in their nodes. Ranks of one color and letter communicate with
each other along this axis. The caption says whether these groups stay within a node, where links are fast, or cross nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from math import prod
from typing import NamedTuple


from hwfsdp.errors import UsageError
from hwfsdp.plot import sheet, style
from hwfsdp.plot.parts import Axes, FancyBboxPatch, Figure

MOST_RANKS = 256
ROLES = {  # usual name of an axis → what its ranks do together
    **dict.fromkeys(("shard", "fsdp", "dp_shard", "dp"), "gather and reduce-scatter together"),
    **dict.fromkeys(("replicate", "dp_replicate"), "hold the same shards, all-reduce together"),
    "tp": "compute each layer together",
}

_TILE, _NODE_GAP, _NODE_NAME, _PANEL_GAP, _CAPTION = 0.46, 0.14, 0.24, 0.4, 0.62  # inches
_TILES_PER_LINE = 8
_TEXT = "A color and a letter are a group: these ranks communicate with each other."


class _Node(NamedTuple):
    """A node: its ranks, and the distance of its box from the top, in inches."""

    ranks: range
    top: float


class _Panel(NamedTuple):
    """An axis of the mesh, and for every rank the number of its group along it."""

    axis: str
    size: int
    group_of: list[int]


def plot_mesh(
    mesh: Mapping[str, int], *, node: int | None = None, roles: Mapping[str, str] = ROLES
) -> Figure:
    """Draw a panel per axis: nodes as boxes, ranks as tiles, groups along the axis as colors and letters.

    Args:
        mesh: name → number of ranks along each axis, outermost first; ranks are numbered in row-major order.
        node: number of ranks on a node; by default all ranks are on one.
        roles: name of an axis → what the ranks of a group along it do.

    Raises:
        UsageError: a mesh without axes, an axis below 1, more than 256 ranks, or nodes that the ranks do not fill.
    """
    ranks, node = _checked(mesh, node)
    panels = [_panel(mesh, axis) for axis in mesh]
    nodes, height = _nodes(ranks, node)
    captions = [_captions(panel, node, roles) for panel in panels]
    tiles = max(0.8, min(node, _TILES_PER_LINE) * _TILE + 0.2)
    texts = max(sheet.inches(line, style.TEXT_SIZE) for lines in captions for line in lines)
    panel_width = max(tiles, texts, 2.6)
    width = len(panels) * panel_width + (len(panels) - 1) * _PANEL_GAP
    head = sheet.head(_title(mesh, ranks // node), _TEXT, (), max(width, 5.5))
    width = max(width, 5.5) + 2 * sheet.MARGIN
    figure = head.figure(width, height + _CAPTION + sheet.MARGIN)
    for place, (panel, lines) in enumerate(zip(panels, captions, strict=True)):
        left = sheet.MARGIN + place * (panel_width + _PANEL_GAP)
        axes = sheet.axes_at(figure, left, sheet.MARGIN, panel_width, height + _CAPTION)
        sheet.blank(axes, panel_width, height, top=_CAPTION)
        for line, text in enumerate(lines):
            weight = "normal" if line else "bold"
            sheet.say(axes, 0.0, -_CAPTION + 0.14 + 0.18 * line, text, weight=weight, color="black")
        for number, box in enumerate(nodes):
            _draw_node(axes, number if node < ranks else None, box, tiles, panel)
        axes.set_gid(panel.axis)
    return figure


def _checked(mesh: Mapping[str, int], node: int | None) -> tuple[int, int]:
    """Return the number of ranks, and the number of ranks on a node."""
    ranks = prod(mesh.values()) if mesh else 0
    node = ranks if node is None else node
    if not mesh or min(mesh.values()) < 1 or ranks > MOST_RANKS or node < 1 or ranks % node:
        raise UsageError(
            f"plot_mesh(node={node})",
            expected=f"axes of 1 rank or more, {MOST_RANKS} ranks at most, a number per node that divides them",
            got=f"{dict(mesh)}",
            remedy='Pass for example {"replicate": 2, "shard": 4}, node=4.',
        )
    return ranks, node


def _title(mesh: Mapping[str, int], nodes: int) -> str:
    ranks = prod(mesh.values())
    axes = " × ".join(f"{axis} {size}" for axis, size in mesh.items())
    return f"Mesh of {ranks} rank{'s' * (ranks > 1)} on {nodes} node{'s' * (nodes > 1)}: {axes}"


def _panel(mesh: Mapping[str, int], axis: str) -> _Panel:
    """Make the panel of an axis. Ranks form a group if only their coordinates along `axis` differ."""
    place, groups = list(mesh).index(axis), dict[tuple[int, ...], int]()
    coordinates = product(*map(range, mesh.values()))
    group_of = [groups.setdefault((*c[:place], *c[place + 1 :]), len(groups)) for c in coordinates]
    return _Panel(axis, mesh[axis], group_of)


def _nodes(ranks: int, node: int) -> tuple[list[_Node], float]:
    """Return the nodes from top to bottom, and their height with all gaps, in inches."""
    lines = -(-node // _TILES_PER_LINE)
    pitch = lines * _TILE + _NODE_NAME + _NODE_GAP
    boxes = [_Node(range(n * node, (n + 1) * node), n * pitch) for n in range(ranks // node)]
    return boxes, len(boxes) * pitch - _NODE_GAP + 0.1


def _captions(panel: _Panel, node: int, roles: Mapping[str, str]) -> list[str]:
    """Return three lines: the name of the axis, what its ranks do, and how many groups it has and whether they cross nodes."""
    role = roles.get(panel.axis, "communicate along this axis")
    members: dict[int, set[int]] = {}
    for rank, group in enumerate(panel.group_of):
        members.setdefault(group, set()).add(rank // node)
    crossing = sum(len(nodes) > 1 for nodes in members.values())
    one_node = len(panel.group_of) == node
    where = "" if one_node else ", across nodes" if crossing else ", each within a node"
    groups = f"{len(members)} group{'s' * (len(members) > 1)} of {panel.size}{where}"
    return [f"{panel.axis}", role, groups]


def _draw_node(axes: Axes, number: int | None, node: _Node, width: float, panel: _Panel) -> None:
    lines = -(-len(node.ranks) // _TILES_PER_LINE)
    axes.add_patch(
        FancyBboxPatch(
            (0.04, node.top + 0.04),
            width - 0.08,
            lines * _TILE + _NODE_NAME - 0.04,
            boxstyle="round,pad=0,rounding_size=0.06",
            **style.filled(style.Look(style.GREYS[0]), style.GREYS[2]),
            linewidth=0.8,
            gid=f"node {number or 0}",
        )
    )
    name = "one node" if number is None else f"node {number}"
    sheet.say(axes, 0.12, node.top + 0.04 + _NODE_NAME / 2, name, size=style.SMALL_SIZE)
    for place, rank in enumerate(node.ranks):
        line, column = divmod(place, _TILES_PER_LINE)
        at = 0.1 + column * _TILE, node.top + _NODE_NAME + line * _TILE
        _draw_tile(axes, at, rank, panel.group_of[rank])


def _draw_tile(axes: Axes, at: tuple[float, float], rank: int, group: int) -> None:
    face, tile = style.color_of(group), _TILE - 0.06
    corner, gid = (at[0] + 0.03, at[1] + 0.01), f"rank {rank} group {group}"
    sheet.add_box(axes, corner, (tile, tile), style.Look(face), gid, edgecolor=style.GREYS[3], linewidth=0.6)
    middle = corner[0] + tile / 2
    for text, y, size in ((str(rank), 0.36, style.TEXT_SIZE), (letter_of(group), 0.78, style.SMALL_SIZE)):
        style.draw_label(axes, (middle, at[1] + y * tile), text, face, size, hatched=False)


def letter_of(group: int) -> str:
    """Return the letters of a group: A, B, …, Z, AA, AB, …"""
    letters = ""
    number = group + 1
    while number:
        number, digit = divmod(number - 1, 26)
        letters = chr(ord("A") + digit) + letters
    return letters
