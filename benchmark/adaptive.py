"""Compare adaptive speculation with the best fixed width and with none, on the bundled target, in one run.

    python benchmark/adaptive.py          # everything: two hours on two cores, a third with --starts 1
    python benchmark/adaptive.py --cases trained random --concurrency 1 16 --rounds 20
    python benchmark/adaptive.py --cases mixed --concurrency 16 --starts 1 --rounds 3 --name mixed  # minutes
    python benchmark/adaptive.py --cases "mixed, hybrid" "mixed, dflash2" --concurrency 4 16 48

There are two servers per draft: one without speculation, and an adaptive one that verifies each fixed width
in turn and its own choice twice, each for some cycles (width_switch/sitecustomize.py). So every request
goes through every width, and neither the process's place in memory nor other load on the machine favours a
width. Two servers, or slices of seconds, differ by 10 % here if they do the same work. The schedulers count
the time and tokens of their decode steps. The server without speculation is measured before and after the
other, and both are started several times.

Writes benchmark/results/adaptive.md and .json.
"""

import argparse
import itertools
import json
import math
import random
import shlex
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from copy_ahead import edit, files
from gpu.state import machine
from prompt_sets import chats
from safetensors.torch import load_file, save_file
from serving import (
    DFLASH2_DRAFT,
    DRAFT,
    HYBRID_DRAFT,
    HYBRID_TARGET,
    PEAGLE_DRAFT,
    ROOT,
    TARGET,
    Server,
    describe_cpu,
    dflash_arguments,
    importing,
    serve,
    text_prompts,
)
from tokenizers import Tokenizer

RESULTS = ROOT / "benchmark" / "results"
BAR = 0.97
NONE, ADAPTIVE = "none", "adaptive"
_LONGER_BEYOND = 32  # requests, from which on rounds take longer
CODE, PROSE, EDITS = TEXTS = ("code", "prose", "edits")
STEPS = (0, 1, 3, 7)  # drafted tokens verified at a fixed width
SERVED = (NONE, *map(str, STEPS), ADAPTIVE)


@dataclass(frozen=True)
class Client:
    """What a client asks for, again and again."""

    texts: str = CODE  # of TEXTS
    temperature: float = 0.0


@dataclass(frozen=True)
class Case:
    """A draft, and who uses it."""

    name: str
    clients: tuple[Client, ...] = (Client(),)  # these in turn
    base: Path = DRAFT
    target: Path = TARGET
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
        save_file(
            {name: self._spoil(value, generator) for name, value in tensors.items()},
            out / "model.safetensors",
        )
        return out

    def _spoil(self, value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        if not value.is_floating_point() or value.dim() < 2:
            return value
        noise = torch.randn(value.shape, generator=generator) * value.float().std()
        if self.noise >= 1:
            return noise.to(value.dtype)
        return (value.float() + self.noise * noise).to(value.dtype)


PROBABILISTIC = ("--speculative-draft-sample-method", "probabilistic")
COPIES = ("--speculative-copy-ahead",)
SAMPLED = Client(temperature=1.0)
HALVES = (Client(), SAMPLED)  # the same texts, half of them greedy
# Half code and edits of code, greedy, half prose at temperature 1.
MIXED = (Client(), Client(PROSE, 1.0), Client(EDITS), Client(PROSE, 1.0))
CASES = {
    case.name: case
    for case in (
        Case("trained"),
        Case("peagle", base=PEAGLE_DRAFT),
        Case("weakened", noise=0.35),
        Case("random", noise=1.0),
        Case("sampled", (SAMPLED,)),
        Case("drawn", (SAMPLED,), flags=PROBABILISTIC),
        Case("halves", HALVES),
        Case("halves, weakened", HALVES, noise=0.35),
        Case("halves, peagle", HALVES, base=PEAGLE_DRAFT),
        Case("halves, dflash2", HALVES, base=DFLASH2_DRAFT),
        Case("halves, hybrid", HALVES, base=HYBRID_DRAFT, target=HYBRID_TARGET),
        Case("halves, random", HALVES, noise=1.0),
        Case("mixed", MIXED, flags=COPIES),
        Case("mixed, peagle", MIXED, base=PEAGLE_DRAFT, flags=COPIES),
        Case("mixed, dflash2", MIXED, base=DFLASH2_DRAFT, flags=COPIES),
        Case("mixed, hybrid", MIXED, base=HYBRID_DRAFT, target=HYBRID_TARGET, flags=COPIES),
        Case("mixed, random", MIXED, noise=1.0, flags=COPIES),
    )
}


@dataclass
class Cell:
    """A draft at one concurrency. Keys are in `SERVED`: "none", verified drafted tokens, "adaptive"."""

    case: str
    concurrency: int
    # Tokens per second of decode steps in each round; totals of all rounds.
    speeds: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in SERVED})
    seconds: Counter = field(default_factory=Counter)
    tokens: Counter = field(default_factory=Counter)
    cycles: Counter = field(default_factory=Counter)
    lengths: Counter = field(default_factory=Counter)  # adaptive blocks per number of verified drafted tokens
    # Blocks verified whole in turn, and the tokens that the policy's lengths would have made of them.
    own_on_whole: Counter = field(default_factory=Counter)
    deciding: float = 0.0  # seconds of choosing these and learning from them
    accepted: Counter = field(default_factory=Counter)  # blocks verified whole in turn, by accept length
    # Of a prefill, per request, in each start of the servers.
    prompt_ms: dict[str, list[float]] = field(default_factory=lambda: {NONE: [], ADAPTIVE: []})

    def add(self, name: str, seconds: float, tokens: int, cycles: int) -> None:
        self.speeds[name].append(tokens / seconds)
        self.seconds[name] += seconds
        self.tokens[name] += tokens
        self.cycles[name] += cycles

    def speed(self, name: str) -> float:
        return statistics.median(self.speeds[name])

    @property
    def best_fixed(self) -> str:
        return max(map(str, STEPS), key=self._whole_speed)

    def _whole_speed(self, name: str) -> float:
        return self.tokens[name] / self.seconds[name]

    def _on_same_texts(self, k: int) -> float:
        """Return the tokens that a cycle commits per request if it verifies k, of blocks verified whole."""
        accepted = sum(count * min(length, k) for length, count in self.accepted.items())
        return 1 + accepted / self.accepted.total()

    def _turn_seconds(self, k: int) -> float:
        return self.seconds[str(k)] / self.cycles[str(k)]

    @property
    def deciding_seconds(self) -> float:
        """Seconds of choosing and learning per adaptive cycle."""
        return self.deciding / self.cycles[ADAPTIVE]

    @property
    def evened(self) -> float:
        """Adaptive speed over the best fixed width's, on the same texts.

        Tokens of all are those of blocks verified whole, cut to each width and to the lengths that the policy
        would have chosen for these blocks. Times are those of the turns.
        """
        best = max(self._on_same_texts(k) / self._turn_seconds(k) for k in STEPS)
        own = self.own_on_whole["tokens"] / self.own_on_whole["blocks"]
        return own / (self.seconds[ADAPTIVE] / self.cycles[ADAPTIVE]) / best

    @property
    def of_none(self) -> list[float]:
        """Adaptive speed over that without speculation, in each start of the servers."""
        starts = len(self.prompt_ms[NONE])
        none, ours = (
            np.median(np.reshape(self.speeds[name], (starts, -1)), axis=1) for name in (NONE, ADAPTIVE)
        )
        return (ours / none).tolist()


def requests(target: Path, seed: int) -> dict[str, list[dict]]:
    """Return bodies of requests for each of TEXTS, in an order drawn from the seed.

    The target is too small to edit, so edits of code are forced on it (held/sitecustomize.py).
    """
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    edits = [edit(file, tokenizer) for file in files(10**6)]
    bodies = {
        CODE: [{"text": prompt["text"]} for prompt in text_prompts()],
        PROSE: [{"text": chat["messages"][0]["content"]} for chat in chats()],
        EDITS: [
            {"text": one.text, "sampling_params": {"custom_params": {"forced": one.forced}}} for one in edits
        ],
    }
    for of_kind in bodies.values():
        random.Random(seed).shuffle(of_kind)
    return bodies


class Load:
    """Sends requests without end, `concurrency` at a time, while the block runs.

    bodies: of requests, by the texts that a client asks for.
    """

    def __init__(
        self, server: Server, bodies: dict[str, list[dict]], concurrency: int, case: Case, params: dict
    ):
        self._server, self._params = server, params
        self._bodies = {texts: itertools.cycle(of_texts) for texts, of_texts in bodies.items()}
        self._ended = threading.Event()
        self._clients = [
            threading.Thread(target=self._ask, args=[case.clients[i % len(case.clients)]])
            for i in range(concurrency)
        ]

    def __enter__(self) -> "Load":
        for client in self._clients:
            client.start()
        return self

    def __exit__(self, *error) -> None:
        self._ended.set()
        self._server.post("/abort_request", {"abort_all": True})
        for client in self._clients:
            client.join()

    def _ask(self, client: Client) -> None:
        while not self._ended.is_set():
            body = next(self._bodies[client.texts])
            params = self._params | {"temperature": client.temperature} | body.get("sampling_params", {})
            self._server.generate(**{**body, "sampling_params": params})


class Busy:
    """Totals of a server's decode steps since the previous look."""

    def __init__(self, server: Server):
        self._server = server
        self._before = self._now()

    def _now(self) -> dict[str, Counter]:
        [state, *_] = self._server.get("/server_info")["internal_states"]
        busy = state["busy"]
        return {
            "prefilled": Counter(n=busy.pop("prefilled")),
            **{name: Counter(of) for name, of in busy.items()},
        }

    def look(self) -> dict[str, Counter]:
        now = self._now()
        gained = {name: now[name] - self._before[name] for name in now}
        self._before = now
        return gained


def servers(stack: ExitStack, case: Case, start: int, args) -> tuple[Server, Server]:
    """Start the server without speculation and the one that takes turns."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    steps = folder / "steps.json"
    steps.write_text(json.dumps({"candidate_steps": STEPS}))
    common = [
        "--model-path",
        case.target,
        "--sleep-on-idle",
        "--random-seed",
        "1",
        "--max-total-tokens",
        "32768",
        "--dtype",
        args.dtype,
    ]
    common += shlex.split(args.flags)
    adaptive = ["--speculative-adaptive", "--speculative-adaptive-config", steps]
    flags = [*dflash_arguments(case.draft(folder)), *case.flags, *adaptive]
    env = {
        "OMP_NUM_THREADS": str(args.threads),
        "TURN_CYCLES": str(args.turn),
        "TURN_SEED": str(start),
        **importing(ROOT / "benchmark" / "width_switch"),
    }
    turns = ",".join(str(k + 1) for k in STEPS) + ",0,0"  # its own choice twice, which is in every comparison
    plain = stack.enter_context(serve(*common, env={**env, "WIDTH_TURNS": "0"}))
    return plain, stack.enter_context(serve(*common, *flags, env={**env, "WIDTH_TURNS": turns}))


def measure(
    server: Server,
    names: dict[str, str],
    cell: Cell,
    bodies: dict[str, list[dict]],
    rounds: int,
    case: Case,
    args,
) -> float:
    """Add some rounds to the cell and return a prefill's ms per request.

    names: what each turn's number serves.
    """
    # Long enough for hundreds of adaptive cycles, whose first ones learn.
    seconds = args.seconds * max(1, cell.concurrency / _LONGER_BEYOND)
    params = {"max_new_tokens": args.new_tokens, "ignore_eos": True}
    with Load(server, bodies, cell.concurrency, case, params):
        busy = Busy(server)
        time.sleep(seconds)  # warms up; the policy sees this load
        busy.look()
        prefill, prefilled = 0.0, 0
        for _ in range(rounds):
            time.sleep(seconds)
            gained = busy.look()
            while not all(gained["seconds"][number] for number in names):  # a turn has not come up
                time.sleep(seconds)
                gained = {what: gained[what] + more for what, more in busy.look().items()}
            for number, name in names.items():
                cell.add(name, *(gained[what][number] for what in ("seconds", "tokens", "cycles")))
            cell.lengths += gained["lengths"]
            cell.own_on_whole += gained["own_on_widest"]
            cell.deciding += gained["decided"]["seconds"]
            cell.accepted += Counter({int(k): count for k, count in gained["accepted_of_widest"].items()})
            prefill += gained["seconds"]["prefill"]
            prefilled += gained["prefilled"]["n"]
    return 1e3 * prefill / max(prefilled, 1)


def run(case: Case, args, say: Callable[[str], None]) -> list[Cell]:
    cells = [Cell(case.name, n) for n in args.concurrency]
    for start in range(args.starts):
        start_and_measure(case, cells, start, args, say)
    return cells


def start_and_measure(case: Case, cells: list[Cell], start: int, args, say: Callable[[str], None]) -> None:
    """Measure all cells in one start of both servers, with its own order of prompts and turns."""
    bodies = requests(case.target, start)
    turns = {str(k + 1): str(k) for k in STEPS} | {"0": ADAPTIVE}
    with ExitStack() as stack:
        plain, ours = servers(stack, case, start, args)
        for cell in cells:
            cell.prompt_ms[NONE].append(measure(plain, {"0": NONE}, cell, bodies, 1, case, args))
            cell.prompt_ms[ADAPTIVE].append(measure(ours, turns, cell, bodies, args.rounds, case, args))
            measure(plain, {"0": NONE}, cell, bodies, 1, case, args)
            shown = ", ".join(f"{name} {cell.speed(name):.0f}" for name in SERVED)
            say(f"{case.name:>9} x{cell.concurrency:<3} {shown} tokens/s; {dict(cell.lengths)}")


def measured(ratios: list[float]) -> str:
    """Format the median and its standard error, which is 1.25 times that of a mean."""
    error = f" ± {1.25 * statistics.stdev(ratios) / math.sqrt(len(ratios)):.2f}" if len(ratios) > 1 else ""
    return mark(statistics.median(ratios)) + error


def mark(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio >= BAR else f"**{ratio:.2f}**"


def table(cells: list[Cell]) -> str:
    head = "| draft | requests | no speculation | " + " | ".join(f"{k} verified" for k in STEPS)
    head += " | adaptive | of the best fixed: measured | evened out | deciding, ms | of none"
    rows = [head + " | adaptive blocks, by k | ms a prompt: none, ours |"]
    rows.append("|---|" + "---:|" * (len(STEPS) + 7) + "---|---:|")
    for cell in cells:
        speeds = " | ".join(f"{cell.speed(name):.0f}" for name in SERVED)
        widths = ", ".join(f"{k}: {count}" for k, count in sorted(cell.lengths.items()))
        pairs = zip(cell.speeds[ADAPTIVE], cell.speeds[cell.best_fixed], strict=True)
        of = f"{measured([ours / theirs for ours, theirs in pairs])} | {mark(cell.evened)}"
        of += f" | {1e3 * cell.deciding_seconds:.2f} | {measured(cell.of_none)}"
        prompts = ", ".join(f"{statistics.median(ms):.1f}" for ms in cell.prompt_ms.values())
        rows.append(f"| {cell.case} | {cell.concurrency} | {speeds} | {of} | {widths} | {prompts} |")
    return "\n".join(rows)


def page(cells: list[Cell], args, command: str) -> str:
    gpu = machine()
    return f"""# Adaptive verify width against fixed ones

{date.today()}; {f"{gpu}; " if gpu else ""}{describe_cpu()},
{args.threads} PyTorch threads per server; {args.dtype}; sglang {version("sglang")},
sglang-dflash {version("sglang-dflash")}; {args.new_tokens} new tokens a request;
{args.starts} starts of {args.rounds} rounds of {args.seconds:g} s, in proportion longer with more than
{_LONGER_BEYOND} requests, turns of {args.turn} cycles. `{command}`.

Tokens per second of decode steps, medians of all rounds. "k verified": the draft fills its block of 8 and k
of its tokens are verified; 0 is plain decoding that writes the draft's context. Drafts: `trained` and
`peagle` are the bundled ones, `weakened` has noise on every weight, `random` is noise, `sampled` is
`trained` at temperature 1, `drawn` the same with probabilistic drafting. `mixed`: a quarter of the requests
continue code and a quarter edits code, both greedy, and half are prose at temperature 1, on servers with
copies; `halves`: code, half of the requests greedy and half at temperature 1; both with the trained draft or
the one that is named. At a fixed width a request copies where its estimate says so, as in adaptive turns.
Every request goes through all widths.

How to read the columns:

- **Of the best fixed, measured**: the ratio per round, its median and standard error. It is noisy and biased:
  by chance one width gets harder texts or a slower moment of the machine, and the comparison is with the best
  of four widths.
- **Evened out**: the same ratio without that noise of texts. All commit their accepted tokens of the same
  blocks, namely those that were verified whole in turn: each width its first tokens, adaptive those of the
  lengths that the policy chose for these blocks and did not get. Times are those of the turns. Adaptive times
  include choosing and learning ("deciding").
- **Of none**: compared with no speculation, which was another process, before and after. So it has the noise
  of starts: speed depends on where a process lies in memory.
- Prompts are not in these times. In the time of a prompt, ours also writes the draft's context.

Bold: below {BAR}.

{table(cells)}
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16, 48])
    parser.add_argument(
        "--starts", type=int, default=3, help="of both servers, in each of which there are so many rounds"
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument(
        "--seconds",
        type=float,
        default=8.0,
        help=f"of a round; with more than {_LONGER_BEYOND} requests in proportion longer",
    )
    parser.add_argument("--turn", type=int, default=8, help="cycles at each width in turn")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16", help="float32 on a CPU that cannot multiply bfloat16")
    parser.add_argument(
        "--flags", default="", help="more of them, for all servers; an attention backend, say"
    )
    parser.add_argument("--name", default="adaptive", help="of the files in benchmark/results/")
    args = parser.parse_args()
    if args.starts * args.rounds < 3:
        parser.error("noise shows in three rounds at least")
    cells: list[Cell] = []
    for name in args.cases:
        cells += run(CASES[name], args, lambda line: print(line, flush=True))
        stem = RESULTS / args.name
        stem.with_suffix(".md").write_text(page(cells, args, f"python {shlex.join(sys.argv)}"))
        stem.with_suffix(".json").write_text(json.dumps([vars(cell) for cell in cells], indent=1))
    print(table(cells))


if __name__ == "__main__":
    main()
