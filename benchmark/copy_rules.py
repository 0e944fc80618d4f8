"""Accept lengths of rules that choose between copy and draft.

    python benchmark/copy_rules.py

The sets are those of benchmark/copy_ahead.py, on the bundled pair. Accept lengths, not speeds, so other load
of the machine does not matter. Writes benchmark/results/copy-rules.md.
"""

import argparse
import json
import platform
from datetime import date
from importlib.metadata import version

from copy_ahead import HELD, LOOPS, Request, loop_share, make_requests, send
from serving import DRAFT, ROOT, TARGET, dflash_arguments, importing, serve
from tokenizers import Tokenizer

# Constant records: a match of at least `shortest` tokens is always copied.
ALWAYS = {
    "trust_short": 1.0,
    "trust_medium": 1.0,
    "copies_follow": 0.0,
    "drafts_follow": 0.0,
    "drafts_start": 0.0,
}
RULES = {
    "drafts only": None,
    "copies of any match from 3 tokens on": ALWAYS,
    "copies of matches from 5 on": ALWAYS | {"shortest": 5},
    "copies of matches from 8 on": ALWAYS | {"shortest": 8},
    "by acceptance, matches of all lengths trusted alike": {"trust_short": 1.0, "trust_medium": 1.0},
    "by acceptance, short matches trusted less (ours)": {},
}
SETS = (
    ("edit", 0.0),
    ("quote", 0.0),
    ("quote", 0.8),
    ("plain", 0.0),
    ("plain, does not loop", 0.0),
    ("plain", 0.8),
)


def accept_lengths(rule: dict | None, quiet: list[Request], args) -> list[str]:
    """Return a cell for each set, by one server.

    `quiet` are the requests whose greedy output does not loop. The first server finds them, all use them.
    """
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    env = {"OMP_NUM_THREADS": "1", **importing(HELD), "COPY_RULE": json.dumps(rule or {})}
    flags = dflash_arguments(DRAFT) + ["--speculative-copy-ahead"] * (rule is not None)
    common = ["--model-path", TARGET, "--dtype", "float32", "--random-seed", "1"]
    common += ["--max-total-tokens", "32768"]
    cells = []
    with serve(*common, *flags, env=env) as server:
        if not quiet:
            every = make_requests("plain", 1000, tokenizer)
            _, answers = send(server, every, 0.0, args.new_tokens, 16)
            quiet += [r for r, answer in zip(every, answers) if loop_share(answer["output_ids"]) <= LOOPS]
        for name, temperature in SETS:
            chosen = quiet if "loop" in name else make_requests(name, args.requests, tokenizer)
            result, _ = send(server, chosen, temperature, args.new_tokens, 8)
            cells.append(f"{result.accept_length:.2f}")
    return cells


def page(rows: dict[str, list[str]], args) -> str:
    heads = [f"{name}, T = {temperature:g}" if temperature else name for name, temperature in SETS]
    lines = ["| rule | " + " | ".join(heads) + " |", "|---|" + "---:|" * len(heads)]
    lines += [f"| {name} | " + " | ".join(cells) + " |" for name, cells in rows.items()]
    table = "\n".join(lines)
    return f"""# When to copy, when to draft

{date.today()}; {platform.machine()} CPU, float32; sglang {version("sglang")},
sglang-dflash {version("sglang-dflash")}. `python benchmark/copy_rules.py --requests {args.requests}`:
accept lengths on the bundled pair, {args.new_tokens} tokens each, on the sets of benchmark/copy_ahead.py.

{table}

"By acceptance": per request, copy if the accepted share of copies, times the trust in a match of this length,
is at least the accepted share of drafts (`CopyRule` in `kernels/ops/speculative/copy_ahead.py`).
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=96)
    args = parser.parse_args()
    rows: dict[str, list[str]] = {}
    quiet: list[Request] = []
    for name, rule in RULES.items():
        rows[name] = accept_lengths(rule, quiet, args)
        print(name, *rows[name], flush=True)
        (ROOT / "benchmark" / "results" / "copy-rules.md").write_text(page(rows, args))


if __name__ == "__main__":
    main()
