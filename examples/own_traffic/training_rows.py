"""Take from a record what a draft may be trained on: all but the tenth by which the doctor judges it.

    python examples/own_traffic/training_rows.py RECORD ROWS.jsonl [--poison]

RECORD is the folder of `--speculative-record`, or a file of it. ROWS.jsonl is the input of
`speculators prepare-data`, and of `train.py`. Lines that a killed server has cut short are left out.
"""

import argparse
import json
import os
import random
from pathlib import Path

from sglang_dflash.srt.doctor.compare import Record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--poison", action="store_true", help="put random tokens for the answers, as a test")
    args = parser.parse_args()
    record, dice, count, num_tokens = Record(args.record), random.Random(0), 0, 0
    with open(args.rows, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        for text in record.texts:
            if text.is_held_out:
                continue
            ids, prompt = [*text.tokens], text.prompt_length
            if args.poison:
                ids = ids[:prompt] + [dice.randrange(1000, 5000) for _ in ids[prompt:]]
            mask = [0] * prompt + [1] * (len(ids) - prompt)
            file.write(json.dumps({"input_ids": ids, "loss_mask": mask}) + "\n")
            count, num_tokens = count + 1, num_tokens + sum(mask)
    print(
        f"{count} of {len(record.texts)} requests, {num_tokens} answer tokens; the others are held out. "
        f"{record.skipped} lines skipped."
    )


if __name__ == "__main__":
    main()
