"""The DFlash2 drafter: its tokens come from the candidate selector's walk."""

from typing import Any

import torch

from sglang_dflash.srt.layers.candidate_selector import Candidates
from sglang_dflash.srt.layers.draft_probs import DraftProbs
from sglang_dflash.srt.models.dflash2 import DFlash2Output
from sglang_dflash.srt.speculative.dflash_info import Cycle
from sglang_dflash.srt.speculative.drafters.dflash import DFlashDrafter
from sglang_dflash.srt.speculative.drafters.sampling import selector_draw


class DFlash2Drafter(DFlashDrafter):
    """Drafts by walks through candidates.

    The best path is part of the model's forward and its CUDA graph. A drawn path begins after the forward,
    from the same candidates."""

    def _draw_output(
        self, cycle: Cycle, output: DFlash2Output, sampling_info: Any
    ) -> tuple[torch.Tensor, DraftProbs]:
        return self._walk(output.candidates(cycle.bs), cycle.tokens[:, 0], sampling_info)

    def draw(
        self, hidden: torch.Tensor, anchors: torch.Tensor, sampling_info: Any
    ) -> tuple[torch.Tensor, DraftProbs]:
        return self._walk(self._model.candidates(hidden), anchors, sampling_info)

    def _walk(
        self, candidates: Candidates, anchors: torch.Tensor, sampling_info: Any
    ) -> tuple[torch.Tensor, DraftProbs]:
        draw = selector_draw(sampling_info, self._sampling, self._block_size - 1)
        tokens, probs = self._model.candidate_selector.walk(candidates, anchors, draw)
        assert probs is not None, "a drawn walk has probabilities"
        return tokens, probs
