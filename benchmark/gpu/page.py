"""Results as a Markdown page."""

from collections.abc import Sequence

from gpu.checks import NEAR_TIE
from gpu.servers import ACCEPT_LENGTH, ADAPTIVE_DFLASH, BUILT_IN_DFLASH, DFLASH, NO_SPECULATION
from gpu.shapes import DENSE_PAIRS
from roofline import BY_DEVICE, cycle_seconds

# Requirements by backend: our tokens/s over the built-in's at one request and at more, and the longest cycle
# of Qwen3-8B at one request.
LEAST_RATIO_ALONE = {"fa3": 1.0, "flashinfer": 1.2}
LEAST_RATIO = 1.0
MOST_MS_ALONE = {"fa3": 8.7, "flashinfer": 8.8}
# The GPU's wait for the host in a cycle.
MOST_HOST_GAP_US = 100
# Least share of the speed without speculation, if no drafted token is ever accepted.
LEAST_ADAPTIVE = 0.97
SHOWN_KERNELS = 15  # on the page; the JSON has more


def markdown(data: dict) -> str:
    """Write the page from `state.Results.data`."""
    records = data["parts"]
    results = {name: record["result"] for name, record in records.items() if "result" in record}
    versions = ", ".join(f"{name} {number}" for name, number in data["versions"].items())
    dates = sorted({record["date"] for record in records.values()})
    sources = ", ".join(sorted({record["source"] for record in records.values() if record["source"]}))
    parts = [
        "# DFLASH on a GPU",
        f"{', '.join(dates) or 'no results yet'}; {data['machine']}; {versions}; "
        f"plugin source {sources or '–'}.",
        *_problems(data),
        *_speed(results, data["machine"]),
        *_adaptive(results),
        *_starts(results),
        *_host_phases(results),
        *_profiles(results),
        *_lossless(results),
        *_tests(results),
        *_commands(data),
    ]
    return "\n\n".join(parts) + "\n"


def _problems(data: dict) -> list[str]:
    lines = []
    for name, record in data["parts"].items():
        # The whole of a message is in the JSON.
        for problem in [record["error"]] if "error" in record else record["result"].get("problems", []):
            lines.append(f"- `{name}`: {_one_line(problem)}")
    missing = [name for name in data.get("planned", []) if name not in data["parts"]]
    if missing:
        lines.append("- no result yet: " + ", ".join(f"`{name}`" for name in missing))
    return ["## Failed or missing", "\n".join(lines)] if lines else []


def _speed(results: dict, machine: str) -> list[str]:
    """Write a table per backend and shape; a result's name is speed/BACKEND/SHAPE/VARIANT/LOAD."""
    tables: dict[tuple[str, str], dict[tuple[int, int], dict[str, dict]]] = {}
    for name, result in results.items():
        kind, *names = name.split("/")
        if kind == "speed" and names[-1].startswith("load-"):
            backend, shape, variant, _ = names
            at = result["requests"], result["context"]
            tables.setdefault((backend, shape), {}).setdefault(at, {})[variant] = result
    gpu = next((gpu for device, gpu in BY_DEVICE.items() if machine.startswith(device)), None)
    parts = []
    for (backend, shape), loads in tables.items():
        pair = next((pair for pair in DENSE_PAIRS if pair.name == shape), None)
        variants = sorted({variant for found in loads.values() for variant in found}, key=_order)
        bound = gpu is not None and pair is not None
        about_bound = (
            f" Bound: the least a cycle can take on an {gpu.name} (benchmark/ROOFLINE.md)." if bound else ""
        )
        wanted = f"{LEAST_RATIO_ALONE.get(backend, LEAST_RATIO)}x at 1 request, {LEAST_RATIO}x elsewhere"
        head = ["requests", "context"]
        head += [f"{variant}: {unit}" for variant in variants for unit in ("tokens/s", "ms", "prefill ms")]
        head += ["ours / built-in", "wanted", "ours / none"] + (["bound: ms"] if bound else [])
        rows = []
        for (requests, context), found in sorted(loads.items(), key=lambda item: item[0][::-1]):
            row = [str(requests), str(context)]
            for variant in variants:
                row += _load_cells(found.get(variant))
            ratio = _ratio(found.get(DFLASH), found.get(BUILT_IN_DFLASH))
            row += [_times_or_dash(ratio), _verdict(backend, shape, requests, context, found, ratio)]
            row += [_times_or_dash(_ratio(found.get(DFLASH), found.get(NO_SPECULATION)))]
            if bound:
                row.append(f"{1e3 * cycle_seconds(pair, gpu, requests, context):.2f}")
            rows.append(row)
        parts += [
            f"## Speed: {shape}, {backend}",
            "Decoding only: the difference between long and short answers to the same greedy requests, "
            "per cycle (ms) and per token. Dummy weights; with drafts every block is forced to an accept "
            f"length of {ACCEPT_LENGTH}, except for adaptive width. Prefill: per prompt, all at once. "
            f"Wanted, ours / built-in: {wanted}.{about_bound}",
            _table(head, rows),
        ]
    return parts


def _order(variant: str) -> int:
    known = (NO_SPECULATION, BUILT_IN_DFLASH, DFLASH)
    return known.index(variant) if variant in known else len(known)


def _load_cells(load: dict | None) -> list[str]:
    if load is None:
        return ["–"] * 3
    return [f"{load['tokens_per_second']:.0f}", f"{load['cycle_ms']:.2f}", f"{load['prefill_ms']:.1f}"]


def _verdict(
    backend: str, shape: str, requests: int, context: int, found: dict[str, dict], ratio: float | None
) -> str:
    verdicts = []
    if ratio is not None:
        least = LEAST_RATIO_ALONE.get(backend, LEAST_RATIO) if requests == 1 else LEAST_RATIO
        verdicts.append("reached" if ratio >= least else f"MISSED by {1 - ratio / least:.1%}")
    most = MOST_MS_ALONE.get(backend)
    if most and DFLASH in found and (shape, requests, context) == ("qwen3-8b", 1, 1024):
        ms = found[DFLASH]["cycle_ms"]
        verdicts.append(f"at most {most} ms: {'reached' if ms <= most else 'MISSED'}")
    return "; ".join(verdicts) or "–"


def _times_or_dash(ratio: float | None) -> str:
    return f"{ratio:.2f}x" if ratio else "–"


def _ratio(load: dict | None, other: dict | None) -> float | None:
    return load["tokens_per_second"] / other["tokens_per_second"] if load and other else None


def _adaptive(results: dict) -> list[str]:
    rows = []
    for name, adaptive in results.items():
        if not name.startswith("speed/") or f"/{ADAPTIVE_DFLASH}/load-" not in name:
            continue
        none = results.get(name.replace(f"/{ADAPTIVE_DFLASH}/", f"/{NO_SPECULATION}/"))
        ratio = _ratio(adaptive, none)
        verdict = "–" if ratio is None else "reached" if ratio >= LEAST_ADAPTIVE else "MISSED"
        speeds = [f"{load['tokens_per_second']:.1f}" if load else "–" for load in (none, adaptive)]
        widths = adaptive.get("widths", {"expected": {}, "cycles_per_width": {}})
        costs = ", ".join(f"{width}: {cycle['cycle_ms']:.2f}" for width, cycle in widths["expected"].items())
        of = "/".join(name.split("/")[1:3])
        compared = f"{ratio:.3f}x" if ratio else "–"
        rows.append([of, str(adaptive["requests"]), *speeds, compared, verdict, costs])
        rows[-1].append(_counts(widths["cycles_per_width"]))
    if not rows:
        return []
    head = [
        "shape",
        "requests",
        "no speculation",
        "adaptive",
        "adaptive / none",
        "wanted",
        "ms by width",
        "cycles",
    ]
    return [
        "## A draft that never helps: --speculative-adaptive",
        "Output tokens/s while decoding. The draft has dummy weights, so hardly a token is accepted. "
        f"Wanted: {LEAST_ADAPTIVE}x no speculation. ms: cycle time the policy expects at each width, "
        "from measurements so far. Cycles: number at each width since the start, earlier loads included.",
        _table(head, rows),
    ]


def _starts(results: dict) -> list[str]:
    starts = {name: result["phases"] for name, result in results.items() if name.endswith("/start")}
    columns = list(dict.fromkeys(phase for phases in starts.values() for phase in phases))
    rows = [
        [name.removeprefix("speed/").removesuffix("/start")]
        + [f"{phases[column]:.1f}" if column in phases else "–" for column in columns]
        for name, phases in starts.items()
    ]
    text = "Seconds from one line of the server's log to the next, beside running checks."
    return ["## Start-up", text, _table(["server", *columns], rows)] if rows else []


def _host_phases(results: dict) -> list[str]:
    found = {name: result["phase_ms"] for name, result in results.items() if "phase_ms" in result}
    columns = list(dict.fromkeys(phase for phases in found.values() for phase in phases))
    rows = [
        [name.removeprefix("speed/"), *(f"{phases.get(column, 0.0):.2f}" for column in columns)]
        + [f"{sum(phases.values()):.2f}"]
        for name, phases in found.items()
    ]
    text = "Milliseconds per cycle in our worker, on the host. On a GPU this is the time to launch."
    return ["## Host time", text, _table(["load", *columns, "sum"], rows)] if rows else []


def _profiles(results: dict) -> list[str]:
    parts = []
    for name, profile in results.items():
        if "host_gap_us" not in profile:
            continue
        _, backend, model, variant, _ = name.split("/")
        gap = profile["host_gap_us"]
        verdict = "reached" if gap < MOST_HOST_GAP_US else "MISSED"
        wanted = f" (wanted: under {MOST_HOST_GAP_US}: {verdict})" if variant == DFLASH else ""
        parts += [
            f"## One cycle: {model}, {backend}, {variant}, {profile['requests']} requests",
            f"Medians of {profile['cycles']} cycles, microseconds. The profiler slows the host down, so "
            "gaps are upper bounds.",
            f"- cycle {profile['wall_us']:.0f}: GPU busy {profile['busy_us']:.0f}, idle inside graphs "
            f"{profile['graph_idle_us']:.0f}, waiting for the host {gap:.0f}{wanted}\n"
            f"- {profile['kernels']:.0f} kernels and copies; time {_counts(profile['forward_us'])}\n"
            f"- host calls: launches {_counts(profile['launches'])}; waits {_counts(profile['waits'])}",
            _table(
                ["waiting between", "and", "times", "us"],
                [[f"`{g['before']}`", f"`{g['after']}`", *_times(g)] for g in profile["gaps"]],
            ),
            _table(
                ["forward", "kernel", "times", "us"],
                [
                    [f"`{k['forward']}`", f"`{k['name']}`", *_times(k)]
                    for k in profile["kernel_table"][:SHOWN_KERNELS]
                ],
            ),
        ]
    return parts


def _times(entry: dict) -> list[str]:
    return [f"{entry['times']:.1f}", f"{entry['us']:.1f}"]


def _counts(counts: dict[str, float]) -> str:
    return ", ".join(f"`{name}` {count:.1f}" for name, count in counts.items()) or "none"


def _lossless(results: dict) -> list[str]:
    rows = []
    for name, result in results.items():
        for draft in result["drafts"] if name.startswith(("lossless/", "rehearsed/")) else []:
            gaps = [difference["gap"] for difference in draft["differences"]]
            known = [gap for gap in gaps if gap is not None]
            wide = len(gaps) - sum(gap <= NEAR_TIE for gap in known)
            numbers = [draft["requests"], len(gaps), wide, f"{max(known):.4f}" if known else "–"]
            accept_length = f"{draft['accept_length']:.2f}"
            rows.append([name, draft["draft"], *map(str, numbers), accept_length])
    if not rows:
        return []
    return [
        "## Lossless: the bundled pairs, bf16",
        "Greedy answers against the target's own on the same machine. Batching the same bf16 sums otherwise "
        f"may tip a near-tie: the target's best two tokens at most {NEAR_TIE} apart in log probability. "
        "The JSON has every difference and its gap.",
        _table(["part", "draft", "answers", "differ", "no near-tie", "widest gap", "accept length"], rows),
    ]


def _tests(results: dict) -> list[str]:
    rows = [
        [name.removeprefix("tests/"), str(r["passed"]), str(r["skipped"]), str(len(r["problems"]))]
        for name, r in results.items()
        if name.startswith("tests/")
    ]
    return ["## Tests marked gpu", _table(["file", "passed", "skipped", "failed"], rows)] if rows else []


def _commands(data: dict) -> list[str]:
    commands = [command for record in data["parts"].values() for command in record["commands"]]
    lines = [*dict.fromkeys(data["invocations"]), *dict.fromkeys(commands)]
    text = "From the repository's root. Servers also got a free `--port`."
    return ["## Commands", text, "```\n" + "\n".join(lines) + "\n```"]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def _one_line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 400 else text[:200] + " … " + text[-200:]
