"""Tokens per second and CPU seconds per token with and without `--speculative-record`, in one server.

    python benchmark/record_cost.py --windows 12 --requests 16 --max-new-tokens 64 [--pair tiny]

Every window sends the same requests, greedy and after an empty prefix cache, so all windows have equal work.
A file switches the record in the running server: with, without, without, with.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prompt_sets import humaneval_tasks
from serving import (
    CHAT_DRAFT,
    CHAT_TARGET,
    DFLASH2_DRAFT,
    TARGET,
    WHOLE_BLOCKS,
    Server,
    describe_cpu,
    dflash_arguments,
    serve,
)

from sglang_dflash.srt.observability.traffic import TrafficRecorder
from sglang_dflash.srt.speculative.cycle.observer import CycleObserver

PAIRS = {"smollm2": (CHAT_TARGET, CHAT_DRAFT), "tiny": (TARGET, DFLASH2_DRAFT)}
NO_RECORD = Path(tempfile.gettempdir(), "record-cost-no-record")


class Switch(CycleObserver):
    """Lets the scheduler of its process record only while there is no file."""

    def __init__(self):
        for name in ("on_cycle", "on_output"):
            setattr(TrafficRecorder, name, self.while_switched_on(getattr(TrafficRecorder, name)))

    @staticmethod
    def while_switched_on(method: Callable[..., None]) -> Callable[..., None]:
        def switched(*args: Any) -> None:
            if not NO_RECORD.exists():
                method(*args)

        return switched


def cpu_seconds(group: int) -> float:
    """Return the CPU time of all living processes of a group."""
    ticks = 0
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = file.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        if int(fields[2]) == group:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def window(server: Server, requests: list[dict[str, Any]], running: int) -> tuple[int, float, float]:
    """Answer all requests. Return their tokens, seconds and CPU seconds."""
    server.flush_cache()
    began, used = time.monotonic(), cpu_seconds(server.process.pid)
    answers = server.generate_many(requests, running)
    seconds, used = time.monotonic() - began, cpu_seconds(server.process.pid) - used
    return sum(answer["meta_info"]["completion_tokens"] for answer in answers), seconds, used


def ratio(name: str, with_record: list[float], without: list[float]) -> str:
    """Describe the mean ratio of neighbouring windows, with its standard error."""
    ratios = [one / other for one, other in zip(with_record, without, strict=True)]
    error = statistics.stdev(ratios) / len(ratios) ** 0.5
    return f"{name}: with / without {statistics.mean(ratios):.4f}, standard error {error:.4f}"


def listed(numbers: list[float]) -> str:
    return ", ".join(f"{number:.2f}" for number in numbers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pair", choices=PAIRS, default="smollm2")
    parser.add_argument("--windows", type=int, default=12, help="an even number")
    parser.add_argument("--requests", type=int, default=16, help="of each window")
    parser.add_argument("--running", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    args = parser.parse_args()
    prompts = [task["prompt"] for task in humaneval_tasks()[: args.requests]]
    sampling = {"temperature": 0, "max_new_tokens": args.max_new_tokens}
    requests = [{"text": prompt, "sampling_params": sampling} for prompt in prompts]
    target, draft = PAIRS[args.pair]
    flags = "--model-path", str(target), WHOLE_BLOCKS, "--max-running-requests", str(args.running)
    observer = {"SGLANG_DFLASH_OBSERVERS": "record_cost:Switch", "PYTHONPATH": str(Path(__file__).parent)}
    found: dict[bool, list[tuple[int, float, float]]] = {True: [], False: []}
    NO_RECORD.unlink(missing_ok=True)
    with (
        tempfile.TemporaryDirectory() as record,
        serve(
            *dflash_arguments(draft), *flags, "--speculative-record", record, env=observer, timeout=900
        ) as server,
    ):
        window(server, requests, args.running)  # nothing is compiled or allocated later
        for number in range(args.windows):
            is_recorded = number % 4 in (0, 3)
            NO_RECORD.unlink(missing_ok=True) if is_recorded else NO_RECORD.touch()
            found[is_recorded].append(window(server, requests, args.running))
        NO_RECORD.unlink(missing_ok=True)
        counts = server.get("/server_info")["internal_states"][0]["speculative_record"]
    print(f"{describe_cpu()}; {args}")
    print(f"record: {counts['requests']} requests, {counts['tokens']} tokens, {counts['dropped']} dropped")
    print(f"{found[True][0][0]} tokens a window")
    rates = [[tokens / seconds for tokens, seconds, _ in found[kind]] for kind in (True, False)]
    costs = [[1000 * used / tokens for tokens, _, used in found[kind]] for kind in (True, False)]
    for name, (with_record, without) in {"tokens/s": rates, "CPU ms a token": costs}.items():
        print(f"{name}: with {listed(with_record)}; without {listed(without)}")
        print(ratio(name, with_record, without))


if __name__ == "__main__":
    sys.exit(main())
