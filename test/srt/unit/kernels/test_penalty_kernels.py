"""Penalty kernels against their PyTorch twins, on a GPU or interpreted."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from support.triton_interpreter import DEVICE, against_twin

from sglang_dflash.kernels.ops.speculative.penalties import count_tokens_triton, penalize_block_triton
from sglang_dflash.srt.speculative.acceptance.constraints import (
    Terms,
    count_tokens_torch,
    penalize_block_torch,
)
from sglang_dflash.srt.speculative.cycle.layout import VerifyLayout

ROWS, VOCABULARY = 7, 1030  # two tiles, the second nearly empty


def random_counts(rng: torch.Generator) -> torch.Tensor:
    counts = torch.randint(4, (ROWS, VOCABULARY), generator=rng, dtype=torch.int32)
    return counts * torch.randint(2, counts.shape, generator=rng, dtype=torch.int32)


@against_twin
@given(
    st.integers(0, 2**31),
    st.integers(1, 4),
    st.integers(1, 9),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
)
def test_penalize_block_equals_its_twin(seed, bs, width, has_stops, dtype, is_ragged):
    rng = torch.Generator().manual_seed(seed)
    vocabulary = torch.tensor([0, 5, 1023, 1024, VOCABULARY - 1])  # often equal, and at the ends of tiles
    block = vocabulary[torch.randint(5, (bs, width), generator=rng)]
    logits = 4 * torch.randn(bs * width, VOCABULARY + 2, generator=rng).to(dtype)
    logits[logits > 8] = -torch.inf
    prompt_lens = torch.randint(1, 9, (bs,), generator=rng)
    stops = torch.zeros(bs, VOCABULARY)
    stops[:, [3, 1024]] = -torch.inf
    penalties = torch.randn(3, bs, 1, generator=rng)
    penalties[2] = 0.5 + torch.rand(bs, 1, generator=rng)
    columns = *penalties, torch.randint(12, (bs, 1), generator=rng), prompt_lens[:, None]
    terms = Terms(*(column.to(DEVICE) for column in columns), stops.to(DEVICE) if has_stops else None)
    requests = torch.randperm(ROWS, generator=rng)[:bs]
    lengths = prompt_lens + torch.randint(9, (bs,), generator=rng)
    arguments = *(x.to(DEVICE) for x in (block, random_counts(rng), requests, lengths)), terms
    if is_ragged:
        rows = VerifyLayout(bs, width, torch.randint(width, (bs,), generator=rng).numpy(), DEVICE)
        arguments, logits = (*arguments, *rows.bounds), rows.pack(logits.to(DEVICE).view(bs, width, -1))
    # Rows need not be contiguous.
    got, want = (logits.to(DEVICE, copy=True)[:, :VOCABULARY] for _ in range(2))
    penalize_block_triton(got, *arguments)
    penalize_block_torch(want, *arguments)
    torch.testing.assert_close(got, want, rtol=1e-6 if dtype == torch.float32 else 8e-3, atol=1e-6)


@against_twin
@given(st.integers(0, 2**31), st.integers(0, 5), st.integers(1, 9))
def test_count_tokens_equals_its_twin(seed, bs, width):
    rng = torch.Generator().manual_seed(seed)
    counts, requests = random_counts(rng).to(DEVICE), torch.randperm(ROWS, generator=rng)[:bs].to(DEVICE)
    tokens = 1020 + torch.randint(4, (bs, width), generator=rng).to(DEVICE)
    accept_len = torch.randint(width, (bs,), generator=rng, dtype=torch.int32).to(DEVICE)
    want = counts.clone()
    count_tokens_triton(counts, requests, tokens, accept_len)
    count_tokens_torch(want, requests, tokens, accept_len)
    assert torch.equal(counts, want)
