"""Acceptors of one rank, for tests without a server."""

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from support.sampling_parameters import VOCABULARY

from sglang_dflash.kernels.ops.speculative.accept import NO_LIMIT, AcceptedBlocks
from sglang_dflash.srt.speculative.acceptance.acceptor import Acceptor

REQUEST_ROWS = 99


class OneRank:
    """A synchronisation of one rank, which notes what it would have sent."""

    def __init__(self):
        self.sent = []

    def enabled(self, site):
        return False

    def sync(self, site, values):
        self.sent.append((site, values))
        return values


def make_acceptor(
    sampler: Any = None, vocab_size: int = VOCABULARY, sync: Any = None, rule: Any = None, **options: Any
) -> Acceptor:
    """Make an acceptor, of one rank unless `sync` is given, which draws if it has a rule.

    options: others of its arguments.
    """
    lengths, tokens = (torch.zeros(REQUEST_ROWS, dtype=torch.int64) for _ in range(2))
    defaults = {
        "simulation": None,
        "metrics": None,
        "longest": NO_LIMIT,
        "relay": SimpleNamespace(new_seq_lens=lengths, output_tokens=tokens),
    }
    return Acceptor(sampler, vocab_size, sync or OneRank(), rule, **defaults | options)


def accept(
    acceptor: Acceptor, batch: Any, cycle: Any, block: Any, logits: torch.Tensor, *caps
) -> AcceptedBlocks:
    """Accept blocks with these logits, [T, vocab]."""
    if not hasattr(batch, "req_pool_indices"):
        batch.req_pool_indices = torch.arange(len(block.tokens))
    return acceptor.accept(batch, cycle, block, LogitsProcessorOutput(next_token_logits=logits), *caps)
