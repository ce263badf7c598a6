"""The bytes of a training step by closed forms, before the step runs.

This is the oracle for the ledger and the event log: everything here is computed from shapes, dtypes and the world size.
The bytes of a collective are the bytes of the whole tensor that it works on (the output of an all-gather, the input of a
reduce-scatter, padding included). `on_the_wire` converts them to the bytes that one rank sends.

The second half compares strategies: sharded parameters, sharded gradients, a sharded optimizer state, or nothing sharded. For
each strategy it computes the bytes that a rank holds and the bytes that a step moves. Left out: activations and temporary
buffers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import prod
from typing import NamedTuple

from hwfsdp.errors import UsageError
from hwfsdp.core.sharding import local_shape, padded_local_numel


@dataclass(frozen=True)
class GroupSizes:
    """One parameter group as integers.

    Attributes:
        shapes: the unsharded shapes of its parameters.
        gather_itemsize: bytes per element of a gathered parameter (in its param dtype).
        reduce_itemsize: bytes per element of a gradient while it is reduced (in its reduce dtype).
        resharded_after_forward: True if the backward gathers the parameters again.
    """

    shapes: Sequence[Sequence[int]]
    gather_itemsize: int = 4
    reduce_itemsize: int = 4
    resharded_after_forward: bool = True

    def padded_numel(self, world_size: int) -> int:
        """Return the elements of the whole group in a collective: every parameter padded to a multiple of `world_size` rows."""
        return world_size * sum(padded_local_numel(shape, world_size) for shape in self.shapes)


def unsharded_bytes(group: GroupSizes, world_size: int) -> int:
    """Return the bytes that the group's unsharded parameters hold while they are allocated."""
    return group.padded_numel(world_size) * group.gather_itemsize


def gathers_per_step(group: GroupSizes) -> int:
    """Return the number of all-gathers in one forward and backward: two, or one if the group stays unsharded in between."""
    return 2 if group.resharded_after_forward else 1


def step_traffic(groups: Sequence[GroupSizes], world_size: int) -> dict[str, int]:
    """Return the bytes of one training step by collective: one forward, one backward, one reduction of gradients.

    All groups are sharded over all ranks. Each group is gathered `gathers_per_step` times, as a whole (`unsharded_bytes`). Its
    gradients are reduce-scattered once: the same padded elements, in the reduce itemsize. The bytes count whole tensors, not
    the part that one rank contributes or sends.

    Returns:
        `{"all_gather": …, "reduce_scatter": …}`; zeros at world size 1, because nothing travels.
    """
    if world_size == 1:
        return {"all_gather": 0, "reduce_scatter": 0}
    return {
        "all_gather": sum(gathers_per_step(g) * unsharded_bytes(g, world_size) for g in groups),
        "reduce_scatter": sum(g.padded_numel(world_size) * g.reduce_itemsize for g in groups),
    }


def on_the_wire(collective: str, nbytes: int, world_size: int) -> int:
    """Return the bytes that one rank sends in a collective over `nbytes`, by the ring algorithm.

    In an all-gather or a reduce-scatter, a rank sends `(W - 1) / W` of the tensor. An all-reduce is a reduce-scatter and an
    all-gather of the same tensor.
    (Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, 2005.)

    Args:
        collective: "all_gather", "reduce_scatter" or "all_reduce". nbytes: bytes of the whole tensor, >= 0.

    Returns:
        Whole bytes, rounded down once at the end. All arithmetic is on integers, so no size is too large. 0 for one rank.
    """
    rounds = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}[collective]
    return rounds * nbytes * (world_size - 1) // world_size


def peak_unsharded_bytes(kept: Sequence[GroupSizes], passing: Sequence[GroupSizes], world_size: int) -> int:
    """Return the most bytes of unsharded parameters that are alive at once.

    Args:
        kept: groups that stay whole while other groups compute: groups that stay whole from forward to backward, and groups
            of modules that contain other groups. By default, the root is both.
        passing: groups that are freed after use. The schedule holds one of them at a time.
    """
    sizes = [unsharded_bytes(g, world_size) for g in passing]
    return sum(unsharded_bytes(g, world_size) for g in kept) + max(sizes, default=0)


# --- Strategies, compared ----------------------------------------------------------------------------------


class Strategy(Enum):
    """Which model states are sharded. Every rank holds the other states whole. The ZeRO stages are from arXiv:1910.02054.

    The value is the strategy's name, as the papers write it.

    Attributes:
        DDP: no state.
        ZERO1: the optimizer's state (the paper's P_os).
        ZERO2: the optimizer's state and the gradients (P_os+g).
        ZERO3: the optimizer's state, the gradients and the parameters (P_os+g+p); `fully_shard` over a 1D mesh.
        HSDP: as ZERO3, within groups of ranks. The shards are replicated across these groups; `fully_shard` over a 2D mesh.
    """

    DDP = "DDP"
    ZERO1 = "ZeRO-1"
    ZERO2 = "ZeRO-2"
    ZERO3 = "ZeRO-3"
    HSDP = "HSDP"


class MeshShape(NamedTuple):
    """Shape of a 2D mesh, in the order of its axes.

    Attributes:
        replicate: number of ranks that hold the same rows. shard: number of ranks that hold different rows.
    """

    replicate: int
    shard: int


def mesh_shape(strategy: Strategy, world_size: int, shards: int | None = None) -> MeshShape:
    """Return the mesh shape on which a strategy arranges all ranks.

    Args:
        world_size: number of all ranks, >= 1.
        shards: for HSDP, the number of ranks that share one copy of the states: a factor of `world_size`. The other
            strategies ignore it.

    Returns:
        DDP replicates over all ranks and shards over one. Every stage of ZeRO replicates over one rank and shards over all.
        HSDP shards over `shards` ranks and replicates over `world_size // shards` ranks.

    Raises:
        UsageError: for HSDP, `shards` is None, below 1, or not a factor of `world_size`.
    """
    if strategy is Strategy.DDP:
        return MeshShape(world_size, 1)
    if strategy is not Strategy.HSDP:
        return MeshShape(1, world_size)
    if shards is None or shards < 1 or world_size % shards:
        raise UsageError(
            "mesh_shape(Strategy.HSDP, …, shards=…)",
            expected=f"a factor of the {world_size} ranks",
            got=str(shards),
            remedy="Pass how many ranks shard, such as the number of ranks of one host.",
        )
    return MeshShape(world_size // shards, shards)


class StateBytes(NamedTuple):
    """Bytes of the three model states, of one rank or per element of the model. Their `sum` is the total."""

    params: int
    grads: int
    optimizer: int


FP32_ADAM = StateBytes(4, 4, 8)  # per element: everything in fp32; Adam keeps two moments


def model_state_bytes(
    shapes: Sequence[Sequence[int]],
    strategy: Strategy,
    world_size: int,
    shards: int | None = None,
    rank: int = 0,
    per_element: StateBytes = FP32_ADAM,
) -> StateBytes:
    """Return the bytes of parameters, gradients and optimizer state that a rank holds while its optimizer runs.

    At that moment, gradients are reduced, and no parameter is gathered for a forward or a backward. Let S be the number of
    ranks that the strategy shards over (`mesh_shape`: 1 for DDP). A state has one of three sizes. Each is a sum over `shapes`:

    - *own rows*: the elements of this rank's chunk, without padding (`sharding.local_shape`);
    - *padded chunk*: the elements of a full chunk, padding included, the same on every rank (`sharding.padded_local_numel`);
    - *whole*: S padded chunks. For S = 1, these three are the same: the elements of the model.

    | strategy    | params       | grads        | optimizer |
    | ----------- | ------------ | ------------ | --------- |
    | DDP, ZERO1  | whole        | whole        | own rows  |
    | ZERO2       | whole        | padded chunk | own rows  |
    | ZERO3, HSDP | padded chunk | padded chunk | own rows  |

    Parameters and gradients are padded if a collective reads or writes them chunk by chunk. For example, ZERO1 and ZERO2 gather
    the updated chunks into the whole parameters. ZERO1 reduce-scatters the whole gradients, and writes the result into this
    rank's chunk of them. The optimizer's state is never communicated.

    hwfsdp's `reshard_after_forward=False` moves the same bytes as ZERO2, but it counts as ZERO3 here: parameters stay whole from
    forward to backward, but are sharded again when the optimizer runs. (With `set_reshard_after_backward(False)` as well, each
    rank has whole parameters beside its shards, in the dtype in which they are gathered. This is none of these strategies.)

    Args:
        shapes: the shapes of all parameters. Each parameter has at least one dimension, is cut along dim 0, and is trained.
        world_size, shards: as for `mesh_shape`.
        rank: this rank's number among all ranks, 0 <= rank < world_size. Ranks that shard together are neighbors: this rank has
            chunk `rank % S` in its group of S. Rank 0 has the most rows.
        per_element: bytes per element of each state as it is kept. hwfsdp keeps parameters and gradients in the original
            dtype. It may gather and reduce them in another dtype. The ZeRO paper's mixed-precision Adam is (2, 2, 12): fp32
            parameters count as optimizer state there. Values that an optimizer keeps once per parameter are not included, such
            as Adam's count of steps.

    Returns:
        Bytes of this rank. At world size 1, all strategies give the same bytes.

    Sources: Rajbhandari, Rasley, Ruwase, He: ZeRO, arXiv:1910.02054, sections 3.1 and 5, say which rank holds which state; in
    the paper, everything divides evenly. The padding is hwfsdp's own, see `core.param` and `core.flat_collectives`.
    """
    shard = mesh_shape(strategy, world_size, shards).shard
    chunk = sum(padded_local_numel(shape, shard) for shape in shapes)
    rows = sum(prod(local_shape(shape, shard, rank % shard)) for shape in shapes)
    whole_params = strategy in (Strategy.DDP, Strategy.ZERO1, Strategy.ZERO2)
    whole_grads = strategy in (Strategy.DDP, Strategy.ZERO1)
    return StateBytes(
        params=(shard if whole_params else 1) * chunk * per_element.params,
        grads=(shard if whole_grads else 1) * chunk * per_element.grads,
        optimizer=rows * per_element.optimizer,
    )


def strategy_traffic(
    groups: Sequence[GroupSizes], strategy: Strategy, world_size: int, shards: int | None = None
) -> dict[str, int]:
    """Return the bytes of one training step by collective: forward, backward and optimizer, with one reduction of gradients.

    As in all of this module, the bytes are the bytes of the whole tensor that one collective works on, as one rank sees it. An
    all-reduce works on its input. Let S and R be the numbers of ranks that the strategy shards and replicates over
    (`mesh_shape`). A *gather* or a *scatter* of a group means the bytes of its S padded chunks (`GroupSizes.padded_numel(S)`),
    in its gather or its reduce itemsize.

    | strategy    | all_gather               | reduce_scatter | all_reduce                       |
    | ----------- | ------------------------ | -------------- | -------------------------------- |
    | DDP         | 0                        | 0              | all gradients, without padding   |
    | ZERO1/ZERO2 | one gather per group: of | one scatter    | 0                                |
    |             | the updated parameters   | per group      |                                  |
    | ZERO3       | `gathers_per_step` per   | one scatter    | 0                                |
    |             | group                    | per group      |                                  |
    | HSDP        | as ZERO3, over S ranks   | as ZERO3, over | the result of the scatter: 1/S   |
    |             |                          | S ranks        | (padded), over the R replicas    |

    All-reduces are in the reduce itemsize, too. If S is 1, nothing is gathered or scattered; if R is 1, nothing is all-reduced.
    Then these bytes are 0, and at world size 1 all bytes are 0. So HSDP over one shard moves the same bytes as DDP, and HSDP over
    one replica moves the same bytes as ZERO3. `resharded_after_forward` is only for ZERO3 and HSDP: if it is False for every
    group, ZERO3 moves the same bytes as ZERO2.

    Args:
        groups: all parameters of the model, each in one group.
        world_size, shards: as for `mesh_shape`.

    Returns:
        `{"all_gather": …, "reduce_scatter": …, "all_reduce": …}`; `bytes_sent` converts them to the bytes that a rank sends.

    Source: Rajbhandari et al.: ZeRO, arXiv:1910.02054, section 7. The paper counts the elements that a rank sends: the first two
    stages send as many as DDP, and the third stage sends 1.5 times as many.
    """
    mesh = mesh_shape(strategy, world_size, shards)
    if strategy in (Strategy.ZERO1, Strategy.ZERO2):
        groups = [replace(group, resharded_after_forward=False) for group in groups]
    chunks = sum(g.padded_numel(mesh.shard) // mesh.shard * g.reduce_itemsize for g in groups)
    return {**step_traffic(groups, mesh.shard), "all_reduce": chunks if mesh.replicate > 1 else 0}


def bytes_sent(traffic: Mapping[str, int], mesh: MeshShape) -> dict[str, int]:
    """Return the bytes that one rank sends for a step's collectives, by the ring algorithm (`on_the_wire`).

    Args:
        traffic: bytes of the whole tensors by collective ("all_gather", "reduce_scatter", "all_reduce"; any of them may be
            missing): from `strategy_traffic`, or measured.
        mesh: gathers and reduce-scatters run over its shard axis, all-reduces over its replicate axis.

    Returns:
        The same keys, with 0 if the axis has one rank. If the axis does not divide the elements of an all-reduce, ranks have
        blocks of different sizes. Then this is the mean over the ranks of the axis, rounded down to whole bytes.

    Source: Thakur et al., 2005; see `on_the_wire`.
    """
    ranks = {"all_gather": mesh.shard, "reduce_scatter": mesh.shard, "all_reduce": mesh.replicate}
    return {collective: on_the_wire(collective, n, ranks[collective]) for collective, n in traffic.items()}
