"""Copies on SGLang's own scheduler.

After every cycle the device knows each request's text. Leaving out a draft for too long changes no output.
"""

import json

import pytest
import torch
from serving import TARGET, dflash_arguments, heldout_prompts
from support.copy_watch import Watch
from support.parity import FLOAT32_TIE
from support.scheduled import Job, run
from support.servers import FLOAT32
from tokenizers import Tokenizer

from sglang_dflash.srt.hardware_backend.cpu import runtime

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(
        not runtime.needs_stand_in(), reason="reads the device's texts after every cycle, on the CPU"
    ),
]

NEW = 80
# Chunks, mixed batches, and a pool that does not hold all requests to their end.
CROWDED = ("--chunked-prefill-size", "64", "--enable-mixed-chunk", "--max-total-tokens", "1200")
ENVIRONMENT = {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "8"}


def test_texts_are_known_and_the_output_is_the_targets(tmp_path):
    from transformers import AutoModelForCausalLM

    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    prompts = [
        tuple(tokenizer.encode(p["text"]).ids) for p in heldout_prompts() if 30 <= p["num_tokens"] <= 290
    ][::14]
    first = [Job(prompt, NEW, step=2 * number) for number, prompt in enumerate(prompts)]
    alone = [Job(prompts[-1], 3 * NEW)]
    arguments = ["--model-path", TARGET, *FLOAT32, *dflash_arguments(), "--speculative-copy-ahead", *CROWDED]
    jobs = [first, alone, alone]
    groups = run(arguments, jobs, environment=ENVIRONMENT, prepare=Watch(tmp_path / "outcomes"))
    assert sum(answer.retractions for answer in groups[0]) > 0, "nothing was retracted"
    assert all(answer.cached_tokens > 20 for answer in groups[2]), "nothing came from the prefix cache"
    outcomes = json.loads((tmp_path / "outcomes").read_text())
    assert outcomes["cycles_without_draft"] > 0 and outcomes["accepted_tokens"]["copy"] > 300, outcomes
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    for job, answer in zip(sum(jobs, []), sum(groups, []), strict=True):
        assert len(answer.output_ids) == job.max_new_tokens
        with torch.no_grad():
            logits = model(torch.tensor([[*job.input_ids, *answer.output_ids]])).logits[
                0, len(job.input_ids) - 1 : -1
            ]
        behind = logits.amax(dim=-1) - logits.gather(1, torch.tensor(answer.output_ids)[:, None])[:, 0]
        assert behind.max() < FLOAT32_TIE * 10, f"not the target's token, by {behind.max():.2g}"
