"""Chat requests that the target writes itself, as further prompts for its answers.

Given the chat template up to the user's turn alone, a chat model writes a request like the ones that it was
trained on (Magpie, arXiv 2406.08464). So these prompts need no source but the target.

    python ask_prompts.py TARGET_DIR OUTPUT_DIR [--count 5000]    # asked.jsonl and heldout-asked.jsonl

Lines are as those of `open_prompts.py`. A stopped run goes on, seeded by the number of lines.
"""

import argparse
import os
from pathlib import Path

from chat_rollouts import system_turn
from corpus import is_heldout
from open_prompts import line, user
from tokenizers import Tokenizer

BATCH = 512
REQUESTS = 48  # at a time
SAMPLING = {"temperature": 0.85, "max_new_tokens": 64}  # top-p would sort the vocabulary at each step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("target_dir", type=Path)
    parser.add_argument("output_dir", type=Path)
    parser.add_argument("--count", type=int, default=5000, help="of both files' lines together")
    args = parser.parse_args()

    os.environ.setdefault("SGLANG_DFLASH_CPU_LAYERS", "1")  # read by the engine's processes
    import sglang

    args.output_dir.mkdir(parents=True, exist_ok=True)
    train, heldout = (args.output_dir / name for name in ("asked.jsonl", "heldout-asked.jsonl"))
    lines = {one for file in (train, heldout) if file.exists() for one in file.read_text().splitlines()}
    tokenizer = Tokenizer.from_file(str(args.target_dir / "tokenizer.json"))
    end = tokenizer.token_to_id("<|im_end|>")
    begin = tokenizer.encode(system_turn() + "<|im_start|>user\n", add_special_tokens=False).ids
    sampling = {**SAMPLING, "stop_token_ids": [end]}
    with sglang.Engine(
        model_path=str(args.target_dir),
        skip_tokenizer_init=True,
        random_seed=len(lines),
        max_running_requests=REQUESTS,
    ) as engine:
        while len(lines) < args.count:
            answers = engine.generate(input_ids=[begin] * BATCH, sampling_params=sampling)
            for tokens in (answer["output_ids"] for answer in answers):
                text = tokenizer.decode(tokens).strip()
                request = line("asked", user(text))
                if tokens[-1] != end or not text or request in lines:
                    continue
                lines.add(request)
                with (heldout if is_heldout(text) else train).open("a") as file:
                    file.write(request + "\n")
            print(f"{len(lines)} requests", flush=True)


if __name__ == "__main__":
    main()
