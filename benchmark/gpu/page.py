"""Results as a Markdown page."""

from collections.abc import Sequence

from bench import Load
from gpu.plans import ACCEPT_LENGTH, ADAPTIVE_DFLASH, BUILT_IN_DFLASH, DFLASH, NO_SPECULATION
from gpu.shapes import PAIRS
from gpu.work import NEAR_TIE, NEW_TOKENS, PROMPT_TOKENS, REPEATS
from roofline import BY_DEVICE, cycle_seconds

# Requirements: our output tokens/s over the built-in's, and the GPU's wait for the host in a cycle.
LEAST_RATIO_ALONE, LEAST_RATIO = 1.15, 1.0
MOST_HOST_GAP_US = 100
# Least share of the speed without speculation, if no drafted token is ever accepted.
LEAST_ADAPTIVE = 0.97


def markdown(data: dict) -> str:
    """Write the page from `state.Results.data`."""
    records = data["parts"]
    results = {name: record["result"] for name, record in records.items() if "result" in record}
    versions = ", ".join(f"{name} {number}" for name, number in data["versions"].items())
    dates = sorted({record["date"] for record in records.values()})
    options = ", ".join(f"{name} {value}" for name, value in data["options"].items())
    sources = ", ".join(sorted({record["source"] for record in records.values() if record["source"]}))
    parts = [
        "# DFLASH on a GPU",
        f"{', '.join(dates) or 'no results yet'}; {data['machine']}; {versions}; {options}; "
        f"plugin source {sources or '–'}.",
        *_problems(data),
        *_speed(results, data["machine"]),
        *_adaptive(results),
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
    parts = []
    gpu = next((gpu for device, gpu in BY_DEVICE.items() if machine.startswith(device)), None)
    for pair in PAIRS:
        loads = {}
        for variant in (NO_SPECULATION, BUILT_IN_DFLASH, DFLASH):
            for load in results.get(f"speed/{pair.name}/{variant}", {}).get("loads", []):
                loads[variant, load["concurrency"]] = Load(**load)
        if not loads:
            continue
        bound = f"; bound: the least a cycle can take on an {gpu.name} (benchmark/ROOFLINE.md)" if gpu else ""
        parts += [
            f"## Speed: {pair.name}",
            f"Output tokens/s. Dummy weights; every block is forced to an accept length of {ACCEPT_LENGTH}. "
            f"Greedy, {PROMPT_TOKENS} random prompt tokens, {NEW_TOKENS} new ones, {REPEATS} rounds. Wanted: "
            f"{LEAST_RATIO_ALONE}x the built-in at concurrency 1, {LEAST_RATIO}x elsewhere. ms: per cycle, "
            f"prefill included{bound}.",
            _table(
                ["concurrency", "no speculation", "built-in", "ours", "ours / built-in", "ours / none"]
                + ["wanted", "built-in: accept length", "ours", "built-in: ms", "ours: ms", "bound: ms"],
                [_speed_row(loads, c, pair, gpu) for c in sorted({c for _, c in loads})],
            ),
        ]
    return parts


def _speed_row(loads: dict, concurrency: int, pair, gpu) -> list[str]:
    none, built_in, ours = (loads.get((v, concurrency)) for v in (NO_SPECULATION, BUILT_IN_DFLASH, DFLASH))
    wanted = LEAST_RATIO_ALONE if concurrency == 1 else LEAST_RATIO
    ratio = _ratio(ours, built_in)
    context = PROMPT_TOKENS + NEW_TOKENS / 2
    return [
        str(concurrency),
        *(f"{load.tokens_per_second:.1f}" if load else "–" for load in (none, built_in, ours)),
        f"{ratio:.2f}x" if ratio else "–",
        f"{_ratio(ours, none):.2f}x" if ours and none else "–",
        "–" if ratio is None else "reached" if ratio >= wanted else f"MISSED by {1 - ratio / wanted:.1%}",
        *(f"{load.accept_length:.2f}" if load and load.accept_length else "–" for load in (built_in, ours)),
        *(f"{cycle_ms(load):.2f}" if load else "–" for load in (built_in, ours)),
        f"{1e3 * cycle_seconds(pair, gpu, concurrency, context):.2f}" if gpu else "–",
    ]


def _adaptive(results: dict) -> list[str]:
    parts = []
    for pair in PAIRS:
        adaptive = results.get(f"speed/{pair.name}/{ADAPTIVE_DFLASH}")
        none = results.get(f"speed/{pair.name}/{NO_SPECULATION}")
        if adaptive is None or none is None:
            continue
        rows, plain = [], {load["concurrency"]: Load(**load) for load in none["loads"]}
        for load, reported in zip(adaptive["loads"], adaptive["widths"], strict=True):
            ours, theirs = Load(**load), plain[load["concurrency"]]
            ratio = _ratio(ours, theirs)
            verdict = "reached" if ratio >= LEAST_ADAPTIVE else "MISSED"
            speeds = [f"{load.tokens_per_second:.1f}" for load in (theirs, ours)]
            expected = reported["expected"].items()
            costs = ", ".join(f"{width}: {cycle['cycle_ms']:.2f}" for width, cycle in expected)
            per_width = _counts(reported["cycles_per_width"])
            rows.append([str(ours.concurrency), *speeds, f"{ratio:.3f}x", verdict, costs, per_width])
        parts += [
            f"## A draft that never helps: {pair.name}, --speculative-adaptive",
            "Output tokens/s, prefill included. The draft has dummy weights, so hardly a token is accepted. "
            f"Wanted: {LEAST_ADAPTIVE}x no speculation. ms: cycle time the policy expects at each width, "
            "from measurements so far. Cycles: number at each width since the start, earlier loads included.",
            _table(
                [
                    "concurrency",
                    "no speculation",
                    "adaptive",
                    "adaptive / none",
                    "wanted",
                    "ms by width",
                    "cycles",
                ],
                rows,
            ),
        ]
    return parts


def _ratio(load: Load | None, other: Load | None) -> float | None:
    return load.tokens_per_second / other.tokens_per_second if load and other else None


def cycle_ms(load: Load) -> float:
    """Return wall time per cycle, as if all requests of a round always ran together."""
    steps = sum(load.accepted) or load.output_tokens
    return 1e3 * load.seconds * load.concurrency / steps


def _profiles(results: dict) -> list[str]:
    parts = []
    for name, result in results.items():
        if not name.startswith("profile/"):
            continue
        _, model, variant = name.split("/")
        for profile in result["profiles"]:
            gap = profile["host_gap_us"]
            verdict = "reached" if gap < MOST_HOST_GAP_US else "MISSED"
            wanted = f" (wanted: under {MOST_HOST_GAP_US}: {verdict})" if variant == DFLASH else ""
            free = 1e3 * cycle_ms(Load(**profile["load"]))
            parts += [
                f"## One cycle: {model}, {variant}, concurrency {profile['concurrency']}",
                f"Medians of {profile['cycles']} cycles, microseconds. The profiler slows the host down, so "
                f"gaps are upper bounds; without it a cycle took {free:.0f}, prefill included.",
                f"- cycle {profile['wall_us']:.0f}: GPU busy {profile['busy_us']:.0f}, idle inside graphs "
                f"{profile['graph_idle_us']:.0f}, waiting for the host {gap:.0f}{wanted}\n"
                f"- {profile['kernels']:.0f} kernels and copies; time {_counts(profile['forward_us'])}\n"
                f"- host calls: launches {_counts(profile['launches'])}; waits {_counts(profile['waits'])}",
                _table(
                    ["waiting between", "and", "times", "us"],
                    [[f"`{g['before']}`", f"`{g['after']}`", *_times(g)] for g in profile["gaps"]],
                ),
                _table(
                    ["kernel", "times", "us"],
                    [[f"`{k['name']}`", *_times(k)] for k in profile["top_kernels"]],
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
