"""Made-up accept lengths, for benchmarks whose weights are noise.

A simulated cycle launches what a real one does. Its results have no meaning: drafted tokens are not compared
with the target's, and the token id is fixed unless SGLang's variables say otherwise.
"""

import functools
import itertools
import logging
from typing import Any

import numpy as np
import torch
from sglang.srt.environ import envs
from sglang.srt.speculative.spec_utils import sample_simulated_acc_len

from sglang_dflash.srt.environ import DFlashOptions

logger = logging.getLogger(__name__)

FIXED_TOKEN_ID = 100  # which every other SGLang worker writes
_SEED = 11  # every rank draws the same lengths from it, without a broadcast
_CYCLES = 1024  # drawn at start-up, and then drawn again


@functools.lru_cache(maxsize=1024)
def constant(shape: tuple[int, ...], value: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a constant tensor, which all cycles share and no code writes."""
    return torch.full(shape, value, dtype=dtype, device=device)


class Simulation:
    """Decides by lengths that were drawn for whole blocks, and cuts them to a cycle.

    Args:
        lengths: accepted drafted tokens by cycle and row of the request table. [cycles, rows] int32
        block_size: B.
        has_real_tokens: whether drafted tokens and the target's are the output.
    """

    def __init__(self, lengths: torch.Tensor, block_size: int, has_real_tokens: bool = False):
        self._lengths, self._block_size = itertools.cycle(lengths), block_size
        self._has_real_tokens = has_real_tokens

    def decide(
        self, rows: torch.Tensor, tokens: torch.Tensor, block: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return accepted drafted tokens [bs] int32, and output tokens [bs, W] int64.

        Args:
            rows: [bs] int64, of the request table.
            tokens: [bs, W] int64, the target's tokens.
            block: [bs, W] int64, the drafted block.
        """
        accept_len, width = next(self._lengths).index_select(0, rows), block.shape[1]
        if width < self._block_size:
            accept_len = accept_len.clamp(max=width - 1)
        if not self._has_real_tokens:
            return accept_len, constant(tuple(tokens.shape), FIXED_TOKEN_ID, tokens.dtype, tokens.device)
        is_drafted = torch.arange(width, device=block.device) < accept_len[:, None]
        return accept_len, torch.where(is_drafted, block.roll(-1, dims=1), tokens)


def accept_probs(means: tuple[float, ...], block_size: int) -> torch.Tensor:
    """Return the accept probability of a drafted token that gives whole blocks each mean.

    The mean accept length, bonus token included, is the sum of p^k for k from 0 to B - 1.
    """
    probs = np.linspace(0, 1, 10001)
    return torch.from_numpy(np.interp(means, (probs[:, None] ** np.arange(block_size)).sum(axis=1), probs))


def simulation_of_server(num_rows: int, block_size: int, device: Any) -> Simulation | None:
    """Make the simulation that the environment asks for, if it does, and warn.

    SGLang's variable gives all `num_rows` of the request table the same lengths. Ours gives row r entry r mod
    n of the means: drafted tokens are coins, up to the first that is rejected.
    """
    means, average = DFlashOptions.SIMULATE_ACC_LENS.get(), envs.SGLANG_SIMULATE_ACC_LEN.get()
    if not means and average <= 0:
        return None
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(_SEED)
        if means:
            name = f"{DFlashOptions.SIMULATE_ACC_LENS.variable}={','.join(map(str, means))}"
            probs = accept_probs(means, block_size)[torch.arange(num_rows) % len(means)]
            reached = probs[:, None] ** torch.arange(1, block_size)
            lengths = (torch.rand(_CYCLES, num_rows, 1) < reached).sum(dim=-1, dtype=torch.int32)
        else:
            name, method = f"SGLANG_SIMULATE_ACC_LEN={average}", envs.SGLANG_SIMULATE_ACC_METHOD.get()
            drawn = [sample_simulated_acc_len(average, method, block_size) - 1 for _ in range(_CYCLES)]
            lengths = torch.tensor(drawn, dtype=torch.int32)[:, None].repeat(1, num_rows)
    logger.warning("%s: accept lengths are simulated, and the output is not the target's.", name)
    has_real_tokens = envs.SGLANG_SIMULATE_ACC_TOKEN_MODE.get() == "real-draft-token"
    return Simulation(lengths.to(device), block_size, has_real_tokens)
