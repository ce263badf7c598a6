"""The cost of an operator: its floating-point operations, its bytes of memory, and its time; and the duration of a collective.

An operator follows the roofline model. A kernel needs time for its arithmetic at the rate of the matrix units, and time for its bytes at
the bandwidth of the memory. It takes the longer of the two times, and at least the time of the shortest kernel. (Williams,
Waterman, Patterson: Roofline, CACM 2009.)

Bytes count every tensor that an operator reads or writes, each once: the traffic of a kernel without a cache. An expanded
tensor counts only with its distinct elements. FLOPs count matrix products, convolutions and attention, by torch's formulas
(`torch.utils.flop_counter`). Element-wise arithmetic costs nothing in addition to its bytes. Causal attention counts only the
half that is computed.

A collective takes the time of its bytes on the slowest link, plus the time to start. A node has `per_node` GPUs. Fast links join the
GPUs of a node. Each GPU has one network port to other nodes. A collective is a ring, or several rings at once that share the ports of a
node, as libraries run large collectives. Each GPU receives `(W - 1) / W` of the whole tensor over its link. Each *node* receives the
bytes that none of its GPUs has, over the ports of all its GPUs that take part. The slower of the two decides. An all-reduce is a
reduce-scatter and an all-gather. (Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, 2005.)

Left out: congestion, stragglers, switches that reduce, and the slowdown of compute that runs beside a collective.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from hwfsdp.compat import arguments_of, storage_key
from hwfsdp.comm.users_collectives import tensors_in
from hwfsdp.virtual.devices import Device


class Cost(NamedTuple):
    """The cost of one operator.

    Attributes:
        flops: FLOPs of its matrix products; each multiplication and each addition counts. dtype: the dtype of the computation.
        nbytes: bytes read and written. is_kernel: True if a device runs a kernel; the host alone makes a view.
        is_attention: True for fused attention, which has a rate of its own.
        unmasked: for the backward of attention, its FLOPs as if nothing were masked; 0.0 for all other operators.
    """

    flops: float
    dtype: str
    nbytes: int
    is_kernel: bool = True
    is_attention: bool = False
    unmasked: float = 0.0

    def us(self, device: Device) -> float:
        """Return the time on the device, in µs."""
        if not self.is_kernel:
            return 0.0
        arithmetic = self.flops / device.rate(self.dtype, self.is_attention)
        memory = self.nbytes / (device.memory_bandwidth * device.memory_efficiency)
        return max(device.kernel_us, 1e6 * max(arithmetic, memory))


_NOTHING = Cost(0.0, "", 0, is_kernel=False)
_RESERVES = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "resize_", "set_"}
_WRITES = {
    *("fill_", "zero_", "_foreach_zero_", "normal_", "uniform_", "bernoulli_", "random_"),
    *("zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "arange", "randint"),
}
_READS_ROWS = {"embedding", "index", "gather", "index_select"}  # they read only the rows that they return
_COPIES = {"copy_", "_foreach_copy_"}  # they change a tensor without reading it
_KEPT = {"grads"}  # fused optimizers change gradients only if they scale them
_ATTENTION = "_scaled_dot_product"


def cost_of(op: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Cost:
    """Return the cost of an operator of torch that was called with these arguments and returned `out`.

    Args:
        op: an overload, as dispatch modes get it. args, kwargs, out: they may contain tensors of any kind, even fake tensors.
    """
    name = op.name().partition("::")[2].partition(".")[0]
    if name in _RESERVES:
        return _NOTHING
    inputs, outputs = tensors_in((args, kwargs)), tensors_in(out)
    if not inputs and not outputs:
        return _NOTHING  # an operator without tensors, such as a mark of a profiler
    changed = list(_changed(op, args))
    if not changed and not _fills_out(op) and _are_views(outputs, inputs):
        return _NOTHING
    moved = {(storage_key(t), t.storage_offset(), extent(t)) for t in (*inputs, *outputs)}
    nbytes = sum(size for _, _, size in moved)
    if name in _WRITES:
        nbytes = sum(map(extent, outputs or changed))
    elif name in _READS_ROWS:
        nbytes = 2 * sum(map(extent, outputs))
    elif name not in _COPIES:
        nbytes += sum(map(extent, changed))
    dtype = str(inputs[0].dtype).removeprefix("torch.") if inputs else ""
    if name.startswith(_ATTENTION):
        flops, causal = _attention_flops(op, name, args, kwargs)
        whole = flops if name.endswith("_backward") else 0.0
        return Cost(flops / 2 if causal else flops, dtype, nbytes, is_attention=True, unmasked=whole)
    formula: Callable[..., int] | None = flop_registry.get(op.overloadpacket)
    return Cost(float(formula(*args, **kwargs, out_val=out)) if formula else 0.0, dtype, nbytes)


def _changed(op: Any, args: Sequence[Any]) -> Iterator[Tensor]:
    """Yield the tensors that the operator changes in place: it reads and writes them. Tensors of `out=` are only filled."""
    for argument, value in zip(arguments_of(op), args, strict=False):
        if argument.is_written and argument.name not in _KEPT:
            yield from tensors_in(value)


def _fills_out(op: Any) -> bool:
    return any(argument.is_written for argument in arguments_of(op))


def _are_views(outputs: list[Tensor], inputs: list[Tensor]) -> bool:
    keys = {storage_key(t) for t in inputs}
    return bool(outputs) and all(storage_key(t) in keys for t in outputs)


def extent(tensor: Tensor) -> int:
    """Return the bytes of a tensor's distinct elements. A dimension of stride 0 repeats one element."""
    sizes = [n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or n == 0]
    return prod(sizes) * tensor.element_size()


def _attention_flops(op: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[float, bool]:
    """Return the FLOPs of attention as if nothing were masked, and True if the upper half is masked."""
    named = {a.name: a.default for a in arguments_of(op)}
    named |= dict(zip(named, args, strict=False)) | kwargs
    q, k = named["query"].shape, named["key"].shape  # [B, H, T, E]
    # The backward repeats one of the forward's two products, and has two products for each of them.
    products = 5 if name.endswith("_backward") else 2
    return 2.0 * prod(q) * k[-2] * products, bool(named.get("is_causal"))


# --- Collectives -------------------------------------------------------------------------------------------

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
