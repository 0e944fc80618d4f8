"""CUDA graphs of the target per number of rows.

SGLang's graph runner can replay forwards of requests with different numbers of rows ("ragged verify", for its
DSPARK). A graph has T rows and up to S requests, which share the rows as a layout says. A batch takes the
graph with the least sufficient T. Further rows go to requests that pad the batch, or to longer lengths.
"""

import functools
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

from sglang_dflash.srt.layers.attention.ragged_rows import install_ragged_layouts, supports_ragged_rows
from sglang_dflash.srt.reaches import ROWS, missing_name
from sglang_dflash.srt.speculative.cycle.host import on_device
from sglang_dflash.srt.speculative.cycle.layout import VerifyLayout, whole_blocks

logger = logging.getLogger(__name__)


def row_sizes(max_requests: int, block_size: int) -> list[int]:
    """List the T to capture: quarters of powers of two, `max_requests`, and all their blocks."""
    max_rows, sizes = max_requests * block_size, [1]
    while sizes[-1] < max_rows:
        sizes.append(sizes[-1] + (1 << max(0, sizes[-1].bit_length() - 3)))
    return sorted({*sizes[:-1], max_requests, max_rows})


def spread_rows(counts: Sequence[int], num_rows: int, num_slots: int, block_size: int) -> list[int]:
    """Give all rows of a graph to its `num_slots` requests, at most a block to each.

    `counts` are of the first requests. Further rows go to those that pad the batch, then to the longest: in a
    graph of 11 rows for 3 requests, blocks of 4, counts = [1, 3] become [3, 4, 4].
    """
    n, spread = len(counts), [*counts, *[0] * (num_slots - len(counts))]
    left = num_rows - sum(counts)
    for i in [*range(n, num_slots), *sorted(range(n), key=lambda i: -counts[i])]:
        more = min(left, block_size - spread[i])
        spread[i] += more
        left -= more
    assert left == 0, f"{left} of {num_rows} rows have no request"
    return spread


class CapturedRows(RaggedVerifyLayout, frozen=True):  # type: ignore[call-arg]
    """The rows of all S requests of a graph, made on the host, where `counts` are kept."""

    counts: tuple[int, ...] = ()

    @classmethod
    def from_counts(cls, counts: Sequence[int], num_rows: int, device: Any) -> "CapturedRows":
        """Copy `counts`, rows of each request, to the device without waiting."""
        ends = np.cumsum(counts)
        numbers = on_device([*counts, 0, *ends.tolist()], torch.int32, device)
        lengths, bounds = numbers[: len(counts)], numbers[len(counts) :]
        parts: Any = dict(verify_lens=lengths, extend_start_loc=bounds[:-1], qo_indptr_device=bounds)
        return cls(graph_num_tokens=num_rows, counts=tuple(counts), **parts)

    def padded_to_bucket(self, *, padded_bs: int, cap: int | None = None) -> "CapturedRows":
        """Return itself: it has the requests that pad a batch."""
        return self


@functools.cache
def _row_graph_runner() -> type:
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

    class RowGraphRunner(DecodeCudaGraphRunner):
        """SGLang's runner with a size per number of rows instead of per batch size.

        SGLang turns its graphs of rows on for DSPARK alone, with sizes a block apart.
        """

        def __init__(self, runner: Any, attn_backend: Any, sizes: list[int], max_requests: int):
            self._sizes, self.max_requests = sizes, max_requests
            super().__init__(runner, attn_backend=attn_backend, speculative_num_draft_tokens=1)

        # SGLang's choice is ignored.
        ragged_verify_mode = property(lambda self: True, lambda self, _: None)

        def _build_ragged_verify_token_buckets(self) -> list[int]:
            self.capture_bs = self._sizes
            return self.capture_bs

        def _capture_ragged_verify_layout(self, num_tokens: int) -> CapturedRows:
            slots = self._ragged_capture_slots(num_tokens)
            counts = [num_tokens // slots + (i < num_tokens % slots) for i in range(slots)]
            return CapturedRows.from_counts(counts, num_tokens, self.device)

        def _stage_ragged_verify_layout(self, ragged_layout: Any, graph_size_key: int) -> None:
            """Do nothing: graphs read what the backend prepares, not the layout."""

    return RowGraphRunner


def reason_for_one_width(runner: Any, attention: Any) -> str | None:
    """Return why a CUDA target cannot verify different numbers of tokens, or None."""
    graphs, name = runner.decode_cuda_graph_runner, type(attention).__name__
    # FA3 and FA4, TensorRT-LLM's kernels but for its older ones ("xqa"), and Triton.
    is_xqa = getattr(attention, "is_xqa_impl", False)
    takes_counts = name in ("FlashAttentionBackend", "TRTLLMHAAttnBackend") and not is_xqa
    if not takes_counts and not supports_ragged_rows(attention):
        return f"{name} verifies one width"
    if getattr(attention, "has_local_attention", False):
        return "layers with chunks have page tables of their own"
    if getattr(graphs, "disable_padding", True):
        return "there are no CUDA graphs that pad batches"
    if graphs.require_gathered_buffer or graphs.enable_two_batch_overlap:
        return "data-parallel attention and two-batch overlap take blocks of one width"
    return missing_name(ROWS)


class RowBackends:
    """A backend and graphs for whole blocks, and a pair for all other rows.

    Args:
        runner: the target's, which has the pair for whole blocks.
        block_size: slots of a block, B.
        ragged: the backend and the graph runner for other rows.
    """

    def __init__(self, runner: Any, block_size: int, ragged: tuple[Any, Any]):
        self._runner, self._block_size, self._ragged = runner, block_size, ragged
        self._whole = runner.attn_backend, runner.decode_cuda_graph_runner
        self.sizes, self._is_whole = ragged[1].capture_bs, True
        self._latest = b"", whole_blocks(0, block_size)

    @classmethod
    def capture(cls, runner: Any, block_size: int) -> "RowBackends":
        """Make another backend of the target's kind, and capture its graphs."""
        backend = runner._get_attention_backend(init_new_workspace=False)
        # Of a hybrid backend, both halves must say so.
        for half in getattr(backend, "attn_backend_list", None) or [backend]:
            half.supports_ragged_verify_graph = True
            if supports_ragged_rows(half):
                install_ragged_layouts(half)
        most_requests = max(runner.decode_cuda_graph_runner.capture_bs)
        sizes = row_sizes(most_requests, block_size)
        graphs = _row_graph_runner()(runner, backend, sizes, most_requests)
        logger.info("DFLASH: made graphs of %d to %d rows.", graphs.capture_bs[0], graphs.capture_bs[-1])
        return cls(runner, block_size, (backend, graphs))

    def select(self, lengths: np.ndarray, needs_rectangle: bool = False) -> VerifyLayout:
        """Have the target verify `lengths` drafted tokens, [n]. Equal ones have one layout object."""
        is_whole = needs_rectangle or bool((lengths == self._block_size - 1).all())
        if is_whole != self._is_whole:  # else the runner keeps its own: SGLang may have captured it anew
            pair = self._whole if is_whole else self._ragged
            self._runner.attn_backend, self._runner.decode_cuda_graph_runner = pair
            self._is_whole = is_whole
        if is_whole:
            return whole_blocks(len(lengths), self._block_size)
        key = lengths.tobytes()
        if self._latest[0] != key:
            self._latest = key, self._lay_out(lengths)
        return self._latest[1]

    def _lay_out(self, lengths: np.ndarray) -> VerifyLayout:
        graphs, counts = self._ragged[1], (lengths + 1).tolist()
        num_rows = sum(counts)
        if len(counts) <= graphs.max_requests:
            num_rows = self.sizes[int(np.searchsorted(self.sizes, num_rows))]
            slots = graphs._ragged_capture_slots(num_rows)
            counts = spread_rows(counts, num_rows, slots, self._block_size)
            lengths = np.array(counts[: len(lengths)]) - 1
        for_graph = CapturedRows.from_counts(counts, num_rows, graphs.device)
        shape: Any = dict(bs=len(lengths), verify_len=int(lengths.max()) + 1, num_draft_tokens=lengths)
        return VerifyLayout(**shape, device=graphs.device, for_graph=for_graph)


def captured_sizes(runner: Any) -> list[int]:
    """Return the batch sizes of the runner's CUDA graphs, ascending, if any."""
    return sorted(getattr(runner.decode_cuda_graph_runner, "capture_bs", None) or [])


class AnyRows:
    """A backend without graphs, for any rows, whose `counts` layers may read."""

    def __init__(self, reads_counts: bool = False):
        self._reads_counts = reads_counts

    def select(self, lengths: np.ndarray, needs_rectangle: bool = False) -> VerifyLayout:
        """Return the layout of drafted tokens [n]; a rectangle has the largest number for all."""
        verify_len = int(lengths.max()) + 1
        if needs_rectangle:
            lengths = np.full_like(lengths, verify_len - 1)
        for_graph = None
        if self._reads_counts and not (lengths == verify_len - 1).all():
            counts = (lengths + 1).tolist()
            for_graph = CapturedRows.from_counts(counts, sum(counts), "cpu")
        return VerifyLayout(len(lengths), verify_len, lengths, for_graph=for_graph)
