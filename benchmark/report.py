"""Output of the benchmark: a line per measurement, a Markdown page, a plot."""

from pathlib import Path

PHASES = ("prepare", "draft", "verify", "accept", "commit", "rest")


def speedup(load, loads) -> float | None:
    """Return output tokens/s relative to no speculation, at the same concurrency."""
    for other in loads:
        if other.server == "no speculation" and other.concurrency == load.concurrency:
            return load.tokens_per_second / other.tokens_per_second
    return None


def line(load, loads) -> str:
    accept = f"accept length {load.accept_length:.2f}" if load.acceptance else ""
    ratio = speedup(load, loads)
    speed = f"{load.tokens_per_second:8.1f} tokens/s"
    return f"{load.server:>16}  x{load.concurrency:<3} {speed}  {ratio:5.2f}x  {accept}"


def table(loads) -> str:
    """Format the speeds: one row per concurrency, one column group per server."""
    servers = list(dict.fromkeys(load.server for load in loads))
    by_key = {(load.server, load.concurrency): load for load in loads}
    rows = ["| concurrency | " + " | ".join(f"{s}, tokens/s" for s in servers) + " | "]
    rows[0] += " | ".join(f"{s}: speedup" for s in servers[1:]) + " | "
    rows[0] += " | ".join(f"{s}: accept length" for s in servers[1:]) + " |"
    rows.append("|" + "---:|" * (3 * len(servers) - 1))
    for concurrency in dict.fromkeys(load.concurrency for load in loads):
        row = [by_key[s, concurrency] for s in servers]
        cells = [str(concurrency)] + [f"{load.tokens_per_second:.1f}" for load in row]
        cells += [f"{speedup(load, loads):.2f}x" for load in row[1:]]
        cells += [f"{load.accept_length:.2f}" for load in row[1:]]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"


def markdown(heading: dict, loads, stem: str) -> str:
    drafted = [load for load in loads if load.acceptance]
    deepest = max(len(load.acceptance.by_position) for load in drafted)
    parts = [
        f"# {heading['command']}: {heading['target']}",
        f"{heading['date']}; {heading['machine']}; PyTorch threads per server: {heading['threads']}; "
        f"{heading['dtype']}; greedy, {heading['max_new_tokens']} new tokens a request; "
        + ", ".join(f"{name} {number}" for name, number in heading["versions"].items())
        + ". Servers run one after the other with the same settings; "
        "speedup is relative to no speculation in this run.",
        table(loads),
        f"![throughput and acceptance]({stem}.png)",
        "## Milliseconds per cycle",
        "`rest` is the time outside the worker: scheduler, prefill, detokenizer, HTTP.",
        "| server | concurrency | " + " | ".join(PHASES) + " |\n|---|" + "---:|" * (len(PHASES) + 1),
    ]
    timed = [load for load in loads if load.phase_ms]
    parts[-1] += "".join(
        f"\n| {load.server} | {load.concurrency} | "
        + " | ".join(f"{load.phase_ms[p]:.2f}" for p in PHASES)
        + " |"
        for load in timed
    )
    parts += [
        "## Acceptance per position",
        "Share of blocks in which the k-th drafted token was kept.",
        "| server | concurrency | "
        + " | ".join(str(k) for k in range(1, deepest + 1))
        + " |\n|---|"
        + "---:|" * (deepest + 1),
    ]
    parts[-1] += "".join(
        f"\n| {load.server} | {load.concurrency} | "
        + " | ".join(f"{a:.2f}" for a in load.acceptance.by_position)
        + " |"
        for load in drafted
    )
    return "\n\n".join(parts) + "\n"


def plot(loads, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (speed, acceptance) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    servers = list(dict.fromkeys(load.server for load in loads))
    for server in servers:
        mine = [load for load in loads if load.server == server]
        speed.plot(
            [load.concurrency for load in mine],
            [load.tokens_per_second for load in mine],
            marker="o",
            label=server,
        )
    speed.set(xlabel="concurrent requests", ylabel="output tokens/s", ylim=(0, None))
    speed.set_xscale("log", base=2)
    ticks = sorted({load.concurrency for load in loads})
    speed.set_xticks(ticks, [str(t) for t in ticks])
    speed.legend(frameon=False)
    for load in loads:
        if load.phase_ms:
            shares = load.acceptance.by_position
            label = f"{load.server}, {load.concurrency} concurrent, accept length {load.accept_length:.2f}"
            acceptance.plot(range(1, len(shares) + 1), shares, marker="o", label=label)
    acceptance.set(xlabel="position in the block", ylabel="share of blocks kept to here", ylim=(0, 1))
    acceptance.legend(frameon=False, fontsize=8)
    for axes in (speed, acceptance):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
