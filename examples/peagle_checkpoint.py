"""Measure a P-EAGLE draft on greedy and on sampled requests.

Like any checkpoint of the `speculators` library, the draft names its target:

    python -m sglang.launch_server --model-path models/tiny-qwen3-code-peagle
    python examples/peagle_checkpoint.py [URL]

Fewer drafted tokens of sampled requests are accepted. `--speculative-draft-sample-method probabilistic`
recovers some of them. Compare a server with that flag and one without it on your own pair.
"""

import sys

import requests

PROMPTS = ["import os\nimport ", "class Stack:\n    def ", "def mean(values):\n", "for name in sorted("]


def accept_length(url: str, temperature: float) -> float:
    """Return the tokens per verified block, bonus token included, over all prompts."""
    sampling = {"temperature": temperature, "max_new_tokens": 64, "ignore_eos": True}
    request = {"text": PROMPTS, "sampling_params": sampling}
    answers = requests.post(f"{url}/generate", json=request, timeout=600)
    answers.raise_for_status()
    metas = [answer["meta_info"] for answer in answers.json()]
    return sum(meta["completion_tokens"] for meta in metas) / sum(meta["spec_verify_ct"] for meta in metas)


def main(url: str) -> None:
    info = requests.get(f"{url}/server_info", timeout=60).json()
    method = "probabilistic" if info["speculative_use_rejection_sampling"] else "greedy"
    print(f"draft {info['speculative_draft_model_path']}, sample method {method}")
    for temperature in (0.0, 0.7, 1.0):
        print(f"temperature {temperature}: accept length {accept_length(url, temperature):.2f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000")
