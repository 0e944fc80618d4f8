"""Speed and acceptance with and without copies of a request's own text.

    python benchmark/copy_ahead.py                                 # everything: some 40 minutes on two cores
    python benchmark/copy_ahead.py --sets edit plain --pairs qwen3 --rounds 2

Sets:

- `edit`: repeat a held-out file with a name changed;
- `quote`: summarize a file in the target's own words around two of its lines;
- `plain`: continue held-out prompts.

The bundled targets are too small for the first two, so their logits are forced (held/sitecustomize.py): the
same text in all servers, which the draft sees like any other. Greedy text of these targets loops, which
favours copies. So requests whose output does not loop are measured separately: at temperature 0.8, and greedy
prompts for which at most LOOPS of the output's tokens complete a 5-gram that the output already has.

Two servers per pair, both started first, take turns; a cell is the median of the rounds. Writes
benchmark/results/copy-ahead.md and .json.
"""

import argparse
import json
import os
import re
import shlex
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path

from serving import (
    DRAFT,
    HYBRID_DRAFT,
    HYBRID_TARGET,
    PEAGLE_DRAFT,
    ROOT,
    TARGET,
    WHOLE_BLOCKS,
    Server,
    describe_cpu,
    dflash_arguments,
    heldout_prompts,
    importing,
    serve,
    text_prompts,
)
from tokenizers import Tokenizer

RESULTS = ROOT / "benchmark" / "results"
HELD = ROOT / "benchmark" / "held"
PAIRS = {
    "qwen3": (TARGET, DRAFT, ()),
    "qwen3, P-EAGLE": (TARGET, PEAGLE_DRAFT, ()),
    "qwen3, drawn": (TARGET, DRAFT, ("--speculative-draft-sample-method", "probabilistic")),
    "hybrid": (HYBRID_TARGET, HYBRID_DRAFT, ()),
}
LOOPS = 0.2
OWN_WORDS = 20  # tokens before each quote
BARS = {"edit": 1.25, "plain": 0.98}
OFF, ON = "off", "on"


# -- prompts


def files(count: int) -> list[str]:
    """Return pieces of held-out files."""
    texts = [p for p in heldout_prompts() if not p.get("chat")]
    return [p["text"] for p in texts if 217 <= p["num_tokens"] <= 800][:count]


@dataclass(frozen=True)
class Request:
    """A prompt, and token ids forced by output position, -1 for the target's own."""

    text: str
    forced: tuple[int, ...] = ()


def edit(file: str, tokenizer: Tokenizer) -> Request:
    """Request the file once more, with its commonest name changed."""
    names = Counter(re.findall(r"\b[a-z_]{6,}\b", file))
    name = max(names, key=lambda n: (names[n], n))
    edited = re.sub(rf"\b{name}\b", f"new_{name}", file)
    prompt = f"{file}\n\n# The same, with {name} renamed to new_{name}:\n\n"
    return Request(prompt, tuple(tokenizer.encode(edited).ids))


def quote(file: str, tokenizer: Tokenizer) -> Request:
    """Request a summary in the target's own words, around two of the longest lines."""
    lines = sorted({line.strip() for line in file.splitlines()}, key=lambda line: (-len(line), line))[:2]
    forced = [[-1] * OWN_WORDS + tokenizer.encode(f'"{line}"').ids for line in lines]
    return Request(f"{file}\n\n# In short: ", (*forced[0], *forced[1]))


def make_requests(name: str, count: int, tokenizer: Tokenizer) -> list[Request]:
    if name == "edit":
        return [edit(file, tokenizer) for file in files(count)]
    if name == "quote":
        return [quote(file, tokenizer) for file in files(count)]
    every = [p["text"] for p in text_prompts()]
    return [Request(text) for text in every[:: max(1, len(every) // count)][:count]]


def loop_share(ids: Sequence[int], n: int = 5) -> float:
    """Return the share of a text's tokens that complete an n-gram which it already has."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


# -- measuring


@dataclass
class Run:
    """One round of one server."""

    speed: float  # tokens/s
    accept_length: float
    copied: float  # share of the proposed tokens
    kept_copies: float  # share of the output
    skipped: float  # share of cycles without a draft forward
    loops: float  # share of the output


@dataclass
class Cell:
    pair: str
    name: str
    temperature: float
    concurrency: int
    requests: int
    runs: dict[str, list[Run]] = field(default_factory=lambda: {OFF: [], ON: []})

    def median(self, server: str, value: str) -> float:
        return statistics.median(getattr(run, value) for run in self.runs[server])

    @property
    def ratio(self) -> float:
        """Median over pairs of consecutive rounds."""
        return statistics.median(on.speed / off.speed for on, off in zip(self.runs[ON], self.runs[OFF]))

    @property
    def spread(self) -> float:
        ratios = [on.speed / off.speed for on, off in zip(self.runs[ON], self.runs[OFF])]
        return (max(ratios) - min(ratios)) / 2


def count_copies(server: Server) -> Counter:
    [state, *_] = server.get("/server_info")["internal_states"]
    report = state.get("speculative_copy_ahead", {})
    counts = Counter({key: report.get(key, 0) for key in ("cycles", "cycles_without_draft")})
    for key in ("proposed_tokens", "accepted_tokens"):
        counts |= Counter({f"{key}, {source}": count for source, count in report.get(key, {}).items()})
    return counts


def send(
    server: Server, requests: Sequence[Request], temperature: float, new_tokens: int, concurrency: int
) -> tuple[Run, list[dict]]:
    server.flush_cache()
    params = {"temperature": temperature, "max_new_tokens": new_tokens, "ignore_eos": True}
    bodies = [
        {"text": r.text, "sampling_params": params | {"custom_params": {"forced": r.forced}}}
        for r in requests
    ]
    before = count_copies(server)
    start = time.perf_counter()
    answers = server.generate_many(bodies, concurrency)
    seconds = time.perf_counter() - start
    counts = count_copies(server)
    counts.subtract(before)
    tokens = sum(answer["meta_info"]["completion_tokens"] for answer in answers)
    cycles = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    proposed = counts["proposed_tokens, copy"] + counts["proposed_tokens, draft"]
    run = Run(
        speed=tokens / seconds,
        accept_length=(tokens - len(answers)) / cycles,
        copied=counts["proposed_tokens, copy"] / max(1, proposed),
        kept_copies=counts["accepted_tokens, copy"] / tokens,
        skipped=counts["cycles_without_draft"] / max(1, counts["cycles"]),
        loops=statistics.mean(loop_share(answer["output_ids"]) for answer in answers),
    )
    return run, answers


def run(pair: str, args) -> Iterator[Cell]:
    target, draft, flags = PAIRS[pair]
    common = ["--model-path", str(target), WHOLE_BLOCKS, *dflash_arguments(draft), *flags]
    common += ["--sleep-on-idle", "--random-seed", "1", "--max-total-tokens", "32768", "--dtype", args.dtype]
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    with ExitStack() as stack:
        env = {"OMP_NUM_THREADS": str(args.threads), **importing(HELD)}
        servers = {OFF: stack.enter_context(serve(*common, env=env))}
        servers[ON] = stack.enter_context(serve(*common, "--speculative-copy-ahead", env=env))
        for server in servers.values():
            send(server, make_requests("plain", 4, tokenizer), 0.0, 16, 4)  # warms up
        for name in args.sets:
            requests = make_requests(name, args.requests, tokenizer)
            parts = [(name, 0.0, requests)]
            if name != "edit":  # every token of an edit is forced
                parts.append((name, 0.8, requests))
            if name == "plain" and "drawn" not in pair:
                every = make_requests(name, 1000, tokenizer)
                _, answers = send(servers[OFF], every, 0.0, args.new_tokens, 16)
                quiet = [r for r, answer in zip(every, answers) if loop_share(answer["output_ids"]) <= LOOPS]
                parts.insert(1, (f"{name}, does not loop", 0.0, quiet))
            if "drawn" in pair:
                parts = parts[-1:]  # greedy requests draft as they do elsewhere
            for title, temperature, chosen in parts:
                if not chosen:
                    print(f"{pair}: {title}: no such request", flush=True)
                    continue
                for concurrency in args.concurrency:
                    cell = Cell(pair, title, temperature, concurrency, len(chosen))
                    for number in range(args.rounds):
                        for server in (OFF, ON) if number % 2 == 0 else (ON, OFF):
                            result, _ = send(
                                servers[server], chosen, temperature, args.new_tokens, concurrency
                            )
                            cell.runs[server].append(result)
                    print(row(cell), flush=True)
                    yield cell


# -- the page


def row(cell: Cell) -> str:
    off, on = (cell.median(server, "speed") for server in (OFF, ON))
    lengths = [cell.median(server, "accept_length") for server in (OFF, ON)]
    bar = BARS.get(cell.name.split(",")[0])
    ratio = f"{cell.ratio:.2f}" if bar is None or cell.ratio >= bar else f"**{cell.ratio:.2f}**"
    shares = " | ".join(
        f"{100 * cell.median(ON, key):.0f} %" for key in ("copied", "kept_copies", "skipped", "loops")
    )
    return (
        f"| {cell.pair} | {cell.name} | {cell.temperature:g} | {cell.concurrency} | {cell.requests} "
        f"| {off:.0f} | {on:.0f} | {ratio} ±{cell.spread:.2f} "
        f"| {lengths[0]:.2f} | {lengths[1]:.2f} | {shares} |"
    )


HEAD = (
    "| pair | set | T | at once | requests | tokens/s off | on | on / off | accept length off | on | copied "
    "| of the output | no draft | loops |"
)


def page(cells: list[Cell], args) -> str:
    table = "\n".join([HEAD, "|---|---|" + "---:|" * 12, *map(row, cells)])
    return f"""# Copy ahead

{date.today()}; {describe_cpu()}, {args.threads} PyTorch threads per server;
{args.dtype}; sglang {version("sglang")}, sglang-dflash {version("sglang-dflash")};
{args.new_tokens} new tokens a request, medians of {args.rounds} rounds. Last measured by
`python benchmark/copy_ahead.py {shlex.join(sys.argv[1:])}`; other pairs are from an earlier run.
The load average of 15 minutes was {os.getloadavg()[2]:.1f}. If it is above the number of cores, tokens/s are
only as good as their spread; accept lengths and shares do not depend on it.

The program's docstring describes the sets and "does not loop".

- **Copied**: share of the proposed tokens that were copies.
- **Of the output**: share of the output that is accepted copies.
- **No draft**: share of cycles without a draft forward.
- **Loops**: share of the output's tokens that complete a 5-gram which the output already has.

Bars for on / off: 1.25 on `edit`, 0.98 on `plain`. Bold: below.

{table}
"""


def read_earlier(path: Path) -> list[Cell]:
    """Return the cells of earlier runs; a pair's two servers are always of one run."""
    if not path.exists():
        return []
    cells = json.loads(path.read_text())
    return [
        Cell(**{**c, "runs": {server: [Run(**r) for r in runs] for server, runs in c["runs"].items()}})
        for c in cells
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, default=list(PAIRS))
    parser.add_argument(
        "--sets", nargs="+", choices=("edit", "quote", "plain"), default=["edit", "quote", "plain"]
    )
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16", help="float32 on a CPU that cannot multiply bfloat16")
    parser.add_argument("--name", default="copy-ahead", help="of the files in benchmark/results/")
    args = parser.parse_args()
    stem = RESULTS / args.name
    cells = [cell for cell in read_earlier(stem.with_suffix(".json")) if cell.pair not in args.pairs]
    for pair in args.pairs:
        for cell in run(pair, args):
            cells.append(cell)
            stem.with_suffix(".md").write_text(page(cells, args))
            stem.with_suffix(".json").write_text(json.dumps([asdict(cell) for cell in cells], indent=1))


if __name__ == "__main__":
    main()
