"""P-EAGLE drafts with an EAGLE-3 config, as Amazon and NeMo AutoModel publish them.

Both are made here from the bundled draft, whose class and reference other tests compare with the library.
No published file was at hand: names and fields are those of their writers and readers.
"""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from serving import DFLASH2_DRAFT, DRAFT, PEAGLE_DRAFT, TARGET
from sglang.srt.arg_groups.model_override_base import resolving_view
from sglang.srt.configs.model_config_parser_registry import _MODEL_CONFIG_PARSER_REGISTRY as PARSERS
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_transformers_utils import get_config
from support import records
from support.checkpoint_fields import GOOD_PEAGLE
from support.drafts import write_checkpoint
from support.engine import build
from support.flat_peagle import INPUTS, SOURCE, amazon, nemo, tensors

from sglang_dflash.srt.arg_groups.checkpoint_detection import detect_speculators_model
from sglang_dflash.srt.arg_groups.resolve import check_draft_tensors, choose_block_size
from sglang_dflash.srt.configs.checkpoint import read_file
from sglang_dflash.srt.configs.draft_config_parser import DraftConfigParser
from sglang_dflash.srt.configs.draft_formats import flat_config, flatten_peagle, is_flat_peagle
from sglang_dflash.srt.configs.draft_kinds import ALIASES, PEagleDraftConfig, read_draft_config
from sglang_dflash.srt.configs.fields import DraftConfigError
from sglang_dflash.srt.configs.speculators_format import normalize
from sglang_dflash.srt.environ import DFlashOptions
from sglang_dflash.srt.models.peagle import PEagleDraftModel


@pytest.fixture(autouse=True)
def parser(monkeypatch):
    monkeypatch.setitem(PARSERS, "hf", DraftConfigParser)
    monkeypatch.delenv(DFlashOptions.TARGET_LAYERS.variable, raising=False)


def read(folder):
    config = get_config(str(folder), trust_remote_code=False, revision=None, model_override_args={})
    return config, PEagleDraftConfig.parse(config, str(folder))


def resolve(folder, algorithm: str):
    record = ServerArgs(
        model_path=str(TARGET), speculative_algorithm=algorithm, speculative_draft_model_path=str(folder)
    )
    detect_speculators_model(record)
    return resolving_view(record)


@pytest.mark.parametrize("writer", [amazon, nemo])
def test_it_is_the_draft_of_the_librarys_file(writer, tmp_path):
    source = json.loads(json.dumps(SOURCE))
    source["transformer_layer_config"]["model_type"] = "llama"
    library = write_checkpoint(tmp_path / "library", source, tensors())
    expected_config, expected = read(library)
    named = {"eagle_aux_hidden_state_layer_ids": INPUTS} if writer is amazon else {}
    named["norm_before_residual"] = SOURCE["norm_before_residual"]
    folder = writer(tmp_path / "flat", num_depths=expected.speculative_tokens, **named)
    config, draft = read(folder)
    assert draft == expected
    check_draft_tensors(str(folder), config, draft)
    found = dict(
        build(
            PEagleDraftModel, config, iter(load_file(folder / "model.safetensors").items())
        ).named_parameters()
    )
    wanted = build(PEagleDraftModel, expected_config, iter(tensors().items())).named_parameters()
    for name, parameter in wanted:
        assert torch.equal(found.pop(name), parameter), name
    assert not found


@pytest.mark.parametrize("algorithm", ["PEAGLE", "EAGLE3", "DFLASH"])
def test_layers_that_the_file_does_not_name(algorithm, tmp_path):
    """They are EAGLE-3's default ones, by the target's depth, in all processes."""
    folder = amazon(tmp_path / "draft")
    assert resolve(folder, algorithm).speculative_algorithm == "DFLASH"
    depth = json.loads((TARGET / "config.json").read_text())["num_hidden_layers"]
    _, draft = read(folder)
    assert draft.target_layer_ids == (1, depth // 2 - 1, depth - 4)
    assert draft.speculative_tokens == 7 and draft.mask_token_id == SOURCE["mask_token_id"]
    with pytest.raises(DraftConfigError, match="the target's depth is not known"):
        flatten_peagle(json.loads((folder / "config.json").read_text()), str(folder), None)


def test_an_eagle3_file_that_only_looks_like_one(tmp_path):
    """Without the mask tensor it stays with SGLang's own worker, or is no P-EAGLE draft."""
    folder = amazon(tmp_path / "draft")
    weights = load_file(folder / "model.safetensors")
    del weights["mask_hidden"]
    save_file(weights, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    assert not is_flat_peagle(config, str(folder))
    assert resolve(folder, "EAGLE3").speculative_algorithm == "EAGLE3"
    with pytest.raises(ValueError, match="is no P-EAGLE checkpoint"):
        resolve(folder, "PEAGLE")


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"mask_token_id": 5}, "given twice, with different ids"),
        ({"pard_token": "x"}, "pard_token must be an integer, got 'x'"),
        ({"mlp_bias": True}, "mlp_bias is True, which is not supported"),
        ({"logit_scale": 0.5}, "logit_scale is 0.5"),
        ({"target_hidden_size": 64}, "target_hidden_size is 64, but hidden_size is"),
        ({"num_depths": 0}, "num_depths must be a positive integer, got 0"),
        ({"layer_ids": "all"}, "must be a list of integers, got 'all'"),
    ],
)
def test_what_a_config_may_not_say(changes, words, tmp_path):
    config = json.loads((amazon(tmp_path / "draft") / "config.json").read_text()) | changes
    with pytest.raises(DraftConfigError, match=words):
        flatten_peagle(config, str(tmp_path / "draft"), 12)


@pytest.mark.parametrize("name, ours", ALIASES.items())
def test_nemos_names_of_dflash_drafts(name, ours, tmp_path):
    """Everything else of these files is z-lab's, so SGLang gets the class for z-lab's name."""
    source = DRAFT if ours == "DFlashDraftModel" else DFLASH2_DRAFT
    config = json.loads((source / "config.json").read_text())
    folder = write_checkpoint(tmp_path / "draft", config | {"architectures": [name]}, {})
    flat_config(read_file(str(folder)), str(folder))
    found = get_config(str(folder), trust_remote_code=False, revision=None, model_override_args={})
    assert found.architectures == [ours]
    assert read_draft_config(found, "draft").block_size == config["block_size"]


def test_the_trained_number_is_the_default():
    draft = read_draft_config(SimpleNamespace(**normalize(GOOD_PEAGLE, "ck")), "ck")
    assert isinstance(draft, PEagleDraftConfig) and draft.speculative_tokens == 7
    flags = SimpleNamespace(speculative_num_draft_tokens=None, speculative_dflash_block_size=None)
    assert choose_block_size(flags, draft) == 8


def test_a_window_of_peagles_draft_is_refused():
    with pytest.raises(ValueError, match="P-EAGLE does not support --speculative-draft-window-size"):
        records.resolve(records.record_of(PEAGLE_DRAFT, speculative_draft_window_size=64))
