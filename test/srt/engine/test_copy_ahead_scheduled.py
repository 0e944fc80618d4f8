"""Copies on SGLang's own scheduler.

After every cycle the device knows each request's text. Leaving out a draft for too long changes no output.
"""

import json

import pytest
import torch
from serving import TARGET, dflash_arguments, heldout_prompts
from support.copy_watch import Watch
from support.drafts import always_wrong
from support.parity import FLOAT32_TIE
from support.scheduled import Job, run
from support.servers import FLOAT32, patched
from tokenizers import Tokenizer

from sglang_dflash.srt.hardware_backend.cpu import runtime

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(
        not runtime.needs_stand_in(), reason="reads the device's texts after every cycle, on the CPU"
    ),
]

NEW, BLOCK = 80, 8
ADAPTIVE = ("--speculative-adaptive",)
# Chunks, mixed batches, and a pool that does not hold all requests to their end.
CROWDED = ("--chunked-prefill-size", "64", "--enable-mixed-chunk", "--max-total-tokens", "1200")
ENVIRONMENT = {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "8"}


ARGUMENTS = ("--model-path", TARGET, *FLOAT32, "--speculative-copy-ahead")


def assert_targets(jobs, answers):
    """Compare greedy answers with the target's logits."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    for job, answer in zip(jobs, answers, strict=True):
        assert len(answer.output_ids) == job.max_new_tokens
        with torch.no_grad():
            logits = model(torch.tensor([[*job.input_ids, *answer.output_ids]])).logits[
                0, len(job.input_ids) - 1 : -1
            ]
        behind = logits.amax(dim=-1) - logits.gather(1, torch.tensor(answer.output_ids)[:, None])[:, 0]
        assert behind.max() < FLOAT32_TIE * 10, f"not the target's token, by {behind.max():.2g}"


def test_texts_are_known_and_the_output_is_the_targets(tmp_path):
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    prompts = [
        tuple(tokenizer.encode(p["text"]).ids) for p in heldout_prompts() if 30 <= p["num_tokens"] <= 290
    ][::14]
    first = [Job(prompt, NEW, step=2 * number) for number, prompt in enumerate(prompts)]
    alone = [Job(prompts[-1], 3 * NEW)]
    arguments = [*ARGUMENTS, *dflash_arguments(), *CROWDED]
    jobs = [first, alone, alone]
    groups = run(arguments, jobs, environment=ENVIRONMENT, prepare=Watch(tmp_path / "outcomes"))
    assert sum(answer.retractions for answer in groups[0]) > 0, "nothing was retracted"
    assert all(answer.cached_tokens > 20 for answer in groups[2]), "nothing came from the prefix cache"
    outcomes = json.loads((tmp_path / "outcomes").read_text())
    assert outcomes["cycles_without_draft"] > 0 and outcomes["accepted_tokens"]["copy"] > 300, outcomes
    assert_targets(sum(jobs, []), sum(groups, []))


@pytest.mark.parametrize(
    "late",
    [
        pytest.param(False, marks=pytest.mark.long, id="matches known"),
        pytest.param(True, id="matches known late"),
    ],
)
def test_adaptive_width_copies_beside_a_useless_draft(late, tmp_path):
    """Repeated text, greedy and sampled requests in one batch, then one alone."""
    draft = always_wrong(tmp_path / "wrong")
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    prompts = [
        tuple(tokenizer.encode(p["text"]).ids) for p in heldout_prompts() if 30 <= p["num_tokens"] <= 120
    ][:4]
    sampled = {"temperature": 0.8, "top_k": 20}
    groups = [
        [Job(prompts[0], NEW)],
        [
            *(Job(prompt, NEW, step=3 * i) for i, prompt in enumerate(prompts[:3])),
            Job(prompts[3], NEW, sampling=sampled),
        ],
        [Job(prompts[1], 3 * NEW)],
    ]
    tokens_per_cycle = {}
    for width in ("adaptive", "whole"):
        switch = ADAPTIVE if width == "adaptive" else ("--no-speculative-adaptive",)
        outcomes = tmp_path / width
        arguments = [*ARGUMENTS, *dflash_arguments(draft), *switch]
        answers = run(arguments, groups, environment=patched("cheap_rows"), prepare=Watch(outcomes, late))
        greedy = [
            (job, answer)
            for job, answer in zip(sum(groups, []), sum(answers, []), strict=True)
            if not (job.sampling["temperature"])
        ]
        assert_targets(*zip(*greedy, strict=True))
        cycles = [kept for _, answer in greedy for kept in answer.accepted]
        tokens_per_cycle[width] = sum(cycles) / len(cycles) + 1
        report = json.loads(outcomes.read_text())
        assert report["accepted_tokens"]["draft"] <= 3, "it was to be wrong"
        if width == "adaptive":
            assert report["cycles_without_draft"] > 20, report
            # If matches are known late, some slots are verified in case there is one.
            assert late or report["widths"]["cycles_per_width"]["1"] > 5, (
                "text that does not repeat is decoded plainly"
            )
    assert tokens_per_cycle["whole"] > 1.5, "hardly anything repeats: this shows little"
    assert tokens_per_cycle["adaptive"] > (0.7 if late else 0.95) * tokens_per_cycle["whole"], (
        tokens_per_cycle
    )
