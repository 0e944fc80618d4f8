"""The figures as a Markdown page."""

from collections.abc import Iterable, Sequence

from gpu.checks import NEAR_TIE
from gpu.servers import (
    ACCEPT_LENGTH,
    BOUNDS,
    BUILT_IN_DFLASH,
    DFLASH,
    FP8_HEAD,
    MIXED_ADAPTIVE,
    MIXED_LENGTHS,
    MIXED_WHOLE,
    NO_SPECULATION,
    USELESS,
)
from gpu.shapes import QWEN3_8B
from roofline import BY_DEVICE, CONTEXT, cycle_seconds

# A ratio of tokens/s: of which variant to which, and the least that is wanted. These decide the defaults
# (benchmark/gpu/README.md).
RATIOS = (
    (DFLASH, BUILT_IN_DFLASH, 1.0),
    (BOUNDS, BUILT_IN_DFLASH, 1.3),
    (BOUNDS, DFLASH, 1.1),
    (MIXED_ADAPTIVE, MIXED_WHOLE, 1.2),
    (DFLASH, NO_SPECULATION, 0.0),
    (USELESS, NO_SPECULATION, 0.97),
    (FP8_HEAD, DFLASH, 1.03),
)
MOST_HOST_GAP_US = 100  # of the GPU's wait for the host in a cycle
SHOWN_KERNELS = 15  # on the page; the figure has more
SPEED = (
    f"Prompts of {CONTEXT} tokens. Decoding only: the difference between long and short answers to the same "
    "greedy requests, per cycle (ms) and per token. Dummy weights: each block has an accept length of "
    f"{ACCEPT_LENGTH} by force; of a useless draft hardly a token is accepted. Mixed: mean accept lengths of "
    f"{' '.join(MIXED_LENGTHS.values())}, an equal share of the requests each, "
    "tokens/s in a window in which all run. Prefill: per prompt, all at once. Bound: the least that a cycle "
    "can take (benchmark/ROOFLINE.md)."
)
ANSWERS = (
    "Greedy and constrained answers of the bundled pairs against the target's own on a CPU. Batching the "
    "same bf16 sums otherwise may tip a near-tie: the target's best two tokens at most "
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
        *_speed(records, setting["machine"]),
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


def _loads(records: dict[str, dict]) -> dict[tuple[str, str, int], dict[str, dict]]:
    """Sort loads by backend, shape and requests.

    A figure's name is speed/BACKEND/SHAPE/VARIANT/load-REQUESTS.
    """
    loads: dict[tuple[str, str, int], dict[str, dict]] = {}
    for name, record in records.items():
        kind, *names = name.split("/")
        if kind == "speed" and names[-1].startswith("load-") and "result" in record:
            backend, shape, variant, load = names
            key = (backend, shape, int(load.removeprefix("load-")))
            loads.setdefault(key, {})[variant] = record["result"]
    return loads


def ratios(records: dict[str, dict]) -> list[str]:
    """Return a line for each ratio that is known."""
    lines = []
    for (backend, shape, requests), found in sorted(_loads(records).items()):
        for variant, other, least in RATIOS:
            if variant in found and other in found:
                ratio = found[variant]["tokens_per_second"] / found[other]["tokens_per_second"]
                verdict = "" if ratio >= least else f", MISSED {least}"
                lines.append(f"{shape} {backend} at {requests}: {variant} / {other} {ratio:.3f}{verdict}")
    return lines


def _speed(records: dict[str, dict], machine: str) -> list[str]:
    gpu = next((gpu for device, gpu in BY_DEVICE.items() if machine.startswith(device)), None)
    rows = []
    for (backend, shape, requests), found in sorted(_loads(records).items()):
        has_bound = gpu and shape == QWEN3_8B.name
        bound = f"{1e3 * cycle_seconds(QWEN3_8B, gpu, requests, CONTEXT):.2f}" if has_bound else "–"
        for variant, load in found.items():
            ms, prefill = (f"{load[key]:.2f}" if key in load else "–" for key in ("cycle_ms", "prefill_ms"))
            rows.append(
                [
                    shape,
                    backend,
                    str(requests),
                    variant,
                    f"{load['tokens_per_second']:.0f}",
                    ms,
                    bound,
                    prefill,
                ]
            )
    head = ["shape", "backend", "requests", "server", "tokens/s", "cycle ms", "bound ms", "prefill ms"]
    lines = "\n".join(f"- {line}" for line in ratios(records))
    return ["## Speed", SPEED, lines or "No ratio yet.", _table(head, rows)] if rows else []


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
