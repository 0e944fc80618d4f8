"""Blocks whose verified slots alone went through the draft's head, compared with whole blocks."""

from types import SimpleNamespace

import pytest
import torch
from support.sampling_parameters import sampling_info

from sglang_dflash.srt.layers import vocab_argmax
from sglang_dflash.srt.speculative.cycle.block import DraftBlock
from sglang_dflash.srt.speculative.drafters import sampling

_DRAWN = sampling_info({"temperature": 0.7}, {"top_k": 3}, {"temperature": 1.6, "top_p": 0.9})
INFO = pytest.mark.parametrize("info", [None, _DRAWN], ids=["greedy", "drawn"])  # of three requests


def count_head_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the rows of each product with the head from now on.

    Draws of three requests take the same random number for a slot each time.
    """
    rows, multiply, uniforms = [], vocab_argmax._local_logits, torch.rand(3, 16)

    def counted(hidden, *arguments):
        rows.append(len(hidden))
        return multiply(hidden, *arguments)

    def rand(*shape, device=None):
        bs, slots = shape[0] if len(shape) == 1 else shape
        return uniforms[:bs, :slots]

    monkeypatch.setattr(vocab_argmax, "_local_logits", counted)
    monkeypatch.setattr(sampling, "torch", SimpleNamespace(**vars(torch) | {"rand": rand}))
    return rows


def compare(whole: DraftBlock, found: DraftBlock, lengths: list[int]) -> None:
    """Assert that blocks have equal tokens and distributions in the verified slots of each request."""
    assert found.tokens.shape[1] <= max(lengths) + 1
    for request, n in enumerate(lengths):
        assert found.tokens[request, : n + 1].tolist() == whole.tokens[request, : n + 1].tolist()
        if found.probs is not None:
            assert torch.equal(found.probs.ids[request, :n], whole.probs.ids[request, :n])
            torch.testing.assert_close(found.probs.probs[request, :n], whole.probs.probs[request, :n])
    if found.probs is not None:  # each token was drawn from its own distribution, verified or not
        assert (found.probs.prob_of(found.tokens[:, 1:]) > 0).all()
