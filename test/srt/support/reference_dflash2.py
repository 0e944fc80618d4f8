"""A DFlash2 draft in plain PyTorch and float64, for the tests.

It is `ReferenceDFlash` with the convolutions and the selector. Written from the formulas of
vllm-project/vllm#52816 and sgl-project/sglang#35371, token by token.
"""

import torch
from support.reference_dflash import ReferenceDFlash


class ReferenceDFlash2(ReferenceDFlash):
    def __init__(self, config: dict, weights: dict[str, torch.Tensor]):
        super().__init__(config, weights)
        self.options = config["dflash_config"]

    def _wrapped(self, name: str, x: torch.Tensor, sublayer) -> torch.Tensor:
        taps = self.options.get("conv_kernel_size")
        if not taps:
            return sublayer(x)
        groups = x.shape[1] // self.options["conv_group_size"]
        deltas = self._linear(f"{name}.kernel_projection", x).view(-1, 2, taps, groups)
        return self._convolve(name, 1, sublayer(self._convolve(name, 0, x, deltas)), deltas)

    def _convolve(self, name: str, side: int, x: torch.Tensor, deltas: torch.Tensor) -> torch.Tensor:
        base, size = self.weights[f"{name}.base_kernel"][side], self.options["conv_group_size"]
        out = torch.zeros_like(x)
        for row in range(x.shape[0]):
            for tap in range(min(base.shape[0], row + 1)):
                weights = base[tap] + deltas[row, side, tap].repeat_interleave(size)
                out[row] += weights * x[row - tap]
        return out

    def candidates(self, hidden: torch.Tensor, head: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids [slots, K] and unary scores of the slots' candidates.

        hidden: [slots, hidden]. head: [vocab, hidden].
        """
        logits = hidden.double() @ head.double().T * self.options.get("output_multiplier", 1.0)
        cap = self.options.get("final_logit_softcapping")
        if cap:
            logits = cap * torch.tanh(logits / cap)
        logits = logits[:, : self.options.get("selector_vocab_size")]
        best = logits.topk(self.options["selector_top_k"], dim=-1)
        return best.indices, best.values

    def scores(
        self, hidden: torch.Tensor, previous: int, ids: torch.Tensor, unary: torch.Tensor
    ) -> torch.Tensor:
        """Return the scores [K] of one slot's candidates after the token `previous`.

        hidden: [hidden].
        """
        gate = self.weights["candidate_selector.hidden_projection.weight"] @ hidden.double()
        left = self.weights["candidate_selector.predecessor_codebook"][previous] * gate
        right = self.weights["candidate_selector.successor_codebook"]
        return torch.stack([unary[c] + (left * right[token]).sum() for c, token in enumerate(ids.tolist())])

    def greedy_path(self, hidden: torch.Tensor, head: torch.Tensor, anchor: int) -> list[int]:
        """Return the best path; hidden [slots, hidden] is of the slots that draft."""
        ids, unary = self.candidates(hidden, head)
        path = [anchor]
        for slot in range(len(hidden)):
            scores = self.scores(hidden[slot], path[-1], ids[slot], unary[slot])
            path.append(int(ids[slot, scores.argmax()]))
        return path[1:]
