"""Train the bundled SmolLM2 draft further: recorded rows and general rows, half and half.

    python examples/own_traffic/train.py ROWS.jsonl TARGET SERVED NEW --work FOLDER --steps 50

ROWS.jsonl is from `training_rows.py`. The general rows are the bundled answers of the target; without them a
draft forgets. States come from one forward of the target over each row. For other targets use `speculators`
(docs/own-traffic.md).
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file

TRAINING = Path(__file__).resolve().parents[2] / "models" / "training"
sys.path.insert(0, str(TRAINING))

from chat_rollouts import Row  # noqa: E402
from pack_rollouts import packed_rows, save_rows, unpack  # noqa: E402


def mixed_rows(path: Path, general: Path, share: float) -> list[Row]:
    """Return the recorded rows, and general ones until `share` of the written tokens is theirs."""
    rows = []
    for number, line in enumerate(path.read_text().splitlines()):
        recorded = json.loads(line)
        row = Row(f"own-{number}", "own", temperature=0.0, tokens=recorded["input_ids"], turns=None)
        row.written = [bool(one) for one in recorded["loss_mask"]]
        rows.append(row)
    wanted = sum(sum(row.written) for row in rows) * share / (1 - share)
    others = packed_rows(general)
    random.Random(0).shuffle(others)
    for row in others:
        if wanted <= 0:
            break
        rows.append(row)
        wanted -= sum(row.written)
    return rows


def blend(served: Path, new: Path, share: float) -> None:
    """Put the average of two drafts in place of the new one, which weighs `share`: it forgets less."""
    before, after = (load_file(folder / "model.safetensors") for folder in (served, new))
    mixed = {
        name: before[name].float().lerp(after[name].float(), share).to(after[name].dtype) for name in after
    }
    save_file(mixed, new / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name in ("rows", "target", "served", "new"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--work", type=Path, required=True, help="for the states, 10 KB a token")
    parser.add_argument("--steps", type=int, default=50, help="of 4 rows each")
    parser.add_argument("--general", type=Path, default=TRAINING / "prompts" / "smollm2-answers.npz")
    parser.add_argument("--general-share", type=float, default=0.5, help="of the answer tokens")
    parser.add_argument("--blend", type=float, default=0.5, help="of the trained weights, the rest is SERVED")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    packed, shards = args.work / "rows.npz", args.work / "shards"
    # Nothing of an earlier run: its rows have the same names, and the trainer would go on from its state.
    shutil.rmtree(shards, ignore_errors=True)
    args.new.with_name(args.new.name + ".state.pt").unlink(missing_ok=True)
    save_rows(packed, mixed_rows(args.rows, args.general, args.general_share))
    unpack(packed, args.target, shards, part=(0, 1), size=10000)
    # A low learning rate: the loss rises at first, and falls with the rate. Steps are few: they are small,
    # and the average of the weights is short.
    options = ["--start", args.served, "--steps", args.steps, "--muon-lr", 0.006, "--finish"]
    options += ["--rows", 4, "--anchors", 48, "--average", 0.9]
    command = [sys.executable, TRAINING / "train_chat_draft.py", shards, args.target, args.new, *options]
    subprocess.run([str(word) for word in command], check=True)
    blend(args.served, args.new, args.blend)


if __name__ == "__main__":
    main()
