"""Tokens per second and accept length with and without DFLASH, in alternating runs of the same prompts.

    python benchmark/bench.py             # what `make bench` runs: SmolLM2-135M-Instruct, or the tiny pairs
    python benchmark/bench.py --quick     # the same with few and short answers: a smoke test
    python benchmark/bench.py --check     # float32 answers equal those without speculation, on every prompt
    python benchmark/bench.py --target T --draft D --prompts humaneval mine=FILE --concurrency 1 8
    python benchmark/bench.py --draft D1 D2                     # drafts side by side
    python benchmark/bench.py --peers     # also transformers, and llama.cpp and vLLM if they are installed
    python benchmark/bench.py --temperature 0 --max-new-tokens 96 --threads 2 --requests-per-slot 3 \\
        --servers none-ours adaptive-copies                     # what README's figures are from
    python benchmark/bench.py --peer-env SGLANG_PLUGINS=none    # also SGLang's built-in DFLASH (needs a GPU)

All servers run at the same time and are measured in turn, A B C A B C. A ratio is of two runs of the same
round, which have the same prompts. On a GPU the servers share its memory: choose few with --servers, and give
each its part of a small target with --server-args "--mem-fraction-static 0.25".

Writes a page, the raw figures and a plot to benchmark/results/.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path

import check
import peers
import prompt_sets
import report
import torch
from acceptance import Acceptance, sum_histograms
from prompt_sets import PromptSet, RequestMaker
from safetensors.torch import load_file, save_file
from serving import (
    CHAT_DRAFT,
    CHAT_TARGET,
    DRAFT,
    HYBRID_DRAFT,
    HYBRID_TARGET,
    ROOT,
    TARGET,
    Server,
    describe_cpu,
    dflash_arguments,
    documented,
    importing,
    serve,
    verdict_or_2,
)

RESULTS = ROOT / "benchmark" / "results"
TINY_PAIRS = (TARGET, DRAFT), (HYBRID_TARGET, HYBRID_DRAFT)
LEAST_REQUESTS = 4  # of a run
TOKENS_PER_REQUEST = 1024  # room for a prompt and its answer in a server's KV pool
# Servers without speculation: stock SGLang, and on a CPU our attention and layers.
PLAIN = {
    "none": (report.NO_SPECULATION, {}),
    "none-ours": (report.NO_SPECULATION + report.OUR_LAYERS, {"SGLANG_DFLASH_CPU_LAYERS": "1"}),
}
COPY_AHEAD, ADAPTIVE_WIDTH = "--speculative-copy-ahead", "--speculative-adaptive"
SPECULATIVE = {
    "whole": (report.WHOLE_BLOCKS, ("--no-speculative-adaptive",)),
    "adaptive": (report.ADAPTIVE, (ADAPTIVE_WIDTH,)),
    "useless": (report.ADAPTIVE + report.USELESS, (ADAPTIVE_WIDTH,)),
    "whole-copies": (report.WHOLE_BLOCKS + report.COPIES, ("--no-speculative-adaptive", COPY_AHEAD)),
    "adaptive-copies": (report.ADAPTIVE + report.COPIES, (ADAPTIVE_WIDTH, COPY_AHEAD)),
}
# Sets of prompts that servers that copy are not measured on: the tiny targets' text repeats itself.
NOT_COPIED = ("heldout",)
QUICK = {"rounds": 1, "concurrency": [4], "requests_per_slot": 1, "max_new_tokens": 48}
REMARKS = {
    TARGET.name: "The tiny target repeats itself, which flatters every draft.",
    HYBRID_TARGET.name: "The tiny target repeats itself, which flatters every draft.",
    CHAT_TARGET.name: (
        "A target of 135M parameters answers briefly and often repeats itself, which is easy to draft. Asked "
        "to edit code, it repeats only about half of the lines. Its forward is cheap, so the draft, the "
        "scheduler and HTTP weigh more than beside a large target, which would gain more from the same "
        "accept length."
    ),
}


@dataclass
class Load:
    """One run: one server, one set of prompts, one temperature, one concurrency.

    `seconds` is the wall time of the whole request set. `accepted[k]` counts the blocks that kept exactly k
    drafted tokens. `phase_ms` are milliseconds per cycle by phase; "rest" is everything outside our worker
    (scheduler, detokenizer, HTTP). `stopped` counts the answers that the target ended itself, and
    `accepted_stopped` their blocks: an answer that is cut at its limit often loops, which is easy to draft.
    `seconds_a_request` is the mean time from when a request was due to its answer, None if all were at once.
    """

    server: str
    concurrency: int
    requests: int
    output_tokens: int
    seconds: float
    cycles: int = 0
    accepted: list[int] = field(default_factory=list)
    phase_ms: dict[str, float] = field(default_factory=dict)
    prompts: str = ""
    temperature: float = 0.0
    round: int = 0
    stopped: int = 0
    accepted_stopped: list[int] = field(default_factory=list)
    seconds_a_request: float | None = None

    @classmethod
    def from_answers(
        cls, server: str, concurrency: int, answers: list[dict], seconds: float, **where
    ) -> "Load":
        """Build from the answers to a request set and its wall time."""
        infos = [answer["meta_info"] for answer in answers]
        stopped = [info for info in infos if info["finish_reason"]["type"] == "stop"]
        waits = [answer["seconds"] for answer in answers if "seconds" in answer]
        return cls(
            server=server,
            concurrency=concurrency,
            requests=len(answers),
            output_tokens=sum(info["completion_tokens"] for info in infos),
            seconds=seconds,
            accepted=sum_histograms(infos),
            stopped=len(stopped),
            accepted_stopped=sum_histograms(stopped),
            seconds_a_request=statistics.mean(waits) if waits else None,
            **where,
        )

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def acceptance(self) -> Acceptance | None:
        """None without speculation."""
        return Acceptance(len(self.accepted) - 1, self.accepted) if sum(self.accepted) else None

    @property
    def accept_length(self) -> float | None:
        """Tokens per verified block, bonus token included."""
        return self.acceptance and self.acceptance.accept_length


@dataclass(frozen=True)
class Variant:
    """A server of the plan.

    Attributes:
        name: As in the results.
        arguments: Its command line.
        env: Its environment.
        python: Its interpreter.
        phase_file: The file that its phase times are written to, if they are.
        skips: Sets of prompts that it is not measured on.
        is_greedy: Whether it is measured at temperature 0 only.
    """

    name: str
    arguments: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    python: str = sys.executable
    phase_file: Path | None = None
    skips: tuple[str, ...] = ()
    is_greedy: bool = False

    def serve(self) -> contextlib.AbstractContextManager[Server]:
        return serve(*self.arguments, env=self.env, python=self.python)


@verdict_or_2
def main() -> int:
    args = _parse_arguments()
    failures = 0
    for target, drafts, file_name in _pairs(args):
        failures += (run_check if args.check else run)(args, target, drafts, file_name)
    return 1 if failures else 0


def _pairs(args: argparse.Namespace) -> list[tuple[str, list[str], str]]:
    """Return (target, drafts, name of the results) of each pair to measure."""
    if args.draft:
        return [(args.target or _shown(TARGET), args.draft, args.name)]
    if all((folder / "model.safetensors").exists() for folder in (CHAT_TARGET, CHAT_DRAFT)):
        return [(_shown(CHAT_TARGET), [_shown(CHAT_DRAFT)], args.name)]
    print(f"{_shown(CHAT_TARGET)} or its draft is absent (`make model`): the tiny pairs are measured")
    return [(_shown(t), [_shown(d)], f"{args.name}-{t.name}") for t, d in TINY_PAIRS]


def _shown(folder: Path) -> str:
    return str(folder.relative_to(ROOT))


def _chosen_sets(args: argparse.Namespace, target: str) -> list[PromptSet]:
    is_tiny = any(Path(target).resolve() == tiny for tiny, _ in TINY_PAIRS)
    names = args.prompts or (prompt_sets.TEXT_SETS if is_tiny else prompt_sets.CHAT_SETS)
    return [prompt_sets.load(name, args.max_new_tokens) for name in names]


def plan(
    args: argparse.Namespace, target: str, drafts: Sequence[str], sets: Sequence[PromptSet], scratch: Path
) -> list[Variant]:
    """Return the servers to measure, those without speculation first."""
    common = ["--model-path", target, "--dtype", "float32" if args.check else args.dtype]
    # All servers are up at once: an idle one must sleep. On a CPU the default pool of each would be large.
    common += ["--sleep-on-idle", "--random-seed", "1"]
    if not torch.cuda.is_available():
        pool = TOKENS_PER_REQUEST * max(8, *args.concurrency, *args.sampled_concurrency)
        common += ["--max-total-tokens", str(pool)]
    common += shlex.split(args.server_args)
    threads = {"OMP_NUM_THREADS": str(args.threads)} if args.threads else {}
    plain = [PLAIN[key] for key in PLAIN if key in args.servers]
    variants = [Variant(name, tuple(common), {**threads, **env}) for name, env in plain]
    for draft in drafts:
        for key in (key for key in SPECULATIVE if key in args.servers):
            name, flags = SPECULATIVE[key]
            name = name if len(drafts) == 1 else f"{Path(draft).name}, {name}"
            skips = NOT_COPIED if COPY_AHEAD in flags else ()
            if all(chosen.name in skips for chosen in sets):
                continue
            file = scratch / f"phases-{len(variants)}.json"
            env = {**threads, **phase_times(file)}
            served = draft
            if key == "useless":
                served = write_useless_draft(Path(draft), scratch / f"useless-{len(variants)}")
                env = threads  # the clock would be a part of a loss of a few percent
            arguments = (*common, *dflash_arguments(served), *flags)
            variants.append(Variant(name, arguments, env, phase_file=file, skips=skips))
    if args.peer_env or args.peer_python:
        env = {**threads, **dict(pair.split("=", 1) for pair in args.peer_env)}
        arguments = (*common, *dflash_arguments(drafts[0]), *shlex.split(args.peer_args))
        variants.append(Variant(args.peer_name, arguments, env, args.peer_python or sys.executable))
    return variants


def write_useless_draft(draft: Path, folder: Path) -> Path:
    """Copy a draft's folder, with random weights, and return the copy. What it drafts is never right."""
    shutil.copytree(draft, folder)
    for file in folder.glob("*.safetensors"):
        tensors, random = load_file(file), torch.Generator().manual_seed(0)
        for tensor in filter(torch.is_floating_point, tensors.values()):
            tensor.copy_(torch.randn(tensor.shape, generator=random) / 50)
        save_file(tensors, file)
    return folder


def phase_times(path: Path) -> dict[str, str]:
    """Return the environment of a server that writes its phase times to a file."""
    folder = importing(ROOT / "benchmark")
    return {**folder, "SGLANG_DFLASH_OBSERVERS": "phase_clock:PhaseClock", "PHASE_TIMES": str(path)}


def cells(args: argparse.Namespace) -> Iterator[tuple[float, int]]:
    """Yield (temperature, concurrency) of each cell of a set of prompts."""
    for temperature in args.temperature:
        for concurrency in args.sampled_concurrency if temperature else args.concurrency:
            yield temperature, concurrency


def run(args: argparse.Namespace, target: str, drafts: list[str], file_name: str) -> int:
    """Measure all servers of one target in turn, and write the results after each cell."""
    started = time.perf_counter()
    sets, maker, loads = _chosen_sets(args, target), RequestMaker(target), []
    others = peers.find(target, args.dtype, args.threads, args.gguf) if args.peers else []
    heading = _heading(args, target, drafts, sets)
    heading["versions"] |= {peer.name: peer.version for peer in others}
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        variants = [*plan(args, target, drafts, sets, scratch), *others]
        servers = [(variant, stack.enter_context(variant.serve())) for variant in variants]
        for variant, server in servers:
            prompts = sets[0].slice(0, 4)
            bodies = [maker.body(prompt, sets[0].sampling(prompt, 0)) for prompt in prompts]
            measure(server, bodies, 4, variant.name)  # warm up
        for chosen in sets:
            of_set = [(variant, server) for variant, server in servers if chosen.name not in variant.skips]
            for temperature, concurrency in cells(args):
                measured = [pair for pair in of_set if not (temperature and pair[0].is_greedy)]
                count = max(LEAST_REQUESTS, concurrency * args.requests_per_slot)
                for number in range(args.rounds):
                    where = {"prompts": chosen.name, "temperature": temperature, "round": number}
                    prompts = chosen.slice(number, count)
                    bodies = [maker.body(prompt, chosen.sampling(prompt, temperature)) for prompt in prompts]
                    due = arrivals(args.arrivals, count, seed=number)
                    for variant, server in measured:
                        load = measure_with_phases(
                            server, bodies, concurrency, variant.name, variant.phase_file, due, **where
                        )
                        loads.append(load)
                        print(report.line(load, loads), flush=True)
                heading["minutes"] = round((time.perf_counter() - started) / 60, 1)
                _write(heading, loads, file_name)
    tables = [report.table, report.latency_table, report.step_table]
    tables += [report.acceptance_table, report.ratio_table]
    print("", *(table(loads) for table in tables), sep="\n", end="")
    print(f"{heading['minutes']} minutes; written: benchmark/results/{file_name}.md, .json, .png")
    return 0


def arrivals(rate: float | None, count: int, seed: int) -> list[float]:
    """Draw the times at which requests are due, as a Poisson process.

    Args:
        rate: Requests a second. None: all are due at once, for which no times are returned.
        count: Requests.
        seed: The same for every server, so that all have the same load.

    Returns:
        Seconds from the first request on, ascending.
    """
    if rate is None:
        return []
    draw = random.Random(seed)
    return [0.0, *itertools.accumulate(draw.expovariate(rate) for _ in range(count - 1))]


def run_check(args: argparse.Namespace, target: str, drafts: list[str], file_name: str) -> int:
    """Compare the float32 answers of all servers with those of plain SGLang; return the differences."""
    sets = _chosen_sets(args, target)
    with tempfile.TemporaryDirectory() as scratch:
        [plain, *others] = plan(args, target, drafts, sets, Path(scratch))
        return check.run(plain, others, sets, RequestMaker(target), max(args.concurrency))


def _heading(args, target: str, drafts: Sequence[str], sets: Sequence[PromptSet]) -> dict:
    # The interpreter's path is private to the machine.
    shown = ["PEER_PYTHON" if word == args.peer_python else word for word in args.raw]
    return {
        "date": str(date.today()),
        "target": Path(target).name,
        "drafts": [Path(draft).name for draft in drafts],
        "command": "make bench" if not args.raw else "python benchmark/bench.py " + shlex.join(shown),
        "machine": describe_cpu(),
        "load_before": round(os.getloadavg()[0], 1),
        "versions": {name: version(name) for name in ("sglang", "sglang-dflash", "torch")},
        "threads": args.threads or "default",
        "dtype": args.dtype,
        "rounds": args.rounds,
        "arrivals": args.arrivals,
        "max_new_tokens": {chosen.name: chosen.max_new_tokens for chosen in sets},
        "ignore_eos": [chosen.name for chosen in sets if chosen.ignore_eos],
        "remark": REMARKS.get(Path(target).name, ""),
    }


def _write(heading: dict, loads: list[Load], file_name: str) -> None:
    RESULTS.mkdir(exist_ok=True)
    stem = RESULTS / file_name
    raw = {**heading, "loads": [asdict(load) for load in loads]}
    # The name may hold dots, which with_suffix would take for a suffix.
    stem.with_name(f"{file_name}.json").write_text(json.dumps(raw, indent=1) + "\n")
    stem.with_name(f"{file_name}.md").write_text(report.markdown(heading, loads, file_name))
    report.plot(loads, stem.with_name(f"{file_name}.png"))


def measure_with_phases(
    server: Server,
    bodies: list[dict],
    concurrency: int,
    name: str,
    phase_file: Path | None,
    due: Sequence[float],
    **where,
) -> Load:
    before = _read_phases(phase_file)
    load = measure(server, bodies, concurrency, name, due, **where)
    after = _read_phases(phase_file)
    if after["cycles"] > before["cycles"]:
        load.cycles = after["cycles"] - before["cycles"]
        spent = {k: after["seconds"][k] - before["seconds"].get(k, 0.0) for k in after["seconds"]}
        load.phase_ms = {k: 1000 * seconds / load.cycles for k, seconds in spent.items()}
        load.phase_ms["rest"] = 1000 * load.seconds / load.cycles - sum(load.phase_ms.values())
    return load


def measure(
    server: Server,
    bodies: Sequence[dict],
    concurrency: int,
    name: str,
    due: Sequence[float] = (),
    **where,
) -> Load:
    """Send the requests when they are due, at most `concurrency` at a time, and time them as a whole."""
    server.flush_cache()
    start = time.perf_counter()
    answers = server.generate_many(bodies, concurrency, due)
    seconds = time.perf_counter() - start
    return Load.from_answers(name, concurrency, answers, seconds, **where)


def _read_phases(path: Path | None) -> dict:
    return json.loads(path.read_text()) if path and path.exists() else {"cycles": 0, "seconds": {}}


def _parse_arguments() -> argparse.Namespace:
    parser = documented(__doc__)
    parser.add_argument("--target", help="default: the bundled tiny Qwen3 target")
    parser.add_argument(
        "--draft", nargs="+", help="default, without --target: see the first line of the output"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--prompts",
        nargs="+",
        metavar="SET",
        help=f"{', '.join((*prompt_sets.CHAT_SETS, *prompt_sets.TEXT_SETS))}, or NAME=FILE of JSON lines "
        "with text or messages; default: the first three, and the last one for a tiny target",
    )
    parser.add_argument(
        "--servers",
        nargs="+",
        choices=(*PLAIN, *SPECULATIVE),
        default=["none", *([] if torch.cuda.is_available() else ["none-ours"]), *SPECULATIVE],
    )
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument(
        "--sampled-concurrency", type=int, nargs="+", default=[4], help="with a temperature above 0"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of each cell; each has other prompts")
    parser.add_argument(
        "--requests-per-slot",
        type=int,
        default=4,
        help=f"requests of a run, per request in flight; at least {LEAST_REQUESTS} in all",
    )
    parser.add_argument(
        "--arrivals",
        type=float,
        metavar="RATE",
        help="requests a second, due as a Poisson process, with at most --concurrency in flight; default: "
        "each answer is followed by the next request",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        help="the largest limit of an answer, which each prompt has between a quarter of it and all; "
        "default: 256, 128 for held-out text",
    )
    parser.add_argument("--threads", type=int, help="PyTorch threads of each server; default: PyTorch's own")
    parser.add_argument("--server-args", default="", help="more flags, for every server")
    parser.add_argument(
        "--peer-env", nargs="+", default=[], help="NAME=VALUE that make a server run the built-in DFLASH"
    )
    parser.add_argument("--peer-python", help="its interpreter, if another one")
    parser.add_argument("--peer-args", default="", help="its additional flags")
    parser.add_argument("--peer-name", default="built-in DFLASH", help="its name, as for an earlier commit")
    parser.add_argument("--peers", action="store_true", help="measure other engines too (peers.py)")
    parser.add_argument("--gguf", type=Path, help="the target for llama.cpp; default: one beside its weights")
    parser.add_argument("--name", default="bench", help="of the files in benchmark/results/")
    parser.add_argument("--quick", action="store_true", help="a smoke test: one round of short answers")
    parser.add_argument(
        "--check",
        action="store_true",
        help="compare the float32 answers of all prompts with plain SGLang's; exit status 1 if any differs",
    )
    if parser.parse_args().quick:
        parser.set_defaults(**QUICK)
    args = parser.parse_args()
    if args.target and not args.draft:
        parser.error("--target needs its --draft")
    if args.check and not {"none"} < set(args.servers):
        parser.error(
            "--check compares servers with the one without speculation: --servers needs none and others"
        )
    if args.arrivals is not None and args.arrivals <= 0:
        parser.error(f"--arrivals {args.arrivals}: requests a second, above 0")
    args.raw = sys.argv[1:]
    return args


if __name__ == "__main__":
    sys.exit(main())
