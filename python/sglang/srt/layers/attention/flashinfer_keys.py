"""Keys of blocks, where the CUDA graphs of FlashInfer read them."""

import inspect
from typing import Any

import torch

from sglang_dflash.kernels.ops.speculative.block import block_offsets


class BlockKeys:
    """Offsets and key indices of blocks, in the memory from which captured graphs read them.

    The draft's and the verify graph of a cycle share them if both have as many rows and read one request
    table. The cycle's first graph has them written.

    Args:
        wrapper: FlashInfer's paged prefill wrapper, whose buffers become these.
        num_queries: of each request. 0: every forward has another layout.
        translator: SGLang's `KVIndexTranslator` of the wrapper's backend.

    Attributes:
        offsets: [bs + 1] int32, of each request's keys.
    """

    def __init__(self, wrapper: Any, num_queries: int, translator: Any):
        self._num_queries, self._translator = num_queries, translator
        # SGLang 0.5.22 has no such arguments.
        self._takes_sizes = "num_token_blocks" in inspect.signature(translator.pack_read_stream).parameters
        self._bs = wrapper._fixed_batch_size
        self.offsets, self._queries = wrapper._paged_kv_indptr_buf, wrapper._qo_indptr_buf
        assert len(self.offsets) == len(self._queries) == self._bs + 1
        self._indices = wrapper._paged_kv_indices_buf
        self._lengths = self.offsets.new_empty(self._bs, dtype=torch.int64)
        self._written: Any = None  # SGLang's plan of the cycle whose keys these are

    def share_with(self, wrapper: Any, num_queries: int, translator: Any) -> bool:
        """Have another wrapper read these, before its graph is captured.

        False: its keys are others.
        """
        mine = self._translator
        if (
            not num_queries
            or (num_queries, wrapper._fixed_batch_size) != (self._num_queries, self._bs)
            or translator.req_to_token is not mine.req_to_token
            or translator.reads_are_translated
            or mine.reads_are_translated
            or len(wrapper._paged_kv_indices_buf) > len(self._indices)
        ):
            return False
        wrapper._paged_kv_indptr_buf, wrapper._qo_indptr_buf = self.offsets, self._queries
        wrapper._paged_kv_indices_buf = self._indices
        return True

    def write(self, forward_batch: Any, num_keys: int) -> None:
        """Write the keys of a forward, unless the cycle's earlier forward has.

        Args:
            forward_batch: padded to bs requests.
            num_keys: at least the keys of all requests.
        """
        plan = forward_batch.kv_loc_plan
        if plan is not None and plan is self._written:
            return
        self._written = plan
        layout = forward_batch.spec_info.ragged_verify_layout
        block_offsets(
            forward_batch.seq_lens[: self._bs],
            self._num_queries,
            (self._lengths, self.offsets, self._queries),
            None if layout is None else layout.verify_lens,
        )
        self._translator.pack_read_stream(
            plan,
            req_pool_indices=forward_batch.req_pool_indices[: self._bs],
            seq_lens=self._lengths,
            indptr=self.offsets,
            # The upper bounds of the lengths may exceed the buffer, the keys do not.
            out=self._indices[:num_keys],
            # Several programs for each request if contexts are long.
            **({"num_token_blocks": None, "kv_lens_sum": num_keys} if self._takes_sizes else {}),
        )
