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
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.runtime_context import get_disagg, get_exec, get_schedule, get_server_args
from sglang.srt.speculative.spec_utils import commit_mamba_states_after_verify, prepare_mamba_track_for_verify

from sglang_dflash.srt.speculative.dflash_utils import hold_request_rows

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
            hold_request_rows(self._target_worker.model_runner)
        rows = self._rows[: commit_lens.numel()]
        commit_mamba_states_after_verify(self._target_worker, batch, commit_lens, rows, self._block_size)


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


REPLAY_FLAG = "--enable-linear-replayssm-spec"


@dataclass(frozen=True)
class StateMemory:
    """Memory of a server with recurrent states, as SGLang divided it.

    Sizes are bytes of one rank.

    Attributes:
        slots: states that are allocated.
        slots_per_request: states of each running request.
        requested: the limit of running requests before the states' limit.
    """

    state_bytes: int
    ring_bytes: int
    slots: int
    slots_per_request: int
    requested: int
    block_size: int
    kv_bytes: int
    state_share: float  # of what is left beside the weights: ratio / (1 + ratio)

    @property
    def running(self) -> int:
        """Requests that run at once."""
        return min(self.requested, self.slots // self.slots_per_request)

    @property
    def budget(self) -> float:
        """Bytes that SGLang gives to states: a share of what is left beside the weights."""
        states = (self.slots + 1) * self.state_bytes
        copies = (self.running + 1) * self.block_size * self.state_bytes
        # With a limit of KV tokens the share is too small; then the states' own size is a lower bound.
        return max(states + copies, (states + copies + self.kv_bytes) * self.state_share)

    def running_with_replay(self) -> int:
        """Return about how many requests would run at once without copies.

        SGLang allocates a ring for each request that may run, as many as were asked for.
        """
        rings = (self.requested + 1) * self.ring_bytes
        slots = int((self.budget - rings - self.state_bytes) // self.state_bytes)
        return min(self.requested, slots // self.slots_per_request)


def find_state_memory(target_runner: Any, draft_runner: Any, block_size: int) -> StateMemory | None:
    """Return how SGLang divided the memory of a GatedDeltaNet target.

    None for other targets, and if the user has set the number of states."""
    configurator = target_runner.kv_cache_configurator
    config = mambaish_config(target_runner.model_config)
    sized_by_user = get_server_args().max_mamba_cache_size is not None
    if config is None or configurator.hybrid_gdn_config is None or sized_by_user:
        return None
    states, schedule = config.mamba2_cache_params, get_schedule()
    pools = target_runner.token_to_kv_pool, draft_runner.token_to_kv_pool
    ratio = schedule.mamba_full_memory_ratio
    return StateMemory(
        state_bytes=states.mamba_cache_per_req,
        ring_bytes=states.replayssm_ring_bytes_per_req(
            record_len=get_exec().mamba.linear_replayssm_cache_len
        ),
        slots=schedule.max_mamba_cache_size,
        slots_per_request=configurator._calculate_mamba_ratio(),
        requested=max(1, schedule.max_running_requests // configurator.attn_dp_size),
        block_size=block_size,
        kv_bytes=sum(sum(pool.get_kv_size_bytes()) for pool in pools),
        state_share=ratio / (1 + ratio),
    )


def log_if_states_cap_batch(target_runner: Any, draft_runner: Any, block_size: int) -> None:
    """Log which flags let more requests run at once, if recurrent states are what limits them."""
    if get_exec().mamba.enable_linear_replayssm_spec or get_disagg().disaggregation_mode == "prefill":
        return
    memory = find_state_memory(target_runner, draft_runner, block_size)
    if memory is None or memory.running >= memory.requested:
        return
    logger.warning(cap_message(memory))


def cap_message(memory: StateMemory) -> str:
    """Say what the states take, and what would run without the copies."""
    megabytes = memory.state_bytes / 1e6
    return (
        f"DFLASH: recurrent states let {memory.running} requests run at once, not {memory.requested}. A "
        f"request holds {memory.slots_per_request} states of {megabytes:.0f} MB, and {memory.block_size} "
        f"copies ({memory.block_size * megabytes:.0f} MB) to verify a block. {REPLAY_FLAG} keeps "
        f"{memory.ring_bytes / 1e6:.0f} MB instead of the copies: about {memory.running_with_replay()} "
        "requests (not run on a GPU yet). Other flags: docs/qwen3_5.md."
    )
