"""The roofline of a cycle: formulas, and their results in ROOFLINE.md."""

import roofline
import torch
from gpu.shapes import QWEN3_8B
from serving import ROOT

from sglang_dflash.kernels.ops.speculative.accept import accept_blocks_torch
from sglang_dflash.kernels.ops.speculative.block import prepare_block_torch


def test_roofline_page_shows_what_the_program_computes():
    page = (ROOT / "benchmark" / "ROOFLINE.md").read_text()
    for title, table in roofline.tables().items():
        assert f"## {title}\n" in page
        assert table in page, f"{title} is out of date: run python benchmark/roofline.py"


def test_roofline_counts_the_small_kernels_tensors():
    """Compare the formulas with the tensors of the kernels' PyTorch twins."""

    def total(tensors):
        return sum(tensor.nbytes for tensor in tensors)

    bs, block_size = 3, QWEN3_8B.block_size
    per_request = [torch.arange(bs) for _ in range(3)]
    table = torch.zeros(bs, 64, dtype=torch.int32)
    outputs = prepare_block_torch(*per_request, table, 5, block_size)
    read = total(per_request) + bs * block_size * table.itemsize
    assert roofline.prepare_block_bytes(QWEN3_8B, bs) == read + total(outputs)

    tokens = torch.zeros(bs, block_size, dtype=torch.int64)
    max_logits = torch.zeros(bs, block_size)
    # The reported tokens are a copy with a token outside the vocabulary for broken logits, or on a CPU the
    # output tokens themselves.
    *outputs, _, reported = accept_blocks_torch(None, tokens, max_logits, per_request[0], 7, block=tokens)
    read = total([tokens[:, 1:], tokens, max_logits, per_request[0]])
    assert roofline.accept_blocks_bytes(QWEN3_8B, bs) == read + total([*outputs, reported])
