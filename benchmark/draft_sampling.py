"""Accept length of sampled requests, per method of choosing drafts.

    python benchmark/draft_sampling.py                    # the bundled pair
    python benchmark/draft_sampling.py --draft DRAFT --temperatures 0.7 1.0

One server per method, the same requests for each. Writes benchmark/results/sampling.md.
"""

import argparse
import os
import platform
from datetime import date
from importlib.metadata import version

from serving import DRAFT, ROOT, TARGET, Server, dflash_arguments, serve, text_prompts

PROBABILISTIC = ["--speculative-draft-sample-method", "probabilistic"]
METHODS = {
    "greedy": [],
    "probabilistic": PROBABILISTIC,
    "probabilistic, temperature x 0.6": [*PROBABILISTIC, "--speculative-draft-temperature-scale", "0.6"],
    "probabilistic, 2 slots": [*PROBABILISTIC, "--speculative-draft-sampled-slots", "2"],
}


def accept_length(
    server: Server, texts: list[str], temperature: float, new_tokens: int
) -> tuple[float, float]:
    """Return tokens per verified block over all requests, and the standard error."""
    sampling = {"temperature": temperature, "max_new_tokens": new_tokens, "ignore_eos": True}
    answers = server.generate_many([{"text": text, "sampling_params": sampling} for text in texts], 16)
    counts: list[int] = []
    for answer in answers:
        for kept, blocks in enumerate(answer["meta_info"]["spec_correct_drafts_histogram"]):
            counts += [kept + 1] * blocks
    mean = sum(counts) / len(counts)
    variance = sum((count - mean) ** 2 for count in counts) / (len(counts) - 1)
    return mean, (variance / len(counts)) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default=str(TARGET.relative_to(ROOT)))
    parser.add_argument("--draft", nargs="+", default=[str(DRAFT.relative_to(ROOT))])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.3, 0.7, 1.0])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--name", default="sampling", help="of the file in benchmark/results/")
    args = parser.parse_args()
    texts = [p["text"] for p in text_prompts()][: args.prompts]
    header = " | ".join(f"T = {t}" for t in args.temperatures)
    lines = [f"| draft | method | {header} |", "|---|---|" + "---:|" * len(args.temperatures)]
    for draft in args.draft:
        for method in args.methods:
            with serve("--model-path", args.target, *dflash_arguments(draft), *METHODS[method]) as server:
                found = [accept_length(server, texts, t, args.new_tokens) for t in args.temperatures]
            cells = " | ".join(f"{mean:.3f} ± {error:.3f}" for mean, error in found)
            lines.append(f"| {os.path.basename(draft)} | {method} | {cells} |")
            print(lines[-1], flush=True)
    page = f"""# Accept length of sampled requests

{date.today()}; {platform.machine()}, {os.cpu_count()} CPU cores; sglang {version("sglang")},
sglang-dflash {version("sglang-dflash")}; {len(texts)} held-out prompts, {args.new_tokens} new tokens each.
Tokens per verified block, bonus token included, ± one standard error. `python benchmark/draft_sampling.py`.

"""
    (ROOT / "benchmark" / "results" / f"{args.name}.md").write_text(page + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
