"""Steps on one server: loads, profiles, texts, and the phases of its start."""

import contextlib
import gzip
import json
import os
import random
import statistics
import threading
import time
import urllib.error
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench import Load
from gpu import trace
from gpu.limit import TimeLimit
from gpu.servers import ACCEPT_LENGTH, NO_SPECULATION, PHASES, ServerSpec
from serving import Server, serve, start_cold, text_prompts

START_TIMEOUT_S = 480  # kernels are compiled on their first use
# A simulated accept length holds on average, and a request's last block is cut at its end.
ACCEPT_LENGTH_SLACK = 0.2
PROFILED_STEPS = 30
PROFILED_TOKENS = 4096
LOG_END = 6000  # characters of a server's log that an error carries
# Log lines of this plugin's worker when it is built.
DRAFTERS = ("DFlashDrafter", "DFlash2Drafter", "PEagleDrafter")
WORKER_LINES = tuple(f"DFlashWorker with {drafter}: block size" for drafter in DRAFTERS)
# Log lines of a start, in their order: (phase that ends there, its line). The last one of a kind counts: a
# server with a draft has two of each.
START_LINES = (
    ("imports", "Load weight begin"),
    ("weights", "Load weight end"),
    ("pools", "Cache is allocated"),
    ("graphs", "CUDA graph end"),
)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a GPU run, or of its rehearsal on a CPU.

    new_tokens: of the short and the long answers, whose difference is measured. texts: prompts of a check,
    None for all.
    """

    is_rehearsal: bool = False
    new_tokens: tuple[int, int] = (64, 448)
    most_requests: int = 96
    context_divisor: int = 1
    texts: int | None = None
    text_tokens: int = 128

    def requests(self, wanted: int) -> int:
        return min(wanted, self.most_requests)

    def context(self, wanted: int) -> int:
        return wanted // self.context_divisor


GPU_SIZES = Sizes()
REHEARSAL_SIZES = Sizes(
    is_rehearsal=True, new_tokens=(8, 96), most_requests=3, context_divisor=64, texts=6, text_tokens=48
)


class StartClock:
    """Times at which a starting server's log shows that a phase has ended."""

    def __init__(self):
        self._begun, self._seen, self._is_over = time.monotonic(), {}, threading.Event()

    def start(self, command: Sequence[str], env: dict[str, str], log) -> object:
        """Start a server as `serving.start_cold` does, and watch its log."""
        self._begun = time.monotonic()
        threading.Thread(target=self._watch, args=(Path(log.name),), daemon=True).start()
        return start_cold(command, env, log)

    def _watch(self, log: Path) -> None:
        counts: dict[str, int] = {}
        while not self._is_over.wait(0.1):
            with contextlib.suppress(FileNotFoundError):
                self.read(log.read_text(errors="replace"), time.monotonic() - self._begun, counts)

    def read(self, text: str, seconds: float, counts: dict[str, int]) -> None:
        """Note `seconds` for each phase whose line the log shows once more than `counts` says."""
        for phase, line in START_LINES:
            found = text.count(line)
            if found > counts.get(phase, 0) and not (phase == "imports" and counts.get(phase)):
                self._seen[phase] = seconds
            counts[phase] = found

    def ready(self) -> None:
        self._seen["ready"] = time.monotonic() - self._begun
        self._is_over.set()

    def phases(self) -> dict[str, float]:
        """Return the seconds from one phase's end to the next one's, in order, and their sum."""
        ends = sorted(self._seen.items(), key=lambda item: item[1])
        begins = [0.0, *(end for _, end in ends)]
        found = {phase: round(end - begin, 2) for (phase, end), begin in zip(ends, begins)}
        return {**found, "total": round(begins[-1], 2)}


@dataclass(frozen=True)
class Running:
    """A server under measurement. traces: folder of profiles."""

    server: Server
    spec: ServerSpec
    sizes: Sizes
    traces: Path
    phases: dict[str, float]


@contextlib.contextmanager
def running(spec: ServerSpec, limit: TimeLimit, clock: StartClock | None = None) -> Iterator[Server]:
    """Run the server; raise RuntimeError for a wrong variant or an error."""
    clock = clock or StartClock()
    environment = spec.full_environment()
    with serve(*spec.arguments, env=environment, timeout=START_TIMEOUT_S, start=clock.start) as server:
        limit.guard(server.process)
        clock.ready()
        log = server.log()
        if any(line in log for line in WORKER_LINES) != spec.is_ours:
            raise RuntimeError(f"not a server of {spec.variant}; its log ends:\n{log[-2000:]}")
        try:
            yield server
        except Exception as error:
            # The log goes with the server, and says why it stopped answering.
            raise RuntimeError(
                f"{type(error).__name__}: {error}; the server's log ends:\n{server.log()[-LOG_END:]}"
            ) from error


def start_up(running: Running) -> dict:
    """Return {"phases": seconds by phase}."""
    return {"phases": running.phases}


@dataclass(frozen=True)
class Round:
    """Requests of one length, all at once.

    cycles: of the request with the most. blocks: of all requests together.
    """

    new_tokens: int
    seconds: float
    cycles: int
    blocks: int
    tokens: int

    @classmethod
    def from_answers(cls, answers: Sequence[dict], seconds: float) -> "Round":
        infos = [answer["meta_info"] for answer in answers]
        # The first token of an answer comes from its prompt's own forward.
        cycles = [info.get("spec_verify_ct") or info["completion_tokens"] - 1 for info in infos]
        tokens = [info["completion_tokens"] for info in infos]
        return cls(max(tokens), seconds, max(cycles), sum(cycles), sum(tokens))


def slope(pairs: Sequence[tuple[Round, Round]]) -> dict:
    """Compare short answers with long ones: what both have in common, such as prefill, cancels.

    Returns cycle_ms, the median of the pairs, cycle_ms_range, tokens_per_second and tokens_per_block of all.
    Raises ValueError if a long round took no more cycles than its short one, or most took no more time.
    """
    if any(long.cycles <= short.cycles for short, long in pairs):
        raise ValueError(f"long answers took no more cycles than short ones: {pairs}")
    ms = [1e3 * (long.seconds - short.seconds) / (long.cycles - short.cycles) for short, long in pairs]
    if statistics.median(ms) <= 0:
        raise ValueError(f"long answers took no more time than short ones: {pairs}")
    tokens, blocks = (
        sum(getattr(long, name) - getattr(short, name) for short, long in pairs)
        for name in ("tokens", "blocks")
    )
    return {
        "cycle_ms": statistics.median(ms),
        "cycle_ms_range": [min(ms), max(ms)],
        "tokens_per_second": tokens / sum(long.seconds - short.seconds for short, long in pairs),
        "tokens_per_block": tokens / blocks,
    }


def measure_load(running: Running, requests: int, context: int, repeats: int) -> dict:
    """Measure prefill, then the slope of greedy requests whose prompts are in the prefix cache.

    Returns `slope`'s entries, the rounds, prefill_ms per prompt, the tokens of a prompt found in the cache,
    and from ours the host's milliseconds per cycle by phase and the report of adaptive widths.
    """
    count, tokens = running.sizes.requests(requests), running.sizes.context(context)
    server = running.server
    server.flush_cache()
    prompts = random_requests(count, tokens, 1)
    start = time.perf_counter()
    server.generate_many(prompts, count)
    prefill = time.perf_counter() - start
    short, long = (with_length(prompts, length) for length in running.sizes.new_tokens)
    server.generate_many(short, count)  # warm up
    before = _host_phases(running)
    pairs, cached = [], []
    for _ in range(repeats):
        timed = []
        for batch in (short, long):
            start = time.perf_counter()
            answers = server.generate_many(batch, count)
            timed.append(Round.from_answers(answers, time.perf_counter() - start))
            cached += [answer["meta_info"].get("cached_tokens", 0) for answer in answers]
        pairs.append((timed[0], timed[1]))
    found = slope(pairs)
    result = {
        "requests": count,
        "context": tokens,
        "prefill_ms": 1e3 * prefill / count,
        "cached_tokens": statistics.mean(cached),
        "rounds": [{"short": asdict(short), "long": asdict(long)} for short, long in pairs],
        **found,
        "problems": [],
    }
    simulates = "SGLANG_SIMULATE_ACC_LEN" in running.spec.environment
    kept = found["tokens_per_block"]
    if simulates and not running.sizes.is_rehearsal and abs(kept - ACCEPT_LENGTH) > ACCEPT_LENGTH_SLACK:
        result["problems"].append(f"{kept:.2f} tokens a block, but the server simulates {ACCEPT_LENGTH}")
    if phases := _phases_between(before, _host_phases(running)):
        result["phase_ms"] = phases
    if widths := said_of_widths(server):
        result["widths"] = widths
    return result


def _host_phases(running: Running) -> dict:
    clocked = "PHASE_TIMES" in running.spec.environment and PHASES.exists()
    return json.loads(PHASES.read_text()) if clocked else {"cycles": 0, "seconds": {}}


def _phases_between(before: dict, after: dict) -> dict[str, float]:
    """Return milliseconds per cycle by phase; nothing if no cycle was counted between."""
    cycles = after["cycles"] - before["cycles"]
    if cycles <= 0:
        return {}
    spent = {name: total - before["seconds"].get(name, 0.0) for name, total in after["seconds"].items()}
    return {name: 1e3 * seconds / cycles for name, seconds in spent.items()}


def said_of_widths(server: Server) -> dict:
    return server.get("/server_info")["internal_states"][0].get("speculative_width", {})


def random_requests(count: int, context: int, new_tokens: int, seed: int = 0) -> list[dict]:
    """Make `count` prompts without a common prefix, of ids that every vocabulary here has."""
    draw = random.Random(f"{seed} {context}")
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    prompts = ([draw.randrange(1000, 100_000) for _ in range(context)] for _ in range(count))
    return [{"input_ids": prompt, "sampling_params": sampling} for prompt in prompts]


def with_length(requests: Sequence[dict], new_tokens: int) -> list[dict]:
    """Return the same requests with answers of another length."""
    return [
        {**request, "sampling_params": {**request["sampling_params"], "max_new_tokens": new_tokens}}
        for request in requests
    ]


def measure_texts(running: Running, concurrency: int) -> dict:
    """Answer the held-out texts: {"load": a `bench.Load`, "widths" if they adapt}."""
    texts = [prompt["text"] for prompt in text_prompts()][: running.sizes.texts]
    sampling = {"temperature": 0, "max_new_tokens": running.sizes.text_tokens}
    requests = [{"text": text, "sampling_params": sampling} for text in texts]
    running.server.generate_many(requests[:concurrency], concurrency)  # warm up
    running.server.flush_cache()
    start = time.perf_counter()
    answers = running.server.generate_many(requests, concurrency)
    load = Load.from_answers(running.spec.variant, concurrency, answers, time.perf_counter() - start)
    return {"load": asdict(load), "widths": said_of_widths(running.server), "problems": []}


def profile(running: Running, requests: int, context: int) -> dict:
    """Record a torch profiler trace of PROFILED_STEPS scheduler steps, all requests decoding.

    Returns a `trace.summarize`, or from a rehearsal the number of forwards by name. The trace file is kept.
    """
    count = running.sizes.requests(requests)
    server, folder = running.server, running.traces.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    known = set(folder.glob("*.trace.json.gz"))
    tokens = 40 * running.sizes.new_tokens[1] if running.sizes.is_rehearsal else PROFILED_TOKENS
    prompts = random_requests(count, running.sizes.context(context), tokens, seed=2)
    load = threading.Thread(target=_until_aborted, args=(server, prompts), daemon=True)
    load.start()
    while load.is_alive() and not _all_decoding(server, count):
        time.sleep(0.05)
    # Stacks and shapes would slow the host down several times over, and we measure the host.
    options = {"activities": ["CPU", "GPU"], "with_stack": False, "record_shapes": False}
    server.post("/start_profile", {"output_dir": str(folder), "num_steps": PROFILED_STEPS, **options})
    file = _wait_for_trace(folder, known)
    server.post("/abort_request", {"abort_all": True})
    load.join()
    recorded = json.loads(gzip.decompress(file.read_bytes()))
    kept = folder / f"{running.spec.variant}-{requests}.trace.json.gz"
    os.replace(file, kept)
    if running.sizes.is_rehearsal:
        return {"requests": count, "forwards": trace.forwards(recorded)}
    step = "DECODE" if running.spec.variant == NO_SPECULATION else "VERIFY"
    return {"requests": count, **trace.summarize(recorded, f"step[{step} bs={count}]")}


def _until_aborted(server: Server, requests: Sequence[dict]) -> None:
    with contextlib.suppress(urllib.error.HTTPError):  # SGLang's answer to an aborted request
        server.generate_many(requests, len(requests))


def _wait_for_trace(folder: Path, known: set[Path], timeout: float = 120) -> Path:
    """Return the new trace file once it is complete: the scheduler writes it between two steps."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        for file in set(folder.glob("*.trace.json.gz")) - known:
            with contextlib.suppress(EOFError, gzip.BadGzipFile, OSError):
                gzip.decompress(file.read_bytes())
                return file
        time.sleep(0.2)
    raise RuntimeError(f"no trace after {timeout} s")


def _all_decoding(server: Server, count: int) -> bool:
    load = server.get("/v1/loads")["loads"][0]
    return load["num_running_reqs"] == count and load["num_waiting_reqs"] == 0
