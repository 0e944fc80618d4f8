"""A server with a quantized draft: the target's text, in the cycles of the dequantized draft."""

import json

import pytest
import torch
from serving import DRAFT, ROOT, TARGET, WHOLE_BLOCKS, dflash_arguments
from support.quantized_drafts import write_quantized
from support.servers import FLOAT32
from transformers import AutoModelForCausalLM

from sglang_dflash.srt.doctor import measure
from sglang_dflash.srt.doctor.interpretations import AS_CONFIGURED, blocks, draft_everywhere
from sglang_dflash.srt.doctor.pair import Checkpoint, Pair

pytestmark = pytest.mark.server
RUNS = ROOT / "test" / "srt" / "golden" / "tiny-speculators" / "accepted.json"
NEW_TOKENS = 40


def test_text_and_cycles(servers, tmp_path):
    """Greedy tokens are the target's; each request takes as many cycles as the draft in plain PyTorch."""
    draft = write_quantized(tmp_path / "draft", DRAFT, "W4A16")
    server = servers.get(*FLOAT32, WHOLE_BLOCKS, *dflash_arguments(draft))
    prompts = [run["prompt"] for run in json.loads(RUNS.read_text())][:8]
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    answers = server.generate_many([{"input_ids": p, "sampling_params": sampling} for p in prompts], 4)
    target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    plain = measure.load_draft(
        Pair(Checkpoint.open(str(TARGET), False), Checkpoint.open(str(draft), True)), target
    )
    cycles = []
    for prompt, answer in zip(prompts, answers, strict=True):
        text = measure.capture(target, prompt + answer["output_ids"], len(prompt))
        first = len(prompt) - 1
        assert text.choices[first:-1].tolist() == answer["output_ids"]
        expected = len(blocks(text, draft_everywhere(plain, text, AS_CONFIGURED)))
        assert answer["meta_info"]["spec_verify_ct"] == expected
        cycles.append(expected)
    assert sum(cycles) < len(prompts) * NEW_TOKENS / 1.5  # drafts are accepted
