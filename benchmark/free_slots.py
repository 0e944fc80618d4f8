"""Waiting time and tokens per second with and without SGLang's delay of admissions, in one server.

    python benchmark/free_slots.py --running 8 --windows 8 --seconds 32

As many requests as may run are always in flight, and their answers have unlike lengths. A file switches the
delay in the running server, from one window of time to the next.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

from prompt_sets import humaneval_tasks
from serving import CHAT_DRAFT, CHAT_TARGET, describe_cpu, dflash_arguments, serve

from sglang_dflash.srt.speculative.cycle.observer import CycleObserver

LIMITS = (8, 16, 32, 64, 128, 192)
NO_DELAY = Path(tempfile.gettempdir(), "free-slots-no-delay")


class Switch(CycleObserver):
    """Lets the scheduler of its process delay admissions only while there is no file."""

    def __init__(self):
        from sglang.srt.managers.min_free_slots_delayer import MinFreeSlotsDelayer

        delays = MinFreeSlotsDelayer.should_delay
        MinFreeSlotsDelayer.should_delay = lambda *args, **sizes: (
            delays(*args, **sizes) and not NO_DELAY.exists()
        )


class Clients:
    """As many clients as requests may run. Each sends its next request once its last one is answered."""

    def __init__(self, url: str, count: int):
        self.url = url
        self.waits: list[tuple[float, float]] = []  # when a request was sent, seconds to its first token
        self.tokens: list[tuple[float, int]] = []  # when a chunk came, its tokens
        self.prompts = [task["prompt"] for task in humaneval_tasks()]
        self.threads = [threading.Thread(target=self.ask, args=(seed,), daemon=True) for seed in range(count)]

    def ask(self, seed: int) -> None:
        dice = random.Random(seed)
        while True:
            text = f"<|im_start|>user\n{dice.choice(self.prompts)}<|im_end|>\n<|im_start|>assistant\n"
            sampling = {"temperature": 0, "max_new_tokens": dice.choice(LIMITS)}
            body = json.dumps({"text": text, "sampling_params": sampling, "stream": True}).encode()
            headers = {"Content-Type": "application/json"}
            call = urllib.request.Request(f"{self.url}/generate", data=body, headers=headers)
            sent, had = time.monotonic(), 0
            with urllib.request.urlopen(call, timeout=300) as response:
                for line in response:
                    if not line.startswith(b"data: {"):
                        continue
                    now = time.monotonic()
                    has = json.loads(line[6:])["meta_info"]["completion_tokens"]
                    if not had:
                        self.waits.append((sent, now - sent))
                    self.tokens.append((now, has - had))
                    had = has


def window(clients: Clients, begin: float, end: float) -> tuple[list[float], float]:
    """Return the waits of requests sent in a window, and its tokens per second."""
    tokens = sum(count for at, count in [*clients.tokens] if begin <= at < end)
    return [wait for sent, wait in [*clients.waits] if begin <= sent < end], tokens / (end - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", type=int, required=True)
    parser.add_argument("--delay", type=int, required=True, help="free slots that SGLang waits for")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=30)
    args = parser.parse_args()
    observer = {"SGLANG_DFLASH_OBSERVERS": "free_slots:Switch", "PYTHONPATH": str(Path(__file__).parent)}
    flags = "--speculative-copy-ahead", "--max-running-requests", str(args.running)
    flags = *flags, "--min-free-slots-delay", str(args.delay), "--model-path", str(CHAT_TARGET)
    spans = []
    with serve(*dflash_arguments(CHAT_DRAFT), *flags, env=observer) as server:
        clients = Clients(server.url, args.running)
        for thread in clients.threads:
            thread.start()
        time.sleep(20)
        for number in range(args.windows):
            is_delayed = number % 4 in (0, 3)  # delay, none, none, delay
            NO_DELAY.unlink(missing_ok=True) if is_delayed else NO_DELAY.touch()
            begin = time.monotonic()
            time.sleep(args.seconds)
            spans.append((is_delayed, begin + 3, time.monotonic()))  # older batches have ended by then
    NO_DELAY.unlink(missing_ok=True)
    print(f"{describe_cpu()}; {args.running} running, delay {args.delay}")
    for is_delayed in (True, False):
        found = [window(clients, begin, end) for delayed, begin, end in spans if delayed == is_delayed]
        waits = sorted(wait for part, _ in found for wait in part)
        rates = [rate for _, rate in found]
        p95 = waits[int(0.95 * (len(waits) - 1))]
        print(
            f"{'delay' if is_delayed else 'none'}: {len(waits)} requests, "
            f"mean wait {statistics.mean(waits):.2f} s, p95 {p95:.2f}, max {waits[-1]:.2f}; "
            f"tokens/s {statistics.mean(rates):.1f}; "
            f"by window {', '.join(f'{rate:.1f}' for rate in rates)}; "
            f"mean waits {', '.join(f'{statistics.mean(part):.2f}' for part, _ in found)}"
        )


if __name__ == "__main__":
    sys.exit(main())
