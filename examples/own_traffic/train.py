"""Train the bundled SmolLM2 draft further: recorded rows and general rows, half and half.

    python examples/own_traffic/train.py ROWS.jsonl TARGET SERVED NEW --work FOLDER --steps 50

ROWS.jsonl is from `training_rows.py`. The general rows are the bundled answers of the target; without them a
draft forgets. States come from one forward of the target over each row. For other targets use `speculators`
(docs/own-traffic.md). Exit status 2: there is nothing to train on, or the trainer failed.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file

from sglang_dflash.srt.doctor.compare import Record
from sglang_dflash.srt.doctor.pair import BadInput

TRAINING = Path(__file__).resolve().parents[2] / "models" / "training"
sys.path.insert(0, str(TRAINING))

from chat_rollouts import LEAST_WRITTEN, Row  # noqa: E402
from pack_rollouts import packed_rows, save_rows, unpack  # noqa: E402


def recorded_rows(path: Path, vocab_size: int) -> list[Row]:
    """Return the recorded rows that can be trained on. Raises BadInput if there are none."""
    if path.is_dir():
        raise BadInput(f"{path}: a folder, where the file of training_rows.py is needed")
    record, rows = Record(path), []
    for text in record.texts:
        written = [place >= text.prompt_length for place in range(len(text.tokens))]
        if sum(written) >= LEAST_WRITTEN:
            rows.append(Row(f"own-{len(rows)}", "own", 0.0, [*text.tokens], written))
    short = len(record.texts) - len(rows)
    found = f"{len(rows)} rows; {short} left out, with answers below {LEAST_WRITTEN} tokens"
    if not rows:
        raise BadInput(f"{path}: {found}; {record.skipped} lines skipped")
    if max(max(row.tokens) for row in rows) >= vocab_size:
        raise BadInput(f"{path}: has ids outside the target's vocabulary of {vocab_size}")
    print(f"{found}; {record.skipped} lines skipped", flush=True)
    return rows


def mixed_rows(rows: list[Row], general: Path, share: float) -> list[Row]:
    """Return the rows, and general ones until `share` of the written tokens is theirs."""
    wanted = sum(sum(row.written) for row in rows) * share / (1 - share)
    rows, others = [*rows], packed_rows(general)
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
    mixed = {name: before[name].float().lerp(x.float(), share).to(x.dtype) for name, x in after.items()}
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
    if args.steps < 1 or not 0 <= args.general_share < 1:
        parser.error("--steps must be at least 1, and --general-share at least 0 and below 1")
    os.umask(0o077)  # rows, states and the draft are of what people wrote
    try:
        configs = [json.loads((folder / "config.json").read_text()) for folder in (args.target, args.served)]
        recorded = recorded_rows(args.rows, min(config["vocab_size"] for config in configs))
        rows = mixed_rows(recorded, args.general, args.general_share)
        args.work.mkdir(parents=True, exist_ok=True)
    except (BadInput, OSError, KeyError, ValueError) as error:
        parser.exit(2, f"train: {error}\n")
    packed, shards = args.work / "rows.npz", args.work / "shards"
    # Nothing of an earlier run: its rows have the same names, and the trainer would go on from its state.
    shutil.rmtree(shards, ignore_errors=True)
    for old in (packed, args.new.with_name(args.new.name + ".state.pt")):
        old.unlink(missing_ok=True)
    save_rows(packed, rows)
    unpack(packed, args.target, shards, part=(0, 1), size=10000)
    # A low learning rate: the loss rises at first, and falls with the rate. Steps are few: they are small,
    # and the average of the weights is short.
    options = ["--start", args.served, "--steps", args.steps, "--muon-lr", 0.006, "--finish"]
    options += ["--rows", 4, "--anchors", 48, "--average", 0.9]
    command = [sys.executable, TRAINING / "train_chat_draft.py", shards, args.target, args.new, *options]
    if status := subprocess.run([str(word) for word in command]).returncode:
        parser.exit(2, f"train: train_chat_draft.py ended with status {status}\n")
    blend(args.served, args.new, args.blend)


if __name__ == "__main__":
    main()
