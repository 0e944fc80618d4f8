"""Steps on one server: the first request, and loads."""

import contextlib
import http.client
import json
import random
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from gpu import held
from gpu.servers import ACCEPT_LENGTH, ServerSpec
from gpu.state import ask_gpu
from serving import Server, ready

START_TIMEOUT_S = 480  # kernels are compiled on their first use
ACCEPT_LENGTH_SLACK = 0.1  # a request's last block is cut at its end
STREAM_INTERVAL = 32  # tokens a chunk: each chunk holds all ids so far
LOG_END = 6000  # characters of a server's log that an error carries
OUR_WORKER = "sglang-dflash DFlashWorker with "  # in the log, when this plugin's worker is built
GREEDY, SAMPLED = {"temperature": 0}, {"temperature": 0.7, "top_p": 0.9}


@dataclass(frozen=True)
class Sizes:
    """Sizes of a GPU run, or of its rehearsal on a CPU."""

    is_rehearsal: bool = False
    most_requests: int = 96
    context: int = 256  # tokens of a prompt; the most in a rehearsal
    length: int = 40_000  # tokens of a prompt and its answer, which no request reaches
    settle: float = 2.0  # seconds in which all requests run before the window
    window: float = 4.0  # seconds

    def requests(self, wanted: int) -> int:
        return min(wanted, self.most_requests)


GPU_SIZES = Sizes()
REHEARSAL_SIZES = Sizes(True, 3, 16, 2000, 0.3, 0.7)


@dataclass(frozen=True)
class Session:
    """What a step works with: its part, and the part's server, if it has one."""

    sizes: Sizes
    part: "gpu.parts.Part"  # noqa: F821  # which imports this file
    deadline: float  # by time.monotonic()
    server: Server | None = None
    start_seconds: float = 0.0


@contextlib.contextmanager
def running(spec: ServerSpec, begun: Callable[[], None]) -> Iterator[Server]:
    """Run the server, the held one if it is this one. Raises RuntimeError for an error or a wrong worker."""
    released = held.take(spec)
    begun()
    try:
        with ready(released, START_TIMEOUT_S) as server:
            try:
                if (OUR_WORKER in server.log()) != spec.is_ours:
                    raise RuntimeError("another worker serves")
                yield server
            except Exception as error:  # the log goes with the server, and says why it stopped answering
                why, end = f"{type(error).__name__}: {error}", server.log()[-LOG_END:]
                raise RuntimeError(f"{why}; the server's log ends:\n{end}") from error
    finally:
        held.end_measured()


def first_request(session: Session) -> dict:
    """Send a greedy request to a new server: {"seconds" of the start, "problems"}."""
    params = GREEDY | {"max_new_tokens": 16}
    answer = session.server.generate(input_ids=list(range(100, 116)), sampling_params=params)
    return {"seconds": round(session.start_seconds, 1), "problems": ends([answer])}


def ends(answers: Sequence[dict]) -> list[str]:
    """Return the ends of answers that did not end at their length or a stop."""
    found = [answer["meta_info"]["finish_reason"] for answer in answers]
    wanted = ("length", "stop")
    return [str(end) for end in found if end["type"] not in wanted or end.get("matched") == "NaN happened"]


class Stream(threading.Thread):
    """A streamed request: when each chunk came, and the tokens until then.

    end: the last chunk's "meta_info". error: what came instead of an answer.
    """

    def __init__(self, url: str, request: dict):
        super().__init__(daemon=True)
        body, kind = json.dumps(request).encode(), {"Content-Type": "application/json"}
        self._request = urllib.request.Request(f"{url}/generate", body, kind)
        self.times: list[float] = []
        self.tokens: list[int] = []
        self.end: dict | None = None
        self.error = ""

    def run(self) -> None:
        try:
            with urllib.request.urlopen(self._request, timeout=600) as lines:
                for line in lines:
                    if line.startswith(b"data: {"):
                        self._take(json.loads(line[6:]))
        except (OSError, http.client.HTTPException) as error:
            self.error = f"{type(error).__name__}: {error}"

    def _take(self, chunk: dict) -> None:
        if "meta_info" not in chunk:
            self.error = str(chunk)
            return
        self.times.append(time.monotonic())
        self.tokens.append(chunk["meta_info"]["completion_tokens"])
        if chunk["meta_info"]["finish_reason"] is not None:
            self.end = chunk["meta_info"]


def until(streams: Sequence[Stream], is_so: Callable[[Stream], bool]) -> None:
    """Wait until it is so of all streams. Raises RuntimeError if one ends before."""
    while not all(map(is_so, streams)):
        if ended := [stream for stream in streams if not stream.is_alive()]:
            raise RuntimeError(f"{len(ended)} of {len(streams)} requests ended too early. {ended[0].error}")
        time.sleep(0.02)


def measure(session: Session, requests: int, context: int | None = None, sampling: dict = GREEDY) -> dict:
    """Measure requests that begin at once, in a window of time in which all of them run.

    context: tokens of a prompt; None: as `sizes` say. Prompts are random, without a common prefix, of ids
    that every vocabulary here has. Returns `rates`, "memory left" on a GPU, "widths" if they adapt, and
    "problems". Raises RuntimeError if a request ends before the window does.
    """
    server, sizes = session.server, session.sizes
    server.flush_cache()
    context = sizes.context if context is None or sizes.is_rehearsal else context
    draw = random.Random(f"{requests} {context}")
    params = {"max_new_tokens": sizes.length - context, "ignore_eos": True}
    params |= {"stream_interval": STREAM_INTERVAL, **sampling}
    streams = []
    for _ in range(sizes.requests(requests)):
        prompt = [draw.randrange(1000, 100_000) for _ in range(context)]
        request = {"input_ids": prompt, "sampling_params": params, "stream": True}
        streams.append(Stream(server.url, request))
        streams[-1].start()
    try:
        until(streams, lambda stream: bool(stream.times))
        begin = time.monotonic() + sizes.settle
        until(streams, lambda stream: stream.times[-1] > begin + sizes.window)
        [state] = server.get("/server_info")["internal_states"]
        free = ask_gpu("memory.free")
    finally:
        if server.process.poll() is None:
            server.post("/abort_request", {"abort_all": True})
        for stream in streams:
            stream.join()
    found = rates(streams, begin, begin + sizes.window) | {"problems": []}
    kept = found["tokens_per_block"]
    simulates = "SGLANG_SIMULATE_ACC_LEN" in session.part.spec.environment
    if simulates and abs(kept - ACCEPT_LENGTH) > ACCEPT_LENGTH_SLACK and not sizes.is_rehearsal:
        found["problems"].append(f"{kept:.2f} tokens a block, but the server simulates {ACCEPT_LENGTH}")
    more = {"memory left": free, "widths": state.get("speculative_width")}
    return found | {name: value for name, value in more.items() if value}


def rates(streams: Sequence[Stream], begin: float, end: float) -> dict:
    """Return {"requests", "tokens_per_second" of all, "cycle_ms", "tokens_per_block"} between two moments.

    Prefill, starts and ends have no part. tokens_per_block: of whole answers; without a draft 1.
    """
    moments = [np.interp((begin, end), stream.times, stream.tokens) for stream in streams]
    rate = float(sum(many - few for few, many in moments)) / (end - begin)
    # The first token of an answer comes from its prompt's own forward.
    drafted = sum(stream.tokens[-1] - 1 for stream in streams)
    kept = drafted / sum(stream.end.get("spec_verify_ct", stream.tokens[-1] - 1) for stream in streams)
    numbers = {"tokens_per_second": rate, "cycle_ms": 1e3 * kept * len(streams) / rate}
    return {"requests": len(streams), **numbers, "tokens_per_block": kept}
