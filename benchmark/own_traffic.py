"""What a draft gains from a server's own traffic, against the number of tokens recorded.

    python benchmark/own_traffic.py WORK --kinds sql mails tests --tokens 5000 20000 80000

Records each kind once, trains a draft on the first tokens of the record, and swaps each draft into one
server, which answers unseen requests of its kind and general ones. What is in WORK already is not made again.
Prints a table of all drafts in WORK, and draws it to WORK/own-traffic.png.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

from serving import CHAT_DRAFT, CHAT_TARGET, describe_cpu

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "own_traffic"
sys.path.insert(0, str(EXAMPLE))

from loop import GENERAL, gain, serving, swap  # noqa: E402
from traffic import TEMPLATES, UNSEEN, ask, questions  # noqa: E402

MAX_TOKENS = 96
RECORDED_AT_ONCE = 32  # the requests of a round


def lines_of(record: Path) -> list[str]:
    return [line for file in sorted(record.glob("*.jsonl")) for line in file.read_text().splitlines()]


def tokens_of(line: str) -> int:
    return len(json.loads(line).get("input_ids", ()))


def record(work: Path, kinds: list[str], tokens: int) -> None:
    """Write WORK/KIND.jsonl for each kind: the server's record of at least so many tokens."""
    kinds = [kind for kind in kinds if not (work / f"{kind}.jsonl").exists()]
    if not kinds:
        return
    folder = work / "record"
    with serving("--speculative-record", folder) as url:
        taken = len(lines_of(folder))  # by an earlier run
        for kind in kinds:
            began, asked, lines = time.monotonic(), questions(kind, seed=1), []
            while sum(map(tokens_of, lines)) < tokens:
                prompts = list(islice(asked, RECORDED_AT_ONCE))
                ask(url, prompts, True, MAX_TOKENS, in_flight=RECORDED_AT_ONCE)
                time.sleep(1)  # the record is written by a thread
                lines = lines_of(folder)[taken:]
            taken += len(lines)
            (work / f"{kind}.jsonl").write_text("\n".join(lines) + "\n")
            print(f"{kind}: recorded {len(lines)} lines in {time.monotonic() - began:.0f} s", flush=True)


def run(log: Path, script: str, *words: object) -> float:
    """Run a script of the example with one thread. Return its CPU seconds, with its children's."""
    command = [str(word) for word in (sys.executable, EXAMPLE / script, *words)]
    with log.open("a") as file:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
        _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{script} failed: see {log}.")
    return used.ru_utime + used.ru_stime


def train(work: Path, kind: str, tokens: int) -> None:
    """Train WORK/KIND-TOKENS/draft for an epoch, and note its numbers and CPU seconds beside it."""
    folder = work / f"{kind}-{tokens}"
    notes = folder / "trained.json"
    if notes.exists():
        return
    folder.mkdir(exist_ok=True)
    taken, used = [], 0
    for line in (work / f"{kind}.jsonl").read_text().splitlines():
        if used >= tokens:
            break
        taken.append(line)
        used += tokens_of(line)
    (folder / "record.jsonl").write_text("\n".join(taken) + "\n")
    rows, draft = folder / "rows.jsonl", folder / "draft"
    run(folder / "log", "training_rows.py", folder / "record.jsonl", rows)
    masks = [json.loads(line)["loss_mask"] for line in rows.read_text().splitlines()]
    # Four rows a step, and about as many general rows as recorded ones: about one epoch.
    steps = max(4, len(masks) // 2)
    flags = "--work", folder / "work", "--steps", steps
    seconds = run(folder / "log", "train.py", rows, CHAT_TARGET, CHAT_DRAFT, draft, *flags)
    numbers = {"rows": len(masks), "tokens": sum(map(len, masks)), "answer": sum(map(sum, masks))}
    notes.write_text(json.dumps({**numbers, "steps": steps, "cpu_seconds": round(seconds)}))
    print(f"{folder.name}: {notes.read_text()}", flush=True)


def judge(work: Path, names: list[str], unseen: int) -> dict[str, dict[str, list[float]]]:
    """Return the tokens of a cycle in each answer, by draft and by set of prompts."""
    found = work / "judged.json"
    judged = json.loads(found.read_text()) if found.exists() else {}
    if set(names) <= judged.keys():
        return judged
    asked = [json.loads(line)["messages"][0]["content"] for line in GENERAL.read_text().splitlines()]
    kinds = sorted({name.partition("-")[0] for name in names})
    sets = {kind: list(islice(questions(kind, UNSEEN), unseen)) for kind in kinds}
    sets["asked"] = asked[:unseen]
    with serving("--no-speculative-adaptive") as url:
        for name in ["served", *names]:
            if name in judged:
                continue
            swap(url, CHAT_DRAFT if name == "served" else work / name / "draft", name)
            labels = sets if name == "served" else (name.partition("-")[0], "asked")
            judged[name] = {
                label: ask(url, sets[label], False, 32 if label == "asked" else 64, in_flight=16)
                for label in labels
            }
            found.write_text(json.dumps(judged))
            print({name: {label: statistics.mean(x) for label, x in judged[name].items()}}, flush=True)
    return judged


def plot(judged: dict[str, dict[str, list[float]]], tokens: dict[str, int], path: Path) -> None:
    """Draw the accept length of own and general prompts against recorded tokens."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots(1, 2, sharex=True)
    for kind in sorted({name.partition("-")[0] for name in tokens}):
        names = sorted((name for name in tokens if name.startswith(f"{kind}-")), key=tokens.__getitem__)
        for panel, label in zip(axes, (kind, "asked"), strict=True):
            lengths = [statistics.mean(judged[name][label]) for name in ("served", *names)]
            gains = [length / lengths[0] - 1 for length in lengths]
            panel.plot([0, *(tokens[name] / 1000 for name in names)], gains, marker="o", label=kind)
    for panel, title in zip(axes, ("unseen requests of the kind", "general chat"), strict=True):
        panel.set(title=title, xlabel="thousand recorded tokens")
        panel.yaxis.set_major_formatter(PercentFormatter(1))
        panel.axhline(0, color="grey", linewidth=0.8)
        panel.legend()
    axes[0].set_ylabel("accept length against the served draft")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("--kinds", nargs="+", choices=TEMPLATES, default=list(TEMPLATES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[5000, 20000, 80000])
    parser.add_argument("--unseen", type=int, default=16, help="requests of each set to compare drafts on")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    print(f"{describe_cpu()}; {args}", flush=True)
    record(args.work, args.kinds, max(args.tokens))
    todo = [(kind, tokens) for tokens in sorted(args.tokens, reverse=True) for kind in args.kinds]
    with ThreadPoolExecutor(2) as pool:  # each trainer has one thread
        list(pool.map(lambda one: train(args.work, *one), todo))
    names = [f"{kind}-{tokens}" for kind in args.kinds for tokens in sorted(args.tokens)]
    judged = judge(args.work, names, args.unseen)
    named = [(*name.split("-"), name) for name in judged if name != "served"]
    names = [name for _, _, name in sorted(named, key=lambda one: (one[0], int(one[1])))]
    trained = {name: json.loads((args.work / name / "trained.json").read_text()) for name in names}
    print("| kind | trained on (answers) | steps | CPU minutes | unseen requests | general chat |")
    print("|---|---:|---:|---:|---|---|")
    for name in names:
        kind, one = name.partition("-")[0], trained[name]
        sizes = f"{one['tokens']:,} ({one['answer']:,}) | {one['steps']} | {one['cpu_seconds'] / 60:.1f}"
        cells = [kind, sizes]
        for label in (kind, "asked"):
            old, new, error = gain(judged["served"][label], judged[name][label])
            cells.append(f"{old:.3f} -> {new:.3f} ({new / old - 1:+.1%}, ±{error:.3f})")
        print(f"| {' | '.join(cells)} |")
    plot(judged, {name: one["tokens"] for name, one in trained.items()}, args.work / "own-traffic.png")


if __name__ == "__main__":
    main()
