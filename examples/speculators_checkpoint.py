"""Show the target, the draft and the acceptance of a `speculators` checkpoint.

The checkpoint names its target, so the server needs nothing else:

    python -m sglang.launch_server --model-path models/tiny-qwen3-code-dflash-speculators
    python examples/speculators_checkpoint.py [URL]
"""

import sys

import requests


def main(url: str) -> None:
    info = requests.get(f"{url}/server_info", timeout=60).json()
    block_size = info["speculative_num_draft_tokens"]
    print(f"target  {info['model_path']}")
    print(f"draft   {info['speculative_draft_model_path']}")
    # SGLang's count includes the anchor, the library's does not.
    print(f"SGLang's num_draft_tokens {block_size}, the library's speculative_tokens {block_size - 1}")

    sampling = {"temperature": 0, "max_new_tokens": 64, "ignore_eos": True}
    texts = ["import os\nimport ", "class Stack:\n    def ", "def mean(values):\n"]
    request = {"text": texts, "sampling_params": sampling}
    answers = requests.post(f"{url}/generate", json=request, timeout=600)
    answers.raise_for_status()
    for prompt, answer in zip(texts, answers.json(), strict=True):
        print(f"accept length {answer['meta_info']['spec_accept_length']:.2f}  {prompt!r} ...")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000")
