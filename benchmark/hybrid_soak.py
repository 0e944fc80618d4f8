"""Compare thousands of greedy answers of the hybrid pair with the plain target's.

    python benchmark/hybrid_soak.py --requests 3000

Requests join at random, and are aborted, retracted and served from the prefix cache. Both servers run in
float32, the plain one first. Prompts are held-out ones, cut at random: alone, behind a shared beginning, or
continued by a part of their own answer. A small pool and a low estimate of answer lengths make the scheduler
retract. Tokens after a position at which the target's best two are closer than float32 can separate are not
compared. Exits with 1 if an answer is wrong, or if nothing was retracted, aborted or taken from the prefix
cache.
"""

import argparse
import concurrent.futures
import json
import random
import sys
import threading
import time
import urllib.error
from collections import Counter
from pathlib import Path

from serving import HYBRID_DRAFT as DRAFT
from serving import HYBRID_TARGET as TARGET
from serving import Server, dflash_arguments, heldout_prompts, serve
from tokenizers import Tokenizer

# Two batch shapes compute a logit within about 1e-6 in float32, and recurrent states carry that on.
TIE = 2e-5
LONGEST = 160


def known_answers(server: Server, count: int, seed: int) -> list[dict]:
    """Return prompts with the target's `LONGEST` tokens, as far as float32 decides them."""
    generator = random.Random(seed)
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    texts = [tokenizer.encode(prompt["text"]).ids for prompt in heldout_prompts()]
    shared = [token for text in texts[:6] for token in text][:300]
    prompts = []
    for _ in range(count):
        text = generator.choice(texts) + generator.choice(texts)
        prompt = text[: generator.randint(1, len(text))]
        start = shared[: generator.choice((64, 128, 200, 256))] if generator.random() < 0.3 else []
        prompts.append(start + prompt)
    sampling = {"temperature": 0, "max_new_tokens": LONGEST, "ignore_eos": True}
    bodies = [
        {"input_ids": p, "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 2}
        for p in prompts
    ]
    known = []
    for prompt, answer in zip(prompts, server.generate_many(bodies, 16), strict=True):
        leads = [(top[0][0] - top[1][0]) for top in answer["meta_info"]["output_top_logprobs"]]
        decided = next((i for i, lead in enumerate(leads) if lead < TIE), len(leads))
        known.append({"prompt": prompt, "answer": answer["output_ids"][:decided]})
    return [k for k in known if len(k["answer"]) >= 8]


def soak(server: Server, known: list[dict], count: int, seed: int, concurrency: int) -> Counter:
    """Send `count` requests, `concurrency` at a time, and count the outcomes."""
    counts, lock = Counter(), threading.Lock()

    def send_one(number: int) -> None:
        generator = random.Random(seed * 1_000_003 + number)
        k = generator.choice(known)
        done = generator.randrange(len(k["answer"]) - 1) if generator.random() < 0.4 else 0
        prompt, rest = k["prompt"] + k["answer"][:done], k["answer"][done:]
        length = min(len(rest), generator.choice((1, 2, 5, 17, 40, LONGEST)))
        rid = f"soak-{number}"
        is_aborted = generator.random() < 0.1
        if is_aborted:
            delay = generator.random() * 2
            threading.Timer(delay, lambda: server.post("/abort_request", {"rid": rid})).start()
        sampling = {"temperature": 0, "max_new_tokens": length, "ignore_eos": True}
        try:
            answer = server.generate(input_ids=prompt, rid=rid, sampling_params=sampling)
        except urllib.error.HTTPError as error:
            if not is_aborted:  # the answer if it is aborted before it runs
                raise
            error.close()
            with lock:
                counts["aborted"] += 1
            return
        meta, output = answer["meta_info"], answer["output_ids"]
        was_cut = meta["finish_reason"]["type"] == "abort"
        with lock:
            counts["requests"] += 1
            counts["tokens"] += len(output)
            counts["aborted"] += was_cut
            # An aborted request may lack these fields.
            counts["retractions"] += meta.get("num_retractions", 0)
            counts["cached tokens"] += meta.get("cached_tokens", 0)
            counts["cycles"] += sum(meta.get("spec_correct_drafts_histogram") or [])
            expected = rest[: len(output)] if was_cut else rest[:length]
            if output != expected:
                counts["wrong"] += 1
                report = {"wrong": number, "prompt": prompt, "got": output, "expected": expected}
                print(json.dumps(report), flush=True)
        time.sleep(generator.random() * 0.2)

    with concurrent.futures.ThreadPoolExecutor(concurrency) as pool:
        for number, _ in enumerate(pool.map(send_one, range(count)), start=1):
            if number % 200 == 0:
                print(f"{number} of {count}: {dict(counts)}", flush=True)
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--prompts", type=int, default=300)
    parser.add_argument("--concurrency", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--target", type=Path, default=TARGET)
    parser.add_argument("--draft", type=Path, default=DRAFT)
    parser.add_argument("--timeout", type=float, default=600, help="seconds a server may take to start")
    options = parser.parse_args()
    environment = {"OMP_NUM_THREADS": "1", "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "8"}
    arguments = ["--model-path", options.target, "--dtype", "float32", "--mamba-track-interval", "64"]
    with serve(*arguments, env=environment, timeout=options.timeout) as plain:
        known = known_answers(plain, options.prompts, options.seed)
    print(f"{len(known)} prompts, {sum(len(k['answer']) for k in known)} known tokens", flush=True)
    # Room for a third of the requests that run at once.
    pool = max(2 * max(len(k["prompt"]) + LONGEST for k in known), options.concurrency * 100)
    arguments += ["--max-total-tokens", pool, *dflash_arguments(options.draft)]
    with serve(*arguments, env=environment, timeout=options.timeout) as server:
        counts = soak(server, known, options.requests, options.seed, options.concurrency)
    accept_length = (counts["tokens"] - counts["requests"]) / max(counts["cycles"], 1)
    print(json.dumps({**counts, "wrong": counts["wrong"], "accept length": round(accept_length, 2)}))
    exercised = counts["retractions"] and counts["aborted"] and counts["cached tokens"]
    return 0 if exercised and not counts["wrong"] else 1


if __name__ == "__main__":
    sys.exit(main())
