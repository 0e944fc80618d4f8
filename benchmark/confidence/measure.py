"""Does the draft's own confidence say more about what will be kept than averages do? Measured on the bundled
drafts.

    python benchmark/confidence/measure.py            # writes benchmark/results/confidence.md

Servers that verify whole blocks write down how sure the draft was and what was kept. Replayed cycle by cycle,
the estimate that is served (`speculative/width/estimates.py`) and one that asks the draft (calibration.py)
say beforehand how likely each token is kept, then learn. Held against each other: the log loss of that, and
the tokens per second of choosing the width of each cycle by it, where the confidence of the cycle itself is
known before its width is (it is not, on CUDA, without waiting for the device)."""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
from calibration import ConfidenceCalibration

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from serving import DRAFT, PEAGLE_DRAFT, ROOT, TARGET, dflash_arguments, importing, serve, text_prompts  # noqa: E402

from sglang_dflash.srt.speculative.width.estimates import SurvivalEstimate  # noqa: E402
from sglang_dflash.srt.speculative.width.policy import expected_tokens  # noqa: E402

WIDTHS = np.array([1, 2, 4, 8])
# Seconds of a cycle of n requests at each width, relative to a plain step.
COSTS = {
    "rows cost 1 %": lambda n: 1 + 0.01 * n * (WIDTHS - 1) + 0.25 * (WIDTHS > 1),
    "rows cost 5 %": lambda n: 1 + 0.05 * n * (WIDTHS - 1) + 0.25 * (WIDTHS > 1),
}


def record(draft: Path, temperature: float, concurrency: int, requests: int) -> list[dict]:
    texts = [p["text"] for p in text_prompts()][:requests]
    sampling = {"temperature": temperature, "max_new_tokens": 96, "ignore_eos": True}
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "cycles.jsonl"
        env = {"CONFIDENCE_LOG": str(log), "OMP_NUM_THREADS": "1", **importing(Path(__file__).parent)}
        with serve(
            "--model-path", TARGET, *dflash_arguments(draft), "--max-total-tokens", "32768", env=env
        ) as server:
            server.generate_many([{"text": text, "sampling_params": sampling} for text in texts], concurrency)
        return [json.loads(line) for line in log.read_text().splitlines()]


def replay(cycles: list[dict]) -> dict[str, float]:
    """Log loss per labelled token, and tokens per second of the widths chosen, relative to the best fixed
    one."""
    depth = len(cycles[0]["confidence"][0])
    average, calibrated = (
        SurvivalEstimate(len(cycles) * 64, depth),
        ConfidenceCalibration(len(cycles) * 64, depth),
    )
    rows: dict[str, int] = {}
    loss = {"averages": 0.0, "confidence": 0.0}
    labelled = 0
    spent = {(name, cost): [0.0, 0.0] for name in loss for cost in COSTS}
    fixed = {cost: np.zeros((2, len(WIDTHS))) for cost in COSTS}
    for number, cycle in enumerate(cycles):
        slots = np.array([rows.setdefault(rid, len(rows)) for rid in cycle["requests"]])
        modes = np.zeros(len(slots), dtype=int)
        confidence, accepted = np.array(cycle["confidence"]), np.array(cycle["accepted"])
        probs = {
            "averages": average.accept_probs(slots, modes),
            "confidence": calibrated.accept_probs(slots, modes, confidence),
        }
        kept = np.arange(depth) < accepted[:, None]
        seen = np.arange(depth) <= accepted[:, None]
        if number >= len(cycles) // 3:  # both have learned something
            labelled += seen.sum()
            tokens = np.array([(np.minimum(accepted, w - 1) + 1).sum() for w in WIDTHS])
            for name, a in probs.items():
                a = np.clip(a, 1e-4, 1 - 1e-4)
                loss[name] -= np.where(seen, np.where(kept, np.log(a), np.log1p(-a)), 0).sum()
                for cost, seconds in COSTS.items():
                    chosen = int((expected_tokens(a, WIDTHS) / seconds(len(slots))).argmax())
                    spent[name, cost][0] += tokens[chosen]
                    spent[name, cost][1] += seconds(len(slots))[chosen]
            for cost, seconds in COSTS.items():
                fixed[cost] += np.stack([tokens, seconds(len(slots))])
        average.learn(slots, modes, depth, accepted[None])
        calibrated.learn(slots, modes, depth, accepted, confidence)
    result = {f"log loss, {name}": loss[name] / labelled for name in loss}
    for cost in COSTS:
        best = (fixed[cost][0] / fixed[cost][1]).max()
        for name in loss:
            result[f"{cost}, {name}"] = spent[name, cost][0] / spent[name, cost][1] / best
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16])
    args = parser.parse_args()
    found = []
    for name, draft in (("DFlash", DRAFT), ("P-EAGLE", PEAGLE_DRAFT)):
        for temperature in (0.0, 1.0):
            for n in args.concurrency:
                result = replay(record(draft, temperature, n, args.requests))
                found.append((f"| {name} | {temperature:g} | {n} | ", result))
                print(found[-1], flush=True)
    keys = list(found[0][1])
    lines = ["| draft | T | requests | " + " | ".join(keys) + " |", "|---|" + "---:|" * (len(keys) + 2)]
    lines += [head + " | ".join(f"{result[key]:.3f}" for key in keys) + " |" for head, result in found]
    page = f"""# What the draft's confidence adds to averages

By `python benchmark/confidence/measure.py`: bundled drafts, {args.requests} held-out prompts, bf16 on a CPU. Log loss in nats per labelled token, lower is
better. The other columns: tokens per second of choosing each cycle's width by the estimate, without hysteresis, in multiples of the best fixed width; "rows
cost" is what a verified row adds to a plain step's time, a draft 25 %.

"""
    (ROOT / "benchmark" / "results" / "confidence.md").write_text(page + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
