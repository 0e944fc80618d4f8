"""The values that flow through one speculative cycle, and the two that SGLang carries or plans with."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from sglang.srt.mem_cache.allocation import alloc_for_spec_decode
from sglang.srt.mem_cache.allocation_sizing import page_aligned_decode_alloc_lens
from sglang.srt.mem_cache.kv_loc_plan import IdSpaceKind, KVLocPlan
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType

from sglang_dflash.kernels.ops.speculative.block import pack_blocks, prepare_block


@dataclass
class DFlashDraftInput(SpecInput):
    """What crosses from one cycle to the next, one row per running request.

    bonus_tokens: [bs] int64, the newest token of each request, which has no KV yet.
    new_seq_lens: [bs] int64, tokens with committed KV; the bonus token sits at this position.

    Under overlap scheduling SGLang sets `future_indices` and relays both values itself; the tensors here are
    then stale until the next forward resolves them."""

    bonus_tokens: torch.Tensor
    new_seq_lens: torch.Tensor
    future_indices: torch.Tensor | None = None
    # [bs] int32 on the host: slots reserved per request. An upper bound of the lengths, for attention
    # backends that do not want exact ones. Set by prepare_for_decode, valid in that step only.
    reserved_lens_cpu: torch.Tensor | None = None
    # [bs] int64 on the host: `new_seq_lens`, where it was known before the step, as after a prefill or a
    # plain decode step. The next step then need not wait for the device to say (`known_lengths.py`).
    new_seq_lens_cpu: torch.Tensor | None = None

    # Read by SGLang's relay for every algorithm; EAGLE's state, of which DFLASH has none.
    topk_p = topk_index = hidden_states = None

    def __post_init__(self):
        super().__init__(spec_input_type=SpecInputType.DFLASH_DRAFT)
        self.num_tokens_per_req = 1
        self.num_tokens_for_logprob_per_req = 1

    @classmethod
    def empty(cls, device: torch.device) -> "DFlashDraftInput":
        nothing = torch.empty((0,), dtype=torch.int64, device=device)
        return cls(bonus_tokens=nothing, new_seq_lens=nothing)

    def prepare_for_decode(self, batch) -> None:
        """Reserve KV slots for the coming cycle. The scheduler calls this before each decode step.

        Twice a block per request: under overlap `kv_committed_len` lags one step behind what the running
        forward will have committed."""
        batch.maybe_evict_swa()
        reqs = batch.reqs
        if not reqs:
            return
        block_size = get_spec().speculative_num_draft_tokens
        current, reserved, num_new = page_aligned_decode_alloc_lens(
            reqs, reserve=2 * block_size, page_size=batch.token_to_kv_pool_allocator.page_size
        )
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
        for req in reqs:
            req.decode_batch_idx += 1
        # Exact without overlap; with it, SGLang replaces both by the published lengths before the forward.
        batch.seq_lens_cpu = torch.tensor([req.kv.kv_committed_len for req in reqs], dtype=torch.int64)
        batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
        self.reserved_lens_cpu = reserved_cpu

    def filter_batch(self, new_indices: torch.Tensor, new_indices_cpu: list[int] | None = None) -> None:
        self.reserved_lens_cpu = None
        known = self.new_seq_lens_cpu
        self.new_seq_lens_cpu = None if known is None or new_indices_cpu is None else known[new_indices_cpu]
        if self.future_indices is not None:
            self.future_indices = self.future_indices[new_indices]
            return
        self.bonus_tokens = self.bonus_tokens[new_indices]
        self.new_seq_lens = self.new_seq_lens[new_indices]

    def merge_batch(self, other: "DFlashDraftInput") -> None:
        self.reserved_lens_cpu = None
        known = self.new_seq_lens_cpu, other.new_seq_lens_cpu
        self.new_seq_lens_cpu = None if any(lens is None for lens in known) else torch.cat(known)
        if self.future_indices is not None:
            self.future_indices = torch.cat([self.future_indices, other.future_indices])
            return
        self.bonus_tokens = torch.cat([self.bonus_tokens, other.bonus_tokens])
        self.new_seq_lens = torch.cat([self.new_seq_lens, other.new_seq_lens])


@dataclass(frozen=True, slots=True)
class Prompts:
    """The tokens of one prefill, packed request after request. Fixed before the target's forward.

    req_pool_indices: [bs] int64.
    tokens, positions: [n] int64, n = sum(extend_lens).
    prefix_lens, extend_lens: of each request, on the host: where its tokens start, and how many there are.
        num_running: requests at the end of the batch that are not new: in a mixed batch a running one takes
        part with its bonus token.
    is_continued: of each request, whether its tokens follow on the ones of an earlier step, rather than on a
        prefix that the cache had.
    reqs: SGLang's, in this order.
    """

    req_pool_indices: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor
    prefix_lens: list[int]
    extend_lens: list[int]
    num_running: int
    is_continued: list[bool]
    reqs: Sequence[Any] = ()

    @property
    def lens_cpu(self) -> torch.Tensor | None:
        """[bs] int64 on the host: tokens of each request that have KV after this prefill. None with running
        ones, whose lengths the host may know a step late."""
        if self.num_running:
            return None
        return torch.tensor(self.prefix_lens, dtype=torch.int64) + torch.tensor(
            self.extend_lens, dtype=torch.int64
        )

    @classmethod
    def of(cls, batch) -> "Prompts":
        num_running = len(batch.decoding_reqs) if batch.forward_mode.is_mixed() else 0
        return cls(
            req_pool_indices=batch.req_pool_indices,
            tokens=batch.input_ids,
            positions=packed_ranges(batch.prefix_lens, batch.extend_lens, batch.device),
            prefix_lens=list(batch.prefix_lens),
            extend_lens=list(batch.extend_lens),
            num_running=num_running,
            is_continued=[req.extend_batch_idx > 1 for req in batch.reqs[: len(batch.reqs) - num_running]]
            + [True] * num_running,
            reqs=batch.reqs,
        )


def on_device(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers of the host as a tensor, without waiting for the device."""
    tensor = torch.tensor(values, dtype=dtype, pin_memory=torch.device(device).type == "cuda")
    return tensor.to(device, non_blocking=True)


def packed_ranges(starts: Sequence[int], counts: Sequence[int], device: torch.device) -> torch.Tensor:
    """Of every request `count` numbers from its `start` on, one request after the other: [sum(counts)] int64.

    Counted out on the device: a copy of more than 64 KB from ordinary host memory would wait for the stream.
    """
    on_host = torch.tensor([list(starts), list(counts)], dtype=torch.int64)
    total = int(on_host[1].sum())
    on_host[0] -= on_host[1].cumsum(0) - on_host[1]
    shifts, lengths = on_host.to(device, non_blocking=True)
    return torch.arange(total, device=device) + shifts.repeat_interleave(lengths, output_size=total)


@dataclass(frozen=True, slots=True)
class Cycle:
    """One decode step's batch, fixed before drafting: bs requests, blocks of B slots.

    seq_lens: [bs] int64, committed length n; the block covers positions n .. n+B-1.
    tokens: [bs, B] int64, the bonus token of the cycle before (the anchor), then mask tokens.
    positions: [bs, B] int64.
    cache_loc: [bs * B] int64, the request table's slots of those positions.
    kv_loc_plan: SGLang's translation of those slots, shared by the draft and the verify forward. host_lens:
    [bs] on the host, n + B, exactly, where SGLang knows lengths on the host (is_exact); else an upper bound.
    write_cols: which columns of the planned slots the block is, where it is not all of them."""

    bs: int
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor
    cache_loc: torch.Tensor
    kv_loc_plan: KVLocPlan
    host_lens: torch.Tensor
    can_run_cuda_graph: bool
    write_cols: slice | None = None
    is_exact: bool = False

    @classmethod
    def begin(cls, batch: Any, target_runner: Any, mask_token_id: int, width: int) -> "Cycle":
        """The cycle of a decode batch whose blocks are `width` slots."""
        draft_input: DFlashDraftInput = batch.spec_info
        tokens, positions, cache_loc = prepare_block(
            draft_input.bonus_tokens,
            batch.seq_lens,
            batch.req_pool_indices,
            target_runner.req_to_token_pool.req_to_token,
            mask_token_id,
            width,
        )
        exact = batch.seq_lens_cpu
        host_lens = draft_input.reserved_lens_cpu if exact is None else exact + width
        plan = target_runner.kv_index_translator.plan(
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            seq_lens_cpu=host_lens if exact is None else exact,
            write_virtual=cache_loc,
            read_extent=width,
        )
        return cls(
            bs=batch.seq_lens.numel(),
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            tokens=tokens,
            positions=positions,
            cache_loc=cache_loc,
            kv_loc_plan=plan,
            host_lens=host_lens,
            can_run_cuda_graph=batch.can_run_decode_cuda_graph,
            is_exact=exact is not None,
        )

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    @property
    def new_seq_lens_cpu(self) -> torch.Tensor | None:
        """[bs] int64 on the host: committed lengths after this cycle, where that can only be one token
        more."""
        return self.host_lens if self.is_exact and self.width == 1 else None

    def narrowed(self, width: int) -> "Cycle":
        """The same cycle over the first `width` slots of each block."""
        if width == self.width:
            return self
        return replace(
            self,
            tokens=self.tokens[:, :width],
            positions=self.positions[:, :width],
            cache_loc=self.cache_loc.view(self.bs, -1)[:, :width].flatten(),
            host_lens=self.host_lens - (self.width - width),
            write_cols=slice(0, width),
        )


@dataclass
class DFlashVerifyInput(SpecInput):
    """Tells an attention backend to run blocks of `draft_token_num` tokens: the target's verify chain, and
    the draft's block (whose layers say themselves that they are not causal). No mask: both follow from the
    lengths. SGLang builds one as well, to capture CUDA graphs with."""

    draft_token_num: int
    capture_hidden_mode: CaptureHiddenMode
    draft_token: torch.Tensor | None = None  # [bs * B] int64
    positions: torch.Tensor | None = None  # [bs * B] int64
    # Read by SGLang's backends for every verify; a chain has one candidate per position and no mask.
    topk: int = 1
    custom_mask: torch.Tensor | None = None
    ragged_verify_layout: Any = None  # of algorithms whose requests verify different numbers of tokens

    @classmethod
    def of_target(cls, width: int, tokens: torch.Tensor, positions: torch.Tensor) -> "DFlashVerifyInput":
        """Of a forward that verifies `width` slots of each block. tokens, positions: [bs * width] int64."""
        return cls(width, CaptureHiddenMode.FULL, draft_token=tokens, positions=positions)

    def __post_init__(self):
        super().__init__(spec_input_type=SpecInputType.DFLASH_VERIFY)
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
        """FlashInfer's CSR arguments: (kv_indices, kv_indptr, qo_indptr, mask), int32.

        `paged_kernel_lens` [bs] are committed lengths; each request also reads its own block.
        """
        bs, width, device = req_pool_indices.numel(), self.draft_token_num, req_pool_indices.device
        lengths, kv_indptr, qo_indptr = pack_blocks(paged_kernel_lens, width)
        if kv_indices_buf is None:
            kv_indices_buf = torch.empty(paged_kernel_lens_sum + bs * width, dtype=torch.int32, device=device)
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
