"""The DFlash2 drafter: a DFlash one whose tokens come from the candidate selector's walk."""

import torch

from sglang_dflash.srt.layers.draft_probs import DraftProbs
from sglang_dflash.srt.models.dflash2 import DFlash2Output
from sglang_dflash.srt.speculative.dflash_info import Cycle
from sglang_dflash.srt.speculative.drafters.dflash import DFlashDrafter
from sglang_dflash.srt.speculative.drafters.sampling import selector_draw


class DFlash2Drafter(DFlashDrafter):
    """The best path is part of the model's forward, and of its CUDA graph; one that is drawn begins after it,
    from the same candidates."""

    def _draw(self, cycle: Cycle, output: DFlash2Output, sampling_info) -> tuple[torch.Tensor, DraftProbs]:
        draw = selector_draw(sampling_info, self._sampling, self._verify_width - 1)
        return self._model.candidate_selector.walk(output.candidates(cycle.bs), cycle.tokens[:, 0], draw)
