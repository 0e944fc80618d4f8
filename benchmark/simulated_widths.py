"""Simulate which verify widths the policy chooses on a GPU that is not at hand.

    python benchmark/simulated_widths.py [--output benchmark/results/simulated-widths-h200.md]

Acceptance is given. A cycle takes draft + verify + commit of roofline.py at its lower bound, plus a fixed
time for launches; width 1 takes verify and commit of one row. Nothing here was measured on a GPU.
"""

import argparse
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import roofline
from gpu.shapes import QWEN3_8B, Pair

from sglang_dflash.srt.speculative.width.chooser import WidthChooser
from sglang_dflash.srt.speculative.width.costs import CostTable
from sglang_dflash.srt.speculative.width.estimates import SurvivalEstimate
from sglang_dflash.srt.speculative.width.policy import expected_tokens, survival

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
WIDTHS = np.array([1, 2, 4, 8, 16])
CONTEXT = 1024
LAUNCHES = 0.3e-3  # seconds of a cycle that no roofline counts; a guess, to be replaced by a measurement
CYCLES = 600
# P(token k is accepted | those before it are), falling from the first to the last.
ACCEPTANCE = {
    "strong": np.linspace(0.92, 0.85, 15),
    "usual": np.linspace(0.8, 0.6, 15),
    "weak": np.linspace(0.45, 0.3, 15),
    "random": np.full(15, 0.002),
}


@dataclass(frozen=True)
class Cell:
    """Result of one batch size with one draft."""

    batch: int
    draft: str
    speeds: np.ndarray  # tokens/s of each fixed width
    adaptive: float  # tokens/s of the policy, from its first cycle on, probes included
    width: int  # the policy's most frequent one


def cycle_seconds(pair: Pair, gpu: roofline.Gpu, batch: int, width: int) -> float:
    """Return the seconds of a cycle: the draft fills its block, the rest takes `width` slots."""
    verified = replace(pair, block_size=width)
    phases = roofline.verify(verified, batch, CONTEXT), roofline.commit(verified, batch, CONTEXT)
    seconds = LAUNCHES + sum(work.seconds(gpu) for work in phases)
    return seconds + (roofline.draft(pair, batch, CONTEXT).seconds(gpu) if width > 1 else 0.0)


def simulate(pair: Pair, gpu: roofline.Gpu, batch: int, draft: str, seed: int = 0) -> Cell:
    rng = np.random.default_rng(seed)
    accept_probs = np.broadcast_to(ACCEPTANCE[draft], (batch, len(ACCEPTANCE[draft])))
    seconds = np.array([cycle_seconds(pair, gpu, batch, int(width)) for width in WIDTHS])
    tokens = expected_tokens(accept_probs, WIDTHS)
    measured = np.array([[cycle_seconds(pair, gpu, n, int(width)) for width in WIDTHS] for n in BATCHES])
    chooser = WidthChooser(
        CostTable(np.array(BATCHES), WIDTHS, measured), SurvivalEstimate(max(BATCHES), WIDTHS[-1] - 1)
    )
    rows, modes = np.arange(batch), np.zeros(batch, dtype=int)
    spent = committed = 0.0
    chosen: Counter[int] = Counter()
    for _ in range(CYCLES):
        choice = chooser.choose(rows, modes)
        is_accepted = rng.random((batch, choice.width - 1)) < accept_probs[:, : choice.width - 1]
        chooser.on_accept_lens(rows, modes, choice.width, is_accepted.cumprod(axis=1).sum(axis=1))
        chooser.on_cycle_time(
            batch, choice.width, seconds[choice.index] * np.exp(0.03 * rng.standard_normal())
        )
        spent += seconds[choice.index]
        committed += tokens[choice.index]
        chosen[choice.width] += 1
    return Cell(batch, draft, tokens / seconds, committed / spent, chosen.most_common(1)[0][0])


# Kinds of requests that share a batch in equal parts.
MIXES = (("strong", "weak"), ("strong", "random"), ("usual", "weak"), ("strong", "usual", "weak", "random"))


def ragged_gain(pair: Pair, gpu: roofline.Gpu, batch: int, mix: tuple[str, ...]) -> float:
    """Return tokens/s with the best width for each request, in multiples of the best one for all.

    This is an upper bound: acceptance is known, and verify takes as long as a uniform one of as many rows.
    """
    accept_probs = np.stack([ACCEPTANCE[mix[i % len(mix)]] for i in range(batch)])
    widths = np.arange(1, WIDTHS[-1] + 1)
    seconds = np.array([cycle_seconds(pair, gpu, batch, int(width)) for width in widths])
    uniform = (expected_tokens(accept_probs, WIDTHS) / seconds[WIDTHS - 1]).max()
    # Each row goes to the request most likely to accept it. Survival falls with the position, so a request's
    # rows stay a prefix.
    accepted = np.sort(survival(accept_probs).ravel())[::-1]
    rows = np.arange(batch, batch * widths[-1] + 1)
    tokens = batch + np.concatenate(([0.0], accepted.cumsum()))
    with_draft = seconds.copy()
    # The draft runs as soon as one request has a row.
    with_draft[0] += roofline.draft(pair, batch, CONTEXT).seconds(gpu)
    row_seconds = np.interp(rows, batch * widths, with_draft)
    row_seconds[0] = seconds[0]
    return float((tokens / row_seconds).max() / uniform)


def ragged_table(pair: Pair, gpu: roofline.Gpu) -> str:
    batches = BATCHES[1:]
    rows = [
        "| requests of these kinds | " + " | ".join(map(str, batches)) + " |",
        "|---|" + "---:|" * len(batches),
    ]
    for mix in MIXES:
        gains = (ragged_gain(pair, gpu, batch, mix) for batch in batches)
        rows.append(
            f"| {', '.join(mix)} | " + " | ".join(f"{100 * (gain - 1):+.0f} %" for gain in gains) + " |"
        )
    return "\n".join(rows)


def table(cells: list[Cell]) -> str:
    head = (
        "| draft | batch | "
        + " | ".join(f"width {w}" for w in WIDTHS)
        + " | adaptive | its width | against full width | against the best fixed width |"
    )
    rows = [head, "|---|" + "---:|" * (len(WIDTHS) + 5)]
    for cell in cells:
        plain = cell.speeds[0]
        columns = [
            cell.draft,
            str(cell.batch),
            *(f"{speed / plain:.2f}" for speed in cell.speeds),
            f"{cell.adaptive / plain:.2f}",
            str(cell.width),
            f"{100 * (cell.adaptive / cell.speeds[-1] - 1):+.0f} %",
            f"{cell.adaptive / cell.speeds.max():.3f}",
        ]
        rows.append(f"| {' | '.join(columns)} |")
    return "\n".join(rows)


def page(pair: Pair = QWEN3_8B, gpu: roofline.Gpu = roofline.H200) -> str:
    cells = [simulate(pair, gpu, batch, draft) for draft in ACCEPTANCE for batch in BATCHES]
    full = {name: 1 + np.cumprod(probs).sum() for name, probs in ACCEPTANCE.items()}
    lengths = ", ".join(f"{name} {length:.1f}" for name, length in full.items())
    return f"""# Verify widths chosen on a simulated {gpu.name}

By `python benchmark/simulated_widths.py`: {pair.name} at context {CONTEXT}. Costs are the lower bound of
`benchmark/roofline.py` plus {1e3 * LAUNCHES:.1f} ms a cycle for launches (a guess). Acceptance is given.
Nothing was measured on a GPU. Accept length of a full block of {pair.block_size}: {lengths}.

Speeds are multiples of no speculation (width 1, whose cycle also writes the draft's context). Adaptive:
{CYCLES} cycles of the real policy, the first ones and all probes included.

{table(cells)}

## What a width for each request could bring

Requests of different acceptance in equal parts, by batch size: tokens/s with the best width for each request,
compared with the best width for all, both with known acceptance. It is an upper bound, as it assumes that
rows cost the same however requests share them.

{ragged_table(pair, gpu)}
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    text = page()
    if arguments.output:
        arguments.output.write_text(text)
    print(text)
