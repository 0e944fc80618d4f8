"""What becomes of drafted tokens, as Prometheus counters beside SGLang's own (`--enable-metrics`)."""

import logging
from collections.abc import Sequence
from typing import Any

from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.runtime_context import get_disagg, get_observability, get_parallel, get_schedule, get_serving

logger = logging.getLogger(__name__)

# Why a block was not drafted or verified the way the server was asked to: the `reason` label, and what to
# log.
FALLBACKS = {
    "sampling_seed": "a request has a sampling seed, so its batch drafts by argmax, not by drawing",
}


class DFlashMetrics:
    """Counts from numbers that SGLang has on the host anyway; nothing here waits for the device.

    A block is one request's share of a cycle. Under overlap scheduling a request's end is known one cycle
    late; the block it had under way then is counted here, as in SGLang's accept-length gauge and log line,
    but is not in the request's `meta_info`.

    drafted_per_block: drafted tokens of a whole block, the anchor not counted.
    labels: of every counter; None counts nothing. registry: a prometheus_client registry; None is the default
    one."""

    def __init__(self, drafted_per_block: int, labels: dict[str, Any] | None, registry: Any = None):
        self._logged: set[str] = set()
        self._enabled = labels is not None
        if not self._enabled:
            return
        # Decides at its import whether processes share their values, by a variable that SGLang sets at
        # start-up.
        from prometheus_client import REGISTRY, Counter, Histogram

        def counter(name: str, documentation: str, *own_label: str) -> Counter:
            return Counter(name, documentation, [*labels, *own_label], registry=registry or REGISTRY)

        self._drafts = counter("sglang:spec_drafts_total", "Drafted blocks verified.").labels(**labels)
        self._drafted = counter(
            "sglang:spec_drafted_tokens_total", "Drafted tokens verified; anchors not counted."
        ).labels(**labels)
        self._accepted = counter(
            "sglang:spec_accepted_tokens_total", "Drafted tokens accepted; bonus tokens not counted."
        ).labels(**labels)
        by_position = counter(
            "sglang:spec_accepted_tokens_per_position_total",
            "Blocks whose drafted token at this position, counted from 1, was accepted.",
            "position",
        )
        self._by_position = [by_position.labels(**labels, position=k + 1) for k in range(drafted_per_block)]
        self._width = Histogram(
            "sglang:spec_verify_width",
            "Slots verified by a cycle, the anchor counted.",
            list(labels),
            buckets=range(1, drafted_per_block + 2),
            registry=registry or REGISTRY,
        ).labels(**labels)
        self._by_source = {
            "blocks": counter(
                "sglang:spec_source_blocks_total", "Blocks verified, by what proposed their tokens.", "source"
            ),
            "proposed": counter(
                "sglang:spec_source_proposed_tokens_total", "Proposed tokens verified, by source.", "source"
            ),
            "accepted": counter(
                "sglang:spec_source_accepted_tokens_total", "Proposed tokens accepted, by source.", "source"
            ),
        }
        self._labels = labels
        self._undrafted = counter(
            "sglang:spec_cycles_without_draft_total",
            "Cycles without a draft forward, as all requests copied.",
        ).labels(**labels)
        fallbacks = counter(
            "sglang:spec_fallbacks_total", "Blocks that took another path than asked for.", "reason"
        )
        self._fallbacks = {reason: fallbacks.labels(**labels, reason=reason) for reason in FALLBACKS}

    @classmethod
    def from_server(cls, drafted_per_block: int) -> "DFlashMetrics":
        """As the server's arguments say, on the ranks whose scheduler reports metrics."""
        observability, parallel = get_observability(), get_parallel()
        reports = (parallel.attn_tp_rank, parallel.attn_cp_rank) == (0, 0)
        if not (
            observability.enable_metrics and (reports or observability.enable_metrics_for_all_schedulers)
        ):
            return cls(drafted_per_block, None)
        # Those of the scheduler's own metrics; a test compares them.
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
        return cls(drafted_per_block, {**labels, **(observability.extra_metric_labels or {})})

    def count_verified(self, accept_lens: Sequence[int], drafted: int) -> None:
        """A verified batch: accepted drafted tokens of each block, bonus token not counted, and how many of
        each block were verified."""
        if not self._enabled:
            return
        self._drafts.inc(len(accept_lens))
        self._drafted.inc(len(accept_lens) * drafted)
        self._accepted.inc(sum(accept_lens))
        for before, at_position in enumerate(self._by_position):
            at_position.inc(sum(accept_len > before for accept_len in accept_lens))

    def count_width(self, width: int) -> None:
        """A cycle that verifies so many slots, where the width is chosen."""
        if self._enabled:
            self._width.observe(width)

    def count_source(self, source: str, blocks: int, proposed: int, accepted: int) -> None:
        """Of a cycle's blocks those from one source, `draft` or `copy`, where there are two."""
        if not self._enabled:
            return
        for name, count in (("blocks", blocks), ("proposed", proposed), ("accepted", accepted)):
            self._by_source[name].labels(**self._labels, source=source).inc(count)

    def count_undrafted(self, cycles: int) -> None:
        if self._enabled:
            self._undrafted.inc(cycles)

    def count_fallback(self, reason: str, blocks: int = 1) -> None:
        """Count blocks that fell back, and log each reason once. Raises KeyError for a reason not in
        FALLBACKS."""
        if reason not in self._logged:
            logger.warning("DFLASH falls back (%s): %s. Logged once.", reason, FALLBACKS[reason])
            self._logged.add(reason)
        if self._enabled:
            self._fallbacks[reason].inc(blocks)
