"""The example of own traffic: requests that nobody trains on, the mix of rows, and the optimizer."""

import itertools
import json
import os
import runpy
import subprocess
import sys

import pytest
import torch
from datasets import Dataset
from muon import Muon
from safetensors.torch import load_file
from serving import ROOT, TARGET
from transformers import AutoModelForCausalLM

EXAMPLE = ROOT / "examples" / "own_traffic"
GENERAL = ROOT / "models" / "training" / "prompts" / "smollm2-answers.npz"


@pytest.mark.parametrize("kind", ["sql", "mails", "tests"])
def test_unseen_requests_have_no_other_seed(kind):
    questions = runpy.run_path(str(EXAMPLE / "traffic.py"))["questions"]
    asked = [[*itertools.islice(questions(kind, seed), 400)] for seed in (0, 1, 2)]
    assert all(len(set(each)) == 400 for each in asked)
    assert asked[1] != asked[2] and not set(asked[0]) & {*asked[1], *asked[2]}


def test_general_rows_have_their_share_of_answers(tmp_path):
    mixed_rows = runpy.run_path(str(EXAMPLE / "train.py"))["mixed_rows"]
    line = json.dumps({"input_ids": [5] * 300, "loss_mask": [0] * 100 + [1] * 200})
    (tmp_path / "rows.jsonl").write_text("\n".join([line] * 40))
    rows = mixed_rows(tmp_path / "rows.jsonl", GENERAL, share=0.3)
    own = [row for row in rows if row.kind == "own"]
    general = sum(sum(row.written) for row in rows if row.kind != "own")
    assert len(own) == 40 and all(sum(row.written) == 200 for row in own)
    assert 0.3 <= general / (general + 8000) < 0.34


def test_states_are_inputs_of_layers(tmp_path, monkeypatch):
    """The last entry is the input of the final norm."""
    rows = [[5, 6, 7, 8], [9, 10, 11]]
    Dataset.from_dict({"input_ids": rows}).with_format("torch").save_to_disk(tmp_path / "data")
    words = ["states.py", tmp_path / "data", TARGET, tmp_path / "states", 3, 6, 10, "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", [str(word) for word in words])
    runpy.run_path(str(EXAMPLE / "states.py"), run_name="__main__")
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.bfloat16).model
    before_norm = []
    model.norm.register_forward_pre_hook(lambda _, given: before_norm.append(given[0][0]))
    found = model(input_ids=torch.tensor([rows[1]]), output_hidden_states=True).hidden_states
    kept = load_file(tmp_path / "states" / "hs_1.safetensors")
    assert kept["token_ids"].tolist() == rows[1]
    expected = [*(found[i][0] for i in (3, 6, 10)), before_norm[0]]
    assert torch.equal(kept["hidden_states"], torch.stack(expected, dim=1))


def test_the_trainers_device_is_a_cpu():
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLE / "cpu")}
    script = "import torch; print(torch.zeros(2).to(0).device.type, torch.accelerator.is_available())"
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["cpu", "False"], done.stderr


@pytest.mark.parametrize("shape", [(40, 24), (24, 40)])
def test_muon_is_pytorchs(shape):
    """PyTorch's iterates in bfloat16."""
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.ones(shape)) for _ in range(2))
    optimizers = Muon([ours], lr=0.1), torch.optim.Muon([theirs], lr=0.1, momentum=0.95, weight_decay=0.01)
    for _ in range(4):
        ours.grad = torch.randn(shape)
        theirs.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    moved = (theirs - 1).abs().max()
    assert (ours - theirs).abs().max() < 0.02 * moved
