"""State of a target beside its KV pool, and the effect of verifying a block on it.

KV of rejected tokens is overwritten by the next block. A recurrent state (GatedDeltaNet, Mamba, a
convolution's window) cannot go back. Verify leaves it alone and stores the states after each token of a block
aside. Once tokens are accepted, the state after the last of them becomes the request's."""

import pkgutil
from typing import Any, Protocol

import torch
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.runtime_context import get_exec
from sglang.srt.speculative.spec_utils import commit_mamba_states_after_verify, prepare_mamba_track_for_verify

from sglang_dflash.srt.speculative.cycle.replay import hold_request_rows


class TargetStates(Protocol):
    """Called by the worker around each verify forward."""

    def begin_verify(self, batch: Any) -> None:
        """Prepare the scheduler's batch before the forward batch is made."""

    def commit(self, batch: Any, commit_lens: torch.Tensor) -> None:
        """Commit states after acceptance, before the target runs again.

        Args:
            batch: the scheduler's. `batch.seq_lens` are the lengths before the block.
            commit_lens: [bs], output tokens of each block, the bonus token included.
        """


class NoStates:
    """A target with attention alone: verify writes to KV slots only."""

    def begin_verify(self, batch: Any) -> None:
        """See `TargetStates`."""

    def commit(self, batch: Any, commit_lens: torch.Tensor) -> None:
        """See `TargetStates`."""


class RecurrentStates:
    """A target with recurrent states.

    SGLang keeps them in request slots and, on a grid of positions, for the prefix cache.
    """

    def __init__(self, target_worker: Any, block_size: int, max_requests: int):
        self._target_worker = target_worker
        self._block_size = block_size
        # Blocks are chains: the k-th accepted row of a request's block is its k-th row.
        rows = torch.arange(max_requests * block_size, device=target_worker.device)
        self._rows = rows.view(max_requests, block_size)

    def begin_verify(self, batch: Any) -> None:
        if batch.tree_cache is not None:  # the measurement of widths has no prefix cache
            prepare_mamba_track_for_verify(batch)

    def commit(self, batch: Any, commit_lens: torch.Tensor) -> None:
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


def make_target_states(target_worker: Any, block_size: int) -> TargetStates:
    """Choose the class for a target, once pools and attention backends exist."""
    runner = target_worker.model_runner
    if mambaish_config(runner.model_config) is None:
        return NoStates()
    return RecurrentStates(target_worker, block_size, runner.req_to_token_pool.size)
