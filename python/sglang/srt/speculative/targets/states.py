"""What a target keeps beside its KV pool, and what verifying a block does to it.

KV of rejected tokens is overwritten by the next block. A recurrent state (GatedDeltaNet, Mamba, a
convolution's window) cannot go back: verify leaves it alone and writes the states after each token of a block
aside; once tokens are accepted, the state after the last of them becomes the request's. Chosen once, at
start-up."""

from typing import Any, Protocol

import torch
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.speculative.spec_utils import commit_mamba_states_after_verify, prepare_mamba_track_for_verify


class TargetStates(Protocol):
    """Called by the worker around each verify forward."""

    def begin_verify(self, batch) -> None:
        """Before the forward batch is made of `batch`."""

    def commit(self, batch, commit_lens: torch.Tensor) -> None:
        """After acceptance, before the target runs again. commit_lens: [bs], tokens kept of each block, bonus
        included; `batch.seq_lens` are still the lengths before the block."""


class NoStates:
    """Attention only: whatever verify wrote is in KV slots."""

    def begin_verify(self, batch) -> None:
        pass

    def commit(self, batch, commit_lens: torch.Tensor) -> None:
        pass


class RecurrentStates:
    """SGLang keeps and moves the states: in the request's own slot, and, on a grid of positions, for the
    prefix cache."""

    def __init__(self, target_worker, verify_width: int, max_requests: int):
        self._target_worker = target_worker
        self._verify_width = verify_width
        # A chain: the k-th row kept of a request's block is its k-th row.
        rows = torch.arange(max_requests * verify_width, device=target_worker.device)
        self._rows = rows.view(max_requests, verify_width)

    def begin_verify(self, batch) -> None:
        prepare_mamba_track_for_verify(batch)

    def commit(self, batch, commit_lens: torch.Tensor) -> None:
        commit_mamba_states_after_verify(
            self._target_worker, batch, commit_lens, self._rows[: commit_lens.numel()], self._verify_width
        )


def states_of(target_worker: Any, verify_width: int) -> TargetStates:
    """What the worker's target needs. Called once pools and attention backends are there."""
    runner = target_worker.model_runner
    if mambaish_config(runner.model_config) is None:
        return NoStates()
    if not hasattr(runner.attn_backend, "update_mamba_state_after_mtp_verify"):
        raise ValueError(
            f"DFLASH cannot serve {type(runner.model).__name__}: SGLang's {type(runner.attn_backend).__name__} does not "
            "commit recurrent states after verify."
        )
    return RecurrentStates(target_worker, verify_width, runner.req_to_token_pool.size)
