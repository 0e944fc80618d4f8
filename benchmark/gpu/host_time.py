"""Time the host's part of a decode cycle, without a GPU.

    python benchmark/gpu/host_time.py           # 12 servers; 20 minutes on two free cores
    python benchmark/gpu/host_time.py --backend fa3 --server ours built-in --requests 1

Servers run in the rehearsal of the CUDA path (docs/rehearsal.md): SGLang's attention metadata, plans, graph
runners and scheduler, with stand-ins for kernels. The time of the stand-ins is taken out, so what is left is
what the host does in a cycle while a GPU waits for it or not. Absolute times are this machine's, and launches
cost nothing here: compare servers of one call. Writes benchmark/results/host-time.json and .md.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, benchmark/ is not on the path

from gpu.servers import SIMULATION  # noqa: E402
from serving import DRAFT, ROOT, TARGET, dflash_arguments, serve  # noqa: E402

BACKENDS = ("flashinfer", "fa3")
OURS, BUILT_IN, PLAIN = "ours", "built-in", "no speculation"
SERVERS = (OURS, BUILT_IN, PLAIN)
REQUESTS = (1, 16)
NEW_TOKENS, WARM_UP_TOKENS = 900, 40
ROUNDS = 2
START_TIMEOUT_S = 900
ARGUMENTS = (
    *("--model-path", str(TARGET), "--dtype", "float32", "--random-seed", "7", "--max-total-tokens", "16384"),
    *("--context-length", "1024", "--max-running-requests", "16", "--sampling-backend", "pytorch"),
    *("--sleep-on-idle", "--skip-server-warmup"),
)
RESULTS = ROOT / "benchmark" / "results"


def main() -> None:
    args = _parse_arguments()
    rows = []
    for backend in args.backend:
        for server in args.server:
            for requests in args.requests:
                figures = measure(backend, server, requests)
                rows.append({"backend": backend, "server": server, "requests": requests, **figures})
                print(f"{backend}, {server}, {requests} requests: {figures['ms']:.2f} ms", flush=True)
    heading = {
        "date": str(date.today()),
        "command": " ".join(["python", "benchmark/gpu/host_time.py", *sys.argv[1:]]),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPU cores",
        "versions": {name: version(name) for name in ("sglang", "sglang-dflash", "torch")},
    }
    file = RESULTS / f"{args.name}.json"
    file.write_text(json.dumps({**heading, "rows": rows}, indent=1) + "\n")
    file.with_suffix(".md").write_text(page(heading, rows))
    print(f"written: {args.name}.json, {args.name}.md")


def measure(backend: str, kind: str, requests: int) -> dict[str, float]:
    """Return the host's milliseconds per cycle: {"cycles", "ms", "ms_p10", "ms_p90"}."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in ("report", "fault"):
            (folder / file).touch()
        arguments = ARGUMENTS if kind == PLAIN else (*ARGUMENTS, *dflash_arguments(DRAFT))
        with serve(*arguments, env=environment(backend, kind, folder), timeout=START_TIMEOUT_S) as server:
            prompts = [f"def f{number}(x):\n    return " for number in range(requests)]
            for tokens in (WARM_UP_TOKENS, *[NEW_TOKENS] * ROUNDS):
                sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
                asked = [{"text": prompt, "sampling_params": sampling} for prompt in prompts]
                server.generate_many(asked, requests)
            time.sleep(2)  # the probe writes every half second
        return json.loads((folder / "times.json").read_text())[str(requests)]


def environment(backend: str, kind: str, folder: Path) -> dict[str, str]:
    """Return the environment of a rehearsed server with the probe."""
    scene = {"backend": backend, "buckets": [1, 16], "is_built_in": kind == BUILT_IN}
    paths = ROOT / "benchmark" / "gpu" / "host_probe", ROOT / "test" / "srt"
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
        "CPU milliseconds of the scheduler's thread per cycle, in the rehearsal of the CUDA path: medians,",
        "and the 10th and 90th percentiles. Kernels, graphs and their launches cost nothing here. Compare",
        "servers with each other; absolute times are this machine's.",
        "",
        "| backend | requests | server | ms | 10 % | 90 % | / built-in | cycles |",
        "|---|---:|---|---:|---:|---:|---:|---:|",
    ]
    built_in = {(row["backend"], row["requests"]): row["ms"] for row in rows if row["server"] == BUILT_IN}
    for row in sorted(rows, key=lambda row: (row["backend"], row["requests"])):
        other = built_in.get((row["backend"], row["requests"]))
        ratio = f"{row['ms'] / other:.2f}" if other else "–"
        cells = [row["backend"], str(row["requests"]), row["server"]]
        cells += [f"{row[name]:.2f}" for name in ("ms", "ms_p10", "ms_p90")]
        lines.append(f"| {' | '.join([*cells, ratio, str(row['cycles'])])} |")
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
