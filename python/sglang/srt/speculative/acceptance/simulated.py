"""SGLang's benchmark switch `SGLANG_SIMULATE_ACC_LEN`: every cycle keeps a drawn number of tokens, whatever
the target says.

For measuring speed at an assumed accept length, with random weights. The output is then not the target's.
"""

import logging

import torch
from sglang.srt.environ import envs
from sglang.srt.speculative.spec_utils import sample_simulated_acc_len

from sglang_dflash.srt.speculative.acceptance.greedy import Verdict

logger = logging.getLogger(__name__)

# What every other SGLang worker writes where no real token is asked for.
FIXED_TOKEN_ID = 100


class SimulatedAcceptance:
    """accept_length: tokens a cycle on average, bonus token included. method: SGLang's, see
    `sample_simulated_acc_len`. real_tokens: whether the drafted tokens are put out, or a fixed one."""

    def __init__(self, accept_length: float, method: str, real_tokens: bool):
        self._accept_length, self._method, self._real_tokens = accept_length, method, real_tokens

    @classmethod
    def from_environment(cls) -> "SimulatedAcceptance | None":
        """None unless the variable is set; SGLang has validated the token mode."""
        accept_length = envs.SGLANG_SIMULATE_ACC_LEN.get()
        if accept_length <= 0:
            return None
        logger.warning(
            "SGLANG_SIMULATE_ACC_LEN=%s: accept lengths are made up, the output is not the target's.",
            accept_length,
        )
        real_tokens = envs.SGLANG_SIMULATE_ACC_TOKEN_MODE.get() == "real-draft-token"
        return cls(accept_length, envs.SGLANG_SIMULATE_ACC_METHOD.get(), real_tokens)

    def override(self, verdict: Verdict, block: torch.Tensor) -> Verdict:
        """The verdict with one drawn accept length for all requests. block: [bs, B] int64, the drafted
        block."""
        commit = sample_simulated_acc_len(self._accept_length, self._method, block.shape[1])
        if self._real_tokens:
            bonus = verdict.out_tokens[:, commit - 1]
            out_tokens = torch.cat((block[:, 1:commit], verdict.out_tokens[:, commit - 1 :]), dim=1)
        else:
            bonus = torch.full_like(verdict.bonus, FIXED_TOKEN_ID)
            out_tokens = torch.full_like(verdict.out_tokens, FIXED_TOKEN_ID)
        return Verdict(torch.full_like(verdict.accept_len, commit - 1), out_tokens, bonus)
