"""Everything of DFLASH that needs a GPU: one list of parts, most valuable first.

    python benchmark/gpu/run.py --minutes 9               # what fits into 9 minutes; call again to go on
    python benchmark/gpu/run.py --list                    # the parts, and what fits into 28 and 12 minutes
    python benchmark/gpu/run.py --rehearse --minutes 9    # the same list on a CPU, with small models

benchmark/gpu/README.md describes the parts. Nothing is downloaded. Every figure is a file in the folder
--state, and page.md there shows them all. A figure is measured once: to measure it again, delete its file.

Exit status: 0 all done; 1 something failed (see the page); 3 parts are left.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, benchmark/ is not on the path

from gpu import page  # noqa: E402
from gpu.limit import OutOfTime, TimeLimit  # noqa: E402
from gpu.measure import GPU_SIZES, REHEARSAL_SIZES, Session, Sizes, running  # noqa: E402
from gpu.parts import Part, Step, fitting, list_of_parts  # noqa: E402
from gpu.servers import SCRATCH  # noqa: E402
from gpu.shapes import PAIRS, shrunk  # noqa: E402
from gpu.state import Figures, OtherRun, machine, problems_of, versions, write  # noqa: E402
from serving import ROOT  # noqa: E402

DONE, FAILED, PARTS_ARE_LEFT = 0, 1, 3
SHOWN = 300  # characters of a problem that are printed
MOST_OF_ESTIMATE = 3  # a part that takes so many times its estimate hangs


def main() -> int:
    args = _parse_arguments()
    os.chdir(ROOT)  # servers get relative paths
    sizes = REHEARSAL_SIZES if args.rehearse else GPU_SIZES
    parts = list_of_parts(sizes)
    if args.list:
        print(table(parts))
        return DONE
    gpu = machine()
    if gpu is None and not args.rehearse:
        print("no GPU here: --rehearse runs the list on a CPU", file=sys.stderr)
        return FAILED
    for pair in PAIRS:
        (shrunk(pair) if args.rehearse else pair).write(SCRATCH / pair.name)
    name = "a rehearsal without a GPU: its figures mean nothing" if args.rehearse else gpu
    try:
        figures = Figures(args.state, {"machine": name, "versions": versions()})
    except OtherRun as error:
        print(error, file=sys.stderr)
        return FAILED
    return go_on(parts, figures, TimeLimit(args.minutes and 60 * args.minutes), sizes)


def go_on(parts: Sequence[Part], figures: Figures, limit: TimeLimit, sizes: Sizes) -> int:
    """Run the parts one after the other, each if its estimate fits; return the exit status."""
    for part in parts:
        steps = [step for step, name in zip(part.steps, part.figures()) if name not in figures.records]
        if not steps:
            continue
        if part.seconds(steps) > limit.left():
            continue
        if part.needs is not None and "result" not in figures.records.get(part.needs, {}):
            continue
        print(f"{part.name} ...", flush=True)
        try:
            with limit.at_most(MOST_OF_ESTIMATE * part.seconds(steps)):
                _run(part, steps, figures, limit, sizes)
        except OutOfTime:
            if limit.left() > 0:  # else the next call tries again
                _fail(part, steps, figures, f"took more than {MOST_OF_ESTIMATE} times its estimate")
        show(parts, figures)
    show(parts, figures)
    names = [name for part in parts for name in part.figures()]
    if left := page.parts_of(name for name in names if name not in figures.records):
        print(f"left for the next call: {', '.join(left)}")
        return PARTS_ARE_LEFT
    return FAILED if any(problems_of(figures.records[name]) for name in names) else DONE


def show(parts: Sequence[Part], figures: Figures) -> None:
    planned = [name for part in parts for name in part.figures()]
    write(figures.folder / "page.md", page.markdown(figures.setting, figures.records, planned))


def _run(part: Part, steps: Sequence[Step], figures: Figures, limit: TimeLimit, sizes: Sizes) -> None:
    """Take the steps that have no figure yet, with the part's server.

    A step that fails does not keep the others from trying, unless its server is gone.
    """
    try:
        if part.spec is None:
            for step in steps:
                _take(part, step, Session(sizes, limit, figures))
            return
        if part.prepare is not None:
            part.prepare()
        begun = time.monotonic()
        with running(part.spec, limit) as server:
            started = time.monotonic() - begun
            session = Session(sizes, limit, figures, server, part.spec, started, part.says)
            if part.steps[0] not in steps:
                part.steps[0].run(session)  # the first requests compile here too; their figure is known
            for step in steps:
                _take(part, step, session)
    except Exception as error:
        _fail(part, steps, figures, f"{type(error).__name__}: {error}")


def _take(part: Part, step: Step, session: Session) -> None:
    begun = time.monotonic()
    try:
        outcome = {"result": step.run(session)}
    except Exception as error:
        if session.server is not None and session.server.process.poll() is not None:
            raise  # with the server's log, for this step and those after it
        # Recorded, shown on the page and in the exit status.
        outcome = {"error": f"{type(error).__name__}: {error}"}
    _keep(part, step, session.figures, outcome, time.monotonic() - begun)


def _fail(part: Part, steps: Sequence[Step], figures: Figures, why: str) -> None:
    """Record why the steps without a figure have none."""
    for step in steps:
        if f"{part.name}/{step.name}" not in figures.records:
            _keep(part, step, figures, {"error": why}, 0.0)


def _keep(part: Part, step: Step, figures: Figures, outcome: dict, seconds: float) -> None:
    name, command = f"{part.name}/{step.name}", part.spec and part.spec.command()
    problems = figures.keep(name, outcome, seconds, command)
    said = " ".join("; ".join(problems).split())[:SHOWN] or "done"  # the whole of it is in the figure
    print(f"{name}: {said}, {seconds:.1f} s", flush=True)


def table(parts: Sequence[Part]) -> str:
    """Tabulate the parts with their estimates, and what two calls of different length start."""
    calls = {minutes: fitting(parts, 60 * minutes) for minutes in (28, 12)}
    lines = [f"{'seconds':>7}  {'28 min':6}  {'12 min':6}  part"]
    for part in parts:
        marks = "  ".join(f"{'x' if part in chosen else '':6}" for chosen in calls.values())
        lines.append(f"{part.seconds():7.0f}  {marks}  {part.name}")
    sums = [sum(part.seconds() for part in chosen) for chosen in (parts, *calls.values())]
    lines.append(f"{sums[0]:7.0f}  {sums[1]:6.0f}  {sums[2]:6.0f}  seconds in all")
    return "\n".join(lines)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, help="of this call; default: no limit")
    parser.add_argument("--rehearse", action="store_true", help="run on a CPU, with small models")
    parser.add_argument("--list", action="store_true", help="print the parts and their estimates")
    parser.add_argument("--state", type=Path, help="folder of the figures; default: below build/gpu")
    args = parser.parse_args()
    default = ROOT / SCRATCH / ("rehearsal" if args.rehearse else "figures")
    args.state = (args.state or default).absolute()
    return args


if __name__ == "__main__":
    sys.exit(main())
