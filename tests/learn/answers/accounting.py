"""Answers to 03."""

from __future__ import annotations

from answers.shapes import Right, Wrong


def wire(sent: str, rounds: str = '2 if collective == "all_reduce" else 1') -> dict[str, str]:
    """What a rank sends, by another formula."""
    return {"on_the_wire": f"""
        def on_the_wire(collective, nbytes, world_size):
            rounds = {rounds}
            return {sent}
        """}


def step(gathered: str, scattered: str, alone: str = "world_size == 1") -> dict[str, str]:
    """Sums over groups, by other formulas for one."""
    return {"step_traffic": f"""
        def step_traffic(groups, world_size):
            if {alone}:
                return {{"all_gather": 0, "reduce_scatter": 0}}
            return {{
                "all_gather": sum({gathered} for g in groups),
                "reduce_scatter": sum({scattered} for g in groups),
            }}
        """}


GATHERED = "gathers_per_step(g) * unsharded_bytes(g, world_size)"
SCATTERED = "g.padded_numel(world_size) * g.reduce_itemsize"


def states(
    params: str = "chunk * (1 if strategy in (Strategy.ZERO3, Strategy.HSDP) else shard)",
    grads: str = "chunk * (shard if strategy in (Strategy.DDP, Strategy.ZERO1) else 1)",
    optimizer: str = "rows",
    shard: str = "mesh_shape(strategy, world_size, shards).shard",
    number: str = "rank % shard",
) -> dict[str, str]:
    """Elements of a state, by another formula."""
    return {"model_state_bytes": f"""
        def model_state_bytes(shapes, strategy, world_size, shards=None, rank=0, per_element=FP32_ADAM):
            shard = {shard}
            chunk = sum(padded_local_numel(shape, shard) for shape in shapes)
            rows = sum(prod(local_shape(shape, shard, {number})) for shape in shapes)
            numel = sum(prod(shape) for shape in shapes)
            return StateBytes(
                ({params}) * per_element.params,
                ({grads}) * per_element.grads,
                ({optimizer}) * per_element.optimizer,
            )
        """}


def traffic(
    once: str = "strategy in (Strategy.ZERO1, Strategy.ZERO2)",
    chunks: str = "g.padded_numel(mesh.shard) // mesh.shard * g.reduce_itemsize",
    travels: str = "mesh.replicate > 1",
    over: str = "mesh.shard",
    change: str = "",
) -> dict[str, str]:
    """Traffic of strategies, by another formula."""
    return {"strategy_traffic": f"""
        def strategy_traffic(groups, strategy, world_size, shards=None):
            mesh = mesh_shape(strategy, world_size, shards)
            if {once}:
                groups = [replace(g, resharded_after_forward=False) for g in groups]
            found = step_traffic(groups, {over})
            found["all_reduce"] = sum({chunks} for g in groups) if {travels} else 0
            {change or "pass"}
            return found
        """}


def sent(gathers: str = "mesh.shard", all_reduces: str = "mesh.replicate") -> dict[str, str]:
    """Over other axes."""
    return {"bytes_sent": f"""
        def bytes_sent(traffic, mesh):
            return {{
                name: on_the_wire(name, n, {all_reduces} if name == "all_reduce" else {gathers})
                for name, n in traffic.items()
            }}
        """}


SENT = "rounds * nbytes * (world_size - 1) // world_size"
ALL_ZERO = "strategy in (Strategy.ZERO1, Strategy.ZERO2, Strategy.ZERO3)"

WRONG = [
    Wrong("wire: an all-reduce is one round", wire(SENT, "1"), "03.wire", "all-reduce-once"),
    Wrong("wire: all of it", wire("rounds * nbytes"), "03.wire", "too-much-traffic"),
    Wrong(
        "wire: all of it in every step",
        wire("rounds * nbytes * (world_size - 1)"),
        "03.wire",
        "too-much-traffic",
    ),
    Wrong("wire: one block", wire("rounds * nbytes // world_size"), "03.wire", "too-little-traffic"),
    Wrong(
        "wire: blocks rounded",
        wire("rounds * (world_size - 1) * (nbytes // world_size)"),
        "03.wire",
        "rounded-too-early",
    ),
    Wrong(
        "wire: through floats",
        wire("int(rounds * nbytes * (world_size - 1) / world_size)"),
        "03.wire",
        "rounded-too-early",
    ),
    Wrong(
        "wire: a float", wire("rounds * nbytes * (world_size - 1) / world_size"), "03.wire", "wrong-formula"
    ),
    Wrong(
        "step: one gather", step("unsharded_bytes(g, world_size)", SCATTERED), "03.step", "never-resharded"
    ),
    Wrong(
        "step: two gathers whatever is resharded",
        step("2 * unsharded_bytes(g, world_size)", SCATTERED),
        "03.step",
        "gathered-again",
    ),
    Wrong(
        "step: without padding",
        step(
            "gathers_per_step(g) * sum(prod(s) for s in g.shapes) * g.gather_itemsize",
            "sum(prod(s) for s in g.shapes) * g.reduce_itemsize",
        ),
        "03.step",
        "padding-dropped",
    ),
    Wrong(
        "step: gradients in the dtype of gathers",
        step(GATHERED, "unsharded_bytes(g, world_size)"),
        "03.step",
        "reduced-in-wrong-dtype",
    ),
    Wrong(
        "step: gathers in the dtype of gradients",
        step("gathers_per_step(g) * g.padded_numel(world_size) * g.reduce_itemsize", SCATTERED),
        "03.step",
        "gathered-in-wrong-dtype",
    ),
    Wrong("step: one rank, too", step(GATHERED, SCATTERED, "False"), "03.step", "nobody-to-send-to"),
    Wrong(
        "step: what a rank contributes",
        step(f"{GATHERED} // world_size", f"{SCATTERED} // world_size"),
        "03.step",
        "part-not-whole",
    ),
    Wrong(
        "step: what a rank sends",
        step(f"{GATHERED} * (world_size - 1) // world_size", f"{SCATTERED} * (world_size - 1) // world_size"),
        "03.step",
        "sent-not-moved",
    ),
    Wrong("states: ZeRO-3 has whole gradients", states(grads="chunk * shard"), "03.states", "replicated"),
    Wrong("states: ZeRO-2 shards parameters", states(params="chunk"), "03.states", "sharded-too-much"),
    Wrong(
        "states: parameters without padding",
        states(params="rows if strategy in (Strategy.ZERO3, Strategy.HSDP) else numel"),
        "03.states",
        "padding-dropped",
    ),
    Wrong("states: padded optimizer", states(optimizer="chunk"), "03.states", "padding-leaked"),
    Wrong("states: optimizer not sharded", states(optimizer="numel"), "03.states", "replicated"),
    Wrong("states: optimizer in equal parts", states(optimizer="numel // shard"), "03.states", "wrong-rows"),
    Wrong(
        "states: the number of the group for that in the group",
        states(number="rank // shard"),
        "03.states",
        "wrong-rows",
    ),
    Wrong("states: ranks counted over all", states(number="rank"), "03.states", "wrong-rows"),
    Wrong(
        "states: hybrid over all ranks",
        states(shard="1 if strategy is Strategy.DDP else world_size"),
        "03.states",
        "shards-are-ranks",
    ),
    Wrong(
        "states: four bytes per element, always",
        states(
            "4 * chunk * (1 if strategy in (Strategy.ZERO3, Strategy.HSDP) else shard) // per_element.params"
        ),
        "03.states",
        "wrong-formula",
    ),
    Wrong("traffic: ZeRO-1 gathers like ZeRO-3", traffic(once="False"), "03.traffic", "gathered-again"),
    Wrong("traffic: ZeRO-3 gathers like ZeRO-1", traffic(once=ALL_ZERO), "03.traffic", "never-resharded"),
    Wrong(
        "traffic: nothing gathered after the update",
        traffic(change='if strategy in (Strategy.ZERO1, Strategy.ZERO2): found["all_gather"] = 0'),
        "03.traffic",
        "update-not-gathered",
    ),
    Wrong(
        "traffic: replicas reduce whole gradients",
        traffic(chunks="g.padded_numel(mesh.shard) * g.reduce_itemsize"),
        "03.traffic",
        "reduced-whole",
    ),
    Wrong("traffic: all-reduces everywhere", traffic(travels="True"), "03.traffic", "nobody-to-send-to"),
    Wrong("traffic: hybrid over all ranks", traffic(over="world_size"), "03.traffic", "shards-are-ranks"),
    Wrong(
        "traffic: an all-reduce is two",
        traffic(chunks="2 * g.padded_numel(mesh.shard) // mesh.shard * g.reduce_itemsize"),
        "03.traffic",
        "sent-not-moved",
    ),
    Wrong(
        "traffic: all-reduce in the dtype of gathers",
        traffic(chunks="g.padded_numel(mesh.shard) // mesh.shard * g.gather_itemsize"),
        "03.traffic",
        "reduced-in-wrong-dtype",
    ),
    Wrong("traffic: no all-reduce", traffic(change='del found["all_reduce"]'), "03.traffic", "wrong-formula"),
    Wrong("sent: everything along shards", sent(all_reduces="mesh.shard"), "03.sent", "wrong-axis"),
    Wrong("sent: axes swapped", sent("mesh.replicate", "mesh.shard"), "03.sent", "wrong-axis"),
    Wrong(
        "sent: over all ranks",
        sent("mesh.shard * mesh.replicate", "mesh.shard * mesh.replicate"),
        "03.sent",
        "shards-are-ranks",
    ),
]

RIGHT = [
    Right(
        "by elements, without the package's helpers",
        {
            "on_the_wire": """
            def on_the_wire(collective, nbytes, world_size):
                if collective == "all_reduce":
                    nbytes *= 2
                return nbytes - -(-nbytes // world_size)
            """,
            "step_traffic": """
            def step_traffic(groups, world_size):
                gathered = scattered = 0
                for group in groups if world_size > 1 else []:
                    elements = sum(world_size * rows_up(s, world_size) * width(s) for s in group.shapes)
                    gathered += elements * group.gather_itemsize << bool(group.resharded_after_forward)
                    scattered += elements * group.reduce_itemsize
                return dict(all_gather=gathered, reduce_scatter=scattered)
            """,
        },
        """

        def rows_up(shape, parts):
            return (shape[0] + parts - 1) // parts


        def width(shape):
            found = 1
            for n in shape[1:]:
                found *= n
            return found
        """,
    ),
    Right(
        "a case for each strategy",
        {
            "model_state_bytes": """
            def model_state_bytes(shapes, strategy, world_size, shards=None, rank=0, per_element=FP32_ADAM):
                _, ranks = mesh_shape(strategy, world_size, shards)
                one = sum(padded_local_numel(s, ranks) for s in shapes)
                mine = sum(prod(local_shape(s, ranks, rank % ranks)) for s in shapes)
                match strategy.name:
                    case "DDP" | "ZERO1":
                        elements = ranks * one, ranks * one, mine
                    case "ZERO2":
                        elements = ranks * one, one, mine
                    case _:
                        elements = one, one, mine
                return StateBytes(*(n * nbytes for n, nbytes in zip(elements, per_element)))
            """,
            "strategy_traffic": """
            def strategy_traffic(groups, strategy, world_size, shards=None):
                found = {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 0}
                if strategy is Strategy.DDP and world_size > 1:
                    found["all_reduce"] = sum(prod(s) * g.reduce_itemsize for g in groups for s in g.shapes)
                elif strategy in (Strategy.ZERO1, Strategy.ZERO2) and world_size > 1:
                    found["all_gather"] = sum(unsharded_bytes(g, world_size) for g in groups)
                    found["reduce_scatter"] = sum(g.padded_numel(world_size) * g.reduce_itemsize for g in groups)
                elif strategy is Strategy.ZERO3:
                    found.update(step_traffic(groups, world_size))
                elif strategy is Strategy.HSDP:
                    mesh = mesh_shape(strategy, world_size, shards)
                    found |= step_traffic(groups, mesh.shard)
                    if mesh.replicate > 1:
                        for g in groups:
                            found["all_reduce"] += g.reduce_itemsize * sum(
                                padded_local_numel(s, mesh.shard) for s in g.shapes
                            )
                return found
            """,
        },
        """

        from hwfsdp.accounting import unsharded_bytes
        """,
    ),
    Right(
        "one axis after the other; a plain tuple of states",
        {
            "bytes_sent": """
            def bytes_sent(traffic, mesh):
                sent = {}
                for collective in traffic:
                    ranks = mesh[0] if collective.startswith("all_reduce") else mesh[1]
                    sent[collective] = on_the_wire(collective, traffic[collective], ranks)
                return sent
            """,
            "model_state_bytes": """
            def model_state_bytes(shapes, strategy, world_size, shards=None, rank=0, per_element=FP32_ADAM):
                chunks = mesh_shape(strategy, world_size, shards).shard
                params = grads = moments = 0
                for shape in shapes:
                    full = padded_local_numel(shape, chunks)
                    params += full * (chunks if strategy.value <= Strategy.ZERO2.value else 1)
                    grads += full * (chunks if strategy.value <= Strategy.ZERO1.value else 1)
                    moments += prod(local_shape(shape, chunks, rank % chunks))
                bytes_of = per_element._asdict()
                return (params * bytes_of["params"], grads * bytes_of["grads"], moments * bytes_of["optimizer"])
            """,
        },
    ),
]
