"""The duration of a collective: bytes over its slowest link, plus a start.

Nodes of `per_node` GPUs, joined inside by fast links and outside by one network port per GPU. A collective is a ring,
or several rings at once that share the ports of a node, which is how libraries run large ones. Each GPU receives
`(W - 1) / W` of the whole tensor over its link. Each *node* receives the bytes that none of its GPUs has, over the ports of
all its GPUs that take part. The slower of the two decides. An all-reduce is a reduce-scatter and an all-gather.
(Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, 2005.)

Left out: congestion, stragglers, switches that reduce, and what a collective takes from compute that runs beside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from hwfsdp.virtual.devices import Device

_PASSES = {"all_reduce": 2}  # over the tensor; all others: 1
_DIRECT = ("send", "recv")


class Span(NamedTuple):
    """Where the ranks of a group are.

    Attributes:
        ranks: number of ranks. nodes: number of nodes. per_node: ranks on each; of uneven groups, the fewest.
    """

    ranks: int
    nodes: int
    per_node: int


def span_of(ranks: Sequence[int], per_node: int) -> Span:
    """Return the span of these global ranks, which fill one node after the other."""
    nodes = Counter(rank // per_node for rank in ranks)
    return Span(len(ranks), len(nodes), min(nodes.values()))


def collective_us(op: str, nbytes: int, span: Span, device: Device) -> float:
    """µs that a collective takes once all ranks have come to it.

    Args:
        op: one of `events.COLLECTIVES`. nbytes: of the whole tensor, as in the event log.
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
