"""Steps on one server: the first requests, loads, a burst, a profile."""

import contextlib
import http.client
import json
import os
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gpu import held
from gpu.servers import ACCEPT_LENGTH, ServerSpec
from gpu.state import ask_gpu
from serving import Server, ready

START_TIMEOUT_S = 480  # kernels are compiled on their first use
ACCEPT_LENGTH_SLACK = 0.1  # a request's last block is cut at its end
PROFILED_S = 0.3
STREAM_INTERVAL = 32  # tokens a chunk: each chunk holds all ids so far
LOG_END = 6000  # characters of a server's log that an error carries
OUR_WORKER = "sglang-dflash DFlashWorker with "  # in the log, when this plugin's worker is built
GREEDY, SAMPLED = {"temperature": 0}, {"temperature": 0.7, "top_p": 0.9}
# A short request of each kind compiles what it needs before anything is timed.
SHORT = GREEDY | {"max_new_tokens": 16}
KINDS = {
    "greedy": {"sampling_params": SHORT},
    "sampled": {"sampling_params": SHORT | SAMPLED},
    "penalised": {"sampling_params": SHORT | {"frequency_penalty": 0.6, "presence_penalty": 0.3}},
    "biased": {"sampling_params": SHORT | {"logit_bias": {"13": 1.5}}},
    "with log probabilities": {"sampling_params": SHORT, "return_logprob": True, "top_logprobs_num": 2},
    "with a grammar": {"sampling_params": SHORT | {"regex": "[a-z ]{8,48}"}},
    "with a least length": {"sampling_params": SHORT | {"min_new_tokens": 8}},
}


@dataclass(frozen=True)
class Sizes:
    """Sizes of a GPU run, or of its rehearsal on a CPU."""

    is_rehearsal: bool = False
    most_requests: int = 96
    context: int = 256  # tokens of a prompt; the most in a rehearsal
    marks: tuple[int, ...] = (128, 576, 1024, 1472, 1920)  # tokens of an answer, timed from one to the next
    tail: int = 384  # tokens after the last mark, while other requests reach it
    mixed_tokens: int = 8000  # of an answer in a mixed load, which no request reaches
    settle: float = 2.0  # seconds before the window of a mixed load
    window: float = 4.0
    burst_tokens: int = 256

    def requests(self, wanted: int) -> int:
        return min(wanted, self.most_requests)


GPU_SIZES = Sizes()
REHEARSAL_SIZES = Sizes(True, 3, 16, (35, 49, 63, 77, 91), 70, 2000, 0.3, 0.7, 16)


@dataclass(frozen=True)
class Session:
    """What a step works with: its part, a folder for traces, and the part's server, if it has one."""

    sizes: Sizes
    part: "gpu.parts.Part"  # noqa: F821  # which imports this file
    folder: Path
    deadline: float  # by time.monotonic()
    server: Server | None = None
    start_seconds: float = 0.0


@contextlib.contextmanager
def running(spec: ServerSpec, begun: Callable[[], None]) -> Iterator[Server]:
    """Run the server, the one that is held if it is this one.

    begun: Called when it has been released. Raises RuntimeError for an error or a wrong worker.
    """
    released = held.take(spec)
    begun()
    try:
        with ready(released, START_TIMEOUT_S) as server:
            try:
                log = server.log()
                if (OUR_WORKER in log) != spec.is_ours:
                    raise RuntimeError("another worker serves")
                yield server
            except Exception as error:  # the log goes with the server, and says why it stopped answering
                end = server.log()[-LOG_END:]
                raise RuntimeError(
                    f"{type(error).__name__}: {error}; the server's log ends:\n{end}"
                ) from error
    finally:
        held.end_measured()


def first_requests(session: Session) -> dict:
    """Send a short request of each kind, alone and then all at once, and look for `says` in the log.

    A server of a shape gets a greedy one: nothing else is measured of it. Returns {"seconds" of the start,
    "problems"}.
    """
    is_shape = "--skip-tokenizer-init" in session.part.spec.arguments
    kinds = {"greedy": KINDS["greedy"]} if is_shape else KINDS
    prompt = {"input_ids": list(range(100, 116))}  # of every vocabulary here
    requests = {name: prompt | kind for name, kind in kinds.items()}
    problems = [line for name, request in requests.items() for line in _ask(session.server, name, request)]
    if not problems:
        together = session.server.generate_many(list(requests.values()), len(requests))
        problems = [line for name, answer in zip(requests, together) for line in broken(name, answer)]
    if not session.sizes.is_rehearsal:
        log = session.server.log()
        problems += [
            f"the server's log does not say {line!r}" for line in session.part.says if line not in log
        ]
    return {"seconds": round(session.start_seconds, 1), "problems": problems}


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


class Stream(threading.Thread):
    """A streamed request.

    Attributes:
        times, tokens: Of each chunk when it came, and of all chunks until then.
        end: The last chunk's "meta_info". None: the answer has not ended.
        error: What came instead of an answer, if anything.
    """

    def __init__(self, url: str, request: dict):
        super().__init__(daemon=True)
        self._request = urllib.request.Request(
            url + "/generate", json.dumps(request).encode(), {"Content-Type": "application/json"}
        )
        self.times: list[float] = []
        self.tokens: list[int] = []
        self.end: dict | None = None
        self.error = ""

    def run(self) -> None:
        try:
            with urllib.request.urlopen(self._request, timeout=600) as lines:
                for line in lines:
                    if line.startswith(b"data: {"):
                        self._take(line[6:].decode())
        except (OSError, http.client.HTTPException) as error:
            self.error = f"{type(error).__name__}: {error}"

    def _take(self, chunk: str) -> None:
        info = json.loads(chunk).get("meta_info")
        if info is None:
            self.error = chunk
            return
        self.times.append(time.monotonic())
        self.tokens.append(info["completion_tokens"])
        if info["finish_reason"] is not None:
            self.end = info


def answer_streams(
    session: Session, requests: int, new_tokens: int, context: int | None = None, sampling: dict = GREEDY
) -> list[Stream]:
    """Start streams of random prompts without a common prefix, of ids that every vocabulary here has."""
    sizes = session.sizes
    context = sizes.context if context is None or sizes.is_rehearsal else context
    draw = random.Random(f"{requests} {context} {new_tokens}")
    params = {
        "max_new_tokens": new_tokens,
        "ignore_eos": True,
        "stream_interval": STREAM_INTERVAL,
        **sampling,
    }
    streams = [
        Stream(
            session.server.url,
            {
                "input_ids": [draw.randrange(1000, 100_000) for _ in range(context)],
                "sampling_params": params,
                "stream": True,
            },
        )
        for _ in range(sizes.requests(requests))
    ]
    for stream in streams:
        stream.start()
    return streams


def until(streams: Sequence[Stream], is_so: Callable[[Stream], bool]) -> None:
    """Wait until it is so of all streams. Raises RuntimeError if one ends before."""
    while not all(map(is_so, streams)):
        if ended := [stream for stream in streams if not stream.is_alive()]:
            raise RuntimeError(f"{len(ended)} of {len(streams)} requests ended too early. {ended[0].error}")
        time.sleep(0.02)


@contextlib.contextmanager
def aborted(streams: Sequence[Stream], server: Server) -> Iterator[None]:
    """End the streams when the block ends."""
    try:
        yield
    finally:
        if server.process.poll() is None:
            server.post("/abort_request", {"abort_all": True})
        for stream in streams:
            stream.join()


def measure_load(
    session: Session, requests: int, context: int | None = None, sampling: dict = GREEDY
) -> dict:
    """Measure like requests: {"requests", and `between_marks`, "problems", and "widths" if they adapt}."""
    server, marks = session.server, session.sizes.marks
    server.flush_cache()
    streams = answer_streams(session, requests, marks[-1] + session.sizes.tail, context, sampling)
    for stream in streams:
        stream.join()
    found = {"requests": len(streams), **between_marks(streams, marks), "problems": []}
    kept = found["tokens_per_block"]
    simulates = "SGLANG_SIMULATE_ACC_LEN" in session.part.spec.environment
    if simulates and abs(kept - ACCEPT_LENGTH) > ACCEPT_LENGTH_SLACK and not session.sizes.is_rehearsal:
        found["problems"].append(f"{kept:.2f} tokens a block, but the server simulates {ACCEPT_LENGTH}")
    return found | widths(server)


def between_marks(streams: Sequence[Stream], marks: Sequence[int]) -> dict:
    """Take the time from mark to mark, which prefill and the requests' starts and ends are no part of.

    Args:
        streams: Of like requests, which have ended.
        marks: Tokens of each answer.

    Returns:
        "cycle_ms" and "tokens_per_second" of the windows' median, "cycle_ms_range", "tokens_per_block" of
        whole answers. Raises RuntimeError if not all requests ran between the first mark and the last.
    """
    if lost := [stream for stream in streams if stream.end is None or stream.tokens[-1] < marks[-1]]:
        raise RuntimeError(f"{len(lost)} of {len(streams)} answers did not end. {lost[0].error}")
    times = [max(np.interp(mark, stream.tokens, stream.times) for stream in streams) for mark in marks]
    if min(stream.times[-1] for stream in streams) < times[-1]:
        raise RuntimeError(f"not all of {len(streams)} requests ran at once")
    # The first token of an answer comes from its prompt's own forward.
    drafted = sum(stream.tokens[-1] - 1 for stream in streams)
    kept = drafted / sum(stream.end.get("spec_verify_ct") or stream.tokens[-1] - 1 for stream in streams)
    windows = np.diff(times) / np.diff(marks)  # seconds a token of each answer
    return {
        "tokens_per_second": len(streams) / float(np.median(windows)),
        "cycle_ms": 1e3 * kept * float(np.median(windows)),
        "cycle_ms_range": [1e3 * kept * float(windows.min()), 1e3 * kept * float(windows.max())],
        "tokens_per_block": kept,
    }


def measure_mixed(session: Session, requests: int) -> dict:
    """Measure requests that accept differently, all of them running, in a window of time.

    Returns {"requests", "tokens_per_second" of all, "problems", and "widths" if they adapt}.
    """
    server, sizes = session.server, session.sizes
    server.flush_cache()
    streams = answer_streams(session, requests, sizes.mixed_tokens)
    with aborted(streams, server):
        until(streams, lambda stream: bool(stream.times))
        begin = time.monotonic() + sizes.settle
        end = begin + sizes.window
        until(streams, lambda stream: stream.times[-1] > end)
        report = widths(server)
    moments = [np.interp((begin, end), stream.times, stream.tokens) for stream in streams]
    rate = float(sum(many - few for few, many in moments)) / sizes.window
    return {"requests": len(streams), "tokens_per_second": rate, "problems": [], **report}


def measure_burst(session: Session, requests: int) -> dict:
    """Send sampled requests at once, and measure the time until the last answer and the memory left.

    Returns {"requests", "seconds", "tokens_per_second", "memory left" on a GPU, "problems"}.
    """
    begun = time.monotonic()
    streams = answer_streams(session, requests, session.sizes.burst_tokens, sampling=SAMPLED)
    for stream in streams:
        stream.join()
    seconds = time.monotonic() - begun
    lost = [
        stream for stream in streams if stream.end is None or stream.end["finish_reason"]["type"] != "length"
    ]
    tokens = sum(stream.tokens[-1] for stream in streams if stream.tokens)
    found = {"requests": len(streams), "seconds": seconds, "tokens_per_second": tokens / seconds}
    if (free := ask_gpu("memory.free")) is not None:
        found["memory left"] = free
    problems = (
        [f"{len(lost)} of {len(streams)} answers were lost: {lost[0].end} {lost[0].error}"] if lost else []
    )
    return found | {"problems": problems}


def widths(server: Server) -> dict:
    """Return {"widths"} if widths adapt, else nothing."""
    report = server.get("/server_info")["internal_states"][0].get("speculative_width")
    return {"widths": report} if report else {}


def profile(session: Session, requests: int) -> dict:
    """Record a torch profiler trace of decoding, which is read at home: {"requests", "trace"}, its file."""
    server, folder = session.server, session.folder.absolute() / "traces"
    folder.mkdir(parents=True, exist_ok=True)
    known = set(folder.iterdir())
    streams = answer_streams(session, requests, session.sizes.mixed_tokens)
    with aborted(streams, server):
        until(streams, lambda stream: len(stream.times) > 1)
        # Stacks and shapes would slow the host down several times over, and its time is looked for.
        options = {"activities": ["CPU", "GPU"], "with_stack": False, "record_shapes": False}
        server.post("/start_profile", {"output_dir": str(folder), **options})
        time.sleep(PROFILED_S)
        server.post("/stop_profile", {})  # answers when the trace is written
    [file] = set(folder.iterdir()) - known
    kept = folder / f"{session.part.name.replace('/', '-')}-{requests}.trace.json.gz"
    os.replace(file, kept)
    return {"requests": len(streams), "trace": kept.name}
