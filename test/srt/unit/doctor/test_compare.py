"""The gate before a swap: two drafts on texts that neither was trained on."""

import json
import math
import random
import re
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from serving import DFLASH2_DRAFT, DRAFT, TARGET, heldout_prompts
from support.drafts import make_draft
from transformers import AutoTokenizer

from sglang_dflash import doctor
from sglang_dflash.srt.doctor import compare as gate
from sglang_dflash.srt.doctor.compare import LEAST_TEXTS, Outcome, Record, Text, objections
from sglang_dflash.srt.doctor.pair import BadInput
from sglang_dflash.srt.observability.record import describe_target


def outcome(served: list[float], new: list[float]) -> Outcome:
    return Outcome(served, new, tokens=100)


def test_the_standard_error_is_of_pairs():
    noise = [1.0, 3.0, 2.0, 4.0, 1.5, 2.5]  # the texts differ much, the drafts by the same on each
    found = outcome(noise, [length + gain for length, gain in zip(noise, [0.3, 0.5] * 3)])
    assert found.gain == pytest.approx(0.4)
    assert found.error == pytest.approx(0.1 * math.sqrt(6 / 5) / math.sqrt(6))
    assert objections(found, None) == []


@pytest.mark.parametrize(
    "gains, general, words",
    [
        ([0.3, 0.5] * 6, [0.0, -0.02], []),
        ([0.0] * 12, None, ["standard errors"]),
        ([0.9, -0.8] * 6, None, ["standard errors"]),
        ([-0.3, -0.5] * 6, None, ["standard errors"]),
        ([0.3, 0.5] * 6, [-0.1, -0.04], ["3% on general"]),
        ([0.0, 0.1, -0.1] * 4, [-0.2, -0.2], ["standard errors", "3% on general"]),
    ],
)
def test_the_verdict(gains, general, words):
    own = outcome([2.0] * len(gains), [2.0 + gain for gain in gains])
    others = general and outcome([2.0] * len(general), [2.0 + gain for gain in general])
    found = objections(own, others)
    assert len(found) == len(words)
    assert all(word in objection for word, objection in zip(words, found))


def test_a_tenth_is_held_out_by_the_prompt_alone():
    dice = random.Random(1)
    system = [dice.randrange(2000) for _ in range(100)]  # all requests begin with it
    prompts = [system + [dice.randrange(2000) for _ in range(9)] for _ in range(2000)]
    texts = [Text(prompt + [5, 6, 7], len(prompt)) for prompt in prompts]
    assert 140 < sum(text.is_held_out for text in texts) < 260
    for text in texts[:50]:
        assert Text([*text.tokens, 9], text.prompt_length).is_held_out == text.is_held_out


def row(ids: list[int], answer: int, **more) -> str:
    mask = [0] * (len(ids) - answer) + [1] * answer
    return json.dumps({"input_ids": ids, "loss_mask": mask, **more})


def test_lines_that_are_cut_short_are_skipped_and_counted(tmp_path):
    whole = row([1, 2, 3, 4, 5], 3)
    bad = [whole[:-9], "{}", "[1]", row([1, 2], 2), row([1, 2, 3], 1), row([1, -2, 3, 4], 2), '{"input_ids"']
    (tmp_path / "a.jsonl").write_text("\n".join([row([9, 8, 7, 6], 2, target={"a": 1}), *bad]))
    (tmp_path / "b.jsonl").write_text("\n".join([whole, "", whole[:7]]))
    record = Record(tmp_path)
    assert [[*text.tokens] for text in record.texts] == [[9, 8, 7, 6], [1, 2, 3, 4, 5]]
    assert [text.prompt_length for text in record.texts] == [2, 2]
    assert record.skipped == len(bad) + 2 and record.target == {"a": 1}
    (tmp_path / "c.jsonl").write_text(row([9, 8, 7, 6], 2, target={"a": 2}))
    with pytest.raises(BadInput, match="c.jsonl: records another target"):
        Record(tmp_path)


@pytest.fixture(scope="module")
def worse(tmp_path_factory) -> Path:
    """Make a draft as a poisoned record would: the bundled one, with noise in its last layer."""
    folder = make_draft(tmp_path_factory.mktemp("worse") / "draft")
    path = folder / "model.safetensors"
    torch.manual_seed(0)
    tensors = load_file(path)
    for name in [name for name in tensors if "layers.2" in name and "proj" in name]:
        tensors[name] += 0.2 * torch.randn_like(tensors[name])
    save_file(tensors, path)
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    """Write a record of the tokens of held-out prompts."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    target = describe_target(2048, tokenizer)
    path = tmp_path_factory.mktemp("record") / "a.jsonl"
    lines = []
    for prompt in heldout_prompts():
        ids = tokenizer(prompt["text"], add_special_tokens=False).input_ids[:90]
        if len(ids) == 90 and Text(ids, 30).is_held_out:
            lines.append(row(ids, 60, **({} if lines else {"target": target})))
    path.write_text("\n".join(lines))
    assert len(lines) >= LEAST_TEXTS
    return path


def compare(served: Path, new: Path, *more: object) -> int:
    words = ["--model-path", TARGET, "--compare", served, new, *more]
    return doctor.main([str(word) for word in words])


def test_the_better_draft_passes_and_the_worse_one_does_not(texts, worse, capsys):
    assert compare(worse, DRAFT, "--texts", texts, "--json") == 0
    better = json.loads(capsys.readouterr().out)
    assert better["objections"] == [] and better["own"]["gain"] > 2.5 * better["own"]["standard_error"] > 0
    assert compare(DRAFT, worse, "--texts", texts) == 1
    out = capsys.readouterr().out
    assert "Do not swap: it is not better by 2.5 standard errors" in out and "general  not measured" in out


def test_general_texts_hold_a_draft_back(worse, tmp_path, capsys):
    """The target answers prompts itself."""
    general = tmp_path / "general.jsonl"
    prompts = [prompt for prompt in heldout_prompts() if prompt["num_tokens"] < 60][:LEAST_TEXTS]
    general.write_text("\n".join(json.dumps({"text": prompt["text"]}) for prompt in prompts))
    arguments = ("--texts", general, "--general", general, "--max-new-tokens", 16)
    assert compare(DRAFT, worse, *arguments) == 1
    assert "and it is worse by more than 3% on general texts." in capsys.readouterr().out


@pytest.mark.parametrize(
    "case, words",
    [
        ("another kind", "the configs differ in"),
        ("another mask token", "the configs differ in mask_token_id"),
        ("another mask embedding", "but mask_embedding.pt differs"),
        ("a tensor less", "does not load in the served draft's place: "),
        ("too few texts", f"texts to compare on, and {LEAST_TEXTS} are needed"),
        ("one text many times", f": 1 texts to compare on, and {LEAST_TEXTS} are needed"),
        ("empty", "no request is recorded there"),
        ("not there", "no such file"),
        ("another tokenizer", "record of another target than .*: its tokenizer"),
        ("another template", "record of another target than .*: its chat template"),
        ("ids outside", "has ids outside the vocabulary"),
    ],
)
def test_what_cannot_be_compared_is_refused(case, words, texts, tmp_path, capsys):
    new, path = DRAFT, tmp_path / "record.jsonl"
    named = json.loads(texts.read_text().splitlines()[0])["target"]
    lines = {
        "too few texts": [row([1, 2, 3, 4], 2)] * 3,
        "one text many times": [line for line in texts.read_text().splitlines()[:1] for _ in range(20)],
        "empty": ['{"input_ids"'],
        "another tokenizer": [row([1, 2, 3, 4], 2, target={**named, "tokenizer": "x"})],
        "another template": [row([1, 2, 3, 4], 2, target={**named, "chat_template": "x"})],
        "ids outside": [row([1, 2, 3, 5000], 2, target={**named, "tokenizer": "", "chat_template": ""})],
    }.get(case, texts.read_text().splitlines())
    if case != "not there":
        path.write_text("\n".join(lines))
    if case == "another kind":
        new = DFLASH2_DRAFT
    elif case == "another mask token":
        new = make_draft(tmp_path / "draft", dflash_config={"mask_token_id": 300})
    elif case == "another mask embedding":
        new = make_draft(tmp_path / "draft")
        torch.save({"embedding": torch.zeros(256), "mask_token_id": 3}, new / "mask_embedding.pt")
    elif case == "a tensor less":
        new = make_draft(tmp_path / "draft")
        tensors = load_file(new / "model.safetensors")
        save_file({name: one for name, one in tensors.items() if "fc" not in name}, new / "model.safetensors")
    assert compare(DRAFT, new, "--texts", path) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("doctor: ")
    assert re.search(words, line)


def test_another_block_size_is_measured_as_it_would_be_served(texts, tmp_path, capsys):
    """A swap keeps the served draft's."""
    longer = make_draft(tmp_path / "longer", block_size=16)
    assert compare(DRAFT, longer, "--texts", texts, "--json") == 1
    own = json.loads(capsys.readouterr().out)["own"]
    assert own["served"] == own["new"] > 1.2


@pytest.mark.parametrize(
    "error, words",
    [
        (torch.OutOfMemoryError("full"), "doctor: the device has too little memory for the models"),
        (RuntimeError("of a new kind"), "RuntimeError: of a new kind"),
    ],
)
def test_no_error_looks_like_a_verdict(error, words, texts, monkeypatch, capsys):
    """Python ends with status 1 after an error."""
    monkeypatch.setattr(gate, "load_target", Mock(side_effect=error))
    assert compare(DRAFT, DRAFT, "--texts", texts) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--compare", "a", "b"], ["--compare", "a", "b", "--texts", "c"]])
def test_a_target_and_texts_are_needed(arguments, capsys):
    with pytest.raises(SystemExit):
        doctor.main(arguments)
    assert "--compare needs --model-path and --texts" in capsys.readouterr().err
