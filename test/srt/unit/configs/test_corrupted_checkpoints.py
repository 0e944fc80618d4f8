"""Mutated draft checkpoints: each is refused by a named error, or its draft loads.

The error names the checkpoint. Checks run in start-up's order: config.json as JSON, through our parser as
SGLang reads it, against the target, against the headers of the tensors; a valid checkpoint is loaded.
`CORRUPTED_CHECKPOINTS=10000` requests more of them than `make test` does.
"""

import copy
import functools
import io
import itertools
import json
import logging
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, load_file, save
from serving import DRAFT, PEAGLE_DRAFT, ROOT, SPECULATORS_DRAFT, TARGET
from sglang.srt.configs.model_config_parser_registry import _MODEL_CONFIG_PARSER_REGISTRY as PARSERS
from sglang.srt.utils.hf_transformers_utils import get_config, get_context_length
from support.dflash2_cases import dflash2_config, random_dflash2_weights
from support.draft_cases import BASE, random_weights
from support.engine import build
from support.faults import FAULTS, with_tensor, write_fault
from support.quantized_drafts import quantize
from transformers import Qwen3Config

from sglang_dflash.srt.arg_groups.resolve import load_and_check_configs
from sglang_dflash.srt.arg_groups.support import draft_problems
from sglang_dflash.srt.configs.checkpoint import INDEX, read_file
from sglang_dflash.srt.configs.draft_config_parser import DraftConfigParser
from sglang_dflash.srt.configs.draft_formats import checkpoint_problems, flat_config
from sglang_dflash.srt.configs.draft_kinds import differences, read_draft_config
from sglang_dflash.srt.configs.draft_tensors import value_problems
from sglang_dflash.srt.configs.layer_fields import assumed_values
from sglang_dflash.srt.configs.quantization import read_quantization
from sglang_dflash.srt.models.dflash import DFlashDraftModel
from sglang_dflash.srt.models.dflash2 import DFlash2DraftModel
from sglang_dflash.srt.models.peagle import PEagleDraftModel

EXAMPLES = int(os.environ.get("CORRUPTED_CHECKPOINTS", "300"))
MODELS = {
    "DFlashDraftModel": DFlashDraftModel,
    "DFlash2DraftModel": DFlash2DraftModel,
    "PEagleDraftModel": PEagleDraftModel,
}
LLAMA = ROOT / "test" / "srt" / "golden" / "tiny-peagle" / "variants" / "llama-fc-norm"
NAMES = ("z-lab", "DFlash2", "speculators", "P-EAGLE", "P-EAGLE, llama", "quantized")


@functools.cache
def checkpoint(name: str) -> tuple[dict, bytes]:
    """Return config.json and model.safetensors of an intact checkpoint."""
    if name == "z-lab":
        return BASE, save(random_weights(BASE, 2))
    if name == "DFlash2":
        config = dflash2_config({})
        return config, save(random_dflash2_weights(config, 2))
    if name == "quantized":
        one_layer = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
        config = json.loads((DRAFT / "config.json").read_text()) | one_layer
        weights = load_file(DRAFT / "model.safetensors")
        first = {key: t for key, t in weights.items() if not re.match(r"layers\.[1-9]", key)}
        tensors, quantization, _ = quantize(first, "W4A16")
        return config | {"quantization_config": quantization}, save(tensors)
    folder = {"speculators": SPECULATORS_DRAFT, "P-EAGLE": PEAGLE_DRAFT, "P-EAGLE, llama": LLAMA}[name]
    config = json.loads((folder / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = "target"
    return config, (folder / "model.safetensors").read_bytes()


@pytest.fixture(scope="module", autouse=True)
def parser() -> Iterator[None]:
    """Register our parser as SGLang finds it."""
    before, PARSERS["hf"] = PARSERS["hf"], DraftConfigParser
    logging.disable(logging.WARNING)  # transformers has one for nearly every mutation
    yield
    logging.disable(logging.NOTSET)
    PARSERS["hf"] = before


@pytest.fixture(scope="module")
def targets(tmp_path_factory) -> dict[str, Path]:
    """Return targets of the sizes for which the intact checkpoints were made."""
    found = {}
    for name in NAMES:
        config, _ = checkpoint(name)
        layers = config.get("transformer_layer_config", config)
        target = {key: layers[key] for key in ("hidden_size", "vocab_size")}
        target |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
        target["num_hidden_layers"] = config.get("num_target_layers", 100)
        found[name] = tmp_path_factory.mktemp("target")
        (found[name] / "config.json").write_text(json.dumps(target))
    return found


def read(folder: Path, target: Path) -> Any:
    """Read a checkpoint in start-up's order; return the draft's config."""
    flat_config(read_file(str(folder)), str(folder))
    arguments = SimpleNamespace(
        model_path=str(target),
        revision=None,
        speculative_draft_model_path=str(folder),
        speculative_draft_model_revision=None,
        trust_remote_code=False,
        json_model_override_args="{}",
        load_format="auto",
        speculative_draft_load_format=None,
        speculative_draft_model_quantization=None,
        _speculative_draft_quantization_explicitly_set=False,
        tp_size=2,
        attn_dp_size=1,
    )
    draft_problems(arguments, read_file(str(folder)))
    load_and_check_configs(arguments)
    return get_config(str(folder), trust_remote_code=False, revision=None, model_override_args={})


def load_draft(folder: Path, target: Path) -> None:
    hf_config = read(folder, target)
    build(
        MODELS[hf_config.architectures[0]],
        hf_config,
        iter(load((folder / "model.safetensors").read_bytes()).items()),
    )


def write(folder: Path, config: bytes, weights: bytes, index: bytes | None = None) -> None:
    (folder / "config.json").write_bytes(config)
    (folder / "model.safetensors").write_bytes(weights)
    if index is not None:
        (folder / INDEX).write_bytes(index)


@pytest.mark.parametrize("name", NAMES)
def test_untouched_they_load(name, targets, tmp_path):
    """Intact checkpoints load, or the search below shows nothing."""
    config, weights = checkpoint(name)
    write(tmp_path, json.dumps(config).encode(), weights, json.dumps(index_of(weights)).encode())
    load_draft(tmp_path, targets[name])


MISSING = object()
BAD_VALUES = {
    "missing": MISSING,
    "null": None,
    "zero": 0,
    "negative": -1,
    "huge": 2**40,
    "a fraction": 1.5,
    "a boolean": True,
    "digits": "8",
    "a word": "several",
    "a list": [],
    "an object": {},
}


def with_value(config: dict, way: tuple, value: Any) -> dict:
    changed = copy.deepcopy(config)
    *parents, last = way
    owner = functools.reduce(lambda inner, key: inner[key], parents, changed)
    if value is MISSING:
        del owner[last]
    else:
        owner[last] = value
    return changed


@pytest.mark.parametrize("name", NAMES)
def test_each_field_with_a_bad_value_is_named_or_served(name, targets, tmp_path):
    """A refusal names the checkpoint and the field, or else the tensors that are then of another shape."""
    config, weights = checkpoint(name)
    (tmp_path / "model.safetensors").write_bytes(weights)
    refused, unnamed = set(), []
    named = [way for way in places(config) if isinstance(way[-1], str) and way[0] != "quantization_config"]
    for number, (way, kind) in enumerate(itertools.product(named, BAD_VALUES)):
        folder = tmp_path / str(number)  # SGLang remembers configs by folder
        folder.mkdir()
        (folder / "model.safetensors").symlink_to(tmp_path / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(with_value(config, way, BAD_VALUES[kind])))
        try:
            read(folder, targets[name])
        except ValueError as error:
            message = str(error).replace(str(folder), "CHECKPOINT")
            refused.add(way[-1])
            tensors = re.findall(r"[a-z_]+[.]weight|[.]bias|[(]W4[)]", message)
            if "CHECKPOINT" not in message or not (tensors or way[-1] in message):
                unnamed.append((".".join(map(str, way)), kind, message))
    assert not unnamed
    assert {"hidden_size", "num_hidden_layers", "vocab_size"} <= refused


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found_before_the_target_loads(fault, tmp_path):
    draft = write_fault(fault, tmp_path / "draft")
    with pytest.raises(ValueError) as refusal:
        read(draft, TARGET)
    assert re.search(FAULTS[fault][1], str(refusal.value), re.DOTALL), refusal.value
    assert str(draft) in str(refusal.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (torch.zeros_like, "weight_scale is zero throughout"),
        (torch.neg, "weight_scale holds [0-9]+ negative values"),
        (lambda scale: scale / 0, "weight_scale holds [0-9]+ values"),
    ],
    ids=["zero", "negative", "infinite"],
)
def test_scales_that_cannot_be_right_are_refused(change, words, targets, tmp_path):
    config, weights = checkpoint("quantized")
    spoilt = with_tensor("layers.0.mlp.up_proj.weight_scale", change)(load(weights))
    write(tmp_path, json.dumps(config).encode(), save(spoilt))
    with pytest.raises(ValueError, match=words):
        read(tmp_path, targets["quantized"])


def test_codebooks_of_fewer_tokens_than_the_targets_are_refused(targets, tmp_path):
    config, weights = checkpoint("DFlash2")
    tensors = load(weights)
    for side in ("predecessor", "successor"):
        name = f"candidate_selector.{side}_codebook"
        tensors[name] = tensors[name][:60].clone()
    write(tmp_path, json.dumps(config | {"vocab_size": 60}).encode(), save(tensors))
    with pytest.raises(ValueError, match="candidate selector cannot serve"):
        read(tmp_path, targets["DFlash2"])


@pytest.mark.parametrize(
    ("name", "changes", "more"),
    [
        ("speculators", {"draft_vocab_size": None}, {}),
        ("z-lab", {"vocab_size": 4096}, {}),
        ("z-lab", {}, {"other": torch.zeros(3)}),
    ],
    ids=["no vocabulary", "another vocabulary", "an unknown tensor"],
)
def test_what_is_no_fault_loads(name, changes, more, targets, tmp_path):
    config, weights = checkpoint(name)
    write(tmp_path, json.dumps(config | changes).encode(), save(load(weights) | more))
    load_draft(tmp_path, targets[name])


@pytest.mark.parametrize("actorder", ["group", "dynamic", "weight", "static"])
def test_orders_of_columns_by_either_name(actorder):
    quantization = copy.deepcopy(checkpoint("quantized")[0]["quantization_config"])
    [group] = quantization["config_groups"].values()
    group["weights"]["actorder"] = actorder
    scheme = read_quantization(quantization).scheme_of("layers.0.mlp.up_proj")
    assert scheme.has_order == (actorder in ("group", "dynamic"))


@pytest.mark.parametrize(
    "part, value, words",
    [
        ("weight_global_scale", 0.0004, "as if it were a factor"),
        ("weight_scale_2", 2700.0, "as if it were a divisor"),
        ("weight_global_scale", 2700.0, ""),
        ("weight_scale_2", 0.0004, ""),
    ],
)
def test_a_global_scale_stored_the_other_way(part, value, words):
    found = value_problems(f"fc.{part}", torch.tensor([value]))
    assert bool(found) == bool(words) and all(words in problem for problem in found)


def test_files_that_hold_no_weights(targets, tmp_path):
    """Nothing, nonsense, a tensor in two files; and PyTorch's own format, which is served."""
    config, weights = checkpoint("z-lab")

    def refusal(**files: bytes) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        for file, content in files.items():
            (folder / file.replace("__", ".")).write_bytes(content)
        try:
            read(folder, targets["z-lab"])
        except ValueError as error:
            assert str(folder) in str(error)
            return str(error)
        return ""

    saved = io.BytesIO()
    torch.save(load(weights), saved)
    assert "no weights are there" in refusal()
    assert "no weights are there" in refusal(optimizer__bin=b"1")
    assert "pytorch_model.bin is no file of PyTorch's tensors" in refusal(pytorch_model__bin=b"nonsense")
    assert "is no safetensors file" in refusal(model__safetensors=b"nonsense")
    assert "norm.weight, which is in a.safetensors too" in refusal(
        a__safetensors=weights, b__safetensors=weights
    )
    assert refusal(pytorch_model__bin=saved.getvalue()) == ""


@pytest.mark.parametrize("name", NAMES)
def test_a_draft_may_be_shorter_than_its_target(name, targets, tmp_path):
    """Whatever field gives its length, SGLang finds none that limits the target's."""
    config, weights = checkpoint(name)
    short = {"max_position_embeddings": 8, "model_max_length": 8, "max_sequence_length": 8}
    layers = config.get("transformer_layer_config")
    config = {**config, "transformer_layer_config": {**layers, **short}} if layers else {**config, **short}
    write(tmp_path, json.dumps(config).encode(), weights)
    hf_config = read(tmp_path, targets[name])
    assert get_context_length(hf_config) >= 1_000_000 and hf_config.max_position_embeddings == 8
    draft = read_draft_config(hf_config, "draft")
    text = SimpleNamespace(num_hidden_layers=draft.num_target_layers, vocab_size=draft.vocab_size)
    assert not differences(draft, text, 8)
    assert "max_position_embeddings is 8" in differences(draft, text, 9)["max_position_embeddings"]


@pytest.mark.parametrize(
    "changes", [{"group_size": "32"}, {"group_size": 0}, {"group_size": -1}, {"num_bits": 3}, None]
)
def test_a_malformed_quantization_does_not_fall_back(changes):
    """The built-in would draft noise. Only another library's file is left to it."""
    config = copy.deepcopy(checkpoint("quantized")[0])
    groups = config["quantization_config"]["config_groups"]
    if changes is None:
        groups.clear()
    for group in groups.values():
        group["weights"].update(changes)
    [finding] = checkpoint_problems(config, "draft")
    assert not finding.builtin_supports and finding.what.startswith("quantization_config: config_groups")
    [other] = checkpoint_problems({**config, "quantization_config": {"quant_method": "awq"}}, "draft")
    assert other.builtin_supports


def test_missing_values_are_told():
    layers = {"hidden_size": 8, "head_dim": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6}
    assert assumed_values(layers | {"rope_theta": 1e6}) == []
    assert assumed_values(layers | {"rope_scaling": {"rope_theta": 1e6}}) == []
    assert assumed_values(layers) == ["rope_theta is missing, 10000 is assumed"]
    assert len(assumed_values({})) == 4
    assert Qwen3Config().rope_parameters["rope_theta"] == 10_000 and Qwen3Config().rms_norm_eps == 1e-6


SCALARS = (
    st.none()
    | st.booleans()
    | st.sampled_from(
        [0, 1, 2, -1, 3, 7, 0.5, 2**31, 2**63, 10**30, 1e308, float("nan"), "", "qwen3", "silu", "null"]
    )
    | st.integers(-100, 5000)
    | st.text(max_size=4)
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)
# Fields that a checkpoint may have and these do not.
MORE_FIELDS = (
    "architectures",
    "auto_map",
    "d2t",
    "dflash_config",
    "dtype",
    "final_logit_softcapping",
    "head_dim",
    "hc_mult",
    "is_causal",
    "layer_types",
    "llm_config",
    "mask_token",
    "num_experts",
    "output_multiplier",
    "partial_rotary_factor",
    "quantization_config",
    "rope_parameters",
    "rope_scaling",
    "rope_type",
    "sliding_window",
    "speculators_model_type",
    "text_config",
    "use_swa",
)


def places(value: Any, before: tuple = ()) -> list[tuple]:
    """Return every place in a JSON value, as the keys that lead there."""
    found = [before] if before else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, nested in items:
        found += places(nested, (*before, key))
    return found


def spoil(value: Any, data) -> Any:
    """Remove, replace or nudge one place of a JSON value, or give it a neighbour."""
    if not places(value):
        return value
    value = copy.deepcopy(value)
    *way, last = data.draw(st.sampled_from(places(value)))
    parent = functools.reduce(lambda inner, key: inner[key], way, value)
    how = data.draw(st.sampled_from(["remove", "replace", "replace", "nudge", "add"]))
    if how == "remove":
        del parent[last]
    elif how == "nudge" and isinstance(parent[last], (int, float)):
        parent[last] += data.draw(st.sampled_from([-1, 1, 64]))
    elif how == "add" and isinstance(parent, dict):
        parent[data.draw(st.sampled_from(MORE_FIELDS))] = data.draw(JSON)
    else:
        parent[last] = data.draw(JSON)
    return value


def spoil_bytes(content: bytes, data, within: int) -> bytes:
    """Cut the bytes off, or change some of the first `within` bytes."""
    if data.draw(st.booleans()):
        return content[: data.draw(st.integers(0, len(content)))]
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, min(within, len(content)) - 1))] = data.draw(st.integers(0, 255))
    return bytes(changed)


def header_of(weights: bytes) -> tuple[dict, bytes]:
    """Return the header and the tensors' bytes."""
    length = int.from_bytes(weights[:8], "little")
    return json.loads(weights[8 : 8 + length]), weights[8 + length :]


def spoil_header(weights: bytes, data) -> bytes:
    header, tensors = header_of(weights)
    text = json.dumps(spoil(header, data)).encode()
    return len(text).to_bytes(8, "little") + text + tensors


def index_of(weights: bytes) -> dict:
    header, _ = header_of(weights)
    return {"weight_map": {name: "model.safetensors" for name in header if name != "__metadata__"}}


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
def test_a_corrupted_checkpoint_is_refused_or_loads(targets, data):
    name = data.draw(st.sampled_from(NAMES))
    config, weights = checkpoint(name)
    text, index = json.dumps(config).encode(), None
    where = data.draw(
        st.sampled_from(["config", "config", "two places", "text", "header", "header bytes", "index"])
    )
    if where == "config":
        text = json.dumps(spoil(config, data)).encode()
    elif where == "two places":
        text = json.dumps(spoil(spoil(config, data), data)).encode()
    elif where == "text":
        text = spoil_bytes(text, data, len(text))
    elif where == "header":
        weights = spoil_header(weights, data)
    elif where == "header bytes":
        weights = spoil_bytes(weights, data, 8 + int.from_bytes(weights[:8], "little"))
    else:
        index = json.dumps(spoil(index_of(weights), data)).encode()
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), text, weights, index)
        try:
            load_draft(Path(folder), targets[name])
            event(f"{where}: loaded")
        except (ValueError, OSError) as error:
            assert folder in str(error), repr(error)
            assert len(str(error)) < 4000
            event(f"{where}: refused")
