"""Recurrent states of a target: the effect of verifying a block on them, and their memory.

KV of rejected tokens is overwritten by the next block. A recurrent state (GatedDeltaNet, Mamba, a
convolution's window) cannot go back. Verify leaves it alone and stores the states after each token of a block
aside. Once tokens are accepted, the state after the last of them becomes the request's.

Each running request holds a few state slots and, while a block is verified, a copy of its state per token of
the block. SGLang's ReplaySSM (`--enable-linear-replayssm-spec`) keeps the block's inputs instead. SGLang's
own DFLASH refuses it for GatedDeltaNet; the commit of `RecurrentStates` serves it.
"""

import logging
import pkgutil
from typing import Any

import torch
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.runtime_context import get_disagg, get_exec, get_schedule, get_server_args
from sglang.srt.speculative.spec_utils import commit_mamba_states_after_verify, prepare_mamba_track_for_verify

from sglang_dflash.srt.speculative.dflash_utils import defer_row_reuse

logger = logging.getLogger(__name__)


class RecurrentStates:
    """Recurrent states of a target. Make it once pools and attention backends exist.

    SGLang keeps them in request slots and, on a grid of positions, for the prefix cache.

    Attributes:
        are_recurrent: False if the target has attention alone. Then verify writes to KV slots only, and
            nothing is to be done.
    """

    def __init__(self, target_worker: Any, block_size: int):
        self._target_worker = target_worker
        self._block_size = block_size
        runner = target_worker.model_runner
        self.are_recurrent = mambaish_config(runner.model_config) is not None
        # Blocks are chains: the k-th accepted row of a request's block is its k-th row.
        max_requests = runner.req_to_token_pool.size if self.are_recurrent else 0
        rows = torch.arange(max_requests * block_size, device=target_worker.device)
        self._rows = rows.view(max_requests, block_size)

    def begin_verify(self, batch: Any) -> None:
        """Prepare the scheduler's batch before the forward batch is made."""
        if batch.tree_cache is not None:  # the measurement of widths has no prefix cache
            prepare_mamba_track_for_verify(batch)

    def commit(self, batch: Any, commit_lens: torch.Tensor) -> None:
        """Commit states after acceptance, before the target runs again.

        Args:
            batch: the scheduler's. `batch.seq_lens` are the lengths before the block.
            commit_lens: [bs], output tokens of each block, the bonus token included.
        """
        if get_exec().mamba.enable_linear_replayssm_spec:
            # The ring's cursors are in rows of requests, and SGLang resets those of a new request.
            defer_row_reuse(self._target_worker.model_runner)
        commit_mamba_states_after_verify(
            self._target_worker,
            batch=batch,
            accept_lens=commit_lens,
            accept_index=self._rows[: commit_lens.numel()],
            draft_token_num=self._block_size,
        )


def check_states_are_committed(model_config: Any) -> None:
    """Raise ValueError if the target's attention backend cannot commit recurrent states.

    SGLang's own backends can. A model that another plugin registers may bring its own backend. `model_config`
    is SGLang's ModelConfig of a target with recurrent states.
    """
    registered = model_config.linear_attn_registry_result
    name = None if registered is None else registered[0].hybrid_backend_class_name
    if name is None or hasattr(pkgutil.resolve_name(name), "update_mamba_state_after_mtp_verify"):
        return
    raise ValueError(
        f"DFLASH cannot serve {model_config.hf_config.architectures[0]}: its attention backend {name} "
        "does not commit recurrent states after verify."
    )


def log_if_states_cap_batch(target_runner: Any, block_size: int) -> None:
    """Log a warning if a GatedDeltaNet target's states limit the requests that run at once."""
    if get_exec().mamba.enable_linear_replayssm_spec or get_disagg().disaggregation_mode == "prefill":
        return
    configurator, schedule = target_runner.kv_cache_configurator, get_schedule()
    if configurator.hybrid_gdn_config is None or get_server_args().max_mamba_cache_size is not None:
        return
    states = mambaish_config(target_runner.model_config).mamba2_cache_params
    slots = configurator._calculate_mamba_ratio()  # of each running request
    requested = max(1, schedule.max_running_requests // configurator.attn_dp_size)
    running, megabytes = schedule.max_mamba_cache_size // slots, states.mamba_cache_per_req / 1e6
    if running < requested:
        logger.warning(
            "DFLASH: recurrent states let %d requests run at once, not %d. A request holds %d states of %.0f "
            "MB, and %d copies to verify a block. --enable-linear-replayssm-spec keeps the block's inputs "
            "instead (not run on a GPU yet). Other flags: docs/qwen3_5.md.",
            running,
            requested,
            slots,
            megabytes,
            block_size,
        )
