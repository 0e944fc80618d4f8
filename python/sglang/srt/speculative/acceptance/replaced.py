"""Ranks of the tokens that replaced rejected ones, among the draft's candidates.

A tree of drafts verifies several candidates of a slot. What it would add depends on where the target's token
stands among the candidates of the first rejected slot. This counts these ranks on a server's own traffic.

The rejected token has rank 1. Others follow by the draft's logits, before DFlash2's selector. Only the first
rejected slot of a request and cycle counts: the draft made those after it for another text.
"""

from collections import Counter
from typing import Any

import torch

from sglang_dflash.srt.layers.attention.torch_native_spec import TorchNativeSpecAttnBackend, full_attention
from sglang_dflash.srt.layers.replacement_ranks import REPLACEMENT_RANKS, bucket, replacement_ranks
from sglang_dflash.srt.observability.dflash_metrics import DFlashMetrics
from sglang_dflash.srt.speculative.cycle.observer import CycleObserver
from sglang_dflash.srt.speculative.drafters.base import ShowsCandidates
from sglang_dflash.srt.speculative.scale_out.dp_attention import SubgroupDrafter

# Drafting cycles per counted one: a count reads the LM head once more.
_EVERY = 16


class ReplacedTokens(CycleObserver):
    """Counts ranks in one of `every` cycles that drafted.

    Args:
        drafter: the innermost one.
        copies: the one that copies. None: nothing is copied.
        metrics: counts too.
        every: cycles per counted one.
    """

    def __init__(self, drafter: ShowsCandidates, copies: Any, metrics: DFlashMetrics, every: int = _EVERY):
        self._drafter, self._copies, self._metrics, self._every = drafter, copies, metrics, every
        self._tokens: torch.Tensor | None = None
        self._num_cycles = 0
        self._counts: Counter[str] = Counter()

    @classmethod
    def of_server(
        cls, drafter: Any, copies: Any, metrics: DFlashMetrics, target_runner: Any
    ) -> "ReplacedTokens | None":
        """Make one if it can be served. drafter: the outermost one.

        None on a GPU, where nobody has measured the cost, and with DP attention, whose ranks draft apart.
        """
        inner = drafter if copies is None else copies.inner
        backend = full_attention(target_runner.attn_backend)
        if not isinstance(backend, TorchNativeSpecAttnBackend) or isinstance(inner, SubgroupDrafter):
            return None
        return cls(inner, copies, metrics)

    def report(self) -> dict[str, int]:
        """Return the counts by bucket, for /server_info."""
        return {name: self._counts[name] for name in REPLACEMENT_RANKS} if self._counts else {}

    def on_drafted(self, batch: Any, cycle: Any, block: Any) -> None:
        """Keep the drafted tokens."""
        self._tokens = block.tokens

    def on_committed(self, batch: Any, cycle: Any, aux_hidden: Any, accepted: Any) -> None:
        """Count the first rejected token of each request that the draft proposed for."""
        rows, self._drafter.latest_rows = self._drafter.latest_rows, None
        if rows is None:
            return
        self._num_cycles += 1
        if self._num_cycles % self._every:
            return
        assert self._tokens is not None
        requests = torch.arange(cycle.bs) if cycle.drafted is None else cycle.drafted
        accept_len = accepted.accept_len.long()[requests]
        limits = cycle.rows.limits
        verified = cycle.verify_len - 1 if limits is None else limits[requests]
        drafted = self._tokens[requests, (accept_len + 1).clamp(max=self._tokens.shape[1] - 1)]
        emitted = accepted.bonus[requests]
        # A cap may end a block before a token that is right.
        is_replaced = (accept_len < verified) & (drafted != emitted)
        lengths = None if self._copies is None else self._copies.proposals.lengths
        if lengths is not None:
            is_replaced &= lengths[requests] <= 0
        [chosen] = is_replaced.nonzero(as_tuple=True)
        if not chosen.numel():
            return
        logits, ids = self._drafter.logits_of(rows[chosen, accept_len[chosen]])
        for rank in replacement_ranks(logits, ids, drafted[chosen], emitted[chosen]).tolist():
            self._counts[bucket(rank)] += 1
            self._metrics.count_replacement(bucket(rank))
