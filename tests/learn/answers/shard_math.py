"""Answers to 01."""

from __future__ import annotations

from answers.shapes import Right, Wrong

WRONG = [
    Wrong(
        "chunks rounded down",
        {"chunk_length": "def chunk_length(n, world_size):\n    return n // world_size\n"},
        "01.chunk",
        "floor-instead-of-ceil",
    ),
    Wrong(
        "one row more than rounded down",
        {"chunk_length": "def chunk_length(n, world_size):\n    return n // world_size + 1\n"},
        "01.chunk",
        "padded-always",
    ),
    Wrong(
        "rounded up through floats",
        {"chunk_length": "def chunk_length(n, world_size):\n    return math.ceil(n / world_size)\n"},
        "01.chunk",
        "float-for-integer",
        "\nimport math\n",
    ),
    Wrong(
        "almost one added to a float",
        {"chunk_length": "def chunk_length(n, world_size):\n    return round(n / world_size + 0.499)\n"},
        "01.chunk",
        "float-for-integer",
    ),
    Wrong(
        "padded length through floats",
        {
            "padded_length": "def padded_length(n, world_size):\n    return math.ceil(n / world_size) * world_size\n"
        },
        "01.padded",
        "float-for-integer",
        "\nimport math\n",
    ),
    Wrong(
        "extents through floats",
        {"chunk_extent": """
            def chunk_extent(n, world_size, rank):
                length = math.ceil(n / world_size)
                start = min(rank * length, n)
                return Extent(start, min(length, n - start))
            """},
        "01.rows",
        "float-for-integer",
        "\nimport math\n",
    ),
    Wrong(
        "a plain tuple",
        {"chunk_extent": """
            def chunk_extent(n, world_size, rank):
                length = chunk_length(n, world_size)
                start = min(rank * length, n)
                return start, min(length, n - start)
            """},
        "01.rows",
        "wrong-value",
    ),
    Wrong(
        "three dimensions at most",
        {"local_shape": """
            def local_shape(shape, world_size, rank):
                return (chunk_extent(shape[0], world_size, rank).length, *shape[1:3])
            """},
        "01.shape",
        "wrong-value",
    ),
    Wrong(
        "padded length not padded",
        {"padded_length": "def padded_length(n, world_size):\n    return n\n"},
        "01.padded",
        "padding-dropped",
    ),
    Wrong(
        "padded to one multiple too many",
        {
            "padded_length": "def padded_length(n, world_size):\n    return (n // world_size + 1) * world_size\n"
        },
        "01.padded",
        "padded-always",
    ),
    Wrong(
        "remainder to the first ranks",
        {"chunk_extent": """
            def chunk_extent(n, world_size, rank):
                small, more = divmod(n, world_size)
                start = rank * small + min(rank, more)
                return Extent(start, small + (rank < more))
            """},
        "01.rows",
        "spread-evenly",
    ),
    Wrong(
        "last chunk not cut off",
        {"chunk_extent": """
            def chunk_extent(n, world_size, rank):
                length = chunk_length(n, world_size)
                return Extent(rank * length, length)
            """},
        "01.rows",
        "past-the-end",
    ),
    Wrong(
        "negative lengths past the end",
        {"chunk_extent": """
            def chunk_extent(n, world_size, rank):
                length = chunk_length(n, world_size)
                return Extent(rank * length, min(length, n - rank * length))
            """},
        "01.rows",
        "past-the-end",
    ),
    Wrong(
        "empty shards at zero",
        {"chunk_extent": """
            def chunk_extent(n, world_size, rank):
                length = chunk_length(n, world_size)
                start = rank * length
                if start >= n:
                    return Extent(0, 0)
                return Extent(start, min(length, n - start))
            """},
        "01.empty",
        "empty-at-zero",
    ),
    Wrong(
        "every rank has all rows",
        {"chunk_extent": "def chunk_extent(n, world_size, rank):\n    return Extent(0, n)\n"},
        "01.rows",
        "replicated",
    ),
    Wrong(
        "shapes of padded shards",
        {"local_shape": """
            def local_shape(shape, world_size, rank):
                return (chunk_length(shape[0], world_size), *shape[1:])
            """},
        "01.shape",
        "padding-leaked",
    ),
    Wrong(
        "lists for shapes",
        {"local_shape": """
            def local_shape(shape, world_size, rank):
                return [chunk_extent(shape[0], world_size, rank).length, *shape[1:]]
            """},
        "01.shape",
        "wrong-value",
    ),
]

RIGHT = [
    Right(
        "rounded up with additions and remainders",
        {
            "chunk_length": "def chunk_length(n, world_size):\n    return (n + world_size - 1) // world_size\n",
            "padded_length": "def padded_length(n, world_size):\n    return n + (-n) % world_size\n",
        },
    ),
    Right(
        "by enumerating rows",
        {"chunk_extent": """
            def chunk_extent(n, world_size, rank):
                length = chunk_length(n, world_size)
                rows = range(n)[rank * length : (rank + 1) * length]
                return Extent(rows.start, len(rows))
            """},
    ),
    Right(
        "helpers of one's own, keyword arguments and defaults",
        {"chunk_extent": """
            def chunk_extent(n, world_size, rank, _clamp=True):
                start, stop = bounds(n, world_size, rank), bounds(n, world_size, rank + 1)
                return Extent(start=start, length=stop - start)
            """},
        """

        def bounds(n, world_size, rank):
            return sorted((0, rank * -(-n // world_size), n))[1]
        """,
    ),
]
