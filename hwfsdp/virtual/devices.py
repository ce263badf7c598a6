"""The figures of devices: numbers from data sheets, their sources, and one number that no data sheet has.

A data sheet gives peaks. In training, a device reaches a share of the peak of its matrix units. This share depends on its
power limit, its clocks and its kernels, and no data sheet gives it. So one number per device is fitted to one measurement
(`fitted_on`): to a published row, or for the H200 to what `make gpu` measured on one GPU (docs/gpu.md). Everything else in a
prediction is arithmetic. A device without a measurement uses the number of the nearest device, and its `fitted_on` says so.

Attention is a kernel of its own, and its speed is published. FlashAttention-2 (arXiv:2307.08691, figures 4 to 7) reaches about
180 of an A100's 312 TFLOP/s with a causal mask. On an H100 it reaches 335 TFLOP/s without the H100's own instructions, which
FlashAttention-3 (arXiv:2407.08608) gives as 35 %.

Sources, read in November 2026:

- A100: NVIDIA A100 Tensor Core GPU data sheet, June 2021 (SXM4 modules).
- H100: NVIDIA H100 Tensor Core GPU data sheet (SXM5). Its matrix figures are "with sparsity", so they are halved here.
- H100 96 GB: as the H100, with HBM2e at 2.4 TB/s, a 500 W limit and 400 Gb/s of network per GPU. These are the machines of the
  published Llama 3.1 figures (torchtitan, docs/performance.md; Meta's Grand Teton platform).
- H200: NVIDIA H200 Tensor Core GPU data sheet (SXM).
- B200: NVIDIA DGX B200 data sheet. An eighth of the system's figures is used.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hwfsdp.errors import UsageError, did_you_mean

GB, GIB = 1e9, 1 << 30


@dataclass(frozen=True)
class Device:
    """The figures of a device and its machine that a prediction needs.

    Attributes:
        flops: dense peak FLOP/s by dtype. A dtype that is not listed computes at the rate of "float32".
        memory: bytes of device memory. memory_bandwidth: bytes/s, read or written.
        link: bytes/s in each direction between a GPU and the other GPUs of its node.
        network: bytes/s in each direction between a GPU's node and other nodes, per GPU.
        per_node: GPUs in a node.
        efficiency: share of `flops` that matrix products reach. fitted_on: the measurement to which this share is fitted.
        attention_efficiency: share of `flops` that fused attention reaches, forward and backward. Masked FLOPs do not count. The
            figures are published (see above).
        memory_efficiency: share of `memory_bandwidth` that element-wise kernels reach.
        link_efficiency: share of `link` and `network` that collectives reach.
        launch_us: µs of the host to launch one kernel. kernel_us: µs of the shortest kernel.
        dtensor_us: additional µs of the host to dispatch an operator over DTensors.
        collective_us: µs to start a collective. hop_us, node_hop_us: additional µs for each hop inside a node, and between nodes.
        host: True if the host itself computes. Then it cannot run ahead.
        source: the source of the figures.
    """

    name: str
    flops: dict[str, float]
    memory: float
    memory_bandwidth: float
    link: float
    network: float
    per_node: int
    efficiency: float
    fitted_on: str
    source: str
    attention_efficiency: float
    memory_efficiency: float = 0.85
    link_efficiency: float = 0.8
    launch_us: float = 6.0
    kernel_us: float = 3.0
    dtensor_us: float = 60.0
    collective_us: float = 20.0
    hop_us: float = 1.5
    node_hop_us: float = 6.0
    host: bool = False

    def rate(self, dtype: str, is_attention: bool = False) -> float:
        """Return the FLOP/s that matrix products in this dtype reach, or attention if `is_attention`."""
        share = self.attention_efficiency if is_attention else self.efficiency
        return self.peak(dtype) * share

    def peak(self, dtype: str) -> float:
        """Return the peak FLOP/s of the data sheet."""
        return self.flops.get(dtype, self.flops["float32"])


_A100 = {"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12, "float64": 9.7e12}
_H100 = {"bfloat16": 989.4e12, "float16": 989.4e12, "float32": 67e12, "float64": 34e12}
_B200 = {"bfloat16": 2250e12, "float16": 2250e12, "float32": 75e12, "float64": 37e12}
_A100_SHEET, _H100_SHEET = "NVIDIA A100 data sheet (SXM4)", "NVIDIA H100 data sheet (SXM5)"
_GRAND_TETON = f"{_H100_SHEET}; memory and power of the published figures' machines"
_ROW_H100_96 = "Llama 3.1 8B on 8 GPUs, 2 × 8192, selective: 5,762 tokens/s each (torchtitan)"
_ROW_H100 = "MPT 7B on 8 GPUs, 6 × 2048, no checkpointing: 10,643 tokens/s each (llm-foundry)"
_ROW_H200 = "8 layers of Llama 3 8B on 1 GPU, 1 × 8192, forward and backward: 236 ms (measured here)"
_ROW_A100 = "Llama 3.1 8B on 64 GPUs, 1 × 8192, selective: 2,973 tokens/s each (torchtitan)"

_ATTENTION_A100, _ATTENTION_HOPPER = 180 / 312, 335 / 989.4
_FROM_H100 = f"borrowed from h100, not verified: {_ROW_H100}"
_FROM_A100 = f"borrowed from a100-80gb, not verified: {_ROW_A100}"

# Memory counts in units of 2^30 bytes, and rates in units of 10^9. All of these devices are eight in a node.
_A100_80 = Device(
    name="a100-80gb",
    flops=_A100,
    memory=80 * GIB,
    memory_bandwidth=2039 * GB,
    link=300 * GB,
    network=25 * GB,
    per_node=8,
    efficiency=0.691,
    fitted_on=_ROW_A100,
    source=_A100_SHEET,
    attention_efficiency=_ATTENTION_A100,
)
_H100_80 = replace(
    _A100_80,
    name="h100",
    flops=_H100,
    memory_bandwidth=3350 * GB,
    link=450 * GB,
    network=50 * GB,
    efficiency=0.514,
    fitted_on=_ROW_H100,
    source=_H100_SHEET,
    attention_efficiency=_ATTENTION_HOPPER,
)


def _like(device: Device, name: str, gigabytes: int, bandwidth: float, **more: Any) -> Device:
    return replace(device, name=name, memory=gigabytes * GIB, memory_bandwidth=bandwidth * GB, **more)


_OF_H100_96 = {"efficiency": 0.488, "fitted_on": _ROW_H100_96, "source": _GRAND_TETON}
_OF_H200 = {"efficiency": 0.739, "fitted_on": _ROW_H200, "source": "NVIDIA H200 data sheet"}
_OF_B200 = {"link": 900 * GB, "fitted_on": _FROM_H100, "source": "NVIDIA DGX B200 data sheet"}
_ALL = (
    _like(_A100_80, "a100-40gb", 40, 1555, fitted_on=_FROM_A100),
    _A100_80,
    _like(_H100_80, "h100-96gb", 96, 2400, **_OF_H100_96),
    _H100_80,
    _like(_H100_80, "h200", 141, 4800, **_OF_H200),
    _like(_H100_80, "b200", 180, 8000, flops=_B200, **_OF_B200),
)
DEVICES: dict[str, Device] = {device.name: device for device in _ALL}


def device_named(name: str) -> Device:
    """Return the device of this name.

    Raises:
        UsageError: there is no such device.
    """
    if name not in DEVICES:
        raise UsageError(
            f"device {name!r}",
            expected=f"one of {', '.join(DEVICES)}",
            got=repr(name),
            remedy=did_you_mean(name, DEVICES, "Choose one of these, or pass your own Device."),
        )
    return DEVICES[name]


def placed(device: Device, gpus: int, nodes: int | None = None) -> Device:
    """Return the device with the number of GPUs in each node, if `gpus` GPUs fill all nodes equally.

    Raises:
        UsageError: the GPUs do not fill the nodes equally, or a node would have too many.
    """
    if nodes is None:
        per_node = min(device.per_node, gpus)
        if gpus < 1 or gpus % per_node:
            below = max(gpus // device.per_node, 1) * device.per_node
            raise UsageError(
                "simulate",
                expected=f"nodes that are full, of {device.per_node} GPUs",
                got=f"{gpus} GPUs" + (f", {gpus - below} more than {below}" if gpus > below else ""),
                remedy=f"Take {below} or {below + device.per_node} GPUs, or say how many nodes there are.",
            )
    elif nodes < 1 or gpus < nodes or gpus % nodes or gpus // nodes > device.per_node:
        most = device.per_node
        raise UsageError(
            "simulate",
            expected=f"the same number of GPUs in each node, 1 to {most}",
            got=f"{gpus} GPUs on {nodes} nodes",
            remedy=f"Take a multiple of {nodes} GPUs, {nodes} to {most * nodes}, or another number of nodes.",
        )
    else:
        per_node = gpus // nodes
    return replace(device, per_node=per_node)
