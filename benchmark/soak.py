"""Send random requests to servers of random configuration, until something is wrong.

    python benchmark/soak.py --minutes 30
    python benchmark/soak.py --hybrid --requests 2000
    python benchmark/soak.py --seed 7 --only-round 3

A round is one server, drawn from the seed. With `--hybrid` the target is the bundled one with recurrent
states, and the width changes from cycle to cycle. Each round checks that

- greedy answers equal the plain target's, token by token until float32 cannot separate its best two;
- streams never take a token back, counts are right, and every bad request is refused by name;
- afterwards nothing runs, no KV slot and no state is taken, the log has no traceback, and threads, file
  handles and memory are as before.

A line after each round has the figures so far, and a failure the command that repeats its round.
"""

import argparse
import concurrent.futures
import contextlib
import http.client
import itertools
import json
import os
import random
import re
import shlex
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving import (
    DFLASH2_DRAFT,
    DRAFT,
    HYBRID_DFLASH2_DRAFT,
    HYBRID_DRAFT,
    HYBRID_PEAGLE_DRAFT,
    HYBRID_TARGET,
    PEAGLE_DRAFT,
    ROOT,
    SPECULATORS_DRAFT,
    TARGET,
    Server,
    ServerDied,
    dflash_arguments,
    documented,
    heldout_prompts,
    importing,
    serve,
)
from ties import differences
from tokenizers import Tokenizer

# The scheduler counts its KV slots after every step, and a leak or a double free ends the server.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    # With a low estimate of answer lengths, the scheduler admits more requests than a small pool can finish.
    "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "8",
    # In bfloat16, states of decoded tokens would be rounded, and those of prefilled tokens not.
    "SGLANG_MAMBA_CONV_DTYPE": "float32",
    "SERVER_PATCH": "scheduled_lengths",  # of hybrids, by `write_schedules`
    **importing(ROOT / "test" / "srt" / "support" / "server_patches"),
}
# Pools are small. Other processes may take memory while a server starts, so SGLang keeps none back. Its
# watchdog mistakes a stopped server for a hanging one; hanging ones exceed the clients' patience.
FLAGS = (
    *("--dtype", "float32", "--constrained-json-disable-any-whitespace", "--watchdog-timeout", "86400"),
    *("--mem-fraction-static", "0.95", "--max-total-tokens", "16384", "--enable-custom-logit-processor"),
)
# Points at which states are kept for prompts to come are closer than by default.
HYBRID_FLAGS = (*FLAGS, "--mamba-track-interval", "64", "--max-mamba-cache-size", "128")
# Drafted tokens per cycle, in turn. The pause is longer than P-EAGLE leaves states pending.
SCHEDULE = (7, 7, 3, 0, 0, 1, 7, 0, 3, 3, 7, 1, 2, 5, 4, 6, 7, 7, 7, 0, 0, 0, 0, 0, 0, 0, 7)
BLOCKS = (None, 2, 12, 16, 32)
# What a server's processes may gain in the second half of a round: connections come and go, allocators free
# lazily.
SLACK = {"threads": 24, "handles": 64, "MB of memory": 200}
# In float32 two batch shapes agree on a log probability within about 1e-6; recurrent states carry that on. If
# two tokens are closer than this, the target has no unique answer.
TIE = 2e-5
# Seconds a client waits for a server: both may have been stopped (SIGSTOP) to make room for something else.
PATIENCE = 3600
LONG = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}
VOCABULARY = json.loads((TARGET / "config.json").read_text())["vocab_size"]
GRAMMARS = (
    {"ebnf": 'root ::= ("ab" | "cd" | "e")+ "z"'},
    {"regex": r"(def|class) [a-z_]{3,12}\(\):\n    return [0-9]{1,6}"},
    {"json_schema": json.dumps({"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]})},
)
# Answers are not compared: they are drawn, or penalized, where under overlap scheduling SGLang's own counts
# lag by a token.
LOOSE = (
    *({}, {"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.9}),
    *({"frequency_penalty": 0.7}, {"presence_penalty": -0.5}, {"repetition_penalty": 1.3}),
    {"min_new_tokens": 1},
)
# Requests that must be refused, and the words that the refusal must contain.
BAD = (
    ({"input_ids": [5, 1_000_000_000]}, "1000000000"),
    ({"text": "x", "sampling_params": {"temperature": -1}}, "temperature"),
    ({"text": "x", "sampling_params": {"top_k": 2**40}}, "top_k"),
    ({"text": "x", "return_logprob": True, "top_logprobs_num": 1_000_000}, "top_logprobs_num"),
    ({"text": "x", "sampling_params": {"regex": "[a-z"}}, ""),
    ({"text": "x", "sampling_params": {"n": 10**9}}, "n"),
)


@dataclass(frozen=True)
class Pair:
    """A target's arguments, and drafts for it."""

    plain: tuple[str, ...]
    drafts: tuple[Path, ...]
    is_hybrid: bool = False


Known = tuple[dict, dict]  # a greedy request, and the plain target's answer
DENSE = Pair(("--model-path", str(TARGET), *FLAGS), (DRAFT, DFLASH2_DRAFT, SPECULATORS_DRAFT, PEAGLE_DRAFT))
HYBRID_DRAFTS = HYBRID_DRAFT, HYBRID_DFLASH2_DRAFT, HYBRID_PEAGLE_DRAFT
HYBRID = Pair(("--model-path", str(HYBRID_TARGET), *HYBRID_FLAGS), HYBRID_DRAFTS, is_hybrid=True)


def write_schedules(folder: Path) -> dict[int | None, Path]:
    """Write a --speculative-adaptive-config for each drawn --speculative-num-draft-tokens."""
    paths = {block: folder / f"schedule-{block}.json" for block in BLOCKS}
    for block, path in paths.items():
        widths = [width if block is None else min(width, block - 1) for width in SCHEDULE]
        path.write_text(json.dumps({"schedule": widths}))
    return paths


def draw(
    generator: random.Random, pair: Pair = DENSE, schedules: dict[int | None, Path] | None = None
) -> tuple[str, ...]:
    """Draw a round's server: its arguments. schedules: of `write_schedules`, for hybrids."""
    draft = generator.choice(pair.drafts)
    arguments = dflash_arguments(draft)
    is_peagle = draft in (PEAGLE_DRAFT, HYBRID_PEAGLE_DRAFT)
    for flag, values in (
        ("--speculative-num-draft-tokens", BLOCKS),
        ("--page-size", (None, 16)),
        ("--max-running-requests", (None, None if pair.is_hybrid else 4, 12)),
        # A hybrid's states let 25 requests run, which take fewer than 3072 slots.
        ("--max-total-tokens", (16384, 1280, 1280) if pair.is_hybrid else (16384, 3072, 960)),
        ("--context-length", (None, 1024)),
        ("--speculative-draft-window-size", (None,) if is_peagle else (None, None, 64)),
        ("--speculative-draft-sample-method", (None, "probabilistic")),
        ("--chunked-prefill-size", (None, 64, 128 if pair.is_hybrid else 96)),
    ):
        value = generator.choice(values)
        arguments += [] if value is None else [flag, str(value)]
        if flag == "--speculative-num-draft-tokens":
            block = value
    if "--chunked-prefill-size" in arguments and generator.random() < 0.6:
        arguments.append("--enable-mixed-chunk")
    for flag, share in (
        ("--disable-overlap-schedule", 0.3),
        ("--speculative-adaptive", 1.0 if pair.is_hybrid else 0.0),
        ("--no-speculative-adaptive", 0.0 if pair.is_hybrid else 0.3),
        ("--disable-radix-cache", 0.1),
    ):
        arguments += [flag] if generator.random() < share else []
    if pair.is_hybrid:
        arguments += ["--speculative-copy-ahead"] if generator.random() < 0.4 else []
        arguments += ["--max-mamba-cache-size", "64"] if generator.random() < 0.4 else []
        arguments += ["--speculative-adaptive-config", str(schedules[block])]
    return (*pair.plain, *arguments)


def known_requests(plain: Server, count: int, seed: int) -> list[Known]:
    """Make greedy requests of all kinds, each with the answer of the target alone in float32."""
    from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

    generator = random.Random(seed)
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    texts = [prompt["text"] for prompt in heldout_prompts()]
    shared = tokenizer.encode("".join(texts[:8])).ids[:300]
    processor = DisallowedTokensLogitsProcessor.to_str()
    requests = []
    for _ in range(count):
        ids = tokenizer.encode(generator.choice(texts) + generator.choice(texts)).ids
        ids = ids[: generator.choice((1, 7, 40, 63, 64, 65, 128, 200, 400))]
        if generator.random() < 0.3:
            ids = shared[: generator.choice((16, 64, 100, 256))] + ids
        sampling: dict[str, Any] = {
            "temperature": 0,
            "max_new_tokens": generator.choice((1, 2, 8, 9, 24, 48, 64)),
            "ignore_eos": generator.random() < 0.5,
        }
        request = {"input_ids": ids, "sampling_params": sampling}
        match int(10 * generator.random()):
            case 0 | 1:
                sampling |= generator.choice(GRAMMARS) | {"ignore_eos": False}
            case 2:
                bias = generator.choice((-100.0, 4.0))
                sampling["logit_bias"] = {str(generator.randrange(5, VOCABULARY)): bias}
            case 3:
                sampling["stop_token_ids"] = [generator.randrange(5, VOCABULARY) for _ in range(40)]
            case 4:
                sampling["stop"] = [generator.choice(("\n\n", "self", "):", "return", " = "))]
            case 5:
                sampling["custom_params"] = {"token_ids": generator.sample(range(5, VOCABULARY), 50)}
                request["custom_logit_processor"] = processor
        requests.append(request)
    known: list[Known] = []
    # SGLang's own processor takes one list of tokens a batch.
    for is_alone, concurrency in ((False, 16), (True, 1)):
        asked = [request for request in requests if ("custom_logit_processor" in request) == is_alone]
        bodies = [{**request, "return_logprob": True, "top_logprobs_num": 2} for request in asked]
        known += zip(asked, plain.generate_many(bodies, concurrency), strict=True)
    return known


class Wrong(Exception):
    """An answer that is not as it must be."""


def send_random(
    server: Server, known: Sequence[Known], generator: random.Random, name: str
) -> tuple[str, dict]:
    """Send one random request and check its answer. `name` is unique, for aborts. Raises Wrong.

    Returns the request's kind, and the answer's `meta_info`, empty if it was not answered.
    """
    shares = {_greedy: 43, _streamed: 16, _sampled: 20, _to_the_end: 6, _aborted: 5, _walked_away: 5, _bad: 5}
    [send] = generator.choices([*shares], [*shares.values()])
    kind, request = send.__name__.strip("_"), {}
    try:
        return kind, send(server, generator.choice(known), generator, name, request) or {}
    except Wrong as wrong:
        raise Wrong(json.dumps({"kind": kind, "request": request, "wrong": str(wrong)})) from wrong


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Turn an HTTP error into Wrong."""
    try:
        yield
    except urllib.error.HTTPError as error:
        raise Wrong(f"HTTP {error.code}: {error.read().decode()[:500]}") from error


def _post(server: Server, request: dict) -> Any:
    with _errors():
        return server.post("/generate", request, PATIENCE)


def compared(known: Known, answer: dict) -> dict:
    """Return the `meta_info` of an answer that is the known one where float32 decides. Raises Wrong."""
    (request, want), got, meta = known, answer["output_ids"], answer["meta_info"]
    for different in differences([request], [answer], [want], TIE):
        raise Wrong(f"{got} instead of {want['output_ids']}: {different['got'][1:]}, {different['want'][1:]}")
    tokens = [token for _, token, *_ in meta.get("output_token_logprobs", [(0, token) for token in got])]
    if meta["completion_tokens"] != len(got) or tokens != got:
        raise Wrong(f"{meta['completion_tokens']} are counted, {got} were received, {tokens} have log probs")
    return meta


def _greedy(server, known: Known, generator, name, request) -> dict:
    request |= known[0] | {"return_logprob": generator.random() < 0.2}
    if generator.random() < 0.15:
        request["sampling_params"] = known[0]["sampling_params"] | {"n": 2}
        return [compared(known, answer) for answer in _post(server, request)][0]
    return compared(known, _post(server, request))


def _streamed(server, known: Known, generator, name, request) -> dict:
    request |= known[0] | {"stream": True}
    emitted: list[int] = []
    chunk: dict = {"error": "nothing was received"}
    for chunk in _chunks(server, request):
        if "error" in chunk:
            break
        ids = chunk["output_ids"]
        if ids[: len(emitted)] != emitted:
            raise Wrong(f"{emitted} was emitted, and taken back for {ids}")
        emitted = ids
    if "error" in chunk:
        raise Wrong(f"ended after {len(emitted)} tokens: {chunk['error']}")
    return compared(known, chunk)


def _sampled(server, known: Known, generator, name, request) -> dict:
    """Send a request without a known answer; check the number and range of its tokens."""
    length = generator.choice((1, 5, 24, 40))
    sampling = {"temperature": generator.choice((0.3, 0.7, 1.0, 1.3)), **generator.choice(LOOSE)}
    sampling |= {"max_new_tokens": length, "ignore_eos": True}
    sampling |= {
        k: v for k, v in known[0]["sampling_params"].items() if k == "custom_params"
    }  # of a processor
    request |= known[0] | {"sampling_params": sampling}
    answer = _post(server, request)
    got, reason = answer["output_ids"], answer["meta_info"]["finish_reason"]
    if len(got) != length or reason["type"] != "length" or not all(0 <= token < VOCABULARY for token in got):
        raise Wrong(f"{len(got)} tokens of {length}, {reason}: {got}")
    return answer["meta_info"]


def _to_the_end(server, known: Known, generator, name, request) -> dict:
    """Ask for more than the context or the pool holds: the answer ends with `length` at what fits."""
    ids = known[0]["input_ids"]
    most = server.get("/v1/models")["data"][0]["max_model_len"]
    request |= {"input_ids": ids, "sampling_params": LONG | {"max_new_tokens": most - len(ids)}}
    answer = _post(server, request)
    meta = answer["meta_info"]
    if meta["finish_reason"]["type"] != "length" or meta["completion_tokens"] != len(answer["output_ids"]):
        raise Wrong(f"{meta['finish_reason']}, {meta['completion_tokens']}, {len(answer['output_ids'])}")
    return meta


def _aborted(server, known: Known, generator, name, request) -> None:
    request |= known[0] | {"rid": name, "sampling_params": LONG}

    def abort() -> None:
        with contextlib.suppress(OSError):  # if the server has ended, the request itself reports it
            server.post("/abort_request", {"rid": name}, PATIENCE)

    timer = threading.Timer(generator.random(), abort)
    timer.start()
    try:
        end = _post(server, request)["meta_info"]["finish_reason"]
    except Wrong:
        return  # the answer if it is aborted before it runs
    finally:
        timer.join()
    if end["type"] not in ("abort", "length"):
        raise Wrong(str(end))


def _walked_away(server, known: Known, generator, name, request) -> None:
    """Close the connection, before the first token or after some."""
    request |= known[0] | {"stream": True, "sampling_params": LONG}
    for _ in zip(range(generator.choice((1, 2, 11))), _chunks(server, request)):
        pass


def _bad(server, known, generator, name, request) -> None:
    bad, words = generator.choice(BAD)
    request |= bad
    try:
        answer = _post(server, request)
    except Wrong as refusal:
        if not str(refusal).startswith("HTTP 400") or words not in str(refusal):
            raise Wrong(f"{refusal}, should name {words!r}") from refusal
        return
    raise Wrong(f"was answered: {str(answer)[:500]}")


def _chunks(server: Server, request: dict) -> Iterator[dict]:
    """Send a request, and yield the chunks of its stream."""
    headers = {"Content-Type": "application/json"}
    call = urllib.request.Request(f"{server.url}/generate", json.dumps(request).encode(), headers)
    with _errors(), urllib.request.urlopen(call, timeout=PATIENCE) as response:
        yield from (json.loads(line[6:]) for line in response if line.startswith(b"data: {"))


def resources(server: Server) -> dict[str, float]:
    """Return the sums of `SLACK`'s quantities over all processes of a server, which has its own session."""
    found = dict.fromkeys(SLACK, 0.0)
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(entry.name)) == server.process.pid:
                pages = int((entry / "statm").read_text().split()[1])
                sizes = len(os.listdir(entry / "task")), len(os.listdir(entry / "fd"))
                for name, size in zip(SLACK, (*sizes, pages * os.sysconf("SC_PAGE_SIZE") / 2**20)):
                    found[name] += size
        except (ProcessLookupError, FileNotFoundError):
            continue  # ended meanwhile
    return found


def run_round(
    server: Server, known: list[Known], requests: int, seed: str, concurrency: int = 16
) -> tuple[Counter, list[str]]:
    """Send random requests; return the counts by kind, and what went wrong, a line each."""
    counts: Counter = Counter()
    wrong: list[str] = []

    def send_one(number: int) -> None:
        name = f"{seed}-{number}"
        try:
            kind, meta = send_random(server, known, random.Random(name), name)
        except (Wrong, OSError, http.client.HTTPException, ValueError) as error:  # also cut answers
            wrong.append(f"request {number}: {error!r}")
            return
        counts.update({kind: 1, "cycles": sum(meta.get("spec_correct_drafts_histogram") or [])})
        counts.update({"tokens": meta.get("completion_tokens", 0)})
        counts.update({"retractions": meta.get("num_retractions", 0)})

    before, log_before = None, len(server.log())
    with concurrent.futures.ThreadPoolExecutor(concurrency) as pool:
        for number, _ in enumerate(pool.map(send_one, range(requests)), start=1):
            counts["requests"] = number
            if number == requests // 2:
                before = resources(server)
            if server.process.poll() is not None:
                break
    if (code := server.process.poll()) is not None:
        return counts, [*wrong, f"the server ended with code {code}: {server.log()[-3000:]}"]
    return counts, wrong + problems_after(server, before, server.log()[log_before:])


def problems_after(server: Server, before: dict[str, float] | None, log: str) -> list[str]:
    """List what is wrong once all requests are over. before: of `resources`, amid them."""
    server.flush_cache()
    load = server.get("/v1/loads")["loads"][0]
    names = "num_running_reqs", "num_waiting_reqs", "num_used_tokens"
    left = {name: load[name] for name in names if load[name]}
    found = [f"left when all requests are over: {left}"] if left else []
    if tracebacks := re.findall(r"Traceback \(most recent call last\)(?:\n.*){0,30}", log):
        found.append(f"{len(tracebacks)} tracebacks in the log, such as {tracebacks[0][-1500:]}")
    if before is not None:
        after = resources(server)
        grown = [name for name, slack in SLACK.items() if after[name] > before[name] + slack]
        found += [f"{name}: {before[name]:.0f} before, {after[name]:.0f} after" for name in grown]
    return found


def soak(options: argparse.Namespace, folder: Path) -> int:
    """Run rounds; return the exit code. folder: for files that servers read."""
    pair, schedules = HYBRID if options.hybrid else DENSE, write_schedules(folder)
    with serve(*pair.plain, env=ENVIRONMENT, timeout=PATIENCE) as plain:
        known = known_requests(plain, options.known, options.seed)
    totals, started = Counter(retractions=0, wrong=0), time.monotonic()
    for number in itertools.count(options.only_round or 0):
        seed, count = f"{options.seed}-{number}", options.per_round
        if options.requests is not None:
            count = min(count, options.requests - totals["requests"])
        arguments = draw(random.Random(seed), pair, schedules)
        print(f"round {number}: {shlex.join(arguments[len(pair.plain) :])}", flush=True)
        try:
            with serve(*arguments, env=ENVIRONMENT, timeout=PATIENCE) as server:
                counts, wrong = run_round(server, known, count, seed, options.concurrency)
        except ServerDied as error:
            counts, wrong = Counter(), [f"the server did not start: {error}"]
        totals.update({**counts, "rounds": 1, "wrong": len(wrong), "failed rounds": bool(wrong)})
        minutes = (time.monotonic() - started) / 60
        print(json.dumps({**totals, "seed": options.seed, "minutes": round(minutes, 1)}), flush=True)
        if wrong:
            again = f"--seed {options.seed} --known {options.known} --per-round {count} --only-round {number}"
            again += f" --concurrency {options.concurrency}" + " --hybrid" * pair.is_hybrid
            print("WRONG:", *wrong, f"again: python benchmark/soak.py {again}", sep="\n", flush=True)
        is_over = options.only_round is not None or totals["requests"] >= (options.requests or float("inf"))
        if is_over or minutes > (options.minutes or float("inf")):
            return int(totals["wrong"] > 0)


def main() -> int:
    parser = documented(__doc__)
    parser.add_argument("--hybrid", action="store_true", help="the target with recurrent states")
    parser.add_argument("--requests", type=int, help="all in all (default 2000, unless --minutes)")
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--per-round", type=int, default=500, help="requests per server")
    parser.add_argument("--known", type=int, default=300, help="greedy requests with known answers")
    parser.add_argument("--concurrency", type=int, help="default 16, or 32 with --hybrid")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only-round", type=int, help="repeat one round")
    options = parser.parse_args()
    if options.requests is None and options.minutes is None:
        options.requests = 2000
    options.concurrency = options.concurrency or (32 if options.hybrid else 16)
    with tempfile.TemporaryDirectory() as folder:
        return soak(options, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
