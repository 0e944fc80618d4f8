"""Separate verify lengths for each request, in every cycle: the output is the target's.

The schedule gives each row of the request table another length than its neighbours, and another one in the
next cycle: none, some, whole blocks, and pauses. Copies are four times as long, beyond a block.
"""

from dataclasses import replace

import pytest
import torch
from serving import PEAGLE_DRAFT, TARGET, dflash_arguments, heldout_prompts
from support.parity import FLOAT32_TIE
from support.scheduled import Answer, Job, run
from support.servers import COPIES, FLOAT32, WIDTHS_CHANGE
from tokenizers import Tokenizer

from sglang_dflash.srt.hardware_backend.cpu import runtime

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(not runtime.needs_stand_in(), reason="own lengths are served on a CPU"),
]

NEW = 72
# Chunks, mixed batches, and a pool that does not hold all requests to their end.
CROWDED = ("--chunked-prefill-size", "64", "--enable-mixed-chunk", "--max-total-tokens", "1200")
ENVIRONMENT = {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "8"}
CAPPED = {"custom_params": {"speculative_max_tokens": 2}}
BLOCK = 8
# The grammar leaves no choice, and its text is copied.
REPEATED = {"temperature": 0.0, "regex": "(abc def ){60}"}
# The penalty makes what was said likelier.
REPEATING = {"temperature": 0.0, "frequency_penalty": -0.1}
CASES = {
    "DFlash, copies": dflash_arguments(),
    "P-EAGLE, copies": dflash_arguments(PEAGLE_DRAFT),
}


def assert_targets(jobs: list[Job], answers: list[Answer]) -> None:
    """Compare greedy answers with the target's logits, and log probabilities with its own."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    for job, answer in zip(jobs, answers, strict=True):
        assert len(answer.output_ids) == job.max_new_tokens
        with torch.no_grad():
            text = torch.tensor([[*job.input_ids, *answer.output_ids]])
            logits = model(text).logits[0, len(job.input_ids) - 1 : -1]
        ids = torch.tensor(answer.output_ids)
        if penalty := job.sampling.get("frequency_penalty"):
            said = torch.nn.functional.one_hot(ids, logits.shape[1]).cumsum(dim=0)
            logits[1:] -= penalty * said[:-1]
        if not job.sampling["temperature"]:
            behind = logits.amax(dim=-1) - logits.gather(1, ids[:, None])[:, 0]
            assert behind.max() < 10 * FLOAT32_TIE, f"not the target's token, by {behind.max():.2g}"
        if job.logprobs:
            wanted = logits / (job.sampling["temperature"] or 1.0)
            wanted = wanted.log_softmax(dim=-1).gather(1, ids[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(answer.logprobs), wanted, rtol=0, atol=1e-3)


@pytest.mark.parametrize("case", CASES)
def test_answers_are_the_targets(case):
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    prompts = [
        tuple(tokenizer.encode(p["text"]).ids) for p in heldout_prompts() if 30 <= p["num_tokens"] <= 290
    ][::14]
    kinds = (
        {"temperature": 0.0},
        {"temperature": 0.9, "top_k": 20},
        {"temperature": 0.0, **(CAPPED if case == "DFlash, copies" else {})},
    )
    jobs = [
        Job(prompt, NEW, step=2 * i, sampling=kinds[i % 3], logprobs=i % 2 == 0)
        for i, prompt in enumerate(prompts)
    ]
    if case == "DFlash, copies":
        jobs[3] = replace(jobs[3], sampling=REPEATING)
        jobs.append(Job(jobs[0].input_ids, NEW, step=1, sampling=REPEATED))
    arguments = ["--model-path", TARGET, *FLOAT32, *CASES[case], *WIDTHS_CHANGE, *COPIES, *CROWDED]
    [answers] = run(arguments, [jobs], environment=ENVIRONMENT)
    assert sum(answer.retractions for answer in answers) > 0, "nothing was retracted"
    kept = [n for answer in answers for n in answer.accepted]
    assert {0, 1, 3, 7} <= set(kept), sorted(set(kept))
    if case == "DFlash, copies":
        text = tokenizer.decode(answers[-1].output_ids)
        assert text == ("abc def " * 60)[: len(text)] and max(answers[-1].accepted) == BLOCK - 1
        jobs, answers = jobs[:-1], answers[:-1]
        assert max(answers[3].accepted) == BLOCK - 1, "no copy beside a penalty"
    assert_targets(jobs, answers)
    for job, answer in zip(jobs, answers, strict=True):
        if "custom_params" in job.sampling:
            assert max(answer.accepted) == 2
