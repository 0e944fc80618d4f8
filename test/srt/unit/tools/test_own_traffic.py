"""The example of own traffic: unseen requests, rows and what is refused of them, the optimizer."""

import itertools
import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pack_rollouts
import pytest
import serving
import torch
from chat_rollouts import Row
from datasets import Dataset
from muon import Muon
from safetensors.torch import load_file
from serving import DRAFT, ROOT, TARGET
from transformers import AutoModelForCausalLM

EXAMPLE = ROOT / "examples" / "own_traffic"
GENERAL = ROOT / "models" / "training" / "prompts" / "smollm2-answers.npz"


PAIR = f"{TARGET} {DRAFT} new --work work"
TRAINER = f"../../models/training/train_chat_draft.py empty {TARGET} new --start {DRAFT}"


@pytest.fixture
def script(monkeypatch, capsys, tmp_path):
    """Return what runs a script in a folder, and returns its exit status and the last line of its errors."""
    umask = os.umask(0o022)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLE)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    server = subprocess.Popen(["false"], start_new_session=True)
    monkeypatch.setattr(serving, "start_cold", lambda *_, **__: server)

    def run(command: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", command.split())
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(EXAMPLE / sys.argv[0]), run_name="__main__")
            sys.exit(0)
        return ended.value.code, capsys.readouterr().err.strip().rpartition("\n")[2]

    yield run
    os.umask(umask)


def write(path: Path, answers: Sequence[int], token: int = 5, **more: object) -> None:
    """Write rows with answers of these lengths."""
    rows = [{"input_ids": [token] * (100 + n), "loss_mask": [0] * 100 + [1] * n, **more} for n in answers]
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def modes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mode & 0o777 for path in (folder, *folder.iterdir())}


@pytest.mark.parametrize(
    "command, said",
    [
        ("training_rows.py nowhere new", "No such file"),
        ("training_rows.py empty new", "0 of 0 requests to train on"),
        ("training_rows.py record new", "another target"),
        (f"train.py empty/rows {PAIR}", "0 rows; 0 left out"),
        (f"train.py short {PAIR} --general-share 0", "0 rows; 2 left out, with answers below 8 tokens"),
        (f"train.py large {PAIR}", "outside the target's vocabulary of 2048"),
        (f"train.py record {PAIR}", "a folder"),
        (f"train.py rows {PAIR} --general-share 1", "--general-share at least 0 and below 1"),
        (f"train.py rows {PAIR} --general-share -1", "--general-share at least 0 and below 1"),
        (f"train.py rows {PAIR} --steps 0", "--steps must be at least 1"),
        (f"{TRAINER} --steps 0", "above 0"),
        (f"{TRAINER} --minutes 0", "above 0"),
        (TRAINER, "empty has no row with 8 written tokens"),
        ("loop.py --work work --steps 0", "at least 1"),
        ("loop.py --work work", "loop: the server ended"),
    ],
)
def test_what_trains_no_draft_is_named_with_status_2(command, said, script, tmp_path):
    """Of the loop, status 1 is the gate's."""
    for name, answers, token in (("empty/rows", [], 5), ("short", [7, 7], 5), ("large", [20], 70_000)):
        write(tmp_path / name, answers, token)
    for name, number in (("rows", 1), ("record/1.jsonl", 1), ("record/2.jsonl", 2)):
        write(tmp_path / name, [20], target={"vocab_size": number})
    status, error = script(command)
    assert status == 2 and said in error and not (tmp_path / "new").exists()


def test_what_is_made_of_a_record_is_its_owners(script, monkeypatch, tmp_path):
    """Short answers are left out. A trainer that fails is named."""
    script("loop.py --work loop")
    assert modes(tmp_path / "loop") == {"loop": 0o700, "general.jsonl": 0o600}
    monkeypatch.setattr(pack_rollouts, "unpack", lambda file, target, shards, **_: shards.mkdir())
    monkeypatch.setattr(subprocess, "run", lambda _: SimpleNamespace(returncode=3))
    write(tmp_path / "rows", [20, 7, 8])
    status, error = script(f"train.py rows {PAIR} --general-share 0")
    assert status == 2 and "train_chat_draft.py ended with status 3" in error
    assert modes(tmp_path / "work") == {"work": 0o700, "rows.npz": 0o600, "shards": 0o700}
    assert [sum(row.written) for row in pack_rollouts.packed_rows(tmp_path / "work/rows.npz")] == [20, 8]


def test_packed_rows_keep_large_ids_and_long_rows(tmp_path):
    rows = [Row("a-0", "a", 0.0, [70_000] * length, [True] * length) for length in (3, 65_536)]
    pack_rollouts.save_rows(tmp_path / "rows.npz", rows)
    assert pack_rollouts.packed_rows(tmp_path / "rows.npz") == rows


@pytest.mark.parametrize("kind", ["sql", "mails", "tests"])
def test_unseen_requests_have_no_other_seed(kind):
    questions = runpy.run_path(str(EXAMPLE / "traffic.py"))["questions"]
    asked = [[*itertools.islice(questions(kind, seed), 400)] for seed in (0, 1, 2)]
    assert all(len(set(each)) == 400 for each in asked)
    assert asked[1] != asked[2] and not set(asked[0]) & {*asked[1], *asked[2]}


def test_general_rows_have_their_share_of_answers(tmp_path):
    train = runpy.run_path(str(EXAMPLE / "train.py"))
    write(tmp_path / "rows", [200] * 40)
    rows = train["mixed_rows"](train["recorded_rows"](tmp_path / "rows", vocab_size=6), GENERAL, share=0.3)
    own = [row for row in rows if row.kind == "own"]
    general = sum(sum(row.written) for row in rows if row.kind != "own")
    assert len(own) == 40 and all(sum(row.written) == 200 for row in own)
    assert 0.3 <= general / (general + 8000) < 0.34


def test_states_are_inputs_of_layers(tmp_path, script):
    """The last entry is the input of the final norm. They are their owner's."""
    rows = [[5, 6, 7, 8], [9, 10, 11]]
    Dataset.from_dict({"input_ids": rows}).with_format("torch").save_to_disk(tmp_path / "data")
    script(f"states.py data {TARGET} states 3 6 10 --device cpu")
    assert modes(tmp_path / "states")["hs_1.safetensors"] == 0o600
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
