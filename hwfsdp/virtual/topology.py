"""The duration of a collective: the time of its bytes on the slowest link, plus the time to start.

A node has `per_node` GPUs. Fast links join the GPUs of a node. Each GPU has one network port to other nodes. A collective is a
ring, or several rings at once that share the ports of a node, as libraries run large collectives. Each GPU receives
`(W - 1) / W` of the whole tensor over its link. Each *node* receives the bytes that none of its GPUs has, over the ports of
all its GPUs that take part. The slower of the two decides. An all-reduce is a reduce-scatter and an all-gather.
(Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, 2005.)

Left out: congestion, stragglers, switches that reduce, and the slowdown of compute that runs beside a collective.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from hwfsdp.virtual.devices import Device

_PASSES = {"all_reduce": 2}  # passes over the tensor; all other collectives: 1
_DIRECT = ("send", "recv")


class Span(NamedTuple):
    """The placement of a group's ranks on nodes.

    Attributes:
        ranks: number of ranks. nodes: number of nodes. per_node: ranks on each node, or the fewest if nodes have different numbers.
    """

    ranks: int
    nodes: int
    per_node: int


def span_of(ranks: Sequence[int], per_node: int) -> Span:
    """Return the span of these global ranks. Global ranks fill one node after the other."""
    nodes = Counter(rank // per_node for rank in ranks)
    return Span(len(ranks), len(nodes), min(nodes.values()))


def collective_us(op: str, nbytes: int, span: Span, device: Device) -> float:
    """Return the µs that a collective takes after all ranks have called it.

    Args:
        op: one of `events.COLLECTIVES`. nbytes: bytes of the whole tensor, as in the event log.
    """
    if span.ranks == 1:
        return 0.0
    passes = _PASSES.get(op, 1)
    share = 1.0 if op in _DIRECT else (span.ranks - 1) / span.ranks
    seconds = share * nbytes / (device.link * device.link_efficiency)
    if span.nodes > 1:
        outside = 1.0 if op in _DIRECT else (span.nodes - 1) / span.nodes
        ports = 1 if op in _DIRECT else span.per_node
        seconds = max(seconds, outside * nbytes / (ports * device.network * device.link_efficiency))
    hops = (span.ranks - span.nodes) * device.hop_us + (span.nodes - 1) * device.node_hop_us
    if op in _DIRECT:
        hops = device.node_hop_us if span.nodes > 1 else device.hop_us
    return device.collective_us + passes * (hops + seconds * 1e6)
