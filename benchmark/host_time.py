"""Time the host's part of a decode cycle, without a GPU.

    python benchmark/host_time.py           # 5 servers; 10 minutes on two free cores
    python benchmark/host_time.py --backend fa3 --server ours built-in --requests 1

Servers run in the rehearsal of the CUDA path (docs/dev/testing.md): SGLang's attention metadata, plans,
graph runners and scheduler, with stand-ins for kernels. The time of the stand-ins is taken out, so what is
left is what the host does in a cycle while a GPU waits for it or not. A backend's servers run at once and
take turns, round by round, so whatever else the machine does hits all of them. Only CPU time of the
scheduler's thread is counted. Absolute times are this machine's, and launches cost nothing here: compare
servers of one call. Writes benchmark/results/host-time.json and .md; a call replaces the rows of its
backends.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path

from gpu.servers import SIMULATION
from serving import DRAFT, ROOT, TARGET, Server, describe_cpu, dflash_arguments, serve

BACKENDS = ("flashinfer", "fa3")
OURS, BUILT_IN, PLAIN = "ours", "built-in", "no speculation"
SERVERS = (OURS, BUILT_IN, PLAIN)
REQUESTS = (1, 16)
NOT_REHEARSED = {("flashinfer", PLAIN)}  # the plans of its decode kernel have no stand-in
ROUNDS = 4
NEW_TOKENS = 120  # of a request in a round
START_TIMEOUT_S = 900
WRITTEN_AFTER_S = 1.2  # the probe writes every half second
ARGUMENTS = (
    *("--model-path", str(TARGET), "--dtype", "float32", "--random-seed", "7", "--max-total-tokens", "16384"),
    *("--context-length", "1024", "--max-running-requests", "16", "--sampling-backend", "pytorch"),
    *("--sleep-on-idle", "--skip-server-warmup"),
)
RESULTS = ROOT / "benchmark" / "results"


def main() -> None:
    args = _parse_arguments()
    file = RESULTS / f"{args.name}.json"
    known = json.loads(file.read_text())["rows"] if file.exists() else []
    rows = [row for row in known if row["backend"] not in args.backend]
    for backend in args.backend:
        kinds = [kind for kind in args.server if (backend, kind) not in NOT_REHEARSED]
        for row in measure(backend, kinds, args.requests):
            rows.append({"backend": backend, **row})
            print(f"{backend}, {row['server']}, {row['requests']} requests: {row['ms']:.2f} ms", flush=True)
    heading = {
        "date": str(date.today()),
        "command": " ".join(["python", "benchmark/host_time.py", *sys.argv[1:]]),
        "machine": describe_cpu(),
        "load": ", ".join(f"{load:.1f}" for load in os.getloadavg()),
        "versions": {name: version(name) for name in ("sglang", "sglang-dflash", "torch")},
    }
    file.write_text(json.dumps({**heading, "rows": rows}, indent=1) + "\n")
    file.with_suffix(".md").write_text(page(heading, rows))
    print(f"written: {args.name}.json, {args.name}.md")


def measure(backend: str, kinds: Sequence[str], loads: Sequence[int]) -> list[dict]:
    """Measure servers in turn: a row {"server", "requests", and `summary`} per server and load."""
    found: dict[tuple[str, int], list[list[float]]] = {(kind, load): [] for kind in kinds for load in loads}
    with contextlib.ExitStack() as stack:
        servers = {}
        for kind in kinds:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            for file in ("report", "fault"):
                (folder / file).touch()
            arguments = ARGUMENTS if kind == PLAIN else (*ARGUMENTS, *dflash_arguments(DRAFT))
            settings = environment(backend, kind, folder)
            server = stack.enter_context(serve(*arguments, env=settings, timeout=START_TIMEOUT_S))
            servers[kind] = server, folder / "times.json"
        for turn in range(ROUNDS + 1):
            for load in loads:
                for kind, (server, times) in servers.items():
                    cycles = decode(server, times, load)
                    if turn:  # the first one is the warm-up
                        found[kind, load].append(cycles)
    return [
        {"server": kind, "requests": load, **summary(rounds, found.get((BUILT_IN, load)))}
        for (kind, load), rounds in found.items()
    ]


def decode(server: Server, times: Path, requests: int) -> list[float]:
    """Have a server decode, and return the milliseconds of each cycle with all requests."""
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    prompts = [f"def f{number}(x):\n    return " for number in range(requests)]
    before = cycles_of(times, requests)
    server.generate_many([{"text": prompt, "sampling_params": sampling} for prompt in prompts], requests)
    time.sleep(WRITTEN_AFTER_S)
    return [1e3 * seconds for seconds in cycles_of(times, requests)[len(before) :]]


def cycles_of(times: Path, requests: int) -> list[float]:
    """Read the probe's file: seconds of each cycle so far with this number of requests."""
    return json.loads(times.read_text()).get(str(requests), []) if times.exists() else []


def middle_mean(cycles: Sequence[float]) -> float:
    """Average without the fastest and the slowest tenth."""
    tenth = len(cycles) // 10
    return statistics.fmean(sorted(cycles)[tenth : len(cycles) - tenth])


def summary(rounds: Sequence[Sequence[float]], built_in: Sequence[Sequence[float]] | None) -> dict:
    """Summarize rounds of milliseconds per cycle.

    Returns {"cycles", "ms"} and, if the built-in took the same rounds, "ratio": the median over the rounds of
    ours / built-in, "ratio_least" and "ratio_most".
    """
    every = [cycle for cycles in rounds for cycle in cycles]
    found: dict[str, float] = {"cycles": len(every), "ms": middle_mean(every)}
    if built_in is not None:
        pairs = zip(rounds, built_in, strict=True)
        ratios = [middle_mean(mine) / middle_mean(other) for mine, other in pairs]
        found |= {"ratio": statistics.median(ratios), "ratio_least": min(ratios), "ratio_most": max(ratios)}
    return found


def environment(backend: str, kind: str, folder: Path) -> dict[str, str]:
    """Return the environment of a rehearsed server with the probe."""
    scene = {"backend": backend, "buckets": [1, 16], "is_built_in": kind == BUILT_IN}
    paths = ROOT / "benchmark" / "host_probe", ROOT / "test" / "srt"
    settings = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")]),
        "SGLANG_PLUGINS": "dflash",
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        "TRITON_INTERPRET": "1",
        "SERVER_PATCH": "rehearsal",
        "REHEARSAL": json.dumps(scene),
        "REHEARSAL_REPORT": str(folder / "report"),
        "REHEARSAL_FAULT": str(folder / "fault"),
        "HOST_TIME": str(folder / "times.json"),
    }
    if kind == PLAIN:
        return settings | {"HOST_TIME_PLAIN": "1"}
    return settings | SIMULATION


def page(heading: dict, rows: list[dict]) -> str:
    """Write the results as Markdown."""
    versions = ", ".join(f"{name} {number}" for name, number in heading["versions"].items())
    lines = [
        "# Host time of a decode cycle",
        "",
        f"{heading['date']}; {heading['machine']}; {versions}.",
        "",
        "CPU milliseconds of the scheduler's thread per cycle, in the rehearsal of the CUDA path: means",
        "without the fastest and the slowest tenth. Triton and attention kernels, graphs, eager matrix",
        "products and the simulation of accept lengths are taken out, launches included. Other small",
        "tensor operations count what they take on a CPU. Servers of a backend took turns in rounds. The",
        "ratio is the median of the rounds, with the least and the largest. Absolute times are this",
        f"machine's, on which other work ran (load averages at the end: {heading['load']}). FlashInfer",
        "without speculation is not rehearsed.",
        "",
        "| backend | requests | server | ms | / built-in | of a round | cycles |",
        "|---|---:|---|---:|---:|---:|---:|",
    ]
    for row in sorted(rows, key=lambda row: (row["backend"], row["requests"])):
        ratio = ["–", "–"]
        if "ratio" in row:
            ratio = [f"{row['ratio']:.2f}", f"{row['ratio_least']:.2f} to {row['ratio_most']:.2f}"]
        cells = [row["backend"], str(row["requests"]), row["server"], f"{row['ms']:.2f}", *ratio]
        lines.append(f"| {' | '.join([*cells, str(row['cycles'])])} |")
    return "\n".join([*lines, "", f"Command: `{heading['command']}`", ""])


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--server", nargs="+", choices=SERVERS, default=SERVERS)
    parser.add_argument("--requests", nargs="+", type=int, choices=REQUESTS, default=REQUESTS)
    parser.add_argument("--name", default="host-time", help="of the files in benchmark/results/")
    return parser.parse_args()


if __name__ == "__main__":
    main()
