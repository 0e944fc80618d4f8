"""FlashInfer plans of blocks, made before the host knows exact lengths.

FlashInfer plans a forward on the host. If the host waits for exact lengths, the device idles meanwhile. Here
a plan is made from bounds of the lengths instead (`kv_chunks.py`). The device's own lengths decide what a
captured kernel reads.

`--speculative-plans-within-bounds` turns this on. Without it SGLang's backend and relay are as they were.

This covers CUDA graphs of one wrapper. Everything else keeps FlashInfer's own plan, which waits: batches
beyond the captured sizes, and layouts of two wrappers (sliding windows).
"""

import functools
import logging
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from sglang_dflash.srt.environ import DFlashOptions
from sglang_dflash.srt.layers.attention.flashinfer_keys import BlockKeys
from sglang_dflash.srt.layers.attention.kv_chunks import choose_chunk, holds, num_chunks
from sglang_dflash.srt.reaches import PLANS, require

logger = logging.getLogger(__name__)

# SGLang's length of a lane that pads a batch, on the host and on the device.
_PADDING_LENGTH = 1
# Positions in FlashInfer's plan information.
_PADDED_BATCH_SIZE, _CTA_TILE_Q, _CHUNK_OFFSET = 0, 3, 9
# Cycles after which a check of chunk counts is waited for.
_MOST_UNREAD_CHECKS = 8


def accepts_bounds(backend: Any) -> bool:
    """Return whether a backend plans with upper bounds of lengths, or without lengths."""
    if not getattr(backend, "needs_cpu_seq_lens", True):
        return True
    parts = getattr(backend, "full_attn_backend", None), getattr(backend, "linear_attn_backend", None)
    if None not in parts:  # a hybrid target
        return all(map(accepts_bounds, parts))
    return plans_blocks(backend)


def plans_blocks(backend: Any) -> bool:
    """Return whether the plans of a backend's CUDA graphs are made here."""
    if not DFlashOptions.PLANS_WITHIN_BOUNDS.get():
        return False
    backend = getattr(backend, "full_attn_backend", backend)
    is_ours: bool = type(backend) is backend_class()
    return (
        is_ours
        and backend.dispatch_reason is None
        and backend.prefill_backend == "fa2"
        and not backend.use_sliding_window_kv_pool
        and not backend.is_nvfp4_kvcache
    )


@functools.cache
def backend_class() -> type:
    """Return SGLang's FlashInfer backend, which here plans within bounds of lengths.

    `spec_info.spread` has, per request, by how much the host's length may exceed the device's.
    """
    from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend

    class PlansBlocks(FlashInferAttnBackend):
        def __init__(self, runner: Any, **options: Any):
            super().__init__(runner, **options)
            self.shared: SharedPlans = runner.dflash_shared_plans

        def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
            """Plan a forward, before its CUDA graph is captured or replayed."""
            spec_info = forward_batch.spec_info
            is_block = forward_batch.forward_mode.is_target_verify() and hasattr(spec_info, "spread")
            if not is_block or not plans_blocks(self):
                return super().init_forward_metadata_out_graph(forward_batch, in_capture)
            layout = spec_info.ragged_verify_layout
            size = forward_batch.batch_size if layout is None else layout.graph_num_tokens
            if in_capture:
                # FlashInfer's own plan selects the kernel. The graph is captured with ours.
                spec_info.ragged_verify_layout, spec_info.hidden_layout = None, layout
                super().init_forward_metadata_out_graph(forward_batch, in_capture=True)
                spec_info.ragged_verify_layout = layout
                _add_plan(self, forward_batch, size)
            return self.dflash_plans[size].prepare(forward_batch)

    return PlansBlocks


def create_backend(runner: Any, create: Callable[[Any], Any]) -> Any:
    """Make a runner's FlashInfer backend.

    Args:
        runner: the target's or the draft's model runner.
        create: SGLang's function, which makes the backend of MLA models.
    """
    if runner.use_mla_backend:
        return create(runner)
    require(PLANS)
    return backend_class()(runner, init_new_workspace=runner.init_new_workspace)


class PlanCounts(Counter[str]):
    """Numbers of plans and of waits for the device, by kind, for `/server_info`."""

    def add(self, kind: str, reason: str = "") -> None:
        """Count an event. Log why the host waits for the device, if it does, once for each kind."""
        if reason and not self[kind]:
            logger.warning("DFLASH: the host waits for the device before it plans: %s.", reason)
        self[kind] += 1


class SharedPlans:
    """Counts and graph keys that the FlashInfer backends of a worker share.

    Attributes:
        counts: of all backends, and of the worker's cycles.
    """

    def __init__(self) -> None:
        self.counts = PlanCounts()
        self._keys: weakref.WeakSet[BlockKeys] = weakref.WeakSet()  # of the graphs captured so far

    def keys_of(self, wrapper: Any, num_queries: int, translator: Any) -> BlockKeys:
        """Return the keys that a wrapper reads: those of another model's graph, or its own."""
        for keys in self._keys:
            if keys.share_with(wrapper, num_queries, translator):
                return keys
        keys = BlockKeys(wrapper, num_queries, translator)
        self._keys.add(keys)
        return keys


def share_plans(*runners: Any) -> SharedPlans:
    """Let the backends of these runners share plans. SGLang makes each from its runner alone."""
    shared = SharedPlans()
    for runner in runners:
        runner.dflash_shared_plans = shared
    return shared


class Staging:
    """Two pinned buffers for the plans of one backend, used in turn.

    FlashInfer writes a plan to pinned memory and copies it asynchronously. The copy runs behind all earlier
    work of the stream, so the buffer may be overwritten only after it. SGLang processes a step before it
    launches the next but one. So with two buffers the copy is over, and the host does not wait here.
    """

    def __init__(self, num_bytes: int, device: torch.device, counts: PlanCounts):
        self.counts = counts
        is_cuda = device.type == "cuda"
        self._buffers = [torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_cuda) for _ in range(2)]
        self._copied = [torch.get_device_module(device).Event() for _ in range(2)]
        self._turn = 0

    def next(self) -> torch.Tensor:
        """Return the buffer for the next plan. [num_bytes] uint8, on the host"""
        self._turn = 1 - self._turn
        copied = self._copied[self._turn]
        if not copied.query():
            self.counts.add("waits_for_a_buffer", "the plan before the last is still being copied")
            copied.synchronize()
        return self._buffers[self._turn]

    def on_planned(self) -> None:
        """Note that the copy of the latest buffer is launched."""
        self._copied[self._turn].record()


class FlashInferBlockPlan:
    """Preparation of a captured graph of blocks for a replay.

    It replaces SGLang's updater of the graph's wrapper. The offsets of queries and the last page lengths are
    constant. The capture's first plan wrote them.

    Args:
        wrapper: FlashInfer's paged prefill wrapper, which has been planned once.
        num_queries: of each request. 0: every forward has another layout.
        num_rows: queries of all requests.
        heads: of queries, of keys, and their dimension.
        keys: offsets and key indices, which the wrapper reads.
        staging: buffers of the backend.
    """

    def __init__(
        self,
        wrapper: Any,
        num_queries: int,
        num_rows: int,
        heads: tuple[int, int, int],
        keys: BlockKeys,
        staging: Staging,
    ):
        self.wrapper, self._num_queries, self._num_rows, self._heads = wrapper, num_queries, num_rows, heads
        self.keys, self._staging = keys, staging
        self._bs = wrapper._fixed_batch_size
        self._counts = [num_queries] * self._bs
        self._queries_host = torch.arange(0, self._bs + 1, dtype=torch.int32) * num_queries
        # FlashInfer reads these arrays before its plan returns, so every plan may use the same memory.
        self._lengths_host = np.zeros(self._bs, dtype=np.int32)
        self._offsets_host = np.zeros(self._bs + 1, dtype=np.int32)
        self._keys_host = torch.from_numpy(self._offsets_host), torch.from_numpy(self._lengths_host)
        self._layout: list[int] = []  # plan information that the graph is captured with
        self._check = ChunkCheck(staging.counts) if DFlashOptions.CHECK_PLANS.get() else None
        self.least: list[int] = []  # bounds of the keys of each request in the next plan
        self.most: list[int] = []

    def prepare(self, forward_batch: Any) -> None:
        """Write offsets and key indices where the graph reads them, and plan.

        `forward_batch` is padded to the graph's batch size.
        """
        spec_info = forward_batch.spec_info
        layout = spec_info.ragged_verify_layout
        if layout is not None:
            self._counts = layout.counts
            np.cumsum(layout.counts, out=self._queries_host.numpy()[1:])
        # The host's bounds are for the most queries of a request. A lane that pads the batch has the keys of
        # its block too, which the host's length leaves out.
        self.most = [
            n + count - (0 if n == _PADDING_LENGTH else spec_info.draft_token_num)
            for n, count in zip(forward_batch.seq_lens_cpu.tolist(), self._counts, strict=True)
        ]
        self.least = self.most.copy()
        for lane, below in enumerate(spec_info.spread or ()):
            self.least[lane] -= below
        self.keys.write(forward_batch, sum(self.most))
        self._choose_plan()

    def _choose_plan(self) -> None:
        if not self._layout:
            # FlashInfer's search fills the grid of one wave. A graph's own may be larger: for whole blocks
            # only if nothing fits into a wave, for other rows always.
            self._capacity = 0 if self._num_queries else self._probe()
            self._layout, _ = self._plan(self.most, None)
            return
        group, tile = self._heads[0] // self._heads[1], self._layout[_CTA_TILE_Q]
        tiles = [-(-count * group // tile) for count in self._counts]
        capacity = self._capacity or self._layout[_PADDED_BATCH_SIZE]
        choice = choose_chunk(self.least, self.most, tiles, capacity)
        if choice is not None:
            layout, chunk = self._plan(choice.lengths, choice.fixed_chunk)
            self._staging.counts.add("plans")
        if choice is None or layout != self._layout or not holds(chunk, self.least, self.most):
            self.most = self.least = self.keys.offsets.diff().cpu().tolist()
            reason = f"no plan holds for every length within the bounds ({choice})"
            self._staging.counts.add("exact_plans", reason)
            layout, chunk = self._plan(self.most, None)
            assert layout == self._layout, "FlashInfer's layout of a graph's plans has changed"
        if self._check is not None:
            self._check.start(self.keys.offsets, self.most, chunk)

    def _probe(self) -> int:
        """Return how many blocks of the kernel run at a time.

        That is the grid of one request with one row.
        """
        one = torch.tensor([0, 1], dtype=torch.int32)
        information = self._run_plan(
            self._staging.next(),
            on_host=(one, one, one[1:]),
            num_rows=1,
            bs=1,
            fixed_chunk=-1,
            num_queries=1,
        )
        self._staging.on_planned()
        return int(information[_PADDED_BATCH_SIZE])

    def _plan(self, lengths: Sequence[int], fixed_chunk: int | None) -> tuple[list[int], int]:
        """Plan with FlashInfer for each request's keys. Return the layout and the chosen chunk."""
        staging = self._staging.next()
        self._lengths_host[:] = lengths
        np.cumsum(self._lengths_host, out=self._offsets_host[1:])
        on_host = self._queries_host, *self._keys_host
        information = self._run_plan(
            staging,
            on_host=on_host,
            num_rows=self._num_rows,
            bs=self._bs,
            fixed_chunk=fixed_chunk or -1,
            num_queries=self._num_queries,
        )
        self._staging.on_planned()
        self.wrapper._plan_info = information
        layout = [int(number) for number in information]
        start = layout[_CHUNK_OFFSET]
        chunk_host = staging.numpy()[start : start + 4].view(np.int32)
        return layout, int(chunk_host[0])

    def _run_plan(
        self,
        staging: torch.Tensor,
        on_host: tuple[torch.Tensor, ...],
        num_rows: int,
        bs: int,
        fixed_chunk: int,
        num_queries: int,
    ) -> Sequence[int]:
        """Call FlashInfer's plan.

        `on_host` holds offsets of queries, offsets of keys, and lengths. `num_queries` are those of every
        request, or 0 if the numbers differ.
        """
        wrapper = self.wrapper
        return wrapper._cached_module.plan(
            wrapper._float_workspace_buffer,
            wrapper._int_workspace_buffer,
            staging,
            *on_host,
            num_rows,
            bs,
            *self._heads[:2],
            1,  # page size
            True,  # for a CUDA graph
            self._heads[2],
            self._heads[2],
            False,  # the mask is chosen when the kernel is launched
            -1,  # no window
            fixed_chunk,
            False,  # chunks are not disabled
            0,  # no other kernel shares the device
            num_queries,
        )


class ChunkCheck:
    """Compares planned chunk counts with the device's, some cycles late."""

    def __init__(self, counts: PlanCounts):
        self._counts = counts
        self._unread: deque[tuple[Any, torch.Tensor, list[int]]] = deque()

    def start(self, kv_indptr: torch.Tensor, lengths: Sequence[int], chunk: int) -> None:
        """Copy the device's lengths to the host, and compare those that have arrived.

        Args:
            kv_indptr: [bs + 1] int32.
            lengths: upper bounds of the keys of each request.
            chunk: as planned.

        Raises:
            RuntimeError: an earlier plan was wrong.
        """
        self._compare()
        device = kv_indptr.device
        arrived = torch.empty(len(lengths), dtype=torch.int32, pin_memory=device.type == "cuda")
        arrived.copy_(kv_indptr.diff(), non_blocking=True)
        copied = torch.get_device_module(device).Event()
        copied.record()
        planned = [num_chunks(length, chunk) for length in lengths]
        self._unread.append((copied, arrived, [chunk, *planned]))

    def _compare(self) -> None:
        while self._unread and (len(self._unread) > _MOST_UNREAD_CHECKS or self._unread[0][0].query()):
            copied, arrived, (chunk, *planned) = self._unread.popleft()
            copied.synchronize()
            found = [num_chunks(length, chunk) for length in arrived.tolist()]
            if found != planned:
                raise RuntimeError(
                    f"DFLASH: FlashInfer was planned for {planned} chunks of {chunk} keys, and the device "
                    f"found {found}: its output was wrong. Please report this."
                )
            self._counts.add("checked_plans")


def _add_plan(backend: Any, forward_batch: Any, size: int) -> None:
    """Make the plan of the graph of this size, which is being captured."""
    spec_info, updater = forward_batch.spec_info, backend.indices_updater_prefill
    [wrapper] = backend.prefill_cuda_graph_metadata[forward_batch.batch_size]
    if not hasattr(backend, "dflash_plans"):
        workspace = wrapper._int_workspace_buffer
        backend.dflash_plans = {}
        backend.dflash_staging = Staging(workspace.numel(), workspace.device, backend.shared.counts)
    num_queries = spec_info.draft_token_num if spec_info.ragged_verify_layout is None else 0
    backend.dflash_plans[size] = FlashInferBlockPlan(
        wrapper,
        num_queries=num_queries,
        num_rows=forward_batch.positions.numel(),
        heads=(updater.num_qo_heads, updater.num_kv_heads, updater.head_dim),
        keys=backend.shared.keys_of(wrapper, num_queries, backend.kv_index_translator),
        staging=backend.dflash_staging,
    )
