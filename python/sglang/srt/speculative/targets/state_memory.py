"""Memory of recurrent states, and what would run with less of it.

Each running request holds a few state slots and, while a block is verified, a copy of its state per token of
the block. SGLang's ReplaySSM (`--enable-linear-replayssm-spec`) keeps the block's inputs instead. SGLang's
own DFLASH refuses it for GatedDeltaNet; the commit of `RecurrentStates` serves it.
"""

import logging
from dataclasses import dataclass
from typing import Any

from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.runtime_context import get_disagg, get_exec, get_schedule, get_server_args

logger = logging.getLogger(__name__)

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


def tell_if_states_cap_batch(target_runner: Any, draft_runner: Any, block_size: int) -> None:
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
