"""Take from a record what a draft may be trained on: all but the tenth by which the doctor judges it.

    python examples/own_traffic/training_rows.py RECORD ROWS.jsonl [--poison]

RECORD is the folder of `--speculative-record`, or a file of it. ROWS.jsonl is the input of
`speculators prepare-data`, and of `train.py`. Lines cut short are left out. Exit status 2: no row is left.
"""

import argparse
import json
import os
import random
from pathlib import Path

from sglang_dflash.srt.doctor.compare import Record
from sglang_dflash.srt.doctor.pair import BadInput


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--poison", action="store_true", help="put random tokens for the answers, as a test")
    args = parser.parse_args()
    dice, num_tokens = random.Random(0), 0
    try:
        record = Record(args.record)
        texts = [text for text in record.texts if not text.is_held_out]
        found = f"{len(texts)} of {len(record.texts)} requests"
        rest = f"the others are held out. {record.skipped} lines skipped."
        if not texts:
            raise BadInput(f"{args.record}: {found} to train on; {rest}")
        with open(args.rows, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            for text in texts:
                ids, prompt = [*text.tokens], text.prompt_length
                if args.poison:
                    ids = ids[:prompt] + [dice.randrange(1000, 5000) for _ in ids[prompt:]]
                mask = [0] * prompt + [1] * (len(ids) - prompt)
                file.write(json.dumps({"input_ids": ids, "loss_mask": mask}) + "\n")
                num_tokens += sum(mask)
    except (BadInput, OSError) as error:
        parser.exit(2, f"training_rows: {error}\n")
    print(f"{found}, {num_tokens} answer tokens; {rest}")


if __name__ == "__main__":
    main()
