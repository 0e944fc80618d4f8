"""The two inputs that SGLang carries and plans with. Terms: `docs/dev/architecture.md`."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.allocation import alloc_for_spec_decode
from sglang.srt.mem_cache.allocation_sizing import page_aligned_decode_alloc_lens
from sglang.srt.mem_cache.kv_loc_plan import IdSpaceKind, KVLocPlan
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType

from sglang_dflash.kernels.ops.speculative.block import block_offsets
from sglang_dflash.srt.patching import WORKER, patches

if TYPE_CHECKING:
    from sglang_dflash.srt.speculative.cycle.layout import VerifyLayout
    from sglang_dflash.srt.speculative.cycle.lengths import ArrivingLengths
    from sglang_dflash.srt.speculative.cycle.prompts import PrefilledRequests


NOT_RESERVED = torch.empty(0, dtype=torch.int32)


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
            for attention backends that need none on the host. Valid in the step of `prepare_for_decode` only,
            and otherwise `NOT_RESERVED`.
        arriving_lens: the step's lengths on their way to the host, if the cycle is to wait for them. Valid in
            one step only.
        arrivals: requests that came prefilled since the last cycle, oldest first. The next cycle takes them,
            on its own stream: until a running forward is over, a row may still belong to its former owner.
    """

    bonus_tokens: torch.Tensor
    new_seq_lens: torch.Tensor
    future_indices: torch.Tensor | None = None
    reserved_lens_cpu: torch.Tensor = NOT_RESERVED
    arriving_lens: "ArrivingLengths | None" = None
    arrivals: list["PrefilledRequests"] = field(default_factory=list)

    # SGLang's relay reads these for every algorithm. They are EAGLE's state, and DFLASH has none.
    topk_p = topk_index = hidden_states = None

    def __post_init__(self):
        super().__init__(spec_input_type=SpecInputType.DFLASH_DRAFT)
        self.num_tokens_per_req = 1
        self.num_tokens_for_logprob_per_req = 1

    def prepare_for_decode(self, batch) -> None:
        """Reserve KV slots for the next cycle. The scheduler calls this before each decode step."""
        batch.maybe_evict_swa()
        reqs = batch.reqs
        if not reqs:
            return
        committed = [req.kv.kv_committed_len for req in reqs]
        self.reserved_lens_cpu = reserve_slots(batch, committed)
        for req in reqs:
            req.decode_batch_idx += 1
        # Exact without overlap. With it, SGLang replaces both by the published lengths before the forward.
        batch.seq_lens_cpu = torch.tensor(committed, dtype=torch.int64)
        batch.seq_lens_sum = sum(committed)

    def filter_batch(self, new_indices: torch.Tensor, new_indices_cpu: list[int]) -> None:
        """Keep these rows of the batch."""
        self.reserved_lens_cpu = NOT_RESERVED
        if self.future_indices is not None:
            self.future_indices = self.future_indices[new_indices]
            return
        self.bonus_tokens = self.bonus_tokens[new_indices]
        self.new_seq_lens = self.new_seq_lens[new_indices]

    def merge_batch(self, other: "DFlashDraftInput") -> None:
        """Append the rows of another batch."""
        self.reserved_lens_cpu = NOT_RESERVED
        self.arrivals = self.arrivals + other.arrivals
        if self.future_indices is not None:
            assert other.future_indices is not None
            self.future_indices = torch.cat([self.future_indices, other.future_indices])
            return
        self.bonus_tokens = torch.cat([self.bonus_tokens, other.bonus_tokens])
        self.new_seq_lens = torch.cat([self.new_seq_lens, other.new_seq_lens])


def reserve_slots(batch: Any, committed: list[int]) -> torch.Tensor:
    """Give each request slots for two blocks, and return its slots: [bs] int32.

    Two, because under overlap `kv_committed_len` is one step behind the running forward. If slots are short
    and the pool has room, requests get two more. A row of the request table holds
    the context and a block. That suffices, as lengths end with the context (`accept_blocks`).
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
    # Only a copy from pinned memory never waits for the device.
    on_host: dict[str, Any] = {"dtype": torch.int32, "pin_memory": torch.device(batch.device).type == "cuda"}
    current_cpu, reserved_cpu = torch.tensor(current, **on_host), torch.tensor(reserved, **on_host)
    alloc_for_spec_decode(
        batch.tree_cache,
        req_to_token_pool=batch.req_to_token_pool,
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


@patches(
    "sglang.srt.speculative.dflash_info.DFlashVerifyInput",
    at=WORKER,
    signature="(draft_token, positions, draft_token_num, custom_mask, capture_hidden_mode, "
    "ragged_verify_layout)",
    upstream="docs/dev/upstream/plugin-doors.md",
)
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
    # The rows, if requests verify different numbers; then W is `draft_token_num`. None: every request has W.
    ragged: "VerifyLayout | None" = None

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
        if layout := self.ragged_verify_layout:
            counts, num_rows = layout.verify_lens[:bs], layout.graph_num_tokens
        lengths, kv_indptr, qo_indptr = block_offsets(paged_kernel_lens, width, counts=counts)
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
