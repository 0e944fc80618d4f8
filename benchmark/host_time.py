"""Time the host's part of a decode cycle, without a GPU.

    python benchmark/host_time.py           # 5 servers; 10 minutes on two free cores
    python benchmark/host_time.py --backend fa3 --server ours built-in --requests 1

Servers run in the rehearsal of the CUDA path (docs/dev/testing.md): SGLang's attention metadata, plans,
graph runners and scheduler, with stand-ins for kernels. The time of the stand-ins is taken out, so what is
left is what the host does in a cycle while a GPU waits for it or not. A backend's servers run at once and
take turns, round by round, so whatever else the machine does hits all of them. Only CPU time of the
scheduler's thread is counted. Absolute times are this machine's, and launches cost nothing here: compare
servers of one call. Prints a table: means without the fastest and the slowest tenth, and of the ratio to the
built-in the median over the rounds, with the least and the largest.
"""

import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path

from gpu.servers import SIMULATION
from serving import DRAFT, ROOT, TARGET, Server, describe_cpu, dflash_arguments, documented, serve

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
HEAD = ("backend", "requests", "server", "ms", "/ built-in", "of a round", "cycles")


def main() -> None:
    parser = documented(__doc__)
    parser.add_argument("--backend", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--server", nargs="+", choices=SERVERS, default=SERVERS)
    parser.add_argument("--requests", nargs="+", type=int, choices=REQUESTS, default=REQUESTS)
    args = parser.parse_args()
    versions = ", ".join(f"{name} {version(name)}" for name in ("sglang", "sglang-dflash", "torch"))
    print(f"{date.today()}; {describe_cpu()}; {versions}\n\n| {' | '.join(HEAD)} |")
    print("|---|---:|---|---:|---:|---:|---:|", flush=True)
    for backend in args.backend:
        kinds = [kind for kind in args.server if (backend, kind) not in NOT_REHEARSED]
        for (kind, load), rounds, built_in in measure(backend, kinds, args.requests):
            cells = (backend, str(load), kind, *summary(rounds, built_in))
            print(f"| {' | '.join(cells)} |", flush=True)


def measure(backend: str, kinds: Sequence[str], loads: Sequence[int]) -> list[tuple]:
    """Measure servers in turn: ((server, load), its rounds, the built-in's) per server and load."""
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
    return [((kind, load), rounds, found.get((BUILT_IN, load))) for (kind, load), rounds in found.items()]


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


def summary(
    rounds: Sequence[Sequence[float]], built_in: Sequence[Sequence[float]] | None
) -> tuple[str, str, str, str]:
    """Return the last four cells of a row, of rounds of milliseconds per cycle."""
    every = [cycle for cycles in rounds for cycle in cycles]
    ratio = spread = "–"
    if built_in is not None:
        pairs = zip(rounds, built_in, strict=True)
        ratios = [middle_mean(mine) / middle_mean(other) for mine, other in pairs]
        ratio, spread = f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}"
    return f"{middle_mean(every):.2f}", ratio, spread, str(len(every))


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


if __name__ == "__main__":
    main()
