"""Prometheus counters of drafted tokens, beside SGLang's own (`--enable-metrics`)."""

import logging
from collections.abc import Sequence
from typing import Any

from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.runtime_context import get_disagg, get_observability, get_parallel, get_schedule, get_serving

logger = logging.getLogger(__name__)

# Reasons for which a block is not drafted or verified as the server was told to: the `reason` label, and the
# text of the log line.
FALLBACKS = {
    "sampling_seed": "a request has a sampling seed, so its batch drafts by argmax instead of sampling",
    "speculative_max_tokens": "a request has a cap or a logit processor, so its batch drafts by argmax "
    "instead of sampling",
}

_OWN_LABELS = {"position", "reason", "source", "weight_version"}
# Drafted blocks after which the accept length is judged, once, and below what it is low.
JUDGED_BLOCKS, LOW_ACCEPT_LENGTH = 1000, 1.15


class DFlashMetrics:
    """Counters of drafted and verified blocks, from numbers that SGLang has on the host.

    Nothing here waits for the device. A block is one request's share of a cycle. Under overlap scheduling a
    request's end is known one cycle late. The block that is in flight then is counted here, as in SGLang's
    accept-length gauge and log line, but not in the request's `meta_info`.
    """

    def __init__(self, drafted_per_block: int, labels: dict[str, Any] | None):
        """Create the counters.

        Args:
            drafted_per_block: Drafted tokens of a whole block, without the anchor.
            labels: Labels of every counter; None counts nothing.
        """
        self._logged: set[str] = set()
        self._seen_blocks = self._seen_accepted = 0  # until they are judged
        self._enabled = labels is not None
        if labels is None:
            return
        # When imported, prometheus_client reads a variable that SGLang sets at start-up: whether processes
        # share values.
        from prometheus_client import REGISTRY, Counter, Histogram

        def counter(name: str, documentation: str, label: str = "") -> Counter:
            names = [*labels, label] if label else [*labels]
            created = Counter(f"sglang:spec_{name}_total", documentation, names, registry=REGISTRY)
            return created if label else created.labels(**labels)

        self._labels = labels
        self._drafts = counter("drafts", "Drafted blocks verified.")
        self._drafted = counter("drafted_tokens", "Drafted tokens verified; anchors not counted.")
        self._accepted = counter("accepted_tokens", "Drafted tokens accepted; bonus tokens not counted.")
        version = "weight_version"
        self._blocks_of = counter("version_drafts", "Drafted blocks verified, by weight version.", version)
        self._accepted_of = counter(
            "version_accepted_tokens", "Drafted tokens accepted, by weight version.", version
        )
        by_position = counter(
            "accepted_tokens_per_position",
            "Blocks whose drafted token at this position, counted from 1, was accepted.",
            "position",
        )
        self._by_position = [by_position.labels(**labels, position=k + 1) for k in range(drafted_per_block)]
        self._width = Histogram(
            "sglang:spec_verify_width",
            documentation="Most slots of a request verified by a cycle, the anchor counted.",
            labelnames=list(labels),
            buckets=range(1, drafted_per_block + 2),
            registry=REGISTRY,
        ).labels(**labels)
        self._blocks = counter("source_blocks", "Blocks verified, by what proposed their tokens.", "source")
        self._proposed = counter("source_proposed_tokens", "Proposed tokens verified, by source.", "source")
        self._accepted_by_source = counter(
            "source_accepted_tokens", "Proposed tokens accepted, by source.", "source"
        )
        self._undrafted = counter(
            "cycles_without_draft", "Cycles without a draft forward, as all requests copied."
        )
        self._recorded = counter("recorded_requests", "Requests written to the record.")
        self._recorded_tokens = counter("recorded_tokens", "Tokens written to the record, prompts included.")
        self._unrecorded = counter("record_dropped", "Requests that could not be written to the record.")
        fallbacks = counter("fallbacks", "Blocks that took another path than requested.", "reason")
        self._fallbacks = {reason: fallbacks.labels(**labels, reason=reason) for reason in FALLBACKS}

    @classmethod
    def from_server(cls, drafted_per_block: int) -> "DFlashMetrics":
        """Create what the server's arguments request, on the ranks that report metrics."""
        observability, parallel = get_observability(), get_parallel()
        reports = (parallel.attn_tp_rank, parallel.attn_cp_rank) == (0, 0)
        if not (
            observability.enable_metrics and (reports or observability.enable_metrics_for_all_schedulers)
        ):
            return cls(drafted_per_block, None)
        # The labels of the scheduler's own metrics; a test compares them.
        labels = {
            "model_name": get_serving().served_model_name,
            "engine_type": DisaggregationMode.to_engine_type(get_disagg().disaggregation_mode),
            "tp_rank": parallel.tp_rank,
            "pp_rank": parallel.pp_rank,
            "moe_ep_rank": parallel.moe_ep_rank,
        }
        if get_schedule().enable_priority_scheduling:
            labels["priority"] = ""
        if parallel.dp_rank is not None:
            labels["dp_rank"] = parallel.dp_rank
        extra = dict(observability.extra_metric_labels or {})
        if taken := sorted(extra.keys() & _OWN_LABELS):
            logger.warning(
                "DFLASH's metrics have no --extra-metric-labels %s: these labels are theirs.", taken
            )
        added = {name: value for name, value in extra.items() if name not in _OWN_LABELS}
        return cls(drafted_per_block, {**labels, **added})

    def count_verified(
        self, accept_lens: Sequence[int], drafted: Sequence[int], weight_version: str = "default"
    ) -> None:
        """Count a verified batch.

        Args:
            accept_lens: accepted drafted tokens of each block.
            drafted: drafted tokens of each block that could be accepted.
            weight_version: SGLang's, of the latest weight update that named one.
        """
        if self._seen_blocks < JUDGED_BLOCKS:
            self._judge(accept_lens, drafted)
        if not self._enabled:
            return
        self._drafts.inc(len(accept_lens))
        self._drafted.inc(sum(drafted))
        self._accepted.inc(sum(accept_lens))
        by_version = {**self._labels, "weight_version": weight_version}
        self._blocks_of.labels(**by_version).inc(len(accept_lens))
        self._accepted_of.labels(**by_version).inc(sum(accept_lens))
        for before, at_position in enumerate(self._by_position):
            at_position.inc(sum(accept_len > before for accept_len in accept_lens))

    def _judge(self, accept_lens: Sequence[int], drafted: Sequence[int]) -> None:
        """Log a warning if hardly a token of the first drafted blocks was accepted."""
        accepted = [kept for kept, offered in zip(accept_lens, drafted, strict=True) if offered > 0]
        self._seen_blocks += len(accepted)
        self._seen_accepted += sum(accepted)
        if self._seen_blocks < JUDGED_BLOCKS:
            return
        length = 1 + self._seen_accepted / self._seen_blocks
        if length < LOW_ACCEPT_LENGTH:
            logger.warning(
                "DFLASH: the accept length of the first %d drafted blocks is %.2f, so drafting does not pay. "
                "`python -m sglang_dflash.doctor --model-path TARGET --draft DRAFT --measure` looks for the "
                "cause.",
                self._seen_blocks,
                length,
            )

    def count_width(self, width: int) -> None:
        """Count a cycle that verifies up to `width` slots a request, if that is chosen per cycle."""
        if self._enabled:
            self._width.observe(width)

    def count_source(self, source: str, blocks: int, proposed: int, accepted: int) -> None:
        """Count a cycle's blocks from one source, `draft` or `copy`, if there are two."""
        if not self._enabled:
            return
        counts = ((self._blocks, blocks), (self._proposed, proposed), (self._accepted_by_source, accepted))
        for counter, count in counts:
            counter.labels(**self._labels, source=source).inc(count)

    def count_undrafted(self, cycles: int) -> None:
        if self._enabled:
            self._undrafted.inc(cycles)

    def count_recorded(self, tokens: int) -> None:
        """Count a request that was written to the record with so many tokens, or with 0 dropped."""
        if self._enabled:
            (self._recorded if tokens else self._unrecorded).inc()
            self._recorded_tokens.inc(tokens)

    def count_fallback(self, reason: str, blocks: int) -> None:
        """Count blocks that fell back, and log each reason of FALLBACKS once."""
        if reason not in self._logged:
            logger.warning("DFLASH falls back (%s): %s. Logged once.", reason, FALLBACKS[reason])
            self._logged.add(reason)
        if self._enabled:
            self._fallbacks[reason].inc(blocks)
