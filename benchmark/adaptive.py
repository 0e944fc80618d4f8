"""Is adaptive speculation ever slower than the best fixed width, or than none? On the bundled target, in one run.

    python benchmark/adaptive.py                                   # everything: an hour or two on two cores
    python benchmark/adaptive.py --cases trained random --concurrency 1 16 --rounds 1

For each draft: a server without speculation, one per fixed verify width, one adaptive, all started first; idle ones sleep. They
take turns, round by round, so that what else the machine does hits all alike, and each cell is their median with the spread of
the rounds. A fixed width is
the adaptive server with a single candidate: the draft fills its block and so many of its tokens are verified.

Writes benchmark/results/adaptive.md and .json.
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from serving import DRAFT, PEAGLE_DRAFT, ROOT, TARGET, Server, dflash_arguments, heldout_prompts, serve

RESULTS = ROOT / "benchmark" / "results"
BAR = 0.97
NONE, ADAPTIVE = "none", "adaptive"
STEPS = (0, 1, 3, 7)  # drafted tokens verified at a fixed width


@dataclass(frozen=True)
class Case:
    """A draft and how requests are sampled. make: writes the draft into a folder; None is the trained one."""

    name: str
    temperature: float = 0.0
    base: Path = DRAFT
    noise: float = 0.0  # of each weight, relative to its tensor's own spread
    flags: tuple[str, ...] = ()

    def draft(self, folder: Path) -> Path:
        if not self.noise:
            return self.base
        out = folder / self.name
        out.mkdir()
        for path in self.base.iterdir():
            if path.name != "model.safetensors":
                (out / path.name).write_bytes(path.read_bytes())
        generator = torch.Generator().manual_seed(0)
        tensors = load_file(self.base / "model.safetensors")
        save_file({name: self._spoil(value, generator) for name, value in tensors.items()}, out / "model.safetensors")
        return out

    def _spoil(self, value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        if not value.is_floating_point() or value.dim() < 2:
            return value
        noise = torch.randn(value.shape, generator=generator) * value.float().std()
        if self.noise >= 1:
            return noise.to(value.dtype)
        return (value.float() + self.noise * noise).to(value.dtype)


PROBABILISTIC = ("--speculative-draft-sample-method", "probabilistic")
CASES = {
    case.name: case
    for case in (
        Case("trained"),
        Case("peagle", base=PEAGLE_DRAFT),
        Case("weakened", noise=0.35),
        Case("random", noise=1.0),
        Case("sampled", temperature=1.0),
        Case("drawn", temperature=1.0, flags=PROBABILISTIC),
    )
}


@dataclass
class Cell:
    """One server at one concurrency. speeds: output tokens/s of each round. widths: cycles per verify width in the last one."""

    case: str
    server: str
    concurrency: int
    speeds: list[float] = field(default_factory=list)
    widths: dict[str, int] = field(default_factory=dict)

    @property
    def speed(self) -> float:
        return statistics.median(self.speeds)

    @property
    def spread(self) -> float:
        """Half the range of the rounds, relative to their median."""
        return (max(self.speeds) - min(self.speeds)) / 2 / self.speed


def arguments(case: Case, draft: Path, name: str, folder: Path) -> list[str]:
    if name == NONE:
        return []
    flags = [*dflash_arguments(draft), *case.flags, "--speculative-adaptive"]
    if name != ADAPTIVE:
        path = folder / f"{case.name}-{name}.json"
        path.write_text(json.dumps({"candidate_steps": [int(name)]}))
        flags += ["--speculative-adaptive-config", str(path)]
    return flags


def measure(server: Server, prompts: list[str], concurrency: int, case: Case, new_tokens: int, requests: int) -> float:
    """Output tokens per second of a fixed set of requests."""
    server.flush_cache()
    params = {"temperature": case.temperature, "max_new_tokens": new_tokens, "ignore_eos": True}
    chosen = itertools.islice(itertools.cycle(prompts), max(8, requests * concurrency))
    asked = [{"text": text, "sampling_params": params} for text in chosen]
    began = time.perf_counter()
    answers = server.generate_many(asked, concurrency)
    seconds = time.perf_counter() - began
    return sum(answer["meta_info"]["completion_tokens"] for answer in answers) / seconds


def widths_of(server: Server) -> dict[str, int]:
    [state, *_] = server.get("/server_info")["internal_states"]
    return state.get("speculative_width", {}).get("cycles_per_width", {})


def run(case: Case, args, say: Callable[[str], None]) -> list[Cell]:
    prompts = [p["text"] for p in heldout_prompts() if not p.get("chat") and 16 <= p["num_tokens"] <= 512]
    names = [NONE, *map(str, STEPS), ADAPTIVE]
    cells = {(name, n): Cell(case.name, name, n) for name in names for n in args.concurrency}
    common = ["--model-path", str(TARGET), "--sleep-on-idle", "--random-seed", "1", "--max-total-tokens", "32768"]
    env = {"OMP_NUM_THREADS": str(args.threads)}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        draft = case.draft(folder)
        servers = {}
        for name in names:
            flags = arguments(case, draft, name, folder)
            servers[name] = stack.enter_context(serve(*common, *flags, env=env))
            measure(servers[name], prompts[:4], 4, case, 16, 1)  # warms up
        for round_number in range(args.rounds):
            for n in args.concurrency:
                for name in names if round_number % 2 == 0 else names[::-1]:
                    server, cell = servers[name], cells[name, n]
                    before = widths_of(server)
                    cell.speeds.append(measure(server, prompts, n, case, args.new_tokens, args.requests_per_slot))
                    cell.widths = {w: count - before.get(w, 0) for w, count in widths_of(server).items()}
                    say(f"{case.name:>10} {name:>8} x{n:<3} round {round_number + 1}: {cell.speeds[-1]:7.1f} tokens/s")
    return list(cells.values())


def verdicts(cells: list[Cell]) -> list[tuple[str, int, float, float]]:
    """(case, concurrency, adaptive / best fixed width, adaptive / no speculation)"""
    by_key = {(cell.case, cell.server, cell.concurrency): cell.speed for cell in cells}
    found = []
    for case, n in dict.fromkeys((cell.case, cell.concurrency) for cell in cells):
        adaptive = by_key[case, ADAPTIVE, n]
        best = max(by_key[case, str(k), n] for k in STEPS)
        found.append((case, n, adaptive / best, adaptive / by_key[case, NONE, n]))
    return found


def table(cells: list[Cell]) -> str:
    names = [NONE, *map(str, STEPS), ADAPTIVE]
    by_key = {(cell.case, cell.server, cell.concurrency): cell for cell in cells}
    head = "| draft | requests | no speculation | " + " | ".join(f"{k} verified" for k in STEPS)
    rows = [head + " | adaptive | spread of rounds | against the best fixed | against none | cycles per width |"]
    rows.append("|---|" + "---:|" * (len(STEPS) + 6) + "---|")
    for case, n, of_best, of_none in verdicts(cells):
        of = [by_key[case, name, n] for name in names]
        widths = ", ".join(f"{w}: {count}" for w, count in of[-1].widths.items())
        marks = [f"{ratio:.2f}" if ratio >= BAR else f"**{ratio:.2f}**" for ratio in (of_best, of_none)]
        rows.append(
            f"| {case} | {n} | " + " | ".join(f"{cell.speed:.0f}" for cell in of)
            + f" | ±{100 * max(cell.spread for cell in of):.0f} % | {marks[0]} | {marks[1]} | {widths} |"
        )
    return "\n".join(rows)


def page(cells: list[Cell], args) -> str:
    missed = sum(min(of_best, of_none) < BAR for *_, of_best, of_none in verdicts(cells))
    return f"""# Adaptive verify width against fixed ones

{date.today()}; {platform.machine()}, {os.cpu_count()} CPU cores, {args.threads} PyTorch threads per server; bf16; sglang {version("sglang")},
sglang-dflash {version("sglang-dflash")}; {args.new_tokens} new tokens a request, {args.rounds} rounds, medians. `python benchmark/adaptive.py`.

Output tokens/s. "k verified": the draft fills its block of 8 and k of its tokens are verified, 0 is plain decoding that writes the draft's
context. Drafts: `trained` and `peagle` are the bundled ones, `weakened` has noise on every weight, `random` is noise, `sampled` is `trained` at
temperature 1, `drawn` the same with probabilistic drafting. Bold: below {BAR}. Cells below the bar: {missed} of {len(verdicts(cells))}.

{table(cells)}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16, 48])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--requests-per-slot", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--name", default="adaptive", help="of the files in benchmark/results/")
    args = parser.parse_args()
    cells: list[Cell] = []
    for name in args.cases:
        cells += run(CASES[name], args, lambda line: print(line, flush=True))
        stem = RESULTS / args.name
        stem.with_suffix(".md").write_text(page(cells, args))
        stem.with_suffix(".json").write_text(json.dumps([asdict(cell) for cell in cells], indent=1))
    print(table(cells))


if __name__ == "__main__":
    main()
