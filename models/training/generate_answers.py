"""Answers of the target from SGLang's engine with this extension, kept as tokens alone.

Prompts are those of `open_prompts.py`, temperatures those of `chat_rollouts.py`: 60 % greedy, the others at
0.6 to 1. Each finished piece of about 20,000 written tokens is a file that `pack_rollouts.py` reads. A run
that was stopped at any time goes on with the prompts that are in no piece yet.

    python generate_answers.py TARGET_DIR PROMPTS.jsonl --out PIECES_DIR [--tokens 2.5e6] [--draft DRAFT_DIR]
    python pack_rollouts.py pack PIECES_DIR FILE.npz      # all pieces in one file
"""

import argparse
import asyncio
import os
import random
import time
from collections import deque
from pathlib import Path

from chat_rollouts import DEFAULT_MAX_NEW, MAX_NEW, Row, is_looping, read_prompts, user_turn
from pack_rollouts import Pieces, packed_rows
from tokenizers import Tokenizer

KNOWN_ANSWERS = sorted((Path(__file__).parent / "prompts").glob("smollm2-*.npz"))
STOPS = ("<|im_end|>", "<|endoftext|>")
LOOP_CHECK = 16  # tokens between two looks for a loop
LENGTH = 768  # tokens of a row, prompt included
PIECE_TOKENS = 20000


def without_loop(tokens: list[int]) -> list[int]:
    """Return an answer up to the place where it has repeated itself for a while."""
    for end in range(4 * LOOP_CHECK, len(tokens), LOOP_CHECK):
        if is_looping(tokens[:end]):
            return tokens[:end]
    return tokens


async def generate(engine, tokens: list[int], temperature: float, limit: int, stops: list[int]) -> list[int]:
    """Return the target's answer, its last token a stop or the one at the limit."""
    sampling = {"temperature": temperature, "max_new_tokens": limit, "stop_token_ids": stops}
    return (await engine.async_generate(input_ids=tokens, sampling_params=sampling))["output_ids"]


async def answer(engine, tokenizer: Tokenizer, row: Row) -> None:
    """Write the target's answers to every turn of a conversation into its row."""
    stops = [tokenizer.token_to_id(stop) for stop in STOPS]
    while True:
        limit = min(MAX_NEW.get(row.kind, DEFAULT_MAX_NEW), LENGTH - len(row.tokens))
        row.add(without_loop(await generate(engine, row.tokens, row.temperature, limit, stops)), True)
        if row.tokens[-1] not in stops or not row.turns or len(row.tokens) >= LENGTH - DEFAULT_MAX_NEW:
            return
        turn = "\n" + user_turn(row.turns.popleft())
        row.add(tokenizer.encode(turn, add_special_tokens=False).ids, False)


async def answer_all(engine, tokenizer: Tokenizer, rows: deque[Row], pieces: Pieces, args) -> None:
    """Answer prompts, `--requests` at a time, until this part of `--tokens` is written."""
    wanted = args.tokens / int(args.part.split("/")[1])
    began, before, reported = time.time(), pieces.total, time.time()

    async def work() -> None:
        nonlocal reported
        while rows and pieces.total < wanted:
            row = rows.popleft()
            await answer(engine, tokenizer, row)
            pieces.add(row)
            if time.time() - reported > 60:
                reported = time.time()
                speed = (pieces.total - before) / (reported - began)
                print(f"{pieces.total} written, {speed:.0f} a second, {len(rows)} waiting", flush=True)

    await asyncio.gather(*(work() for _ in range(args.requests)))
    pieces.write()


async def check(engine, rows: list[Row]) -> None:
    """Answer greedy prompts again, and print how often the first answer is the same.

    A batch of another size may decide a near tie of bfloat16 logits otherwise.
    """
    same = begun = 0
    for row in rows:
        begin = row.written.index(True)
        old = row.tokens[begin : [*row.written, False].index(False, begin)]
        new = await generate(engine, row.tokens[:begin], 0.0, len(old), [])
        same += new == old
        begun += new[:16] == old[:16]
    print(f"of {len(rows)} answers {same} are the same, {begun} in their first 16 tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("target_dir", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder of the pieces")
    parser.add_argument("--draft", type=Path, help="answer with DFLASH and this draft")
    parser.add_argument("--tokens", type=float, default=2.5e6, help="end when the pieces hold so many")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts' order and of sampled answers")
    parser.add_argument("--part", default="0/1", help="answer every N-th prompt, from the I-th: I/N")
    parser.add_argument("--requests", type=int, default=48, help="at a time")
    parser.add_argument("--check", type=int, metavar="N", help="answer N greedy prompts of the pieces again")
    args = parser.parse_args()

    os.environ.setdefault("SGLANG_DFLASH_CPU_LAYERS", "1")  # read by the engine's processes
    import sglang

    index, parts = map(int, args.part.split("/"))
    pieces = Pieces(args.out, f"part{index}of{parts}", PIECE_TOKENS)
    known = {row.name for file in KNOWN_ANSWERS for row in packed_rows(file)}
    tokenizer = Tokenizer.from_file(str(args.target_dir / "tokenizer.json"))
    rows = list(read_prompts(args.prompts, tokenizer, pieces.done | known, (index, parts)))
    random.Random(args.seed).shuffle(rows)
    print(f"{len(rows)} prompts to answer, {pieces.total} tokens written", flush=True)
    speculation = {}
    if args.draft:
        speculation = {
            "speculative_algorithm": "DFLASH",
            "speculative_draft_model_path": str(args.draft),
        }
    with sglang.Engine(
        model_path=str(args.target_dir),
        skip_tokenizer_init=True,
        random_seed=args.seed,
        max_running_requests=args.requests,
        max_total_tokens=args.requests * LENGTH,
        watchdog_timeout=24 * 3600,  # seconds; a process that was paused for long is not hung
        **speculation,
    ) as engine:
        if args.check:
            rows = [row for path in sorted(args.out.glob("*.npz")) for row in packed_rows(path)]
            greedy = [row for row in rows if row.temperature == 0][: args.check]
            engine.loop.run_until_complete(check(engine, greedy))
            return
        engine.loop.run_until_complete(answer_all(engine, tokenizer, deque(rows), pieces, args))


if __name__ == "__main__":
    main()
