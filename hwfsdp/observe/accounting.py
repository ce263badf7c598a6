"""What a step costs, before it is run: bytes in closed form.

This is the oracle for the ledger and the event log: everything here is computed from shapes, dtypes and the world size.
The bytes of a collective are the bytes of the whole tensor that it works on (the output of an all-gather, the input of a
reduce-scatter, padding included); `on_the_wire` computes from them the bytes that one rank sends.

The second half compares strategies: sharded parameters, sharded gradients, a sharded optimizer state, or nothing sharded. For
each it computes the bytes that a rank holds and the bytes that a step moves. Left out: activations and temporary buffers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from math import prod
from typing import NamedTuple

from hwfsdp.errors import UsageError
from hwfsdp.core.sharding import local_shape, padded_local_numel


@dataclass(frozen=True)
class GroupSizes:
    """One parameter group as integers.

    Attributes:
        shapes: of its parameters, unsharded.
        gather_itemsize: bytes per element of the parameters as gathered (their param dtype).
        reduce_itemsize: bytes per element of the gradients as reduced (their reduce dtype).
        resharded_after_forward: whether the backward has to gather them again.
    """

    shapes: Sequence[Sequence[int]]
    gather_itemsize: int = 4
    reduce_itemsize: int = 4
    resharded_after_forward: bool = True

    def padded_numel(self, world_size: int) -> int:
        """Elements of the whole group on the wire: every parameter padded to a multiple of `world_size` rows."""
        return world_size * sum(padded_local_numel(shape, world_size) for shape in self.shapes)


def unsharded_bytes(group: GroupSizes, world_size: int) -> int:
    """Bytes that the group's unsharded parameters hold while they are allocated."""
    return group.padded_numel(world_size) * group.gather_itemsize


def gathers_per_step(group: GroupSizes) -> int:
    """All-gathers of one forward and backward: two, or one for a group that stays unsharded in between."""
    return 2 if group.resharded_after_forward else 1


def step_traffic(groups: Sequence[GroupSizes], world_size: int) -> dict[str, int]:
    """Bytes by collective of one training step, sharded over all ranks: forward, backward, gradients reduced once.

    Each group is gathered `gathers_per_step` times, all of it (`unsharded_bytes`), and its gradients are reduce-scattered
    once: the same padded elements, in the reduce itemsize. The bytes are those of the whole tensors, not what one rank
    contributes or sends.

    Returns:
        `{"all_gather": …, "reduce_scatter": …}`; zeros at world size 1, where nothing travels.
    """
    if world_size == 1:
        return {"all_gather": 0, "reduce_scatter": 0}
    return {
        "all_gather": sum(gathers_per_step(g) * unsharded_bytes(g, world_size) for g in groups),
        "reduce_scatter": sum(g.padded_numel(world_size) * g.reduce_itemsize for g in groups),
    }


def on_the_wire(collective: str, nbytes: int, world_size: int) -> int:
    """Bytes that one rank sends, by the ring algorithm, for a collective over `nbytes`.

    An all-gather or a reduce-scatter sends `(W - 1) / W` of the tensor; an all-reduce is one of each, on the same tensor.
    (Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, 2005.)

    Args:
        collective: "all_gather", "reduce_scatter" or "all_reduce". nbytes: of the whole tensor, >= 0.

    Returns:
        Whole bytes, rounded down once, at the end; integers all the way, so that no size is too large. 0 for one rank.
    """
    rounds = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}[collective]
    return rounds * nbytes * (world_size - 1) // world_size


def peak_unsharded_bytes(kept: Sequence[GroupSizes], passing: Sequence[GroupSizes], world_size: int) -> int:
    """Return the most bytes of unsharded parameters that are alive at once.

    Args:
        kept: groups that stay whole while other groups compute: groups kept from forward to backward, and groups of
            modules around others. The root is both, by default.
        passing: groups that are freed after use; the schedule holds one of them at a time.
    """
    sizes = [unsharded_bytes(g, world_size) for g in passing]
    return sum(unsharded_bytes(g, world_size) for g in kept) + max(sizes, default=0)


# --- Strategies, compared ----------------------------------------------------------------------------------


class Strategy(Enum):
    """Which model states are sharded. Every rank holds the other states whole. The ZeRO stages are from arXiv:1910.02054.

    Attributes:
        DDP: none.
        ZERO1: the optimizer's state (the paper's P_os).
        ZERO2: the optimizer's state and the gradients (P_os+g).
        ZERO3: these and the parameters (P_os+g+p); `fully_shard` over a 1D mesh.
        HSDP: as ZERO3, within groups of ranks; the shards are replicated across them: `fully_shard` over a 2D mesh.
    """

    DDP = auto()
    ZERO1 = auto()
    ZERO2 = auto()
    ZERO3 = auto()
    HSDP = auto()


class MeshShape(NamedTuple):
    """Shape of a 2D mesh, in the order of its axes.

    Attributes:
        replicate: number of ranks that hold the same rows. shard: number of ranks that hold different rows.
    """

    replicate: int
    shard: int


def mesh_shape(strategy: Strategy, world_size: int, shards: int | None = None) -> MeshShape:
    """Say how a strategy arranges all ranks.

    Args:
        world_size: ranks in all, >= 1.
        shards: for HSDP, the number of ranks for which one copy of the states is cut: a factor of `world_size`. The other
            strategies ignore it.

    Returns:
        DDP replicates over all ranks and shards over one; ZeRO, whatever its stage, replicates over one and shards over
        all; HSDP shards over `shards` ranks, and replicates over as many as it takes to have `world_size` in all.

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
    """Bytes of the three model states: of one rank, or per element of the model. Their `sum` is the total."""

    params: int
    grads: int
    optimizer: int


FP32_ADAM = StateBytes(4, 4, 8)  # per element: all in fp32, and Adam's two moments


def model_state_bytes(
    shapes: Sequence[Sequence[int]],
    strategy: Strategy,
    world_size: int,
    shards: int | None = None,
    rank: int = 0,
    per_element: StateBytes = FP32_ADAM,
) -> StateBytes:
    """Bytes of parameters, gradients and optimizer state that a rank holds while its optimizer runs.

    At that moment gradients are reduced and no parameter is gathered for a forward or a backward. Let S be the ranks that
    the strategy shards over (`mesh_shape`: 1 for DDP). A state is held in one of three sizes, each a sum over `shapes`:

    - *own rows*: the elements of this rank's chunk, without padding (`sharding.local_shape`);
    - *padded chunk*: the elements of a full chunk, padding included, the same on every rank (`sharding.padded_local_numel`);
    - *whole*: S padded chunks. For S = 1, these three are the same: the elements of the model.

    | strategy    | params       | grads        | optimizer |
    | ----------- | ------------ | ------------ | --------- |
    | DDP, ZERO1  | whole        | whole        | own rows  |
    | ZERO2       | whole        | padded chunk | own rows  |
    | ZERO3, HSDP | padded chunk | padded chunk | own rows  |

    Parameters and gradients are padded where a collective reads or writes them chunk by chunk. For example, under ZERO1 and
    ZERO2 updated chunks are gathered into the whole parameters, and under ZERO1 whole gradients are reduce-scattered, with the
    result in this rank's chunk of them. The optimizer's state is never communicated.

    hwfsdp's `reshard_after_forward=False` moves the same bytes as ZERO2, but it counts as ZERO3 here: parameters stay whole from
    forward to backward, but are sharded again when the optimizer runs. (With `set_reshard_after_backward(False)` as well, each
    rank has whole parameters beside its shards, in the dtype they are gathered in; that is none of these strategies.)

    Args:
        shapes: of all parameters, each of at least one dimension, cut along dim 0, and trained.
        world_size, shards: as for `mesh_shape`.
        rank: among all ranks, 0 <= rank < world_size. Ranks that shard together are neighbors: this rank has the rows of number
            `rank % S` in its group of S. Rank 0 has the most rows.
        per_element: bytes per element of each state as it is kept. hwfsdp keeps parameters and gradients in the original
            dtype, whatever they are gathered and reduced in. The ZeRO paper's mixed-precision Adam is (2, 2, 12): fp32
            parameters count as optimizer state there. What an optimizer keeps once per parameter, such as Adam's
            count of steps, is not included.

    Returns:
        Bytes of this rank. At world size 1, all strategies have the same.

    Sources: Rajbhandari, Rasley, Ruwase, He: ZeRO, arXiv:1910.02054, sections 3.1 and 5 (who holds what; there,
    everything divides evenly); what is padded is hwfsdp's, see `param` and `collectives`.
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
    """Bytes by collective of one training step: forward, backward and optimizer, gradients reduced once.

    As in all of this module, the bytes are the bytes of the whole tensor that one collective works on, as one rank sees it. An
    all-reduce works on its input. Let S and R be the ranks that the strategy shards and replicates over
    (`mesh_shape`), and a *gather* or a *scatter* of a group the bytes of its S padded chunks
    (`GroupSizes.padded_numel(S)`), in its gather or its reduce itemsize.

    | strategy    | all_gather               | reduce_scatter | all_reduce                       |
    | ----------- | ------------------------ | -------------- | -------------------------------- |
    | DDP         | 0                        | 0              | all gradients, without padding   |
    | ZERO1/ZERO2 | one gather per group: of | one scatter    | 0                                |
    |             | the updated parameters   | per group      |                                  |
    | ZERO3       | `gathers_per_step` per   | one scatter    | 0                                |
    |             | group                    | per group      |                                  |
    | HSDP        | as ZERO3, over S ranks   | as ZERO3, over | what the scatter left: 1/S of it |
    |             |                          | S ranks        | (padded), over the R replicas    |

    All-reduces are in the reduce itemsize, too. If S is 1, nothing is gathered or scattered; if R is 1, nothing is all-reduced.
    Then these bytes are 0, and at world size 1 all bytes are 0. So HSDP over one shard moves the same bytes as DDP, and over one
    replica the same as ZERO3. `resharded_after_forward` is only for ZERO3 and HSDP: if it is False for every group, ZERO3 moves
    the same bytes as ZERO2.

    Args:
        groups: all parameters of the model, each in one group.
        world_size, shards: as for `mesh_shape`.

    Returns:
        `{"all_gather": …, "reduce_scatter": …, "all_reduce": …}`; `bytes_sent` says what a rank sends for that.

    Source: Rajbhandari et al.: ZeRO, arXiv:1910.02054, section 7, which counts elements sent: as much as DDP for its
    first two stages, half as much again for the third.
    """
    mesh = mesh_shape(strategy, world_size, shards)
    if strategy in (Strategy.ZERO1, Strategy.ZERO2):
        groups = [replace(group, resharded_after_forward=False) for group in groups]
    chunks = sum(g.padded_numel(mesh.shard) // mesh.shard * g.reduce_itemsize for g in groups)
    return {**step_traffic(groups, mesh.shard), "all_reduce": chunks if mesh.replicate > 1 else 0}


def bytes_sent(traffic: Mapping[str, int], mesh: MeshShape) -> dict[str, int]:
    """Bytes that one rank sends for a step's collectives, by the ring algorithm (`on_the_wire`).

    Args:
        traffic: bytes by collective ("all_gather", "reduce_scatter", "all_reduce"; any of them may be missing), of the
            whole tensors: from `strategy_traffic`, or measured.
        mesh: gathers and reduce-scatters run over its shard axis, all-reduces over its replicate axis.

    Returns:
        The same keys: 0 where the axis has one rank. Where blocks differ, because an axis does not divide an
        all-reduce's elements, this is the mean over the ranks of the axis, rounded down to whole bytes.

    Source: Thakur et al., 2005; see `on_the_wire`.
    """
    ranks = {"all_gather": mesh.shard, "reduce_scatter": mesh.shard, "all_reduce": mesh.replicate}
    return {collective: on_the_wire(collective, n, ranks[collective]) for collective, n in traffic.items()}
