"""Force a server's target to emit given tokens, for copy_ahead.py and adaptive.py.

Python imports this at start-up if its folder is on PYTHONPATH. A request's custom_params["forced"] are token
ids by output position. -1 leaves a position to the target, as does the first token, which comes from the
prefill. Drafts see the hidden states of the resulting text.
"""

import sys
from pathlib import Path


def force_tokens(module) -> None:
    import torch

    constrain = module.constrain

    def constrain_and_force(batch, block, logits, *more):
        constrain(batch, block, logits, *more)
        *_, verified = more
        slots = verified.to_blocks(torch.arange(len(logits))).tolist()
        for of_request, req, length in zip(slots, batch.reqs, batch.seq_lens.tolist(), strict=True):
            rows = [logits[row] for row in dict.fromkeys(of_request)]
            forced = (req.sampling_params.custom_params or {}).get("forced", ())
            first = length + 1 - len(req.origin_input_ids)  # the output position that slot 0 decides
            for row, token in zip(rows, forced[first:]):
                if token >= 0:
                    row.fill_(-30.0)
                    row[token] = 30.0

    module.constrain = constrain_and_force


sys.path.append(str(Path(__file__).parent.parent))
from after_import import after_import  # noqa: E402

after_import(
    {
        "sglang_dflash.srt.speculative.dflash_worker": force_tokens,
    }
)
