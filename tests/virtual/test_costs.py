"""The cost of an operator: FLOPs against torch's counter, bytes in closed form."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from hwfsdp.compat import DispatchMode
from hwfsdp.virtual.costs import Cost, Span, collective_us, cost_of, span_of
from hwfsdp.virtual.devices import DEVICES

N = 24  # elements of a `vector`


class Meter(DispatchMode):
    """Collect the cost of every operator that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, Cost]] = []

    def __torch_dispatch__(
        self, op: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = op(*args, **kwargs)
        if op.namespace == "aten":
            name = op.name().removeprefix("aten::").partition(".")[0]
            self.found.append((name, cost_of(op, args, kwargs, out)))
        return out


def costs(run: Callable[[], Any]) -> list[tuple[str, Cost]]:
    with Meter() as meter:
        run()
    return meter.found


def cost(run: Callable[[], Any]) -> Cost:
    """Return the cost of the only operator that is called."""
    ((_, found),) = costs(run)
    return found


def bytes_of(name: str, run: Callable[[], Any]) -> int:
    """Add up the bytes of all calls of this operator. There must be at least one."""
    found = [c.nbytes for called, c in costs(run) if called == name]
    assert found
    return sum(found)


def leaf(*shape: int) -> Tensor:
    return torch.ones(shape, requires_grad=True)


# --- FLOPs -------------------------------------------------------------------------------------------------

PRODUCTS: dict[str, Callable[[], Tensor]] = {
    "mm": lambda: leaf(5, 7) @ leaf(7, 3),
    "addmm": lambda: torch.addmm(leaf(3), leaf(5, 7), leaf(7, 3)),
    "linear": lambda: F.linear(leaf(2, 5, 7), leaf(3, 7), leaf(3)),
    "bmm": lambda: torch.bmm(leaf(4, 5, 7), leaf(4, 7, 3)),
    "baddbmm": lambda: torch.baddbmm(leaf(4, 5, 3), leaf(4, 5, 7), leaf(4, 7, 3)),
    "conv1d": lambda: F.conv1d(leaf(2, 3, 9), leaf(5, 3, 4), leaf(5), stride=2),
    "conv2d": lambda: F.conv2d(leaf(2, 3, 8, 8), leaf(5, 3, 3, 3), padding=1),
    "conv_transpose2d": lambda: F.conv_transpose2d(leaf(2, 3, 4, 4), leaf(3, 5, 3, 3)),
    "element-wise": lambda: torch.tanh(leaf(5) * 2 + 1),
}


def test_flops_equal_torchs_counter_in_forward_and_backward() -> None:
    for name in PRODUCTS:

        def run() -> None:
            PRODUCTS[name]().sum().backward()

        with FlopCounterMode(display=False) as counter:
            run()
        assert sum(c.flops for _, c in costs(run)) == counter.get_total_flops()


SHAPES = [(2, 3, 8, 8, 4), (1, 2, 5, 9, 6)]  # batch, heads, queries, keys, width


def attend_on_device(shape: tuple[int, ...], causal: bool) -> None:
    """Run a device's attention operators, forward and backward, over tensors without values."""
    batch, heads, queries, keys, width = shape
    q, k, v = (torch.empty(batch, heads, n, width, device="meta") for n in (queries, keys, keys))
    aten = torch.ops.aten
    out, lse, cq, ck, mq, mk, seed, offset, _ = aten._scaled_dot_product_flash_attention(
        q, k, v, is_causal=causal
    )
    aten._scaled_dot_product_flash_attention_backward(
        *(torch.empty_like(out), q, k, v, out, lse, cq, ck, mq, mk, 0.0, causal, seed, offset)
    )


def attend_on_host(shape: tuple[int, ...], causal: bool) -> None:
    batch, heads, queries, keys, width = shape
    q, k, v = (leaf(batch, heads, n, width) for n in (queries, keys, keys))
    F.scaled_dot_product_attention(q, k, v, is_causal=causal).sum().backward()


def test_attention_counts_as_torch_does_and_half_if_causal() -> None:
    for shape, causal in ((SHAPES[0], True), (SHAPES[1], False)):
        with FlopCounterMode(display=False) as counter:
            attend_on_device(shape, causal)
        forward, backward = counter.get_flop_counts()["Global"].values()
        share = 0.5 if causal else 1.0
        for attend in (attend_on_device, attend_on_host):
            found = [
                c for name, c in costs(lambda: attend(shape, causal)) if "attention" in name
            ]  # noqa: B023
            assert [c.flops for c in found] == [share * forward, share * backward]
            assert [c.unmasked for c in found] == [0.0, backward]


# --- Bytes -------------------------------------------------------------------------------------------------


OPERATORS: list[tuple[Callable[..., Any], int]] = [  # vectors read and written
    (lambda a, b, *_: a + b, 3),
    (lambda a, *_: a + 1, 2),
    (lambda a, *_: a + a, 2),
    (lambda a, *_: a.clone(), 2),
    (lambda a, b, *_: a.add_(b), 3),
    (lambda a, *_: a.mul_(2), 2),
    (lambda a, b, *_: a.copy_(b), 2),
    (lambda a, *_: a.zero_(), 1),
    (lambda a, *_: a.fill_(2), 1),
    (lambda a, *_: torch.zeros_like(a), 1),
    (lambda a, b, c, d: torch._foreach_copy_([a, b], [c, d]), 4),
    (lambda a, b, *_: torch._foreach_zero_([a, b]), 2),
    (lambda a, b, c, d: torch._foreach_add_([a, b], [c, d]), 6),
    (lambda a, b, *_: torch._foreach_mul_([a, b], 0.5), 4),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_count_reads_and_writes_in_their_dtype(dtype: torch.dtype) -> None:
    vectors = [torch.ones(N, dtype=dtype) for _ in range(4)]
    for number, (operator, moved) in enumerate(OPERATORS):
        assert cost(lambda: operator(*vectors)).nbytes == moved * N * dtype.itemsize, number  # noqa: B023
    assert cost(lambda: vectors[0].sum(dtype=dtype)).nbytes == (N + 1) * dtype.itemsize
    left, right = torch.ones(5, 7, dtype=dtype), torch.ones(7, 3, dtype=dtype)
    product = cost(lambda: left @ right)
    assert (product.nbytes, product.dtype) == (dtype.itemsize * (35 + 21 + 15), str(dtype).split(".")[1])


FREE: list[Callable[[Tensor], Tensor]] = [
    *(Tensor.t, Tensor.detach, lambda x: x.view(-1), lambda x: x[1:]),
    *(lambda x: torch.empty(9), torch.empty_like, lambda x: x.new_empty(9)),
    lambda x: torch.empty_strided((3,), (1,)),
]


def test_views_and_memory_without_values_are_free_for_the_device() -> None:
    x = torch.ones(4, 6)
    for reserve in FREE:
        found = [c for _, c in costs(lambda: reserve(x))]  # noqa: B023
        assert found and all(not c.is_kernel and c.nbytes == 0 for c in found)


def test_rows_of_an_embedding_are_read_not_the_table_and_its_gradient_is_as_large() -> None:
    table, rows = leaf(1000, 6), torch.arange(5)
    run: Callable[[], Any] = lambda: F.embedding(rows, table).sum().backward()
    assert bytes_of("embedding", run) == 2 * 4 * 5 * 6
    assert bytes_of("embedding_dense_backward", run) == 4 + 8 * 5 + 4 * 1000 * 6
    assert bytes_of("index", lambda: table.detach()[rows]) == 2 * 4 * 5 * 6


def test_a_fused_optimizer_reads_four_tensors_per_parameter_and_writes_three() -> None:
    params = [torch.ones(N, requires_grad=True) for _ in range(2)]
    for param in params:
        param.grad = torch.ones(N)
    optimizer = torch.optim.AdamW(params, fused=True)
    optimizer.step()  # makes its state
    steps = 2 * 4  # bytes of two counts
    assert bytes_of("_fused_adamw_", optimizer.step) == 2 * 7 * 4 * N + steps


# --- Time --------------------------------------------------------------------------------------------------

DEVICE = replace(
    DEVICES["h100"],
    flops={"bfloat16": 1e14, "float32": 1e13},
    efficiency=0.5,
    memory_bandwidth=1e12,
    memory_efficiency=0.5,
    kernel_us=3.0,
)


def test_a_kernel_takes_as_long_as_its_arithmetic_or_its_bytes_and_no_less_than_the_shortest() -> None:
    found = {
        Cost(1e12, "bfloat16", 0): 1e12 / 5e13 * 1e6,
        Cost(1e12, "float32", 0): 1e12 / 5e12 * 1e6,
        Cost(1e12, "int8", 0): 1e12 / 5e12 * 1e6,
        Cost(0.0, "float32", 10**9): 1e9 / 5e11 * 1e6,
        Cost(1e12, "bfloat16", 10**9): 20_000.0,
        Cost(1e9, "bfloat16", 10**9): 2_000.0,
        Cost(1.0, "float32", 1): 3.0,
        Cost(0.0, "", 0, is_kernel=False): 0.0,
    }
    assert [each.us(DEVICE) for each in found] == pytest.approx(list(found.values()))


def test_a_device_with_the_efficiency_of_another_one_says_from_where_it_is_borrowed() -> None:
    """One device for each efficiency is fitted to a published row."""
    fitted = {d.efficiency: d.name for d in DEVICES.values() if not d.fitted_on.startswith("borrowed")}
    assert sorted(fitted) == sorted({d.efficiency for d in DEVICES.values()})
    for device in DEVICES.values():
        if device.name not in fitted.values():
            assert device.fitted_on.startswith(f"borrowed from {fitted[device.efficiency]}, not verified: ")


# --- Collectives -------------------------------------------------------------------------------------------

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


def test_a_collective_takes_its_start_its_hops_and_the_bytes_over_the_slower_of_link_and_network() -> None:
    nbytes = 1 << 30
    for op, ranks in zip(
        RINGS, (2, 3, 8, 4), strict=True
    ):  # within a node: all but its part over a rank's link
        us = collective_us(op, nbytes, Span(ranks, 1, ranks), PLAIN)
        assert us == pytest.approx(20 + (ranks - 1) * 1.0 + (ranks - 1) / ranks * nbytes / 50e9 * 1e6)
    for nodes, per_node in [(2, 1), (3, 4)]:  # the ports of a node share the bytes that the node lacks
        us = collective_us("reduce_scatter", nbytes, Span(nodes * per_node, nodes, per_node), PLAIN)
        hops = (nodes * per_node - nodes) * 1.0 + (nodes - 1) * 7.0
        assert us == pytest.approx(20 + hops + (nodes - 1) / nodes * nbytes / (per_node * 5e9) * 1e6)
    us = collective_us("all_gather", nbytes, Span(16, 2, 8), replace(PLAIN, network=1e15))
    assert us == pytest.approx(20 + 14 * 1.0 + 7.0 + 15 / 16 * nbytes / 50e9 * 1e6)


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather_that_start_once() -> None:
    for device, span, nbytes in itertools.product(
        [*DEVICES.values(), PLAIN], [Span(8, 1, 8), Span(24, 3, 8)], [0, 1 << 30]
    ):
        both = sum(collective_us(op, nbytes, span, device) for op in ("reduce_scatter", "all_gather"))
        found = collective_us("all_reduce", nbytes, span, device)
        assert found == pytest.approx(both - device.collective_us)
    for op in (*RINGS, "all_reduce", "send", "recv"):  # of one rank
        assert collective_us(op, 1 << 40, Span(1, 1, 1), PLAIN) == 0.0


def test_ranks_fill_one_node_after_the_other_and_of_uneven_groups_the_fewest_count() -> None:
    spans = {range(8): (8, 1, 8), range(16): (16, 2, 8), range(0, 32, 8): (4, 4, 1)}
    spans |= {(0, 1, 2, 8): (4, 2, 1), (5,): (1, 1, 1), (6, 7, 8, 9): (4, 2, 2)}
    assert [span_of(ranks, 8) for ranks in spans] == list(spans.values())
