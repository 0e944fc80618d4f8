"""Is adaptive speculation ever slower than the best fixed width, or than none? On the bundled target, in one run.

    python benchmark/adaptive.py                                   # everything: about an hour on two cores
    python benchmark/adaptive.py --cases trained random --concurrency 1 16 --rounds 20

For each draft two servers: one without speculation, and an adaptive one, which a switch in a file holds at a fixed verify width for a
while (width_switch/sitecustomize.py): the draft fills its block and so many of its tokens are verified. So all widths are measured in
one process, in slices of seconds that take turns and serve the same requests, and a cell is the median of what the rounds say. The
schedulers count the time and tokens of their decode steps: how a slice's prompts happen to arrive is not what is asked here.

Writes benchmark/results/adaptive.md and .json.
"""

import argparse
import itertools
import json
import math
import os
import platform
import shlex
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from serving import DRAFT, PEAGLE_DRAFT, ROOT, TARGET, Server, dflash_arguments, heldout_prompts, importing, serve

RESULTS = ROOT / "benchmark" / "results"
BAR = 0.97
NONE, ADAPTIVE = "none", "adaptive"
STEPS = (0, 1, 3, 7)  # drafted tokens verified at a fixed width
SERVED = (NONE, *map(str, STEPS), ADAPTIVE)


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
    """A draft at one concurrency. speeds: tokens per second of decoding in each round, by what was served: "none", a number of
    drafted tokens verified, "adaptive". with_prompts: the same, prefills' time counted. widths: adaptive cycles per verify width."""

    case: str
    concurrency: int
    speeds: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in SERVED})
    with_prompts: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in SERVED})
    widths: Counter = field(default_factory=Counter)

    def speed(self, name: str) -> float:
        return statistics.median(self.speeds[name])

    @property
    def best_fixed(self) -> str:
        return max(map(str, STEPS), key=self.speed)

    def took(self, name: str, slice_: "Slice") -> None:
        self.speeds[name].append(slice_.tokens / slice_.decode_seconds)
        self.with_prompts[name].append(slice_.tokens / (slice_.decode_seconds + slice_.prefill_seconds))


class Servers:
    """Both servers of a case."""

    def __init__(self, stack: ExitStack, case: Case, args):
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self._switch = folder / "width"
        self._switch.touch()
        common = ["--model-path", TARGET, "--sleep-on-idle", "--random-seed", "1", "--max-total-tokens", "32768", "--dtype", args.dtype]
        steps = folder / "steps.json"
        steps.write_text(json.dumps({"candidate_steps": STEPS}))
        adaptive = ["--speculative-adaptive", "--speculative-adaptive-config", steps]
        flags = [*dflash_arguments(case.draft(folder)), *case.flags, *adaptive]
        switch = {**importing(ROOT / "benchmark" / "width_switch"), "WIDTH_SWITCH": str(self._switch)}
        env = {"OMP_NUM_THREADS": str(args.threads), **switch}
        self._plain = stack.enter_context(serve(*common, env=env))
        self._ours = stack.enter_context(serve(*common, *flags, env=env))

    def serving(self, name: str) -> Server:
        """The server that serves so from now on."""
        if name == NONE:
            return self._plain
        self._switch.write_text("" if name == ADAPTIVE else str(int(name) + 1))
        return self._ours

    def widths(self) -> Counter:
        return Counter(_state(self._ours)["speculative_width"]["cycles_per_width"])


def _state(server: Server) -> dict:
    [state, *_] = server.get("/server_info")["internal_states"]
    return state


@dataclass(frozen=True)
class Slice:
    """A set of requests served to its end: tokens that decode steps brought, and the scheduler's time in them and in prefills."""

    tokens: int
    decode_seconds: float
    prefill_seconds: float


def measure(server: Server, prompts: list[str], concurrency: int, case: Case, args) -> Slice:
    server.flush_cache()
    params = {"temperature": case.temperature, "max_new_tokens": args.new_tokens, "ignore_eos": True}
    asked = [{"text": text, "sampling_params": params} for text in prompts]
    before = _state(server)["busy"]
    server.generate_many(asked, concurrency)
    server.flush_cache()  # when it is idle
    busy = {name: value - before[name] for name, value in _state(server)["busy"].items()}
    return Slice(busy["decode_tokens"], busy["decode_seconds"], busy["prefill_seconds"])


def run(case: Case, args, say: Callable[[str], None]) -> list[Cell]:
    prompts = [p["text"] for p in heldout_prompts() if not p.get("chat") and 16 <= p["num_tokens"] <= 512]
    cells = [Cell(case.name, n) for n in args.concurrency]
    for start in range(args.starts):
        with ExitStack() as stack:
            servers = Servers(stack, case, args)
            for cell in cells:
                n = cell.concurrency
                each = max(3, args.requests_per_slot * n)
                asked = [list(itertools.islice(itertools.cycle(prompts), i * each, (i + 1) * each)) for i in range(args.rounds + 1)]
                for name in SERVED:  # warms up; the policy sees this load
                    measure(servers.serving(name), asked[-1], n, case, args)
                for number, texts in enumerate(asked[:-1]):
                    for name in SERVED if number % 2 == 0 else SERVED[::-1]:
                        server = servers.serving(name)
                        before = servers.widths()
                        cell.took(name, measure(server, texts, n, case, args))
                        if name == ADAPTIVE:
                            cell.widths += servers.widths() - before
                shown = ", ".join(f"{name} {cell.speed(name):.0f}" for name in SERVED)
                say(f"{case.name:>9} x{n:<3} start {start + 1}: {shown} tokens/s")
    return cells


def verdict(speeds: dict[str, list[float]], name: str) -> str:
    """Adaptive to that, round by round: the median, and 1.25 standard errors of a mean, which is a median's; bold below the bar."""
    ratios = [ours / theirs for ours, theirs in zip(speeds[ADAPTIVE], speeds[name], strict=True)]
    ratio, error = statistics.median(ratios), 1.25 * statistics.stdev(ratios) / math.sqrt(len(ratios))
    return (f"{ratio:.2f}" if ratio >= BAR else f"**{ratio:.2f}**") + f" ± {error:.2f}"


def table(cells: list[Cell]) -> str:
    head = "| draft | requests | no speculation | " + " | ".join(f"{k} verified" for k in STEPS)
    rows = [head + " | adaptive | against the best fixed | against none | the same with prompts | adaptive cycles per width |"]
    rows.append("|---|" + "---:|" * (len(STEPS) + 6) + "---|")
    for cell in cells:
        speeds = " | ".join(f"{cell.speed(name):.0f}" for name in SERVED)
        widths = ", ".join(f"{w}: {count}" for w, count in sorted(cell.widths.items()))
        of = " | ".join((verdict(cell.speeds, cell.best_fixed), verdict(cell.speeds, NONE), verdict(cell.with_prompts, NONE)))
        rows.append(f"| {cell.case} | {cell.concurrency} | {speeds} | {of} | {widths} |")
    return "\n".join(rows)


def page(cells: list[Cell], args, command: str) -> str:
    return f"""# Adaptive verify width against fixed ones

{date.today()}; {platform.machine()}, {os.cpu_count()} CPU cores, {args.threads} PyTorch threads per server; {args.dtype}; sglang {version("sglang")},
sglang-dflash {version("sglang-dflash")}; {args.new_tokens} new tokens a request; servers started {args.starts} times, {args.rounds} rounds each. `{command}`.

Tokens per second of decode steps, medians of all rounds. "k verified": the draft fills its block of 8 and k of its tokens are verified, 0 is
plain decoding that writes the draft's context. Drafts: `trained` and `peagle` are the bundled ones, `weakened` has noise on every weight,
`random` is noise, `sampled` is `trained` at temperature 1, `drawn` the same with probabilistic drafting. A round serves the same requests every
way; ratios are taken round by round: their median and its standard error. "The same with prompts": the time of prefills counted, in which
ours also writes the draft's context. Bold: below {BAR}.

{table(cells)}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16, 48])
    parser.add_argument("--starts", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=6, help="after each start")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--requests-per-slot", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16", help="float32 on a CPU that cannot multiply bfloat16")
    parser.add_argument("--name", default="adaptive", help="of the files in benchmark/results/")
    args = parser.parse_args()
    if args.starts * args.rounds < 2:
        parser.error("noise shows in two rounds at least")
    cells: list[Cell] = []
    for name in args.cases:
        cells += run(CASES[name], args, lambda line: print(line, flush=True))
        stem = RESULTS / args.name
        stem.with_suffix(".md").write_text(page(cells, args, f"python {shlex.join(sys.argv)}"))
        stem.with_suffix(".json").write_text(json.dumps([vars(cell) for cell in cells], indent=1))
    print(table(cells))


if __name__ == "__main__":
    main()
