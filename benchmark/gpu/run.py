"""All DFLASH measurements and checks that need a GPU, in one command.

    python benchmark/gpu/run.py                       # all parts that have no result yet
    python benchmark/gpu/run.py --time-limit 570      # stop before 570 s are over; call again to go on
    python benchmark/gpu/run.py --list
    python benchmark/gpu/run.py --only speed/qwen3-8b lossless
    python benchmark/gpu/run.py --dry-run             # print and check every server command; needs no GPU

Parts, the most wanted first: `rehearsed/*` (the bundled pairs in bf16 in the configurations that the tests
rehearse without a GPU, here with the real kernels: answers and acceptance), `speed/*` (no speculation,
SGLang's built-in DFLASH and this plugin at the shapes of real models, acceptance simulated), `profile/*` (one
cycle under the torch profiler), `tests/*` (the suite's tests marked gpu), `lossless/*` (without CUDA graphs).
Nothing is downloaded. Results go to benchmark/results/gpu.json and gpu.md.

Exit status: 0 all done; 1 something failed (see the page); 3 the time limit was reached, parts are left.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, benchmark/ is not on the path

from gpu import dry_run  # noqa: E402
from gpu.limit import OutOfTime, TimeLimit  # noqa: E402
from gpu.plans import SCRATCH, Part, all_parts  # noqa: E402
from gpu.shapes import PAIRS  # noqa: E402
from gpu.state import OtherRun, Results, machine, problems_of, versions  # noqa: E402
from serving import ROOT  # noqa: E402

RESULTS = ROOT / "benchmark" / "results"
DONE, FAILED, TIME_IS_UP = 0, 1, 3


def main() -> int:
    args = _parse_arguments()
    out = args.out.absolute()
    os.chdir(ROOT)  # servers get relative paths
    for pair in PAIRS:
        pair.write(SCRATCH / pair.name)
    every = all_parts(args.attention_backend)
    parts = [part for part in every if not args.only or part.name.startswith(tuple(args.only))]
    if not parts:
        print(f"--only {' '.join(args.only)}: no such part; --list shows them", file=sys.stderr)
        return FAILED
    if args.dry_run:
        problems = dry_run.check(parts)
        print(f"\n{len(parts)} parts, {len(problems)} problems", *problems, sep="\n")
        return FAILED if problems else DONE
    if args.list:
        _list(parts, Results(out / args.name, setting=None))
        return DONE
    gpu = machine()
    if gpu is None and args.attention_backend != "torch_native":
        print("no GPU here: --dry-run checks the commands", file=sys.stderr)
        return FAILED
    setting = {
        "machine": gpu or "no GPU",
        "versions": versions(),
        "options": {"attention_backend": args.attention_backend},
    }
    if args.restart:
        (out / args.name).with_suffix(".json").unlink(missing_ok=True)
    try:
        results = Results(out / args.name, setting)
    except OtherRun as error:
        print(error, file=sys.stderr)
        return FAILED
    results.write([part.name for part in every], " ".join(["python", "benchmark/gpu/run.py", *args.shown]))
    status = go_on(parts, results, TimeLimit(args.time_limit), args.retry_failed)
    print(f"written: {args.name}.json, {args.name}.md")
    return status


def go_on(parts: Sequence[Part], results: Results, limit: TimeLimit, retry_failed: bool = False) -> int:
    """Run pending parts one by one, record each when it ends, and return the exit status."""
    first = True
    try:
        with limit:
            for part in results.pending(parts, retry_failed):
                # The first part of a call has as much time as there will ever be.
                if not first and limit.left() < part.seconds:
                    raise OutOfTime
                print(f"{part.name} ...", flush=True)
                start = time.monotonic()
                try:
                    outcome = {"result": part.run(limit=limit)}
                except Exception as error:
                    # Recorded, shown on the page and in the exit status; other parts may work.
                    outcome = {"error": f"{type(error).__name__}: {error}"}
                except OutOfTime:
                    if first:
                        outcome = {"error": "not done within the time limit of a call (--retry-failed)"}
                        results.store(part, outcome, time.monotonic() - start)
                    raise
                results.store(part, outcome, time.monotonic() - start)
                problems = problems_of(results.data["parts"][part.name])
                print(f"{part.name}: {'; '.join(problems) or 'done'}", flush=True)
                first = False
    except OutOfTime:
        left = [part.name for part in results.pending(parts, retry_failed=False)]
        if left:
            print(f"time is up; left for the next call: {', '.join(left)}")
            return TIME_IS_UP
    records = results.data["parts"]
    return FAILED if any(problems_of(records[part.name]) for part in parts) else DONE


def _list(parts: Sequence[Part], results: Results) -> None:
    pending = {part.name for part in results.pending(parts, retry_failed=False)}
    for part in parts:
        if part.name in pending:
            print(f"{part.name:40} to do, up to {part.seconds} s")
        else:
            record = results.data["parts"][part.name]
            print(f"{part.name:40} {'FAILED' if problems_of(record) else 'done'}, {record['seconds']} s")


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="names, or how they begin")
    parser.add_argument("--list", action="store_true", help="list finished and pending parts")
    parser.add_argument("--dry-run", action="store_true", help="check every command, start nothing")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="of this call")
    parser.add_argument("--retry-failed", action="store_true", help="run parts that failed once more")
    parser.add_argument("--restart", action="store_true", help="forget all results of this name first")
    parser.add_argument(
        "--attention-backend",
        choices=("flashinfer", "triton", "fa3", "torch_native"),
        default="flashinfer",
        help="of target and draft; torch_native runs on a CPU, to try this program out",
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--name", default="gpu", help="of the files in it")
    args = parser.parse_args()
    # A machine's folders are private.
    args.shown = ["OUT" if word == str(args.out) else word for word in sys.argv[1:]]
    return args


if __name__ == "__main__":
    sys.exit(main())
