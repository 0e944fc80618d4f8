"""Names that differ between the supported releases of SGLang.

No other file imports a name that one of them lacks. `docs/dev/updating-sglang.md` has the procedure.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.spec_utils import draft_tp_context

try:
    from sglang.kernels.ops.attention.table_qk_norm_rope import table_qk_norm_rope_
except ImportError:  # 0.5.22: norm and rotation are separate kernels there
    table_qk_norm_rope_ = None


@dataclass(frozen=True)
class DraftRanks:
    """The ranks of a draft, for SGLang 0.5.22, which has no such type."""

    tp_group: Any  # the ranks that share requests. None: all ranks of the target
    attn_tp_size: int  # number of ranks that share requests

    @property
    def local_dp(self) -> bool:
        return self.tp_group is not None


def resolve_draft_ranks() -> Any:
    """Return the ranks of a draft whose layers all see the same rows, outside `run_as_draft`."""
    try:
        from sglang.srt.configs.draft_parallel import DraftParallelSpec, DraftTPExecution
        from sglang.srt.speculative.draft_parallel import resolve_draft_parallel_layout
    except ImportError:  # 0.5.22
        parallel = get_parallel()
        group = parallel.attn_tp_group if parallel.attn_dp_enabled else None
        return DraftRanks(group, parallel.attn_tp_size)
    return resolve_draft_parallel_layout(DraftParallelSpec(tp_execution=DraftTPExecution.SINGLE_GROUP))


def run_as_draft(ranks: Any) -> AbstractContextManager[None]:
    """Return a context in which the draft's ranks are all there are."""
    return draft_tp_context(ranks.local_dp if isinstance(ranks, DraftRanks) else ranks)


def mixed_batches_cache_states() -> bool:
    """Return whether the prefix cache gets right recurrent states from mixed batches.

    SGLang 0.5.22 forgets which states the prefill is to keep, and files others, with a draft or without.
    """
    return hasattr(ScheduleBatch, "mamba_lazy_undo_prealloc_at_boundary")
