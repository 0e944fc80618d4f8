"""The figures as a Markdown page."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gpu.checks import NEAR_TIE
from gpu.servers import (
    ACCEPT_LENGTH,
    BUILT_IN,
    MIXED_ADAPTIVE,
    MIXED_LENGTHS,
    MIXED_WHOLE,
    NONE,
    OURS,
    USELESS,
    WAIT,
)
from gpu.state import problems_of


class Bar(NamedTuple):
    """A ratio of tokens/s of a setting to another one, and the least that is wanted, set before the run."""

    setting: str
    other: str
    least: float  # 0: none
    requests: tuple[int, ...] = ()  # empty: every load
    where: str = ""  # in the name of backend and shape


# The first that fits counts. benchmark/gpu/README.md says which defaults they decide.
BARS = (
    Bar(WAIT, OURS, 1.15, (1,)),
    Bar(WAIT, OURS, 1.0),
    Bar(WAIT, BUILT_IN, 1.15, (1,)),
    Bar(MIXED_ADAPTIVE, MIXED_WHOLE, 1.3, (48, 96)),
    Bar(MIXED_ADAPTIVE, MIXED_WHOLE, 0.97),
    Bar(USELESS, NONE, 0.95),
    Bar(OURS, BUILT_IN, 1.3, where="qwen3-0.6b"),
    Bar(OURS, BUILT_IN, 1.3, where="qwen3-4b"),
    Bar(OURS, BUILT_IN, 1.0),
    Bar(OURS, NONE, 0.0),
)
NUMBERS = {"requests": "requests", "tokens_per_second": "tokens/s", "cycle_ms": "ms a cycle"}
HOW = (
    "Random prompts, dummy weights. A load is like greedy requests (sampled: temperature 0.7, top_p 0.9): "
    f"each block has an accept length of {ACCEPT_LENGTH} by force, but none without a draft, and hardly a "
    "token of a useless draft is accepted. Medians of four windows between marks of the answers' tokens. "
    f"Mixed: mean accept lengths of {' '.join(MIXED_LENGTHS.values())}, an equal share of the requests each, "
    "in a window in which all run. Answers of the bundled pairs are compared with the target's on a CPU. "
    f"Batching the same bf16 sums otherwise may tip a near-tie, a gap of at most {NEAR_TIE} in log "
    "probability. Sigmas: of sampled answers from the target's distribution."
)


def markdown(setting: dict, records: dict[str, dict], planned: Sequence[str]) -> str:
    """Write the page. planned: the names of all figures in their order, so that it lists the missing ones."""
    versions = ", ".join(f"{name} {number}" for name, number in setting["versions"].items())
    dates = ", ".join(sorted({record["date"] for record in records.values()})) or "no figures yet"
    sources = ", ".join(dict.fromkeys(record["source"] for record in records.values())) or "–"
    rows = [[f"`{name}`", *_cells(records[name])] for name in planned if name in records]
    commands = dict.fromkeys(record["command"] for record in records.values() if record["command"])
    sections = [
        "# DFLASH on a GPU",
        f"{dates}; {setting['machine']}; {versions}; source {sources}.",
        *_problems(records, planned),
        "## Ratios of tokens/s",
        "\n".join(f"- {line}" for line in ratios(records)) or "None yet.",
        "## Figures",
        HOW,
        _table(["figure", *NUMBERS.values(), "and", "seconds"], rows),
        "## Commands",
        "From the repository's root. Servers also got a free `--port`.",
        "```\n" + "\n".join(commands) + "\n```",
    ]
    return "\n\n".join(sections) + "\n"


def parts_of(figures: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(name.rpartition("/")[0] for name in figures))


def ratios(records: dict[str, dict]) -> list[str]:
    """Return a line for each ratio that is known.

    A figure's name is speed/BACKEND/SHAPE/SETTING/KIND-REQUESTS.
    """
    speeds: dict[tuple[str, str, int], dict[str, float]] = {}
    for name, record in records.items():
        if name.startswith("speed/") and "tokens_per_second" in record.get("result", {}):
            _, backend, shape, setting, load = name.split("/")
            key = f"{backend}/{shape}", load, int(load.rpartition("-")[2])
            speeds.setdefault(key, {})[setting] = record["result"]["tokens_per_second"]
    lines = []
    for (where, load, requests), found in speeds.items():
        seen = set()
        for bar in BARS:
            fits = bar.where in where and (not bar.requests or requests in bar.requests)
            if fits and (pair := (bar.setting, bar.other)) not in seen and found.keys() >= set(pair):
                seen.add(pair)
                ratio = found[bar.setting] / found[bar.other]
                verdict = "" if not bar.least else f", wanted {bar.least}" + ": MISSED" * (ratio < bar.least)
                lines.append(f"{where} {load}: {bar.setting} / {bar.other} {ratio:.3f}{verdict}")
    return lines


def _problems(records: dict, planned: Sequence[str]) -> list[str]:
    lines = []
    for name, record in records.items():
        # The whole of a message is in the figure's file. A server's last lines say why it died.
        for problem in problems_of(record):
            first, *_ = text = [line.rstrip() for line in problem.splitlines() if line.strip()] or [""]
            lines.append(
                f"- `{name}`: {first[:300]}" + "".join(f"\n      {line[:200]}" for line in text[1:][-6:])
            )
    if missing := parts_of(name for name in planned if name not in records):
        lines.append("- not all figures yet: " + ", ".join(f"`{name}`" for name in missing))
    return ["## Failed or missing", "\n".join(lines)] if lines else []


def _cells(record: dict) -> list[str]:
    result = record.get("result", {"failed": ""})
    rest = [
        f"{name} {value if isinstance(value, str) else f'{value:.4g}'}"
        for name, value in {**result, **_summary(result)}.items()
        if name not in NUMBERS and isinstance(value, str | int | float)
    ]
    numbers = [f"{result[name]:.4g}" if name in result else "" for name in NUMBERS]
    return [*numbers, ", ".join(rest), str(record["seconds"])]


def _summary(result: dict) -> dict:
    """Return numbers in the place of lists."""
    found: dict = {}
    if "differences" in result:
        gaps = [difference["gap"] for difference in result["differences"]]
        found = {"differ": len(gaps), "widest gap": max((gap for gap in gaps if gap is not None), default=0)}
    if "cycle_ms_range" in result:
        found["of a window"] = "{:.4g} to {:.4g} ms".format(*result["cycle_ms_range"])
    return found


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])
