"""Show how well the draft does: for one request from its answer, for all requests from /metrics.

python examples/acceptance.py [URL]          # the server runs with --enable-metrics
"""

import sys
from collections import Counter

import requests
from prometheus_client.parser import text_string_to_metric_families

PROMPT = "def read_config(path):\n"


def from_answer(url: str) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 96, "ignore_eos": True}
    request = {"text": PROMPT, "sampling_params": sampling}
    answer = requests.post(f"{url}/generate", json=request, timeout=600)
    answer.raise_for_status()
    meta = answer.json()["meta_info"]
    # Tokens per verified block, bonus token included.
    print(f"this request: accept length {meta['spec_accept_length']:.2f}")
    # Entry n counts the blocks with n accepted drafted tokens, which are those at positions 1 .. n.
    blocks = meta["spec_correct_drafts_histogram"]
    shares = [sum(blocks[position:]) / sum(blocks) for position in range(1, len(blocks))]
    print("  accepted at position 1, 2, ...:", " ".join(f"{share:.2f}" for share in shares))


def from_metrics(url: str) -> None:
    page = requests.get(f"{url}/metrics", timeout=60)
    if page.status_code == requests.codes.not_found:
        raise SystemExit("all requests: start the server with --enable-metrics")
    page.raise_for_status()
    totals, at_position = Counter(), Counter()
    for family in text_string_to_metric_families(page.text):
        for sample in family.samples:  # one per scheduler, added up here
            totals[sample.name] += sample.value
            if sample.name == "sglang:spec_accepted_tokens_per_position_total":
                at_position[int(sample.labels["position"])] += sample.value
    blocks = totals["sglang:spec_drafts_total"]
    if not blocks:
        raise SystemExit("no drafted blocks on /metrics: is this a DFLASH server with --enable-metrics?")
    accept_length = 1 + totals["sglang:spec_accepted_tokens_total"] / blocks
    print(f"all requests: accept length {accept_length:.2f} over {blocks:.0f} blocks")
    shares = [at_position[position] / blocks for position in sorted(at_position)]
    print("  accepted at position 1, 2, ...:", " ".join(f"{share:.2f}" for share in shares))


if __name__ == "__main__":
    server = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000"
    from_answer(server)
    from_metrics(server)
