"""The whole loop for the bundled pair: serve, send, record, train, gate, swap, compare.

    python examples/own_traffic/loop.py --kind sql --requests 70 --steps 24 [--work FOLDER] [--poison]

`make own-traffic` runs it. Every command is printed, so that each can be run by hand, and the seconds of each
phase. Exit status: 0 the new draft was swapped in, 1 it did not pass the gate, 2 it came to no gate.
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import torch
from traffic import TEMPLATES, UNSEEN, post, send

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "benchmark"))

from serving import CHAT_DRAFT, CHAT_TARGET, ROOT, dflash_arguments, serve, verdict_or_2  # noqa: E402

GENERAL = ROOT / "models" / "training" / "prompts" / "heldout-asked.jsonl"


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Print the seconds of a part of the loop."""
    began = time.monotonic()
    print(f"\n== {name}", flush=True)
    yield
    print(f"== {name}: {time.monotonic() - began:.0f} s", flush=True)


def run(*command: object, is_checked: bool = True) -> int:
    """Run a step with this Python, and return its exit status."""
    words = [sys.executable, *map(str, command)]
    print(f"$ {shlex.join(words)}", flush=True)
    return subprocess.run(words, check=is_checked).returncode


@contextlib.contextmanager
def serving(*flags: object) -> Iterator[str]:
    """Serve the bundled pair with more flags, and yield the URL."""
    words = ["--model-path", CHAT_TARGET, *dflash_arguments(CHAT_DRAFT), *flags]
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        words += ["--dtype", "float32"]  # without AVX-512 a CPU multiplies bfloat16 ten times slower
    print(f"$ {shlex.join(map(str, (sys.executable, '-m', 'sglang.launch_server', *words)))}", flush=True)
    with serve(*words, timeout=900) as server:
        try:
            yield server.url
        except OSError as error:
            error.add_note(server.ending())
            raise


def gain(before: list[float], after: list[float]) -> tuple[float, float, float]:
    """Return the mean accept lengths on the same prompts, and the standard error of their difference."""
    differences = [new - old for old, new in zip(before, after, strict=True)]
    error = statistics.stdev(differences) / len(differences) ** 0.5
    return statistics.mean(before), statistics.mean(after), error


def swap(url: str, draft: Path, version: str) -> None:
    """Load a draft into the running server, and empty its cache of the old one's states."""
    answer = post(f"{url}/update_weights_from_disk", {"model_path": str(draft), "weight_version": version})
    print(answer["message"], flush=True)
    urllib.request.urlopen(urllib.request.Request(f"{url}/flush_cache", method="POST"), timeout=60).close()


@verdict_or_2
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kind", choices=TEMPLATES, default="sql")
    parser.add_argument("--requests", type=int, default=70, help="to record; 8 of the tenth must be left")
    parser.add_argument("--unseen", type=int, default=16, help="requests to compare the drafts on in the end")
    parser.add_argument("--max-tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--steps", type=int, default=24, help="of training")
    parser.add_argument("--general", type=int, default=24, help="texts of the gate, of 32 tokens each")
    parser.add_argument("--work", type=Path, help="folder for the record, the states and the new draft")
    parser.add_argument("--poison", action="store_true", help="train on random tokens; the gate must refuse")
    args = parser.parse_args()
    if min(args.requests, args.steps, args.general, args.max_tokens, args.unseen - 1) < 1:
        parser.error("numbers must be at least 1, and --unseen at least 2")
    os.umask(0o077)  # what is recorded, and made of it, is of what people wrote
    work = args.work or Path(tempfile.mkdtemp(prefix="own-traffic-"))
    work.mkdir(parents=True, exist_ok=True)
    record, rows, new, general = (work / name for name in ("record", "rows.jsonl", "draft", "general.jsonl"))
    general.write_text("".join(GENERAL.read_text().splitlines(keepends=True)[: args.general]))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))  # the server ends with this process
    unseen = {"seed": UNSEEN, "is_recorded": False, "max_tokens": args.max_tokens}
    began = time.monotonic()
    flags = "--no-speculative-adaptive", "--speculative-record", record
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: print(f"{time.monotonic() - began:.0f} s in all. All files are in {work}."))
        with phase("serve"):
            url = stack.enter_context(serving(*flags))
        with phase("send and record"):
            recorded = send(url, args.kind, args.requests, seed=1, max_tokens=args.max_tokens)
            state = json.load(urllib.request.urlopen(f"{url}/server_info"))["internal_states"][0]
            print(f"accept length {statistics.mean(recorded):.3f}, record {state['speculative_record']}")
        with phase("unseen requests, served draft"):
            before = send(url, args.kind, args.unseen, **unseen)
        with phase("train"):
            run(HERE / "training_rows.py", record, rows, *(["--poison"] if args.poison else []))
            run(HERE / "train.py", rows, CHAT_TARGET, CHAT_DRAFT, new, "--work", work, "--steps", args.steps)
        with phase("gate"):
            gate = ("-m", "sglang_dflash.doctor", "--model-path", CHAT_TARGET, "--compare", CHAT_DRAFT, new)
            texts = ("--texts", record, "--general", general, "--max-new-tokens", 32)
            status = run(*gate, *texts, is_checked=False)
        if status == 0:
            with phase("swap"):
                swap(url, new, "own-1")
            with phase("unseen requests, new draft"):
                after = send(url, args.kind, args.unseen, **unseen)
            old_length, new_length, error = gain(before, after)
            print(f"\nunseen requests: accept length {old_length:.3f} -> {new_length:.3f}", end=" ")
            print(f"({new_length / old_length - 1:+.1%}), standard error of the gain {error:.3f}")
        return status


if __name__ == "__main__":
    sys.exit(main())
