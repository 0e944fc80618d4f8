"""Draw the acceptance of each position of a block, from a running server's metrics.

    python benchmark/plot_acceptance.py --url http://127.0.0.1:30000 --output acceptance.png

The server must run DFLASH with --enable-metrics. Counts are since its start, over all its schedulers.
"""

import sys
import urllib.request
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from serving import documented, verdict_or_2

from sglang_dflash.srt.doctor.pair import BadInput


@dataclass(frozen=True)
class Counts:
    """Totals of a server; `accepted_at[k]` counts the blocks that kept drafted token k + 1."""

    drafts: int
    drafted: int
    accepted: int
    accepted_at: list[int]

    @property
    def accept_length(self) -> float:
        """Tokens per verified block, bonus token included."""
        return 1 + self.accepted / self.drafts


def read_counts(page: str) -> Counts:
    """Read the counters of a /metrics page. Raises ValueError if no block was verified yet."""
    totals: Counter[str] = Counter()
    positions: Counter[int] = Counter()
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            totals[sample.name] += sample.value
            if sample.name == "sglang:spec_accepted_tokens_per_position_total":
                positions[int(sample.labels["position"])] += int(sample.value)
    drafts, drafted, accepted = (
        int(totals[f"sglang:spec_{name}_total"]) for name in ("drafts", "drafted_tokens", "accepted_tokens")
    )
    if not drafts or not positions:
        raise ValueError(
            "no drafted blocks in these metrics: does the server run DFLASH with --enable-metrics?"
        )
    return Counts(drafts, drafted, accepted, [positions[k] for k in sorted(positions)])


def plot(counts: Counts, path: Path) -> None:
    from matplotlib.figure import Figure

    shares = [at / counts.drafts for at in counts.accepted_at]
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    bars = axes.bar(range(1, len(shares) + 1), shares)
    axes.bar_label(bars, [f"{share:.2f}" for share in shares], fontsize=8)
    axes.set(xlabel="position in the block", ylabel="share of blocks accepted to here", ylim=(0, 1))
    axes.set_xticks(range(1, len(shares) + 1))
    axes.set_title(f"accept length {counts.accept_length:.2f} over {counts.drafts:,} blocks", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


@verdict_or_2
def main() -> None:
    parser = documented(__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="the running server")
    parser.add_argument("--output", type=Path, default=Path("acceptance.png"))
    args = parser.parse_args()
    try:
        with urllib.request.urlopen(args.url.rstrip("/") + "/metrics", timeout=30) as response:
            counts = read_counts(response.read().decode())
    except (OSError, ValueError) as error:
        raise BadInput(f"{args.url}: {error}") from error
    plot(counts, args.output)
    rate = counts.accepted / max(1, counts.drafted)  # none, if no draft was worth verifying
    print(f"accept length {counts.accept_length:.3f}, rate {rate:.3f}, {counts.drafts} drafts: {args.output}")


if __name__ == "__main__":
    sys.exit(main())
