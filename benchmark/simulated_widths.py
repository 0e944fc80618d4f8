"""Simulate what the policy of verify lengths would bring on a GPU that is not at hand.

    python benchmark/simulated_widths.py [--gpu H200] [--output benchmark/results/simulated-widths-h200.md]

Acceptance is given. A cycle takes draft + verify + commit of roofline.py at 80 % of the bandwidth and 65 % of
the arithmetic, plus a fixed time for launches. Nothing here was measured on a GPU.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import roofline
from gpu.shapes import QWEN3_8B, Pair

from sglang_dflash.srt.speculative.cycle.plan import BatchRequests
from sglang_dflash.srt.speculative.cycle.ragged_graphs import row_sizes
from sglang_dflash.srt.speculative.width.estimates import CostTable
from sglang_dflash.srt.speculative.width.policy import LengthChooser

BATCHES = (1, 4, 16, 32, 64, 128, 256)
WIDTHS = np.arange(1, 17)
COMMON = np.array([1, 2, 4, 8, 16])  # widths for all, to compare with
DEPTH = int(WIDTHS[-1]) - 1
SIZES = row_sizes(BATCHES[-1], DEPTH + 1)  # rows of the graphs for separate lengths
CONTEXT = 1024
LAUNCHES = 0.3e-3  # seconds of a cycle that no roofline counts; a guess, to be replaced by a measurement
CYCLES, WARM, LAG, ANSWER = 260, 100, 2, 256
# P(token k is accepted | those before it are), falling from the first to the last.
ACCEPTANCE = {
    "strong": np.linspace(0.92, 0.85, DEPTH),
    "usual": np.linspace(0.8, 0.6, DEPTH),
    "weak": np.linspace(0.45, 0.3, DEPTH),
    "random": np.full(DEPTH, 0.002),
}
# Kinds of requests that share a batch in equal parts.
MIXES = (
    *((kind,) for kind in ACCEPTANCE),
    ("strong", "weak"),
    ("strong", "random"),
    ("usual", "weak"),
    ("strong", "usual", "weak", "random"),
)


def seconds_of(work: roofline.Work, gpu: roofline.Gpu) -> float:
    """Return the seconds of a phase, somewhat above its lower bound."""
    return max(work.bytes / (0.8 * gpu.bandwidth), work.flops / (0.65 * gpu.flops))


def costs_on(pair: Pair, gpu: roofline.Gpu, sizes: Sequence[int] | None = None) -> CostTable:
    """Return what start-up would have measured. sizes: rows of the captured graphs. None: any number."""

    def verify(n: int, width: int) -> float:
        blocks = replace(pair, block_size=width)
        phases = roofline.verify(blocks, n, CONTEXT), roofline.commit(blocks, n, CONTEXT)
        return LAUNCHES + sum(seconds_of(work, gpu) for work in phases)

    draft = [seconds_of(roofline.draft(pair, n, CONTEXT), gpu) for n in BATCHES]
    table = [[verify(n, int(width)) for width in WIDTHS] for n in BATCHES]
    return CostTable(np.array(BATCHES), WIDTHS, np.array(table), np.array(draft), sizes=sizes)


def best_common(costs: CostTable, accept_probs: np.ndarray) -> float:
    """Return tokens/s of the best width for all, with acceptance known. accept_probs: [n, K]"""
    n, prefix_accept_prob = len(accept_probs), accept_probs.cumprod(axis=1)
    tokens = n + np.array([prefix_accept_prob[:, : width - 1].sum() for width in COMMON])
    seconds = costs.verify(n)[n * (COMMON - 1)] + costs.draft(n)[-1] * (COMMON > 1)
    return float((tokens / seconds).max())


def gain(costs: CostTable, exact: CostTable, n: int, mix: tuple[str, ...], seed: int = 0) -> float:
    """Return the policy's tokens/s over those of the best width for all.

    A verify with separate lengths is padded to the next graph (`costs`), one with a width for all is not
    (`exact`).

    It learns, two cycles late, from answers of `ANSWER` tokens, after which a new request takes the row. The
    first `WARM` cycles do not count, probes do.
    """
    rng = np.random.default_rng(seed)
    accept_probs = np.stack([ACCEPTANCE[mix[i % len(mix)]] for i in range(n)])
    prefix_accept_prob = accept_probs.cumprod(axis=1)
    chooser = LengthChooser(costs, n)
    verify, draft = costs.verify(n), costs.draft(n)
    rows, modes, no_matches = np.arange(n), np.zeros(n, dtype=int), np.zeros(n, dtype=int)
    said, born, late = rng.integers(0, ANSWER, n), np.zeros(n, dtype=int), []
    tokens = seconds = 0.0
    for cycle in range(CYCLES):
        requests = BatchRequests(([], False, int(born.sum())), rows, born, modes)
        lengths = chooser.choose(requests, 0, no_matches, np.full(n, DEPTH)).lengths
        hits = (rng.random(prefix_accept_prob.shape) < accept_probs).cumprod(axis=1).sum(axis=1)
        kept = np.minimum(hits, lengths)
        late.append((lengths, kept, born.copy()))
        if len(late) > LAG:
            verified, accepted, whose = late.pop(0)
            [same] = np.nonzero(whose == born)
            chooser.drafts.learn(same, modes[same], verified[same], accepted[same])
        if cycle >= WARM:
            tokens += n + np.where(np.arange(DEPTH) < lengths[:, None], prefix_accept_prob, 0.0).sum()
            seconds += verify[lengths.sum()] + draft[(lengths > 0).sum()]
        said += kept + 1
        [ended] = np.nonzero(said >= ANSWER)
        said[ended] = 0
        born[ended] += 1
        chooser.drafts.reset(ended)
    return tokens / seconds / best_common(exact, accept_probs)


def page(pair: Pair = QWEN3_8B, gpu: roofline.Gpu = roofline.H200) -> str:
    costs, exact = costs_on(pair, gpu, SIZES), costs_on(pair, gpu)
    rows = [
        "| requests of these kinds | " + " | ".join(map(str, BATCHES)) + " |",
        "|---|" + "---:|" * len(BATCHES),
    ]
    for mix in MIXES:
        cells = (f"{gain(costs, exact, n, mix):.2f}" for n in BATCHES)
        rows.append(f"| {', '.join(mix)} | " + " | ".join(cells) + " |")
    lengths = ", ".join(f"{name} {1 + p.cumprod().sum():.1f}" for name, p in ACCEPTANCE.items())
    return f"""# Verify lengths for each request on a simulated {gpu.name}

By `python benchmark/simulated_widths.py --gpu {gpu.name.split()[0]}`: {pair.name} at context {CONTEXT},
blocks of {DEPTH + 1}. Costs are those of `benchmark/roofline.py` at 80 % of the bandwidth and 65 % of the
arithmetic, plus {1e3 * LAUNCHES:.1f} ms a cycle for launches (a guess). Acceptance is given. Nothing was
measured on a GPU. Forwards with separate lengths are padded to the next of {len(SIZES)} graphs,
widths for all are not.

Tokens per second of the real policy, which learns, over those of the best width for all, which knows the
acceptance, by number of requests. Accept length of a whole block: {lengths}.

{chr(10).join(rows)}
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", default="H200", choices=["H100", "H200"])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    text = page(gpu=getattr(roofline, arguments.gpu))
    if arguments.output:
        arguments.output.write_text(text)
    print(text)
