"""The figures as a Markdown page."""

from collections.abc import Iterable, Sequence

from gpu.checks import NEAR_TIE
from gpu.servers import ACCEPT_LENGTH, ADAPTIVE_DFLASH, BUILT_IN_DFLASH, DFLASH, NO_SPECULATION
from gpu.shapes import QWEN3_8B
from roofline import BY_DEVICE, CONTEXT, cycle_seconds

# What is wanted: our tokens/s over the built-in's, adaptive's over those without speculation if no drafted
# token is ever accepted, and the GPU's wait for the host in a cycle.
LEAST_RATIO, LEAST_ADAPTIVE, MOST_HOST_GAP_US = 1.0, 0.97, 100
SHOWN_KERNELS = 15  # on the page; the figure has more
ORDER = (NO_SPECULATION, BUILT_IN_DFLASH, DFLASH, ADAPTIVE_DFLASH)
SPEED = (
    f"Prompts of {CONTEXT} tokens. Decoding only: the difference between long and short answers to the same "
    "greedy requests, per cycle (ms) and per token. Dummy weights: each block has an accept length of "
    f"{ACCEPT_LENGTH} by force; with adaptive width hardly a token is accepted. Prefill: per prompt, all at "
    f"once. Wanted: ours / built-in at least {LEAST_RATIO}, adaptive / none at least {LEAST_ADAPTIVE}. "
    "Bound: the least that a cycle can take (benchmark/ROOFLINE.md)."
)
ANSWERS = (
    "Greedy and constrained answers of the bundled pairs against the target's own on this machine. Batching "
    "the same bf16 sums otherwise may tip a near-tie: the target's best two tokens at most "
    f"{NEAR_TIE} apart in log probability. Sigmas: of sampled answers from the target's distribution."
)
PROFILES = (
    "Averages, microseconds. The profiler slows the host down, so gaps are upper bounds. Wanted: less than "
    f"{MOST_HOST_GAP_US} of waiting for the host."
)


def markdown(setting: dict, records: dict[str, dict], planned: Sequence[str]) -> str:
    """Write the page. planned: the names of all figures, so that it lists the missing ones."""
    results = {name: record["result"] for name, record in records.items() if "result" in record}
    versions = ", ".join(f"{name} {number}" for name, number in setting["versions"].items())
    dates = ", ".join(sorted({record["date"] for record in records.values()})) or "no figures yet"
    sources = ", ".join(dict.fromkeys(record["source"] for record in records.values())) or "–"
    sections = [
        "# DFLASH on a GPU",
        f"{dates}; {setting['machine']}; {versions}; plugin source {sources}.",
        *_problems(records, planned),
        *_speed(results, setting["machine"]),
        *_answers(results),
        *_profiles(results),
        *_tests(results),
        *_commands(records),
    ]
    return "\n\n".join(sections) + "\n"


def _problems(records: dict, planned: Sequence[str]) -> list[str]:
    lines = []
    for name, record in records.items():
        # The whole of a message is in the figure's file.
        for problem in [record["error"]] if "error" in record else record["result"].get("problems", []):
            lines.append(f"- `{name}`: {_one_line(problem)}")
    if missing := parts_of(name for name in planned if name not in records):
        lines.append("- not all figures yet: " + ", ".join(f"`{name}`" for name in missing))
    return ["## Failed or missing", "\n".join(lines)] if lines else []


def parts_of(figures: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(name.rpartition("/")[0] for name in figures))


def _speed(results: dict, machine: str) -> list[str]:
    """Write a table per backend and shape; a figure's name is speed/BACKEND/SHAPE/VARIANT/load-REQUESTS."""
    tables: dict[tuple[str, str], dict[int, dict[str, dict]]] = {}
    for name, result in results.items():
        kind, *names = name.split("/")
        if kind == "speed" and names[-1].startswith("load-"):
            backend, shape, variant, load = names
            loads = tables.setdefault((backend, shape), {})
            loads.setdefault(int(load.removeprefix("load-")), {})[variant] = result
    gpu = next((gpu for device, gpu in BY_DEVICE.items() if machine.startswith(device)), None)
    sections = []
    for (backend, shape), loads in tables.items():
        variants = [variant for variant in ORDER if any(variant in found for found in loads.values())]
        bound = gpu if shape == QWEN3_8B.name else None
        head = ["requests"]
        head += [f"{variant}: {unit}" for variant in variants for unit in ("tokens/s", "ms", "prefill ms")]
        head += ["ours / built-in", "ours / none", "adaptive / none"] + (["bound: ms"] if bound else [])
        rows = []
        for requests, found in sorted(loads.items()):
            row = [str(requests)]
            for variant in variants:
                row += _load_cells(found.get(variant))
            row.append(_ratio(found.get(DFLASH), found.get(BUILT_IN_DFLASH), LEAST_RATIO))
            row.append(_ratio(found.get(DFLASH), found.get(NO_SPECULATION)))
            row.append(_ratio(found.get(ADAPTIVE_DFLASH), found.get(NO_SPECULATION), LEAST_ADAPTIVE))
            row += [f"{1e3 * cycle_seconds(QWEN3_8B, bound, requests, CONTEXT):.2f}"] if bound else []
            rows.append(row)
        sections += [f"## Speed: {shape}, {backend}", SPEED, _table(head, rows)]
    return sections


def _load_cells(load: dict | None) -> list[str]:
    if load is None:
        return ["–"] * 3
    return [f"{load['tokens_per_second']:.0f}", f"{load['cycle_ms']:.2f}", f"{load['prefill_ms']:.1f}"]


def _ratio(load: dict | None, other: dict | None, least: float = 0.0) -> str:
    if load is None or other is None:
        return "–"
    ratio = load["tokens_per_second"] / other["tokens_per_second"]
    return f"{ratio:.3f}" if ratio >= least else f"{ratio:.3f} MISSED"


def _answers(results: dict) -> list[str]:
    rows = []
    for name, result in results.items():
        if "differences" not in result:
            continue
        gaps = [difference["gap"] for difference in result["differences"]]
        known = [gap for gap in gaps if gap is not None]
        wide = len(gaps) - sum(gap <= NEAR_TIE for gap in known)
        sigmas = f"{result['sigmas']:.1f}" if "sigmas" in result else "–"
        numbers = map(str, (result["requests"], len(gaps), wide))
        widest, accept_length = f"{max(known):.4f}" if known else "–", f"{result['accept_length']:.2f}"
        rows.append([name.split("/")[1], *numbers, widest, accept_length, sigmas])
    head = ["server", "answers", "differ", "no near-tie", "widest gap", "accept length", "sigmas"]
    return ["## Answers of small servers", ANSWERS, _table(head, rows)] if rows else []


def _profiles(results: dict) -> list[str]:
    sections = []
    for name, profile in results.items():
        if "host_gap_us" not in profile:
            continue
        gap, verdict = profile["host_gap_us"], "" if profile["host_gap_us"] < MOST_HOST_GAP_US else " MISSED"
        sections += [
            f"## One cycle: {name}, {profile['requests']} requests",
            PROFILES,
            f"- cycle {profile['wall_us']:.0f}: GPU busy {profile['busy_us']:.0f}, idle inside graphs "
            f"{profile['graph_idle_us']:.0f}, waiting for the host {gap:.0f}{verdict}\n"
            f"- host calls: {_counts(profile['calls'])}",
            _table(["waiting between", "times", "us"], map(_row, profile["gaps"])),
            _table(["kernel", "times", "us"], map(_row, profile["kernels"][:SHOWN_KERNELS])),
        ]
    return sections


def _row(entry: dict) -> list[str]:
    return [f"`{entry['name']}`", f"{entry['times']:.1f}", f"{entry['us']:.1f}"]


def _counts(counts: dict[str, float]) -> str:
    return ", ".join(f"`{name}` {count:.1f}" for name, count in counts.items()) or "none"


def _tests(results: dict) -> list[str]:
    rows = [
        [name.split("/")[1], str(r["passed"]), str(r["skipped"]), str(len(r["problems"]))]
        for name, r in results.items()
        if name.startswith("tests/")
    ]
    return ["## Tests marked gpu", _table(["file", "passed", "skipped", "failed"], rows)] if rows else []


def _commands(records: dict) -> list[str]:
    commands = dict.fromkeys(record["command"] for record in records.values() if record["command"])
    text = "From the repository's root. Servers also got a free `--port`."
    return ["## Commands", text, "```\n" + "\n".join(commands) + "\n```"]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def _one_line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 400 else text[:200] + " … " + text[-200:]
