"""A mask token by name, with its embedding in a file, drafts as one by id."""

import pytest
import torch
from safetensors.torch import load_file
from serving import DRAFT, TARGET, WHOLE_BLOCKS, dflash_arguments, heldout_prompts
from support.drafts import REMOVE, make_draft, read_config
from support.scheduled import Job, run
from support.servers import PLAIN_FLOAT32
from transformers import AutoTokenizer

from sglang_dflash.srt.hardware_backend.cpu import runtime

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(not runtime.needs_stand_in(), reason="compares in float32, on the CPU"),
]


def test_by_name_and_from_a_file(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    mask = read_config(DRAFT)["dflash_config"]["mask_token_id"]
    name = tokenizer.convert_ids_to_tokens(mask)
    by_name = make_draft(tmp_path / "draft", dflash_config={"mask_token_id": REMOVE, "mask_token": name})
    row = load_file(TARGET / "model.safetensors")["model.embed_tokens.weight"][mask].clone()
    torch.save(
        {"embedding": row, "mask_token_id": mask, "per_position": False}, by_name / "mask_embedding.pt"
    )
    prompts = [tuple(tokenizer(prompt["text"])["input_ids"]) for prompt in heldout_prompts()[:4]]
    jobs = [Job(prompt, max_new_tokens=24) for prompt in prompts]
    found = []
    for draft in (DRAFT, by_name):
        flags = [*PLAIN_FLOAT32, WHOLE_BLOCKS, "--random-seed", "7", "--max-total-tokens", "4096"]
        [answers] = run(["--model-path", TARGET, *dflash_arguments(draft), *flags], [jobs])
        found.append([(answer.output_ids, answer.accepted) for answer in answers])
    assert found[0] == found[1]
    kept = [count for _, accepted in found[0] for count in accepted]
    assert sum(kept) > len(kept), "hardly any drafted token was accepted, so the comparison proves nothing"
