"""Answers to 02."""

from __future__ import annotations

from answers.shapes import Right, Wrong


def gather(loop: str, start: str = "blocks[rank].copy_(input)") -> dict[str, str]:
    """A gather with another loop, or another start."""
    return {"ring_all_gather": f"""
        def ring_all_gather(output, input, group):
            rank, world_size = dist.get_rank(group), dist.get_world_size(group)
            blocks = output.view(world_size, -1)
            {start}
            {loop}
        """}


def reduce(
    first: str = "blocks[(rank - 1) % world_size]",
    steps: str = "range(1, world_size)",
    add: str = "partial = received.add_(blocks[(rank - step - 1) % world_size])",
    end: str = "output.copy_(partial / world_size if mean else partial)",
) -> dict[str, str]:
    """A reduction with one of its parts replaced."""
    return {"ring_reduce_scatter": f"""
        def ring_reduce_scatter(output, input, group, mean):
            rank, world_size = dist.get_rank(group), dist.get_world_size(group)
            blocks = input.view(world_size, -1)
            partial = {first}
            for step in {steps}:
                received = torch.empty_like(partial)
                exchange(partial, received, group)
                {add}
            {end}
        """}


def steps(count: str) -> str:
    return (
        f"for step in range({count}): "
        "exchange(blocks[(rank - step) % world_size], blocks[(rank - step - 1) % world_size], group)"
    )


TO_THE_LEFT = """

def to_the_left(send, receive, group):
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, send, group=group, group_peer=(rank - 1) % world_size),
            dist.P2POp(dist.irecv, receive, group=group, group_peer=(rank + 1) % world_size),
        ]
    )
    for work in works:
        work.wait()
"""

WRONG = [
    Wrong("gather: as many steps as ranks", gather(steps("world_size")), "02.traffic", "too-much-traffic"),
    Wrong("gather: a step too few", gather(steps("world_size - 2")), "02.gather", "block-missing"),
    Wrong(
        "gather: own block forgotten", gather(steps("world_size - 1"), "pass"), "02.gather", "block-missing"
    ),
    Wrong(
        "gather: blocks counted the wrong way",
        gather(
            "for step in range(world_size - 1): "
            "exchange(blocks[(rank + step) % world_size], blocks[(rank + step + 1) % world_size], group)"
        ),
        "02.gather",
        "wrong-neighbour",
    ),
    Wrong(
        "gather: off by one block",
        gather(
            "for step in range(world_size - 1): "
            "exchange(blocks[(rank - step) % world_size], blocks[(rank - step - 2) % world_size], group)"
        ),
        "02.gather",
        "wrong-block",
    ),
    Wrong(
        "gather: in order of arrival",
        gather(
            "for step in range(world_size - 1): exchange(blocks[step], blocks[step + 1], group)",
            "blocks[0].copy_(input)",
        ),
        "02.gather",
        "wrong-block",
    ),
    Wrong(
        "gather: around the left",
        gather(
            "for step in range(world_size - 1): "
            "to_the_left(blocks[(rank + step) % world_size], blocks[(rank + step + 1) % world_size], group)"
        ),
        "02.traffic",
        "wrong-neighbour",
        TO_THE_LEFT,
    ),
    Wrong(
        "gather: everything in every step",
        {"ring_all_gather": """
            def ring_all_gather(output, input, group):
                rank, world_size = dist.get_rank(group), dist.get_world_size(group)
                own = input.clone()
                output.zero_()
                output.view(world_size, -1)[rank] = own
                received = torch.empty_like(output)
                for step in range(world_size - 1):
                    exchange(output, received, group)
                    source = (rank - step - 1) % world_size
                    output.view(world_size, -1)[source] = received.view(world_size, -1)[source]
            """},
        "02.traffic",
        "too-much-traffic",
    ),
    Wrong(
        "gather: straight from everyone to everyone",
        {"ring_all_gather": """
            def ring_all_gather(output, input, group):
                rank, world_size = dist.get_rank(group), dist.get_world_size(group)
                blocks = output.view(world_size, -1)
                own = input.clone()
                blocks[rank] = own
                works = []
                for peer in range(world_size):
                    if peer != rank:
                        works.append(dist.isend(own, group=group, group_dst=peer))
                        works.append(dist.irecv(blocks[peer], group=group, group_src=peer))
                for work in works:
                    work.wait()
            """},
        "02.traffic",
        "not-a-ring",
    ),
    Wrong(
        "gather: the library's",
        {"ring_all_gather": """
            def ring_all_gather(output, input, group):
                dist.all_gather(list(output.chunk(dist.get_world_size(group))), input.clone(), group=group)
            """},
        "02.traffic",
        "not-a-ring",
    ),
    Wrong(
        "gather: by broadcasts",
        {"ring_all_gather": """
            def ring_all_gather(output, input, group):
                blocks = output.view(dist.get_world_size(group), -1)
                blocks[dist.get_rank(group)] = input
                for source, block in enumerate(blocks):
                    dist.broadcast(block, group_src=source, group=group)
            """},
        "02.traffic",
        "not-a-ring",
    ),
    Wrong(
        "gather: output cleared first",
        gather(steps("world_size - 1"), "output.zero_(); blocks[rank].copy_(input)"),
        "02.memory",
        "input-changed",
    ),
    Wrong(
        "gather: ranks of the world",
        {"ring_all_gather": """
            def ring_all_gather(output, input, group):
                rank, world_size = dist.get_rank(), dist.get_world_size()
                blocks = output.view(world_size, -1)
                blocks[rank].copy_(input)
                for step in range(world_size - 1):
                    exchange(blocks[(rank - step) % world_size], blocks[(rank - step - 1) % world_size], group)
            """},
        "02.rings",
        "wrong-group",
    ),
    Wrong(
        "gather: rank 0 sends nothing",
        {"ring_all_gather": """
            def ring_all_gather(output, input, group):
                rank, world_size = dist.get_rank(group), dist.get_world_size(group)
                blocks = output.view(world_size, -1)
                blocks[rank].copy_(input)
                if rank == 0:
                    return
                for step in range(world_size - 1):
                    exchange(blocks[(rank - step) % world_size], blocks[(rank - step - 1) % world_size], group)
            """},
        "02.gather",
        "stuck-in",
    ),
    Wrong("reduce: starts with its own", reduce(first="blocks[rank]"), "02.reduce", "wrong-block"),
    Wrong(
        "reduce: one block further",
        reduce("blocks[rank]", add="partial = received.add_(blocks[(rank - step) % world_size])"),
        "02.reduce",
        "wrong-block",
    ),
    Wrong(
        "reduce: own share added once more",
        reduce(
            end="output.copy_(partial + blocks[rank] if not mean else (partial + blocks[rank]) / world_size)"
        ),
        "02.reduce",
        "share-twice",
    ),
    Wrong(
        "reduce: the last share forgotten",
        reduce(
            add="partial = received if step == world_size - 1 else received + blocks[(rank - step - 1) % world_size]"
        ),
        "02.reduce",
        "block-missing",
    ),
    Wrong(
        "reduce: as many steps as ranks", reduce(steps="range(world_size)"), "02.traffic", "too-much-traffic"
    ),
    Wrong(
        "mean: divided in every step",
        reduce(
            add="partial = received.add_(blocks[(rank - step - 1) % world_size])\n"
            "                if mean: partial = partial / world_size",
            end="output.copy_(partial)",
        ),
        "02.mean",
        "divided-every-step",
    ),
    Wrong("mean: never", reduce(end="output.copy_(partial)"), "02.mean", "summed-not-averaged"),
    Wrong(
        "mean: twice",
        reduce(end="output.copy_(partial / world_size**2 if mean else partial)"),
        "02.mean",
        "averaged-twice",
    ),
    Wrong(
        "mean: rounded down to whole numbers",
        reduce(
            end="output.copy_(partial)\n"
            "            if mean: output.div_(world_size, rounding_mode='floor')",
        ),
        "02.mean",
        "wrong-value",
    ),
    Wrong(
        "mean: the result stays as it was",
        reduce(end="output if mean else output.copy_(partial)"),
        "02.mean",
        "block-missing",
    ),
    Wrong(
        "mean: always", reduce(end="output.copy_(partial / world_size)"), "02.reduce", "averaged-not-summed"
    ),
    Wrong(
        "reduce: sums collected in the input",
        {"ring_reduce_scatter": """
            def ring_reduce_scatter(output, input, group, mean):
                rank, world_size = dist.get_rank(group), dist.get_world_size(group)
                blocks = input.view(world_size, -1)
                received = torch.empty_like(output)
                for step in range(1, world_size):
                    exchange(blocks[(rank - step) % world_size], received, group)
                    blocks[(rank - step - 1) % world_size] += received
                output.copy_(blocks[rank])
                if mean:
                    output.div_(world_size)
            """},
        "02.memory",
        "input-changed",
    ),
    Wrong(
        "reduce: all of it, then cut",
        {"ring_reduce_scatter": """
            def ring_reduce_scatter(output, input, group, mean):
                whole = input.clone()
                dist.all_reduce(whole, group=group)
                output.copy_(whole.view(dist.get_world_size(group), -1)[dist.get_rank(group)])
                if mean:
                    output.div_(dist.get_world_size(group))
            """},
        "02.traffic",
        "not-a-ring",
    ),
]

RIGHT = [
    Right(
        "what travels is a tensor of its own, and arrives with a cursor",
        {
            "ring_all_gather": """
            def ring_all_gather(output, input, group):
                world_size = dist.get_world_size(group)
                pieces = list(output.chunk(world_size))
                here = dist.get_rank(group)
                travelling = input.clone()
                pieces[here].copy_(travelling)
                for _ in range(world_size - 1):
                    here = here - 1 if here else world_size - 1
                    arrived = torch.empty_like(travelling)
                    exchange(travelling, arrived, group)
                    pieces[here].copy_(arrived)
                    travelling = arrived
            """,
            "ring_reduce_scatter": """
            def ring_reduce_scatter(output, input, group, mean):
                world_size = dist.get_world_size(group)
                order = [(dist.get_rank(group) - 1 - s) % world_size for s in range(world_size)]
                pieces = input.chunk(world_size)
                partial = torch.zeros_like(output)
                for index, block in enumerate(order):
                    if index:
                        sent, partial = partial, torch.zeros_like(output)
                        exchange(sent, partial, group)
                    partial = partial + pieces[block]
                torch.mul(partial, 1 / world_size, out=output) if mean else output.copy_(partial)
            """,
        },
    ),
    Right(
        "sends and receives of its own, imported by name",
        {
            "ring_all_gather": """
            def ring_all_gather(output, input, group):
                n = input.numel()
                rank, world_size = get_rank(group), get_world_size(group)
                output.narrow(0, rank * n, n).copy_(input)
                for step in range(world_size - 1):
                    send, receive = ((rank - step - i) % world_size * n for i in (0, 1))
                    pass_on(output[send : send + n], output[receive : receive + n], group)
            """,
            "ring_reduce_scatter": """
            def ring_reduce_scatter(output, input, group, mean):
                rank, world_size = get_rank(group), get_world_size(group)
                blocks = input.reshape(world_size, output.numel())
                output.copy_(blocks[rank - 1])
                for step in range(2, world_size + 1):
                    sent = output.clone()
                    pass_on(sent, output, group)
                    output += blocks[(rank - step) % world_size]
                if mean:
                    output /= world_size
            """,
        },
        """

        from torch.distributed import get_rank, get_world_size, irecv, isend


        def pass_on(send, receive, group):
            rank, world_size = get_rank(group), get_world_size(group)
            arriving = irecv(receive, group=group, group_src=(rank - 1) % world_size)
            isend(send, group=group, group_dst=(rank + 1) % world_size).wait()
            arriving.wait()
        """,
    ),
    Right(
        "even ranks send first; divided before it is sent",
        {
            "ring_all_gather": """
            def ring_all_gather(output, input, group):
                rank, world_size = dist.get_rank(group), dist.get_world_size(group)
                blocks = dict(enumerate(output.split(input.shape[0])))
                blocks[rank][:] = input
                for source in range(rank - 1, rank - world_size, -1):
                    turn(blocks[(source + 1) % world_size], blocks[source % world_size], group)
            """,
            "ring_reduce_scatter": """
            def ring_reduce_scatter(output, input, group, mean):
                rank, world_size = dist.get_rank(group), dist.get_world_size(group)
                mine = (input / world_size if mean else input).view(world_size, -1).roll(-rank, 0)
                total = mine[-1].clone()
                for step in range(2, world_size + 1):
                    arrived = torch.empty_like(total)
                    turn(total, arrived, group)
                    total = mine[-step] + arrived
                output.copy_(total)
            """,
        },
        """

        def turn(send, receive, group):
            rank, world_size = dist.get_rank(group), dist.get_world_size(group)
            right = dict(group=group, group_dst=(rank + 1) % world_size)
            left = dict(group=group, group_src=(rank - 1) % world_size)
            if rank % 2 == 0 and rank != world_size - 1:
                dist.send(send, **right)
                dist.recv(receive, **left)
            else:
                kept = send.clone()
                dist.recv(receive, **left)
                dist.send(kept, **right)
        """,
    ),
    Right(
        "recursively, half a block at a time",
        {
            "ring_all_gather": """
            def ring_all_gather(output, input, group):
                blocks = output.view(dist.get_world_size(group), -1)
                rank = dist.get_rank(group)
                blocks[rank] = input
                around(blocks, rank, len(blocks) - 1, group)
            """,
        },
        """

        def around(blocks, current, left, group):
            if left == 0:
                return
            before = (current - 1) % len(blocks)
            half = blocks.shape[1] // 2
            for part in (slice(0, half), slice(half, None)):
                if blocks[current][part].numel():
                    exchange(blocks[current][part], blocks[before][part], group)
            around(blocks, before, left - 1, group)
        """,
    ),
]
