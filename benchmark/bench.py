"""Throughput and acceptance with and without DFLASH, same settings, same prompts, one run.

    python benchmark/bench.py                       # the bundled pairs, one by one; what `make bench` runs
    python benchmark/bench.py --target T --draft D --concurrency 1 8 --max-new-tokens 256
    python benchmark/bench.py --draft D1 D2         # drafts side by side, such as a DFlash and a P-EAGLE one
    python benchmark/bench.py --peer-env SGLANG_PLUGINS=none    # also SGLang's built-in DFLASH (needs a GPU)

Writes a table, the raw figures and a plot to benchmark/results/.
"""

import argparse
import itertools
import json
import os
import platform
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path

import report
from acceptance import Acceptance, sum_histograms
from serving import (
    DRAFT,
    HYBRID_DRAFT,
    HYBRID_TARGET,
    ROOT,
    TARGET,
    Server,
    dflash_arguments,
    importing,
    serve,
    text_prompts,
)

RESULTS = ROOT / "benchmark" / "results"
BUNDLED_PAIRS = (TARGET, DRAFT), (HYBRID_TARGET, HYBRID_DRAFT)


@dataclass
class Load:
    """One server at one concurrency.

    `seconds` is the wall time of the whole request set. `accepted[k]` counts the blocks that kept exactly k
    drafted tokens. `phase_ms` are milliseconds per cycle by phase; "rest" is everything outside our worker
    (scheduler, detokenizer, HTTP).
    """

    server: str
    concurrency: int
    requests: int
    output_tokens: int
    seconds: float
    cycles: int = 0
    accepted: list[int] = field(default_factory=list)
    phase_ms: dict[str, float] = field(default_factory=dict)

    @classmethod
    def from_answers(cls, server: str, concurrency: int, answers: list[dict], seconds: float) -> "Load":
        """Build from the answers to a request set and its wall time."""
        infos = [answer["meta_info"] for answer in answers]
        return cls(
            server=server,
            concurrency=concurrency,
            requests=len(answers),
            output_tokens=sum(info["completion_tokens"] for info in infos),
            seconds=seconds,
            accepted=sum_histograms(infos),
        )

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def acceptance(self) -> Acceptance | None:
        """None without speculation."""
        return Acceptance(len(self.accepted) - 1, self.accepted) if sum(self.accepted) else None

    @property
    def accept_length(self) -> float | None:
        """Tokens per verified block, bonus token included."""
        return self.acceptance and self.acceptance.accept_length


def main() -> None:
    args = _parse_arguments()
    if args.draft:
        run(args, args.target or str(TARGET.relative_to(ROOT)), args.draft, args.name)
        return
    for target, draft in BUNDLED_PAIRS:
        run(args, str(target.relative_to(ROOT)), [str(draft.relative_to(ROOT))], f"{args.name}-{target.name}")


def phase_times(path: Path) -> dict[str, str]:
    """Return the environment of a server that writes its phase times to a file."""
    folder = importing(ROOT / "benchmark")
    return {**folder, "SGLANG_DFLASH_OBSERVERS": "phase_clock:PhaseClock", "PHASE_TIMES": str(path)}


def run(args: argparse.Namespace, target: str, drafts: list[str], file_name: str) -> None:
    """Measure all servers of one target, one after the other, and write the results."""
    prompts = [p["text"] for p in text_prompts()]
    common = ["--model-path", target, "--dtype", args.dtype, *args.server_args.split()]
    plans = [("no speculation", common, {}, {})]
    with tempfile.TemporaryDirectory() as scratch:
        phase_file = Path(scratch) / "phases.json"
        for draft in drafts:
            name = "DFLASH" if len(drafts) == 1 else Path(draft).name
            plans.append((name, [*common, *dflash_arguments(draft)], phase_times(phase_file), {}))
        if args.peer_env or args.peer_python:
            peer_env = dict(pair.split("=", 1) for pair in args.peer_env)
            options = {"python": args.peer_python or sys.executable}
            dflash = [*common, *dflash_arguments(drafts[0])]
            plans.append(("built-in DFLASH", [*dflash, *args.peer_args.split()], peer_env, options))
        loads = []
        for name, arguments, env, options in plans:
            threads = {"OMP_NUM_THREADS": str(args.threads)} if args.threads else {}
            phase_file.unlink(missing_ok=True)
            with serve(*arguments, env={**threads, **env}, **options) as server:
                measure(server, prompts[:4], 4, args.max_new_tokens, name)  # warm up
                for concurrency in args.concurrency:
                    load = measure_with_phases(server, prompts, concurrency, args, name, phase_file)
                    loads.append(load)
                    print(report.line(load, loads), flush=True)
    # The interpreter's path is private to the machine.
    shown = ["PEER_PYTHON" if word == args.peer_python else word for word in args.raw]
    heading = {
        "date": str(date.today()),
        "target": Path(target).name,
        "command": "make bench" if args.is_default else "python benchmark/bench.py " + " ".join(shown),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPU cores",
        "versions": {name: version(name) for name in ("sglang", "sglang-dflash", "torch")},
        "threads": args.threads or "default",
        "dtype": args.dtype,
        "max_new_tokens": args.max_new_tokens,
    }
    RESULTS.mkdir(exist_ok=True)
    stem = RESULTS / file_name
    stem.with_suffix(".json").write_text(
        json.dumps({**heading, "loads": [asdict(load) for load in loads]}, indent=1)
    )
    stem.with_suffix(".md").write_text(report.markdown(heading, loads, stem.name))
    report.plot(loads, stem.with_suffix(".png"))
    print(f"\n{report.table(loads)}\nwritten: {stem.relative_to(ROOT)}.md, .json, .png")


def measure_with_phases(server: Server, prompts, concurrency: int, args, name: str, phase_file: Path) -> Load:
    before = _read_phases(phase_file)
    load = measure(server, prompts, concurrency, args.max_new_tokens, name, args.requests_per_slot)
    after = _read_phases(phase_file)
    if after["cycles"] > before["cycles"]:
        load.cycles = after["cycles"] - before["cycles"]
        spent = {k: after["seconds"][k] - before["seconds"].get(k, 0.0) for k in after["seconds"]}
        load.phase_ms = {k: 1000 * seconds / load.cycles for k, seconds in spent.items()}
        load.phase_ms["rest"] = 1000 * load.seconds / load.cycles - sum(load.phase_ms.values())
    return load


def measure(
    server: Server,
    prompts: list[str],
    concurrency: int,
    max_new_tokens: int,
    name: str,
    requests_per_slot: int = 6,
) -> Load:
    """Send a fixed set of greedy requests, `concurrency` at a time, and time the set."""
    server.flush_cache()
    chosen = list(itertools.islice(itertools.cycle(prompts), max(24, concurrency * requests_per_slot)))
    params = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    requests = [{"text": text, "sampling_params": params} for text in chosen]
    start = time.perf_counter()
    answers = server.generate_many(requests, concurrency)
    seconds = time.perf_counter() - start
    return Load.from_answers(name, concurrency, answers, seconds)


def _read_phases(path: Path) -> dict:
    return json.loads(path.read_text()) if path.exists() else {"cycles": 0, "seconds": {}}


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", help="default: the bundled Qwen3 target")
    parser.add_argument(
        "--draft", nargs="+", help="default, without --target: both bundled pairs, one after the other"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--requests-per-slot", type=int, default=6)
    parser.add_argument("--threads", type=int, help="PyTorch threads of each server; default: PyTorch's own")
    parser.add_argument("--server-args", default="", help="more flags, for every server")
    parser.add_argument(
        "--peer-env", nargs="+", default=[], help="NAME=VALUE that make a server run the built-in DFLASH"
    )
    parser.add_argument("--peer-python", help="its interpreter, if another one")
    parser.add_argument("--peer-args", default="", help="its additional flags")
    parser.add_argument("--name", default="bench", help="of the files in benchmark/results/")
    args = parser.parse_args()
    if args.target and not args.draft:
        parser.error("--target needs its --draft")
    args.raw = sys.argv[1:]
    args.is_default = not args.raw
    return args


if __name__ == "__main__":
    main()
