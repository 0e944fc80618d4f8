"""Made-up accept lengths, for benchmarks whose weights are noise.

A simulated cycle launches what a real one does: draft, verify, the target's argmax or draws, the rejection
rule of drawn drafts, `accept_blocks`. Its results have no meaning. Drafted tokens are not compared with the
target's: whole blocks compare inside `accept_blocks`, others by a few small launches that are missing here.
Made-up tokens and logits are the same in all cycles, so they are launched once per shape. The token id is
fixed unless SGLang's variables say otherwise.
"""

import functools
import logging
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.speculative.spec_utils import sample_simulated_acc_len

from sglang_dflash.srt.environ import DFlashOptions

logger = logging.getLogger(__name__)

# The id that every other SGLang worker writes if no real token is requested.
FIXED_TOKEN_ID = 100
# Every rank draws the same lengths from it, without a broadcast.
_SEED = 11
_CYCLES = 1024  # drawn ahead, and then drawn from again


@functools.lru_cache(maxsize=1024)
def constant(shape: tuple[int, ...], value: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a constant tensor, which all cycles share and no code writes."""
    return torch.full(shape, value, dtype=dtype, device=device)


def fixed_tokens(tokens: torch.Tensor) -> torch.Tensor:
    """Return the fixed token id in the place of every token."""
    return constant(tuple(tokens.shape), FIXED_TOKEN_ID, tokens.dtype, tokens.device)


class LengthForAll:
    """Draws one accept length for all requests in each cycle, as SGLang's own workers do.

    Args:
        average: SGLANG_SIMULATE_ACC_LEN.
        method: SGLANG_SIMULATE_ACC_METHOD.
        has_real_tokens: whether SGLANG_SIMULATE_ACC_TOKEN_MODE asks for drafted tokens and the target's.
    """

    def __init__(self, average: float, method: str, has_real_tokens: bool):
        self._average, self._method, self._has_real_tokens = average, method, has_real_tokens

    def decide(
        self, rows: torch.Tensor, tokens: torch.Tensor, block: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Decide on the blocks of a cycle.

        Args:
            rows: [bs] int64, of the request table.
            tokens: [bs, W] int64, the target's tokens.
            block: [bs, W] int64, the drafted block.

        Returns:
            Accepted drafted tokens [bs] int32, at most W - 1, and output tokens [bs, W] int64.
        """
        commit = sample_simulated_acc_len(self._average, self._method, block.shape[1])
        if self._has_real_tokens:
            tokens = torch.cat((block[:, 1:commit], tokens[:, commit - 1 :]), dim=1)
        else:
            tokens = fixed_tokens(tokens)
        return constant((len(tokens),), commit - 1, torch.int32, tokens.device), tokens


class LengthsByRequest:
    """Draws an accept length for each request and cycle, as if drafted tokens were coins.

    A request accepts each drafted token with the same probability until the first that it rejects. Row r of
    the request table has entry r mod n of the means, whatever request it holds. Lengths are drawn at start-up
    for whole blocks, so that a cycle reads its own by one launch. A cycle that verifies less cuts them.

    Args:
        means: mean accept lengths in whole blocks, the bonus token included. [n]
        num_rows: of the request table.
        block_size: B.
        device: of the requests.
    """

    def __init__(self, means: tuple[float, ...], num_rows: int, block_size: int, device: Any):
        probs = torch.tensor([accept_prob(mean, block_size) for mean in means])
        probs = probs[torch.arange(num_rows) % len(means)]
        uniforms = torch.rand(_CYCLES, num_rows, generator=torch.Generator().manual_seed(_SEED))
        drawn = torch.zeros(_CYCLES, num_rows, dtype=torch.int32)
        for k in range(1, block_size):
            drawn += uniforms < probs**k
        self._drawn, self._block_size, self._cycle = drawn.to(device), block_size, 0

    def decide(
        self, rows: torch.Tensor, tokens: torch.Tensor, block: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Decide as `LengthForAll.decide` does."""
        accept_len = self._drawn[self._cycle].index_select(0, rows)
        self._cycle = (self._cycle + 1) % _CYCLES
        if tokens.shape[1] < self._block_size:
            accept_len = accept_len.clamp(max=tokens.shape[1] - 1)
        return accept_len, fixed_tokens(tokens)


Simulation = LengthForAll | LengthsByRequest


def accept_prob(mean: float, block_size: int) -> float:
    """Return the accept probability of a drafted token that gives whole blocks this mean.

    The mean accept length, bonus token included, is the sum of p^k for k from 0 to B - 1.
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        prob = (low + high) / 2
        is_enough = sum(prob**k for k in range(block_size)) >= mean
        low, high = (low, prob) if is_enough else (prob, high)
    return high


def simulation_of_server(num_rows: int, block_size: int, device: Any) -> Simulation | None:
    """Make the simulation that the environment asks for, if it does, and warn.

    `num_rows` are those of the request table.
    """
    means, average = DFlashOptions.SIMULATE_ACC_LENS.get(), envs.SGLANG_SIMULATE_ACC_LEN.get()
    if not means and average <= 0:
        return None
    logger.warning(
        "%s: accept lengths are simulated, and the output is not the target's.",
        f"{DFlashOptions.SIMULATE_ACC_LENS.variable}={','.join(map(str, means))}"
        if means
        else f"SGLANG_SIMULATE_ACC_LEN={average}",
    )
    if means:
        return LengthsByRequest(means, num_rows, block_size, device)
    has_real_tokens = envs.SGLANG_SIMULATE_ACC_TOKEN_MODE.get() == "real-draft-token"
    return LengthForAll(average, envs.SGLANG_SIMULATE_ACC_METHOD.get(), has_real_tokens)
