"""Types of a speculative cycle, and the two inputs that SGLang carries and plans with.

- anchor: slot 0 of a block, which holds the bonus token.
- bonus token: the newest token of a request, chosen by the target and without KV.
- drafted token: a token that the draft or a copy proposes after the anchor.
- accepted token: a drafted token that verification keeps.
- block: the B slots of a request in one cycle: the anchor and up to B - 1 drafted tokens.
- verify length: slots of a block that the target verifies, the anchor included.
- accept length: tokens that a cycle commits. It includes the bonus token; the tensor `accept_len` does not.
- context K/V: the draft's keys and values of committed tokens, made from the target's hidden states.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.mem_cache.allocation import alloc_for_spec_decode
from sglang.srt.mem_cache.allocation_sizing import page_aligned_decode_alloc_lens
from sglang.srt.mem_cache.kv_loc_plan import IdSpaceKind, KVLocPlan
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType

from sglang_dflash.kernels.ops.speculative.block import pack_blocks, prepare_block
from sglang_dflash.srt.layers.draft_probs import DraftProbs
from sglang_dflash.srt.speculative.cycle.prompts import PrefilledRequests as PrefilledRequests
from sglang_dflash.srt.speculative.cycle.prompts import Prompts as Prompts
from sglang_dflash.srt.speculative.cycle.prompts import on_device as on_device
from sglang_dflash.srt.speculative.cycle.prompts import packed_ranges as packed_ranges
from sglang_dflash.srt.speculative.cycle.verify_rows import VerifyRows, whole_blocks

if TYPE_CHECKING:
    from sglang_dflash.srt.speculative.cycle.in_flight import CycleInFlight


@dataclass
class DFlashDraftInput(SpecInput):
    """State that crosses from one cycle to the next, one row per running request.

    Under overlap scheduling SGLang sets `future_indices` and relays tokens and lengths itself. The tensors
    here are then stale until the next forward resolves them.

    Attributes:
        bonus_tokens: [bs] int64, the newest token of each request. It has no KV yet.
        new_seq_lens: [bs] int64, tokens with committed KV. The bonus token is at this position.
        future_indices: SGLang's rows of the relay.
        reserved_lens_cpu: [bs] int32 on the host, slots reserved per request: an upper bound of the lengths,
            for attention backends that need none on the host. Valid in the step of `prepare_for_decode` only.
        known_lens: [bs], what the host knows of `new_seq_lens`: the length after a prefill, or else the cycle
            that decides it (`cycle/known_lengths.py`). None: nothing, and the next step waits for the device.
        spread: [bs], by how much `batch.seq_lens_cpu` may exceed a length. None: it is exact. Valid in one
            step only.
    """

    bonus_tokens: torch.Tensor
    new_seq_lens: torch.Tensor
    future_indices: torch.Tensor | None = None
    reserved_lens_cpu: torch.Tensor | None = None
    known_lens: list["int | CycleInFlight"] | None = None
    spread: list[int] | None = None

    # SGLang's relay reads these for every algorithm. They are EAGLE's state, and DFLASH has none.
    topk_p = topk_index = hidden_states = None

    def __post_init__(self):
        super().__init__(spec_input_type=SpecInputType.DFLASH_DRAFT)
        self.num_tokens_per_req = 1
        self.num_tokens_for_logprob_per_req = 1

    @classmethod
    def empty(cls, device: torch.device) -> "DFlashDraftInput":
        """Make the input of a batch without requests."""
        nothing = torch.empty((0,), dtype=torch.int64, device=device)
        return cls(bonus_tokens=nothing, new_seq_lens=nothing)

    def prepare_for_decode(self, batch) -> None:
        """Reserve KV slots for the next cycle. The scheduler calls this before each decode step."""
        batch.maybe_evict_swa()
        reqs = batch.reqs
        if not reqs:
            return
        committed = [req.kv.kv_committed_len for req in reqs]
        self.reserved_lens_cpu = _reserve_slots(batch, committed)
        for req in reqs:
            req.decode_batch_idx += 1
        # Exact without overlap. With it, SGLang replaces both by the published lengths before the forward.
        batch.seq_lens_cpu = torch.tensor(committed, dtype=torch.int64)
        batch.seq_lens_sum = sum(committed)

    def filter_batch(self, new_indices: torch.Tensor, new_indices_cpu: list[int] | None = None) -> None:
        """Keep these rows of the batch."""
        self.reserved_lens_cpu = None
        known = self.known_lens
        if known is not None:
            self.known_lens = None if new_indices_cpu is None else [known[i] for i in new_indices_cpu]
        if self.future_indices is not None:
            self.future_indices = self.future_indices[new_indices]
            return
        self.bonus_tokens = self.bonus_tokens[new_indices]
        self.new_seq_lens = self.new_seq_lens[new_indices]

    def merge_batch(self, other: "DFlashDraftInput") -> None:
        """Append the rows of another batch."""
        self.reserved_lens_cpu = None
        mine, theirs = self.known_lens, other.known_lens
        self.known_lens = None if mine is None or theirs is None else mine + theirs
        if self.future_indices is not None:
            assert other.future_indices is not None
            self.future_indices = torch.cat([self.future_indices, other.future_indices])
            return
        self.bonus_tokens = torch.cat([self.bonus_tokens, other.bonus_tokens])
        self.new_seq_lens = torch.cat([self.new_seq_lens, other.new_seq_lens])


def _reserve_slots(batch: Any, committed: list[int]) -> torch.Tensor:
    """Give each request slots for two blocks, and return its slots: [bs] int32.

    Two, because under overlap `kv_committed_len` is one step behind the running forward. If slots are short
    and the pool has room, requests get two more. A row of the request table holds
    the context and a block. That suffices, as lengths end with the context (`accept_greedy`).
    """
    reqs, allocator = batch.reqs, batch.token_to_kv_pool_allocator
    page, table = allocator.page_size, batch.req_to_token_pool.req_to_token
    row_len = table.shape[1] // page * page
    least = 2 * get_spec().speculative_num_draft_tokens
    allocated = [req.kv.kv_allocated_len for req in reqs]
    if all(has >= min(n + least, row_len) for n, has in zip(committed, allocated, strict=True)):
        return torch.tensor(allocated, dtype=torch.int32)
    for reserve in (2 * least, least):
        current, reserved, _ = page_aligned_decode_alloc_lens(reqs, reserve=reserve, page_size=page)
        reserved = [min(slots, row_len) for slots in reserved]
        num_new = sum(reserved) - sum(current)
        # What the others may need next stays free.
        if num_new + least * len(reqs) <= allocator.available_size():
            break
    current_cpu = torch.tensor(current, dtype=torch.int32)
    reserved_cpu = torch.tensor(reserved, dtype=torch.int32)
    alloc_for_spec_decode(
        batch.tree_cache,
        batch.req_to_token_pool,
        reqs=reqs,
        req_pool_indices=batch.req_pool_indices,
        cur_kv_lens=current_cpu.to(batch.device, non_blocking=True),
        cur_kv_lens_cpu=current_cpu,
        nxt_kv_lens=reserved_cpu.to(batch.device, non_blocking=True),
        nxt_kv_lens_cpu=reserved_cpu,
        num_needed_tokens=num_new,
        batch=batch,
    )
    return reserved_cpu


@dataclass(frozen=True, slots=True)
class Cycle:
    """Inputs of one decode step, fixed before drafting: bs requests, blocks of B slots.

    Attributes:
        bs: number of requests.
        req_pool_indices: [bs] int64, rows of the request table.
        committed: [bs] int64, tokens with committed KV, n. The block covers positions n .. n+B-1.
        committed_host: [bs] on the host, upper bounds of `committed`.
        spread: [bs], by how much `committed_host` may exceed `committed`. None: it is exact, or no attention
            backend plans with it.
        tokens: [bs, B] int64, the anchor (the last cycle's bonus token), then mask tokens.
        positions: [bs, B] int64.
        cache_loc: [bs * B] int64, KV slots of these positions.
        kv_loc_plan: SGLang's translation of the slots, shared by the draft's and the verify forward.
        can_run_cuda_graph: SGLang's permission for this batch.
        write_cols: columns of the planned slots that the block covers, or an index of these slots. None: all
            of them.
        ragged: verified slots, if requests verify different numbers. None: all slots.
        drafted: [m] int64, requests whose blocks the draft's forward has run. None: all, if there is more
            than an anchor.
    """

    bs: int
    req_pool_indices: torch.Tensor
    committed: torch.Tensor
    committed_host: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor
    cache_loc: torch.Tensor
    kv_loc_plan: KVLocPlan
    can_run_cuda_graph: bool
    spread: list[int] | None = None
    write_cols: slice | torch.Tensor | None = None
    ragged: VerifyRows | None = None
    drafted: torch.Tensor | None = None

    @classmethod
    def begin(cls, batch: Any, target_runner: Any, mask_token_id: int, num_slots: int) -> "Cycle":
        """Prepare the cycle of a decode batch with blocks of `num_slots` slots.

        Slots beyond a request's reserved ones have any KV slot, and must not be verified.
        """
        draft_input: DFlashDraftInput = batch.spec_info
        tokens, positions, cache_loc = prepare_block(
            draft_input.bonus_tokens,
            batch.seq_lens,
            batch.req_pool_indices,
            target_runner.req_to_token_pool.req_to_token,
            mask_token_id,
            num_slots,
        )
        if batch.seq_lens_cpu is None:
            assert draft_input.reserved_lens_cpu is not None, "prepare_for_decode comes first"
            seq_lens_cpu = draft_input.reserved_lens_cpu
            # Copies beyond a block leave the slots of a block free.
            committed_host = seq_lens_cpu - min(num_slots, get_spec().speculative_num_draft_tokens)
        else:
            seq_lens_cpu = committed_host = batch.seq_lens_cpu
        plan = target_runner.kv_index_translator.plan(
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            seq_lens_cpu=seq_lens_cpu,
            write_virtual=cache_loc,
            read_extent=num_slots,
        )
        return cls(
            bs=batch.seq_lens.numel(),
            req_pool_indices=batch.req_pool_indices,
            committed=batch.seq_lens,
            committed_host=committed_host,
            tokens=tokens,
            positions=positions,
            cache_loc=cache_loc,
            kv_loc_plan=plan,
            can_run_cuda_graph=batch.can_run_decode_cuda_graph,
            spread=draft_input.spread,
        )

    @property
    def verify_len(self) -> int:
        """Slots of each block, the anchor included."""
        return self.tokens.shape[1]

    @property
    def rows(self) -> VerifyRows:
        """Rows of the verify forward."""
        return self.ragged or whole_blocks(self.bs, self.verify_len)

    def of_requests(self, on_host: np.ndarray, chosen: torch.Tensor, target_runner: Any) -> "Cycle":
        """Keep some requests for a forward: [m] int64, on host and device."""
        slots = self.cache_loc.view(self.bs, -1)[chosen].flatten()
        requests, committed = self.req_pool_indices[chosen], self.committed[chosen]
        committed_host = self.committed_host[on_host.tolist()]
        plan = target_runner.kv_index_translator.plan(
            req_pool_indices=requests,
            seq_lens=committed,
            seq_lens_cpu=committed_host,
            write_virtual=slots,
            read_extent=self.verify_len,
        )
        return replace(
            self,
            bs=len(on_host),
            req_pool_indices=requests,
            committed=committed,
            committed_host=committed_host,
            tokens=self.tokens[chosen],
            positions=self.positions[chosen],
            cache_loc=slots,
            kv_loc_plan=plan,
            spread=None if self.spread is None else [self.spread[i] for i in on_host],
        )

    def packed(self, rows: VerifyRows, drafted: torch.Tensor) -> "Cycle":
        """Keep the verified slots of each block, after the blocks `drafted` [m] have been filled."""
        cycle = replace(self, drafted=drafted)
        if rows.index is None:
            return replace(cycle.narrowed(rows.width), ragged=rows)
        columns = rows.columns(self.verify_len)
        return replace(
            cycle,
            tokens=self.tokens[:, : rows.width],
            positions=self.positions[:, : rows.width],
            cache_loc=self.cache_loc[columns],  # of rows that are nobody's, SGLang reads `write_cols`
            write_cols=columns,
            ragged=rows,
        )

    def narrowed(self, verify_len: int) -> "Cycle":
        """Keep the first `verify_len` slots of each block."""
        if verify_len == self.verify_len:
            return self
        return replace(
            self,
            tokens=self.tokens[:, :verify_len],
            positions=self.positions[:, :verify_len],
            cache_loc=self.cache_loc.view(self.bs, -1)[:, :verify_len].flatten(),
            write_cols=slice(0, verify_len),
        )


@dataclass(frozen=True, slots=True)
class DraftBlock:
    """Drafted blocks, in the target's vocabulary.

    Attributes:
        tokens: [bs, B] int64. Column 0 is the anchor.
        probs: distributions that columns 1.. were drawn from. None: they are the draft's argmax.
    """

    tokens: torch.Tensor
    probs: DraftProbs | None = None

    @property
    def is_drawn(self) -> bool:
        """True if rejection with the draft's probabilities verifies the block."""
        return self.probs is not None

    def narrowed(self, verify_len: int) -> "DraftBlock":
        """Keep the first slots. Lossless if `verify_len` was chosen without the drafted tokens."""
        if verify_len == self.tokens.shape[1]:
            return self
        probs = self.probs
        if probs is not None:
            drafted = slice(0, verify_len - 1)
            probs = DraftProbs(probs.ids[:, drafted].contiguous(), probs.probs[:, drafted].contiguous())
        return DraftBlock(self.tokens[:, :verify_len].contiguous(), probs)


@dataclass
class DFlashVerifyInput(SpecInput):
    """Attention input for the target's chains and the draft's blocks.

    There is no mask: the lengths determine it, and the draft's layers declare that they are not causal.
    SGLang builds one too, to capture CUDA graphs with.
    """

    draft_token_num: int
    capture_hidden_mode: CaptureHiddenMode
    draft_token: torch.Tensor | None = None  # [bs * B] int64
    positions: torch.Tensor | None = None  # [bs * B] int64
    # SGLang's backends read these for every verify. A chain has one candidate per position and no mask.
    topk: int = 1
    custom_mask: torch.Tensor | None = None
    ragged_verify_layout: Any = None  # of SGLang's CUDA graphs
    hidden_layout: Any = None  # the same, while SGLang's FlashInfer backend would refuse it
    # The rows, if requests verify different numbers; then W is `draft_token_num`. None: every request has W.
    ragged: VerifyRows | None = None
    # [bs], by how much `ForwardBatch.seq_lens_cpu` may exceed a length. None: it is exact. Read by our plans.
    spread: list[int] | None = None

    @classmethod
    def for_target(
        cls, rows: VerifyRows, tokens: torch.Tensor, positions: torch.Tensor, spread: list[int] | None = None
    ) -> "DFlashVerifyInput":
        """Describe a verify forward over rows with these tokens and positions, both [T] int64."""
        return cls(
            rows.width,
            CaptureHiddenMode.FULL,
            draft_token=tokens,
            positions=positions,
            spread=spread,
            ragged_verify_layout=rows.layout,
            ragged=None if rows.lengths is None else rows,
        )

    def __post_init__(self):
        super().__init__(spec_input_type=SpecInputType.DFLASH_VERIFY)
        self.custom_mask = None  # SGLang offers one where a backend could read it
        self.num_tokens_per_req = self.draft_token_num
        self.num_tokens_for_logprob_per_req = self.draft_token_num

    def generate_attn_arg_prefill(
        self,
        *,
        req_pool_indices: torch.Tensor,
        paged_kernel_lens: torch.Tensor,
        paged_kernel_lens_sum: int,
        translator,
        plan: KVLocPlan,
        kv_start_idx: torch.Tensor | None = None,
        kv_indices_buf: torch.Tensor | None = None,
        kind: IdSpaceKind = IdSpaceKind.FULL,
    ):
        """Return FlashInfer's CSR arguments: (kv_indices, kv_indptr, qo_indptr, mask), int32.

        `paged_kernel_lens` [bs] are committed lengths. Each request also reads its own block.
        """
        bs, width, device = req_pool_indices.numel(), self.draft_token_num, req_pool_indices.device
        counts, num_rows = None, bs * width
        if layout := self.ragged_verify_layout or self.hidden_layout:
            counts, num_rows = layout.verify_lens[:bs], layout.graph_num_tokens
        lengths, kv_indptr, qo_indptr = pack_blocks(paged_kernel_lens, width, counts=counts)
        if kv_indices_buf is None:
            kv_indices_buf = torch.empty(paged_kernel_lens_sum + num_rows, dtype=torch.int32, device=device)
        translator.pack_read_stream(
            plan,
            req_pool_indices=req_pool_indices,
            seq_lens=lengths,
            indptr=kv_indptr,
            out=kv_indices_buf,
            kv_start_idx=kv_start_idx,
            kind=kind,
        )
        return kv_indices_buf, kv_indptr, qo_indptr, self.custom_mask
