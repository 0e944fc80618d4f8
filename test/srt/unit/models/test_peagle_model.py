"""Our P-EAGLE draft against the `speculators` library's own model.

Golden data: golden/tiny-peagle/, made by models/training/speculators_golden.py (commit 22b0e3f1) with the
library's classes in float32. It holds logits of one step after some prompts, and of small random drafts with
options that the bundled draft does not use. Logits agree to 1e-4 of the largest. Likely mistakes move them by
more than a hundred times that.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from serving import PEAGLE_DRAFT, ROOT, TARGET
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from support.engine import Pools, build
from transformers import AutoModelForCausalLM

from sglang_dflash.srt.configs.draft_config_parser import DraftConfigParser
from sglang_dflash.srt.models.peagle import PEagleDraftModel, PEagleRows
from sglang_dflash.srt.speculative.drafters.peagle import PEagleVerifyInput

GOLDEN = ROOT / "test" / "srt" / "golden" / "tiny-peagle"
TOLERANCE = 1e-4
SHIFTED = 100 * TOLERANCE


def parse_config(config: dict, folder: Path):
    (folder / "config.json").write_text(json.dumps(config))
    return DraftConfigParser().parse(str(folder), trust_remote_code=False)


def load(checkpoint: Path, folder: Path, **changes) -> PEagleDraftModel:
    config = json.loads((checkpoint / "config.json").read_text()) | changes
    # The random drafts have no target, and one reads the embedding's output, which SGLang cannot capture. The
    # source layers do not matter here.
    config["speculators_config"]["verifier"]["name_or_path"] = "none"
    config["eagle_aux_hidden_state_layer_ids"] = [
        max(i, 1) for i in config["eagle_aux_hidden_state_layer_ids"]
    ]
    weights = load_file(checkpoint / "model.safetensors")
    wide = ((name, t.float() if t.is_floating_point() else t) for name, t in weights.items())
    return build(PEagleDraftModel, parse_config(config, folder), wide)


@pytest.fixture(scope="module")
def target():
    return AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    return load(PEAGLE_DRAFT, tmp_path_factory.mktemp("draft"))


def step_logits(draft: PEagleDraftModel, tokens: list[int], aux_hidden: torch.Tensor) -> torch.Tensor:
    """Return draft logits [K, draft vocab] after `tokens`, all rows in one block.

    Args:
        draft: The draft model.
        tokens: The text so far, n + 1 token ids.
        aux_hidden: Captured target states [n, A * H], of all tokens but the last.
    """
    real, drafted = len(tokens) - 1, draft.draft.speculative_tokens
    rows = torch.tensor([tokens[1:] + [draft.draft.mask_token_id] * (drafted - 1)])
    pools = Pools.of_draft(draft, 1, rows.shape[1])
    batch = pools.blocks(rows, [0])
    fused = torch.cat((draft.fuse(aux_hidden[:real]), draft.fused_mask.expand(drafted - 1, -1)))
    draft_rows = PEagleRows(fused, first_drafting=torch.tensor([real - 1]), num_drafting=drafted)
    batch.spec_info = PEagleVerifyInput(rows.shape[1], CaptureHiddenMode.NULL, draft_rows=draft_rows)
    return torch.nn.functional.linear(pools.forward(draft, batch).hidden_states, draft.head.weight)


def target_states(target, tokens: list[int], ids: list[int]) -> torch.Tensor:
    """Return states [n, A * H] of all tokens; ids index HF's `hidden_states`."""
    with torch.no_grad():
        states = target(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    return torch.cat([states[i][0] for i in ids], dim=-1)


def worst(logits: torch.Tensor, expected: torch.Tensor) -> float:
    return ((logits[:, : expected.shape[1]] - expected).abs().max() / expected.abs().max()).item()


def differences(draft: PEagleDraftModel, target, shift: int = 0) -> list[float]:
    """Return how far the logits of each golden step are off, if layer ids are `shift` too high."""
    data = np.load(GOLDEN / "block_logits.npz")
    ids = [layer + 1 + shift for layer in draft.draft.target_layer_ids]
    found = []
    for i in range(sum(name.startswith("prompt_") for name in data)):
        tokens = data[f"prompt_{i}"].tolist()
        logits = step_logits(draft, tokens, target_states(target, tokens, ids))
        found.append(worst(logits, torch.from_numpy(data[f"logits_{i}"])))
    assert found
    return found


def test_logits_are_the_librarys(draft, target):
    assert max(differences(draft, target)) <= TOLERANCE


@pytest.mark.parametrize("shift", [-1, 1])
def test_layer_ids_off_by_one_would_show(draft, target, shift):
    assert min(differences(draft, target, shift)) > SHIFTED


def test_the_other_norm_before_residual_would_show(target, tmp_path):
    other = load(PEAGLE_DRAFT, tmp_path, norm_before_residual=True)
    assert min(differences(other, target)) > SHIFTED


@pytest.mark.parametrize("variant", sorted(p.name for p in (GOLDEN / "variants").iterdir()))
def test_options_the_bundled_draft_does_not_use(variant, tmp_path):
    """Cover Llama layers, depth, a window of 5, biases, fc norms, one vocabulary."""
    draft = load(GOLDEN / "variants" / variant, tmp_path)
    data = np.load(GOLDEN / "variants" / variant / "logits.npz")
    logits = step_logits(draft, data["tokens"].tolist(), torch.from_numpy(data["aux"]).float())
    assert worst(logits, torch.from_numpy(data["logits"])) <= TOLERANCE


def test_a_captured_graph_finds_its_rows(draft):
    """Rows come from static buffers if SGLang captures with its own spec_info."""
    generator = torch.Generator().manual_seed(0)
    draft.allocate_blocks(requests=3, width=6, num_drafting=3)
    blocks = draft.blocks(2)
    blocks.fused.copy_(torch.randn(blocks.fused.shape, generator=generator))
    blocks.first_drafting.copy_(torch.tensor([0, 3]))
    pools = Pools.of_draft(draft, 2, 6)
    tokens = torch.randint(100, (2, 6), generator=generator)
    fused, outputs = blocks.fused.clone(), []
    for rows in (blocks, None):
        batch = pools.blocks(tokens, [0, 0])
        if rows is not None:
            batch.spec_info = PEagleVerifyInput(6, CaptureHiddenMode.NULL, draft_rows=rows)
        draft.blocks(2).fused.copy_(fused)
        outputs.append(pools.forward(draft, batch))
    assert torch.equal(outputs[0].hidden_states, outputs[1].hidden_states)
    assert outputs[1].draft_tokens.shape == (6,)


def test_a_mask_hidden_that_is_missing_or_of_another_size_is_named(tmp_path):
    config = parse_config(json.loads((PEAGLE_DRAFT / "config.json").read_text()), tmp_path)
    weights = load_file(PEAGLE_DRAFT / "model.safetensors")
    weights["mask_hidden"] = weights["mask_hidden"][..., :-1]
    with pytest.raises(ValueError, match=r"mask_hidden is \(1, 1, 767\), expected \(1, 1, 768\)"):
        build(PEagleDraftModel, config, iter(weights.items()))
    del weights["mask_hidden"]
    with pytest.raises(ValueError, match="mask_hidden.*EAGLE-3"):
        build(PEagleDraftModel, config, iter(weights.items()))
