"""03: what predictions would be by theory: the right ones, and those of somebody who leaves out, say, padding.

Each list begins with the right number, counted another way than the package does; -1 stands for a theory that has nothing
to say about a case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

from hwfsdp.accounting import GroupSizes, MeshShape, StateBytes, Strategy
from hwfsdp.learn.verdict import Finding

Shapes = Sequence[Sequence[int]]
FULL = StateBytes(2, 3, 7)  # bytes per element, all different


class Setup(NamedTuple):
    """A model and how it is trained.

    Attributes:
        run: name of the measured run, "" if there is none. shards: of HSDP. rank: whose states.
        drawn: from the seed; others are the same in every grading.
    """

    words: str
    groups: Sequence[GroupSizes]
    strategy: Strategy
    world_size: int
    shards: int | None
    rank: int = 0
    per_element: StateBytes = FULL
    run: str = ""
    drawn: bool = False

    @property
    def shapes(self) -> list[Sequence[int]]:
        return [shape for group in self.groups for shape in group.shapes]

    @property
    def mesh(self) -> MeshShape:
        if self.strategy is Strategy.DDP:
            return MeshShape(self.world_size, 1)
        shard = (self.shards or 1) if self.strategy is Strategy.HSDP else self.world_size
        return MeshShape(self.world_size // shard, shard)


class Wrong(NamedTuple):
    """A prediction that is not right: of what, and what it would be by each theory.

    `drawn`: the case is from the seed; others are the same in every grading.
    """

    words: str
    expected: int
    actual: Any
    theories: Sequence[tuple[str, int]]
    drawn: bool = False


def verdict(wrong: Sequence[Wrong]) -> None:
    """Raises a Finding if there is anything wrong: the first one, with the theory that explains most of all.

    Cases that are drawn have no say unless there is nothing else wrong, so that one answer gets one verdict, whatever the
    seed. Of theories that explain as many, the first listed is taken.
    """
    if not wrong:
        return
    heard = [each for each in wrong if not each.drawn] or wrong
    votes = dict.fromkeys((name for each in heard for name, _ in each.theories), 0)
    for each in heard:
        for misconception in {name for name, value in each.theories if value == each.actual}:
            votes[misconception] += 1
    enough = {name: count for name, count in votes.items() if 4 * count >= len(heard)}  # fewer are chance
    misconception = max(enough, key=lambda name: enough[name], default="wrong-formula")
    first = next((w for w in heard if (misconception, w.actual) in w.theories), heard[0])
    actual = f"{first.actual:,} B" if isinstance(first.actual, int) else str(first.actual)
    message = f"{first.words}: predicted {actual}, expected {first.expected:,} B."
    raise Finding(misconception, message, first.expected, first.actual)


# --- Sizes ---------------------------------------------------------------------------------------------------


def rows(shape: Sequence[int], ranks: int, rank: int) -> int:
    """Rows of a rank, counted."""
    full = (shape[0] + ranks - 1) // ranks
    return len(range(shape[0])[rank * full : (rank + 1) * full])


def own(shapes: Shapes, ranks: int, rank: int) -> int:
    """Elements of a rank's rows."""
    return sum(rows(shape, ranks, rank) * prod(shape[1:]) for shape in shapes)


def chunk(shapes: Shapes, ranks: int) -> int:
    """Elements of a full chunk: rank 0 always has one."""
    return own(shapes, ranks, 0)


def numel(shapes: Shapes) -> int:
    return sum(map(prod, shapes))


# --- Theories ------------------------------------------------------------------------------------------------


def wire_sizes(collective: str, n: int, ranks: int) -> list[tuple[str, int]]:
    """Bytes that a rank of a ring sends: the right ones, then those by theory."""
    rounds = 2 if collective == "all_reduce" else 1
    sent = rounds * n * (ranks - 1)
    return [
        ("right", (sent - sent % ranks) // ranks),
        ("all-reduce-once", n * (ranks - 1) // ranks if rounds == 2 else -1),
        ("nobody-to-send-to", rounds * n if ranks == 1 else -1),
        ("nobody-to-send-to", n if ranks == 1 else -1),
        ("too-much-traffic", rounds * n),
        ("too-much-traffic", sent),
        ("too-little-traffic", rounds * n // ranks),
        ("rounded-too-early", rounds * (ranks - 1) * (n // ranks)),
        ("rounded-too-early", rounds * (n * (ranks - 1) // ranks)),
        ("rounded-too-early", rounds * (n - n // ranks)),
        ("rounded-too-early", int(sent / ranks)),
    ]


def sent_sizes(collective: str, n: int, mesh: MeshShape) -> list[tuple[str, int]]:
    """The same along an axis of a mesh."""
    rounds = 2 if collective == "all_reduce" else 1
    along, across = (mesh.replicate, mesh.shard) if rounds == 2 else (mesh.shard, mesh.replicate)
    return [
        ("right", rounds * n * (along - 1) // along),
        ("wrong-axis", rounds * n * (across - 1) // across),
        ("shards-are-ranks", rounds * n * (along * across - 1) // (along * across)),
        ("all-reduce-once", n * (along - 1) // along if rounds == 2 else -1),
        ("too-much-traffic", n),
    ]


def state_sizes(setup: Setup) -> list[list[tuple[str, int]]]:
    """Of each state the right size, then those by theory, in bytes."""
    shard = setup.mesh.shard
    padded, theories = chunk(setup.shapes, shard), _elements_by_theory(setup)
    whole, as_chunk = ("whole", shard * padded), ("chunk", padded)
    kinds = {
        Strategy.DDP: (whole, whole),
        Strategy.ZERO1: (whole, whole),
        Strategy.ZERO2: (whole, as_chunk),
        Strategy.ZERO3: (as_chunk, as_chunk),
        Strategy.HSDP: (as_chunk, as_chunk),
    }[setup.strategy]
    mine = ("rows", own(setup.shapes, shard, setup.rank % shard))
    return [
        [(name, nbytes * elements) for name, elements in (kind, *theories[kind[0]])]
        for kind, nbytes in zip((*kinds, mine), setup.per_element, strict=True)
    ]


def _elements_by_theory(setup: Setup) -> dict[str, list[tuple[str, int]]]:
    """What would be held in place of the whole, a padded chunk, or a rank's rows."""
    shapes, shard, all_ranks = setup.shapes, setup.mesh.shard, setup.world_size
    rank, elements = setup.rank % shard, numel(shapes)
    padded, mine = chunk(shapes, shard), own(shapes, shard, rank)
    replicated = [("replicated", shard * padded), ("replicated", elements)]
    over_all = [chunk(shapes, all_ranks), own(shapes, all_ranks, setup.rank)]
    shards_are_ranks = [("shards-are-ranks", size) for size in over_all]
    others = [own(shapes, shard, other) for other in (setup.rank, shard - 1 - rank, setup.rank // shard)]
    return {
        "whole": [
            ("padding-dropped", elements),
            ("sharded-too-much", padded),
            ("sharded-too-much", mine),
        ],
        "chunk": [
            *replicated,
            ("padding-dropped", mine),
            ("padding-dropped", elements // shard),
            *shards_are_ranks,
        ],
        "rows": [
            *replicated,
            ("padding-leaked", padded),
            ("wrong-rows", elements // shard),
            *(("wrong-rows", size) for size in others),
            *shards_are_ranks,
        ],
    }


def summed(
    setup: Setup, elements: Callable[[Shapes], int], gather: bool, times: Callable[[GroupSizes], int]
) -> int:
    """Bytes of all groups, in the itemsize of gathers or of reductions."""
    return sum(
        times(g) * elements(g.shapes) * (g.gather_itemsize if gather else g.reduce_itemsize)
        for g in setup.groups
    )


def gather_sizes(setup: Setup) -> list[tuple[str, int]]:
    """Bytes of all-gathers: the right ones, then those by theory."""
    shard = setup.mesh.shard
    once_by_strategy = setup.strategy in (Strategy.ZERO1, Strategy.ZERO2)

    def by_group(group: GroupSizes) -> int:
        return 1 + group.resharded_after_forward

    def once(group: GroupSizes) -> int:
        return 1

    def whole(shapes: Shapes) -> int:
        return shard * chunk(shapes, shard)

    times = once if once_by_strategy else by_group
    right = summed(setup, whole, True, times)
    travels = shard > 1
    return [
        ("right", right if travels else 0),
        ("nobody-to-send-to", -1 if travels else right),
        ("update-not-gathered", 0 if travels and once_by_strategy else -1),
        ("never-resharded", -1 if once_by_strategy else summed(setup, whole, True, once)),
        ("gathered-again", summed(setup, whole, True, by_group)),
        ("gathered-again", 2 * summed(setup, whole, True, once)),
        ("padding-dropped", summed(setup, numel, True, times)),
        ("gathered-in-wrong-dtype", summed(setup, whole, False, times)),
        ("part-not-whole", right // shard),
        ("sent-not-moved", right * (shard - 1) // shard),
        ("shards-are-ranks", summed(setup, _over(setup.world_size), True, times)),
    ]


def scatter_sizes(setup: Setup) -> list[tuple[str, int]]:
    """Bytes of reduce-scatters."""
    shard = setup.mesh.shard
    travels = shard > 1
    right = summed(setup, _over(shard), False, lambda group: 1)
    return [
        ("right", right if travels else 0),
        ("nobody-to-send-to", -1 if travels else right),
        ("padding-dropped", summed(setup, numel, False, lambda group: 1)),
        ("reduced-in-wrong-dtype", summed(setup, _over(shard), True, lambda group: 1)),
        ("part-not-whole", right // shard),
        ("sent-not-moved", right * (shard - 1) // shard),
        (
            "reduced-too-often",
            summed(setup, _over(shard), False, lambda group: 1 + group.resharded_after_forward),
        ),
        ("shards-are-ranks", summed(setup, _over(setup.world_size), False, lambda group: 1)),
    ]


def all_reduce_sizes(setup: Setup) -> list[tuple[str, int]]:
    """Bytes of all-reduces."""
    replicate, shard = setup.mesh
    travels = replicate > 1

    def part(shapes: Shapes) -> int:
        return chunk(shapes, shard)

    right = summed(setup, part, False, lambda group: 1)
    return [
        ("right", right if travels else 0),
        ("nobody-to-send-to", -1 if travels else right),
        ("nobody-to-send-to", -1 if travels else shard * right),
        ("reduced-whole", shard * right if shard > 1 else -1),
        ("reduced-whole", summed(setup, numel, False, lambda group: 1) if shard > 1 else -1),
        ("padding-dropped", summed(setup, lambda shapes: numel(shapes) // shard, False, lambda group: 1)),
        ("reduced-in-wrong-dtype", summed(setup, part, True, lambda group: 1)),
        ("sent-not-moved", 2 * right),
        ("sent-not-moved", 2 * right * (replicate - 1) // replicate),
        (
            "shards-are-ranks",
            summed(setup, lambda shapes: chunk(shapes, setup.world_size), False, lambda group: 1),
        ),
    ]


def _over(ranks: int) -> Callable[[Shapes], int]:
    return lambda shapes: ranks * chunk(shapes, ranks)
