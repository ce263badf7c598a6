"""The time of a collective, against closed forms over bytes, links and starts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwfsdp.virtual.devices import DEVICES, Device
from hwfsdp.virtual.topology import Span, collective_us, span_of

PLAIN = replace(
    DEVICES["h100"],
    link=100e9,
    network=10e9,
    link_efficiency=0.5,
    collective_us=20.0,
    hop_us=1.0,
    node_hop_us=7.0,
)
RINGS = ("all_gather", "reduce_scatter", "broadcast", "all_to_all")


@pytest.mark.parametrize(("op", "ranks"), list(zip(RINGS, (2, 3, 8, 4), strict=True)))
def test_within_a_node_each_rank_receives_all_but_its_part_over_its_link(op: str, ranks: int) -> None:
    nbytes = 8_000_000
    us = collective_us(op, nbytes, Span(ranks, 1, ranks), PLAIN)
    assert us == pytest.approx(20 + (ranks - 1) * 1.0 + (ranks - 1) / ranks * nbytes / 50e9 * 1e6)


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 1), (3, 4)])
def test_across_nodes_the_ports_of_a_node_share_the_bytes_that_the_node_lacks(
    nodes: int, per_node: int
) -> None:
    nbytes = 1 << 30
    us = collective_us("reduce_scatter", nbytes, Span(nodes * per_node, nodes, per_node), PLAIN)
    hops = (nodes * per_node - nodes) * 1.0 + (nodes - 1) * 7.0
    assert us == pytest.approx(20 + hops + (nodes - 1) / nodes * nbytes / (per_node * 5e9) * 1e6)


def test_the_slower_of_link_and_network_decides() -> None:
    """If the network is faster, the link decides."""
    device = replace(PLAIN, network=1e15)
    us = collective_us("all_gather", 1 << 30, Span(16, 2, 8), device)
    assert us == pytest.approx(20 + 14 * 1.0 + 7.0 + 15 / 16 * (1 << 30) / 50e9 * 1e6)


@given(
    per_node=st.integers(1, 8),
    nodes=st.integers(1, 64),
    nbytes=st.integers(0, 1 << 40),
    device=st.sampled_from([*DEVICES.values(), PLAIN]),
)
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather_that_start_once(
    per_node: int, nodes: int, nbytes: int, device: Device
) -> None:
    span = Span(per_node * nodes, nodes, per_node)
    both = sum(collective_us(op, nbytes, span, device) for op in ("reduce_scatter", "all_gather"))
    if span.ranks > 1:
        both -= device.collective_us
    assert collective_us("all_reduce", nbytes, span, device) == pytest.approx(both)


def test_a_collective_of_one_rank_takes_no_time() -> None:
    for op in (*RINGS, "all_reduce", "send", "recv"):
        assert collective_us(op, 1 << 40, Span(1, 1, 1), PLAIN) == 0.0


@pytest.mark.parametrize("op", ["send", "recv"])
def test_a_message_passes_one_link_or_one_port_whole(op: str) -> None:
    nbytes = 1 << 20
    inside, outside = (collective_us(op, nbytes, Span(2, n, 2 // n), PLAIN) for n in (1, 2))
    assert inside == pytest.approx(20 + 1.0 + nbytes / 50e9 * 1e6)
    assert outside == pytest.approx(20 + 7.0 + nbytes / 5e9 * 1e6)


def test_ranks_fill_one_node_after_the_other_and_of_uneven_groups_the_fewest_count() -> None:
    spans = {range(8): (8, 1, 8), range(16): (16, 2, 8), range(0, 32, 8): (4, 4, 1)}
    spans |= {(0, 1, 2, 8): (4, 2, 1), (5,): (1, 1, 1), (6, 7, 8, 9): (4, 2, 2)}
    assert [span_of(ranks, 8) for ranks in spans] == list(spans.values())
