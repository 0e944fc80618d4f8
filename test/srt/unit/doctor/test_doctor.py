"""The doctor names faults of a checkpoint, and finds none in the bundled ones."""

import json
import re
import shutil
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from serving import DFLASH2_DRAFT, DRAFT, PEAGLE_DRAFT, ROOT, SPECULATORS_DRAFT, TARGET
from support.drafts import make_deepseek_draft, make_draft, read_config
from support.faults import FAULTS, without
from support.quantized_drafts import write_quantized
from training import quantization_cost
from transformers import AutoTokenizer

from sglang_dflash import doctor
from sglang_dflash.srt.doctor import measure, serve, static_checks
from sglang_dflash.srt.doctor.interpretations import other_interpretations
from sglang_dflash.srt.doctor.measure import encode
from sglang_dflash.srt.doctor.pair import PROMPTS, BadInput, Checkpoint, Pair, read_prompts
from sglang_dflash.srt.doctor.plain_drafts import plain_draft
from sglang_dflash.srt.doctor.report import as_json, page
from sglang_dflash.srt.doctor.serve import ServeReport

BUNDLED = (DRAFT, SPECULATORS_DRAFT, PEAGLE_DRAFT, DFLASH2_DRAFT)


def examine(draft: Path, *more: str, target: Path = TARGET) -> int:
    return doctor.main(["--model-path", str(target), "--draft", str(draft), *more])


def open_pair(draft: Path) -> Pair:
    return Pair(Checkpoint.open(str(TARGET), False), Checkpoint.open(str(draft), True))


def make_target(folder: Path, **changes) -> Path:
    """Write the bundled target without its weights, with `changes` to its config."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TARGET / name, folder)
    config = json.loads((TARGET / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def shuffled_d2t(tensors):
    """Shuffle the ids: each is still in the target's vocabulary, none at its old place."""
    count = tensors["d2t"].numel()
    ids = (torch.arange(count) + tensors["d2t"]).flip(0)
    return tensors | {"d2t": ids - torch.arange(count)}


# fault -> (how the checkpoint differs from a bundled one, the words of the doctor)
BROKEN = {
    **{name: FAULTS[name] for name in ("hidden size", "a tensor missing", "a map of target ids")},
    "layer ids one too high": (FAULTS["id of the last layer"][0], "subtract one from each"),
    "mask token": (
        dict(dflash_config={"mask_token_id": 300}),
        r"mask_token_id 300 is an ordinary piece of text.*<\|mask\|> is 3",
    ),
    "another vocabulary": (dict(vocab_size=4096), r"vocab_size is 4096, but the target's.* is 2048"),
    "d2t out of order": (
        dict(weights=shuffled_d2t, base=SPECULATORS_DRAFT),
        r"d2t maps to the tokens that t2d names, but in another order",
    ),
    "d2t out of order, without t2d": (
        dict(weights=lambda t: without("t2d")(shuffled_d2t(t)), base=PEAGLE_DRAFT),
        r"rows of the draft's head are not those of the target's tokens that d2t maps them to",
    ),
    "another depth": (dict(num_target_layers=36), r"num_target_layers is 36, but"),
    "another end of text": (dict(eos_token_id=9), r"eos_token_id is 9 in the draft and 0 in"),
}


@pytest.mark.parametrize("draft", BUNDLED, ids=lambda path: path.name)
def test_nothing_is_found_in_a_bundled_draft(draft, capsys):
    assert examine(draft) == 0
    said = capsys.readouterr().out
    assert "No fault found." in said and "fault:" not in said and "note:" not in said


@pytest.mark.parametrize("what", BROKEN)
def test_a_fault_is_named(what, tmp_path, capsys):
    changes, said = BROKEN[what]
    assert examine(make_draft(tmp_path / "draft", **changes)) == 1
    faults = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fault: ")]
    assert any(re.search(said, line) for line in faults), faults


AWQ = {"quantization_config": {"quant_method": "awq"}}
BUILT_IN = "served by SGLang's built-in DFLASH, on a GPU alone, because"


@pytest.mark.parametrize(
    "changes, words",
    [
        ({}, "served by sglang-dflash"),
        ({"use_gemma_norm": True}, f"{BUILT_IN} use_gemma"),
        ({"dflash_config": {"markov_order": 1}}, "served by no implementation: dflash_config.markov_order"),
        ({"vocab_size": None}, "served by no implementation: a fault ends the start"),
        (AWQ, f"{BUILT_IN} quant_method 'awq' is not served"),
        (
            {"speculators_model_type": "dflash", **AWQ},
            "served by no implementation: quant_method 'awq' is not served",
        ),
    ],
)
def test_who_serves_is_said(changes, words, tmp_path, capsys):
    examine(make_draft(tmp_path / "draft", **changes))
    assert words in capsys.readouterr().out


@pytest.mark.parametrize("draft", [SPECULATORS_DRAFT, PEAGLE_DRAFT], ids=lambda path: path.name)
def test_a_target_of_another_family_is_named(draft, tmp_path, capsys):
    target = make_target(tmp_path / "target", architectures=["LlamaForCausalLM"], model_type="llama")
    assert examine(draft, target=target) == 1
    said = capsys.readouterr().out
    assert "made for a Qwen3ForCausalLM, the target is a LlamaForCausalLM. Serve the target" in said


def test_another_targets_head_is_named(tmp_path, capsys):
    """Same sizes, same name, other weights: as after another revision."""
    target = make_target(tmp_path / "tiny-qwen3-code")
    rows = torch.randn(2048, 256, generator=torch.Generator().manual_seed(0))
    save_file({"model.embed_tokens.weight": rows}, target / "model.safetensors")
    assert examine(PEAGLE_DRAFT, target=target) == 1
    assert "it is another target's" in capsys.readouterr().out


@pytest.mark.parametrize(
    "draft, ids, said",
    [
        (DRAFT, {"dflash_config": {"target_layer_ids": [2, 5, 7, 10]}}, "plus one.*subtract one from each"),
        (SPECULATORS_DRAFT, {"aux_hidden_state_layer_ids": [1, 4, 6, 9]}, "minus one.*add one to each"),
    ],
)
def test_the_usual_ids_off_by_one_are_noted(draft, ids, said, tmp_path, capsys):
    """It may be intended, so it is no fault."""
    assert examine(make_draft(tmp_path / "draft", base=draft, **ids)) == 0
    assert re.search(f"note: .*{said}", capsys.readouterr().out)


def test_notes_are_no_faults(tmp_path, capsys):
    draft = make_draft(
        tmp_path / "draft",
        base=PEAGLE_DRAFT,
        speculators_config={"verifier": {"name_or_path": "somebody/another-model"}},
    )
    target = make_target(tmp_path / "target", quantization_config={"quant_method": "awq"}, rope_theta=5e5)
    assert examine(draft, target=target) == 0
    said = capsys.readouterr().out
    assert "note: the draft names 'somebody/another-model' as its target" in said
    assert "note: the target is quantised" in said and "rope_theta is 10000 in the draft and 500000" in said


def folder_with(path: Path, config: str | None = None, tensors: bytes | None = None) -> Path:
    path.mkdir()
    if config is not None:
        (path / "config.json").write_text(config)
    if tensors is not None:
        (path / "model.safetensors").write_bytes(tensors)
    return path


CONFIG, TENSORS = (DRAFT / "config.json").read_text(), (DRAFT / "model.safetensors").read_bytes()
BAD_INPUT = {
    "no such path": (lambda p: p / "nowhere", "no such directory"),
    "no config": (lambda p: folder_with(p / "d"), "config.json cannot be read: No such file"),
    "no JSON": (lambda p: folder_with(p / "d", "{"), "config.json is not JSON"),
    "no object": (lambda p: folder_with(p / "d", "[]"), "config.json must hold an object, this is a list"),
    "no tensors": (lambda p: folder_with(p / "d", CONFIG), "no weights are there"),
    "no header": (
        lambda p: folder_with(p / "d", CONFIG, b"hello"),
        "model.safetensors is no safetensors file",
    ),
    "cut short": (
        lambda p: folder_with(p / "d", CONFIG, TENSORS[: len(TENSORS) * 9 // 10]),
        "model.safetensors is no safetensors file: .*file not fully covered",
    ),
    "a file": (lambda p: DRAFT / "config.json", "a file, where the directory"),
    "another architecture": (lambda p: TARGET, "neither a DFlash nor a P-EAGLE draft.*Qwen3ForCausalLM"),
    "EAGLE-3": (
        lambda p: make_draft(p / "d", base=PEAGLE_DRAFT, speculators_model_type="eagle3"),
        "a draft of kind 'eagle3'",
    ),
}


@pytest.mark.parametrize("what", BAD_INPUT)
def test_bad_input_is_one_line(what, tmp_path, capsys):
    make, said = BAD_INPUT[what]
    assert examine(make(tmp_path)) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and re.fullmatch(f"doctor: .*{said}.*\n", captured.err), captured.err


@pytest.mark.parametrize(
    "more, said",
    [
        (["--html", "{}/nowhere/page.html"], "No such file or directory: .*page.html"),
        (["--html", "{}"], "Is a directory"),
        (["--prompts", "{}/none.jsonl"], "No such file"),
        (["--prompts", "{}/bad.jsonl"], 'bad.jsonl:2: a prompt is an object with "text"'),
        (["--prompts", "{}/words.jsonl"], 'words.jsonl:1: a prompt is an object with "text"'),
        (["--serve", "--model-path 'x"], "--serve: No closing quotation"),
    ],
)
def test_bad_files_are_one_line(more, said, tmp_path, capsys):
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"prompt": "b"}\n')
    (tmp_path / "words.jsonl").write_text('{"messages": ["hi"]}\n')
    assert examine(DRAFT, *(part.format(tmp_path) for part in more)) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and re.fullmatch(f"doctor: .*({said}).*\n", captured.err), captured.err


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"initializer_range": "0.02"}, "config.json is not a Qwen3 draft's"),
        ({"attention_dropout": None}, "config.json is not a Qwen3 draft's"),
        ({"speculators_config": {"verifier": {"architectures": [["Other"], 7]}}}, "made for a "),
        ({"speculators_config": {"verifier": {"architectures": "Qwen3ForCausalLM"}}}, None),
    ],
)
def test_a_config_of_wrong_types_is_a_finding(changes, said, tmp_path, capsys):
    base = SPECULATORS_DRAFT if "speculators_config" in changes else DRAFT
    assert examine(make_draft(tmp_path / "draft", base=base, **changes)) == int(said is not None)
    captured = capsys.readouterr()
    assert not captured.err and (said or "No fault found.") in captured.out


def test_files_are_those_that_a_server_loads(tmp_path, capsys):
    """Two with the same tensors end a start. Hidden ones are no checkpoint's."""
    draft = make_draft(tmp_path / "draft")
    (draft / "._model.safetensors").write_bytes(b"of a Mac")
    assert examine(draft) == 0
    shutil.copy(draft / "model.safetensors", draft / "old.safetensors")
    assert examine(draft) == 1
    assert "old.safetensors: fc.weight stands for fc.weight, which is in model.safetensors too" in (
        capsys.readouterr().out
    )
    (draft / "old.safetensors").unlink()
    torch.save(load_file(draft / "model.safetensors"), draft / "pytorch_model.bin")
    (draft / "model.safetensors").rename(tmp_path / "elsewhere")
    (draft / "._model.safetensors").unlink()
    assert examine(draft) == 0


@pytest.mark.parametrize(
    "command, flags",
    [
        ("python -m sglang.launch_server --model-path {}", "--model-path {}"),
        ("A='b c' numactl --interleave=all python -m sglang.launch_server --port 1", "--port 1"),
        ("sglang serve {} --port 1", "--model-path {} --port 1"),
        ("sglang serve --model-path {} \\\r\n  --port 1 > log 2>&1 &", "--model-path {} --port 1"),
        ("--model-path {} | tee log", "--model-path {}"),
    ],
)
def test_commands_as_people_have_them(command, flags, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(serve, "examine", lambda flags, **_: seen.extend(flags) or ServeReport(serve.OURS))
    monkeypatch.setattr(doctor.os, "environ", {})
    assert doctor.main(["--serve", command.format(TARGET)]) == 0
    assert seen == flags.format(TARGET).split()
    assert doctor.os.environ == ({"A": "b c"} if "A=" in command else {})


def test_a_prompt_may_hold_what_else_ends_a_line(tmp_path):
    texts = ["a\u2028b", "a\u2029b\x85c"]
    lines = [json.dumps({"text": text, "messages": None}, ensure_ascii=False) for text in texts]
    (tmp_path / "prompts.jsonl").write_text("\ufeff" + "\r\n".join(lines), encoding="utf-8")
    prompts = read_prompts(tmp_path / "prompts.jsonl")
    assert [prompt["text"] for prompt in prompts] == texts
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    assert encode(prompts[0], tokenizer, "target") == tokenizer(texts[0]).input_ids


def test_a_chat_names_arguments_of_its_template():
    """As a request does. The built-in chats are answered without thinking."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    tokenizer.chat_template = "{{ 'thinks' if enable_thinking | default(true) else 'answers' }}"
    chats = [prompt for prompt in PROMPTS if "messages" in prompt]
    bare = {"messages": chats[0]["messages"]}
    encoded = {tuple(encode(chat, tokenizer, "target")) for chat in chats}
    assert encoded == {tuple(tokenizer("answers", add_special_tokens=False).input_ids)}
    assert encode(bare, tokenizer, "target") == tokenizer("thinks", add_special_tokens=False).input_ids


def test_a_draft_is_no_target(capsys):
    assert examine(DRAFT, target=SPECULATORS_DRAFT) == 2
    assert "--model-path is the target" in capsys.readouterr().err


# --- measured ---


@pytest.fixture(scope="module")
def observed() -> measure.TargetTranscripts:
    """The bundled target's answers; they involve no draft, so all tests share them."""
    torch.set_num_threads(1)
    return measure.observe(Checkpoint.open(str(TARGET), with_tensors=False), PROMPTS, 64, "cpu")


def some(observed: measure.TargetTranscripts, every: int) -> measure.TargetTranscripts:
    """Return one text in `every`, and half that share of the branches."""
    return replace(observed, texts=observed.texts[::every], branches=observed.branches[:: 2 * every])


def measured_pair(draft: Path, observed) -> tuple[Pair, measure.Measurement]:
    pair = open_pair(draft)
    return pair, measure.measure(pair, observed)


@pytest.fixture(
    scope="module",
    params=[
        # No other interpretation comes near a finding: the best one gains 0.001 nats, 0.1 standard errors.
        pytest.param((PEAGLE_DRAFT, 3), id="some texts"),
        *(pytest.param((draft, 1), id=draft.name, marks=pytest.mark.long) for draft in BUNDLED),
    ],
)
def bundled(request, observed):
    draft, every = request.param
    return measured_pair(draft, some(observed, every))


def test_nothing_is_found_by_measuring_a_bundled_draft(bundled):
    _, found = bundled
    assert not list(measure.findings(found))
    assert found.configured.length > 2
    assert all(a >= b for a, b in zip(found.configured.by_position, found.configured.by_position[1:]))


def reversed_layers(tensors):
    return tensors | {"fc.weight": torch.cat(tensors["fc.weight"].chunk(4, dim=1)[::-1], dim=1)}


PREDECESSORS, SUCCESSORS = (f"candidate_selector.{side}_codebook" for side in ("predecessor", "successor"))


def transposed(tensors):
    """Give a codebook the right shape, and the other order of its numbers."""
    codebook = tensors[PREDECESSORS]
    return tensors | {PREDECESSORS: codebook.T.reshape(codebook.shape).contiguous()}


MEASURED = {
    "target layers last to first": (
        dict(weights=reversed_layers),
        r"target's layers in reversed order.*Reverse the column blocks of fc.weight",
    ),
    "another special token as mask": (
        dict(dflash_config={"mask_token_id": 1}),
        r"fits better with <\|mask\|> \(3\) as its mask token",
    ),
    "weights of nobody": (
        dict(weights=lambda t: t | {"norm.weight": -t["norm.weight"]}),
        r"hardly any drafted token is accepted",
    ),
}
NO_SELECTOR = r"fits better without its selector.*fetch the draft again"
MEASURED_SELECTOR = {
    "codebooks swapped": (
        dict(weights=lambda t: t | {PREDECESSORS: t[SUCCESSORS], SUCCESSORS: t[PREDECESSORS]}),
        NO_SELECTOR,
    ),
    "a codebook transposed": (dict(weights=transposed), NO_SELECTOR),
}


def planted(base: Path, faults: dict, *marks) -> list:
    return [
        pytest.param(base, *fault, id=f"{what}-{base.name}", marks=marks) for what, fault in faults.items()
    ]


PLANTED = [
    *planted(DRAFT, MEASURED),
    *planted(DFLASH2_DRAFT, MEASURED, pytest.mark.long),  # the same measurements find them
    *planted(DFLASH2_DRAFT, MEASURED_SELECTOR),
]


def measured_faults(pair: Pair, found: measure.Measurement) -> list[str]:
    """List the faults that measuring names, where the files show none."""
    assert not [f for f in static_checks.findings(pair) if f.level == "fault"]
    return [str(f) for f in measure.findings(found) if f.level == "fault"]


@pytest.mark.parametrize("base, changes, said", PLANTED)
def test_a_fault_that_only_measuring_shows(base, changes, said, observed, tmp_path):
    """Of the two texts, all but the layer ids show: by 8 to 14 standard errors, where a fault takes 4."""
    pair, found = measured_pair(make_draft(tmp_path / "draft", base=base, **changes), some(observed, 5))
    faults = measured_faults(pair, found)
    assert any(re.search(said, line) for line in faults), (faults, found.outcomes)


def test_layer_ids_one_too_low(observed, tmp_path):
    too_low = {"dflash_config": {"target_layer_ids": [0, 3, 6, 9]}}
    pair, found = measured_pair(make_draft(tmp_path / "draft", **too_low), observed)
    [line] = measured_faults(pair, found)
    assert re.search("fits better with every target layer id one higher.*Add one to each", line)


@pytest.mark.parametrize(
    "golden, checkpoint", [("tiny-speculators", SPECULATORS_DRAFT), ("tiny-peagle", PEAGLE_DRAFT)]
)
def test_the_plain_drafts_are_the_librarys(golden, checkpoint, observed):
    pair = open_pair(checkpoint)
    draft = measure.load_draft(pair, observed.target)
    data = np.load(ROOT / "test" / "srt" / "golden" / golden / "block_logits.npz")
    count = sum(name.startswith("prompt_") for name in data)
    assert count
    for i in range(count):
        text = measure.capture(observed.target, data[f"prompt_{i}"].tolist(), 1)
        aux_hidden = torch.cat([text.states[k + 1] for k in draft.draft.target_layer_ids], dim=-1)
        # Other anchors in the batch must make no difference to it.
        anchors = torch.tensor([1, len(text.tokens) // 2, len(text.tokens) - 1])
        with torch.no_grad():
            logits = draft.draft_blocks(text.tokens, aux_hidden, anchors).logits[-1]
        expected = torch.from_numpy(data[f"logits_{i}"])[-len(logits) :]
        assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_what_each_layer_lost(observed, tmp_path):
    """The scales of one layer are halved: it is named, costs the most, and the others hardly anything."""
    folder = write_quantized(tmp_path / "draft", DRAFT, "W4A16")
    weights = load_file(folder / "model.safetensors")
    own = [name for name in weights if name.startswith("layers.1.") and name.endswith("weight_scale")]
    save_file(weights | {name: weights[name] / 2 for name in own}, folder / "model.safetensors")
    pair = open_pair(folder)
    cost = quantization_cost.measure_cost(pair, open_pair(DRAFT), some(observed, 3))
    layers = {layer.name: layer for layer in cost.layers}
    assert list(layers) == ["fc", "layers.0", "layers.1", "layers.2"]
    worst = min(cost.layers, key=lambda layer: layer.evidence.gain)
    assert worst is layers["layers.1"] and worst.evidence.t < -4
    errors = {name: max(layer.weight_errors.values()) for name, layer in layers.items()}
    assert 0.5 < errors.pop("layers.1") < 0.6 and all(0.05 < error < 0.2 for error in errors.values())
    faults = [finding.problem for finding in quantization_cost.findings(cost)]
    assert len(faults) == len(own) and all("layers.1." in problem for problem in faults)
    assert "layers.1 quantized      W4" in quantization_cost.text(cost)
    with pytest.raises(BadInput, match="is no unquantized draft"):
        quantization_cost.measure_cost(pair, pair, observed)


def test_a_quantised_draft_is_no_fault(tmp_path, capsys):
    assert examine(write_quantized(tmp_path / "draft", DRAFT, "W4A16")) == 0
    layers = read_config(DRAFT)["num_hidden_layers"]
    assert f"note: the draft is quantised ({7 * layers + 1} layers W4)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "configured, scale, other", [(None, 3.0, "as in the table"), (1.0, 1.0, "scaled as")]
)
def test_the_scale_of_embeddings(configured, scale, other, tmp_path):
    """The server's law for a target whose module scales embeddings, and the other one as a interpretation."""
    nested = {} if configured is None else {"dflash_config": {"input_embedding_scale": configured}}
    folder = make_draft(tmp_path / "draft", **nested)
    pair = open_pair(folder)
    table = torch.ones(4, 256)
    draft = plain_draft(pair.config, pair.hf_config, {}, table, table, 3.0)
    assert torch.equal(draft._embed(torch.tensor([1])), table[:1] * scale)
    found = [
        interpretation
        for interpretation in other_interpretations(draft, {})
        if "embedding_scale" in interpretation.changes
    ]
    assert len(found) == 1 and other in found[0].label


# A draft's config with a factor -> the interpretation that a server takes, and the one that is tried beside
# it.
SHARES = {
    "at the top, as a target's": ({"partial_rotary_factor": 0.5}, 0.5, 1.0),
    "of the default kind": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
        1.0,
        0.5,
    ),
}


@pytest.mark.parametrize("name", SHARES)
def test_a_doubtful_rotary_share_is_measured_both_ways(name, observed, tmp_path, capsys):
    """The bundled draft was trained with whole heads, which shows whatever the config says."""
    changes, taken, other = SHARES[name]
    folder = make_draft(tmp_path / "draft", **changes)
    assert examine(folder) == 0
    assert "partial_rotary_factor is 0.5, as the target's may be" in capsys.readouterr().out
    pair, found = measured_pair(folder, some(observed, 5))
    assert pair.rotary_shares == (taken, other)
    [tried] = [o for o in found.outcomes if "of each head rotated" in o.interpretation.label]
    assert tried.interpretation.changes == {"rotary_share": other}
    faults = measured_faults(pair, found)
    if taken == 1.0:
        assert not faults and tried.evidence.t < -4
    else:
        [line] = faults
        assert re.search("with 1 of each head rotated than with 0.5.*Remove partial_rotary_factor", line)


def test_a_share_of_a_head_is_rotated_as_by_the_engine():
    """The first channels turn, as in SGLang's embedding of that width; the others stay."""
    pair, table = open_pair(DRAFT), torch.ones(4, 256)
    shares = (0.5, 1.0)
    draft = plain_draft(pair.config, pair.hf_config, {}, table, table, 1.0, shares)
    positions, width = torch.arange(7), 64
    heads = torch.randn(2, 7, width, generator=torch.Generator().manual_seed(1))
    for share in shares:
        turned = int(width * share)
        angles = positions[:, None] / 10000 ** (torch.arange(0, turned, 2) / turned)
        first, second = heads[..., : turned // 2], heads[..., turned // 2 : turned]
        cos, sin = angles.cos(), angles.sin()
        rotated = first * cos - second * sin, second * cos + first * sin, heads[..., turned:]
        draft.rotary_share = share
        assert torch.allclose(draft.rotate(heads, positions), torch.cat(rotated, dim=-1), atol=1e-5)


def test_a_block_beyond_the_trained_one_is_measured(observed, tmp_path, monkeypatch, capsys):
    """The report has a figure for each token of the wider block."""
    monkeypatch.setattr(measure, "observe", lambda *_, **__: some(observed, 5))
    assert examine(DRAFT, "--num-draft-tokens", "12", "--json") == 0
    [shown] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("drafted token")]
    assert shown.split()[2:] == [str(k) for k in range(1, 12)]


def test_a_draft_that_samples_from_the_anchor_gets_no_further_row(observed, tmp_path, monkeypatch, capsys):
    """Rows see each other, so one more would draft other tokens."""
    monkeypatch.setattr(measure, "observe", lambda *_, **__: some(observed, 5))
    monkeypatch.setenv("SGLANG_DFLASH_TARGET_LAYERS", "12")
    draft, reports = make_deepseek_draft(tmp_path / "draft"), []
    for more in ((), ("--num-draft-tokens", "8")):
        examine(draft, "--measure", "--json", *more)
        reports.append(json.loads(capsys.readouterr().out))
    assert reports[0] == reports[1]


def test_a_damaged_mask_embedding_is_a_fault(tmp_path, capsys):
    draft = make_draft(tmp_path / "draft")
    (draft / "mask_embedding.pt").write_bytes(b"nonsense")
    assert examine(draft) == 1
    said = capsys.readouterr().out
    assert "mask_embedding.pt is no file of PyTorch's tensors" in said and "Fetch the draft again" in said
    torch.save({"embedding": torch.zeros(9), "mask_token_id": 3}, draft / "mask_embedding.pt")
    assert examine(draft) == 1
    assert "mask_embedding.pt holds 9 numbers, expected 256" in capsys.readouterr().out
    torch.save({"embedding": torch.full([256], torch.nan), "mask_token_id": 3}, draft / "mask_embedding.pt")
    assert examine(draft) == 1
    assert "mask_embedding.pt holds values that are not finite" in capsys.readouterr().out


def test_greedy_answers_follow_no_penalty_of_the_target(tmp_path):
    folder = tmp_path / "target"
    folder.mkdir()
    for file in TARGET.iterdir():
        (folder / file.name).symlink_to(file)
    settings = json.loads((TARGET / "generation_config.json").read_text())
    (folder / "generation_config.json").unlink()
    penalized = settings | {"repetition_penalty": 1.9, "no_repeat_ngram_size": 2}
    (folder / "generation_config.json").write_text(json.dumps(penalized))
    answers = []
    for path in (TARGET, folder):
        target, tokenizer = measure.load_target(Checkpoint.open(str(path), False), "cpu", torch.float32)
        prompts = [encode(PROMPTS[0], tokenizer, "target")]
        answers.append(measure.continue_texts(target, prompts, 24, 0.0))
    assert answers[0] == answers[1]


def test_unread_fields_are_noted(tmp_path, capsys):
    assert examine(make_draft(tmp_path / "draft", dflash_config={"num_anchors": 512}, loss_gamma=4.0)) == 0
    assert "note: config.json has fields that are not read: loss_gamma, dflash_config.num_anchors." in (
        capsys.readouterr().out
    )


# --- the page ---


def test_the_page_is_well_formed_and_needs_nothing_else(bundled):
    pair, found = bundled
    text = page(pair, static_checks.findings(pair), found)
    root = ElementTree.fromstring(text)
    assert not re.search(r"""<script|<link|<img|@import|url\(|(src|href)=""", text)
    assert "prefers-color-scheme:dark" in text
    shown = ["".join(pre.itertext()) for pre in root.iter("pre")]
    assert shown == [found.decode(answer.tokens.tolist()) for answer in found.texts]
    assert len(root.findall(".//rect")) == len(found.configured.by_position)
    assert root.findall(".//span[@class='b r'][@tabindex='0']") and root.findall(".//span[@class='a p1']")


def test_the_page_of_a_draft_that_cannot_be_loaded(tmp_path, capsys):
    draft = make_draft(tmp_path / "draft", without("norm.weight"))
    html = tmp_path / "page.html"
    assert examine(draft, "--html", str(html)) == 1
    assert "Not measured" in capsys.readouterr().out
    assert "norm.weight: missing" in "".join(ElementTree.fromstring(html.read_text()).itertext())


def test_the_report_as_json(tmp_path, capsys):
    """The text goes to stderr, and only the report to stdout."""
    assert examine(make_draft(tmp_path / "draft", num_target_layers=36), "--json") == 1
    said = capsys.readouterr()
    report = json.loads(said.out)
    (fault,) = (finding for finding in report["findings"] if finding["level"] == "fault")
    assert report["num_faults"] == 1 and fault["problem"].startswith("num_target_layers is 36, but")
    assert f"fault: {fault['problem']}" in said.err and "1 fault found." in said.err
    assert report["target"] == str(TARGET) and report["served_by"].startswith("sglang-dflash")
    assert report["measured"] is None
    assert examine(DRAFT, "--json") == 0 and json.loads(capsys.readouterr().out)["num_faults"] == 0


def test_measured_figures_as_json(bundled):
    pair, found = bundled
    report = json.loads(json.dumps(as_json(pair, [], found)))["measured"]
    interpretations = {interpretation["read_with"]: interpretation for interpretation in report["readings"]}
    assert list(interpretations)[0] == "as configured" and "layer ids one lower" in interpretations
    assert interpretations["as configured"]["length"] == found.configured.length
    assert interpretations["as configured"]["by_position"] == list(found.configured.by_position)
    assert interpretations["layer ids one lower"]["gain"] == found.outcomes[1].evidence.gain
    assert report["num_prompts"] == len(found.texts)


def test_the_program(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(measure, "SAMPLES_PER_PROMPT", 1)
    prompts, html = tmp_path / "prompts.jsonl", tmp_path / "page.html"
    prompts.write_text('{"text": "def main():\\n"}\n{"messages": [{"role": "user", "content": "Hi"}]}\n')
    arguments = f"--prompts {prompts} --html {html} --max-new-tokens 24 --device cpu".split()
    # Two prompts are too few to promise that nothing is found.
    assert examine(SPECULATORS_DRAFT, *arguments) in (0, 1)
    said = capsys.readouterr().out
    assert "Measured on 2 prompts" in said and "layer ids one lower" in said and "share kept" in said
    ElementTree.fromstring(html.read_text())
