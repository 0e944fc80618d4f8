"""SGLang's benchmark switch `SGLANG_SIMULATE_ACC_LEN`: drawn accept lengths.

It measures speed at an assumed accept length, with random weights. The output is then not the target's."""

import logging

import torch
from sglang.srt.environ import envs
from sglang.srt.speculative.spec_utils import sample_simulated_acc_len

logger = logging.getLogger(__name__)

# The id that every other SGLang worker writes if no real token is requested.
FIXED_TOKEN_ID = 100


class SimulatedAcceptance:
    """Accept lengths drawn without the target.

    Args:
        accept_length: average tokens a cycle, the bonus token included.
        method: SGLang's, see `sample_simulated_acc_len`.
        real_tokens: whether drafted tokens are emitted, or a fixed one.
    """

    def __init__(self, accept_length: float, method: str, real_tokens: bool):
        self._accept_length, self._method, self._real_tokens = accept_length, method, real_tokens

    @classmethod
    def from_environment(cls) -> "SimulatedAcceptance | None":
        """Read SGLang's variables. None: off. SGLang has validated the token mode."""
        accept_length = envs.SGLANG_SIMULATE_ACC_LEN.get()
        if accept_length <= 0:
            return None
        logger.warning(
            "SGLANG_SIMULATE_ACC_LEN=%s: accept lengths are simulated, and the output is not the target's.",
            accept_length,
        )
        real_tokens = envs.SGLANG_SIMULATE_ACC_TOKEN_MODE.get() == "real-draft-token"
        return cls(accept_length, envs.SGLANG_SIMULATE_ACC_METHOD.get(), real_tokens)

    def override(self, tokens: torch.Tensor, block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw one accept length for all requests.

        Args:
            tokens: [bs, B] int64, the target's tokens.
            block: [bs, B] int64, the drafted block.

        Returns:
            Accepted drafted tokens [bs] int32, and output tokens [bs, B] int64.
        """
        commit = sample_simulated_acc_len(self._accept_length, self._method, block.shape[1])
        if self._real_tokens:
            tokens = torch.cat((block[:, 1:commit], tokens[:, commit - 1 :]), dim=1)
        else:
            tokens = torch.full_like(tokens, FIXED_TOKEN_ID)
        return tokens.new_full((len(tokens),), commit - 1, dtype=torch.int32), tokens
