"""Has a server's target say given tokens. Python imports this at start-up wherever its folder is on
PYTHONPATH; used by benchmark/copy_ahead.py and benchmark/copy_rules.py. A request's custom_params["says"] are
token ids by output position; -1 leaves a position to the target, and the first token, which comes from the
prefill, is always its own. Drafts see the hidden states of the text that results.

COPY_RULE, fields of `CopyRule` as JSON, changes when the server copies."""

import json
import os
import sys
from pathlib import Path


def hold(module) -> None:
    constrain = module.constrain

    def held(batch, block, logits, *more):
        constrain(batch, block, logits, *more)
        for rows, req, length in zip(
            logits.view(*block.shape, -1), batch.reqs, batch.seq_lens.tolist(), strict=True
        ):
            says = (req.sampling_params.custom_params or {}).get("says", ())
            after = length + 1 - len(req.origin_input_ids)  # the output position that slot 0 decides
            for row, token in zip(rows, says[after:]):
                if token >= 0:
                    row.fill_(-30.0)
                    row[token] = 30.0

    module.constrain = held


def copy_by(module) -> None:
    module.RULE = module.CopyRule(**json.loads(os.environ.get("COPY_RULE", "{}")))


sys.path.append(str(Path(__file__).parent.parent))
from after_import import after_import  # noqa: E402

after_import(
    {
        "sglang_dflash.srt.speculative.dflash_worker": hold,
        "sglang_dflash.kernels.ops.speculative.copy_ahead": copy_by,
    }
)
