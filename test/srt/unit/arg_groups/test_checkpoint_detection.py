"""`--model-path <speculators checkpoint>`: model served, precedence, contradictions."""

import copy
import json
from pathlib import Path

import pytest
from sglang.srt.arg_groups.model_override_base import resolving_view
from sglang.srt.server_args import ServerArgs
from support.checkpoint_fields import GOOD, GOOD_PEAGLE

from sglang_dflash.srt.arg_groups import resolve
from sglang_dflash.srt.arg_groups.checkpoint_detection import detect_speculators_model, locate_verifier
from sglang_dflash.srt.arg_groups.resolve import _check_draft_is_there
from sglang_dflash.srt.configs.fields import DraftConfigError


def write_checkpoint(tmp_path: Path, good: dict) -> Path:
    """Write a speculators checkpoint next to its verifier, which it names by folder."""
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text('{"model_type": "qwen3"}')
    config = copy.deepcopy(good)
    config["speculators_config"]["verifier"]["name_or_path"] = "target"
    folder = tmp_path / "draft"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    return write_checkpoint(tmp_path, GOOD)


@pytest.fixture
def peagle(tmp_path) -> Path:
    return write_checkpoint(tmp_path, GOOD_PEAGLE)


def detect(**arguments):
    """Return the arguments after detection."""
    record = ServerArgs(**arguments)
    detect_speculators_model(record)
    return resolving_view(record)


def test_target_draft_and_algorithm_come_from_the_checkpoint(checkpoint):
    args = detect(model_path=str(checkpoint), revision="v2")
    assert args.model_path == str(checkpoint.parent / "target")
    assert args.speculative_draft_model_path == str(checkpoint)
    assert args.speculative_algorithm == "DFLASH"
    assert (args.revision, args.speculative_draft_model_revision) == (None, "v2")


def test_flags_of_the_user_win(checkpoint):
    given = {"tokenizer_path": "mine", "served_model_name": "name", "speculative_num_draft_tokens": 4}
    args = detect(model_path=str(checkpoint), speculative_algorithm="dflash", **given)
    assert {name: getattr(args, name) for name in given} == given
    assert args.speculative_algorithm == "DFLASH"


def test_an_ordinary_model_is_left_alone(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    args = detect(model_path=str(tmp_path))
    assert args.model_path == str(tmp_path) and args.speculative_algorithm is None
    assert detect(model_path=str(tmp_path / "nowhere")).speculative_algorithm is None


@pytest.mark.parametrize("kind", ["eagle3", "dspark", "mtp", "", 3, ["dflash"]])
def test_a_model_that_is_no_draft_of_ours_is_left_to_sglang(checkpoint, kind):
    (checkpoint / "config.json").write_text(json.dumps(GOOD | {"speculators_model_type": kind}))
    args = detect(model_path=str(checkpoint))
    assert args.model_path == str(checkpoint) and args.speculative_algorithm is None


def test_contradictions_are_named(checkpoint):
    with pytest.raises(ValueError, match="--speculative-algorithm EAGLE3 cannot run"):
        detect(model_path=str(checkpoint), speculative_algorithm="EAGLE3")
    with pytest.raises(ValueError, match="is a draft, and so is --speculative-draft-model-path 'another'"):
        detect(model_path=str(checkpoint), speculative_draft_model_path="another")


def test_a_broken_checkpoint_is_named_before_anything_is_loaded(checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    del config["mask_token_id"], config["block_size"]
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(DraftConfigError, match="mask_token_id is missing"):
        detect(model_path=str(checkpoint))


def test_where_a_verifier_is_looked_for(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "ck" / "inside").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert locate_verifier("here", "ck") == "here"
    assert locate_verifier("here", str(tmp_path / "ck") + "/") == "here"
    monkeypatch.chdir("/")
    assert locate_verifier("here", str(tmp_path / "ck")) == str(tmp_path / "here")
    assert locate_verifier("inside", str(tmp_path / "ck")) == str(tmp_path / "ck" / "inside")
    assert locate_verifier("org/some-model", str(tmp_path / "ck")) == "org/some-model"
    for gone in (str(tmp_path / "gone"), "./gone", "a/b/gone"):
        with pytest.raises(ValueError, match="not on this machine"):
            locate_verifier(gone, str(tmp_path / "ck"))


ALONE = [(name, True) for name in (None, "PEAGLE", "peagle", "EAGLE3", "DFLASH")]
BESIDE = [(name, False) for name in ("PEAGLE", "peagle", "EAGLE3", "eagle3")]


@pytest.mark.parametrize("named, is_alone", ALONE + BESIDE)
def test_a_peagle_checkpoint_alone_or_beside_its_target(named, is_alone, peagle, caplog):
    """SGLang serves it as DFLASH under any name; one log line names P-EAGLE."""
    target, draft = str(peagle.parent / "target"), str(peagle)
    given = {"model_path": target, "speculative_draft_model_path": draft}
    with caplog.at_level("INFO"):
        args = detect(speculative_algorithm=named, **({"model_path": draft} if is_alone else given))
    assert (args.speculative_algorithm, args.model_path) == ("DFLASH", target)
    assert args.speculative_draft_model_path == draft
    said = [r.message for r in caplog.records if r.name.startswith("sglang_dflash")]
    assert len([message for message in said if "P-EAGLE" in message]) == 1


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"},
        {"speculators_model_type": "eagle3"},
    ],
)
def test_an_ordinary_eagle3_draft_is_left_alone(peagle, config):
    (peagle / "config.json").write_text(json.dumps(config))
    target = str(peagle.parent / "target")
    args = detect(model_path=target, speculative_algorithm="EAGLE3", speculative_draft_model_path=str(peagle))
    assert args.speculative_algorithm == "EAGLE3"
    assert detect(model_path=target, speculative_algorithm="EAGLE3").speculative_algorithm == "EAGLE3"


def test_peagle_with_another_draft_is_named(peagle, monkeypatch):
    target, algorithm = str(peagle.parent / "target"), {"speculative_algorithm": "PEAGLE"}
    with pytest.raises(ValueError, match="PEAGLE needs a draft"):
        detect(model_path=target, **algorithm)
    with pytest.raises(ValueError, match="no config.json there"):
        detect(model_path=target, speculative_draft_model_path=str(peagle / "gone"), **algorithm)
    monkeypatch.chdir(peagle.parent)
    monkeypatch.setattr(resolve, "find_file", {"target/on-the-hub": "config.json"}.get)
    _check_draft_is_there("target/on-the-hub")  # beside a folder of the publisher's name
    with pytest.raises(ValueError, match="no config.json there"):
        _check_draft_is_there("target/nowhere")
    (peagle / "config.json").write_text(json.dumps(GOOD_PEAGLE | {"speculators_model_type": "eagle3"}))
    with pytest.raises(ValueError, match="is no P-EAGLE checkpoint: its speculators_model_type is 'eagle3'"):
        detect(model_path=target, speculative_draft_model_path=str(peagle), **algorithm)
