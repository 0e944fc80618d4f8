"""A draft whose mask token is given by name, with its embedding in a file, on the bundled pair: the same draft as by id."""

import pytest
import torch
from conftest import ENVIRONMENT, PLAIN_FLOAT32
from drafts import REMOVE, make_draft, read_config
from safetensors.torch import load_file
from scheduled import Job, run_all
from serving import DRAFT, TARGET, dflash_arguments, heldout_prompts
from transformers import AutoTokenizer

from sglang_dflash.srt.hardware_backend.cpu import runtime

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(not runtime.is_active(), reason="a scheduler in a fork of this process, on the CPU"),
]


class AcceptedDrafts:
    """Counts, in the scheduler's process, how many drafts each block keeps."""

    def __init__(self, path):
        self.path, self.counts = path, []

    def __call__(self, scheduler) -> None:
        drafter = scheduler.draft_worker._drafter
        commit = drafter.commit

        def count(cycle, hidden, verdict):
            self.counts += verdict.accept_len.tolist()
            torch.save(self.counts, self.path)
            return commit(cycle, hidden, verdict)

        drafter.commit = count


def test_by_name_and_from_a_file(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    mask = read_config(DRAFT)["dflash_config"]["mask_token_id"]
    name = tokenizer.convert_ids_to_tokens(mask)
    by_name = make_draft(tmp_path / "draft", dflash_config={"mask_token_id": REMOVE, "mask_token": name})
    row = load_file(TARGET / "model.safetensors")["model.embed_tokens.weight"][mask].clone()
    torch.save({"embedding": row, "mask_token_id": mask, "per_position": False}, by_name / "mask_embedding.pt")
    jobs = [Job(tuple(tokenizer(one["text"])["input_ids"]), max_new_tokens=24) for one in heldout_prompts()[:4]]
    found = []
    for draft in (DRAFT, by_name):
        path = tmp_path / f"{draft.name}.pt"
        flags = [*PLAIN_FLOAT32, "--random-seed", "7", "--max-total-tokens", "4096"]
        [answers] = run_all(
            ["--model-path", TARGET, *dflash_arguments(draft), *flags], [jobs], None, ENVIRONMENT, AcceptedDrafts(path)
        )
        found.append(([answer.output_ids for answer in answers], torch.load(path)))
    assert found[0] == found[1]
    assert sum(found[0][1]) > len(found[0][1]), "the trained draft is hardly kept: the comparison says nothing"
