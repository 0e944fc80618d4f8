"""The figures as a Markdown page."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gpu.checks import NEAR_TIE
from gpu.servers import ACCEPT_LENGTH, MIXED_LENGTHS
from gpu.state import listed, problems_of


class Bar(NamedTuple):
    """A ratio of tokens/s of a setting to another one, and the least that is wanted, set before the run."""

    setting: str
    other: str
    least: float
    requests: tuple[int, ...] = ()  # empty: every load
    where: str = ""  # in the name of backend and shape


# The first that fits counts. benchmark/gpu/README.md says which defaults they decide.
BARS = (
    Bar("ours-wait-under-draft", "ours", 1.15, (1,)),
    Bar("ours-wait-under-draft", "ours", 1.0),
    Bar("ours-wait-under-draft", "built-in", 1.15, (1,)),
    Bar("mixed-adaptive", "mixed-whole-blocks", 1.3, (48, 96)),
    Bar("mixed-adaptive", "mixed-whole-blocks", 0.97),
    Bar("useless-draft", "no-speculation", 0.95),
    Bar("ours", "built-in", 1.3, where="qwen3-0.6b"),
    Bar("ours", "built-in", 1.3, where="qwen3-4b"),
    Bar("ours", "built-in", 1.0),
)
COLUMNS = {"requests": "requests", "tokens_per_second": "tokens/s", "cycle_ms": "ms a cycle"}
HOW = (
    "Random prompts, dummy weights. A load is like greedy requests (sampled: temperature 0.7, top_p 0.9): "
    f"each block has an accept length of {ACCEPT_LENGTH} by force, but none without a draft, and hardly a "
    "token of a useless draft is accepted. All figures are of a window of four seconds in which all run. "
    f"Mixed: mean accept lengths of {' '.join(MIXED_LENGTHS.values())}, an equal share of the requests "
    "each. Answers of the bundled pairs are compared with the target's on a CPU. "
    f"Batching the same bf16 sums otherwise may tip a near-tie, a gap of at most {NEAR_TIE} in log "
    "probability. Sigmas: of sampled answers from the target's distribution."
)


def markdown(setting: dict, records: dict[str, dict], planned: Sequence[str]) -> str:
    """Write the page. planned: the names of all figures in their order, so that it lists the missing ones."""
    known = [records[name] for name in planned if name in records]
    dates, sources = (", ".join(sorted({record[key] for record in known})) for key in ("date", "source"))
    commands = dict.fromkeys(record["command"] for record in known if record["command"])
    sections = [
        "# DFLASH on a GPU",
        f"{dates}; {setting['machine']}; {listed(setting['versions'])}; source {sources}.",
        "## Failed or missing",
        "\n".join(_problems(known)) or "Nothing failed.",
        "Not yet: "
        + (", ".join(parts_of(name for name in planned if name not in records)) or "nothing")
        + ".",
        "## Ratios of tokens/s",
        "\n".join(f"- {line}" for line in ratios(records)) or "None yet.",
        "## Figures",
        HOW,
        _table(["figure", *COLUMNS.values(), "and", "seconds"], map(_row, known)),
        "## Commands",
        "From the repository's root. Servers also got a free `--port`.",
        "```\n" + "\n".join(commands) + "\n```",
    ]
    return "\n\n".join(sections) + "\n"


def parts_of(figures: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(name.rpartition("/")[0] for name in figures))


def ratios(records: dict[str, dict]) -> list[str]:
    """Return a line for each ratio that is known, of figures without a problem.

    A figure's name is speed/BACKEND/SHAPE/SETTING/KIND-REQUESTS.
    """
    speeds: dict[tuple[str, str], dict[str, float]] = {}
    for name, record in records.items():
        if "tokens_per_second" in record.get("result", {}) and not problems_of(record):
            _, backend, shape, setting, load = name.split("/")
            found = speeds.setdefault((f"{backend}/{shape}", load), {})
            found[setting] = record["result"]["tokens_per_second"]
    lines = []
    for (where, load), found in speeds.items():
        fitting: dict[tuple[str, str], float] = {}
        for bar in BARS:
            fits = bar.where in where and (not bar.requests or int(load.rpartition("-")[2]) in bar.requests)
            if fits and {bar.setting, bar.other} <= found.keys():
                fitting.setdefault((bar.setting, bar.other), bar.least)
        for (setting, other), least in fitting.items():
            ratio = found[setting] / found[other]
            missed = ": MISSED" * (ratio < least)
            lines.append(f"{where} {load}: {setting} / {other} {ratio:.3f}, wanted {least}{missed}")
    return lines


def _problems(known: Sequence[dict]) -> list[str]:
    """List problems. A server's last lines say why it died; the whole is in the figure's file."""
    found = [(record["name"], problem) for record in known for problem in problems_of(record)]
    texts = [(name, [line.rstrip() for line in text.splitlines() if line.strip()]) for name, text in found]
    return [
        f"- `{name}`: {first[:300]}" + "".join(f"\n      {line[:200]}" for line in more[-6:])
        for name, (first, *more) in texts
    ]


def _row(record: dict) -> list[str]:
    result = record.get("result", {"failed": ""})
    if "differences" in result:
        gaps = [difference["gap"] for difference in result["differences"]]
        known = {"widest gap": max((gap for gap in gaps if gap is not None), default=0)}
        result = {**result, "differ": len(gaps), **known}
    texts = {name: f"{each:.4g}" for name, each in result.items() if isinstance(each, int | float)}
    texts |= {name: each for name, each in result.items() if isinstance(each, str)}
    rest = ", ".join(f"{name} {text}" for name, text in texts.items() if name not in COLUMNS)
    return [f"`{record['name']}`", *(texts.get(name, "") for name in COLUMNS), rest, str(record["seconds"])]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])
