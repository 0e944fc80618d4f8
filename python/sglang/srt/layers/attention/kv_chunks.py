"""Split of keys into chunks that stays valid while a length is known only within bounds.

FlashInfer's host plan cuts each request's keys into chunks of one size, and lays out partial results by the
number of chunks that it counted. The kernel counts the chunks again, from the device's length. If the two
counts differ, rows are merged from the partial results of other rows. So a plan may be made with a length
that is not exact only if every possible length has the same number of chunks.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

# FlashInfer's own search starts here, with pages of one token.
LEAST_SEARCHED_CHUNK = 128
# Smaller chunks would cost more than a wait for the exact lengths.
_LEAST_CHUNK = 64


@dataclass(frozen=True, slots=True)
class ChunkChoice:
    """Input of a plan whose chunk counts hold for every length within the bounds."""

    lengths: Sequence[int]  # keys of each request, to plan with
    fixed_chunk: int | None  # chunk to request. None: FlashInfer searches, and finds `chunk`
    chunk: int  # keys of a chunk


def num_chunks(length: int, chunk: int) -> int:
    """Return the number of chunks of `length` keys; FlashInfer gives an empty request one."""
    return -(-max(length, 1) // chunk)


def holds(chunk: int, lower_bounds: Sequence[int], upper_bounds: Sequence[int]) -> bool:
    """Return whether every length within the bounds has the same number of chunks."""
    return all(
        -(-low // chunk) == -(-high // chunk) for low, high in zip(lower_bounds, upper_bounds, strict=True)
    )


def searched_chunk(lengths: Sequence[int], tiles: Sequence[int], capacity: int) -> int:
    """Return the chunk that FlashInfer's search finds: the least one whose blocks all fit.

    Args:
        lengths: keys of each request.
        tiles: tiles of queries of each request. Each tile and chunk is one block of the kernel.
        capacity: blocks of the kernel's grid.
    """
    longest = max(lengths)
    if longest <= LEAST_SEARCHED_CHUNK:
        return LEAST_SEARCHED_CHUNK
    sizes = range(LEAST_SEARCHED_CHUNK, longest)
    return sizes.start + bisect_left(sizes, True, key=lambda size: _fits(size, lengths, tiles, capacity))


def choose_chunk(
    lower_bounds: Sequence[int], upper_bounds: Sequence[int], tiles: Sequence[int], capacity: int
) -> ChunkChoice | None:
    """Choose a chunk whose counts are the same for every length within the bounds.

    Two requests have 500 to 520 and 250 to 260 keys, one tile each, and the grid has 8 blocks. FlashInfer
    would find chunks of 128: 500 keys are 4 of them, but 520 are 5. So 130 is chosen, the next larger chunk
    that holds: 500 and 520 keys are both 4 chunks, 250 and 260 keys both 2.

    Args:
        lower_bounds: of each request's keys, at least 1.
        upper_bounds: of each request's keys.
        tiles: tiles of queries of each request.
        capacity: blocks of the kernel's grid.

    Returns:
        The choice, as close to FlashInfer's own as possible. None: no chunk was found.
    """
    searched = searched_chunk(upper_bounds, tiles, capacity)
    if holds(searched, lower_bounds, upper_bounds):
        return ChunkChoice(upper_bounds, None, searched)
    longest = max(upper_bounds)
    larger = _next_larger(searched, lower_bounds, upper_bounds)
    if larger < longest:
        return ChunkChoice(upper_bounds, larger, larger)
    # One chunk per request. A fixed chunk would then lay out the workspace without merging, other than the
    # captured graph. FlashInfer's search finds such a chunk if every request is planned with the longest.
    uniform = [longest] * len(upper_bounds)
    found = searched_chunk(uniform, tiles, capacity)
    if found >= longest:
        return ChunkChoice(uniform, None, found)
    smaller = _next_smaller(searched, lower_bounds, upper_bounds)
    if smaller is not None and _fits(smaller, upper_bounds, tiles, capacity):
        return ChunkChoice(upper_bounds, smaller, smaller)
    return None


def _fits(chunk: int, lengths: Sequence[int], tiles: Sequence[int], capacity: int) -> bool:
    return sum([n * -(-length // chunk) for n, length in zip(tiles, lengths, strict=True)]) <= capacity


def _next_larger(chunk: int, lower_bounds: Sequence[int], upper_bounds: Sequence[int]) -> int:
    """Return the least chunk from `chunk` on that holds.

    There is one: at the longest length every request is one chunk.
    """
    previous = 0
    while previous != chunk:
        previous = chunk
        for low, high in zip(lower_bounds, upper_bounds, strict=True):
            while -(-low // chunk) != -(-high // chunk):
                # `high` has one chunk more than it may: the next chunk gives it one less.
                count = -(-high // chunk) - 1
                chunk = -(-high // count)
    return chunk


def _next_smaller(chunk: int, lower_bounds: Sequence[int], upper_bounds: Sequence[int]) -> int | None:
    """Return the largest chunk below `chunk` that holds. It splits some request.

    None: there is none.
    """
    previous = 0
    while previous != chunk and chunk >= _LEAST_CHUNK:
        previous = chunk
        for low, high in zip(lower_bounds, upper_bounds, strict=True):
            while chunk >= _LEAST_CHUNK and -(-low // chunk) != -(-high // chunk):
                # `low` has one chunk less than it may: the next smaller chunk gives it one more.
                chunk = (low - 1) // -(-low // chunk)
    return chunk if chunk >= _LEAST_CHUNK else None
