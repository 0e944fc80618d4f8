"""Send random requests to servers of random configuration, until something is wrong.

    python benchmark/soak.py --minutes 30
    python benchmark/soak.py --requests 20000 --seed 7
    python benchmark/soak.py --hybrid --requests 2000

A round is one server: draft, block size (8, 16 and 32 slots among them), context, pages, chunking, mixed
batches, pool, overlap, adaptive width, window and probabilistic drafting are drawn from the seed. Requests
are of every kind that users mix, including logit processors, tools, answers up to the end of the context or
the pool, aborts, disconnects and bad ones. With `--hybrid` the target is the bundled one with recurrent
states, in two rounds of three with a vision tower and pictures in a third of the prompts; every round changes
the width from cycle to cycle, and two of three have a pool so small that requests are retracted. Each round
checks that

- greedy answers equal the plain target's, token by token until float32 cannot separate its best two;
- streams never take a token back, and counts are right;
- every bad request is refused by name;
- afterwards nothing runs, no KV slot and no state is taken, the log has no traceback, and threads, file
  handles and memory are as before.

The last line has the figures. A failure is printed with the command that repeats its round:

    python benchmark/soak.py --seed 7 --only-round 3
"""

import argparse
import concurrent.futures
import dataclasses
import json
import os
import random
import re
import shlex
import signal
import sys
import tempfile
import time
from collections import Counter
from http.client import HTTPException
from pathlib import Path

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
    importing,
    serve,
)
from soak_requests import PATIENCE, Known, Wrong, known_requests, send_random
from vision_target import write_vision_target

PATCHES = ROOT / "test" / "srt" / "support" / "server_patches"
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
    # Hybrids follow a schedule of lengths (`write_schedules`).
    "SERVER_PATCH": "scheduled_lengths",
    **importing(PATCHES),
}
# SGLang's watchdog mistakes a stopped server for a hanging one; hanging ones exceed the clients' patience.
NO_WATCHDOG = ("--watchdog-timeout", "86400")
# Pools are small. Other processes may take memory while a server starts, so SGLang keeps none back.
FLAGS = (
    *("--dtype", "float32", "--constrained-json-disable-any-whitespace", *NO_WATCHDOG),
    *("--mem-fraction-static", "0.95", "--max-total-tokens", "16384", "--enable-custom-logit-processor"),
    *("--tool-call-parser", "hermes", "--reasoning-parser", "qwen3-thinking"),
)
PLAIN = ("--model-path", str(TARGET), *FLAGS)
# Drafted tokens per cycle, in turn. The pause is longer than P-EAGLE leaves states pending.
SCHEDULE = (7, 7, 3, 0, 0, 1, 7, 0, 3, 3, 7, 1, 2, 5, 4, 6, 7, 7, 7, 0, 0, 0, 0, 0, 0, 0, 7)
# Positions between two points at which states are kept for prompts to come: fewer than by default.
GRID = 64
BLOCKS = (None, 2, 12, 16, 32)
# MB of resident memory that a server may gain in the second half of a round: allocators free lazily.
MEMORY_SLACK_MB = 200
SHOWN = 80
# Kinds of requests whose answers are compared with the plain target's.
COMPARED = ("greedy", "streamed", "with_logprobs")


@dataclasses.dataclass(frozen=True)
class Pair:
    """A target and drafts for it. image_tokens: ids of a picture in a prompt."""

    plain: tuple[str, ...]
    drafts: tuple[Path, ...]
    is_hybrid: bool = False
    image_tokens: tuple[int, ...] = ()

    @classmethod
    def hybrids(cls, folder: Path) -> "tuple[Pair, ...]":
        """Return the hybrid pair with and without a vision tower."""
        start, end, picture, _ = write_vision_target(folder)
        drafts = HYBRID_DRAFT, HYBRID_DFLASH2_DRAFT, HYBRID_PEAGLE_DRAFT
        more = (*FLAGS, "--mamba-track-interval", str(GRID), "--max-mamba-cache-size", "128")
        seen = cls(("--model-path", str(folder), *more), drafts, True, (start, picture, end))
        return seen, cls(("--model-path", str(HYBRID_TARGET), *more), drafts, True), seen


DENSE = Pair(PLAIN, (DRAFT, DFLASH2_DRAFT, SPECULATORS_DRAFT, PEAGLE_DRAFT))


def write_schedules(folder: Path) -> dict[int | None, Path]:
    """Write a --speculative-adaptive-config for each drawn --speculative-num-draft-tokens."""
    paths = {}
    for block in BLOCKS:
        paths[block] = folder / f"schedule-{block}.json"
        widths = [width if block is None else min(width, block - 1) for width in SCHEDULE]
        paths[block].write_text(json.dumps({"schedule": widths}))
    return paths


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One round's server, beyond the target."""

    arguments: tuple[str, ...]

    @classmethod
    def draw(
        cls, generator: random.Random, pair: Pair = DENSE, schedules: dict[int | None, Path] | None = None
    ) -> "Configuration":
        """Draw flags. schedules: of `write_schedules`, for hybrids."""
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
        return cls((*pair.plain, *arguments))


@dataclasses.dataclass(frozen=True)
class Resources:
    """Sums over a server's processes."""

    threads: int
    handles: int
    memory_mb: float

    @classmethod
    def read(cls, server: Server) -> "Resources":
        threads = handles = pages = 0
        for process in _processes(server.process.pid):
            threads += len(os.listdir(f"/proc/{process}/task"))
            handles += len(os.listdir(f"/proc/{process}/fd"))
            pages += int(Path(f"/proc/{process}/statm").read_text().split()[1])
        return cls(threads, handles, pages * os.sysconf("SC_PAGE_SIZE") / 2**20)

    def leaks_since(self, before: "Resources") -> list[str]:
        """List what grew; a few threads and handles come and go with connections."""
        found = []
        for name, slack in (("threads", 24), ("handles", 64), ("memory_mb", MEMORY_SLACK_MB)):
            old, new = getattr(before, name), getattr(self, name)
            if new > old + slack:
                found.append(f"{name}: {old:.0f} before, {new:.0f} after")
        return found


def _processes(session: int) -> list[int]:
    """List all processes of a server, which has a separate session."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.getsid(int(entry.name)) == session:
                found.append(int(entry.name))
        except ProcessLookupError:
            continue  # ended meanwhile
    return found


def run_round(
    server: Server,
    known: list[Known],
    requests: int,
    seed: str,
    concurrency: int = 16,
    progress=lambda counts: None,
) -> tuple[Counter, list[str]]:
    """Send random requests; return the counts by kind, and what went wrong, a line each."""
    counts: Counter = Counter()
    wrong: list[str] = []

    def send_one(number: int) -> None:
        generator = random.Random(f"{seed}-{number}")
        try:
            kind, request, meta = send_random(server, known, generator, f"soak-{seed}-{number}")
        except Wrong as error:
            wrong.append(f"request {number}: {error}")
            return
        except (OSError, HTTPException, ValueError) as error:  # also answers that are cut off
            wrong.append(f"request {number}: the server did not answer: {error!r}")
            return
        meta = meta or {}
        counts.update({kind: 1, "tokens": meta.get("completion_tokens", 0)})
        counts.update({"retractions": meta.get("num_retractions", 0)})
        length = meta.get("prompt_tokens", 0)
        counts.update(
            {"across the grid": length // GRID < (length + meta.get("completion_tokens", 0)) // GRID}
        )
        counts.update({"cycles": sum(meta.get("spec_correct_drafts_histogram") or [])})
        counts.update({"cached tokens": meta.get("cached_tokens", 0)})
        counts.update({"compared": kind in COMPARED, "with pictures": "image_data" in request})
        counts.update({"compared, with pictures": kind in COMPARED and "image_data" in request})

    before, log_before = None, len(server.log())
    with concurrent.futures.ThreadPoolExecutor(concurrency) as pool:
        for number, _ in enumerate(pool.map(send_one, range(requests)), start=1):
            counts["requests"] = number
            progress(counts)
            if number == requests // 2:
                before = Resources.read(server)
            if server.process.poll() is not None:
                break
    if server.process.poll() is not None:
        return counts, [
            *wrong,
            f"the server ended with code {server.process.returncode}: {server.log()[-3000:]}",
        ]
    return counts, wrong + problems_after(server, before, server.log()[log_before:])


def problems_after(server: Server, before: Resources | None, log: str) -> list[str]:
    """List what is wrong once all requests are over."""
    found = []
    server.flush_cache()
    load = server.get("/v1/loads")["loads"][0]
    names = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens")
    left = {name: load[name] for name in names if load[name]}
    if left:
        found.append(f"left when all requests are over: {left}")
    if tracebacks := re.findall(r"Traceback \(most recent call last\)(?:\n.*){0,30}", log):
        found.append(f"{len(tracebacks)} tracebacks in the log, such as {tracebacks[0][-1500:]}")
    if before is not None:
        found += Resources.read(server).leaks_since(before)
    return found


def _bar(counts: Counter, requests: int | None, started: float, minutes: float | None) -> None:
    if not sys.stderr.isatty():
        return
    passed = time.monotonic() - started
    share = counts["requests"] / requests if requests else passed / (60 * minutes)
    filled = min(SHOWN // 2, round(share * SHOWN // 2))
    print(
        f"\r[{'#' * filled:<{SHOWN // 2}}] {counts['requests']} requests, {passed:.0f} s",
        end="",
        file=sys.stderr,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--hybrid", action="store_true", help="the target with recurrent states, and pictures"
    )
    parser.add_argument("--requests", type=int, help="all in all (default 2000, unless --minutes)")
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--per-round", type=int, default=500, help="requests per server")
    parser.add_argument(
        "--known", type=int, default=300, help="greedy requests with known answers, to choose from"
    )
    parser.add_argument("--concurrency", type=int, help="default 16, or 32 with --hybrid")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only-round", type=int, help="repeat one round")
    parser.add_argument("--timeout", type=float, default=PATIENCE, help="seconds a server may take to start")
    options = parser.parse_args()
    if options.minutes is None and options.requests is None:
        options.requests = 2000
    options.concurrency = options.concurrency or (32 if options.hybrid else 16)
    with tempfile.TemporaryDirectory() as folder:
        return soak(options, Path(folder))


def _shown(totals: Counter) -> dict[str, int]:
    """Return all counts, and a zero where nothing was wrong or retracted."""
    return {**totals, "retractions": totals["retractions"], "wrong": totals["wrong"]}


def soak(options: argparse.Namespace, folder: Path) -> int:
    """Run rounds; return the exit code. folder: for files that servers read."""
    schedules = write_schedules(folder)
    pairs = Pair.hybrids(folder / "target") if options.hybrid else (DENSE,)
    known = {}
    for pair in dict.fromkeys(pairs):
        with serve(*pair.plain, env=ENVIRONMENT, timeout=options.timeout) as plain:
            known[pair] = known_requests(plain, options.known, options.seed, pair.image_tokens)
    totals, failures, started, number = Counter(), 0, time.monotonic(), options.only_round or 0

    def is_over() -> bool:
        if options.only_round is not None:
            return totals["rounds"] == 1
        if options.requests is not None and totals["requests"] >= options.requests:
            return True
        return options.minutes is not None and time.monotonic() - started > 60 * options.minutes

    def run_one(number: int) -> None:
        nonlocal failures
        seed = f"{options.seed}-{number}"
        pair = pairs[number % len(pairs)]
        configuration = Configuration.draw(random.Random(seed), pair, schedules)
        shown = shlex.join(configuration.arguments[len(pair.plain) :])
        print(f"round {number}{', pictures' * bool(pair.image_tokens)}: {shown}", flush=True)
        count = options.per_round
        if options.requests is not None:
            count = min(count, options.requests - totals["requests"])
        try:
            with serve(*configuration.arguments, env=ENVIRONMENT, timeout=options.timeout) as server:
                counts, wrong = run_round(
                    server,
                    known[pair],
                    count,
                    seed,
                    options.concurrency,
                    lambda counts: _bar(totals + counts, options.requests, started, options.minutes),
                )
        except ServerDied as error:
            counts, wrong = Counter(), [f"the server did not start: {error}"]
        totals.update(counts + Counter(rounds=1, wrong=len(wrong)))
        passed = (time.monotonic() - started) / 60
        print(
            f"  so far: {json.dumps({**_shown(totals), 'minutes': round(passed, 1)})}",
            flush=True,
        )
        for line in wrong:
            print(f"\nWRONG in round {number}: {line}", flush=True)
        if wrong:
            failures += 1
            again = (
                "--hybrid " * options.hybrid
                + f"--seed {options.seed} --known {options.known} --per-round {count} --only-round {number}"
            )
            print(f"again: python benchmark/soak.py {again} --concurrency {options.concurrency}", flush=True)

    # A process that is started in the background ignores Ctrl-C by default.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        while not is_over():
            run_one(number)
            number += 1
    except KeyboardInterrupt:
        print(f"round {number} was interrupted and is not counted", flush=True)
    figures = {**_shown(totals), "failed rounds": failures, "seed": options.seed}
    print(json.dumps({**figures, "minutes": round((time.monotonic() - started) / 60, 1)}))
    return 1 if totals["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
