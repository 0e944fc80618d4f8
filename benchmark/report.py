"""Output of the benchmark: a line per run, a Markdown page, a plot.

A cell is a set of prompts at one temperature and concurrency. In each of its rounds every server answers the
same prompts, one server after the other. So a ratio is one of two runs of the same round, and a cell has the
median of its ratios and half their range.

    python benchmark/report.py benchmark/results/FILE.json    # prints the page again
"""

import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from acceptance import Acceptance

PHASES = ("prepare", "draft", "verify", "accept", "commit", "rest")
NO_SPECULATION, WHOLE_BLOCKS, ADAPTIVE = "no speculation", "whole blocks", "adaptive"
COPIES = ", copies"  # at the end of a server's name
OUR_LAYERS, USELESS = ", our layers", ", useless draft"


def cell(load) -> tuple[str, float, int]:
    """Return the cell that a run belongs to."""
    return load.prompts, load.temperature, load.concurrency


def in_cell(loads, where: tuple, server: str | None) -> list:
    """Return a server's runs in a cell, by round; none of no server."""
    return sorted((x for x in loads if cell(x) == where and x.server == server), key=lambda x: x.round)


def is_plain(server: str) -> bool:
    """Return whether a server runs SGLang without speculation."""
    return server.startswith(NO_SPECULATION)


def is_ours(server: str) -> bool:
    """Return whether a server runs our draft or our layers."""
    return any(kind in server for kind in (OUR_LAYERS, WHOLE_BLOCKS, ADAPTIVE))


def without_draft(loads) -> str | None:
    """Return the server that a draft has to beat: our layers, or SGLang's if ours were not measured."""
    return max(filter(is_plain, names(loads)), key=is_ours, default=None)


def fastest_peer(loads, where: tuple) -> str | None:
    """Return the server of a cell that has the largest median of tokens/s and is not ours."""
    peers = [name for name in names(loads) if not is_ours(name) and in_cell(loads, where, name)]
    return max(peers, key=lambda name: _speed(in_cell(loads, where, name)), default=None)


def ratios(loads, where: tuple, server: str, other: str | None) -> list[float]:
    """Return a server's output tokens/s relative to another's, by round.

    Rounds that one of the two did not serve are left out.
    """
    others = {run.round: run.tokens_per_second for run in in_cell(loads, where, other)}
    runs = in_cell(loads, where, server)
    return [run.tokens_per_second / others[run.round] for run in runs if run.round in others]


def half_range(values: Sequence[float]) -> float:
    return (max(values) - min(values)) / 2


def formatted(values: Sequence[float]) -> str:
    """Format ratios: their median, and from two rounds on half their range; a dash if there are none."""
    if not values:
        return "–"
    spread = f" ±{half_range(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.median(values):.2f}x{spread}"


def line(load, loads) -> str:
    """Format one run; the ratio is that of its round, to our layers without a draft."""
    same_round = [x for x in loads if x.round == load.round]
    found = _ratios_to_plain(same_round, cell(load), load.server)
    ratio = f"{found[0]:5.2f}x" if found else " " * 6
    accept = f"accept length {load.accept_length:.2f}" if load.acceptance else ""
    where = f"{load.prompts} T={load.temperature:g} x{load.concurrency}"
    return f"{where:>20}  {load.server:>20}  {load.tokens_per_second:8.1f} tokens/s  {ratio}  {accept}"


def names(loads) -> list[str]:
    """Return the servers, in the order of their first runs."""
    return list(dict.fromkeys(load.server for load in loads))


def cells(loads) -> list[tuple[str, float, int]]:
    return list(dict.fromkeys(map(cell, loads)))


def _by_cell(loads, value: Callable[[tuple, str], str]) -> str:
    """Format one row per cell, with the value of each server in it."""
    servers = names(loads)
    rows = ["| prompts | T | requests | " + " | ".join(servers) + " |"]
    rows.append("|---|" + "---:|" * (2 + len(servers)))
    for where in cells(loads):
        prompts, temperature, concurrency = where
        values = " | ".join(value(where, server) for server in servers)
        rows.append(f"| {prompts} | {temperature:g} | {concurrency} | {values} |")
    return "\n".join(rows) + "\n"


def table(loads) -> str:
    """Format the speeds: one row per cell, one column per server."""

    def value(where: tuple, server: str) -> str:
        runs, found = in_cell(loads, where, server), _ratios_to_plain(loads, where, server)
        speed = f"{_speed(runs):.0f}" if runs else "–"
        return f"{speed} ({formatted(found)})" if found else speed

    return _by_cell(loads, value)


def ratio_table(loads) -> str:
    """Format the gains of our servers with a draft: over none, and over the fastest peer of the cell."""
    rows = ["| prompts | T | requests | server | over no draft | over the fastest peer | peer |"]
    rows.append("|---|---:|---:|---|---:|---:|---|")
    drafting = [name for name in names(loads) if is_ours(name) and not is_plain(name)]
    for where, server in itertools.product(cells(loads), drafting):
        if not in_cell(loads, where, server):
            continue
        peer = fastest_peer(loads, where)
        gains = [formatted(ratios(loads, where, server, x)) for x in (without_draft(loads), peer)]
        prompts, temperature, concurrency = where
        values = " | ".join((server, *gains, peer or "–"))
        rows.append(f"| {prompts} | {temperature:g} | {concurrency} | {values} |")
    return "\n".join(rows) + "\n"


def latency_table(loads) -> str:
    """Format the mean seconds from when a request was due to its answer; empty if all were due at once."""
    loads = [load for load in loads if load.seconds_a_request is not None]

    def value(where: tuple, server: str) -> str:
        seconds = [load.seconds_a_request for load in in_cell(loads, where, server)]
        return f"{statistics.median(seconds):.2f}" if seconds else "–"

    return _by_cell(loads, value) if loads else ""


def merged(loads) -> Iterator[tuple[str, float, str, Acceptance, list]]:
    """Yield (prompts, T, server, outcomes of all its blocks, its runs) for each speculative server.

    What is accepted does not depend on the concurrency, so runs at all of them count.
    """
    drafted = [load for load in loads if load.acceptance]
    for prompts, temperature, server in dict.fromkeys((x.prompts, x.temperature, x.server) for x in drafted):
        runs = [x for x in drafted if (x.prompts, x.temperature, x.server) == (prompts, temperature, server)]
        yield prompts, temperature, server, added([x.accepted for x in runs]), runs


def added(histograms: Sequence[Sequence[int]]) -> Acceptance | None:
    """Return the outcomes of all blocks in histograms of accepted tokens, None if there are none."""
    kept = [sum(column) for column in itertools.zip_longest(*histograms, fillvalue=0)]
    return Acceptance(len(kept) - 1, kept) if sum(kept) else None


def verifies_whole_blocks(server: str) -> bool:
    return ADAPTIVE not in server


def acceptance_table(loads) -> str:
    """Format accept lengths, and the acceptance of each position if whole blocks are verified.

    The accept length stands once for all answers and once for those that the target ended.
    """
    found = list(merged(loads))
    deepest = max((len(acceptance.by_position) for *_, acceptance, _ in found), default=0)
    head = "| prompts | T | server | answers | accept length | ended answers | "
    rows = [head + " | ".join(str(k) for k in range(1, deepest + 1)) + " |"]
    rows.append("|---|---:|---|" + "---:|" * (3 + deepest))
    for prompts, temperature, server, acceptance, runs in found:
        shares = ["–"] * deepest
        if verifies_whole_blocks(server):  # no block kept more tokens than its histogram has
            kept = acceptance.by_position
            shares = [f"{share:.2f}" for share in kept + [0.0] * (deepest - len(kept))]
        answers = sum(x.requests for x in runs)
        ended = added([x.accepted_stopped for x in runs])
        lengths = [f"{found.accept_length:.2f}" if found else "–" for found in (acceptance, ended)]
        values = [f"{answers}", *lengths, *shares]
        rows.append(f"| {prompts} | {temperature:g} | {server} | " + " | ".join(values) + " |")
    return "\n".join(rows) + "\n"


def phase_table(loads) -> str:
    """Format milliseconds per greedy cycle; cycles of all prompts and rounds count equally."""
    timed = [load for load in loads if load.phase_ms and not load.temperature]
    rows = ["| server | requests | " + " | ".join(PHASES) + " |"]
    rows.append("|---|" + "---:|" * (len(PHASES) + 1))
    for server, concurrency in dict.fromkeys((x.server, x.concurrency) for x in timed):
        runs = [x for x in timed if (x.server, x.concurrency) == (server, concurrency)]
        cycles = sum(x.cycles for x in runs)
        means = [sum(x.cycles * x.phase_ms.get(phase, 0.0) for x in runs) / cycles for phase in PHASES]
        rows.append(f"| {server} | {concurrency} | " + " | ".join(f"{ms:.2f}" for ms in means) + " |")
    return "\n".join(rows) + "\n"


def step_table(loads) -> str:
    """Format milliseconds a step of one greedy request: a cycle, or a token without speculation.

    Prefill, scheduler and HTTP are included.
    """
    rows = ["| prompts | server | steps | ms a step | tokens a step |", "|---|---|---:|---:|---:|"]
    alone = [load for load in loads if load.concurrency == 1 and not load.temperature]
    for prompts, server in dict.fromkeys((x.prompts, x.server) for x in alone):
        runs = [x for x in alone if (x.prompts, x.server) == (prompts, server)]
        tokens = sum(x.output_tokens for x in runs)
        steps = sum(sum(x.accepted) or x.output_tokens for x in runs)
        values = f"{steps} | {1000 * sum(x.seconds for x in runs) / steps:.1f} | {tokens / steps:.2f}"
        rows.append(f"| {prompts} | {server} | {values} |")
    return "\n".join(rows) + "\n"


def answers_table(loads) -> str:
    """Format how long the answers of the first server are, and how many of them the target ended."""
    first = names(loads)[0]
    rows = ["| prompts | T | answers | tokens an answer | ended by the target |", "|---|" + "---:|" * 4]
    for prompts, temperature in dict.fromkeys((x.prompts, x.temperature) for x in loads):
        runs = [x for x in loads if (x.prompts, x.temperature, x.server) == (prompts, temperature, first)]
        if not runs:
            continue
        answers = sum(x.requests for x in runs)
        tokens, stopped = sum(x.output_tokens for x in runs) / answers, sum(x.stopped for x in runs) / answers
        rows.append(f"| {prompts} | {temperature:g} | {answers} | {tokens:.0f} | {100 * stopped:.0f} % |")
    return "\n".join(rows) + "\n"


def _speed(runs: Sequence) -> float:
    return statistics.median(run.tokens_per_second for run in runs)


def _ratios_to_plain(loads, where: tuple, server: str) -> list[float]:
    return [] if is_plain(server) else ratios(loads, where, server, without_draft(loads))


def markdown(heading: dict, loads, stem: str) -> str:
    limits = ", ".join(f"{count} for {name}" for name, count in heading["max_new_tokens"].items())
    ignored = f" Stop tokens are ignored in: {', '.join(heading['ignore_eos'])}." * bool(
        heading["ignore_eos"]
    )
    rate = heading.get("arrivals")  # pages of before 2026-11-28 lack it
    arriving = f" Requests are due as a Poisson process, {rate:g} a second." if rate else ""
    waiting = ["## Seconds from when a request is due to its answer", latency_table(loads)] if rate else []
    parts = [
        f"# {heading['command']}: {heading['target']}",
        f"{heading['date']}; {heading['machine']}; PyTorch threads per server: {heading['threads']}; "
        f"{heading['dtype']}; "
        + ", ".join(f"{name} {number}" for name, number in heading["versions"].items())
        + f". Draft: {', '.join(heading['drafts'])}. The load average before the run was "
        f"{heading['load_before']}; the run took {heading['minutes']} minutes.",
        *([heading["remark"]] if heading["remark"] else []),
        "## Tokens per second",
        f"All servers are up and are measured in turn, in {heading['rounds']} rounds a cell. In brackets: "
        "relative to our layers without a draft (if not measured: SGLang's) in the same round, median and "
        "half the range. An answer ends at the target's stop token or at its prompt's limit of new tokens, "
        f"between a quarter and all of: {limits}.{ignored}{arriving}",
        table(loads),
        *waiting,
        f"![tokens per second and acceptance]({stem}.png)",
        "## Gain over no draft and over the fastest peer",
        "No draft is as above. Peers are SGLang without our layers, its own DFLASH, and other engines. "
        "The useless draft has the draft's shapes and random weights.",
        ratio_table(loads),
        "## First round",
        "Before a row's first round, a server has answered four requests to warm up, and the rows above.",
        table([load for load in loads if not load.round]),
        "## Accept length and acceptance per position",
        "Tokens per verified block, bonus token included, over the runs at all concurrencies: of all "
        "answers, and of those that the target ended before the limit (cut ones often loop). Then the "
        "share of blocks in which the k-th drafted token was kept. Adaptive servers verify parts of blocks, "
        "and their accept length is of these.",
        acceptance_table(loads),
        "## Milliseconds a step",
        "One greedy request, with its prefill and HTTP. A step is a cycle, or a token without speculation.",
        step_table(loads),
        "## Milliseconds per cycle",
        "Greedy. `rest` is the time outside the worker: scheduler, prefill, detokenizer, HTTP.",
        phase_table(loads),
        "## Answers",
        f"Of the server `{names(loads)[0]}`. [The prompts](../prompts/README.md).",
        answers_table(loads),
    ]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def plot(loads, path: Path) -> None:
    """Draw greedy tokens/s of each set of prompts over the concurrency, and its acceptance per position."""
    from matplotlib.figure import Figure

    coldest = min(load.temperature for load in loads)
    loads = [load for load in loads if load.temperature == coldest]
    sets = list(dict.fromkeys(load.prompts for load in loads))
    figure = Figure(figsize=(3.6 * (len(sets) + 1), 3.8), layout="constrained")
    *panels, acceptance = figure.subplots(1, len(sets) + 1)
    colors = {server: f"C{number}" for number, server in enumerate(names(loads))}
    for prompts, axes in zip(sets, panels):
        for server in names([load for load in loads if load.prompts == prompts]):
            where = [c for c in cells(loads) if c[0] == prompts and in_cell(loads, c, server)]
            speeds = [_speed(in_cell(loads, c, server)) for c in where]
            axes.plot([c[2] for c in where], speeds, marker="o", label=server, color=colors[server])
        ticks = sorted({load.concurrency for load in loads})
        axes.set(xlabel="requests at once", ylabel="output tokens/s", ylim=(0, None), title=prompts)
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(t) for t in ticks])
        axes.legend(frameon=False, fontsize=8)
    for prompts, _, server, outcome, _ in merged(loads):
        if verifies_whole_blocks(server):
            shares = outcome.by_position
            label = f"{prompts}, {server}: {outcome.accept_length:.2f}"
            acceptance.plot(range(1, len(shares) + 1), shares, marker="o", label=label)
    acceptance.set(
        xlabel="position in the block",
        ylabel="share of blocks kept to here",
        ylim=(0, 1),
        title="accept length",
    )
    if acceptance.lines:
        acceptance.legend(frameon=False, fontsize=8)
    for axes in (*panels, acceptance):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def main() -> None:
    from bench import Load

    path = Path(sys.argv[1])
    raw = json.loads(path.read_text())
    print(markdown(raw, [Load(**load) for load in raw["loads"]], path.stem), end="")


if __name__ == "__main__":
    main()
