"""FlashInfer's host plan and what its kernel makes of it, by our reading of version 0.7.2.

The plan cuts keys into chunks and lays out partial results by its own chunk counts. The kernel counts the
chunks again, from the device's lengths.
"""

from collections.abc import Sequence
from dataclasses import dataclass

LEAST_CHUNK = 128
# Position of the chunk in the plan information, as FlashInfer returns it.
CHUNK_OFFSET = 9


def ceil_div(n: int, d: int) -> int:
    return -(-n // d)


def tile_of(packed_queries: int, head_dim: int) -> int:
    """Return how many packed queries (of a group of heads) a block of the kernel has."""
    if packed_queries > 64 and head_dim < 256:
        return 128
    return 64 if packed_queries > 16 else 16


@dataclass
class Plan:
    """A plan in the workspace.

    Attributes:
        lengths: keys of each request.
        queries: of each request.
        chunk: keys of a chunk.
        counts: chunks of each request.
        outputs: where the partial results of each request begin. [bs + 1]
        merge: where the partial results of each query begin. [queries + 1]
        information: FlashInfer's 15 numbers, which a captured launch keeps.
    """

    lengths: list[int]
    queries: list[int]
    chunk: int
    counts: list[int]
    outputs: list[int]
    merge: list[int]
    information: list[int]


def plan(
    lengths: Sequence[int],
    queries: Sequence[int],
    heads: tuple[int, int],
    *,
    num_processors: int,
    max_rows: int | None = None,
    head_dim: int = 128,
    in_graph: bool = True,
    fixed_chunk: int = -1,
    uniform_queries: int = 0,
) -> Plan:
    """Plan a forward. heads: of queries and of keys. max_rows: of the captured graph; None: of this batch."""
    group, bs = heads[0] // heads[1], len(lengths)
    rows = sum(queries) if max_rows is None else max_rows
    packed = [n * group for n in queries]
    if not in_graph:
        tile = tile_of(sum(packed) // bs, head_dim)
        num_tiles = sum(ceil_div(n, tile) for n in packed)
    elif uniform_queries:
        assert set(queries) == {uniform_queries}
        tile = tile_of(uniform_queries * group, head_dim)
        num_tiles = bs * ceil_div(uniform_queries * group, tile)
    else:
        tile = tile_of((rows - bs + 1) * group, head_dim)
        num_tiles = ceil_div(rows * group, tile) + bs - 1
    capacity = 2 * num_processors // heads[1]
    chunk, splits = fixed_chunk, False
    if fixed_chunk <= 0:
        low, high = LEAST_CHUNK, max(1, *lengths)
        while low < high:
            middle = (low + high) // 2
            blocks = sum(
                ceil_div(n, tile) * ceil_div(max(k, 1), middle) for n, k in zip(packed, lengths, strict=True)
            )
            low, high = (middle + 1, high) if blocks > capacity else (low, middle)
        chunk, splits = low, in_graph or low < max(1, *lengths)
    counts = [ceil_div(max(k, 1), chunk) for k in lengths]
    splits = splits or fixed_chunk > 0 and max(counts) > 1
    blocks = sum(ceil_div(n, tile) * count for n, count in zip(packed, counts, strict=True))
    padded = max(capacity, num_tiles) if in_graph else blocks
    assert blocks <= padded, "new batch size should not exceed padded batch size"
    outputs, merge = [0], [0]
    for n, count in zip(queries, counts, strict=True):
        outputs.append(outputs[-1] + n * count)
        merge += [merge[-1] + count * (row + 1) for row in range(n)]
    information = _information(padded, rows, tile, bs, splits, in_graph)
    return Plan([*lengths], [*queries], chunk, counts, outputs, merge, information)


def _information(padded: int, rows: int, tile: int, bs: int, splits: bool, in_graph: bool) -> list[int]:
    """Lay out the workspace."""
    end = 0

    def place(num_bytes: int, alignment: int = 16) -> int:
        nonlocal end
        start = ceil_div(end, alignment) * alignment
        end = start + num_bytes
        return start

    request, query_tile, key_tile, outputs = (place(4 * n) for n in (padded, padded, padded, bs + 1))
    chunk = place(4, 1)
    total = place(4) if in_graph else 0
    merge = place(4 * (rows + 1)) if splits else 0
    valid = place(padded) if in_graph else 0
    sums = 64 * padded * splits  # behind the partial results
    return [
        padded, rows, total, tile, request, query_tile, key_tile, merge, outputs, chunk, 0, sums, valid,
        in_graph, splits,
    ]  # fmt: skip
