"""Observer that lets the target say a text of the prompt, in blocks of a token up to all of their slots.

A server with SGLANG_DFLASH_OBSERVERS=support.forced_texts:ForcedTexts says what stands between `‹` and `›` in
a prompt, behind the token of the prefill, and ends. Other prompts are left alone.
"""

import random

import torch

from sglang_dflash.srt.speculative.cycle.observer import CycleObserver

FORCED = {"SGLANG_DFLASH_OBSERVERS": "support.forced_texts:ForcedTexts"}


def prompt_for(text: str) -> str:
    return f"# say ‹{text}›\n"


class ForcedTexts(CycleObserver):
    def __init__(self):
        self.texts: dict[str, list[int]] = {}

    def text_of(self, req) -> list[int]:
        """The forced tokens of a request, with an end. Empty: it has none."""
        if req.rid not in self.texts:
            prompt = req.tokenizer.decode(list(req.origin_input_ids), skip_special_tokens=False)
            _, opened, rest = prompt.rpartition("‹")
            ids = req.tokenizer.encode(rest.rpartition("›")[0], add_special_tokens=False)
            self.texts[req.rid] = [*ids, req.tokenizer.eos_token_id] if opened else []
        return self.texts[req.rid]

    def on_drafted(self, batch, cycle, block):
        """Draft a prefix of what follows, of a length by lot."""
        width = block.tokens.shape[1]
        self.layout, self.wanted = cycle.layout, torch.full(cycle.layout.shape, -1)
        for row, req in enumerate(batch.reqs):
            if not (text := self.text_of(req)):
                continue
            # The prefill gave the answer's first token.
            begin = int(cycle.committed[row]) - len(req.origin_input_ids) - 1
            says = torch.tensor([text[min(begin + slot, len(text) - 1)] for slot in range(width + 1)])
            kept = random.Random(f"{text}{begin}").randrange(width)
            block.tokens[row, 1:] = torch.where(
                torch.arange(1, width) > kept, says[1:width] ^ 1, says[1:width]
            )
            self.wanted[row] = says[1 : self.wanted.shape[1] + 1]

    def on_verified(self, batch, block, logits):
        wanted = self.layout.to_rows(self.wanted)
        [rows] = (wanted >= 0).nonzero(as_tuple=True)
        logits[rows] = -50.0
        logits[rows, wanted[rows]] = 50.0
