"""FlashInfer plans of blocks, made before the host knows exact lengths.

FlashInfer plans a forward on the host. If the host waits for exact lengths, the device idles meanwhile. Here
a plan is made from bounds of the lengths instead (`kv_chunks.py`). The device's own lengths decide what a
captured kernel reads.

This covers CUDA graphs of one wrapper. Everything else keeps FlashInfer's own plan, which waits: batches
beyond the captured sizes, and layouts of two wrappers (sliding windows).
"""

import functools
import inspect
import logging
import weakref
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sglang_dflash.kernels.ops.speculative.block import pack_blocks
from sglang_dflash.srt.environ import DFlashOptions
from sglang_dflash.srt.layers.attention.kv_chunks import choose_chunk, holds, num_chunks

logger = logging.getLogger(__name__)

# SGLang's length of a lane that pads a batch, on the host and on the device.
_PADDING_LENGTH = 1
# Positions in FlashInfer's plan information.
_PADDED_BATCH_SIZE, _CTA_TILE_Q, _CHUNK_OFFSET = 0, 3, 9
# Attribute of our `init_forward_metadata_out_graph`. An SGLang that the change does not fit keeps its own.
_MARK = "plans_within_bounds"
# Cycles after which a check of chunk counts is waited for.
_MOST_UNREAD_CHECKS = 8


def accepts_bounds(backend: Any) -> bool:
    """Tell whether a backend plans with upper bounds of lengths, or with none."""
    if not getattr(backend, "needs_cpu_seq_lens", True):
        return True
    parts = getattr(backend, "full_attn_backend", None), getattr(backend, "linear_attn_backend", None)
    if None not in parts:  # a hybrid target
        return all(map(accepts_bounds, parts))
    return _plans_blocks(backend)


def _plans_blocks(backend: Any) -> bool:
    from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend

    return (
        type(backend) is FlashInferAttnBackend
        and hasattr(FlashInferAttnBackend.init_forward_metadata_out_graph, _MARK)
        and backend.dispatch_reason is None
        and backend.prefill_backend == "fa2"
        and not backend.use_sliding_window_kv_pool
        and not backend.is_nvfp4_kvcache
    )


def plans_blocks(backend: Any) -> bool:
    """Tell whether the plans of a backend's CUDA graphs are made here."""
    return _plans_blocks(getattr(backend, "full_attn_backend", backend))


def count_cycle_without_graph(num_requests: int) -> None:
    """Count a cycle that no CUDA graph could run, for which FlashInfer's own plans wait."""
    counts.add("cycles_without_graph", f"no CUDA graph was captured for a batch of {num_requests} requests")


def planning_within_bounds():
    """Wrap `init_forward_metadata_out_graph` to plan blocks within bounds of their lengths.

    `spec_info.spread` has, per request, by how much the host's length may exceed the device's.
    """
    from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend

    original = inspect.unwrap(FlashInferAttnBackend.init_forward_metadata_out_graph)

    @functools.wraps(original)
    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False):
        spec_info = forward_batch.spec_info
        is_block = (
            forward_batch.forward_mode.is_target_verify()
            and hasattr(spec_info, "spread")
            and spec_info.custom_mask is None
            and _plans_blocks(self)
        )
        if not is_block:
            return original(self, forward_batch, in_capture)
        if in_capture:
            # FlashInfer's own plan selects the kernel. The graph is captured with ours.
            original(self, forward_batch, in_capture=True)
            _add_plan(self, forward_batch)
        self.dflash_plans[forward_batch.batch_size].prepare(forward_batch)

    setattr(init_forward_metadata_out_graph, _MARK, True)
    return init_forward_metadata_out_graph


class Staging:
    """Two pinned buffers for the plans of one backend, used in turn.

    FlashInfer writes a plan to pinned memory and copies it asynchronously. The copy runs behind all earlier
    work of the stream, so the buffer may be overwritten only after it. SGLang processes a step before it
    launches the next but one. So with two buffers the copy is over, and the host does not wait here.
    """

    def __init__(self, num_bytes: int, device: torch.device):
        is_cuda = device.type == "cuda"
        self._buffers = [torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_cuda) for _ in range(2)]
        self._copied = [torch.get_device_module(device).Event() for _ in range(2)]
        self._turn = 0

    def next(self) -> torch.Tensor:
        """Return the buffer for the next plan. [num_bytes] uint8, on the host"""
        self._turn = 1 - self._turn
        copied = self._copied[self._turn]
        if not copied.query():
            counts.add("waits_for_a_buffer", "the plan before the last is still being copied")
            copied.synchronize()
        return self._buffers[self._turn]

    def on_planned(self) -> None:
        """Note that the copy of the latest buffer is launched."""
        self._copied[self._turn].record()


class PlanCounts:
    """Counts of plans, and of exceptions. Each kind of exception is logged once."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, kind: str, reason: str = "") -> None:
        """Count an event. reason: why the host waits for the device, for the log."""
        if reason and not self._counts[kind]:
            logger.warning("DFLASH: the host waits for the device before it plans: %s.", reason)
        self._counts[kind] += 1

    def report(self) -> dict[str, int]:
        """Return the counts for `/server_info`."""
        return dict(self._counts)


# A process has one worker.
counts = PlanCounts()


class BlockKeys:
    """Offsets and key indices of blocks, in the memory from which captured graphs read them.

    The draft's and the verify graph of a cycle share them if both have as many rows and read one request
    table. The cycle's first graph has them written.

    Args:
        wrapper: FlashInfer's paged prefill wrapper, whose buffers become these.
        width: queries of each request.
        translator: SGLang's `KVIndexTranslator` of the wrapper's backend.
    """

    def __init__(self, wrapper: Any, width: int, translator: Any):
        self._width, self._translator = width, translator
        # SGLang 0.5.22 has no such arguments.
        self._takes_sizes = "num_token_blocks" in inspect.signature(translator.pack_read_stream).parameters
        self._bs = wrapper._fixed_batch_size
        self._offsets = wrapper._paged_kv_indptr_buf, wrapper._qo_indptr_buf
        assert all(len(offsets) == self._bs + 1 for offsets in self._offsets)
        self._indices = wrapper._paged_kv_indices_buf
        self._lengths = wrapper._paged_kv_indptr_buf.new_empty(self._bs, dtype=torch.int64)
        self._written: Any = None  # SGLang's plan of the cycle whose keys these are

    @property
    def offsets(self) -> torch.Tensor:
        """Offsets of each request's keys. [bs + 1] int32"""
        return self._offsets[0]

    def share_with(self, wrapper: Any, width: int, translator: Any) -> bool:
        """Have another wrapper read these, before its graph is captured.

        False: its keys are others.
        """
        mine = self._translator
        if (
            (width, wrapper._fixed_batch_size) != (self._width, self._bs)
            or translator.req_to_token is not mine.req_to_token
            or translator.reads_are_translated
            or mine.reads_are_translated
            or len(wrapper._paged_kv_indices_buf) > len(self._indices)
        ):
            return False
        wrapper._paged_kv_indptr_buf, wrapper._qo_indptr_buf = self._offsets
        wrapper._paged_kv_indices_buf = self._indices
        return True

    def write(self, forward_batch: Any, num_keys: int) -> None:
        """Write the keys of a forward, unless the cycle's earlier forward has.

        forward_batch: padded to bs requests. num_keys: at least the keys of all of them.
        """
        plan = forward_batch.kv_loc_plan
        if plan is not None and plan is self._written:
            return
        self._written = plan
        pack_blocks(forward_batch.seq_lens[: self._bs], self._width, (self._lengths, *self._offsets))
        self._translator.pack_read_stream(
            plan,
            req_pool_indices=forward_batch.req_pool_indices[: self._bs],
            seq_lens=self._lengths,
            indptr=self._offsets[0],
            # The upper bounds of the lengths may exceed the buffer, the keys do not.
            out=self._indices[:num_keys],
            # Several programs for each request if contexts are long.
            **({"num_token_blocks": None, "kv_lens_sum": num_keys} if self._takes_sizes else {}),
        )


class BlockPlan:
    """Preparation of a captured graph of blocks for a replay.

    It replaces SGLang's updater of the graph's wrapper. The offsets of queries and the last page lengths are
    constant. The capture's first plan wrote them.

    Args:
        wrapper: FlashInfer's paged prefill wrapper, which has been planned once.
        width: queries of each request.
        heads: of queries, of keys, and their dimension.
        keys: offsets and key indices, which the wrapper reads.
        staging: buffers of the backend.

    Attributes:
        wrapper, keys: as given.
        least, most: [bs], bounds of the keys of each request in the next plan.
    """

    def __init__(
        self, wrapper: Any, width: int, heads: tuple[int, int, int], keys: BlockKeys, staging: Staging
    ):
        self.wrapper, self._width, self._heads = wrapper, width, heads
        self.keys, self._staging = keys, staging
        self._bs = wrapper._fixed_batch_size
        self._queries_host = torch.arange(0, (self._bs + 1) * width, width, dtype=torch.int32)
        # FlashInfer reads them before its plan returns, so every plan may use the same memory.
        self._lengths_host = np.zeros(self._bs, dtype=np.int32)
        self._offsets_host = np.zeros(self._bs + 1, dtype=np.int32)
        self._keys_host = torch.from_numpy(self._offsets_host), torch.from_numpy(self._lengths_host)
        self._layout: list[int] | None = None  # plan information that the graph is captured with
        self._check = ChunkCheck() if DFlashOptions.CHECK_PLANS.get() else None
        self.least: list[int] = []
        self.most: list[int] = []

    def prepare(self, forward_batch: Any) -> None:
        """Write offsets and key indices where the graph reads them, and plan.

        forward_batch: padded to the graph's batch size.
        """
        self.expect(forward_batch.seq_lens_cpu.tolist(), forward_batch.spec_info.spread)
        self.keys.write(forward_batch, sum(self.most))
        self._choose_plan()

    def expect(self, lengths: Sequence[int], spread: Sequence[int] | None) -> None:
        """Set the bounds of the next plan.

        Args:
            lengths: [bs], upper bounds of the keys of each request.
            spread: by how much a length may be below its bound, for the first lanes. None: the lengths are
                exact.
        """
        # A lane that pads the batch has the keys of its block too, which the host's length leaves out.
        self.most = [n + self._width if n == _PADDING_LENGTH else n for n in lengths]
        self.least = self.most.copy()
        for lane, below in enumerate(spread or ()):
            self.least[lane] -= below

    def _choose_plan(self) -> None:
        if self._layout is None:
            self._layout, _ = self._plan(self.most, None)
            return
        tiles = -(-self._width * (self._heads[0] // self._heads[1]) // self._layout[_CTA_TILE_Q])
        choice = choose_chunk(self.least, self.most, tiles, self._layout[_PADDED_BATCH_SIZE])
        if choice is not None:
            layout, chunk = self._plan(choice.lengths, choice.fixed_chunk)
            counts.add("plans")
        if choice is None or layout != self._layout or not holds(chunk, self.least, self.most):
            self.most = self.least = self.keys.offsets.diff().cpu().tolist()
            counts.add("exact_plans", f"no plan holds for every length within the bounds ({choice})")
            layout, chunk = self._plan(self.most, None)
            assert layout == self._layout, "FlashInfer's layout of a graph's plans has changed"
        if self._check is not None:
            self._check.start(self.keys.offsets, self.most, chunk)

    def _plan(self, lengths: Sequence[int], fixed_chunk: int | None) -> tuple[list[int], int]:
        """Have FlashInfer plan, and return its layout and the chunk that it has chosen.

        lengths: keys of each request.
        """
        wrapper, staging = self.wrapper, self._staging.next()
        self._lengths_host[:] = lengths
        np.cumsum(self._lengths_host, out=self._offsets_host[1:])
        information = wrapper._cached_module.plan(
            wrapper._float_workspace_buffer,
            wrapper._int_workspace_buffer,
            staging,
            self._queries_host,
            *self._keys_host,
            self._bs * self._width,
            self._bs,
            *self._heads[:2],
            1,  # page size
            True,  # for a CUDA graph
            self._heads[2],
            self._heads[2],
            False,  # the mask is chosen when the kernel is launched
            -1,  # no window
            fixed_chunk or -1,
            False,  # chunks are not disabled
            0,  # no other kernel shares the device
            self._width,  # every request has as many queries
        )
        self._staging.on_planned()
        wrapper._plan_info = information
        layout = [int(number) for number in information]
        start = layout[_CHUNK_OFFSET]
        chunk_host = staging.numpy()[start : start + 4].view(np.int32)
        return layout, int(chunk_host[0])


class ChunkCheck:
    """Compares planned chunk counts with the device's, some cycles late."""

    def __init__(self) -> None:
        self._unread: deque[tuple[Any, torch.Tensor, list[int]]] = deque()

    def start(self, kv_indptr: torch.Tensor, lengths: Sequence[int], chunk: int) -> None:
        """Copy the device's lengths to the host, and compare those that have arrived.

        kv_indptr: [bs + 1] int32. lengths: upper bounds of the keys of each request. chunk: as planned.
        Raises RuntimeError if an earlier plan was wrong.
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
            counts.add("checked_plans")


# Of the graphs captured so far, of the target's and the draft's backends.
_captured_keys: weakref.WeakSet[BlockKeys] = weakref.WeakSet()


def _keys_of(wrapper: Any, width: int, translator: Any) -> BlockKeys:
    """Return the keys that a wrapper reads: those of another model's graph, or its own."""
    for keys in _captured_keys:
        if keys.share_with(wrapper, width, translator):
            return keys
    keys = BlockKeys(wrapper, width, translator)
    _captured_keys.add(keys)
    return keys


def _add_plan(backend: Any, forward_batch: Any) -> None:
    """Make the plan of the graph that is being captured."""
    bs, updater = forward_batch.batch_size, backend.indices_updater_prefill
    [wrapper] = backend.prefill_cuda_graph_metadata[bs]
    if not hasattr(backend, "dflash_plans"):
        workspace = wrapper._int_workspace_buffer
        backend.dflash_plans = {}
        backend.dflash_staging = Staging(workspace.numel(), workspace.device)
    width = forward_batch.spec_info.draft_token_num
    backend.dflash_plans[bs] = BlockPlan(
        wrapper,
        width,
        (updater.num_qo_heads, updater.num_kv_heads, updater.head_dim),
        _keys_of(wrapper, width, backend.kv_index_translator),
        backend.dflash_staging,
    )
