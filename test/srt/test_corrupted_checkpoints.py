"""Mutated draft checkpoints: each is refused by a named error, or its draft loads.

The error names the checkpoint. Checks run in start-up's order: config.json as JSON, through our parser as
SGLang reads it, against the target, against the headers of the tensors; a valid checkpoint is loaded.
`CORRUPTED_CHECKPOINTS=10000` requests more of them than `make test` does.
"""

import copy
import functools
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
from serving import DRAFT, PEAGLE_DRAFT, ROOT, SPECULATORS_DRAFT
from sglang.srt.configs.model_config_parser_registry import _MODEL_CONFIG_PARSER_REGISTRY as PARSERS
from sglang.srt.utils.hf_transformers_utils import get_config
from support.dflash2_cases import dflash2_config, random_dflash2_weights
from support.draft_cases import BASE, random_weights
from support.engine import build
from support.packed_drafts import pack

from sglang_dflash.srt.arg_groups.dflash_args import load_and_check_configs
from sglang_dflash.srt.arg_groups.draft_files import check_draft_config
from sglang_dflash.srt.configs.draft_config_parser import DraftConfigParser
from sglang_dflash.srt.configs.weight_files import INDEX
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
        packed, quantization, _ = pack(first, "W4A16")
        return config | {"quantization_config": quantization}, save(packed)
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
    check_draft_config(str(folder))
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
    )
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


@pytest.mark.parametrize("token, is_inside", [(0, True), (-1, False), (2**40, False)])
def test_a_map_out_of_the_targets_vocabulary_is_refused_in_the_launcher(token, is_inside, targets, tmp_path):
    """The library's copies of target tensors, also there, are not read."""
    config, weights = checkpoint("speculators")
    tensors = load(weights)
    tensors["d2t"][0] = token
    tensors |= {f"verifier_{name}.weight": torch.zeros(3, 5) for name in ("norm", "lm_head")}
    write(tmp_path, json.dumps(config).encode(), save(tensors))
    if is_inside:
        read(tmp_path, targets["speculators"])
    else:
        with pytest.raises(ValueError, match="d2t points outside"):
            read(tmp_path, targets["speculators"])


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


def fields(config: dict) -> list[tuple]:
    """Return the places of all named fields. test_quantized_drafts.py spoils those of quantizations."""
    found = [way for way in places(config) if isinstance(way[-1], str)]
    return [way for way in found if way[0] != "quantization_config"]


@pytest.mark.parametrize("name", NAMES)
def test_each_field_with_a_bad_value_is_named_or_served(name, targets, tmp_path):
    """A refusal names the checkpoint and the field, or else the tensors that are then of another shape."""
    config, weights = checkpoint(name)
    (tmp_path / "model.safetensors").write_bytes(weights)
    refused, unnamed = set(), []
    cases = [(way, kind) for way in fields(config) for kind in BAD_VALUES]
    for number, (way, kind) in enumerate(cases):
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
            keys = way[-2:] if way[0] == "quantization_config" else way[-1:]
            is_named = tensors or any(str(key) in message for key in keys)
            if "CHECKPOINT" not in message or not is_named:
                unnamed.append((".".join(map(str, way)), kind, message))
    assert not unnamed
    assert {"hidden_size", "num_hidden_layers", "vocab_size"} <= refused


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
    "head_dim",
    "hc_mult",
    "is_causal",
    "layer_types",
    "llm_config",
    "num_experts",
    "partial_rotary_factor",
    "quantization_config",
    "rope_parameters",
    "rope_scaling",
    "rope_type",
    "sliding_window",
    "speculators_model_type",
    "text_config",
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
