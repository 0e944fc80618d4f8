"""Steps on one server: the first requests, loads, profiles."""

import contextlib
import gzip
import json
import os
import random
import statistics
import threading
import time
import urllib.error
import urllib.request
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gpu import held, trace
from gpu.limit import TimeLimit
from gpu.servers import ACCEPT_LENGTH, NO_SPECULATION, ServerSpec
from gpu.state import Figures
from serving import Server, ready, serve, start_cold

START_TIMEOUT_S = 480  # kernels are compiled on their first use
# A simulated accept length holds on average, and a request's last block is cut at its end.
ACCEPT_LENGTH_SLACK = 0.2
REPEATS = 2  # of a pair of short and long answers
PROFILED_STEPS = 30
PROFILED_TOKENS = 4096
STREAM_INTERVAL = 32  # tokens a chunk: each chunk holds all ids so far
LOG_END = 6000  # characters of a server's log that an error carries
OUR_WORKER = "sglang-dflash DFlashWorker with "  # in the log, when this plugin's worker is built
# A short request of each kind compiles what it needs before anything is timed.
GREEDY = {"temperature": 0, "max_new_tokens": 16}
KINDS = {
    "greedy": {"sampling_params": GREEDY},
    "sampled": {"sampling_params": GREEDY | {"temperature": 0.7, "top_p": 0.9}},
    "penalised": {"sampling_params": GREEDY | {"frequency_penalty": 0.6, "presence_penalty": 0.3}},
    "biased": {"sampling_params": GREEDY | {"logit_bias": {"13": 1.5}}},
    "with log probabilities": {"sampling_params": GREEDY, "return_logprob": True, "top_logprobs_num": 2},
    "with a grammar": {"sampling_params": GREEDY | {"regex": "[a-z ]{8,48}"}},
    "with a least length": {"sampling_params": GREEDY | {"min_new_tokens": 8}},
}


@dataclass(frozen=True)
class Sizes:
    """Sizes of a GPU run, or of its rehearsal on a CPU.

    new_tokens: of the short and the long answers, whose difference is measured. context: tokens of a prompt.
    mixed_context, mixed_tokens: of a prompt and at most of an answer in a mixed load. settle, window: seconds
    before its figure, and of it.
    """

    is_rehearsal: bool = False
    new_tokens: tuple[int, int] = (64, 448)
    most_requests: int = 96
    context: int = 1024
    mixed_context: int = 512
    mixed_tokens: int = 4000
    settle: float = 2.0
    window: float = 4.0

    def requests(self, wanted: int) -> int:
        return min(wanted, self.most_requests)


GPU_SIZES = Sizes()
REHEARSAL_SIZES = Sizes(
    is_rehearsal=True,
    new_tokens=(8, 96),
    most_requests=3,
    context=16,
    mixed_context=16,
    mixed_tokens=2000,
    settle=0.3,
    window=0.7,
)


@dataclass(frozen=True)
class Session:
    """What a step works with. server, spec: None if its part has no server. says: what its log should say."""

    sizes: Sizes
    limit: TimeLimit
    figures: Figures
    server: Server | None = None
    spec: ServerSpec | None = None
    start_seconds: float = 0.0
    says: tuple[str, ...] = ()


@contextlib.contextmanager
def running(spec: ServerSpec, limit: TimeLimit, begun: Callable[[], None]) -> Iterator[Server]:
    """Run the server, the one that is held if it is this one.

    begun: called when it has been started or released. Raises RuntimeError for an error or a wrong variant.
    """

    def start(command: Sequence[str], env: dict[str, str], log) -> object:
        process = start_cold(command, env, log)
        limit.guard(process)
        begun()
        return process

    if waiting := held.take(spec):
        limit.guard(waiting.process)
        begun()
        serving = ready(waiting, START_TIMEOUT_S)
    else:
        serving = serve(*spec.arguments, env=spec.environment, timeout=START_TIMEOUT_S, start=start)
    with serving as server, held.running(server.process.pid):
        log = server.log()
        if (OUR_WORKER in log) != spec.is_ours:
            raise RuntimeError(f"not a server of {spec.variant}; its log ends:\n{log[-2000:]}")
        try:
            yield server
        except Exception as error:
            # The log goes with the server, and says why it stopped answering.
            raise RuntimeError(
                f"{type(error).__name__}: {error}; the server's log ends:\n{server.log()[-LOG_END:]}"
            ) from error


def first_requests(session: Session) -> dict:
    """Send a short request of each kind, alone and then all at once, and look for `says` in the log.

    A server of a shape gets a greedy one: nothing else is measured of it. Returns {"seconds" of the start,
    "problems"}.
    """
    is_shape = "--skip-tokenizer-init" in session.spec.arguments
    kinds = {"greedy": KINDS["greedy"]} if is_shape else KINDS
    prompt = {"input_ids": list(range(100, 116))}  # of every vocabulary here
    requests = {name: prompt | kind for name, kind in kinds.items()}
    problems = [line for name, request in requests.items() for line in _ask(session.server, name, request)]
    if not problems:
        together = session.server.generate_many(list(requests.values()), len(requests))
        problems = [line for name, answer in zip(requests, together) for line in broken(name, answer)]
    if not session.sizes.is_rehearsal:
        log = session.server.log()
        problems += [f"the server's log does not say {line!r}" for line in session.says if line not in log]
    return {"seconds": session.start_seconds, "problems": problems}


def _ask(server: Server, name: str, request: dict) -> list[str]:
    try:
        return broken(name, server.generate(**request))
    except urllib.error.HTTPError as error:
        return [f"a request {name}: HTTP {error.code}, {error.read().decode(errors='replace')[:300]}"]


def broken(name: str, answer: dict) -> list[str]:
    """Say in one line, if so, that an answer ended in another way than at its length or a stop."""
    end = answer["meta_info"]["finish_reason"]
    if end["type"] in ("length", "stop") and end.get("matched") != "NaN happened":
        return []
    return [f"a request {name} ended with {end}"]


@dataclass(frozen=True)
class Round:
    """Requests of one length, all at once.

    cycles: of the request with the most. blocks: of all requests together.
    """

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
        return cls(seconds, max(cycles), sum(cycles), sum(tokens))


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


def measure_load(session: Session, requests: int) -> dict:
    """Measure prefill, then the slope of greedy requests whose prompts are in the prefix cache.

    Returns `slope`'s entries, the rounds, prefill_ms per prompt, and the report of adaptive widths. Raises
    RuntimeError if not all requests run at once.
    """
    server, count = session.server, session.sizes.requests(requests)
    server.flush_cache()
    prompts = random_requests(count, session.sizes.context, 1)
    start = time.perf_counter()
    server.generate_many(prompts, count)
    prefill = time.perf_counter() - start
    short, long = (with_length(prompts, length) for length in session.sizes.new_tokens)
    with most_running(server) as peak:  # looked at while warming up, not while timing
        server.generate_many(long, count)
    if max(peak) < count:
        raise RuntimeError(f"{max(peak)} of {count} requests ran at once")
    pairs = []
    for _ in range(REPEATS):
        timed = []
        for batch in (short, long):
            start = time.perf_counter()
            answers = server.generate_many(batch, count)
            timed.append(Round.from_answers(answers, time.perf_counter() - start))
        pairs.append((timed[0], timed[1]))
    found = slope(pairs)
    result = {
        "requests": count,
        "prefill_ms": 1e3 * prefill / count,
        "rounds": [{"short": asdict(short), "long": asdict(long)} for short, long in pairs],
        **found,
        "problems": [],
    }
    simulates = "SGLANG_SIMULATE_ACC_LEN" in session.spec.environment
    kept = found["tokens_per_block"]
    if simulates and not session.sizes.is_rehearsal and abs(kept - ACCEPT_LENGTH) > ACCEPT_LENGTH_SLACK:
        result["problems"].append(f"{kept:.2f} tokens a block, but the server simulates {ACCEPT_LENGTH}")
    if widths := server.get("/server_info")["internal_states"][0].get("speculative_width"):
        result["widths"] = widths
    return result


def measure_mixed(session: Session, requests: int) -> dict:
    """Measure requests that accept differently, all of them running, in a window of time.

    Returns {"requests", "tokens_per_second" of all, "widths", "problems"}. Raises RuntimeError if a request
    ends before the window does.
    """
    server, sizes = session.server, session.sizes
    count = sizes.requests(requests)
    server.flush_cache()
    prompts = random_requests(count, sizes.mixed_context, sizes.mixed_tokens, seed=3)
    streams = [Stream(server.url, prompt) for prompt in prompts]
    try:
        while not all(stream.seen for stream in streams):
            if ended := [stream for stream in streams if not stream.is_alive()]:
                raise RuntimeError(f"{len(ended)} of {count} requests ended before all of them ran")
            time.sleep(0.02)
        begin = time.monotonic() + sizes.settle
        end = begin + sizes.window
        while not all(stream.seen[-1][0] > end for stream in streams):
            if ended := [stream for stream in streams if not stream.is_alive()]:
                raise RuntimeError(f"{len(ended)} of {count} requests ended inside the window")
            time.sleep(0.02)
        report = server.get("/server_info")["internal_states"][0]
    finally:
        server.post("/abort_request", {"abort_all": True})
        for stream in streams:
            stream.join()
    tokens = sum(stream.tokens_at(end) - stream.tokens_at(begin) for stream in streams)
    widths = report.get("speculative_width")
    return {"requests": count, "tokens_per_second": tokens / sizes.window, "widths": widths, "problems": []}


class Stream(threading.Thread):
    """A streamed request; `seen` has the time of each chunk, and the tokens until then."""

    def __init__(self, url: str, request: dict):
        super().__init__(daemon=True)
        sampling = {**request["sampling_params"], "stream_interval": STREAM_INTERVAL}
        body = json.dumps({**request, "sampling_params": sampling, "stream": True}).encode()
        self._request = urllib.request.Request(
            url + "/generate", data=body, headers={"Content-Type": "application/json"}
        )
        self.seen: list[tuple[float, int]] = []
        self.start()

    def run(self) -> None:
        with contextlib.suppress(OSError), urllib.request.urlopen(self._request, timeout=600) as lines:
            for line in lines:
                if line.startswith(b"data: {"):
                    info = json.loads(line[6:])["meta_info"]
                    if info["finish_reason"] is not None:
                        return
                    self.seen.append((time.monotonic(), info["completion_tokens"]))

    def tokens_at(self, moment: float) -> float:
        """Return the tokens at a moment between two chunks, interpolated."""
        after = max(1, bisect_left(self.seen, (moment,)))
        (begin, few), (end, many) = self.seen[after - 1 : after + 1]
        return few + (many - few) * (moment - begin) / (end - begin)


@contextlib.contextmanager
def most_running(server: Server) -> Iterator[list[int]]:
    """Watch how many requests the server runs at once while the block lasts."""
    seen, is_over = [0], threading.Event()

    def watch() -> None:
        with contextlib.suppress(OSError):  # of a server that ends; the requests fail, too
            while not is_over.wait(0.02):
                seen.append(server.get("/v1/loads")["loads"][0]["num_running_reqs"])

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        is_over.set()
        thread.join()


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


def profile(session: Session, requests: int) -> dict:
    """Record a torch profiler trace of PROFILED_STEPS scheduler steps, all requests decoding.

    Returns a `trace.summarize`, or from a rehearsal the number of forwards by name. The trace file is kept.
    """
    count = session.sizes.requests(requests)
    server, folder = session.server, session.figures.folder.absolute() / "traces"
    folder.mkdir(parents=True, exist_ok=True)
    known = set(folder.glob("*.trace.json.gz"))
    tokens = 20 * session.sizes.new_tokens[1] if session.sizes.is_rehearsal else PROFILED_TOKENS
    prompts = random_requests(count, session.sizes.context, tokens, seed=2)
    load = threading.Thread(target=_until_aborted, args=(server, prompts), daemon=True)
    load.start()
    while not _all_decoding(server, count):
        if not load.is_alive():
            raise RuntimeError(f"{count} requests have never run at once")
        time.sleep(0.05)
    # Stacks and shapes would slow the host down several times over, and we measure the host.
    options = {"activities": ["CPU", "GPU"], "with_stack": False, "record_shapes": False}
    server.post("/start_profile", {"output_dir": str(folder), "num_steps": PROFILED_STEPS, **options})
    file = _wait_for_trace(folder, known)
    server.post("/abort_request", {"abort_all": True})
    load.join()
    recorded = json.loads(gzip.decompress(file.read_bytes()))
    kept = folder / f"{session.spec.variant}-{requests}.trace.json.gz"
    os.replace(file, kept)
    if session.sizes.is_rehearsal:
        return {"requests": count}
    step = "DECODE" if session.spec.variant == NO_SPECULATION else "VERIFY"
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
