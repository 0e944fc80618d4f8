"""How many requests of Qwen3.8-27B a GPU runs at once, and with how many KV tokens, by SGLang's own sizing.

Each running request of a target with GatedDeltaNet layers holds recurrent states, and copies of them while a
block is verified. SGLang divides the memory that is left beside the weights between states and KV. This
script asks its code for the division, with a pretended GPU. No weights are needed, and no GPU.

    python benchmark/state_memory.py                # the tables of docs/qwen3_5.md

Weights are counted from the shapes. What CUDA itself takes is assumed (CONTEXT_GIB).
"""

import argparse
import contextlib
import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from shapes import QWEN3_8_27B

CONTEXT_GIB = 0.8
BLOCK = QWEN3_8_27B.block_size
GPUS = {"H100": 79.6, "H200": 139.8}  # GiB, as CUDA reports them
# Parameters, by test_published_shape.py. Every rank has the second part of the draft's whole.
TARGET, DRAFT, DRAFT_WHOLE, VISION = 26.9e9, 1.92e9, 0.325e9, 0.46e9


@dataclass(frozen=True)
class Server:
    """One server: its GPU, flags and the bytes of a target's parameter.

    is_built_in: of SGLang alone, with its own DFLASH.
    """

    gpu: str
    flags: tuple[str, ...] = ()
    bytes_per_parameter: float = 2.0
    speculates: bool = True
    tp_size: int = 1
    is_built_in: bool = False

    def with_flags(self, *flags: str) -> "Server":
        return replace(self, flags=(*self.flags, *flags))

    def free_gib(self) -> float:
        """Return what is left beside the weights."""
        weights = (TARGET * self.bytes_per_parameter + VISION * 2) / self.tp_size
        if self.speculates:
            weights += 2 * (DRAFT_WHOLE + (DRAFT - DRAFT_WHOLE) / self.tp_size)
        return GPUS[self.gpu] - CONTEXT_GIB - weights / 2**30


@dataclass(frozen=True)
class Sizes:
    """What SGLang gives a server. Sizes are in bytes."""

    requests: int
    kv_tokens: int
    state_slots: int
    state_bytes: int
    ring_bytes: int
    kv_bytes_per_token: int


def sizes(server: Server, folder: Path) -> Sizes:
    """Ask SGLang in a separate process, as a process has one configuration."""
    if server.is_built_in:
        with (
            mock.patch.dict(os.environ, SGLANG_PLUGINS="none"),
            ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool,
        ):
            return pool.submit(_sizes, server, folder).result()
    import sglang.srt.mem_cache.kv_cache_configurator  # noqa: F401 (every fork needs it)
    from sglang.srt.plugins import load_plugins

    load_plugins()
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        return pool.submit(_sizes, server, folder).result()


def _sizes(server: Server, folder: Path) -> Sizes:
    from sglang.srt.arg_groups import mamba_hook
    from sglang.srt.mem_cache import kv_cache_configurator
    from sglang.srt.model_executor.pool_configurator import create_memory_pool_configurator
    from sglang.srt.runtime_context import SpawnRanks, get_schedule, publish
    from sglang.srt.server_args import prepare_server_args

    os.environ["TRITON_INTERPRET"] = "1"  # else ReplaySSM is turned off on a machine without a GPU
    arguments = ["--model-path", str(folder / "target"), "--skip-tokenizer-init", "--dtype", "bfloat16"]
    arguments += ["--load-format", "dummy"]  # there are configs alone
    arguments += ["--tp-size", str(server.tp_size), "--mem-fraction-static", "0.9", *server.flags]
    if server.speculates:
        arguments += ["--speculative-algorithm", "DFLASH"]
        arguments += ["--speculative-draft-model-path", str(folder / "draft")]
    if server.is_built_in:  # it refuses a CPU
        arguments += ["--device", "cuda", "--attention-backend", "triton"]
        mamba_hook._platform_supports_mamba_cache_extra_buffer = lambda: True
    server_args = prepare_server_args(arguments)
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    with _pretended(kv_cache_configurator, server):
        configurator = _pool_configurator(server_args)
        config = configurator._resolve_memory_pool_config(GPUS[server.gpu] - CONTEXT_GIB)
        states = configurator.mambaish_config.mamba2_cache_params
        kv_bytes_per_token = create_memory_pool_configurator(configurator)._cell_size
        return Sizes(
            requests=config.max_running_requests,
            kv_tokens=config.max_total_num_tokens,
            state_slots=get_schedule().max_mamba_cache_size,
            state_bytes=states.mamba_cache_per_req,
            ring_bytes=states.replayssm_ring_bytes_per_req(record_len=server_args.linear_replayssm_cache_len),
            kv_bytes_per_token=kv_bytes_per_token,
        )


def _pool_configurator(server_args):
    """Build SGLang's own sizing of pools, without a model."""
    from sglang.srt.arg_groups.model_override_base import resolved_view
    from sglang.srt.configs.model_config import AttentionArch, ModelConfig
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.mem_cache.kv_cache_dtype import configure_kv_cache_dtype
    from sglang.srt.model_executor.model_runner_components.layer_setup import resolve_layer_indices
    from sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state import (
        resolve_spec_aux_hidden_state_config,
    )
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    args, model = resolved_view(server_args), ModelConfig.from_server_args(server_args)
    algorithm = SpeculativeAlgorithm.from_string(args.speculative_algorithm)
    _, kv_dtype = configure_kv_cache_dtype(
        server_args_kv_cache_dtype=args.kv_cache_dtype,
        model=None,
        model_dtype=model.dtype,
        is_draft_worker=False,
        is_dflash=True,
        speculative_draft_attention_backend=args.speculative_draft_attention_backend,
    )
    role = {"server_args": server_args, "spec_algorithm": algorithm, "is_draft_worker": False}
    return KVCacheConfigurator(
        device="cpu",
        gpu_id=0,
        attn_dp_size=get_parallel().attn_dp_size,
        pp_size=1,
        pp_group=None,
        model=None,
        model_config=model,
        kv_cache_dtype=kv_dtype,
        model_dtype=model.dtype,
        page_size=args.page_size,
        sliding_window_size=model.sliding_window_size,
        post_capture_kv_active=False,
        spec_aux_config=resolve_spec_aux_hidden_state_config(model_config=model, **role),
        is_hybrid_swa=model.is_hybrid_swa,
        is_hybrid_swa_compress=False,
        use_mla_backend=model.attention_arch == AttentionArch.MLA,
        layer_info=resolve_layer_indices(model=None, model_config=model, is_draft_worker=False),
        forward_stream=None,
        req_to_token_pool=None,
        token_to_kv_pool_allocator=None,
        memory_pool_config=None,
        **role,
    )


@contextlib.contextmanager
def _pretended(module, server: Server) -> Iterator[None]:
    """Let SGLang find the server's GPU, without process groups."""
    from sglang.srt.runtime_context import get_parallel

    groups = SimpleNamespace(cpu_group=None, world_size=1)
    free = mock.patch.object(module, "get_available_gpu_memory", lambda *_, **__: server.free_gib())
    with free, get_parallel().override(world_group=groups):
        yield


REPLAY, LAZY = "--enable-linear-replayssm-spec", ("--mamba-radix-cache-strategy", "extra_buffer_lazy")
FLAGS = {
    "(defaults)": (),
    "`--mamba-ssm-dtype bfloat16`": ("--mamba-ssm-dtype", "bfloat16"),
    f"`{REPLAY}`": (REPLAY,),
    f"`{REPLAY} --max-running-requests 16`": (REPLAY, "--max-running-requests", "16"),
    f"`{REPLAY} {' '.join(LAZY)}`": (REPLAY, *LAZY),
}
COLUMNS = {
    "H100": Server("H100"),
    "H100, FP8 weights": Server("H100", bytes_per_parameter=1.1),
    "2 x H100, TP 2": Server("H100", tp_size=2),
    "H200": Server("H200"),
}
RATIOS = ("0.9", "4")


def table(ratio: str, folder: Path) -> str:
    lines = ["| flags | " + " | ".join(COLUMNS) + " |", "|---|" + "---:|" * len(COLUMNS)]
    rows = {"no draft": (None, False)} | {name: (flags, False) for name, flags in FLAGS.items()}
    rows |= {f"built-in, {name}": (FLAGS[name], True) for name in list(FLAGS)[:2]}
    for name, (flags, is_built_in) in rows.items():
        cells = []
        for server in COLUMNS.values():
            server = replace(server, speculates=flags is not None, is_built_in=is_built_in)
            server = server.with_flags("--mamba-full-memory-ratio", ratio, *(flags or ()))
            try:
                found = sizes(server, folder)
            except RuntimeError as error:  # SGLang's: not enough memory for one request
                cells.append(f"none ({str(error).split('.')[0]})")
                continue
            cells.append(f"{found.requests} / {found.kv_tokens / 1000:.0f}k")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ratios", nargs="+", default=RATIOS, help="values of --mamba-full-memory-ratio")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        QWEN3_8_27B.write(Path(folder))
        default = sizes(Server("H100"), Path(folder))
        copies = BLOCK * default.state_bytes / 1e9
        print(
            f"A state: {default.state_bytes / 1e6:.0f} MB. Copies of it while a block is verified: "
            f"{copies:.2f} GB, or a ring of {default.ring_bytes / 1e6:.0f} MB. KV of a token: "
            f"{default.kv_bytes_per_token / 1024:.0f} KiB, the draft's included."
        )
        for ratio in args.ratios:
            print(f"\nRequests at once / KV tokens, `--mamba-full-memory-ratio {ratio}`:\n")
            print(table(ratio, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
