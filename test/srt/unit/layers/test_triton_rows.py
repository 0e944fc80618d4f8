"""What SGLang's Triton backend hands to its kernel for requests that verify different numbers of rows."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode

from sglang_dflash.srt.layers.attention.ragged_rows import install_ragged_layouts, supports_ragged_rows
from sglang_dflash.srt.speculative.cycle.layout import VerifyLayout
from sglang_dflash.srt.speculative.cycle.ragged_graphs import CapturedRows, row_sizes, spread_rows
from sglang_dflash.srt.speculative.dflash_info import DFlashVerifyInput

BLOCK, SLOTS = 8, 6


def make_backend() -> TritonAttnBackend:
    """Make a backend with the fields that a verify forward's preparation reads, and no KV pool."""
    backend = TritonAttnBackend.__new__(TritonAttnBackend)
    offsets = torch.zeros(3, SLOTS + 1, dtype=torch.int64)
    fields = dict(
        device="cpu",
        dllm_attention=None,
        enable_deterministic=False,
        target_verify_num_tokens_per_req=BLOCK,
        qo_indptr=torch.zeros(SLOTS + 1, dtype=torch.int32),
        kv_indptr=offsets[0],
        mask_indptr=offsets[1],
        window_kv_indptr=offsets[2],
        cuda_graph_kv_indices=torch.zeros(4096, dtype=torch.int64),
        sliding_window_size=None,
        use_sliding_window_kv_pool=False,
        _verify_mask=None,
        kv_index_translator=SimpleNamespace(pack_read_stream=lambda *_, **__: None),
    )
    for name, value in fields.items():
        setattr(backend, name, value)
    assert supports_ragged_rows(backend)
    install_ragged_layouts(backend)
    return backend


def forward_of(layout: VerifyLayout, num_requests: int) -> SimpleNamespace:
    """Return the fields of a forward batch that the preparation reads. Requests beyond `rows.bs` pad it."""
    tokens = torch.zeros(layout.num_rows, dtype=torch.int64)
    lengths = torch.ones(num_requests, dtype=torch.int64)
    lengths[: layout.bs] = torch.arange(20, 20 + layout.bs)
    return SimpleNamespace(
        batch_size=num_requests,
        forward_mode=ForwardMode.TARGET_VERIFY,
        req_pool_indices=torch.arange(num_requests),
        seq_lens=lengths,
        seq_lens_sum=int(lengths.sum()),
        encoder_lens=None,
        kv_loc_plan=None,
        out_cache_loc=tokens,
        spec_info=DFlashVerifyInput(
            layout.verify_len,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            draft_token=tokens,
            positions=tokens,
            ragged_verify_layout=layout.for_graph,
            ragged=None if layout.is_rectangle else layout,
        ),
    )


def rows_in_graph(lengths: np.ndarray) -> tuple[VerifyLayout, int]:
    """Lay out drafted tokens to verify, [n], in the next larger graph; return the graph's requests too."""
    sizes = row_sizes(SLOTS, BLOCK)
    size = sizes[int(np.searchsorted(sizes, (lengths + 1).sum()))]
    slots = min(size, SLOTS)
    counts = spread_rows((lengths + 1).tolist(), size, slots, BLOCK)
    layout = CapturedRows.from_counts(counts, size, "cpu")
    lengths = np.array(counts[: len(lengths)]) - 1
    return VerifyLayout(len(lengths), int(lengths.max()) + 1, lengths, for_graph=layout), slots


def assert_reads(found: torch.Tensor, layout: VerifyLayout) -> None:
    """Compare each request's rows with the map by which the worker lays them out and reads them."""
    assert found[0] == 0 and found[-1] == layout.num_rows and (found.diff() >= 0).all()
    row = torch.arange(layout.num_rows)
    wanted = layout.to_blocks(row)
    for request, (start, stop) in enumerate(zip(found[:-1], found[1:], strict=True)):
        if request < layout.bs:
            assert row[start:stop].tolist() == wanted[request].unique().tolist(), request


LENGTHS = {
    "nothing": [0, 0, 0],
    "a whole block beside nothing": [7, 0, 0],
    "as many requests as the graph has, leftover rows": [4, 0, 2, 7, 1, 3],
    "as many requests as the graph has, nothing": [0] * SLOTS,
    "leftover rows of padding": [4, 0, 2],
    "equal lengths": [3, 3, 3],
    "one request": [2],
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_a_graph_reads_the_rows_of_its_layout(lengths):
    backend = make_backend()
    rows, slots = rows_in_graph(np.array(lengths))
    # A graph is captured with other lengths than it replays.
    counts = [rows.num_rows // slots + (i < rows.num_rows % slots) for i in range(slots)]
    layout = CapturedRows.from_counts(counts, rows.num_rows, "cpu")
    even = VerifyLayout(slots, max(counts), np.array(counts) - 1, for_graph=layout)
    backend.init_forward_metadata_out_graph(forward_of(even, slots), in_capture=True)
    captured = backend.forward_metadata
    assert_reads(captured.qo_indptr, even)
    assert captured.max_extend_len == BLOCK and captured.custom_mask is None
    backend.init_forward_metadata_out_graph(forward_of(rows, slots))
    assert_reads(captured.qo_indptr, rows)
    assert captured.kv_indptr.diff()[: len(lengths)].tolist() == [*range(20, 20 + len(lengths))]


def test_random_layouts():
    random, backend = np.random.default_rng(0), make_backend()
    for _ in range(300):
        rows, slots = rows_in_graph(random.integers(0, BLOCK, random.integers(1, SLOTS + 1)))
        forward = forward_of(rows, slots)
        backend.init_forward_metadata_out_graph(forward)
        assert_reads(backend.qo_indptr[: slots + 1], rows)


def test_without_a_graph():
    lengths, backend = np.array([4, 0, 7]), make_backend()
    layout = CapturedRows.from_counts((lengths + 1).tolist(), 14, "cpu")
    rows = VerifyLayout(3, 8, lengths, for_graph=layout)
    for name in ("attn_logits", "attn_lse"):
        setattr(backend, name, None)
    backend.init_forward_metadata(forward_of(rows, 3))
    assert_reads(backend.forward_metadata.qo_indptr, rows)
    assert backend.forward_metadata.max_extend_len == BLOCK


def test_the_neighbours_length_is_noticed():
    backend = make_backend()
    rows, slots = rows_in_graph(np.array([4, 0, 2]))
    counts = list(rows.for_graph.counts)
    forward = forward_of(rows, slots)
    backend.init_forward_metadata_out_graph(forward)
    assert_reads(backend.qo_indptr[: slots + 1], rows)
    forward.spec_info.ragged_verify_layout = CapturedRows.from_counts(
        [counts[1], counts[0], *counts[2:]], rows.num_rows, "cpu"
    )
    backend.init_forward_metadata_out_graph(forward)
    with pytest.raises(AssertionError):
        assert_reads(backend.qo_indptr[: slots + 1], rows)
