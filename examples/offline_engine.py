"""Run an offline batch: SGLang's Engine with a DFLASH draft, without a server.

The keywords of the engine are the server's flags.

    python examples/offline_engine.py --model-path TARGET --draft DRAFT [--requests FILE] [--dtype float32]

FILE has one request per line in the form of POST /generate: {"text": ..., "sampling_params": {...}}.
The answers are printed as JSON, one per line.
"""

import argparse
import json

import sglang

REQUESTS = [
    {"text": "def read_config(path):\n", "sampling_params": {"temperature": 0, "max_new_tokens": 48}},
    {"text": "class Stack:\n    def ", "sampling_params": {"temperature": 0.7, "max_new_tokens": 48}},
]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--requests")
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    requests = REQUESTS
    if args.requests:
        with open(args.requests) as lines:
            requests = [json.loads(line) for line in lines]

    engine = sglang.Engine(
        model_path=args.model_path,
        dtype=args.dtype,
        speculative_algorithm="DFLASH",
        speculative_draft_model_path=args.draft,
    )
    try:
        texts, sampling = [r["text"] for r in requests], [r["sampling_params"] for r in requests]
        for answer in engine.generate(texts, sampling):
            print(json.dumps(answer), flush=True)
    finally:
        engine.shutdown()


if __name__ == "__main__":  # the engine spawns processes that import this file
    main()
