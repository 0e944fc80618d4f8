"""Our draft against the `speculators` library's own model.

The library trained the bundled checkpoint.

Golden data: golden/tiny-speculators/, made by models/training/speculators_golden.py with the library's
classes in float32. Block logits agree to 1e-4 of the largest logit. Layer ids off by one move them by more
than a hundred times that, although mean acceptance on a small model hardly changes. Accept lengths agree
step by step.
"""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from serving import PEAGLE_DRAFT, ROOT, SPECULATORS_DRAFT, TARGET, WHOLE_BLOCKS
from support.engine import Pools, build
from support.scheduled import Job, run
from support.servers import FLOAT32
from transformers import AutoModelForCausalLM

from sglang_dflash.srt.configs.draft_config_parser import DraftConfigParser
from sglang_dflash.srt.models.dflash import DFlashDraftModel

GOLDEN = ROOT / "test" / "srt" / "golden" / "tiny-speculators"
TOLERANCE = 1e-4
SHIFTED = 100 * TOLERANCE


@pytest.fixture(scope="module")
def target():
    return AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def draft():
    config = DraftConfigParser().parse(str(SPECULATORS_DRAFT), trust_remote_code=False)
    weights = load_file(SPECULATORS_DRAFT / "model.safetensors")
    wide = ((name, t.float() if t.is_floating_point() else t) for name, t in weights.items())
    return build(DFlashDraftModel, config, wide)


@pytest.fixture(scope="module")
def golden() -> list[tuple[list[int], torch.Tensor]]:
    """Pairs of (prompt, block logits [B, draft vocab])."""
    data = np.load(GOLDEN / "block_logits.npz")
    count = sum(name.startswith("prompt_") for name in data)
    return [(data[f"prompt_{i}"].tolist(), torch.from_numpy(data[f"logits_{i}"])) for i in range(count)]


def block_logits(draft, target, tokens: list[int], shift: int = 0) -> torch.Tensor:
    """Return logits [B, draft vocab] of the block at the last token.

    `shift` moves every layer id.
    """
    settings = draft.draft
    with torch.no_grad():
        states = target(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    ids = [layer_id + 1 + shift for layer_id in settings.target_layer_ids]
    aux = torch.cat([states[i][0] for i in ids], dim=-1)[:-1]
    anchor = len(tokens) - 1
    pools = Pools.of_draft(draft, 1, anchor + settings.block_size)
    draft.borrow_from_target(target.get_input_embeddings(), None)  # the draft has its own head
    draft.write_context_kv(aux, torch.arange(anchor), pools.slots(0, 0, anchor), pools.token_to_kv_pool)
    block = torch.full((1, settings.block_size), settings.mask_token_id)
    block[0, 0] = tokens[-1]
    hidden = pools.forward(draft, pools.blocks(block, [anchor])).hidden_states
    return torch.nn.functional.linear(hidden, draft.head.weight)


def test_block_logits_are_the_librarys(draft, target, golden):
    assert golden
    for tokens, expected in golden:
        worst = (block_logits(draft, target, tokens) - expected).abs().max() / expected.abs().max()
        assert worst <= TOLERANCE, f"{worst} of the largest logit, after {len(tokens)} tokens"


@pytest.mark.parametrize("shift", [-1, 1])
def test_layer_ids_off_by_one_would_show(draft, target, golden, shift):
    for tokens, expected in golden:
        off = (block_logits(draft, target, tokens, shift) - expected).abs().max() / expected.abs().max()
        assert off > SHIFTED, f"a shift by {shift} moves the logits by only {off}"


def test_draft_vocabulary_is_mapped_to_the_targets(draft):
    """Offsets in d2t lead to the set bits of t2d, in order."""
    tensors = load_file(SPECULATORS_DRAFT / "model.safetensors")
    mapped = draft.to_target_ids(torch.arange(draft.draft.draft_vocab_size))
    assert torch.equal(mapped, tensors["t2d"].nonzero().flatten())


@pytest.mark.server
@pytest.mark.parametrize(
    "checkpoint, golden_folder", [(SPECULATORS_DRAFT, GOLDEN), (PEAGLE_DRAFT, GOLDEN.parent / "tiny-peagle")]
)
def test_accept_lengths_are_the_librarys_step_by_step(checkpoint, golden_folder):
    """A checkpoint names its target, so it is the model path."""
    known = json.loads((golden_folder / "accepted.json").read_text())
    assert len(known) >= 10
    jobs = [Job(tuple(one["prompt"]), len(one["output"])) for one in known]
    [answers] = run(["--model-path", checkpoint, *FLOAT32, WHOLE_BLOCKS], [jobs])
    for one, answer in zip(known, answers, strict=True):
        *kept, last = answer.accepted
        assert kept == one["accepted"][:-1], f"margin {one['smallest_margin']}: {answer} {one}"
        assert last >= one["accepted"][-1], "the library's last block ends with the request"
