"""All DFLASH measurements and checks that need a GPU, in one command.

    python benchmark/gpu/run.py --plan A              # one plan, within its time limit; call again to go on
    python benchmark/gpu/run.py                       # all plans, everything that has no result yet
    python benchmark/gpu/run.py --estimate            # what the plans take on a GPU
    python benchmark/gpu/run.py --list
    python benchmark/gpu/run.py --only speed/fa3/qwen3-8b/ours rehearsed
    python benchmark/gpu/run.py --dry-run             # print and check every server command; needs no GPU
    python benchmark/gpu/run.py --plan A --rehearse   # run the plan on a CPU with tiny models

benchmark/gpu/README.md describes plans and results. Nothing is downloaded. Results go to
benchmark/results/gpu.json and gpu.md, after every step.

Exit status: 0 all done; 1 something failed (see the page); 3 the time limit was reached, parts are left.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, benchmark/ is not on the path

from gpu import dry_run, plans  # noqa: E402
from gpu.lane import Job, Lane  # noqa: E402
from gpu.limit import OutOfTime, TimeLimit  # noqa: E402
from gpu.measure import GPU_SIZES, REHEARSAL_SIZES, Running, Sizes, StartClock, running  # noqa: E402
from gpu.plans import Builder, Check, Part, Plan, Visit  # noqa: E402
from gpu.servers import SCRATCH  # noqa: E402
from gpu.shapes import PAIRS, shrunk  # noqa: E402
from gpu.state import OtherRun, Results, machine, problems_of, versions  # noqa: E402
from serving import ROOT  # noqa: E402

RESULTS = ROOT / "benchmark" / "results"
DONE, FAILED, TIME_IS_UP = 0, 1, 3
LOG_END = 2000  # characters of a check's output that an error carries
SHOWN = 300  # characters of a problem that are printed


def main() -> int:
    args = _parse_arguments()
    out = args.out.absolute()
    os.chdir(ROOT)  # servers get relative paths
    sizes = REHEARSAL_SIZES if args.rehearse else GPU_SIZES
    for pair in PAIRS:
        (shrunk(pair) if args.rehearse else pair).write(SCRATCH / pair.name)
    every = Builder(sizes).plans()
    if args.check:
        return _run_check(every, *args.check)
    chosen = [_filtered(plan, args.only) for plan in every if args.plan in (None, plan.name)]
    parts = [part for plan in chosen for part in parts_of(plan)]
    if not parts:
        print(f"--only {' '.join(args.only)}: no such part; --list shows them", file=sys.stderr)
        return FAILED
    if args.estimate:
        print(plans.estimate_table(chosen))
        return DONE
    if args.dry_run:
        shown = [visit.steps[0] for plan in chosen for visit in plan.visits]
        shown += [check for plan in chosen for check in plan.checks]
        problems = dry_run.check(shown)
        print(f"\n{len(shown)} servers and checks, {len(problems)} problems", *problems, sep="\n")
        return FAILED if problems else DONE
    name = args.name or ("gpu-rehearsal" if args.rehearse else "gpu")
    if args.list:
        _list(parts, Results(out / name, setting=None))
        return DONE
    gpu = machine()
    if gpu is None and not args.rehearse:
        print("no GPU here: --dry-run checks the commands, --rehearse tries a plan out", file=sys.stderr)
        return FAILED
    setting = {
        "machine": "a rehearsal without a GPU: its figures mean nothing" if args.rehearse else gpu,
        "versions": versions(),
    }
    if args.restart:
        (out / name).with_suffix(".json").unlink(missing_ok=True)
    try:
        results = Results(out / name, setting)
    except OtherRun as error:
        print(error, file=sys.stderr)
        return FAILED
    invocation = " ".join(["python", "benchmark/gpu/run.py", *args.shown])
    results.write([part.name for plan in every for part in parts_of(plan)], invocation)
    seconds = args.time_limit or (chosen[0].seconds if args.plan else None)
    status = go_on(
        *([visit for plan in chosen for visit in plan.visits], [c for plan in chosen for c in plan.checks]),
        *(results, TimeLimit(seconds), sizes, out / "traces"),
        width=args.lanes,
        afterwards=_left_by_others(every, chosen) if args.plan and not args.only else (),
        retry_failed=args.retry_failed,
    )
    print(f"written: {name}.json, {name}.md")
    return status


def _left_by_others(every: Sequence[Plan], chosen: Sequence[Plan]) -> list[Check]:
    """List the checks of the plans before the chosen one."""
    names = [plan.name for plan in every]
    return [check for plan in every[: names.index(chosen[0].name)] for check in plan.checks]


def parts_of(plan: Plan) -> list[Part]:
    return [*(step for visit in plan.visits for step in visit.steps), *plan.checks]


def go_on(
    visits: Sequence[Visit],
    checks: Sequence[Check],
    results: Results,
    limit: TimeLimit,
    sizes: Sizes,
    traces: Path,
    *,
    width: int = 3,
    retry_failed: bool = False,
    afterwards: Sequence[Check] = (),
) -> int:
    """Visit servers one by one, checks beside their starts; return the exit status.

    Each result is recorded at once, so a call that is stopped is continued by the next. afterwards: checks
    for which there may be time left; the status does not depend on them.
    """
    parts: list[Part] = [*(step for visit in visits for step in visit.steps), *checks]
    jobs = [_job(check, results, sizes) for check in results.pending([*checks, *afterwards], retry_failed)]
    try:
        with limit, Lane(jobs, width) as lane:
            for visit in visits:
                steps = results.pending(visit.steps, retry_failed)
                wanted = [step.seconds for step in steps if step is not visit.steps[0]]
                if not wanted:
                    continue  # a start is measured with what needs it
                if limit.left() < visit.start_seconds + min(wanted):
                    print(f"{visit.name}: not started, {limit.left():.0f} s are left", flush=True)
                    continue
                print(f"{visit.name} ...", flush=True)
                _visit(visit, steps, lane, results, limit, sizes, traces)
            if lane.left():
                print(f"servers done; still checking: {', '.join(lane.left())}", flush=True)
            lane.wait()
    except OutOfTime:
        pass
    left = [part.name for part in results.pending(parts, retry_failed=False)]
    if left:
        print(f"time is up; left for the next call: {', '.join(left)}")
        return TIME_IS_UP
    records = results.data["parts"]
    return FAILED if any(problems_of(records[part.name]) for part in parts) else DONE


def _visit(visit: Visit, steps, lane: Lane, results: Results, limit: TimeLimit, sizes: Sizes, traces) -> None:
    """Start the server, stop the checks, and take the steps for which time is left.

    A step that fails does not keep the others from trying, unless its server is gone.
    """
    clock, left = StartClock(), list(steps)
    try:
        with running(visit.spec, limit, clock) as server, lane.paused():
            session = Running(server, visit.spec, sizes, traces, clock.phases())
            if visit.steps[0] not in left:
                left.insert(0, visit.steps[0])
            while left:
                step = left[0]
                if limit.left() < step.seconds:
                    print(f"{step.name}: not begun, {limit.left():.0f} s are left", flush=True)
                    left.pop(0)
                    continue
                begun = time.monotonic()
                try:
                    outcome = {"result": step.run(session)}
                except Exception as error:
                    if server.process.poll() is not None:
                        raise  # with the server's log, for this step and those after it
                    # Recorded, shown on the page and in the exit status.
                    outcome = {"error": f"{type(error).__name__}: {error}"}
                left.pop(0)
                _record(results, step, outcome, time.monotonic() - begun)
    except Exception as error:
        for step in left:
            _record(results, step, {"error": f"{type(error).__name__}: {error}"}, 0.0)


def _record(results: Results, part: Part, outcome: dict, seconds: float) -> None:
    results.store(part, outcome, seconds)
    problems = problems_of(results.data["parts"][part.name])
    said = " ".join("; ".join(problems).split())[:SHOWN] or "done"  # the whole of it is in the results
    print(f"{part.name}: {said}, {seconds:.1f} s", flush=True)


def _job(check: Check, results: Results, sizes: Sizes) -> Job:
    """Prepare a check as a process of its own, which leaves its outcome in a file."""
    folder = SCRATCH / "checks" / check.name.replace("/", "-")
    folder.mkdir(parents=True, exist_ok=True)
    outcome, log = folder / "outcome.json", folder / "log"
    outcome.unlink(missing_ok=True)
    command = ["nice", sys.executable, "benchmark/gpu/run.py", "--check", check.name, str(outcome)]
    command += ["--rehearse"] if sizes.is_rehearsal else []

    def start() -> subprocess.Popen:
        with open(log, "wb") as output:
            return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)

    def finish(code: int, seconds: float) -> None:
        found = {"error": f"ended with {code}: {log.read_text(errors='replace')[-LOG_END:]}"}
        if outcome.exists():
            found = json.loads(outcome.read_text())
        _record(results, check, found, seconds)

    return Job(check.name, start, finish)


def _run_check(every: Sequence[Plan], name: str, outcome: str) -> int:
    """Run one check in this process and write its outcome."""
    [check] = [check for plan in every for check in plan.checks if check.name == name]
    try:
        found = {"result": check.run(limit=TimeLimit(None))}
    except Exception as error:
        # The process that started this one records it.
        found = {"error": f"{type(error).__name__}: {error}"}
    Path(outcome).write_text(json.dumps(found))
    return DONE


def _filtered(plan: Plan, only: Sequence[str]) -> Plan:
    """Keep the parts whose names begin with one of `only`; a visit keeps its start."""
    if not only:
        return plan
    beginnings = tuple(only)
    visits = []
    for visit in plan.visits:
        steps = tuple(step for step in visit.steps[1:] if step.name.startswith(beginnings))
        if steps:
            visits.append(Visit(visit.name, visit.spec, (visit.steps[0], *steps), visit.start_seconds))
    checks = tuple(check for check in plan.checks if check.name.startswith(beginnings))
    return Plan(plan.name, tuple(visits), checks, plan.seconds)


def _list(parts: Sequence[Part], results: Results) -> None:
    pending = {part.name for part in results.pending(parts, retry_failed=False)}
    for part in parts:
        if part.name in pending:
            print(f"{part.name:44} to do, about {part.seconds:.0f} s")
        else:
            record = results.data["parts"][part.name]
            print(f"{part.name:44} {'FAILED' if problems_of(record) else 'done'}, {record['seconds']} s")


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plan", choices=("A", "B", "C", "rest"), help="default: all, in this order")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="names, or how they begin")
    parser.add_argument("--estimate", action="store_true", help="print the plans' estimated GPU time")
    parser.add_argument("--list", action="store_true", help="list finished and pending parts")
    parser.add_argument("--dry-run", action="store_true", help="check every command, start nothing")
    parser.add_argument("--rehearse", action="store_true", help="run on a CPU, with tiny models")
    parser.add_argument(
        "--time-limit", type=float, metavar="SECONDS", help="of this call; default: the plan's"
    )
    parser.add_argument("--lanes", type=int, default=3, help="checks at a time")
    parser.add_argument("--retry-failed", action="store_true", help="run parts that failed once more")
    parser.add_argument("--restart", action="store_true", help="forget all results of this name first")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results and traces")
    parser.add_argument("--name", help="of the files in it; default: gpu, or gpu-rehearsal")
    parser.add_argument("--check", nargs=2, metavar=("NAME", "FILE"), help="run one check; for this program")
    args = parser.parse_args()
    # A machine's folders are private.
    args.shown = ["OUT" if word == str(args.out) else word for word in sys.argv[1:]]
    return args


if __name__ == "__main__":
    sys.exit(main())
