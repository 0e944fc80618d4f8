"""SGLang's layers without a server, for unit tests: one process, float32, on the CPU.

A model of SGLang needs a published configuration, process groups and, in its forward, an attention backend
with its pools. `start` gives the first two once per process. `Pools` gives the rest, with scattered slots.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import sglang  # noqa: F401  loads our platform plugin, which readies a machine without a GPU
import torch
from serving import TARGET
from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.utils.hf_transformers_utils import get_config

from sglang_dflash.srt import environ
from sglang_dflash.srt.hardware_backend.cpu.attention import TorchNativeSpecAttnBackend
from sglang_dflash.srt.speculative.dflash_info import DFlashVerifyInput


def start(rank: int = 0, world_size: int = 1, store: torch.distributed.Store | None = None) -> None:
    """Publish a configuration and create SGLang's process groups, once per process.

    world_size: tensor-parallel ranks, each a process that calls this with the same `store`. Skips the test
    if the CPU runtime is off: SGLang's layers then pick CUDA kernels, whatever device holds the data.
    """
    if not environ.serves_on_stand_in():
        pytest.skip("SGLang's layers run on CPU tensors only where the CPU runtime is active")
    if torch.distributed.is_initialized():
        return
    args = ServerArgs(
        model_path=str(TARGET),
        device="cpu",
        dtype="float32",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        max_total_tokens=4096,
        tp_size=world_size,
    )
    publish(args, role="test", ranks=SpawnRanks(world_rank=rank))
    store = store or torch.distributed.HashStore()
    torch.distributed.init_process_group(backend="gloo", store=store, rank=rank, world_size=world_size)
    init_distributed_environment(world_size=world_size, rank=rank, local_rank=rank, backend="gloo")
    initialize_model_parallel(backend="gloo")


def read_config(config: dict, folder: Path):
    """Read a config.json as SGLang does."""
    (folder / "config.json").write_text(json.dumps(config))
    return get_config(str(folder), trust_remote_code=False)


def build(model_class: type, hf_config, weights: Iterable[tuple[str, torch.Tensor]]) -> torch.nn.Module:
    """Build a model in float32, with weights loaded as SGLang's loader does."""
    start()
    model = model_class(hf_config).eval()
    DefaultModelLoader.load_weights_and_postprocess(model, weights, torch.device("cpu"))
    return model


class Pools:
    """Request table, KV pool and attention backend: a ModelRunner without its model.

    Every request gets separate slots for `capacity` tokens: whole pages, in random order. Unwritten slots
    hold NaN, so that reading one spoils the result. Slot 0 is SGLang's padding slot, which a request may
    read and mask.
    """

    device = "cpu"

    def __init__(
        self,
        requests: int,
        capacity: int,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        page_size: int = 1,
        seed: int = 0,
        backend: type = TorchNativeSpecAttnBackend,
    ):
        start()
        pages = -(-capacity // page_size)
        self.req_to_token_pool = ReqToTokenPool(
            2 * requests, pages * page_size, self.device, enable_memory_saver=False
        )
        self.token_to_kv_pool = MHATokenToKVPool(
            2 * requests * pages * page_size,
            page_size,
            torch.float32,
            kv_heads,
            head_dim,
            layers,
            self.device,
            enable_memory_saver=False,
        )
        for buffer in (*self.token_to_kv_pool.k_buffer, *self.token_to_kv_pool.v_buffer):
            buffer[1:] = torch.nan
        generator = torch.Generator().manual_seed(seed)
        self.rows = 1 + torch.randperm(2 * requests, generator=generator)[:requests]
        page_ids = 1 + torch.randperm(2 * requests * pages - 1, generator=generator)[: requests * pages]
        slots = page_ids[:, None] * page_size + torch.arange(page_size)
        self.req_to_token_pool.req_to_token[self.rows] = slots.view(requests, -1).int()
        self.backend = backend(self)

    @classmethod
    def of_draft(cls, draft: torch.nn.Module, requests: int, capacity: int, **options: Any) -> "Pools":
        """Make the pools of a draft's layers on this rank."""
        attention = draft.layers[0].self_attn
        shape = {"kv_heads": attention.num_kv_heads, "head_dim": attention.head_dim}
        return cls(requests, capacity, layers=len(draft.layers), **shape, **options)

    def slots(self, request: int, start: int, stop: int) -> torch.Tensor:
        """Return the pool slots of a request's positions start..stop-1, int64."""
        return self.req_to_token_pool.req_to_token[self.rows[request], start:stop].long()

    def blocks(
        self, tokens: torch.Tensor, seq_lens: Sequence[int], requests: Sequence[int] | None = None
    ) -> ForwardBatch:
        """Build a TARGET_VERIFY batch as the worker does.

        Tokens [bs, B] are at positions seq_lens[i] .. seq_lens[i]+B-1.
        """
        requests = range(len(seq_lens)) if requests is None else requests
        width = tokens.shape[1]
        lengths = torch.tensor(seq_lens)
        out = torch.cat([self.slots(r, n, n + width) for r, n in zip(requests, seq_lens, strict=True)])
        return ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=len(seq_lens),
            input_ids=tokens.flatten(),
            req_pool_indices=self.rows[list(requests)],
            seq_lens=lengths,
            out_cache_loc=out,
            seq_lens_sum=int(lengths.sum()) + tokens.numel(),
            seq_lens_cpu=lengths + width,
            positions=(lengths[:, None] + torch.arange(width)).flatten(),
            spec_algorithm=SpeculativeAlgorithm.DFLASH,
            spec_info=DFlashVerifyInput(draft_token_num=width, capture_hidden_mode=CaptureHiddenMode.FULL),
            capture_hidden_mode=CaptureHiddenMode.FULL,
            global_num_token_non_padded_cpu=tokens.numel(),
        )

    def extend(
        self, prompts: Sequence[Sequence[int]], prefix_lens: Sequence[int] | None = None
    ) -> ForwardBatch:
        """Build a prefill batch; prefix_lens[i] tokens of prompt i are in the pool already."""
        prefix = [0] * len(prompts) if prefix_lens is None else list(prefix_lens)
        new = [list(prompt)[n:] for prompt, n in zip(prompts, prefix, strict=True)]
        lengths, extends = torch.tensor([len(p) for p in prompts]), torch.tensor([len(n) for n in new])
        where = [(r, n, len(prompts[r])) for r, n in enumerate(prefix)]
        return ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=len(prompts),
            input_ids=torch.tensor([token for tokens in new for token in tokens]),
            req_pool_indices=self.rows[: len(prompts)],
            seq_lens=lengths,
            out_cache_loc=torch.cat([self.slots(*w) for w in where]),
            seq_lens_sum=int(lengths.sum()),
            seq_lens_cpu=lengths,
            positions=torch.cat([torch.arange(start, stop) for _, start, stop in where]),
            extend_num_tokens=int(extends.sum()),
            extend_seq_lens=extends,
            extend_prefix_lens=torch.tensor(prefix),
            extend_start_loc=extends.cumsum(0) - extends,
            extend_prefix_lens_cpu=prefix,
            extend_seq_lens_cpu=extends.tolist(),
            capture_hidden_mode=CaptureHiddenMode.FULL,
            spec_algorithm=SpeculativeAlgorithm.DFLASH,
            global_num_token_non_padded_cpu=int(extends.sum()),
        )

    def forward(self, model: torch.nn.Module, batch: ForwardBatch):
        """Run a model on a batch, as the model runner does."""
        with torch.no_grad(), forward_context(ForwardContext(attn_backend=self.backend)):
            self.backend.init_forward_metadata(batch)
            return model(batch.input_ids, batch.positions, batch)
