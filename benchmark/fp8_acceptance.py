"""Accept lengths with FP8 copies for drafting beside the draft as it is, per bundled pair.

    python benchmark/fp8_acceptance.py                        # 18 servers; 40 minutes on two free cores
    python benchmark/fp8_acceptance.py --profile tiny-dflash

On a CPU the copies are computed with FP8's rounding, in bfloat16: the figures are acceptances, not speeds.
Requests and draft settings are those of acceptance.py. The standard error of a ratio comes from resampling
the requests, each of which is answered with every draft. Writes benchmark/results/fp8-layers.json and .md; a
call replaces the rows of its pairs.
"""

import argparse
import json
import os
import platform
import random
import statistics
from collections.abc import Sequence
from datetime import date

from acceptance import EXPECTED
from prompt_sets import RequestMaker, load
from serving import ROOT, serve

RESULTS = ROOT / "benchmark" / "results" / "fp8-layers.json"
LAYERS = {"SGLANG_DFLASH_DRAFT_LAYERS_DTYPE": "fp8"}
DRAFTS = {
    "as it is": {},
    "FP8 layers": LAYERS,
    "FP8 head and layers": LAYERS | {"SGLANG_DFLASH_DRAFT_HEAD_DTYPE": "fp8"},
}
SETS = "heldout", "chat"  # prompts that are in the repository; a pair has one of them
RESAMPLES = 1000
CONCURRENCY = 96

# Of each request: tokens that cycles emitted, and cycles.
Requests = list[tuple[int, int]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = json.loads(EXPECTED.read_text())
    profiles = {name: profile for name, profile in known.items() if prompts_of(profile)}
    parser.add_argument("--profile", nargs="+", choices=profiles, default=list(profiles))
    args = parser.parse_args()
    os.chdir(ROOT)  # the profiles name the bundled models from here
    rows = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    for name in args.profile:
        plain: Requests | None = None
        rows = [row for row in rows if row["profile"] != name]
        for draft, environment in DRAFTS.items():
            found = measure(profiles[name], environment)
            plain = plain or found
            rows.append({"profile": name, "draft": draft, **compared(found, plain)})
            print(rows[-1], flush=True)
        heading = {"date": str(date.today()), "machine": f"{platform.machine()}, {os.cpu_count()} CPU cores"}
        RESULTS.write_text(json.dumps({**heading, "rows": rows}, indent=1) + "\n")
        RESULTS.with_suffix(".md").write_text(page(heading, rows))


def prompts_of(profile: dict) -> str | None:
    """Name the prompts of a bundled pair. None: another pair."""
    return next((name for name in SETS if name in profile["sets"]), None)


def measure(profile: dict, environment: dict[str, str]) -> Requests:
    """Answer the prompts of the pair with a draft."""
    arguments = profile["server_args"]
    maker = RequestMaker(arguments[arguments.index("--model-path") + 1])
    params = {"temperature": 0, "max_new_tokens": profile["max_new_tokens"]}
    bodies = [maker.body(prompt, params) for prompt in load(prompts_of(profile)).prompts]
    with serve(*arguments, env=environment) as server:
        answers = [answer["meta_info"] for answer in server.generate_many(bodies, CONCURRENCY)]
    return [
        (sum((kept + 1) * blocks for kept, blocks in enumerate(histogram)), sum(histogram))
        for histogram in (answer["spec_correct_drafts_histogram"] for answer in answers)
    ]


def accept_length(requests: Sequence[tuple[int, int]]) -> float:
    """Tokens per cycle of all requests together."""
    return sum(tokens for tokens, _ in requests) / sum(cycles for _, cycles in requests)


def compared(found: Requests, plain: Requests, seed: int = 0) -> dict[str, float]:
    """Compare with the draft as it is: {"accept_length", "ratio", "error"}, its standard error."""
    draw, pairs = random.Random(seed), list(zip(found, plain, strict=True))
    ratios = []
    for _ in range(RESAMPLES):
        mine, other = zip(*draw.choices(pairs, k=len(pairs)), strict=True)
        ratios.append(accept_length(mine) / accept_length(other))
    return {
        "accept_length": accept_length(found),
        "ratio": accept_length(found) / accept_length(plain),
        "error": statistics.stdev(ratios),
    }


def page(heading: dict, rows: Sequence[dict]) -> str:
    """Write the results as Markdown."""
    lines = [
        "# Acceptance with FP8 draft layers",
        "",
        f"{heading['date']}; {heading['machine']}, bf16, whole blocks, greedy, the pair's held-out prompts.",
        "On a CPU the copies are computed with FP8's rounding and in bf16, so these are acceptances and not",
        "speeds. No GPU has run them. The error is one standard error of the ratio, from resampled requests.",
        "",
        "| profile | draft | accept length | ratio | error |",
        "|---|---|---:|---:|---:|",
    ]
    for row in rows:
        figures = [f"{row[name]:.3f}" for name in ("accept_length", "ratio", "error")]
        lines.append(f"| {' | '.join([row['profile'], row['draft'], *figures])} |")
    return "\n".join(
        [
            *lines,
            "",
            "Command: `python benchmark/fp8_acceptance.py`.",
            "",
        ]
    )


if __name__ == "__main__":
    main()
