"""The example of own traffic: requests that nobody trains on, the mix of rows, and the optimizer."""

import itertools
import json
import runpy

import pytest
import torch
from muon import Muon
from serving import ROOT

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
