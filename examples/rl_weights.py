"""Train by reinforcement: update weights between two batches, and see what that does to acceptance.

    python examples/rl_weights.py URL TARGET [DRAFT]

TARGET and DRAFT are folders that a trainer has written, with the same shapes as those served. The server
loads them without a restart. Answers are the new target's at once. A draft that still knows the old target
costs speed alone: its acceptance says when to train it too.
"""

import sys

import requests

PROMPTS = ["def read_config(path):\n", "class Stack:\n    def ", "import os\n\n", "for line in lines:\n    "]


def roll_out(url: str, what: str) -> None:
    """Sample a batch, and print the tokens of a cycle, the bonus token included."""
    sampling = {"temperature": 1.0, "max_new_tokens": 32, "ignore_eos": True}
    request = {"text": PROMPTS * 4, "sampling_params": sampling}
    answer = requests.post(f"{url}/generate", json=request, timeout=600)
    answer.raise_for_status()
    batch = [rollout["meta_info"] for rollout in answer.json()]
    tokens = sum(meta["completion_tokens"] for meta in batch)
    cycles = sum(meta["spec_verify_ct"] for meta in batch)
    print(f"{what}: {tokens} tokens, {tokens / cycles:.2f} a cycle, version {batch[0]['weight_version']}")


def update(url: str, folder: str, version: str) -> None:
    """Load a checkpoint. Nothing has changed if the server refuses a draft."""
    body = {"model_path": folder, "weight_version": version, "flush_cache": True}
    answer = requests.post(f"{url}/update_weights_from_disk", json=body, timeout=600).json()
    if not answer["success"]:
        raise SystemExit(f"{folder} is not loaded: {answer['message']}")


def main(url: str, target: str, draft: str | None = None) -> None:
    roll_out(url, "before")
    update(url, target, "1")
    roll_out(url, "with the new target")
    if draft:
        update(url, draft, "1")
        roll_out(url, "with the new draft")


if __name__ == "__main__":
    main(*sys.argv[1:])
