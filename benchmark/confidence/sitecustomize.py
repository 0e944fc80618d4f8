"""Has a server write down, for every cycle, how sure the draft was of each token and how many were kept.
Python imports this at start-up wherever its folder is on PYTHONPATH; CONFIDENCE_LOG names the file. Used by
benchmark/confidence/measure.py."""

import json
import os
import sys
from collections import deque
from pathlib import Path

_sure = []


def watch_head(module) -> None:
    """Keep the logit of the draft's probability for each token it proposes."""
    greedy_tokens = module.greedy_tokens

    def watched(hidden, lm_head):
        logits = lm_head.quant_method.apply(lm_head, hidden)[:, : lm_head.org_vocab_size].float()
        best = logits.max(dim=-1)
        others = logits.scatter(1, best.indices[:, None], float("-inf"))
        _sure.append(best.values - others.logsumexp(dim=-1))
        return greedy_tokens(hidden, lm_head)

    module.greedy_tokens = watched


def watch_worker(module) -> None:
    worker, cycles = module.DFlashWorker, deque()
    out = open(os.environ["CONFIDENCE_LOG"], "a")
    draft_block, kept = worker.draft_block, worker.on_verify_complete_cpu

    def draft(self, batch, *args):
        _sure.clear()
        result = draft_block(self, batch, *args)
        if hasattr(batch, "reqs") and _sure:
            count = len(batch.reqs)
            confidence = _sure[-1][: count * (self.verify_width - 1)].view(count, -1)
            rids = [req.rid for req in batch.reqs]
            cycles.append(
                {"requests": rids, "confidence": [[round(x, 3) for x in row] for row in confidence.tolist()]}
            )
        return result

    def complete(self, accepted, batch_size=0):
        kept(self, accepted, batch_size)
        out.write(json.dumps({**cycles.popleft(), "accepted": accepted}) + "\n")
        out.flush()

    worker.draft_block, worker.on_verify_complete_cpu = draft, complete


WATCHED = {
    "sglang_dflash.srt.models.dflash": watch_head,
    "sglang_dflash.srt.models.peagle": watch_head,
    "sglang_dflash.srt.speculative.dflash_worker": watch_worker,
}


if "CONFIDENCE_LOG" in os.environ:
    sys.path.append(str(Path(__file__).parent.parent))
    from after_import import after_import

    after_import(WATCHED)
